"""The toy world: the same system as the 8.3 B model, small enough for a laptop, with a known data manifold.

`renderer` draws the legal videos, `captions` names them, `codec` stands in for the VAE, `manifold` measures
the distance of a sample from the legal videos, `pretrain` makes the base model and `components` loads it.
"""
