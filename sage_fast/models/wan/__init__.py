"""Wan 2.1 text-to-video: diffusers' transformer, UMT5, the video decoder, and its
weights from disk.
"""

from sage_fast.models.hub import stored_value

DEFAULT_REPOSITORY = "Wan-AI/Wan2.1-T2V-1.3B-Diffusers"
LARGE_REPOSITORY = "Wan-AI/Wan2.1-T2V-14B-Diffusers"


def likely_repository(path: str) -> str:
    """The published repository that a path most likely means: by its transformer where
    that is here, else by name.
    """
    layers = stored_value(path, "transformer/config.json", "num_layers")
    large = "14b" in path.lower() if layers is None else layers > 30
    return LARGE_REPOSITORY if large else DEFAULT_REPOSITORY
