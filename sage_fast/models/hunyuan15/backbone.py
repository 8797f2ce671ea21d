"""Code for diffusers' `HunyuanVideo15Transformer3DModel`: its velocity, fused or by
diffusers' forward, and its names.

Facts used here (diffusers 0.36 - 0.42, `HunyuanVideo15Transformer3DModel`):
* the input has 2C+1 channels: C latents, C condition latents and one mask; the last C+1
  are zero for text-to-video, and for image-to-video the picture's latents and 1 in the
  first latent frame;
* the tokens of a picture stand before glyph tokens and text; guidance keeps the picture
  in both branches;
* the time input is sigma * 1000 and stays float32: rounding it to the model's dtype
  moves the sampler off the trajectory that the log-probability is computed for;
* glyph and image tokens that do not exist are passed as zero-length tensors, so nothing
  is padded but ragged text;
* names of adapters elsewhere: double_blocks.0.img_attn_q.lora_A.weight in the official
  class (`HunyuanVideo_1_5_DiffusionTransformer`);
  diffusion_model.double_blocks.0.img_attn.qkv.lora_A.weight in ComfyUI
  (`model_lora_keys_unet`), where q, k and v are one layer;
  lora_unet_double_blocks_0_img_attn_q.lora_down.weight in musubi-tuner, the official
  names with `_` for `.`.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from diffusers import HunyuanVideo15Transformer3DModel
from torch import Tensor, nn

from sage_fast.config.sections import ModelConfig
from sage_fast.models.family import Client, ModelFamily, Work
from sage_fast.models.hunyuan15.fused import (
    Acceleration,
    all_adaln_layers,
    picture_condition,
)
from sage_fast.models.stored import velocity_dtype
from sage_fast.records import PromptEmbeds

IMAGE_TOKENS = 729
"""Tokens of a picture: 27 x 27 patches of the vision encoder."""


def velocity(
    transformer: HunyuanVideo15Transformer3DModel,
    latents: Tensor,
    sigma: Tensor,
    prompts: Sequence[PromptEmbeds],
) -> Tensor:
    """Velocity of the model, see `ModelFamily.velocity`.

    A sigma on the CPU is known without waiting for the GPU, which lets the fused
    forward look its modulation up in a table.
    """
    if "_acceleration" in transformer.__dict__:
        # Through the module's call, where FSDP and other hooks sit; `prompts` stand for
        # every padded argument.
        call: Any = transformer
        timestep = sigma * 1000.0
        if call._acceleration.adaln == "weights":
            # No table reads it on the host, and FSDP2 would wait for its copy.
            timestep = timestep.to(latents.device, non_blocking=True)
        packed: Tensor = call(
            hidden_states=latents, timestep=timestep, prompts=prompts, return_dict=False
        )[0]
        return packed.to(velocity_dtype(transformer))
    # diffusers' own forward takes one padded batch, with the masks of its valid tokens.
    dtype = transformer.dtype
    sigma = sigma.to(latents.device)
    images = [p.image.to(dtype) for p in prompts if p.image is not None]
    text, text_mask = _pad([p.text for p in prompts], dtype)
    glyph, glyph_mask = _pad([p.glyph for p in prompts], dtype)
    result: Tensor = transformer(
        hidden_states=torch.cat(
            [latents, picture_condition(latents, prompts)], dim=1
        ).to(dtype),
        timestep=sigma * 1000.0,
        encoder_hidden_states=text,
        encoder_attention_mask=text_mask,
        encoder_hidden_states_2=glyph,
        encoder_attention_mask_2=glyph_mask,
        image_embeds=torch.stack(images)
        if images
        else text.new_zeros(len(latents), 0, transformer.config["image_embed_dim"]),
        return_dict=False,
    )[0]
    return result.to(velocity_dtype(transformer))


def _pad(tokens: Sequence[Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Ragged (L_b, D) tokens to a padded (B, L, D) tensor and its (B, L) validity mask."""
    lengths = [t.shape[0] for t in tokens]
    padded = tokens[0].new_zeros(
        len(tokens), max(lengths), tokens[0].shape[1], dtype=dtype
    )
    mask = torch.zeros(padded.shape[:2], dtype=torch.bool, device=padded.device)
    for row, (t, length) in enumerate(zip(tokens, lengths, strict=True)):
        padded[row, :length] = t
        mask[row, :length] = True
    return padded, mask


