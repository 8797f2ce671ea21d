"""Attention over video and text together, on one device or over the ranks that share a
video.

Shapes: B batch, N video tokens, L text tokens, H heads, D head dim.
"""

from typing import Protocol

from torch import Tensor


class JointAttention(Protocol):
    """Attention over the joint sequence. Under sequence parallelism it is where tokens
    and heads are exchanged.
    """

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, num_video: int
    ) -> tuple[Tensor, Tensor]:
        """(out, lse) of this rank's tokens: q, k, v (B, N + L, H, D) with the video
        tokens first.

        q may hold the video tokens alone; where it holds all, out has text rows too.
        lse is whatever `backward` needs of it.
        """
        ...

    def backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        num_video: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of q, k and v.

        Under sequence parallelism gradients of the text are this rank's part of them:
        the ranks' parts add up.
        """
        ...


class SequenceLayout(Protocol):
    """Layout of the video tokens that this rank computes under sequence parallelism;
    text tokens are on every rank.

    The blocks then see a share of the tokens, with the rotary tables of that share, and
    a `JointAttention` that exchanges tokens and heads. Shares have as many tokens on
    every rank, so the last ones may be padded.
    """

    def split(self, tokens: Tensor, dim: int) -> Tensor:
        """This rank's share of all video tokens, which lie along `dim`; differentiable."""
        ...

    def join(self, share: Tensor, dim: int, num_video: int) -> Tensor:
        """All `num_video` video tokens from the ranks' shares; differentiable."""
        ...

    def attention(self, local: JointAttention, num_video: int) -> JointAttention:
        """Attention for the blocks of a video of `num_video` tokens; `local` is
        attention on one device.
        """
        ...
