"""One dual-stream block of HunyuanVideo-1.5: the fused forward, and the backward that recomputes what it did not keep.

For the video tokens x and the text tokens t, each stream with weights and modulation of its own:

    y  = LayerNorm(x) (1 + scale_msa) + shift_msa                    adaln
    q, k, v = y W_qkv + b;  q, k = RoPE(RMSNorm(q, k))               one product; qk_norm_rope
    o  = attention over video and text together
    x1 = x + gate_msa (o W_o + b);  y2 = LayerNorm(x1) (1 + scale_mlp) + shift_mlp      gated_residual_adaln
    x2 = x1 + gate_mlp (gelu(y2 W_1 + b) W_2 + b)                    linear_gelu_tanh, gated_residual

which is `HunyuanVideo15TransformerBlock.forward` of diffusers with the padding, the mask and the roundings between the
elementwise steps left out. The last block's text output is never read, so there the text has keys and values only.

What the forward keeps for the backward (S = one tensor of all tokens, lse is S/64 in bfloat16):

    none       x, qkv, o, lse, o W_o, y2 W_1: 10 S; matrix products are not repeated, elementwise work is
    selective  x, o, lse: 2 S; attention is not repeated, matrix products are, but for W_2
    full       x: 1 S

The product with W_2 is not repeated for many tokens: its result only matters for the gradient of the gate,

    dgate = sum_n dx2 (h W_2^T + b) = rowsum(W_2 * (dx2^T h)) + b sum_n dx2,    and   dW_2 = gate * (dx2^T h).

Shapes: B batch, N video tokens, L text tokens, D width, H heads; rows are tokens of all samples.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from sage_fast.kernels import Kernels
from sage_fast.models.attention.attention import attention, attention_backward
from sage_fast.models.hunyuan15.offload import Kept, keep
from sage_fast.models.hunyuan15.projection import (
    Gradients,
    Projection,
    input_backward,
    matrix_product,
    project,
    project_backward,
    project_qkv,
    projection,
    weight_backward,
)

Checkpointing = Literal["none", "selective", "full"]
EPS = 1e-6

_FEW_TOKENS = 1024
"""Up to so many tokens the branch is computed again for the gate: that reads W_2 once, the formula above thrice."""


class JointAttention(Protocol):
    """Attention over the joint sequence. Under sequence parallelism it is where tokens and heads are exchanged."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, num_video: int) -> tuple[Tensor, Tensor]:
        """(out, lse) of this rank's tokens: q, k, v (B, N + L, H, D) with the video tokens first.

        q may hold the video tokens alone; where it holds all, out has text rows too. lse is whatever `backward` needs
        of it.
        """
        ...

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, num_video: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of q, k and v.

        Under sequence parallelism gradients of the text are this rank's part of them: the ranks' parts add up.
        """
        ...


@dataclass(frozen=True)
class LocalAttention:
    """All tokens and heads on this device."""

    backend: str
    deterministic: bool = False

    def forward(self, q: Tensor, k: Tensor, v: Tensor, num_video: int) -> tuple[Tensor, Tensor]:
        """As in `JointAttention`."""
        return attention(q, k, v, backend=self.backend, deterministic=self.deterministic)

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, num_video: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """As in `JointAttention`."""
        return attention_backward(grad, q, k, v, out, lse, backend=self.backend, deterministic=self.deterministic)


@dataclass(frozen=True)
class BlockSettings:
    """How blocks are computed; the same for all of them."""

    kernels: Kernels
    attention: JointAttention
    checkpointing: Checkpointing
    offload: bool = False


@dataclass(frozen=True)
class Stream:
    """Weights of the video or the text stream. q, out and ff are None where the stream's output is never read."""

    q: Projection | None
    k: Projection
    v: Projection
    q_norm: Tensor
    k_norm: Tensor
    norms: int
    """Position of q_norm and k_norm in the flat list of tensors."""
    out: Projection | None
    ff_in: Projection | None
    ff_out: Projection | None

    @property
    def qkv(self) -> list[Projection]:
        return [layer for layer in (self.q, self.k, self.v) if layer is not None]

    def rebuilt(self, tensors: Sequence[Tensor]) -> "Stream":
        """The same weights as autograd kept them."""

        def layer(old: Projection | None) -> Any:
            return None if old is None else old.rebuilt(tensors)

        return Stream(
            layer(self.q),
            layer(self.k),
            layer(self.v),
            tensors[self.norms],
            tensors[self.norms + 1],
            self.norms,
            layer(self.out),
            layer(self.ff_in),
            layer(self.ff_out),
        )


