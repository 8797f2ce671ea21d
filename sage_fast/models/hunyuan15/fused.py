"""The fused forward of HunyuanVideo-1.5 over diffusers' own class and weights, from
text and from pictures.

    from sage_fast import accelerate

    with accelerate(pipe):      # this instance only; or keep what it returns, and call its `undo`
        pipe("a red fox", ...)

The forward of the transformer and of its blocks is replaced. Class, parameters, their
names and `state_dict` stay, so LoRA adapters, `save_pretrained` and FSDP work as
before. The result is that of diffusers up to rounding, computed without what the video
does not need: padded text and with it the mask, the last block's text output, and
without a picture its zero tokens and zero condition channels. Timesteps stay float32.

Samples whose prompts have equally many tokens run as one dense batch; a batch of ragged
prompts runs as several.

Shapes: B batch, C channels, F frames, H, W, N video tokens, L text tokens, D width.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from diffusers.models.modeling_outputs import Transformer2DModelOutput
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.weak import WeakTensorKeyDictionary

from sage_fast.models.block import run_block
from sage_fast.models.fused import (
    BlockwiseForward,
    require_full_scale,
    without_autocast,
)
from sage_fast.models.hunyuan15.block import Block, read_block
from sage_fast.models.stored import MAX_LEVELS
from sage_fast.records import PromptEmbeds

logger = logging.getLogger(__name__)

AdaLN = Literal["auto", "weights", "table", "offload"]


class ModulationTable:
    """Modulation of all blocks by timestep, computed once per noise level.

    A block's modulation depends on the timestep alone. If its weights are frozen and a
    run visits a fixed set of noise levels, it is a table (53 MB in bfloat16 for 20
    levels of the 8.3 B model), and 5.4 GB of weights need not be on the GPU.

    A row is computed from its timestep alone, whichever batch asks for it first, so it
    has the same bits in every run. Rows are dropped when the weights change in place or
    are replaced. A change through `.data` goes unnoticed: empty `rows` after one.

    Args:
        transformer: the model, of K blocks.
        embed: silu of the time embedding (1, D) of a timestep (1,).
        offload: hold the AdaLN weights in CPU memory and copy them to the device for
            new timesteps only.
    """

    def __init__(
        self, transformer: Any, embed: Callable[[Tensor], Tensor], *, offload: bool
    ) -> None:
        self.embed = embed
        self.layers: list[Any] = all_adaln_layers(transformer)
        self.offload = offload
        self.rows: dict[float, Tensor] = {}
        self._version: tuple[Any, ...] | None = None
        self.watched = [transformer.time_embed, *self.layers]
        if offload:
            for layer in self.layers:
                layer.to("cpu")

    @torch.no_grad()
    def lookup(self, timesteps: Sequence[float], device: torch.device) -> Tensor:
        """Modulation of B samples, (2 K, B, 6 D) for K blocks: video and text of block
        0, then of block 1, and so on.

        Args:
            timesteps: B numbers.
            device: where the forward runs.
        """
        # A change in place counts up `_version`; a weight that was replaced has another
        # id or address.
        watched = (p for module in self.watched for p in module.parameters())
        version = (
            device,
            *(
                (id(p), p.data_ptr(), 0 if p.is_inference() else p._version)
                for p in watched
            ),
        )
        if version != self._version or len(self.rows) > MAX_LEVELS:
            self.rows = {}
            self._version = version
        for timestep in timesteps:
            if timestep not in self.rows:
                # Rows computed in inference mode, while generating, must serve training
                # as well.
                with torch.inference_mode(False):
                    embedded = self.embed(
                        torch.tensor([timestep], dtype=torch.float32).to(
                            device, non_blocking=True
                        )
                    )
                    row = []
                    for layer in self.layers:
                        # Weights that are offloaded come over for this product alone;
                        # the layer keeps them on the CPU.
                        weight = layer.weight.to(device, non_blocking=True)
                        if layer.bias is None:
                            bias = None
                        else:
                            bias = layer.bias.to(device, non_blocking=True)
                        row.append(F.linear(embedded, weight, bias)[0])
                    self.rows[timestep] = torch.stack(row)
        return torch.stack([self.rows[timestep] for timestep in timesteps], dim=1)


def all_adaln_layers(transformer: nn.Module) -> list[nn.Module]:
    """AdaLN projections of all blocks, in their order: of its video, of its text."""
    blocks: Any = transformer.transformer_blocks
    return [
        layer
        for block in blocks
        for layer in (block.norm1.linear, block.norm1_context.linear)
    ]


def can_tabulate(transformer: nn.Module) -> bool:
    """Tell whether the modulation is a function of the timestep that does not change
    during a run.

    True if the time embedding and the AdaLN layers of all blocks are plain, whole on
    this device, and frozen.
    """
    modules: Any = transformer
    layers = all_adaln_layers(transformer)
    if any(hasattr(module, "base_layer") for module in modules.time_embed.modules()):
        # the scale of an adapter may change without a trace, and so may the active one
        return False
    # peft's wrapper is not a Linear. A DTensor is FSDP2's part of a weight, and `ds_id`
    # marks one that ZeRO-3 shards.
    return all(isinstance(layer, nn.Linear) for layer in layers) and all(
        type(p.data) is Tensor and not hasattr(p, "ds_id") and not p.requires_grad
        for module in (modules.time_embed, *layers)
        for p in module.parameters()
    )


_READ = WeakTensorKeyDictionary()
"""Masks and tokens of pictures -> what was read of them, for as long as these tensors
live.
"""


def _remembered(tensor: Tensor, make: Callable[[], Any]) -> Any:
    """Result of `make` for a tensor, made again once the tensor has been changed in
    place.
    """
    # Tensors made in inference mode do not count their changes.
    version = None if tensor.is_inference() else tensor._version
    if tensor not in _READ or version is None or _READ[tensor][0] != version:
        _READ[tensor] = version, make()
    return _READ[tensor][1]


def _fused_block(
    self: Any,
    x: Tensor,
    text: Tensor,
    activated: Tensor,
    modulation: Tensor | None,
    text_modulation: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Forward of an accelerated block. It runs as a module, so that FSDP gathers the
    block's weights around it.
    """
    acceleration: Acceleration = self._acceleration
    if modulation is None or text_modulation is None:
        modulation = self.norm1.linear(activated)
        text_modulation = self.norm1_context.linear(activated)
    streams, flat = read_block(self, last=self is acceleration.blocks[-1])
    settings = acceleration.settings(x.device, x.dtype)
    given = (x, modulation, text, text_modulation, *flat)
    x, text_out = run_block(Block, settings, streams, acceleration.rotary, *given)
    return x, text if text_out is None else text_out


