"""SAGE-Fast: GRPO post-training of HunyuanVideo-1.5. Importing this package loads nothing heavy."""

__version__ = "0.1.0"
