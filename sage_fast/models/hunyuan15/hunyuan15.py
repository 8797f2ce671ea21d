"""The model family `hunyuan15`: HunyuanVideo-1.5 from its public checkpoints."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from sage_fast.config.model_sections import ModelConfig
from sage_fast.models.family import Components, ModelDescription, ModelFamily, WeightFacts
from sage_fast.models.hub import Requirement
from sage_fast.models.hunyuan15.requirements import (
    DEFAULT_REPOSITORY,
    converted_gigabytes,
    hunyuan15_requirements,
)

PIPELINES = "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-{variant}"
"""Published pipelines in diffusers' layout."""


class HunyuanVideo15(ModelFamily):
    """See `ModelFamily`. diffusers takes seconds to import, so the methods import what they need."""

    def load(self, model: ModelConfig) -> Components:
        from sage_fast.models.hunyuan15.loading import load_components

        return load_components(model)

    def describe(self, model: ModelConfig) -> ModelDescription:
        from sage_fast.models.hunyuan15.description import describe_local

        return describe_local(model)

    def requirements(self, model: ModelConfig) -> list[Requirement]:
        return hunyuan15_requirements(model)

    def cache(self, model: ModelConfig) -> tuple[Path, float]:
        from sage_fast.models.hunyuan15.loading import cache_folder

        folder = cache_folder(model)
        return folder, 0.0 if (folder / "converted").is_dir() else converted_gigabytes(model)

    def inspect(self, model: ModelConfig) -> WeightFacts:
        from sage_fast.models.hunyuan15.loading import find_model

        return find_model(model, download=False)

    def variant(self, model: ModelConfig) -> str | None:
        """The transformer of the official layout, such as 720p_t2v; None for another layout.

        A checkpoint may be exported where its base model is not: then model.variant and the path have to tell.
        """
        if model.variant is not None or model.path is None:
            return model.variant
        path = Path(model.path).expanduser()
        if path.parent.name == "transformer":
            return path.name
        try:
            found = self.inspect(model) if path.is_dir() else None
        except ValueError:
            return None  # of a folder that no longer holds a whole model
        return None if found is None else found.variant

    def open_transformer(self, model: ModelConfig) -> tuple[Any, Mapping[str, Tensor]]:
        """Modules on the meta device; the weights stay on disk."""
        from sage_fast.models.hunyuan15.loading import cache_folder, find_model, model_files, open_transformer

        return open_transformer(model_files(find_model(model), cache_folder(model)).transformer)

    def licence(self) -> tuple[str, str]:
        return "tencent-hunyuan-community", "https://github.com/Tencent-Hunyuan/HunyuanVideo-1.5/blob/main/LICENSE"

    def pipeline_base(self, model: ModelConfig) -> str:
        """See `ModelFamily.pipeline_base`.

        A path that is nothing here any more is returned as it is: code that fails on it is better than another model.
        """
        if (folder := super().pipeline_base(model)) is not None:
            return folder
        if model.path is None:
            return DEFAULT_REPOSITORY
        if published := re.search(r"\d+p_t2v(_distilled)?", self.variant(model) or ""):
            return PIPELINES.format(variant=published[0])
        if (Path(model.path) / "transformer" / "config.json").is_file():
            from sage_fast.models.hunyuan15.loading import likely_repository

            return likely_repository(Path(model.path))
        return model.path
