"""One dual-stream block of HunyuanVideo-1.5: the fused forward, and a backward that
recomputes what was not saved.

The video tokens x and the text tokens are two streams, each with its own weights and
modulation:

    y  = LayerNorm(x) (1 + scale_msa) + shift_msa                    adaln
    q, k, v = y W_qkv + b;  q, k = RoPE(RMSNorm(q, k))               one product; qk_norm_rope
    o  = attention over video and text together
    x1 = x + gate_msa (o W_o + b);  y2 = LayerNorm(x1) (1 + scale_mlp) + shift_mlp      gated_residual_adaln
    x2 = x1 + gate_mlp (gelu(y2 W_1 + b) W_2 + b)                    linear_gelu_tanh, gated_residual

This is `HunyuanVideo15TransformerBlock.forward` of diffusers without padding, mask, or
rounding between the elementwise steps. Nothing reads the text output of the last block,
so its text stream has keys and values only.

What the forward saves for the backward (S = one tensor of all tokens; lse is S/64 in
bfloat16):

    none          x, qkv, o, lse, o W_o, y2 W_1: 10 S; only elementwise work is recomputed
    feed_forward  x, qkv, o, lse, o W_o: 6 S; the product with W_1 is recomputed too
    selective     x, o, lse: 2 S; matrix products are recomputed except the one with W_2, attention is not
    full          x: 1 S; attention is recomputed too

Shapes: B batch, N video tokens, L text tokens, D width, H heads; rows are tokens of all
samples.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from sage_fast.kernels import without_graph
from sage_fast.models.block import EPS, BlockPass, Stage, Staged, Weights, read_layers
from sage_fast.models.fused import BlockSettings, Rotary
from sage_fast.models.projection import Gradients, read_adapters


class Streams(NamedTuple):
    """Weights of both streams of a block: a query norm and a key norm in each."""

    video: Weights
    text: Weights

    def rebuilt(self, tensors: Sequence[Tensor]) -> "Streams":
        """See `Weights.rebuilt`."""
        return Streams(self.video.rebuilt(tensors), self.text.rebuilt(tensors))


def read_block(block: nn.Module, *, last: bool) -> tuple[Streams, list[Tensor]]:
    """The weights of a diffusers `HunyuanVideo15TransformerBlock`, by name and as one
    flat list of tensors.
    """
    flat: list[Tensor] = []

    def stream(qkv: list[Any], norms: tuple[str, str], out: Any, ff: Any) -> Weights:
        groups = {"qkv": read_layers(flat, *qkv)}
        first_norm = len(flat)
        flat.extend(attn[name].weight for name in norms)
        if out is None:
            return Weights(groups | {"out": [], "ff_in": [], "ff_out": []}, first_norm)
        groups["out"] = read_layers(flat, out)
        groups["ff_in"] = read_layers(flat, ff.net[0].proj)
        groups["ff_out"] = read_layers(flat, ff.net[2])
        return Weights(groups, first_norm)

    # Dictionaries: attributes of modules take Python a microsecond each.
    attn: Any = cast(nn.Module, block.attn)._modules
    qkv = [attn["to_q"], attn["to_k"], attn["to_v"]]
    video = stream(qkv, ("norm_q", "norm_k"), attn["to_out"][0], block.ff)
    text_qkv = [attn["add_q_proj"], attn["add_k_proj"], attn["add_v_proj"]]
    if last:
        # The kernel wants a query norm. The key's stands in; what it computes is not
        # read.
        text = stream(text_qkv[1:], ("norm_added_k", "norm_added_k"), None, None)
    else:
        norms = ("norm_added_q", "norm_added_k")
        text = stream(text_qkv, norms, attn["to_add_out"], block.ff_context)
    return Streams(video, text), flat


class Modulation(NamedTuple):
    """The six (B, D) vectors of a stream, in the order of diffusers'
    `AdaLayerNormZero`.
    """

    shift_msa: Tensor
    scale_msa: Tensor
    gate_msa: Tensor
    shift_mlp: Tensor
    scale_mlp: Tensor
    gate_mlp: Tensor


_SAVED: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "none": (("qkv", "attention"), ("attended", "hidden")),
    "feed_forward": (("qkv", "attention"), ("attended",)),
    "selective": (("attention",), ()),
    "full": ((), ()),
}
"""Stages of a `Block` and of each of its live streams that the forward leaves for the
backward, by checkpointing.
"""


@dataclass
class _Stream(BlockPass):
    """One stream in one pass of a block. Tensors are (B, tokens, ...)."""

    x: Tensor
    modulation: Modulation
    tokens: slice
    """Where its tokens lie in the joint sequence."""
    saved: Sequence[str]
    attention: Tensor = field(init=False)
    """Attention's result for its tokens (B, tokens, D), once the block has it."""
    grad: Tensor | None = None
    """Backward: of x2, then of x1, at last of x. None while nothing has reached the
    stream.
    """
    modulation_grads: dict[str, Tensor] = field(default_factory=dict)

    @Stage
    def attended(self) -> Tensor:
        """o W_o + b, before the gate."""
        return self.project("out", self.attention)

    @Stage
    def residual(self) -> tuple[Tensor, Tensor]:
        """x1 and y2."""
        m = self.modulation
        return self.kernels.gated_residual_adaln(
            self.x, self.attended, m.gate_msa, m.scale_mlp, m.shift_mlp, EPS
        )

    @Stage
    def hidden(self) -> Tensor:
        """y2 W_1 + b, the input of the GELU."""
        return self.project("ff_in", self.residual[1])

    def forward(self) -> Tensor:
        """x2."""
        (ff_in,) = self.layers["ff_in"]
        residual, normed = self.residual
        if "hidden" in self.saved or ff_in.low_rank or ff_in.bias is None:
            activated = self.kernels.gelu_tanh(self.hidden)
        else:
            # Nothing needs the hidden layer again, so the GELU can run in the epilogue
            # of its product.
            activated = self.kernels.linear_gelu_tanh(normed, ff_in.weight, ff_in.bias)
        branch = self.project("ff_out", activated)
        self.forget("residual", "hidden")
        return self.kernels.gated_residual(residual, branch, self.modulation.gate_mlp)

    def residual_backward(self, gradients: Gradients, modulation: bool) -> Tensor:
        """From x2 to o W_o, whose gradient is returned; dL/dx1 replaces dL/dx2 in
        `grad`.
        """
        assert self.grad is not None
        m = self.modulation
        residual, normed = self.residual
        y2_grad, gate_grad = self.feed_forward_backward(
            self.grad, self.hidden, normed, m.gate_mlp, gradients, modulation=modulation
        )
        self.forget("hidden")
        # Without a gradient of the gate the kernel does not read o W_o.
        attended = self.attended if modulation else None
        self.grad, attended_grad, dgate, dscale, dshift = (
            self.kernels.gated_residual_adaln_backward(
                self.grad,
                y2_grad,
                residual,
                attended,
                m.gate_msa,
                m.scale_mlp,
                residual.dtype,
                m.shift_mlp.dtype,
                EPS,
            )
        )
        self.forget("residual", "attended")
        if gate_grad is not None:
            self.modulation_grads = {
                "gate_msa": dgate,
                "shift_mlp": dshift,
                "scale_mlp": dscale,
                "gate_mlp": gate_grad,
            }
        return attended_grad

    def projections_backward(
        self,
        heads: Sequence[Tensor],
        y: Tensor | None,
        gradients: Gradients,
        *,
        modulation: bool,
        inputs: bool,
    ) -> None:
        """From q, k, v to x; `y` is None where no weight of these projections is
        trained.
        """
        # dy = dq W_q + dk W_k + dv W_v, added up in one buffer.
        y_grad = self.project_backward("qkv", heads, y, gradients)
        if not inputs and not modulation:
            # the first block under LoRA: nothing before it is trained, and dL/dx is
            # left out
            return
        m = self.modulation
        self.grad, dscale, dshift = self.kernels.adaln_backward(
            y_grad, self.x, m.scale_msa, m.shift_msa.dtype, EPS, modulation, self.grad
        )
        if modulation:
            self.modulation_grads |= {"scale_msa": dscale, "shift_msa": dshift}

    def joined_modulation_grads(self) -> Tensor:
        """(B, 6 D); what a stream without output lacks is zero."""
        parts = []
        for name, value in zip(Modulation._fields, self.modulation, strict=True):
            grad = self.modulation_grads.get(name)
            parts.append(torch.zeros_like(value) if grad is None else grad)
        return torch.cat(parts, dim=1)


