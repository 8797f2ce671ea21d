"""Contenders with the fused forward: diffusers' own modules and weights, run in three
other ways.

    P1   diffusers as shipped: text padded to what its pipeline passes, an N x N mask in every block
    P2   the mask removed, packed tokens, and the attention kernel that the fused forward uses
    P2c  P2 with every block under torch.compile

A peer is switched on for one instance inside a `with` and leaves it as it was; no class
is changed. P2 and P2c keep what diffusers' gradient checkpointing keeps, every block's
input. Adapters have the weights' type while P2 is on, where the fused forward has
float32 masters: it is the faster way to run peft.

Letters: B batch, N video tokens, L text tokens, H heads, D head dimension.
"""

from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from itertools import product
from typing import Any
from unittest.mock import patch

import torch
from diffusers import HunyuanVideo15Transformer3DModel
from diffusers.models.embeddings import apply_rotary_emb
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import sage_kernels
from benchmarks.shapes import Shape
from sage_fast import accelerate
from sage_fast.models.attention.attention import attention
from sage_fast.models.hunyuan15.backbone import velocity as policy_velocity
from sage_fast.models.stored import Checkpointing
from sage_fast.policy.lora import trainable_parameters
from sage_fast.records import PromptEmbeds
from sage_kernels import launchers, reference

Velocity = Callable[[Tensor, Tensor, PromptEmbeds], Tensor]
"""velocity(latents (1, C, F, H, W) float32, sigma (1,) float32 on the CPU, prompt) ->
(1, C, F, H, W) float32.
"""


class PackedProcessor:
    """Attention processor for a block without padding: no mask, and the kernel of
    `models/attention`.
    """

    def __init__(self, backend: str) -> None:
        self.backend = backend

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        image_rotary_emb: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """(B, N, width) video and (B, L, width) text tokens to the same, attended."""
        assert attention_mask is None and image_rotary_emb is not None
        heads = (attn.heads, -1)
        video = hidden_states
        text = encoder_hidden_states
        q = apply_rotary_emb(
            attn.norm_q(attn.to_q(video).unflatten(2, heads)),
            image_rotary_emb,
            sequence_dim=1,
        )
        k = apply_rotary_emb(
            attn.norm_k(attn.to_k(video).unflatten(2, heads)),
            image_rotary_emb,
            sequence_dim=1,
        )
        text_q = attn.norm_added_q(attn.add_q_proj(text).unflatten(2, heads))
        text_k = attn.norm_added_k(attn.add_k_proj(text).unflatten(2, heads))
        v = attn.to_v(video).unflatten(2, heads)
        text_v = attn.add_v_proj(text).unflatten(2, heads)
        joint = (
            torch.cat(pair, dim=1) for pair in ((q, text_q), (k, text_k), (v, text_v))
        )
        out = attention(*joint, backend=self.backend)[0].flatten(2, 3)
        video_out, text_out = out.split([video.shape[1], text.shape[1]], dim=1)
        return attn.to_out[1](attn.to_out[0](video_out)), attn.to_add_out(text_out)


