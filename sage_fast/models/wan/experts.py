"""The model family `wan_experts`: Wan 2.2 A14B text-to-video, two transformers of which
the noise level chooses one.

`transformer` computes at sigma >= boundary_ratio, the start of a video, `transformer_2`
below. Each has an adapter and may have a guidance scale: `rollout.guidance_scale: [4,
3]`, that of `transformer` first, as in the authors' configuration for A14B.

A micro-batch of an update may have videos at levels of both experts. Then each computes
all rows, and every row takes that of its expert: a batch of another size rounds
otherwise on a GPU, and the first ratio would not be 1. Where weights are sharded, ranks
gather them together, so an expert that any of them needs is run by all. Both cost
nothing where all videos are at one step: in rollouts and evaluations, and in updates
with `training.permute_timesteps: false` or of one video at a time on one GPU.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from diffusers import WanTransformer3DModel
from diffusers.configuration_utils import ConfigMixin
from diffusers.loaders import PeftAdapterMixin
from diffusers.models.modeling_utils import ModelMixin
from torch import Tensor

from sage_fast.config.errors import ConfigError
from sage_fast.config.sections import ModelConfig
from sage_fast.models.attention.joint import SequenceLayout
from sage_fast.models.family import Client, Components, ModelDescription, WeightFacts
from sage_fast.models.hub import (
    fetch_command,
    find_folder,
    published_shift,
    require_parts,
)
from sage_fast.models.stored import (
    FusedForward,
    StoredWeights,
    open_transformer,
    read_json,
)
from sage_fast.models.wan import PAIR_REPOSITORY
from sage_fast.models.wan.fused import WanTransformer, accelerate_wan
from sage_fast.models.wan.wan import PARTS, Wan
from sage_fast.records import PromptEmbeds

EXPERTS = {"high_noise.": "transformer", "low_noise.": "transformer_2"}
"""How names of weights begin -> folder, which is the name in a pipeline."""


class WanExperts(ModelMixin, ConfigMixin, PeftAdapterMixin):  # type: ignore[misc]
    """Two transformers as one module, so that what is done to a transformer's blocks,
    weights and adapters is done to both.

    Args:
        high_noise, low_noise: of one size.
        boundary_ratio: lowest noise level of the first; as published.
    """

    _supports_gradient_checkpointing = True

    def __init__(
        self,
        high_noise: WanTransformer3DModel,
        low_noise: WanTransformer3DModel,
        boundary_ratio: float = 0.875,
    ) -> None:
        super().__init__()
        self.high_noise = high_noise
        self.low_noise = low_noise
        sizes = {k: v for k, v in high_noise.config.items() if not k.startswith("_")}
        self.register_to_config(**sizes, boundary_ratio=boundary_ratio)

    def experts_at(self, sigma: Tensor) -> list[int]:
        """Number of the expert that computes at each noise level (B,)."""
        # In thousandths, as the pipeline compares them.
        low = sigma * 1000 < self.config["boundary_ratio"] * 1000
        return [int(row) for row in low.tolist()]

    def forward(
        self,
        latents: Tensor,
        sigma: Tensor,
        prompts: Sequence[PromptEmbeds],
        experts: Sequence[int],
    ) -> Tensor:
        """Velocity as `ModelFamily.velocity`; experts: number of each row's."""
        needed = torch.tensor([number in experts for number in range(2)])
        if self._shards is not None:
            # Ranks that gathered other layers' weights would exchange the wrong ones.
            needed = needed.to(latents.device, torch.int32)
            dist.all_reduce(needed, dist.ReduceOp.MAX, self._shards)
        pair = zip((self.high_noise, self.low_noise), needed.tolist(), strict=True)
        first, *second = (
            WanTransformer.velocity(expert, latents, sigma, prompts)
            for expert, wanted in pair
            if wanted
        )
        if not second:
            return first
        rows = torch.tensor(experts, device=latents.device).view(-1, 1, 1, 1, 1)
        return torch.where(rows == 0, first, second[0])

    @cached_property
    def _shards(self) -> dist.ProcessGroup | None:
        """Ranks that hold parts of each weight; None where they are whole. Asked first
        in the first forward, when the blocks are not gathered.
        """
        from torch.distributed.tensor import DTensor

        for parameter in self.high_noise.blocks.parameters():
            if isinstance(parameter, DTensor):
                return parameter.device_mesh.get_group(-1)
        return None


