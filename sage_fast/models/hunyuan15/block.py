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
from torch.autograd.function import once_differentiable

from sage_fast.kernels import without_graph
from sage_fast.models.block import EPS, BlockPass, Weights, read_layers
from sage_fast.models.fused import BlockSettings, Rotary, without_autocast
from sage_fast.models.projection import Gradients, read_adapters


class Streams(NamedTuple):
    """Weights of both streams of a block: a query norm and a key norm in each."""

    video: Weights
    text: Weights


def read_block(block: nn.Module, *, last: bool) -> tuple[Streams, list[Tensor]]:
    """The weights of a diffusers `HunyuanVideo15TransformerBlock`, by name and as one
    flat list of tensors.
    """
    flat: list[Tensor] = []

    def stream(
        qkv: list[Any], norms: tuple[str, str], out: list[Any], ff: Any
    ) -> Weights:
        groups = {"qkv": read_layers(flat, *qkv)}
        first = len(flat)
        flat.extend(attn[name].weight for name in norms)
        ends = {
            "out": out,
            "ff_in": [ff.net[0].proj] if out else [],
            "ff_out": [ff.net[2]] if out else [],
        }
        return Weights(
            groups
            | {name: read_layers(flat, *layers) for name, layers in ends.items()},
            first,
        )

    # Dictionaries: attributes of modules take Python a microsecond each.
    attn: Any = cast(nn.Module, block.attn)._modules
    video = stream(
        [attn["to_q"], attn["to_k"], attn["to_v"]],
        ("norm_q", "norm_k"),
        [attn["to_out"][0]],
        block.ff,
    )
    q, k, v, out = (
        attn[name] for name in ("add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")
    )
    if last:
        # The kernel wants a query norm. The key's stands in; what it computes is not
        # read.
        return Streams(
            video, stream([k, v], ("norm_added_k", "norm_added_k"), [], None)
        ), flat
    return Streams(
        video,
        stream([q, k, v], ("norm_added_q", "norm_added_k"), [out], block.ff_context),
    ), flat


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


def block_forward(
    settings: BlockSettings, streams: Streams, rotary: Rotary, *tensors: Tensor
) -> tuple[Tensor, Tensor]:
    """Run one block; with autograd where a gradient is wanted.

    Args:
        settings: how.
        streams: the weights, from `read_block`.
        rotary: tables of the video tokens.
        tensors: tokens x and modulation (B, 6 D) of the video, N tokens or this rank's
            share of them; the same of the text, L >= 1 tokens; and the weights as
            `read_block` lists them.

    Returns:
        Video (B, N, D) and text (B, L, D) after the block; in the last block the text
        as it came in.
    """
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        out, text_out = _BlockFunction.apply(settings, streams, rotary, *tensors)
        return out, tensors[2] if text_out is None else text_out
    with torch.no_grad():
        return _Block(settings, streams, rotary, *tensors).forward()


@dataclass
class _Pass(BlockPass):
    """One stream in one pass of a block; each stage fills in what later ones need.
    Tensors are (B, tokens, ...).
    """

    modulation: Modulation
    x: Tensor
    tokens: slice
    """Where its tokens lie in the joint sequence."""
    attended: Tensor | None = None
    """o W_o + b, before the gate."""
    hidden: Tensor | None = None
    """y2 W_1 + b, the input of the GELU."""
    grad: Tensor | None = None
    """Backward: of x2, then of x1, at last of x. None while nothing has reached the
    stream.
    """
    modulation_grads: dict[str, Tensor] = field(default_factory=dict)

    @property
    def live(self) -> bool:
        """Tell whether anything reads the stream's output."""
        return bool(self.layers["out"])

    def joined_modulation_grads(self) -> Tensor | None:
        """(B, 6 D); what a stream without output lacks is zero. None where no gradient
        was wanted.
        """
        if not self.modulation_grads:
            return None
        parts = zip(Modulation._fields, self.modulation, strict=True)
        return torch.cat(
            [
                self.modulation_grads.get(n, torch.zeros_like(value))
                for n, value in parts
            ],
            dim=1,
        )