def dead_modules(transformer: HunyuanVideo15Transformer3DModel) -> tuple[str, ...]:
    """See `ModelFamily.dead_modules`.

    The last block's text output is never read, so what only feeds it is dead. Without
    pictures so is what embeds them. A family whose prompts lack another kind of token
    names its modules as the transformer's `unread_modules`.
    """
    last = f"transformer_blocks.{len(transformer.transformer_blocks) - 1}"
    return (
        *(() if getattr(transformer, "reads_pictures", False) else ("image_embedder",)),
        f"{last}.attn.to_add_out",
        f"{last}.attn.add_q_proj",
        f"{last}.attn.norm_added_q",
        f"{last}.ff_context",
        *getattr(transformer, "unread_modules", ()),
    )


NAMES = {
    "norm1.linear": ("img_mod.linear", "img_mod.lin"),
    "attn.to_q": ("img_attn_q", "img_attn.qkv"),
    "attn.to_k": ("img_attn_k", "img_attn.qkv"),
    "attn.to_v": ("img_attn_v", "img_attn.qkv"),
    "attn.to_out.0": ("img_attn_proj", "img_attn.proj"),
    "ff.net.0.proj": ("img_mlp.fc1", "img_mlp.0"),
    "ff.net.2": ("img_mlp.fc2", "img_mlp.2"),
    "norm1_context.linear": ("txt_mod.linear", "txt_mod.lin"),
    "attn.add_q_proj": ("txt_attn_q", "txt_attn.qkv"),
    "attn.add_k_proj": ("txt_attn_k", "txt_attn.qkv"),
    "attn.add_v_proj": ("txt_attn_v", "txt_attn.qkv"),
    "attn.to_add_out": ("txt_attn_proj", "txt_attn.proj"),
    "ff_context.net.0.proj": ("txt_mlp.fc1", "txt_mlp.0"),
    "ff_context.net.2": ("txt_mlp.fc2", "txt_mlp.2"),
}
"""See `ModelFamily`."""


def image_tokens(config: Mapping[str, Any]) -> int:
    """Tokens of a picture in a transformer of this config: none where it reads none."""
    return IMAGE_TOKENS if config.get("reads_pictures") else 0


def forward_work(
    config: Mapping[str, Any], video_tokens: int, text_tokens: int
) -> Work:
    """One forward with packed tokens: 2 (N + L) 12 D^2 linear and 4 (N + L)^2 D
    attention per block, plus embedders.

    Args:
        config: of diffusers' transformer, with `reads_pictures` where it does.
        text_tokens: L of the blocks, those of a picture among them.
    """
    d = config["num_attention_heads"] * config["attention_head_dim"]
    n = video_tokens
    length = text_tokens
    # In D^2: queries, keys, values and output are four products, the feed-forward is
    # two of width mlp_ratio D.
    per_token = 4 + 2 * config["mlp_ratio"]
    # The second term is the modulation, one product for each stream.
    block = 2 * (n + length) * per_token * d * d + 2 * 2 * 6 * d * d
    # 256 sinusoids to D, then D to D.
    time = 2 * (256 * d + d * d)
    text = config["text_embed_dim"]
    images = image_tokens(config)
    length -= images  # the refiner is for text alone
    # The refiner has its own embedding of the time and of the text's mean, then
    # projects all text tokens.
    refiner = time + 2 * (text * d + d * d) + 2 * length * text * d
    refiner += config["num_refiner_layers"] * (2 * length * 12 * d * d + 2 * 2 * d * d)
    # First and last layer of the video's tokens, and the last modulation, of scale and
    # shift alone.
    ends = 2 * n * d * (config["in_channels"] + config["out_channels"]) + 2 * 2 * d * d
    if images:
        ends += 2 * images * config["image_embed_dim"] * (config["image_embed_dim"] + d)
    refining = config["num_refiner_layers"] * 4 * length**2 * d
    return Work(
        linear=config["num_layers"] * block + time + refiner + ends,
        attention=config["num_layers"] * 4 * (n + text_tokens) ** 2 * d + refining,
    )


def modulation(config: Mapping[str, Any]) -> int:
    """Numbers of a table of the modulation per noise level: 12 D per block."""
    return int(
        config["num_layers"]
        * 12
        * config["num_attention_heads"]
        * config["attention_head_dim"]
    )