class Block(Staged):
    """One pass of one block.

    Args:
        settings: how.
        streams: the weights, from `read_block`.
        rotary: tables of the video tokens.
        tensors: tokens x and modulation (B, 6 D) of the video, N tokens or this rank's
            share of them; the same of the text, L >= 1 tokens; and the weights as
            `read_block` lists them.
    """

    num_inputs = 4

    def __init__(
        self,
        settings: BlockSettings,
        streams: Streams,
        rotary: Rotary,
        *tensors: Tensor,
    ) -> None:
        x, modulation, text, text_modulation, *flat = tensors
        self.settings = settings
        self.rotary = rotary
        self.kernels = without_graph(settings.kernels, x.device)
        self.num_video = x.shape[1]
        self.saved, saved = _SAVED[settings.checkpointing]
        video_q = streams.video.norms
        text_q = streams.text.norms
        self.norms = (video_q, video_q + 1, text_q, text_q + 1)
        norm_q, norm_k, text_norm_q, text_norm_k = (flat[i] for i in self.norms)
        self.norm_weights = (norm_q, norm_k, text_norm_q, text_norm_k)
        layers = streams.video.groups
        text_layers = streams.text.groups
        adapters = read_adapters([*layers.values(), *text_layers.values()], x.dtype)
        self.video = _Stream(
            self.kernels,
            layers,
            dict(zip(layers, adapters[: len(layers)], strict=True)),
            x,
            Modulation(*modulation.chunk(6, dim=1)),
            slice(0, self.num_video),
            saved,
        )
        self.text = _Stream(
            self.kernels,
            text_layers,
            dict(zip(text_layers, adapters[len(layers) :], strict=True)),
            text,
            Modulation(*text_modulation.chunk(6, dim=1)),
            slice(self.num_video, None),
            saved,
        )
        self.streams = (self.video, self.text)
        # Nothing reads the text output of the last block.
        self.last = not text_layers["out"]
        self.live = (self.video,) if self.last else self.streams

    # ----------------------------------------------------------------------------------
    # stages

    @Stage
    def y(self) -> tuple[Tensor, ...]:
        """y of both streams, with y A^T of low-rank updates behind it where
        `room_for_low` says so.
        """
        return tuple(
            stream.modulate(
                stream.x, stream.modulation.scale_msa, stream.modulation.shift_msa
            )
            for stream in self.streams
        )

    @Stage
    def qkv(self) -> tuple[Tensor, ...]:
        """Raw projections: (B, N + L, 3 D) of both streams for one sample, else (B, N,
        3 D) and (B, L, 3 D or 2 D).
        """
        if self.video.x.shape[0] > 1:
            return tuple(
                stream.project("qkv", y)
                for stream, y in zip(self.streams, self.y, strict=True)
            )
        # Both streams' products write into one tensor, so that attention's v is a slice
        # and not a copy. Where the text has no queries, its third of the columns stays
        # unwritten: that product is avoided.
        _, num_video, width = self.video.x.shape
        joint = self.y[0].new_empty(1, num_video + self.text.x.shape[1], 3 * width)
        for stream, y in zip(self.streams, self.y, strict=True):
            columns = len(stream.layers["qkv"]) * width
            stream.project("qkv", y, joint[0, stream.tokens, -columns:])
        return (joint,)

    def raw_heads(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q, k, q_text, k_text as (B, tokens, H, D) views. Where the text has no
        queries its keys stand in.
        """
        if len(self.qkv) == 1:
            video, text = self.qkv[0].tensor_split([self.num_video], dim=1)
        else:
            video, text = self.qkv
        head_dim = self.rotary.cos.shape[1]
        num_heads = self.video.x.shape[2] // head_dim
        video = video.view(*video.shape[:2], -1, num_heads, head_dim)
        text = text.view(*text.shape[:2], -1, num_heads, head_dim)
        # The last of the text's layers are k and v; the first is q, or k in its place.
        first = -len(self.text.layers["qkv"])
        return video[:, :, 0], video[:, :, 1], text[:, :, first], text[:, :, -2]

    @Stage
    def rotated(self) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v (B, tokens, H, D) as attention takes them."""
        q, k = self.kernels.qk_norm_rope(
            *self.raw_heads(), *self.norm_weights, *self.rotary, EPS
        )
        if self.last:
            # the text's rows are those of the key that stood in
            q = q[:, : self.num_video]
        values = [part[..., -self.video.x.shape[2] :] for part in self.qkv]
        # Of several samples v is a copy: a sample's video and text are not neighbours in
        # memory.
        v = values[0] if len(values) == 1 else torch.cat(values, dim=1)
        return q, k, v.view(k.shape)

    @Stage
    def attention(self) -> tuple[Tensor, Tensor]:
        """o and its log-sum-exp; in the last block of the video alone."""
        return self.settings.attention.forward(*self.rotated, self.num_video)

    def attend(self) -> None:
        """Give each live stream attention's result for its tokens."""
        out, _ = self.attention
        for stream in self.live:
            stream.attention = out[:, stream.tokens].flatten(2)

    def forward(self) -> tuple[Tensor, Tensor | None]:
        """Both streams after the block; None for a text output that nothing reads."""
        self.attend()
        # memory for the feed-forward
        self.forget("y", "qkv", "rotated")
        out = self.video.forward()
        return out, None if self.last else self.text.forward()

    # ----------------------------------------------------------------------------------
    # backward

    def backward(
        self, grads: Sequence[Tensor], wanted: Sequence[bool], gradients: Gradients
    ) -> tuple[Tensor | None, ...]:
        """Of x, its modulation, the text and its modulation, where they are wanted;
        `gradients` takes those of the weights.
        """
        wants_x, wants_modulation, wants_text, wants_text_modulation = wanted[:4]
        modulation = wants_modulation or wants_text_modulation
        inputs = wants_x or wants_text
        self.video.grad = grads[0].contiguous()
        self.text.grad = None if self.last else grads[1].contiguous()
        trains_qkv = gradients.wants(
            *self.video.layers["qkv"], *self.text.layers["qkv"]
        )
        # "full" saved the inputs alone: attention runs again here, and the q, k, v
        # products that lead to it.
        self.attend()
        if not trains_qkv:
            # Only dW_qkv reads y again. Without it, the feed-forward's backward has the
            # memory.
            self.forget("y")
        # First through what comes after attention. It needs no q, k, v, so "selective"
        # recomputes them only afterwards: memory peaks in the backward of the
        # feed-forward.
        out_grad = self.residuals_backward(gradients, modulation)
        head_grads = self.attention_backward(out_grad, gradients)
        del out_grad
        self.forget("qkv", "rotated")
        normed = self.y if trains_qkv else (None, None)
        for stream, heads, y in zip(self.streams, head_grads, normed, strict=True):
            stream.projections_backward(
                heads, y, gradients, modulation=modulation, inputs=inputs
            )
        return (
            self.video.grad if wants_x else None,
            self.video.joined_modulation_grads() if wants_modulation else None,
            self.text.grad if wants_text else None,
            self.text.joined_modulation_grads() if wants_text_modulation else None,
        )

    def residuals_backward(self, gradients: Gradients, modulation: bool) -> Tensor:
        """From x2 to attention's result: dL/do, (B, tokens, H, head dim); leaves dL/dx1
        in the live streams' `grad`.
        """
        out, _ = self.attention
        out_grad = out.new_empty(out.shape)
        for stream in self.live:
            branch_grad = stream.residual_backward(gradients, modulation)
            target = out_grad[:, stream.tokens].flatten(2)
            # The rows of one sample are contiguous, so the product writes them in
            # place; of more they are copied.
            rows = target[0] if target.shape[0] == 1 else None
            result = stream.project_backward(
                "out", [branch_grad], stream.attention, gradients, rows
            )
            if rows is None:
                target.copy_(result)
        return out_grad

    def attention_backward(
        self, out_grad: Tensor, gradients: Gradients
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Through attention, rotation and norm: gradients of the raw projections q, k
        and v of video and text, (B, tokens, D) each. A text without queries has none of
        q.
        """
        dq, dk, dv = self.settings.attention.backward(
            out_grad, *self.rotated, *self.attention, self.num_video
        )
        if self.last:
            # The kernel takes as many queries as keys; queries that do not exist have a
            # gradient of zero.
            padded = torch.zeros_like(dk)
            padded[:, : self.num_video] = dq
            dq = padded
        # Where the text has no queries, dq of its tokens is zero, and so is the
        # gradient of the norm that stands in.
        dq, dk, dq_text, dk_text, *norm_grads = self.kernels.qk_norm_rope_backward(
            dq,
            dk,
            *self.raw_heads(),
            *self.norm_weights,
            *self.rotary,
            EPS,
            any(gradients.wanted[position] for position in self.norms),
        )
        for position, norm_grad in zip(self.norms, norm_grads, strict=True):
            gradients.put(position, norm_grad)
        of_video = [dq, dk, dv[:, self.video.tokens]]
        of_text = [dk_text, dv[:, self.text.tokens]]
        if not self.last:
            of_text.insert(0, dq_text)
        return [part.flatten(2) for part in of_video], [
            part.flatten(2) for part in of_text
        ]
