"""Wan 2.1 and 2.2: diffusers' transformer, or two of them, UMT5, the video decoder, and
their weights from disk.
"""

from sage_fast.models.hub import stored_value

DEFAULT_REPOSITORY = "Wan-AI/Wan2.1-T2V-1.3B-Diffusers"
LARGE_REPOSITORY = "Wan-AI/Wan2.1-T2V-14B-Diffusers"
PICTURE_REPOSITORY = "Wan-AI/Wan2.1-I2V-14B-480P-Diffusers"
PICTURE_720P_REPOSITORY = PICTURE_REPOSITORY.replace("480P", "720P")
"""Of the same shape, so that only a name tells them apart."""

SECOND_REPOSITORY = "Wan-AI/Wan2.2-TI2V-5B-Diffusers"
PAIR_REPOSITORY = "Wan-AI/Wan2.2-T2V-A14B-Diffusers"
"""Of two experts."""


def likely_repository(path: str) -> str:
    """The published repository that a path most likely means: by its transformer where
    that is here, else by name.
    """
    file = "transformer/config.json"
    layers = stored_value(path, file, "num_layers")
    channels = stored_value(path, file, "out_channels")
    name = path.lower()
    ratio = stored_value(path, "model_index.json", "boundary_ratio")
    if ratio is not None or "a14b" in name:
        return PAIR_REPOSITORY
    if "5b" in name if channels is None else channels > 16:
        return SECOND_REPOSITORY
    if "i2v" in name if layers is None else stored_value(path, file, "image_dim"):
        return PICTURE_720P_REPOSITORY if "720p" in name else PICTURE_REPOSITORY
    large = "14b" in name if layers is None else layers > 30
    return LARGE_REPOSITORY if large else DEFAULT_REPOSITORY
