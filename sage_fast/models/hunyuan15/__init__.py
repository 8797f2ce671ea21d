"""HunyuanVideo-1.5: the fused transformer, prompt encoders, video decoder, and its weights from disk."""

from contextlib import suppress

from sage_fast.config.files import loads
from sage_fast.models.hub import local_folder

DEFAULT_REPOSITORY = "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_t2v"

TEXT_PARTS = ("transformer", "vae", "text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2")
PICTURE_PARTS = ("image_encoder", "feature_extractor")
"""Folders of every model, and of image-to-video alone."""

IMAGE_TO_VIDEO = "HunyuanVideo15ImageToVideoPipeline"
"""Class in the model_index.json of weights that animate a picture. Nothing else says it: the transformers of both kinds
are of one shape, and published text-to-video ones have task_type i2v in their config.json."""


def animates_pictures(path: str | None) -> bool:
    """Tell whether a folder of weights is of image-to-video, or a repository that is not here, by its name."""
    folder = local_folder(path) if path else None
    # Nothing is here to read yet, and published repositories have t2v or i2v in their names.
    if path is None or folder is None:
        return path is not None and "i2v" in path
    with suppress(OSError, ValueError):  # missing or damaged: the loader's checks name it
        return bool(loads((folder / "model_index.json").read_text("utf-8"))["_class_name"] == IMAGE_TO_VIDEO)
    return False