def run_block(
    block: Any, x: Tensor, text: Tensor, embedded: Tensor, rope: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """One diffusers block on packed tokens; a separate function so that all blocks
    share one compilation.
    """
    result: tuple[Tensor, Tensor] = block(x, text, embedded, None, rope)
    return result


@contextmanager
def padded(
    transformer: HunyuanVideo15Transformer3DModel, shape: Shape
) -> Iterator[Velocity]:
    """P1: diffusers as shipped, with the conditions and the rounded timestep that its
    pipeline passes.
    """
    dtype = transformer.dtype
    device = transformer.device
    text_length, glyph_length, image_length = shape.padding

    def velocity(latents: Tensor, sigma: Tensor, prompt: PromptEmbeds) -> Tensor:
        valid = prompt.text.shape[0]
        text = torch.zeros(
            1, text_length, prompt.text.shape[1], dtype=dtype, device=device
        )
        text[0, :valid] = prompt.text
        mask = (torch.arange(text_length, device=device) < valid)[None]
        condition = latents.new_zeros(1, latents.shape[1] + 1, *latents.shape[2:])
        out: Tensor = transformer(
            hidden_states=torch.cat([latents, condition], dim=1).to(dtype),
            timestep=(sigma * 1000.0).to(device, dtype),
            encoder_hidden_states=text,
            encoder_attention_mask=mask,
            encoder_hidden_states_2=text.new_zeros(
                1, glyph_length, transformer.config["text_embed_2_dim"]
            ),
            encoder_attention_mask_2=mask.new_zeros(1, glyph_length),
            image_embeds=text.new_zeros(
                1, image_length, transformer.config["image_embed_dim"]
            ),
            return_dict=False,
        )[0]
        return out.float()

    yield velocity


@contextmanager
def packed(
    transformer: HunyuanVideo15Transformer3DModel,
    *,
    backend: str,
    checkpointing: bool = False,
    compiler: str | None = None,
    cast_adapters: bool = True,
) -> Iterator[Velocity]:
    """P2, diffusers' forward over valid tokens alone, and with a `compiler` (a backend
    of torch.compile) P2c.

    The prompt has no glyph tokens; the type is the transformer's, or float32 where that
    is less.

    Args:
        backend: of `sage_fast.models.attention.attention`, by its own name.
        checkpointing: keep only each block's input for the backward pass, as diffusers'
            gradient checkpointing does.
        cast_adapters: LoRA weights take the transformer's dtype for as long as this
            peer is on.
    """
    processors = transformer.attn_processors
    own = PackedProcessor(backend)
    transformer.set_attn_processor(
        {
            name: own if name.startswith("transformer_blocks.") else kept
            for name, kept in processors.items()
        }
    )
    masters: dict[str, Tensor] = {}
    if cast_adapters:
        masters = {
            name: p.data for name, p in trainable_parameters(transformer).items()
        }
    cast = {name: master.to(transformer.dtype) for name, master in masters.items()}
    _set_adapters(transformer, cast)
    run: Callable[..., tuple[Tensor, Tensor]] = run_block
    if compiler is not None:
        torch._dynamo.reset()
        run = torch.compile(run_block, backend=compiler, dynamic=False)

    def velocity(latents: Tensor, sigma: Tensor, prompt: PromptEmbeds) -> Tensor:
        model: Any = transformer
        dtype = model.dtype
        timestep = (sigma * 1000.0).to(model.device)
        assert (model.config["patch_size_t"], model.config["patch_size"]) == (1, 1), (
            "a patch is one latent, in 1.5"
        )
        # Condition channels are zero.
        missing = latents.new_zeros(
            1, model.config["in_channels"] - latents.shape[1], *latents.shape[2:]
        )
        latents = torch.cat([latents, missing], dim=1).to(dtype)
        rope = model.rope(latents)
        embedded = model.time_embed(timestep)
        x = model.x_embedder(latents)
        text = (
            model.context_embedder(prompt.text[None].to(dtype), timestep, None)
            + model.cond_type_embed.weight[0]
        )
        for block in model.transformer_blocks:
            if checkpointing and torch.is_grad_enabled():
                x, text = checkpoint(
                    run, block, x, text, embedded, rope, use_reentrant=False
                )
            else:
                x, text = run(block, x, text, embedded, rope)
        out: Tensor = (
            model.proj_out(model.norm_out(x, embedded))
            .transpose(1, 2)
            .unflatten(2, latents.shape[2:])
        )
        return out.to(torch.promote_types(out.dtype, torch.float32))

    try:
        yield velocity
    finally:
        _set_adapters(transformer, masters)
        transformer.set_attn_processor(processors)
        if compiler is not None:
            torch._dynamo.reset()


def _set_adapters(
    transformer: HunyuanVideo15Transformer3DModel, values: dict[str, Tensor]
) -> None:
    parameters = trainable_parameters(transformer)
    for name, value in values.items():
        parameters[name].grad = None
        parameters[name].data = value


@contextmanager
def plain_ops(ops: Collection[str]) -> Iterator[None]:
    """Within the context these ops of sage_kernels are their plain PyTorch twins, on
    any device.
    """
    twins = [
        name
        for op in ops
        for name in (op, f"{op}_backward", f"linear_{op}")
        if hasattr(reference, name)
    ]
    with ExitStack() as stack:
        for module, name in product((sage_kernels, launchers), twins):
            if hasattr(module, name):
                stack.enter_context(
                    patch.object(module, name, getattr(reference, name))
                )
        yield


@contextmanager
def fused(
    transformer: HunyuanVideo15Transformer3DModel,
    *,
    backend: str,
    checkpointing: Checkpointing = "none",
    reference_ops: Collection[str] = (),
) -> Iterator[Velocity]:
    """The fused forward, through the call that users make.

    reference_ops: ops that do not run their kernel, because it is wrong on this device.
    """
    acceleration = accelerate(
        transformer, attention=backend, checkpointing=checkpointing
    )

    def velocity(latents: Tensor, sigma: Tensor, prompt: PromptEmbeds) -> Tensor:
        return policy_velocity(transformer, latents, sigma, [prompt])

    try:
        with plain_ops(reference_ops):
            yield velocity
    finally:
        acceleration.undo()


def contender(
    name: str,
    transformer: HunyuanVideo15Transformer3DModel,
    shape: Shape,
    backend: str,
    *,
    checkpointing: Checkpointing = "none",
    compiler: str | None = None,
    cast_adapters: bool = True,
    reference_ops: Collection[str] = (),
) -> AbstractContextManager[Velocity]:
    """ours, P1, P2 or P2c, to be switched on by `with`.

    Args:
        reference_ops: of ours, see `fused`.
        checkpointing: of ours; the peers keep block inputs alone where it is "full",
            and everything otherwise.
        compiler: backend of torch.compile, for P2c.
    """
    if name == "ours":
        return fused(
            transformer,
            backend=backend,
            checkpointing=checkpointing,
            reference_ops=reference_ops,
        )
    if name == "P1":
        return padded(transformer, shape)
    return packed(
        transformer,
        backend=backend,
        checkpointing=checkpointing == "full",
        compiler=compiler if name == "P2c" else None,
        cast_adapters=cast_adapters,
    )
