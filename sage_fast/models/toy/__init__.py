"""The toy world: the same system as the 8.3 B model, small enough for a laptop, with a known data manifold.

`renderer` draws the legal videos, names them, measures the distance of a sample from them and turns videos to latents;
`pretrain` makes the base model and `components` loads it.
"""