class Streams(NamedTuple):
    """Both streams of a block."""

    video: Stream
    text: Stream


def read_block(block: nn.Module, *, last: bool) -> tuple[Streams, list[Tensor]]:
    """The weights of a diffusers `HunyuanVideo15TransformerBlock`, and the same as one flat list of tensors."""
    flat: list[Tensor] = []

    def read(module: nn.Module) -> Projection:
        layer = projection(module, len(flat))
        flat.extend(layer.tensors())
        return layer

    def norms(q: Any, k: Any) -> tuple[Tensor, Tensor, int]:
        flat.extend([q.weight, k.weight])
        return q.weight, k.weight, len(flat) - 2

    attn: Any = block.attn
    ff: Any = block.ff
    q, k, v = read(attn.to_q), read(attn.to_k), read(attn.to_v)
    video = Stream(
        q, k, v, *norms(attn.norm_q, attn.norm_k), read(attn.to_out[0]), read(ff.net[0].proj), read(ff.net[2])
    )
    if last:
        k, v = read(attn.add_k_proj), read(attn.add_v_proj)
        # The key's norm stands in for the query's: the kernel wants one, and its result is not used.
        text = Stream(None, k, v, *norms(attn.norm_added_k, attn.norm_added_k), None, None, None)
    else:
        context: Any = block.ff_context
        q, k, v = read(attn.add_q_proj), read(attn.add_k_proj), read(attn.add_v_proj)
        text = Stream(
            q,
            k,
            v,
            *norms(attn.norm_added_q, attn.norm_added_k),
            read(attn.to_add_out),
            read(context.net[0].proj),
            read(context.net[2]),
        )
    return Streams(video, text), flat


class Modulation(NamedTuple):
    """The six (B, D) vectors of a stream, in the order of diffusers' `AdaLayerNormZero`."""

    shift_msa: Tensor
    scale_msa: Tensor
    gate_msa: Tensor
    shift_mlp: Tensor
    scale_mlp: Tensor
    gate_mlp: Tensor


def block_forward(
    settings: BlockSettings,
    streams: Streams,
    flat: Sequence[Tensor],
    x: Tensor,
    text: Tensor,
    modulation: Tensor,
    text_modulation: Tensor,
    cos: Tensor,
    sin: Tensor,
) -> tuple[Tensor, Tensor]:
    """Run one block; with autograd where a gradient is wanted.

    Args:
        settings: how.
        streams, flat: the weights, from `read_block`.
        x: (B, N, D) video tokens, or this rank's share of them. text: (B, L, D) text tokens, L >= 1.
        modulation, text_modulation: (B, 6 D).
        cos, sin: (N, head dim) float32 rotary tables of the video tokens in x.

    Returns:
        The streams after the block, shaped as they came; in the last block the text as it came in.
    """
    tensors = (x, text, modulation, text_modulation, *flat)
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        out, text_out = _BlockFunction.apply(settings, streams, cos, sin, *tensors)
        return out, text if text_out is None else text_out
    with torch.no_grad():
        block = _Block(settings, streams, x, text, modulation, text_modulation, cos, sin)
        return block.forward()


class _Joint:
    """Rows of the joint sequence, (B, N + L, width), written stream by stream.

    With one sample the rows of a stream lie together, so that a matrix product writes them in place; with more they
    are copied.
    """

    def __init__(self, like: Tensor, num_video: int, num_text: int, width: int) -> None:
        self.buffer = like.new_empty(like.shape[0], num_video + num_text, width)
        self.parts = self.buffer[:, :num_video], self.buffer[:, num_video:]

    def rows(self, part: int) -> Tensor:
        """Rows (B * tokens, width) to fill for stream 0 (video) or 1 (text); hand them to `put`."""
        target = self.parts[part]
        return target[0] if len(target) == 1 else target.new_empty(target.shape[0] * target.shape[1], target.shape[2])

    def put(self, part: int, rows: Tensor) -> None:
        """Take the filled rows."""
        target = self.parts[part]
        if len(target) > 1:
            target.copy_(rows.view(target.shape))


