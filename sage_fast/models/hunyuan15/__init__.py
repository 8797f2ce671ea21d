"""HunyuanVideo-1.5: the fused transformer, prompt encoders, video decoder, and its weights from disk."""
