"""Which files of HunyuanVideo-1.5 are missing, and the command that fetches each. Nothing is loaded here."""

import json
import shlex
from dataclasses import replace
from pathlib import Path

from sage_fast.config.model_sections import ModelConfig
from sage_fast.models.hub import Requirement, fetch_command, local_folder, missing_files, require

DEFAULT_REPOSITORY = "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_t2v"
OFFICIAL_REPOSITORY = "tencent/HunyuanVideo-1.5"

TRANSFORMER_GB, VAE_GB, LANGUAGE_MODEL_GB, QWEN_GB, GLYPH_GB = 33.3, 5.0, 14.2, 16.6, 0.9
"""1e9 bytes of the parts, from their numbers of parameters: transformer, autoencoder and glyph encoder as in float32,
which is the most that their files can be; Qwen2.5-VL's language model alone, and whole, in bfloat16."""


def converted_gigabytes(model: ModelConfig) -> float:
    """What the official layout still has to be converted to, at most; 0 for diffusers' layout."""
    folder = model_folder(model.path) if model.path else None
    return TRANSFORMER_GB + VAE_GB + GLYPH_GB if folder and any(folder.glob("transformer/*/config.json")) else 0.0


def hunyuan15_requirements(model: ModelConfig) -> list[Requirement]:
    """What a model needs: a folder in diffusers' layout, or the official one and three encoders from elsewhere."""
    path = model.path or DEFAULT_REPOSITORY
    folder = model_folder(path)
    if folder is not None and any((folder / "transformer").glob("*/config.json")):
        named = local_folder(path)
        return _official(folder, named.name if named is not None and named != folder else model.variant)
    patterns = []
    for part in ("transformer", "vae", "text_encoder", "text_encoder_2"):
        patterns += [f"{part}/config.json", f"{part}/*.safetensors"]
    patterns += ["tokenizer/tokenizer_config.json", "tokenizer_2/tokenizer_config.json"]
    repository = DEFAULT_REPOSITORY.replace("480p", "720p") if "720p" in path else DEFAULT_REPOSITORY
    size = TRANSFORMER_GB + VAE_GB + LANGUAGE_MODEL_GB + GLYPH_GB
    whole = require("HunyuanVideo-1.5", path, patterns, repository, gigabytes=size)
    shards = _missing_shards(folder) if folder is not None else []
    return [replace(whole, missing=whole.missing + shards)]


def _missing_shards(folder: Path) -> list[str]:
    """Files that the indices of a sharded model name and that are not there, as after an interrupted download."""
    missing = []
    for index in sorted(folder.glob("*/*.safetensors.index.json")):
        try:
            names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except ValueError:
            continue  # damaged and not missing: the loader's checks say so
        missing += [f"{index.parent.name}/{name}" for name in sorted(names) if not (index.parent / name).is_file()]
    return missing


def _official(root: Path, variant: str | None) -> list[Requirement]:
    """The official ckpts folder and the text encoders, which come from other repositories."""
    own = (
        "HunyuanVideo-1.5",
        TRANSFORMER_GB + VAE_GB,
        root,
        [f"transformer/{variant or '*_t2v*'}/*.safetensors", "vae/config.json", "vae/*.safetensors"],
        fetch_command(OFFICIAL_REPOSITORY, f"transformer/{variant or '480p_t2v'}/*", "vae/*", folder=root),
    )
    return [
        Requirement(
            name=name,
            where=str(folder),
            missing=missing_files(folder, patterns),
            fetch=fetch,
            repository=fetch.split()[2] if fetch.startswith("hf ") else None,
            gigabytes=size,
        )
        for name, size, folder, patterns, fetch in [own, *official_encoders(root)]
    ]


def official_encoders(root: Path) -> list[tuple[str, float, Path, list[str], str]]:
    """Name, gigabytes, folder, files and the command that fetches them, of each text encoder of an official folder."""
    text = root / "text_encoder"
    llm, small, glyph = text / "llm", text / "byt5-small", text / "Glyph-SDXL-v2"
    settings = ["config.json", "tokenizer_config.json"]
    colours = ["assets/color_idx.json", "assets/multilingual_10-lang_idx.json", "checkpoints/byt5_model.pt"]
    return [
        (
            "text encoder",
            QWEN_GB,
            llm,
            [*settings, "*.safetensors"],
            fetch_command("Qwen/Qwen2.5-VL-7B-Instruct", folder=llm),
        ),
        ("ByT5", 0.0, small, settings, fetch_command("google/byt5-small", "*.json", folder=small)),
        (
            "glyph encoder",
            GLYPH_GB,
            glyph,
            colours,
            shlex.join(["modelscope", "download", "--model", "AI-ModelScope/Glyph-SDXL-v2", "--local_dir", str(glyph)]),
        ),
    ]


def model_folder(path: str) -> Path | None:
    """The folder of the whole model that `model.path` means, which may name one transformer of the official layout."""
    folder = local_folder(path)
    return None if folder is None else checkpoint_root(folder)


def checkpoint_root(folder: Path) -> Path:
    """The checkpoint of a path that may name one transformer of the official layout, ckpts/transformer/480p_t2v."""
    folder = folder.expanduser()
    if folder.parent.name == "transformer" and (folder / "config.json").is_file():
        return folder.parents[1]
    return folder
