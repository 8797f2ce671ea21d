"""Wan 2.1 text-to-video: diffusers' transformer, UMT5, the video decoder, and its weights from disk."""

DEFAULT_REPOSITORY = "Wan-AI/Wan2.1-T2V-1.3B-Diffusers"
