"""One block of Wan: the fused forward, and a backward that recomputes what was not
saved.

The video tokens x attend to each other, then to the text, whose tokens stay as they
are, and in image-to-video to a picture's before them:

    y  = LayerNorm(x) (1 + scale_msa) + shift_msa                              adaln
    q, k, v = y W_qkv + b;  q, k = RoPE(RMSNorm(q, k))                         one product; qk_norm_across_heads
    x1 = x + gate_msa (o W_o + b);  y2 = LayerNorm(x1) w + b                   gated_residual_adaln
    q2 = RMSNorm(y2 W_q + b);  k2, v2 = text W_kv + b;  k2 = RMSNorm(k2)       qk_norm_across_heads
    o2 = attention(q2, k2, v2), with a picture + attention(q2, k3, v3);  k3, v3 = picture W_kv3 + b, k3 = RMSNorm(k3)
    x2 = x1 + o2 W_o2 + b;  y3 = LayerNorm(x2) (1 + scale_mlp) + shift_mlp     gated_residual_adaln, gate 1
    x3 = x2 + gate_mlp (gelu(y3 W_1 + b) W_2 + b)                              gelu_tanh, gated_residual

o and o2 are the results of attention. This is `WanTransformerBlock.forward` of
diffusers without rounding between the elementwise steps. The affine layer norm is a
modulation of scale w - 1 and shift b that all samples share.

What the forward saves for the backward (S = one tensor of all video tokens; f = width
of the feed-forward over D):

    none          x, qkv, o, o W_o, q2, o2, o2 W_o2, y3 W_1: 8 S + f S; only elementwise work is recomputed
    feed_forward  x, qkv, o, o W_o, q2, o2, o2 W_o2: 9 S; the product with W_1 is recomputed too
    selective     x, o, o2: 3 S; matrix products are recomputed except the one with W_2, attention is not
    full          x: 1 S; attention is recomputed too

Every stage is computed when it is first asked for, so a backward pass computes what it
asks for and was not saved.

Shapes: B batch, N video tokens, L text tokens, D width, H heads; rows are tokens of all
samples.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from sage_fast.kernels import BlockKernels, without_graph
from sage_fast.models.block import EPS, BlockPass, Stage, Weights, read_layers
from sage_fast.models.fused import BlockSettings, Rotary
from sage_fast.models.projection import Gradients, read_adapters

TEXT_TOKENS = 512
"""Of every prompt."""

_INPUTS = (
    "qkv",
    "attention",
    "attended",
    "text_q",
    "text_kv",
    "text_attention",
    "text_attended",
)
SAVED = {
    "none": (*_INPUTS, "hidden"),
    "feed_forward": _INPUTS,
    "selective": ("attention", "text_attention"),
    "full": (),
}
"""Stages of a `Block` that the forward leaves for the backward, by checkpointing."""


def read_block(block: Any) -> tuple[Weights, list[Tensor]]:
    """The weights of a diffusers `WanTransformerBlock`, by name and as one flat list
    that ends in four norms, with a picture's keys in five.
    """
    flat: list[Tensor] = []
    own = block.attn1
    text = block.attn2
    ffn = block.ffn.net
    groups = {
        "qkv": read_layers(flat, own.to_q, own.to_k, own.to_v),
        "out": read_layers(flat, own.to_out[0]),
        "text_q": read_layers(flat, text.to_q),
        "text_kv": read_layers(flat, text.to_k, text.to_v),
        "text_out": read_layers(flat, text.to_out[0]),
        "ff_in": read_layers(flat, ffn[0].proj),
        "ff_out": read_layers(flat, ffn[2]),
    }
    norms = [own.norm_q, own.norm_k, text.norm_q, text.norm_k]
    if text.add_k_proj is not None:
        groups["image_kv"] = read_layers(flat, text.add_k_proj, text.add_v_proj)
        norms.append(text.norm_added_k)
    first = len(flat)
    flat += [norm.weight for norm in norms]
    return Weights(groups, first), flat


class Modulation(NamedTuple):
    """The eight (B, D) vectors of a block, with two noise levels (B, 2, D): diffusers'
    table in its order, and the affine layer norm's w - 1 and b.
    """

    shift_msa: Tensor
    scale_msa: Tensor
    gate_msa: Tensor
    shift_mlp: Tensor
    scale_mlp: Tensor
    gate_mlp: Tensor
    scale_text: Tensor
    shift_text: Tensor


@dataclass(frozen=True)
class TwoLevels:
    """Kernels of tokens with two noise levels: their modulation is (B, 2, D), of the
    first tokens and of the others.

    Attributes:
        kernels: of one level.
        first: tokens that the first level is of.
    """

    kernels: BlockKernels
    first: int

    def __getattr__(self, name: str) -> Any:
        run = getattr(self.kernels, name)
        return partial(self._run, run, *_FORMS[name]) if name in _FORMS else run

    def _run(
        self, run: Callable[..., Any], takes: str, gives: str, *given: Any, **more: Any
    ) -> Any:
        results: list[Sequence[Tensor]] = []
        for level, tokens in enumerate((slice(self.first), slice(self.first, None))):
            parts = list(given)
            for place, (kind, value) in enumerate(zip(takes, given, strict=False)):
                if kind == "t" and value is not None:
                    parts[place] = value[:, tokens]
                elif kind == "v":
                    parts[place] = value[:, level]
            # A share of the tokens may have only one of the levels.
            found = run(*parts, **more) if parts[0].shape[1] else ()
            results.append((found,) if isinstance(found, Tensor) else found)
        joined = []
        for place, kind in enumerate(gives):
            known = [found[place] for found in results if found]
            if kind == "t":
                joined.append(torch.cat(known, 1))
            else:
                zero = torch.zeros_like(known[0])
                pair = [found[place] if found else zero for found in results]
                joined.append(torch.stack(pair, -2))
        return joined[0] if len(gives) == 1 else tuple(joined)


_FORMS = {
    "adaln": ("tvv..", "t"),
    "adaln_backward": ("ttv...t", "tvv"),
    "gated_residual": ("ttv", "t"),
    "gated_residual_backward": ("ttv.", "tv"),
    "gated_residual_adaln": ("ttvvv.", "tt"),
    "gated_residual_adaln_backward": ("ttttvv...", "ttvvv"),
}
"""Kernels with modulation -> kinds of their arguments and of their results: tokens (B,
N, D), vectors (B, D) and others.
"""


class Block(BlockPass):
    """One pass of one block.

    Args:
        settings: how.
        weights: from `read_block`.
        rotary: tables of the video tokens.
        tensors: (B, N, D) video tokens, or this rank's share of them; text (B, L, D),
            a picture's tokens before the `TEXT_TOKENS`; modulation (B, 8, D) or (B, 2,
            8, D), see `Modulation`; and the weights as `read_block` lists them.
    """

    num_inputs = 3
    live = ()

    def __init__(
        self,
        settings: BlockSettings,
        weights: Weights,
        rotary: Rotary,
        *tensors: Tensor,
    ) -> None:
        self.x, self.text, modulation, *flat = tensors
        adapters = read_adapters(list(weights.groups.values()), self.x.dtype)
        kernels = without_graph(settings.kernels, self.x.device)
        if modulation.ndim == 4:
            kernels = cast(BlockKernels, TwoLevels(kernels, settings.first))
        super().__init__(
            kernels, weights.groups, dict(zip(weights.groups, adapters, strict=True))
        )
        self.settings = settings
        self.rotary = rotary
        self.first_norm = weights.norms
        self.modulation = Modulation(*modulation.unbind(-2))
        # The branch of the text has no gate, and the kernel wants one.
        self.one = torch.ones_like(self.modulation.gate_msa)
        self.saved = SAVED[settings.checkpointing]
        norm_q, norm_k, text_norm_q, text_norm_k, *image_norm = flat[weights.norms :]
        self.norms = [(norm_q, norm_k), (text_norm_q, text_norm_k)]
        self.norms += [(norm, norm) for norm in image_norm]
        self.image, self.text = self.text.tensor_split([-TEXT_TOKENS], dim=1)
        self.pictured = bool(image_norm)
        if self.pictured and "text_attention" in self.saved:
            self.saved = (*self.saved, "image_attention")

    def heads(self, tokens: Tensor) -> tuple[Tensor, ...]:
        """Layers' results (B, tokens, n D) as n views (B, tokens, H, head dim)."""
        width = self.x.shape[2]
        head_dim = self.rotary.cos.shape[1]
        return tuple(
            part.unflatten(2, (-1, head_dim)) for part in tokens.split(width, dim=2)
        )

    # ----------------------------------------------------------------------------------
    # stages

    @Stage
    def y(self) -> Tensor:
        return self.modulate(
            self.x, self.modulation.scale_msa, self.modulation.shift_msa
        )

    @Stage
    def qkv(self) -> Tensor:
        return self.project("qkv", self.y)

    @Stage
    def rotated(self) -> tuple[Tensor, Tensor]:
        q, k, _ = self.heads(self.qkv)
        return self.kernels.qk_norm_across_heads(
            q, k, *self.norms[0], *self.rotary, EPS
        )

    @Stage
    def attention(self) -> tuple[Tensor, Tensor]:
        """o and its log-sum-exp."""
        return self.settings.attention.forward(
            *self.rotated, self.heads(self.qkv)[2], self.x.shape[1]
        )

    @Stage
    def attended(self) -> Tensor:
        return self.project("out", self.attention[0].flatten(2))

    @Stage
    def residual(self) -> tuple[Tensor, Tensor]:
        """x1 and y2."""
        m = self.modulation
        return self.kernels.gated_residual_adaln(
            self.x, self.attended, m.gate_msa, m.scale_text, m.shift_text, EPS
        )

    @Stage
    def text_q(self) -> Tensor:
        return self.project("text_q", self.residual[1])

    @Stage
    def text_kv(self) -> Tensor:
        return self.project("text_kv", self.text)

    @Stage
    def text_normed(self) -> tuple[Tensor, Tensor]:
        (q,) = self.heads(self.text_q)
        k, _ = self.heads(self.text_kv)
        return self.kernels.qk_norm_across_heads(q, k, *self.norms[1], None, None, EPS)

    @Stage
    def text_attention(self) -> tuple[Tensor, Tensor]:
        """o2 and its log-sum-exp: every rank has all of the text, so no token is
        exchanged.
        """
        return self.settings.local.forward(
            *self.text_normed, self.heads(self.text_kv)[1], self.x.shape[1]
        )

    @Stage
    def image_kv(self) -> Tensor:
        return self.project("image_kv", self.image)

    @Stage
    def image_attention(self) -> tuple[Tensor, Tensor]:
        """As `text_attention`, to a picture."""
        raw, v = self.heads(self.image_kv)
        q = self.text_normed[0]
        return self.settings.local.forward(q, self.image_keys(raw), v, self.x.shape[1])

    def image_keys(self, raw: Tensor) -> Tensor:
        """k3 of raw keys."""
        norm = self.norms[2]
        none = raw[:, :0]  # queries
        return self.kernels.qk_norm_across_heads(none, raw, *norm, None, None, EPS)[1]

    def attended_text(self) -> Tensor:
        """o2 (B, N, D)."""
        o = self.text_attention[0]
        return (o + self.image_attention[0] if self.pictured else o).flatten(2)

    @Stage
    def text_attended(self) -> Tensor:
        return self.project("text_out", self.attended_text())

    @Stage
    def text_residual(self) -> tuple[Tensor, Tensor]:
        """x2 and y3."""
        m = self.modulation
        x1 = self.residual[0]
        return self.kernels.gated_residual_adaln(
            x1, self.text_attended, self.one, m.scale_mlp, m.shift_mlp, EPS
        )

    @Stage
    def hidden(self) -> Tensor:
        return self.project("ff_in", self.text_residual[1])

    def forward(self) -> Tensor:
        """x3."""
        # Reading a stage computes it. Each is freed after its last reader, unless the
        # backward has it saved.
        _ = self.attention
        self.forget("y", "qkv", "rotated")
        _ = self.residual
        self.forget("attended")
        _ = self.text_attended
        self.forget("text_q", "text_kv", "text_normed", "image_kv")
        residual, _ = self.text_residual
        self.forget("residual", "text_attended")
        activated = self.kernels.gelu_tanh(self.hidden)
        self.forget("text_residual", "hidden")
        return self.kernels.gated_residual(
            residual, self.project("ff_out", activated), self.modulation.gate_mlp
        )

    # ----------------------------------------------------------------------------------
    # backward

    def backward(
        self, grads: Sequence[Tensor], wanted: Sequence[bool], gradients: Gradients
    ) -> tuple[Tensor | None, ...]:
        """Of x, the text and the modulation, where they are wanted; `gradients` takes
        those of the weights.
        """
        wants_x, wants_text, modulation, *_ = wanted
        grad = grads[0].contiguous()
        m = self.modulation
        kernels = self.kernels
        found = dict[str, Tensor]()
        # From the end: the feed-forward, from x3 to y3.
        y3_grad, gate_grad = self.feed_forward_backward(
            grad,
            self.hidden,
            self.text_residual[1],
            m.gate_mlp,
            gradients,
            modulation=modulation,
        )
        self.forget("hidden")
        # Without gradients of the modulation the kernel does not read o2 W_o2.
        residual = self.text_residual[0]
        attended = self.text_attended if modulation else None
        grad, branch, _, found["scale_mlp"], found["shift_mlp"] = (
            kernels.gated_residual_adaln_backward(
                grad,
                y3_grad,
                residual,
                attended,
                self.one,
                m.scale_mlp,
                residual.dtype,
                m.shift_mlp.dtype,
                EPS,
            )
        )
        self.forget("text_residual", "text_attended")
        # Attention to the text: from x2 to y2 and to the text's own tokens.
        out, lse = self.text_attention
        out_grad = self.project_backward(
            "text_out", [branch], self.attended_text(), gradients
        ).view(out.shape)
        (raw_q,) = self.heads(self.text_q)
        raw_k, v = self.heads(self.text_kv)
        dq, dk, dv = self.settings.local.backward(
            out_grad, *self.text_normed, v, out, lse, self.x.shape[1]
        )
        if self.pictured:
            image_grad, dq_image = self.picture_backward(out_grad, gradients)
            dq = dq + dq_image
        dq, dk = self.norm_backward(1, dq, dk, raw_q, raw_k, None, gradients)
        text_grad = self.project_backward(
            "text_kv", [dk.flatten(2), dv.flatten(2)], self.text, gradients
        )
        if self.pictured:
            text_grad = torch.cat([image_grad, text_grad], 1)
        residual, normed = self.residual
        y2_grad = self.project_backward("text_q", [dq.flatten(2)], normed, gradients)
        self.forget("text_q", "text_kv", "text_normed", "image_kv")
        attended = self.attended if modulation else None
        grad, branch, found["gate_msa"], found["scale_text"], found["shift_text"] = (
            kernels.gated_residual_adaln_backward(
                grad,
                y2_grad,
                residual,
                attended,
                m.gate_msa,
                m.scale_text,
                residual.dtype,
                m.shift_text.dtype,
                EPS,
            )
        )
        # Local names hold these tensors too: with them `forget` would free nothing.
        del residual, normed, y2_grad, y3_grad, attended
        self.forget("residual", "attended")
        # The video's own attention: from x1 to x.
        out, lse = self.attention
        out_grad = self.project_backward(
            "out", [branch], out.flatten(2), gradients
        ).view(out.shape)
        raw_q, raw_k, v = self.heads(self.qkv)
        dq, dk, dv = self.settings.attention.backward(
            out_grad, *self.rotated, v, out, lse, self.x.shape[1]
        )
        dq, dk = self.norm_backward(0, dq, dk, raw_q, raw_k, self.rotary, gradients)
        # y is elementwise and never saved. Only gradients of weights read it.
        y = self.y if gradients.wants(*self.layers["qkv"]) else None
        y_grad = self.project_backward(
            "qkv", [part.flatten(2) for part in (dq, dk, dv)], y, gradients
        )
        if wants_x or wants_text or modulation:
            grad, found["scale_msa"], found["shift_msa"] = kernels.adaln_backward(
                y_grad, self.x, m.scale_msa, m.shift_msa.dtype, EPS, modulation, grad
            )
        modulation_grad = None
        if gate_grad is not None:
            found["gate_mlp"] = gate_grad
            modulation_grad = torch.stack([found[n] for n in Modulation._fields], -2)
        return (
            grad if wants_x else None,
            text_grad if wants_text else None,
            modulation_grad,
        )

    def picture_backward(
        self, out_grad: Tensor, gradients: Gradients
    ) -> tuple[Tensor, Tensor]:
        """Gradients of the picture's tokens and of q2, from that of o2."""
        raw, v = self.heads(self.image_kv)
        out, lse = self.image_attention
        q = self.text_normed[0]
        k = self.image_keys(raw)
        dq, dk, dv = self.settings.local.backward(
            out_grad, q, k, v, out, lse, self.x.shape[1]
        )
        none = raw[:, :0]  # queries
        _, dk = self.norm_backward(2, none, dk, none, raw, None, gradients)
        image_grad = self.project_backward(
            "image_kv", [dk.flatten(2), dv.flatten(2)], self.image, gradients
        )
        return image_grad, dq

    def norm_backward(
        self,
        index: int,
        dq: Tensor,
        dk: Tensor,
        q: Tensor,
        k: Tensor,
        rotary: Rotary | None,
        gradients: Gradients,
    ) -> tuple[Tensor, Tensor]:
        """Gradients of raw queries and keys: of the video's own attention (0), of that
        to the text (1), or to a picture (2), whose queries are normed with the text's.
        """
        # In the flat list norms lie in pairs, of the queries and of the keys.
        position = self.first_norm + 2 * index
        cos, sin = rotary or (None, None)
        wanted = any(gradients.wanted[position : position + 2])
        dq, dk, *weights = self.kernels.qk_norm_across_heads_backward(
            dq, dk, q, k, *self.norms[index], cos, sin, EPS, wanted
        )
        for i, weight in enumerate(weights[1:] if index == 2 else weights):
            gradients.put(position + i, weight)
        return dq, dk
