"""HunyuanVideo-1.5: the fused transformer, prompt encoders, video decoder, and its
weights from disk.
"""

from sage_fast.models.hub import stored_value

DEFAULT_REPOSITORY = "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_t2v"

TEXT_PARTS = (
    "transformer",
    "vae",
    "text_encoder",
    "tokenizer",
    "text_encoder_2",
    "tokenizer_2",
)
PICTURE_PARTS = ("image_encoder", "feature_extractor")
"""Folders of every model, and of image-to-video alone."""

IMAGE_TO_VIDEO = "HunyuanVideo15ImageToVideoPipeline"
"""Class in the model_index.json of weights that animate a picture. Nothing else says
it: the transformers of both kinds are of one shape, and published text-to-video ones
have task_type i2v in their config.json.
"""


def animates_pictures(path: str) -> bool:
    """Tell whether weights are of image-to-video: by their files where these are here,
    else by the name.
    """
    kind = stored_value(path, "model_index.json", "_class_name")
    return "i2v" in path if kind is None else kind == IMAGE_TO_VIDEO


def likely_repository(path: str) -> str:
    """The published repository that a path most likely means: by its files where they
    are here, else by its name.
    """
    size = stored_value(path, "transformer/config.json", "target_size")
    large = "720p" in path if size is None else size == 960
    name = DEFAULT_REPOSITORY.replace("480p", "720p") if large else DEFAULT_REPOSITORY
    return name.replace("t2v", "i2v") if animates_pictures(path) else name
