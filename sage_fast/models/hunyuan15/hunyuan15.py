"""The model family `hunyuan15`: HunyuanVideo-1.5 from its public checkpoints in diffusers' layout."""

import json
from dataclasses import replace
from pathlib import Path

from sage_fast.config.sections import ModelConfig
from sage_fast.models.family import Components, ModelDescription, ModelFamily, WeightFacts
from sage_fast.models.hub import Requirement, local_folder, require
from sage_fast.models.hunyuan15 import DEFAULT_REPOSITORY

DOWNLOAD_GB = 33.3 + 5.0 + 14.2 + 0.9
"""1e9 bytes of transformer, autoencoder, Qwen2.5-VL's language model and glyph encoder, at most: from their numbers of
parameters in float32, of the language model in bfloat16."""


class HunyuanVideo15(ModelFamily):
    """See `ModelFamily`. diffusers takes seconds to import, so the methods import what they need."""

    def load(self, model: ModelConfig) -> Components:
        from sage_fast.models.hunyuan15.loading import load_components

        return load_components(model)

    def describe(self, model: ModelConfig) -> ModelDescription:
        from sage_fast.models.hunyuan15.description import describe_local

        return describe_local(model)

    def requirements(self, model: ModelConfig) -> list[Requirement]:
        path = model.path or DEFAULT_REPOSITORY
        patterns = []
        for part in ("transformer", "vae", "text_encoder", "text_encoder_2"):
            patterns += [f"{part}/config.json", f"{part}/*.safetensors"]
        patterns += ["tokenizer/tokenizer_config.json", "tokenizer_2/tokenizer_config.json"]
        repository = DEFAULT_REPOSITORY.replace("480p", "720p") if "720p" in path else DEFAULT_REPOSITORY
        whole = require("HunyuanVideo-1.5", path, patterns, repository, gigabytes=DOWNLOAD_GB)
        missing = list(whole.missing)
        # Shards that an index names and that are not there, as after an interrupted download.
        for index in sorted((local_folder(path) or Path("/nowhere")).glob("*/*.safetensors.index.json")):
            try:
                names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
            except ValueError:
                continue  # damaged and not missing: the loader's checks name it
            missing += [f"{index.parent.name}/{name}" for name in sorted(names) if not (index.parent / name).is_file()]
        licence = "not licensed in the European Union, the United Kingdom and South Korea"
        return [replace(whole, missing=missing, licence=licence)]

    def inspect(self, model: ModelConfig) -> WeightFacts:
        from sage_fast.models.hunyuan15.loading import find_model

        return find_model(model, download=False)[1]

    def licence(self) -> tuple[str, str]:
        return "tencent-hunyuan-community", "https://github.com/Tencent-Hunyuan/HunyuanVideo-1.5/blob/main/LICENSE"

    def pipeline_base(self, model: ModelConfig) -> str:
        """See `ModelFamily.pipeline_base`.

        A folder without the whole pipeline is of the repository that it most likely came from. A path that no longer
        exists is returned as it is: code that fails on it is better than another model.
        """
        if model.path is None:
            return DEFAULT_REPOSITORY
        if super().pipeline_base(model) is None and (Path(model.path) / "transformer" / "config.json").is_file():
            from sage_fast.models.hunyuan15.loading import likely_repository

            return likely_repository(Path(model.path))
        return model.path