class HunyuanTransformer(ModelFamily):
    """The half of a family that computes with this transformer."""

    transformer_class = "HunyuanVideo15Transformer3DModel"
    lora_targets = (
        *("attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0"),
        *("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj", "attn.to_add_out"),
    )
    adaln_targets = ("norm1.linear", "norm1_context.linear")
    time_embedding = ("time_embed",)
    names = NAMES
    official_blocks = "double_blocks"
    plans_stock = False
    architectures = ".*(hunyuan(video)?|hv)15.*"
    pipeline = "HunyuanVideo15Pipeline"
    clients: ClassVar = {
        "diffusers": Client("diffusers"),
        "comfyui": Client(
            "ComfyUI, diffusion-pipe",
            "# then load it with the node LoraLoaderModelOnly behind the "
            "HunyuanVideo-1.5 model\n"
            "cp {folder}/{file} ComfyUI/models/loras/",
        ),
        "official": Client(
            "Tencent's generate.py, LightX2V",
            "# in the official repository\npython generate.py --model_path ckpts "
            "--resolution {resolution} --sr false "
            "--prompt 'a red kite at sea' --lora_path {folder}",
        ),
        "musubi": Client(
            "musubi-tuner",
            "# musubi-tuner, with the other options of a generation\n"
            "python src/musubi_tuner/hv_1_5_generate_video.py --lora_weight "
            "{folder}/{file}",
        ),
        "peft": Client("peft, vLLM-Omni"),
    }
    velocity = staticmethod(velocity)
    dead_modules = staticmethod(dead_modules)
    adaln_layers = staticmethod(all_adaln_layers)

    @classmethod
    def build(cls, config: Mapping[str, Any]) -> HunyuanVideo15Transformer3DModel:
        """See `ModelFamily.build`; `unread_modules` and `reads_pictures` of the config
        are for `dead_modules`.
        """
        own = {"unread_modules": (), "reads_pictures": False}
        known = {key: value for key, value in config.items() if key not in own}
        transformer: HunyuanVideo15Transformer3DModel = super().build(known)
        for name, default in own.items():
            setattr(transformer, name, config.get(name, default))
        return transformer

    @staticmethod
    def fuse(
        transformer: HunyuanVideo15Transformer3DModel,
        model: ModelConfig,
        computes_in: tuple[torch.device, torch.dtype] | None = None,
    ) -> Acceleration:
        """See `ModelFamily.fuse`."""
        acceleration = Acceleration(
            transformer=transformer,
            attention=model.attention,
            kernels=model.kernels,
            checkpointing=model.settled_checkpointing,
            deterministic=model.deterministic,
            adaln=model.adaln,
        )
        now = next(transformer.parameters()).device, transformer.dtype
        acceleration.install(*(computes_in or now))
        return acceleration

    @staticmethod
    def always_read(transformer: HunyuanVideo15Transformer3DModel) -> None:
        """See `ModelFamily.always_read`: these are the weights behind glyph tokens."""
        if not any(
            p.requires_grad for p in transformer.context_embedder_2.parameters()
        ):
            return

        def add_nothing(
            module: nn.Module, arguments: Any, output: Tensor
        ) -> Tensor | None:
            if not torch.is_grad_enabled():
                return None
            unread = [
                p
                for p in transformer.context_embedder_2.parameters()
                if p.requires_grad
            ]
            # Sums of no elements: exactly zero whatever the weights hold, with a
            # gradient of zero.
            return output + sum(p.flatten()[:0].sum() for p in unread)

        # Every forward calls the embedder of the text, whatever its prompts are.
        transformer.context_embedder.register_forward_hook(add_nothing)

    @staticmethod
    def empty_prompt(
        config: Mapping[str, Any], tokens: int, dtype: torch.dtype
    ) -> PromptEmbeds:
        """See `ModelFamily.empty_prompt`; of the tokens of a model that reads pictures,
        `IMAGE_TOKENS` are of one.
        """
        empty = partial(torch.empty, dtype=dtype, device="meta")
        pictures = image_tokens(config)
        return PromptEmbeds(
            text=empty(tokens - pictures, config["text_embed_dim"]),
            glyph=empty(0, config["text_embed_2_dim"]),
            image=empty(pictures, config["image_embed_dim"]) if pictures else None,
            frame=empty(config["out_channels"], 1, 1, 1) if pictures else None,
        )

    def cast(self, transformer: Any, dtype: torch.dtype) -> None:
        """The stock time embedding casts its sinusoids to the timestep's dtype, so it
        would need a rounded timestep.

        A hook on this instance casts the sinusoids instead, after they were computed
        from the exact timestep.
        """
        super().cast(transformer, dtype)
        if dtype == torch.float32:
            return
        transformer.time_embed.timestep_embedder.register_forward_pre_hook(
            lambda module, arguments: (
                arguments[0].to(module.linear_1.weight.dtype),
                *arguments[1:],
            )
        )
