"""Ulysses sequence parallelism: P ranks share the tokens of a video, and inside the
attention its heads.

Rank r holds video tokens r n to (r + 1) n - 1, n = N / P rounded up; the last shares
are padded with zero rows, which no real token attends to. The text, a few hundred
tokens, is on every rank. A layer communicates twice in each direction:

    forward   1. q, k, v of the share, all heads       ->  q, k, v of all video tokens, H / P heads
                 attention over [video, text]; the text's q, k, v are here already and give their slice of the heads
              2. result, all tokens, H / P heads       ->  result of the share and of the text, all heads
    backward  3. gradient of 2., with q, k, v, result of the share  ->  all tokens, H / P heads
                 backward of the attention
              4. gradients of q, k, v                  ->  those of the share, all heads

A block saves or recomputes q, k, v and the result as tokens of its share, so 3. sends
them once more; that takes no memory. Checkpointing "full" repeats 1. and 2. in the
backward. A forward ends in one all-gather of velocities. In the last layer the text has
no queries, so no result either.

**Gradients are partial.** Every rank computes the same loss from the joined velocity,
and leaves its part of the gradient in `.grad`: dL/dw is the sum of the ranks'
gradients, not their mean. Proof, backwards from the loss:
* What is split over the ranks (a video token's x, q, k, v) has its whole gradient on
  the rank that holds it: the gradient of the joined velocity is the same everywhere,
  and a rank takes the rows of its share.
* What all ranks hold (weights, modulation, text) has partial gradients: a rank adds up
  what its own tokens and heads contribute. All ranks compute the text stream alike, and
  a backward is linear in the gradient it is given, so partial gradients yield partial
  gradients.
* In the attention, rank r needs the whole gradient of its heads: 3. brings the video's,
  and the sum of the text's parts. Rank r then has the whole dq, dk, dv of its heads. 4.
  returns the video's rows; the text's stay, and are zero for the other heads.

Copies apart from the communication, with S = B n D elements (a share), leaving out the
text: forward 3 S packed for 1. (with B > 1 also 3 S unpacked), 1 S packed and 1 S
unpacked for 2.; backward 5 S and 5 S for 3., 3 S and 3 S for 4.

Source: Jacobs et al., "DeepSpeed Ulysses" (arXiv 2309.14509), section 3.

Shapes: B batch, N video tokens, n those of a share, L text tokens, H heads, D width of
them all, P ranks; d head dim.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch import distributed as dist
from torch.autograd.function import once_differentiable

from sage_fast.config.sections import check_heads
from sage_fast.models.attention.joint import JointAttention
from sage_fast.models.stored import Checkpointing, FusedForward


def shard_sequence(acceleration: FusedForward, group: dist.ProcessGroup) -> None:
    """Let the ranks of a group share the video tokens of every forward of this
    transformer from now on.

    All of them then call it with the same latents, timesteps and prompts, and get the
    same velocities. A group of one rank changes nothing.

    Args:
        acceleration: of the transformer, not undone.
        group: P ranks; P divides the number of heads. On a GPU an NCCL group, on a CPU
            a gloo one.

    Raises:
        ValueError: an acceleration that was undone, or a number of heads that P ranks
            cannot split evenly.
    """
    # Else every rank would go on computing all tokens.
    if acceleration.transformer.__dict__.get("_acceleration") is not acceleration:
        raise ValueError(
            "This transformer runs diffusers' own forward, which computes every token "
            "on every rank. Sequence parallelism needs the fused one."
        )
    degree = dist.get_world_size(group)
    check_heads(degree, acceleration.transformer.config["num_attention_heads"])
    acceleration.sequence = None
    if degree > 1:
        acceleration.sequence = Ulysses(group, dist.get_rank(group), degree)


# --------------------------------------------------------------------------------------
# bytes


class LayerBytes(NamedTuple):
    """Bytes that a rank sends to others in one layer."""

    forward: int
    """Of the two all-to-alls of a forward pass, with or without gradients."""
    backward: int
    """Of the two all-to-alls of a backward pass, and of the forward's where
    checkpointing repeats them.
    """


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
    """Bytes that a rank sends to the P - 1 others in one layer; 1/P of each buffer
    stays where it is.

        forward    (P - 1)/P * itemsize * B * (3 n D  +  n D + L D)          q, k, v; then the result
        backward   (P - 1)/P * itemsize * B * (5 n D + L D  +  3 n D)        dout, q, k, v, out; then dq, dk, dv

    L D is the text's result and its gradient, which the last layer lacks. Checkpointing
    "full" repeats the forward's part in the backward.

    Args:
        batch: B.
        num_video: N.
        num_text: L.
        width: D, all heads.
        degree: P.
        itemsize: bytes of an element.
        checkpointing: of the blocks.
        last: whether it is the last layer.
    """
    share = share_of(num_video, degree)
    text = 0 if last else num_text
    # P divides the heads and so the width: nothing is rounded.
    unit = batch * width * itemsize // degree * (degree - 1)
    forward = unit * (4 * share + text)
    backward = unit * (8 * share + text)
    return LayerBytes(
        forward, backward + forward if checkpointing == "full" else backward
    )


# --------------------------------------------------------------------------------------
# layout


@dataclass(frozen=True)
class Ulysses:
    """A `SequenceLayout`: rank `rank` of the `degree` ranks of `group` computes its
    share of the video tokens.
    """

    group: dist.ProcessGroup
    rank: int
    degree: int

    def split(self, tokens: Tensor, dim: int) -> Tensor:
        """This rank's n of N tokens along `dim`, as a copy, so that the memory of the
        others can be freed.

        Its gradient is zero outside the share.
        """
        share: Tensor = _Split.apply(tokens, dim, self)
        return share

    def join(self, share: Tensor, dim: int, num_video: int) -> Tensor:
        """All N tokens, gathered along `dim`. Their gradient is the same on every rank;
        the share takes its rows.
        """
        tokens: Tensor = _Join.apply(share, dim, num_video, self)
        return tokens

    def attention(self, local: JointAttention, num_video: int) -> "UlyssesAttention":
        """`local` over the tokens of all ranks."""
        return UlyssesAttention(self, local, num_video)

    def take(self, tokens: Tensor, dim: int) -> Tensor:
        """The rows of this share, padded with zeros."""
        size = share_of(tokens.shape[dim], self.degree)
        rows = self.rows(tokens, dim)
        share = tokens.new_empty([*tokens.shape[:dim], size, *tokens.shape[dim + 1 :]])
        held = rows.shape[dim]
        share.narrow(dim, 0, held).copy_(rows)
        share.narrow(dim, held, size - held).zero_()
        return share

    def rows(self, tokens: Tensor, dim: int) -> Tensor:
        """The rows of this share without padding, as a view; there may be none."""
        num_video = tokens.shape[dim]
        size = share_of(num_video, self.degree)
        first = min(self.rank * size, num_video)
        return tokens.narrow(dim, first, min(size, num_video - first))

    def exchange(self, send: Tensor, received: Tensor | None = None) -> Tensor:
        """All-to-all of (P, ...): row p goes to rank p, row p of the result came from
        it. Both are contiguous.
        """
        received = torch.empty_like(send) if received is None else received
        dist.all_to_all_single(received, send, group=self.group)
        return received

    def __deepcopy__(self, memo: dict[int, Any]) -> "Ulysses":
        # A copy of a transformer runs on the same ranks, and a process group cannot be
        # copied.
        return self


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, dim: int, layout: Ulysses) -> Tensor:
        ctx.dim = dim
        ctx.layout = layout
        ctx.num_video = tokens.shape[dim]
        return layout.take(tokens, dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        whole = grad.new_zeros(
            [*grad.shape[: ctx.dim], ctx.num_video, *grad.shape[ctx.dim + 1 :]]
        )
        rows = ctx.layout.rows(whole, ctx.dim)
        rows.copy_(grad.narrow(ctx.dim, 0, rows.shape[ctx.dim]))
        return whole, None, None


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, share: Tensor, dim: int, num_video: int, layout: Ulysses
    ) -> Tensor:
        ctx.dim = dim
        ctx.layout = layout
        # Tokens first, so that the ranks' shares are consecutive.
        rows = share.movedim(dim, 0).contiguous()
        gathered = rows.new_empty(layout.degree * rows.shape[0], *rows.shape[1:])
        dist.all_gather(list(gathered.chunk(layout.degree)), rows, group=layout.group)
        return gathered[:num_video].movedim(0, dim).contiguous()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        # The gradient is the same on every rank, so nothing is summed.
        return ctx.layout.take(grad, ctx.dim), None, None, None


# --------------------------------------------------------------------------------------
# attention


@dataclass(frozen=True)
class UlyssesAttention:
    """A `JointAttention` over the shares of all ranks: `local` computes 1/P of the
    heads for all tokens.

    `num_video` is N; the tensors that blocks hand over have n video tokens. The lse is
    local's, of this rank's heads.
    """

    layout: Ulysses
    local: JointAttention
    num_video: int

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, num_video: int
    ) -> tuple[Tensor, Tensor]:
        """q, k, v are (B, n + L, H, d), of the share and the text; q may lack the text."""
        share = num_video
        whole = self.num_video
        degree = self.layout.degree
        assert share == share_of(whole, degree)
        batch, _, heads, dim = k.shape
        num_text = k.shape[1] - share
        num_queries = whole + q.shape[1] - share

        # 1. of the head of this file: q, k and v go in one message.
        send = k.new_empty(degree, batch, share, 3, heads // degree, dim)
        for i, part in enumerate((q, k, v)):
            send[:, :, :, i].copy_(self._by_rank(part[:, :share]))
        # The shares of one sample arrive in order; the text goes behind them, over the
        # padding.
        joint = k.new_empty(batch, degree * share + num_text, 3, heads // degree, dim)
        if batch == 1:
            self.layout.exchange(send, joint[0, : degree * share])
        else:
            _paste(self.layout.exchange(send), joint[:, :whole])
        del send
        for i, part in enumerate((q, k, v)):
            text = self._own_heads(part[:, share:])
            joint[:, whole : whole + text.shape[1], i].copy_(text)
        q, k, v = joint[:, : whole + num_text].unbind(2)
        out, lse = self.local.forward(q[:, :num_queries], k, v, whole)
        del joint, q, k, v

        # 2.: behind each rank's share goes the text's result of the heads here, which
        # all ranks need.
        send = out.new_empty(
            degree, batch, share + num_queries - whole, heads // degree, dim
        )
        _cut(out[:, :whole], send[:, :, :share])
        send[:, :, share:].copy_(out[:, whole:])
        received = self.layout.exchange(send)
        result = out.new_empty(batch, received.shape[2], heads, dim)
        self._by_rank(result).copy_(received)
        return result, lse

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
        """The text's gradients are whole for this rank's heads and zero for the others."""
        share = num_video
        whole = self.num_video
        degree = self.layout.degree
        batch, _, heads, dim = k.shape
        num_text = k.shape[1] - share
        query_text = q.shape[1] - share

        # Of the text, only the gradient has to be exchanged. It goes behind the shares.
        send = k.new_empty(
            degree, batch * (5 * share + query_text), heads // degree, dim
        )
        video = send[:, : 5 * batch * share].unflatten(1, (5, batch, share))
        for i, part in enumerate((grad, q, out, k, v)):
            video[:, i].copy_(self._by_rank(part[:, :share]))
        text = send[:, 5 * batch * share :].unflatten(1, (batch, query_text))
        text.copy_(self._by_rank(grad[:, share:]))
        received = self.layout.exchange(send)
        del send, video, text

        # Two buffers: in the last layer the gradient, q and the result have no text,
        # but k and v do.
        queries = k.new_empty(3, batch, whole + query_text, heads // degree, dim)
        keys = k.new_empty(2, batch, whole + num_text, heads // degree, dim)
        video = received[:, : 5 * batch * share].unflatten(1, (5 * batch, share))
        _paste(video[:, : 3 * batch], queries.flatten(0, 1)[:, :whole])
        _paste(video[:, 3 * batch :], keys.flatten(0, 1)[:, :whole])
        all_grad, all_q, all_out = queries.unbind(0)
        all_k, all_v = keys.unbind(0)
        # Every rank has sent its part of the gradient of the text, for the heads here.
        all_grad[:, whole:] = (
            received[:, 5 * batch * share :].sum(0).unflatten(0, (batch, query_text))
        )
        del received, video
        for part, own in ((all_q, q), (all_out, out), (all_k, k), (all_v, v)):
            part[:, whole:].copy_(self._own_heads(own[:, share:]))
        grads = self.local.backward(all_grad, all_q, all_k, all_v, all_out, lse, whole)
        del queries, keys, all_grad, all_q, all_out, all_k, all_v, part

        # 4.: the text's gradients stay where they are.
        send = k.new_empty(degree, 3, batch, share, heads // degree, dim)
        for i, part in enumerate(grads):
            _cut(part[:, :whole], send[:, i])
        received = self.layout.exchange(send)
        dq, dk, dv = (
            self._as_tokens(received[:, i], part[:, whole:])
            for i, part in enumerate(grads)
        )
        return dq, dk, dv

    def _by_rank(self, tokens: Tensor) -> Tensor:
        """(B, tokens, H, d) as (P, B, tokens, H / P, d): the heads of every rank, a
        view.
        """
        return tokens.unflatten(2, (self.layout.degree, -1)).permute(2, 0, 1, 3, 4)

    def _own_heads(self, tokens: Tensor) -> Tensor:
        """(B, tokens, H, d) to this rank's heads (B, tokens, H / P, d), a view."""
        return self._by_rank(tokens)[self.layout.rank]

    def _as_tokens(self, share: Tensor, text: Tensor) -> Tensor:
        """(B, n + text, H, d) from a share by rank (P, B, n, H / P, d) and text with
        this rank's heads alone.
        """
        degree, batch, size, heads, dim = share.shape
        result = share.new_empty(batch, size + text.shape[1], degree * heads, dim)
        self._by_rank(result[:, :size]).copy_(share)
        result[:, size:].zero_()
        self._own_heads(result[:, size:]).copy_(text)
        return result


def _cut(tokens: Tensor, shares: Tensor) -> None:
    """Write tokens (B, N, ...) into shares (P, B, n, ...), and zeros into the padding."""
    size = shares.shape[2]
    full, rest = divmod(tokens.shape[1], size)
    shares[:full].copy_(
        tokens[:, : full * size].unflatten(1, (full, size)).transpose(0, 1)
    )
    if full < shares.shape[0]:
        shares[full, :, :rest].copy_(tokens[:, full * size :])
        shares[full, :, rest:].zero_()
        # The ranks behind the last token have padding alone.
        shares[full + 1 :].zero_()


def _paste(shares: Tensor, tokens: Tensor) -> None:
    """Write shares (P, B, n, ...) without their padding into tokens (B, N, ...)."""
    size = shares.shape[2]
    full, rest = divmod(tokens.shape[1], size)
    tokens[:, : full * size].unflatten(1, (full, size)).copy_(
        shares[:full].transpose(0, 1)
    )
    if rest:
        tokens[:, full * size :].copy_(shares[full, :, :rest])
