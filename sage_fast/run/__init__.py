"""A training run as its user sees it: directory, resume, metrics, media."""
