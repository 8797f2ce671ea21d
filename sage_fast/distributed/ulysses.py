"""Ulysses sequence parallelism: P ranks share the tokens of a video, and inside the attention its heads.

Source: Jacobs et al., "DeepSpeed Ulysses" (arXiv 2309.14509).

Shapes: B batch, N video tokens, n video tokens of a share, L text tokens, D width, P ranks.
"""

from typing import NamedTuple

from sage_fast.policy.block import Checkpointing


class LayerBytes(NamedTuple):
    """Bytes that a rank sends to others in one layer."""

    forward: int
    """Of the two all-to-alls of a forward pass, with or without gradients."""
    backward: int
    """Of the two all-to-alls of a backward pass, and of the forward's where checkpointing repeats them."""


def share_of(num_video: int, degree: int) -> int:
    """n, the video tokens of every share: N / P, rounded up."""
    return -(-num_video // degree)


def all_to_all_bytes(
    *,
    batch: int,
    num_video: int,
    num_text: int,
    width: int,
    degree: int,
    itemsize: int,
    checkpointing: Checkpointing = "none",
    last: bool = False,
) -> LayerBytes:
    """What a rank sends to the P - 1 others in one layer; of each buffer 1/P stays where it is.

        forward    (P - 1)/P * itemsize * B * (3 n D  +  n D + L D)          q, k, v; then the result
        backward   (P - 1)/P * itemsize * B * (5 n D + L D  +  3 n D)        dout, q, k, v, out; then dq, dk, dv

    L D is the text's result and its gradient, which the last layer does not have. Checkpointing "full" does the
    forward's part once more in the backward.

    Args:
        batch: B. num_video: N. num_text: L. width: D, all heads. degree: P. itemsize: bytes of an element.
        checkpointing: of the blocks, see `policy/block.py`.
        last: whether it is the last layer.
    """
    share = share_of(num_video, degree)
    text = 0 if last else num_text
    unit = batch * width * itemsize // degree * (degree - 1)
    forward = unit * (4 * share + text)
    backward = unit * (8 * share + text)
    return LayerBytes(forward, backward + forward if checkpointing == "full" else backward)