class _Block:
    """One pass of one block. Each stage fills in what the later ones need and skips what is there already."""

    qkv: tuple[Tensor, ...] | None = None
    """Raw projections: (B, N + L, 3 D) of both streams for one sample, else (B, N, 3 D) and (B, L, 3 D)."""
    out: Tensor | None = None
    lse: Tensor | None = None
    branches: tuple[Tensor, ...] | None = None
    """Output of the attention projections, before the gate."""
    hidden: tuple[Tensor, ...] | None = None
    """Input of the GELU."""

    def __init__(
        self,
        settings: BlockSettings,
        streams: Streams,
        x: Tensor,
        text: Tensor,
        modulation: Tensor,
        text_modulation: Tensor,
        cos: Tensor,
        sin: Tensor,
    ) -> None:
        self.settings, self.kernels, self.streams = settings, settings.kernels, streams
        self.inputs = x, text
        self.modulations = Modulation(*modulation.chunk(6, dim=1)), Modulation(*text_modulation.chunk(6, dim=1))
        self.cos, self.sin = cos, sin
        self.num_video, self.num_text = x.shape[1], text.shape[1]
        self.head_dim = cos.shape[1]
        # Streams whose output is read.
        self.live = (0,) if streams.text.out is None else (0, 1)

    # ---------------------------------------------------------------------------------------------------- forward

    def forward(self) -> tuple[Tensor, Tensor]:
        """Both streams after the block (the text as it came in where its output is never read)."""
        self.attend(*self.rotate(*self.project_inputs()))
        if self.settings.checkpointing != "none":
            self.qkv = None  # memory for the feed-forward
        results = list(self.inputs)
        residuals, normed = self.add_attention()
        keep_hidden = self.settings.checkpointing == "none"
        hidden = []
        for i in self.live:
            stream = self.streams[i]
            assert stream.ff_in is not None and stream.ff_out is not None
            if keep_hidden or stream.ff_in.low_rank or stream.ff_in.bias is None:
                hidden.append(project(normed[i], stream.ff_in))
                activated = self.kernels.gelu_tanh(hidden[-1])
            else:
                activated = self.kernels.linear_gelu_tanh(normed[i], stream.ff_in.weight, stream.ff_in.bias)
            branch = project(activated, stream.ff_out)
            results[i] = self.kernels.gated_residual(residuals[i], branch, self.modulations[i].gate_mlp)
        if keep_hidden:
            self.hidden = tuple(hidden)
        return results[0], results[1]

    def normed_inputs(self) -> list[Tensor]:
        """y of both streams."""
        return [
            self.kernels.adaln(x, m.scale_msa, m.shift_msa, EPS)
            for x, m in zip(self.inputs, self.modulations, strict=True)
        ]

    def project_inputs(self, normed: Sequence[Tensor] | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Raw projections: video (B, N, 3 D), text (B, L, 3 D or 2 D), and the joint values (B, N + L, D)."""
        width = self.inputs[0].shape[2]
        if self.qkv is None:
            normed = normed or self.normed_inputs()
            if self.inputs[0].shape[0] == 1:
                joint = _Joint(normed[0], self.num_video, self.num_text, 3 * width)
                for i in (0, 1):
                    layers = self.streams[i].qkv
                    project_qkv(normed[i], layers, joint.rows(i)[:, (3 - len(layers)) * width :])
                self.qkv = (joint.buffer,)
            else:
                self.qkv = tuple(
                    project_qkv(y, stream.qkv, y.new_empty(y.shape[0] * y.shape[1], len(stream.qkv) * width)).view(
                        *y.shape[:2], -1
                    )
                    for y, stream in zip(normed, self.streams, strict=True)
                )
        if len(self.qkv) == 1:
            (both,) = self.qkv
            text = both[:, self.num_video :, (3 - len(self.streams.text.qkv)) * width :]
            return both[:, : self.num_video], text, both[..., 2 * width :]
        video, text = self.qkv
        return video, text, torch.cat([video[..., -width:], text[..., -width:]], dim=1)

    def raw_heads(self, video: Tensor, text: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q, k, q_text, k_text as (B, tokens, H, D) views. Where the text has no queries its keys stand in."""
        q, k, _ = video.unflatten(2, (3, -1, self.head_dim)).unbind(2)
        text_heads = text.unflatten(2, (len(self.streams.text.qkv), -1, self.head_dim))
        return q, k, text_heads[:, :, 0], text_heads[:, :, -2]

    def norm_weights(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        video, text = self.streams
        return video.q_norm, video.k_norm, text.q_norm, text.k_norm

    def rotate(self, video: Tensor, text: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v (B, tokens, H, D) as attention takes them."""
        q, k = self.kernels.qk_norm_rope(*self.raw_heads(video, text), *self.norm_weights(), self.cos, self.sin, EPS)
        return q if len(self.live) == 2 else q[:, : self.num_video], k, v.unflatten(2, (-1, self.head_dim))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Attention's result and its log-sum-exp."""
        if self.out is None or self.lse is None:
            self.out, self.lse = self.settings.attention.forward(q, k, v, self.num_video)
        return self.out, self.lse

    def attention_rows(self, i: int) -> Tensor:
        """Attention's result for stream i, (B * tokens, D)."""
        assert self.out is not None
        part = self.out[:, : self.num_video] if i == 0 else self.out[:, self.num_video :]
        return part.flatten(2).flatten(0, 1)

    def add_attention(self) -> tuple[list[Tensor], list[Tensor]]:
        """x1 and y2 of the live streams."""
        if self.branches is None:
            self.branches = tuple(
                project(self.attention_rows(i), layer).view(self.inputs[i].shape)
                for i in self.live
                if (layer := self.streams[i].out) is not None
            )
        residuals, normed = [], []
        for i in self.live:
            m = self.modulations[i]
            residual, y = self.kernels.gated_residual_adaln(
                self.inputs[i], self.branches[i], m.gate_msa, m.scale_mlp, m.shift_mlp, EPS
            )
            residuals.append(residual)
            normed.append(y)
        return residuals, normed

    # --------------------------------------------------------------------------------------------------- keeping

    def kept(self) -> list[Tensor]:
        """What the forward leaves for the backward, besides the weights and the modulation."""
        x, text = self.inputs
        if self.settings.checkpointing == "full":
            return [x, text]
        assert self.out is not None and self.lse is not None
        if self.settings.checkpointing == "selective":
            return [x, text, self.out, self.lse]
        assert self.qkv is not None and self.branches is not None and self.hidden is not None
        return [x, text, self.out, self.lse, *self.branches, *self.hidden, *self.qkv]

    def restore(self, kept: Sequence[Tensor]) -> None:
        """Take back what `kept` returned, after the inputs."""
        if len(kept) > 2:
            self.out, self.lse = kept[2:4]
        if len(kept) > 4:
            n = len(self.live)
            self.branches = tuple(kept[4 : 4 + n])
            self.hidden = tuple(kept[4 + n : 4 + 2 * n])
            self.qkv = tuple(kept[4 + 2 * n :])

    # -------------------------------------------------------------------------------------------------- backward

    def backward(
        self, grad: Tensor, text_grad: Tensor | None, gradients: Gradients, *, modulation: bool, inputs: bool
    ) -> tuple[list[Tensor | None], list[Tensor | None]]:
        """Gradients of the inputs (x, text) and of their modulations.

        Args:
            grad, text_grad: gradients of the two results; None for a text output that is never read.
            gradients: takes those of the weights.
            modulation: whether the modulation's gradients are wanted.
            inputs: whether anything before the block wants a gradient.
        """
        grads = [grad.contiguous()] + ([] if text_grad is None else [text_grad.contiguous()])
        modulation_grads: list[dict[str, Tensor]] = [{}, {}]
        trains_qkv = any(gradients.wants(layer) for stream in self.streams for layer in stream.qkv)
        projected = rotated = normed = None
        if self.out is None:
            normed = self.normed_inputs()
            projected = self.project_inputs(normed)
            normed = normed if trains_qkv else None
            rotated = self.rotate(*projected)
            self.attend(*rotated)
        residuals, normed_residuals = self.add_attention()

        joint = _Joint(self.inputs[0], self.num_video, self.num_text if len(self.live) == 2 else 0, grad.shape[2])
        for i in self.live:
            grads[i], branch_grad = self._residual_backward(
                i, grads[i], residuals[i], normed_residuals[i], gradients, modulation_grads[i] if modulation else None
            )
            layer = self.streams[i].out
            assert layer is not None
            rows = self.attention_rows(i) if gradients.wants(layer) else None
            joint.put(i, project_backward(branch_grad.flatten(0, 1), rows, layer, gradients, out=joint.rows(i)))
        # Before the projections are computed again: the feed-forward's backward is where memory peaks.
        self.branches = self.hidden = None
        del residuals, normed_residuals, branch_grad, rows
        if normed is None and (self.qkv is None or trains_qkv):
            normed = self.normed_inputs()
        projected = projected or self.project_inputs(normed)
        q, k, v = rotated or self.rotate(*projected)
        out, lse = self.attend(q, k, v)
        out_grad = joint.buffer.unflatten(2, (-1, self.head_dim))
        dq, dk, dv = self.settings.attention.backward(out_grad, q, k, v, out, lse, self.num_video)
        if len(self.live) == 1:
            padded = torch.zeros_like(dk)
            padded[:, : self.num_video] = dq
            dq = padded
        *raw_grads, dq_norm, dk_norm, dq_text_norm, dk_text_norm = self.kernels.qk_norm_rope_backward(
            dq, dk, *self.raw_heads(*projected[:2]), *self.norm_weights(), self.cos, self.sin, EPS
        )
        gradients.put(self.streams.video.norms, dq_norm)
        gradients.put(self.streams.video.norms + 1, dk_norm)
        if len(self.live) == 2:
            gradients.put(self.streams.text.norms, dq_text_norm)
        gradients.put(self.streams.text.norms + 1, dk_text_norm)

        value_grads = dv[:, : self.num_video].flatten(2), dv[:, self.num_video :].flatten(2)
        results: list[Tensor | None] = [None, None]
        for i, stream in enumerate(self.streams):
            heads = raw_grads[2 * i : 2 * i + 2] if len(stream.qkv) == 3 else raw_grads[2 * i + 1 : 2 * i + 2]
            parts = [part.flatten(2).flatten(0, 1) for part in heads] + [value_grads[i].flatten(0, 1)]
            x = normed[i].flatten(0, 1) if normed is not None else None
            y_grad: Tensor | None = None
            for part, layer in zip(parts, stream.qkv, strict=True):
                y_grad = project_backward(part, x, layer, gradients, out=y_grad, accumulate=y_grad is not None)
            if not inputs and not modulation:
                continue
            assert y_grad is not None
            m = self.modulations[i]
            dx, dscale, dshift = self.kernels.adaln_backward(
                y_grad.view(self.inputs[i].shape),
                self.inputs[i],
                m.scale_msa,
                m.shift_msa.dtype,
                EPS,
                modulation,
                grads[i] if i in self.live else None,
            )
            results[i] = dx
            if modulation:
                modulation_grads[i] |= {"scale_msa": dscale, "shift_msa": dshift}
        return results, [_join_modulation(g, m) for g, m in zip(modulation_grads, self.modulations, strict=True)]

    def _residual_backward(
        self,
        i: int,
        grad: Tensor,
        residual: Tensor,
        normed: Tensor,
        gradients: Gradients,
        modulation_grads: dict[str, Tensor] | None,
    ) -> tuple[Tensor, Tensor]:
        """Through the feed-forward branch and the attention residual of stream i: (dx1, gradient of o W_o)."""
        stream, m, kernels = self.streams[i], self.modulations[i], self.kernels
        assert stream.ff_in is not None and stream.ff_out is not None and self.branches is not None
        hidden = self.hidden[i] if self.hidden is not None else project(normed, stream.ff_in)
        wants_gate = modulation_grads is not None
        branch_grad, _ = kernels.gated_residual_backward(grad, None, m.gate_mlp, hidden.dtype)
        branch_rows = branch_grad.flatten(0, 1)
        hidden_grad, activated = kernels.gelu_tanh_backward(
            input_backward(branch_rows, stream.ff_out),
            hidden.flatten(0, 1),
            wants_gate or gradients.wants(stream.ff_out),
        )
        gate_grad: Tensor | None = None
        weight_grad: Tensor | None = None
        if wants_gate:
            trained = gradients.wanted[stream.ff_out.first] and not stream.ff_out.low_rank
            if trained and len(grad) == 1 and grad.shape[1] > _FEW_TOKENS:
                gate_grad, weight_grad = _gate_gradient(grad[0], activated, stream.ff_out, m.gate_mlp)
            else:
                branch = project(activated, stream.ff_out).view(grad.shape)
                _, gate_grad = kernels.gated_residual_backward(grad, branch, m.gate_mlp, hidden.dtype)
        weight_backward(branch_rows, activated, stream.ff_out, gradients, weight_grad)
        rows = normed.flatten(0, 1) if gradients.wants(stream.ff_in) else None
        normed_grad = project_backward(hidden_grad, rows, stream.ff_in, gradients).view(normed.shape)
        dx, attention_grad, dgate, dscale, dshift = kernels.gated_residual_adaln_backward(
            grad,
            normed_grad,
            residual,
            self.branches[i] if wants_gate else None,
            m.gate_msa,
            m.scale_mlp,
            residual.dtype,
            m.shift_mlp.dtype,
            EPS,
        )
        if modulation_grads is not None:
            assert gate_grad is not None
            modulation_grads |= {
                "gate_msa": dgate,
                "scale_mlp": dscale,
                "shift_mlp": dshift,
                "gate_mlp": gate_grad,
            }
        return dx, attention_grad


def _gate_gradient(grad: Tensor, activated: Tensor, layer: Projection, gate: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of gate (1, D) and W_2 (D, 4 D) of one sample, from dx2 (N, D) and h (N, 4 D); see the file's head."""
    product = matrix_product(grad.t(), activated, layer.weight.dtype)
    gate_grad = torch.bmm(product[:, None], layer.weight[:, :, None]).flatten()
    if layer.bias is not None:
        gate_grad = gate_grad + layer.bias * grad.sum(0)
    return gate_grad[None].to(gate.dtype), product.mul_(gate[0, :, None])


def _join_modulation(grads: dict[str, Tensor], like: Modulation) -> Tensor | None:
    """(B, 6 D) of the parts; what a dead stream lacks is zero."""
    if not grads:
        return None
    return torch.cat([grads.get(name, torch.zeros_like(getattr(like, name))) for name in Modulation._fields], dim=1)


class _BlockFunction(torch.autograd.Function):
    """`_Block` for autograd: inputs are the settings, then x, text, their modulations and the flat list of weights."""

    @staticmethod
    def forward(
        ctx: Any, settings: BlockSettings, streams: Streams, cos: Tensor, sin: Tensor, *tensors: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        x, text, modulation, text_modulation, *flat = tensors
        block = _Block(settings, streams, x, text, modulation, text_modulation, cos, sin)
        out, text_out = block.forward()
        ctx.settings, ctx.streams, ctx.cos, ctx.sin = settings, streams, cos, sin
        ctx.kept = keep(ctx, block.kept(), (modulation, text_modulation, *flat), settings.offload)
        return out, text_out if len(block.live) == 2 else None

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, text_grad: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        kept_state: Kept = ctx.kept
        kept, (modulation, text_modulation, *flat) = kept_state.take(ctx)
        streams = Streams(*(stream.rebuilt(flat) for stream in ctx.streams))
        block = _Block(ctx.settings, streams, kept[0], kept[1], modulation, text_modulation, ctx.cos, ctx.sin)
        block.restore(kept)
        _, _, _, _, wants_x, wants_text, wants_modulation, wants_text_modulation, *wanted = ctx.needs_input_grad
        gradients = Gradients(wanted)
        inputs, modulations = block.backward(
            grad,
            text_grad if len(block.live) == 2 else None,
            gradients,
            modulation=wants_modulation or wants_text_modulation,
            inputs=wants_x or wants_text,
        )
        return (
            *(None, None, None, None),
            inputs[0] if wants_x else None,
            inputs[1] if wants_text else None,
            modulations[0] if wants_modulation else None,
            modulations[1] if wants_text_modulation else None,
            *gradients.values,
        )