class _Block:
    """One pass of one block. Each stage fills in what later ones need and skips what is
    there already.
    """

    qkv: tuple[Tensor, ...] | None = None
    """Raw projections: (B, N + L, 3 D) of both streams for one sample, else (B, N, 3 D)
    and (B, L, 3 D).
    """
    out: Tensor | None = None
    lse: Tensor | None = None

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
        self.num_tokens = self.num_video + text.shape[1]
        self.head_dim = rotary.cos.shape[1]
        video_q = streams.video.norms
        text_q = streams.text.norms
        self.norms = video_q, video_q + 1, text_q, text_q + 1
        self.norm_weights = (
            flat[video_q],
            flat[video_q + 1],
            flat[text_q],
            flat[text_q + 1],
        )

        groups = [weights.groups for weights in streams]
        adapters = iter(
            read_adapters(
                [layers for group in groups for layers in group.values()], x.dtype
            )
        )
        inputs = (
            (x, modulation, slice(0, self.num_video)),
            (text, text_modulation, slice(self.num_video, None)),
        )
        self.streams: list[_Pass] = []
        for layers, (given, vectors, tokens) in zip(groups, inputs, strict=True):
            # One iterator for both streams: `zip` asks for a name first, and so takes
            # no adapter too many.
            mine = dict(zip(layers, adapters, strict=False))
            self.streams.append(
                _Pass(
                    self.kernels,
                    layers,
                    mine,
                    Modulation(*vectors.chunk(6, dim=1)),
                    given,
                    tokens,
                )
            )
        self.video, self.text = self.streams
        self.live = [stream for stream in self.streams if stream.live]

    # ----------------------------------------------------------------------------------------------------
    # forward

    def forward(self) -> tuple[Tensor, Tensor]:
        """Both streams after the block (the text as it came in where nothing reads its
        output).
        """
        self.out, self.lse = self.settings.attention.forward(
            *self.rotate(*self.project_inputs()), self.num_video
        )
        if self.settings.checkpointing in ("selective", "full"):
            self.qkv = None  # memory for the feed-forward
        out, text_out = (
            self.feed_forward(stream) if stream.live else stream.x
            for stream in self.streams
        )
        return out, text_out

    def feed_forward(self, stream: _Pass) -> Tensor:
        """x2 of a live stream."""
        (ff_in,) = stream.layers["ff_in"]
        residual, normed = self.add_attention(stream)
        saves_hidden = self.settings.checkpointing == "none"
        if saves_hidden or ff_in.low_rank or ff_in.bias is None:
            hidden = stream.project("ff_in", normed)
            activated = self.kernels.gelu_tanh(hidden)
            stream.hidden = hidden if saves_hidden else None
        else:
            # Nothing needs the hidden layer again, so the GELU can run in the epilogue
            # of its product.
            activated = self.kernels.linear_gelu_tanh(normed, ff_in.weight, ff_in.bias)
        branch = stream.project("ff_out", activated)
        return self.kernels.gated_residual(residual, branch, stream.modulation.gate_mlp)

    def normed_inputs(self) -> list[Tensor]:
        """y of both streams, with y A^T of low-rank updates behind it where
        `room_for_low` says so.
        """
        return [
            stream.modulate(
                stream.x, stream.modulation.scale_msa, stream.modulation.shift_msa
            )
            for stream in self.streams
        ]

    def project_inputs(
        self, normed: Sequence[Tensor] | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Raw projections: video (B, N, 3 D), text (B, L, 3 D or 2 D), and the joint
        values (B, N + L, D).
        """
        width = self.video.x.shape[2]
        if self.qkv is None:
            normed = normed or self.normed_inputs()
            if self.video.x.shape[0] == 1:
                # Both streams' products write into one tensor, so that attention's v is
                # a slice and not a copy. Where the text has no queries, its third of
                # the columns stays unwritten: that product is avoided.
                joint = normed[0].new_empty(1, self.num_tokens, 3 * width)
                for y, stream in zip(normed, self.streams, strict=True):
                    stream.project(
                        "qkv",
                        y,
                        joint[
                            0, stream.tokens, (3 - len(stream.layers["qkv"])) * width :
                        ],
                    )
                self.qkv = (joint,)
            else:
                self.qkv = tuple(
                    s.project("qkv", y)
                    for y, s in zip(normed, self.streams, strict=True)
                )
        if len(self.qkv) == 1:
            (both,) = self.qkv
            text = both[
                :, self.num_video :, (3 - len(self.text.layers["qkv"])) * width :
            ]
            return both[:, : self.num_video], text, both[..., 2 * width :]
        # Of several samples the joint values are a copy: a sample's video and text are
        # not neighbours in memory.
        video, text = self.qkv
        return video, text, torch.cat([video[..., -width:], text[..., -width:]], dim=1)

    def raw_heads(
        self, video: Tensor, text: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q, k, q_text, k_text as (B, tokens, H, D) views. Where the text has no
        queries its keys stand in.
        """
        q, k, _ = video.view(*video.shape[:2], 3, -1, self.head_dim).unbind(2)
        text_heads = text.view(
            *text.shape[:2], len(self.text.layers["qkv"]), -1, self.head_dim
        )
        # Of q, k, v and of k, v alike the key is the last but one; the first is the
        # query, or the key in its place.
        return q, k, text_heads[:, :, 0], text_heads[:, :, -2]

    def rotate(
        self, video: Tensor, text: Tensor, v: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v (B, tokens, H, D) as attention takes them."""
        q, k = self.kernels.qk_norm_rope(
            *self.raw_heads(video, text), *self.norm_weights, *self.rotary, EPS
        )
        # In the last block the text's rows of q are those of the key that stood in.
        return (
            q if self.text.live else q[:, : self.num_video],
            k,
            v.view(*v.shape[:2], -1, self.head_dim),
        )

    def attention_of(self, stream: _Pass) -> Tensor:
        """Attention's result for one stream, (B, tokens, D)."""
        assert self.out is not None
        return self.out[:, stream.tokens].flatten(2)

    def add_attention(self, stream: _Pass) -> tuple[Tensor, Tensor]:
        """x1 and y2 of a live stream."""
        if stream.attended is None:
            stream.attended = stream.project("out", self.attention_of(stream))
        m = stream.modulation
        return self.kernels.gated_residual_adaln(
            stream.x, stream.attended, m.gate_msa, m.scale_mlp, m.shift_mlp, EPS
        )

    # ----------------------------------------------------------------------------------------------------
    # saving

    def saved(self) -> list[Tensor]:
        """Tensors that the forward leaves for the backward, apart from what it was
        given.
        """
        if self.settings.checkpointing == "full":
            return []
        assert self.out is not None and self.lse is not None
        if self.settings.checkpointing == "selective":
            return [self.out, self.lse]
        assert self.qkv is not None
        # `restore` takes them back in this order.
        attended = [
            stream.attended for stream in self.live if stream.attended is not None
        ]
        hidden = [stream.hidden for stream in self.live if stream.hidden is not None]
        return [self.out, self.lse, *attended, *hidden, *self.qkv]

    def restore(self, saved: Sequence[Tensor]) -> None:
        """Take back what `saved` returned."""
        if saved:
            self.out, self.lse = saved[:2]
        if len(saved) > 2:
            rest = iter(saved[2:])
            for stream in self.live:
                stream.attended = next(rest)
            if self.settings.checkpointing == "none":
                for stream in self.live:
                    stream.hidden = next(rest)
            self.qkv = tuple(rest)

    # --------------------------------------------------------------------------------------------------
    # backward

    def backward(
        self,
        grad: Tensor,
        text_grad: Tensor | None,
        gradients: Gradients,
        *,
        modulation: bool,
        inputs: bool,
    ) -> None:
        """Leave the gradients of both streams in their `grad` and `modulation_grads`.

        Args:
            grad, text_grad: gradients of the two results; None for a text output that
                nothing reads. gradients: takes those of the weights.
            modulation: whether the gradients of the modulation are wanted.
            inputs: whether anything before the block wants a gradient.
        """
        self.video.grad = grad.contiguous()
        self.text.grad = None if text_grad is None else text_grad.contiguous()
        trains_qkv = gradients.wants(
            *self.video.layers["qkv"], *self.text.layers["qkv"]
        )
        normed = projected = rotated = None
        if self.out is None:
            # "full" saved the inputs alone: attention runs again, and the q, k, v
            # products that lead to it.
            normed = self.normed_inputs()
            projected = self.project_inputs(normed)
            # Only dW_qkv reads y again. Without it, the feed-forward's backward has the
            # memory.
            normed = normed if trains_qkv else None
            rotated = self.rotate(*projected)
            self.out, self.lse = self.settings.attention.forward(
                *rotated, self.num_video
            )
        # First through what comes after attention. It needs no q, k, v, so "selective"
        # recomputes them only afterwards: memory peaks in the backward of the
        # feed-forward.
        out_grad = self.residuals_backward(gradients, modulation)
        if normed is None and (self.qkv is None or trains_qkv):
            normed = self.normed_inputs()  # elementwise; it is never saved
        # q, k, v before norm and rotation: recomputed here by "selective" and above by
        # "full", saved by the others. Norm and rotation are elementwise and run again
        # in any case.
        projected = projected or self.project_inputs(normed)
        rotated = rotated or self.rotate(*projected)
        head_grads = self.attention_backward(out_grad, projected, rotated, gradients)
        del projected, rotated, out_grad
        for i, (stream, heads) in enumerate(zip(self.streams, head_grads, strict=True)):
            y = normed[i] if normed is not None else None
            self.projections_backward(
                stream, heads, y, gradients, modulation=modulation, inputs=inputs
            )

    def residuals_backward(self, gradients: Gradients, modulation: bool) -> Tensor:
        """From x2 to attention's result: dL/do, (B, tokens, H, head dim); leaves dL/dx1
        in the live streams' `grad`.
        """
        # Attention of the last block has results for the video alone.
        num_tokens = self.num_tokens if self.text.live else self.num_video
        joint = self.video.x.new_empty(
            len(self.video.x), num_tokens, self.video.x.shape[2]
        )
        for stream in self.live:
            (layer,) = stream.layers["out"]
            branch_grad = self.residual_backward(stream, gradients, modulation)
            # The product with o^T is left out where W_o and its adapter are frozen.
            attended = self.attention_of(stream) if gradients.wants(layer) else None
            target = joint[:, stream.tokens]
            # The rows of one sample are contiguous, so the product writes them in
            # place; of more they are copied.
            rows = stream.project_backward(
                "out",
                [branch_grad],
                attended,
                gradients,
                target[0] if len(target) == 1 else None,
            )
            if len(target) > 1:
                target.copy_(rows)
            # memory for q, k, v; a hidden layer that is there is the graph's
            stream.attended = None
        return joint.view(*joint.shape[:2], -1, self.head_dim)

    def residual_backward(
        self, stream: _Pass, gradients: Gradients, modulation: bool
    ) -> Tensor:
        """One live stream from x2 to o W_o, whose gradient is returned; dL/dx1 replaces
        dL/dx2 in `grad`.
        """
        # x1 and y2 are elementwise in x and o W_o. "selective" and "full" compute that
        # product again.
        residual, normed = self.add_attention(stream)
        m = stream.modulation
        assert stream.grad is not None
        y2_grad, gate_grad = stream.feed_forward_backward(
            stream.grad,
            stream.hidden,
            normed,
            m.gate_mlp,
            gradients,
            modulation=modulation,
        )
        # Without a gradient of the gate the kernel does not read o W_o.
        attended = stream.attended if modulation else None
        stream.grad, attended_grad, dgate, dscale, dshift = (
            self.kernels.gated_residual_adaln_backward(
                stream.grad,
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
        if modulation:
            assert gate_grad is not None
            stream.modulation_grads |= {
                "gate_msa": dgate,
                "scale_mlp": dscale,
                "shift_mlp": dshift,
            }
            stream.modulation_grads["gate_mlp"] = gate_grad
        return attended_grad

    def attention_backward(
        self,
        out_grad: Tensor,
        projected: tuple[Tensor, Tensor, Tensor],
        rotated: tuple[Tensor, Tensor, Tensor],
        gradients: Gradients,
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Through attention, rotation and norm: gradients of the raw projections q, k
        and v of video and text, (B, tokens, D) each. A text without queries has none of
        q.
        """
        q, k, v = rotated
        # Attention's result and lse are saved, but by "full", which has recomputed
        # them: no product is repeated here.
        assert self.out is not None and self.lse is not None
        dq, dk, dv = self.settings.attention.backward(
            out_grad, q, k, v, self.out, self.lse, self.num_video
        )
        if not self.text.live:
            # The kernel takes as many queries as keys; queries that do not exist have a
            # gradient of zero.
            padded = torch.zeros_like(dk)
            padded[:, : self.num_video] = dq
            dq = padded
        video, text, _ = projected
        # Where the text has no queries, dq of its tokens is zero, and so is the
        # gradient of the norm that stands in.
        dq, dk, dq_text, dk_text, *norm_grads = self.kernels.qk_norm_rope_backward(
            *(
                dq,
                dk,
                *self.raw_heads(video, text),
                *self.norm_weights,
                *self.rotary,
                EPS,
            ),
            any(gradients.wanted[position] for position in self.norms),
        )
        for position, norm_grad in zip(self.norms, norm_grads, strict=True):
            gradients.put(position, norm_grad)
        of_video = [dq, dk, dv[:, self.video.tokens]]
        of_text = [
            *([dq_text] if self.text.live else []),
            dk_text,
            dv[:, self.text.tokens],
        ]
        return [part.flatten(2) for part in of_video], [
            part.flatten(2) for part in of_text
        ]

    def projections_backward(
        self,
        stream: _Pass,
        heads: Sequence[Tensor],
        y: Tensor | None,
        gradients: Gradients,
        *,
        modulation: bool,
        inputs: bool,
    ) -> None:
        """One stream from q, k, v to x; `y` is None where no weight of these
        projections is trained.
        """
        # dy = dq W_q + dk W_k + dv W_v, added up in one buffer.
        y_grad = stream.project_backward("qkv", heads, y, gradients)
        if not inputs and not modulation:
            # the first block under LoRA: nothing before it is trained, and dL/dx is
            # left out
            return
        m = stream.modulation
        stream.grad, dscale, dshift = self.kernels.adaln_backward(
            y_grad,
            stream.x,
            m.scale_msa,
            m.shift_msa.dtype,
            EPS,
            modulation,
            stream.grad,
        )
        if modulation:
            stream.modulation_grads |= {"scale_msa": dscale, "shift_msa": dshift}


class _BlockFunction(torch.autograd.Function):
    """`_Block` for autograd: takes settings, weights, tables, both streams with their
    modulation, the flat weights.
    """

    @staticmethod
    def forward(
        ctx: Any,
        settings: BlockSettings,
        streams: Streams,
        rotary: Rotary,
        *tensors: Tensor,
    ) -> tuple[Tensor, Tensor | None]:
        block = _Block(settings, streams, rotary, *tensors)
        out, text_out = block.forward()
        saved = block.saved()
        ctx.settings = settings
        ctx.streams = streams
        ctx.rotary = rotary
        ctx.count = len(saved)
        ctx.save_for_backward(*saved, *tensors)
        return out, text_out if block.text.live else None

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad: Tensor, text_grad: Tensor | None
    ) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        saved = ctx.saved_tensors[: ctx.count]
        tensors = ctx.saved_tensors[ctx.count :]
        streams = Streams(*(stream.rebuilt(tensors[4:]) for stream in ctx.streams))
        block = _Block(ctx.settings, streams, ctx.rotary, *tensors)
        block.restore(saved)
        (
            _,
            _,
            _,
            wants_x,
            wants_modulation,
            wants_text,
            wants_text_modulation,
            *wanted,
        ) = ctx.needs_input_grad
        gradients = Gradients(wanted)
        with without_autocast(grad):
            block.backward(
                grad,
                text_grad if block.text.live else None,
                gradients,
                modulation=wants_modulation or wants_text_modulation,
                inputs=wants_x or wants_text,
            )
        return (
            *(None, None, None),
            block.video.grad if wants_x else None,
            block.video.joined_modulation_grads() if wants_modulation else None,
            block.text.grad if wants_text else None,
            block.text.joined_modulation_grads() if wants_text_modulation else None,
            *gradients.values,
        )