def _fused_forward(
    self: Any,
    hidden_states: Tensor,
    timestep: Tensor,
    encoder_hidden_states: Tensor | None = None,
    encoder_attention_mask: Tensor | None = None,
    timestep_r: Tensor | None = None,
    encoder_hidden_states_2: Tensor | None = None,
    encoder_attention_mask_2: Tensor | None = None,
    image_embeds: Tensor | None = None,
    attention_kwargs: dict[str, Any] | None = None,
    return_dict: bool = True,
    *,
    prompts: Sequence[PromptEmbeds] | None = None,
) -> Any:
    """Forward of an accelerated transformer: diffusers' arguments, or `prompts` instead
    of the conditions.
    """
    acceleration: Acceleration = self._acceleration
    if timestep_r is not None:
        raise ValueError(
            "timestep_r belongs to MeanFlow variants, which the fused forward does "
            "not compute."
        )
    if prompts is not None and timestep.dtype not in (torch.float32, torch.float64):
        raise ValueError(
            f"timestep is {timestep.dtype}; rounding it makes it another noise level. "
            "Pass float32; with FSDP2, use "
            "MixedPrecisionPolicy(cast_forward_inputs=False)."
        )
    if prompts is None:
        assert encoder_hidden_states is not None and encoder_attention_mask is not None
        prompts = acceleration.unpad(
            encoder_hidden_states,
            encoder_attention_mask,
            encoder_hidden_states_2,
            encoder_attention_mask_2,
            image_embeds,
        )
    if attention_kwargs:
        require_full_scale(attention_kwargs)
    sample = acceleration.forward(hidden_states, timestep, prompts)
    return Transformer2DModelOutput(sample=sample) if return_dict else (sample,)