class ExpertsForward(FusedForward):
    """The fused forwards of both."""

    adaln = "weights"

    def __init__(self, transformer: WanExperts, parts: Sequence[FusedForward]) -> None:
        self.transformer = transformer
        self.parts = parts
        transformer.__dict__["_acceleration"] = self

    @property
    def sequence(self) -> SequenceLayout | None:  # type: ignore[override]
        """See `FusedForward`."""
        return self.parts[0].sequence

    @sequence.setter
    def sequence(self, layout: SequenceLayout | None) -> None:
        for part in self.parts:
            part.sequence = layout

    def undo(self) -> None:
        for part in self.parts:
            part.undo()
        self.transformer.__dict__.pop("_acceleration", None)


class WanPair(Wan):
    """See `ModelFamily`."""

    repository = PAIR_REPOSITORY
    parts = (*PARTS, "transformer_2")
    transformer_class = "WanExperts"
    experts = tuple(EXPERTS)
    architectures = r"(?!.*(wan(video)?2[13-9]|i2v|5b)).*wan.*"
    clients: ClassVar = {
        "diffusers": Client("diffusers"),
        "comfyui": Client(
            "ComfyUI",
            "# then a node LoraLoaderModelOnly for each, behind its model\n"
            "cp {folder}/*_noise.safetensors ComfyUI/models/loras/",
        ),
        "musubi": Client(
            "musubi-tuner",
            "# musubi-tuner, with the other options of a generation\n"
            "python src/musubi_tuner/wan_generate_video.py --lora_weight "
            "{folder}/low_noise.safetensors --lora_weight_high_noise {folder}/{file}",
        ),
    }

    def load(self, model: ModelConfig) -> Components:
        found = super().load(model)
        root, _ = self.find(model)
        low, _ = open_transformer(
            WanTransformer3DModel,
            root / EXPERTS["low_noise."],
            getattr(torch, model.dtype),
            buffers=("rope",),
        )
        boundary = read_json(root / "model_index.json")["boundary_ratio"]
        found.transformer = WanExperts(found.transformer, low, boundary).eval()
        found.weights = StoredWeights(root, EXPERTS)
        return found

    def describe(self, model: ModelConfig) -> ModelDescription:
        found = super().describe(model)
        transformer = {**found.transformer, "_class_name": "WanExperts"}
        return replace(found, transformer=transformer)

    def find(
        self, model: ModelConfig, *, download: bool = True
    ) -> tuple[Path, WeightFacts]:
        path = model.path or self.repository
        parts = (*self.parts, "scheduler")
        root = find_folder(
            path, parts, self.repository, "convert_wan", download=download
        )
        file = root / "model_index.json"
        index = read_json(file) if file.is_file() else {}
        known = index.get("_class_name") == "WanPipeline"
        if not known or index.get("boundary_ratio") is None:
            raise ValueError(
                f"{file} is not of a WanPipeline with a boundary_ratio between two "
                "experts. For one transformer set model.family to wan; get two with: "
                f"{fetch_command(self.repository)}"
            )
        require_parts(root, self.parts, path, self.repository)
        return root, WeightFacts(shift=published_shift(root), experts=2)

    @staticmethod
    def build(config: Mapping[str, Any]) -> Any:
        return WanExperts(*(WanTransformer.build(config) for _ in EXPERTS))

    @staticmethod
    def velocity(
        transformer: WanExperts,
        latents: Tensor,
        sigma: Tensor,
        prompts: Sequence[PromptEmbeds],
    ) -> Tensor:
        experts = transformer.experts_at(sigma)
        # Through the module's call, around which FSDP gathers what is in no block.
        result: Tensor = transformer(latents, sigma, prompts, experts)
        return result

    @staticmethod
    def fuse(  # type: ignore[override]
        transformer: WanExperts,
        model: ModelConfig,
        computes_in: tuple[torch.device, torch.dtype] | None = None,
    ) -> ExpertsForward:
        pair = (transformer.high_noise, transformer.low_noise)
        parts = [accelerate_wan(expert, model, computes_in) for expert in pair]
        return ExpertsForward(transformer, parts)

    @staticmethod
    def always_read(transformer: WanExperts) -> None:
        raise ConfigError(
            "model.family is wan_experts, of which one expert at a time has a "
            "gradient, and DeepSpeed or whole weights need one of all. Set "
            "training.mode to lora and distributed.zero_stage to null."
        )
