"""Attention of any transformer: the backends, and the libraries some of them need."""
