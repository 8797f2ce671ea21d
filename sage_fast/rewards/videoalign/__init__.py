"""VideoAlign (KwaiVGI/VideoReward): visual quality, motion quality and text alignment
by a Qwen2-VL model.
"""