@dataclass(kw_only=True, eq=False, repr=False)
class Acceleration(BlockwiseForward):
    """The fused forward of one transformer; `undo`, or the end of a `with`, restores
    diffusers' own.

    Made by `sage_fast.accelerate`, whose options it has.
    """

    computes: ClassVar = {
        "qk_norm": "rms_norm",
        "patch_size": 1,
        "patch_size_t": 1,
        "use_meanflow": False,
    }

    forwards = (_fused_forward, _fused_block)
    adjacent = (
        ("attn.to_q", "attn.to_k", "attn.to_v"),
        ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"),
    )

    adaln: AdaLN

    table: ModulationTable | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        if self.adaln in ("table", "offload") and not can_tabulate(self.transformer):
            raise ValueError(
                f"adaln is {self.adaln!r}, but the weights of the modulation "
                "(time_embed, norm1.linear, "
                "norm1_context.linear) are trained, sharded, or carry an adapter, so "
                "a table cannot replace them. "
                "Freeze them first, or choose auto."
            )
        # Offloading moves the weights now; a plain table is made by the first forward
        # that asks for it.
        if self.adaln == "offload":
            self.table = ModulationTable(
                self.transformer, self.embed_time, offload=True
            )

    def undo(self) -> None:
        super().undo()
        if self.table is not None and self.table.offload:
            for layer in self.table.layers:
                layer.to(self.transformer.device)
            self.table = None

    # ----------------------------------------------------------------------------------
    # forward

    def forward(
        self, latents: Tensor, timestep: Tensor, prompts: Sequence[PromptEmbeds]
    ) -> Tensor:
        """Velocity of B samples; prompts of one length run together.

        Args:
            latents: (B, C', F, H, W); C' is the model's in_channels, or its latent
                channels alone.
            timestep: (B,) float32 sigma * 1000. On the CPU it can be read without
                waiting for the GPU.
            prompts: B records.

        Returns:
            (B, C, F, H, W) in the weights' dtype.
        """
        # Only records have a frame; diffusers' padded input has these channels already.
        if prompts[0].frame is not None:
            latents = torch.cat([latents, picture_condition(latents, prompts)], dim=1)
        groups: dict[tuple[int, int, int], list[int]] = {}
        for row, prompt in enumerate(prompts):
            groups.setdefault(prompt.lengths, []).append(row)
        weights = self.transformer.x_embedder.proj.weight
        with without_autocast(latents, weights.dtype):
            if len(groups) == 1:
                return self._dense(latents, timestep, prompts)
            parts = [
                self._dense(latents[rows], timestep[rows], [prompts[r] for r in rows])
                for rows in groups.values()
            ]
        rows = [row for group in groups.values() for row in group]
        # The inverse permutation: from the order of the groups back to that of the
        # batch.
        return torch.cat(parts)[sorted(range(len(rows)), key=rows.__getitem__)]

    def _dense(
        self, latents: Tensor, timestep: Tensor, prompts: Sequence[PromptEmbeds]
    ) -> Tensor:
        transformer: Any = self.transformer
        weight = transformer.x_embedder.proj.weight
        device = weight.device
        dtype = weight.dtype
        if device != latents.device:
            raise ValueError(
                f"The latents are on {latents.device}, the weights on {device}. The "
                "fused forward reads the weights of "
                "layers without calling these, so offloading that moves weights layer "
                "by layer (sequential, or "
                "leaf_level) does not work with it. Use enable_model_cpu_offload, or "
                "undo the acceleration."
            )
        for name in ("x_embedder.proj", "cond_type_embed"):
            if hasattr(transformer.get_submodule(name), "base_layer"):
                raise ValueError(
                    f"{name} carries an adapter, which the fused forward does not "
                    "compute. Undo the acceleration "
                    "(model.forward stock), or use an adapter without it."
                )
        # Read before the copy: `tolist` of a tensor on the GPU would wait for all work
        # before it.
        known = timestep.tolist() if timestep.device.type == "cpu" else None
        timestep = timestep.to(device, torch.float32, non_blocking=True)
        activated = self.embed_time(timestep)
        text = self.embed_text(prompts, timestep, dtype)
        # missing condition channels are zero
        weight = weight.flatten(1)[:, : latents.shape[1]]
        # A patch is one latent (`computes`), so the embedder's convolution is a product
        # over channels.
        columns = latents.to(dtype).flatten(2).transpose(1, 2)
        # Without a name of its own the result of the product does not live through the
        # blocks.
        x = self.enter(
            F.linear(columns, weight, transformer.x_embedder.proj.bias), latents
        )
        table = self.modulation(known, timestep)
        for index, block in enumerate(self.blocks):
            modulations: tuple[Tensor | None, Tensor | None] = (None, None)
            if table is not None:
                modulations = (table[2 * index], table[2 * index + 1])
            x, text = block(x, text, activated, *modulations)
        norm = transformer.norm_out
        scale, shift = norm.linear(activated).chunk(2, dim=1)
        kernels = self.settings(x.device, x.dtype).kernels
        tokens = self.leave(
            transformer.proj_out(kernels.adaln(x, scale, shift, norm.norm.eps))
        )
        return tokens.transpose(1, 2).unflatten(2, latents.shape[2:])

    def embed_time(self, timestep: Tensor) -> Tensor:
        """silu of the time embedding, (B, D), of timesteps (B,) float32."""
        embed: Any = self.transformer.time_embed
        weight = embed.timestep_embedder.linear_1.weight
        return F.silu(
            embed.timestep_embedder(embed.time_proj(timestep).to(weight.dtype))
        )

    def embed_text(
        self, prompts: Sequence[PromptEmbeds], timestep: Tensor, dtype: torch.dtype
    ) -> Tensor:
        """Text tokens (B, L, D): the picture's, the glyphs', then the language model's,
        refined with the timestep.
        """
        transformer: Any = self.transformer
        device = timestep.device
        texts = torch.stack([p.text.to(device, dtype) for p in prompts])
        # Rows: 0 is text, 1 glyphs, 2 a picture. The mask is None, as the texts of a
        # dense batch are equally long.
        kind = transformer.cond_type_embed.weight
        parts = [transformer.context_embedder(texts, timestep, None) + kind[0]]
        if len(prompts[0].glyph):
            glyphs = [
                transformer.context_embedder_2(p.glyph.to(device, dtype)) + kind[1]
                for p in prompts
            ]
            parts.insert(0, torch.stack(glyphs))
        if images := [
            p.image.to(device, dtype) for p in prompts if p.image is not None
        ]:
            parts.insert(0, transformer.image_embedder(torch.stack(images)) + kind[2])
        return torch.cat(parts, dim=1) if len(parts) > 1 else parts[0]

    def modulation(self, known: list[float] | None, timestep: Tensor) -> Tensor | None:
        """Modulation of all blocks from the table, (2 K, B, 6 D); None if blocks
        compute their own.
        """
        tabulates = can_tabulate(self.transformer)
        if not tabulates:
            self.forget()  # peft writes through `.data` where it merges an adapter
        # `auto` takes the table only where the levels are known without waiting for the
        # GPU, and have no gradient.
        unknown = known is None or timestep.requires_grad
        if self.adaln == "weights" or (
            self.adaln == "auto" and (unknown or not tabulates)
        ):
            return None
        if not tabulates:
            raise ValueError(
                f"adaln is {self.adaln!r}, but the AdaLN weights are no longer "
                "frozen. Freeze them, or accelerate "
                "with adaln='auto'."
            )
        if self.table is None:
            self.table = ModulationTable(
                self.transformer, self.embed_time, offload=False
            )
        return self.table.lookup(
            timestep.tolist() if known is None else known, timestep.device
        )

    def forget(self) -> None:
        """Drop what was cached from frozen weights. Needed after writing to them
        through `.data`, which leaves no trace; any other change of the weights is
        noticed.
        """
        if self.table is not None:
            self.table.rows = {}

    # ----------------------------------------------------------------------------------
    # diffusers' padded conventions

    def unpad(
        self,
        text: Tensor,
        mask: Tensor,
        glyph: Tensor | None,
        glyph_mask: Tensor | None,
        image: Tensor | None,
    ) -> list[PromptEmbeds]:
        """Padded conditions with masks, as diffusers' pipeline passes them, to records
        of valid tokens.

        Waits for the GPU once per mask tensor, not once per step. Image tokens that are
        all zero stand for none. The picture's latents stay channels of the padded
        input.
        """
        images: Sequence[Tensor | None] = [None] * len(text)
        if (
            image is not None
            and image.shape[1]
            and _remembered(image, lambda: bool(image.any()))
        ):
            images = list(image)
        texts = self._valid(text, mask)
        if glyph is None or glyph_mask is None:
            glyphs = [
                text.new_zeros(0, self.transformer.config["text_embed_2_dim"])
            ] * len(texts)
        else:
            glyphs = self._valid(glyph, glyph_mask)
        return [
            PromptEmbeds(text=t, glyph=g, image=i)
            for t, g, i in zip(texts, glyphs, images, strict=True)
        ]

    def _valid(self, tokens: Tensor, mask: Tensor) -> list[Tensor]:
        valid = _remembered(
            mask, lambda: [row.nonzero().flatten() for row in mask.bool()]
        )
        return [
            row.index_select(0, index) for row, index in zip(tokens, valid, strict=True)
        ]


def picture_condition(latents: Tensor, prompts: Sequence[PromptEmbeds]) -> Tensor:
    """Condition channels (B, C + 1, F, H, W) of latents (B, C, F, H, W), in their type.

    The pictures' latents and a mask of ones in the first latent frame; zero in the
    others, and everywhere where the prompts have no picture.
    """
    batch, channels, *size = latents.shape
    condition = latents.new_zeros(batch, channels + 1, *size)
    if frames := [p.frame.to(latents) for p in prompts if p.frame is not None]:
        condition[:, :channels, :1] = torch.stack(frames)
        condition[:, channels, 0] = 1.0
    return condition
