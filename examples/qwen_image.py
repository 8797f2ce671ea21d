"""Qwen-Image as a model family of your own, by diffusers' classes: text to pictures.

`pictures.yaml`, laid over a preset by
`PYTHONPATH=examples sage-fast train hv15_quick_lora_1gpu pictures.yaml`:

    model: {family: "qwen_image:QwenImage", path: Qwen/Qwen-Image, forward: stock,
            checkpointing: full, vae_dtype: bfloat16}
    video: {num_frames: 1, height: 512, width: 512}
    reward: {rewards: [pick_score], weights: {PickScore: 1.0}}

First `hf download Qwen/Qwen-Image`, or set the path to a folder with it.

Nobody has trained the published weights with it. Tests compare a tiny model of the same
classes with diffusers' pipeline: tokens, velocity, latents without guidance, pixels.
Two things differ from that pipeline:

* it rescales a guided velocity to the norm of the conditional one, and this does not;
* its shift of the noise levels depends on the size of the picture, and here it is
  `rollout.shift`. The card of an export sets that shift.
"""

from collections.abc import Generator, Sequence
from typing import Any

import torch
from diffusers import (
    AutoencoderKLQwenImage,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
)
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import Qwen2_5_VLForConditionalGeneration, Qwen2Tokenizer

from sage_fast.config.sections import ModelConfig
from sage_fast.models.family import Components, ModelFamily
from sage_fast.models.hub import cache_folder, checkpoint_folder, load_vae, model_device
from sage_fast.models.prompt_cache import CachedPromptEncoder
from sage_fast.models.video_decoding import AutoencoderDecoder
from sage_fast.records import PromptEmbeds


class Encoder(CachedPromptEncoder):
    """Text (L, 3584), L <= 512, by the pipeline's own method."""

    template = "Qwen-Image"
    limits = 512

    def encode_each(
        self, texts: Sequence[str]
    ) -> Generator[tuple[PromptEmbeds, int], None, None]:
        pipeline = QwenImagePipeline(
            text_encoder=self._load(Qwen2_5_VLForConditionalGeneration, "text_encoder"),
            tokenizer=Qwen2Tokenizer.from_pretrained(self.root / "tokenizer"),
            **dict.fromkeys(("scheduler", "vae", "transformer")),
        )
        try:
            for text in texts:
                with torch.no_grad():
                    tokens, _ = pipeline.encode_prompt(text or " ", self.device)
                yield PromptEmbeds(text=tokens[0, : self.limits]), tokens.shape[1]
        finally:
            del pipeline
            self._release()


class Decoder(AutoencoderDecoder):
    """Latents (B, 16, 1, H, W) to pictures uint8 (B, 1, 3, 8H, 8W)."""

    kind = AutoencoderKLQwenImage
    channels, time, space, step = 16, 4, 8, 16

    def latent_shape(self, num_frames: int, *size: int) -> tuple[int, int, int, int]:
        if num_frames != 1:
            raise ValueError(f"video.num_frames is {num_frames}; a picture has 1.")
        return super().latent_shape(num_frames, *size)


class QwenImage(ModelFamily):
    """See `ModelFamily`."""

    repository = "Qwen/Qwen-Image"
    transformer_class = "QwenImageTransformer2DModel"
    decoder = Decoder
    lora_targets = (
        *("attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0"),
        *("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj", "attn.to_add_out"),
    )
    pipeline = "QwenImagePipeline"
    task = "text-to-image"
    scheduler = (
        "FlowMatchEulerDiscreteScheduler",
        "use_dynamic_shifting=False, shift_terminal=None, shift",
    )
    licence = "apache-2.0", "https://www.apache.org/licenses/LICENSE-2.0"

    def load(self, model: ModelConfig) -> Components:
        root = checkpoint_folder(model.path or self.repository, "model.path")
        device = model_device(model)
        dtype = model.decode_dtype(device.startswith("cuda"))
        return Components(
            transformer=QwenImageTransformer2DModel.from_pretrained(
                root / "transformer", torch_dtype=getattr(torch, model.dtype)
            ),
            prompt_encoder=Encoder(
                root=root, cache=cache_folder(model) / "prompts", device=device
            ),
            video_decoder=Decoder(load_vae(Decoder.kind, root / "vae", dtype)),
        )

    @staticmethod
    def velocity(
        transformer: Any,
        latents: Tensor,
        sigma: Tensor,
        prompts: Sequence[PromptEmbeds],
    ) -> Tensor:
        videos, channels, _, height, width = latents.shape
        dtype = transformer.img_in.weight.dtype
        lengths = torch.tensor([len(prompt.text) for prompt in prompts])
        mask = torch.arange(int(lengths.max())) < lengths[:, None]
        result = transformer(
            hidden_states=QwenImagePipeline._pack_latents(
                latents[:, :, 0].to(dtype), videos, channels, height, width
            ),
            encoder_hidden_states=pad_sequence(
                [prompt.text.to(dtype) for prompt in prompts], batch_first=True
            ),
            # None where nothing is padded, as in the pipeline.
            encoder_hidden_states_mask=None if mask.all() else mask.to(latents.device),
            timestep=sigma.to(latents.device),
            img_shapes=[[(1, height // 2, width // 2)]] * videos,
            return_dict=False,
        )[0]
        sides = 8 * height, 8 * width
        return QwenImagePipeline._unpack_latents(result, *sides, 8).float()

    @staticmethod
    def dead_modules(transformer: Any) -> tuple[str, ...]:
        last = f"transformer_blocks.{len(transformer.transformer_blocks) - 1}"
        dead = ("attn.add_q_proj", "attn.norm_added_q", "attn.to_add_out", "txt_mlp")
        return tuple(f"{last}.{name}" for name in dead)
