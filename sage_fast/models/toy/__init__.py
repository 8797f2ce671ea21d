"""The toy world: the same system as the 8.3 B model, small enough for a laptop, with a
known data manifold.

`renderer` draws the legal videos, names them, and measures the distance of a sample
from them. `components` turns videos to latents, and loads the base model, which
`experiments/pretrain.py` of the repository made.
"""
