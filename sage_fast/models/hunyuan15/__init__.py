"""HunyuanVideo-1.5: the fused transformer, prompt encoders, video decoder, and its weights from disk."""

DEFAULT_REPOSITORY = "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_t2v"
