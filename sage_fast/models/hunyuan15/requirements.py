"""Files that a configuration needs, which of them are missing, and the command that fetches each.

Nothing is loaded, converted or downloaded here. A path may be a folder or the id of a hub repository, which counts as
present when it is in the hub's local cache.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sage_fast.config.schema import RunConfig

HUNYUAN = "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_t2v"
OFFICIAL = "tencent/HunyuanVideo-1.5"


@dataclass(frozen=True, kw_only=True)
class Requirement:
    """Some files that must be there. `missing`: patterns that nothing matches; `fetch`: the command that gets them.

    Example: `Requirement(name="VideoAlign", where="models/VideoReward", missing=["model_config.json"], fetch="hf ...")`
    """

    name: str
    where: str
    missing: list[str]
    fetch: str

    @property
    def absent(self) -> bool:
        """Whether the folder is not there at all."""
        return local_folder(self.where) is None


def requirements(config: RunConfig) -> list[Requirement]:
    """What the model family and the rewards of a config need, in the order in which a run loads it."""
    return [*model_requirements(config), *reward_requirements(config)]


def model_requirements(config: RunConfig) -> list[Requirement]:
    """What the model family of a config needs."""
    return _FAMILIES[config.model.family](config) if config.model.family in _FAMILIES else []


def reward_requirements(config: RunConfig) -> list[Requirement]:
    """What the rewards of a config need."""
    chosen = [name for name in config.reward.rewards if name in _REWARDS]
    return [found for name in chosen for found in _REWARDS[name](config.reward.options.get(name, {}))]


def weight_sizes(config: RunConfig) -> dict[str, float]:
    """Gigabytes (1e9 bytes) of the weights beside the transformer that are here: `vae`, and rewards by name."""
    folders = {
        name: config.reward.options.get(name, {}).get("path", default) for name, default in _REWARD_PATHS.items()
    }
    sizes = {}
    for name, path in folders.items():
        if (folder := local_folder(str(path))) is not None:
            sizes[name] = sum(f.stat().st_size for f in folder.rglob("*") if f.suffix in (".safetensors", ".pth")) / 1e9
    model = model_folder(config.model.path) if config.model.path else None
    if model is not None and (model / "vae").is_dir():
        sizes["vae"] = sum(f.stat().st_size for f in (model / "vae").glob("*.safetensors")) / 1e9
    return {name: size for name, size in sizes.items() if size}


def local_folder(path: str) -> Path | None:
    """The folder that a path means: itself, or a repository's snapshot in the hub's local cache; None for neither."""
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder
    if not is_repository(path):
        return None
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(snapshot_download(path, local_files_only=True))
    except LocalEntryNotFoundError:
        return None


def model_folder(path: str) -> Path | None:
    """The folder of the whole model that `model.path` means, which may name one transformer of the official layout."""
    from sage_fast.models.hunyuan15.loading import checkpoint_root

    folder = local_folder(path)
    return None if folder is None else checkpoint_root(folder)


def is_repository(path: str) -> bool:
    """Whether a path that is no folder here is meant as `owner/name` on the hub. Where its parent is a folder here, as
    in models/VideoReward, a folder is meant.
    """
    return re.fullmatch(r"[\w.-]+/[\w.-]+", path) is not None and not Path(path).parent.is_dir()


def _check(name: str, path: str, patterns: Sequence[str], repository: str, include: str = "") -> Requirement:
    """A requirement of one repository: `path` is a folder of it, or its id."""
    if is_repository(path) and not Path(path).is_dir():
        fetch = f"hf download {path}{include}"
    else:
        fetch = f"hf download {repository}{include} --local-dir {path}"
    return Requirement(name=name, where=path, missing=_missing(local_folder(path), patterns), fetch=fetch)


def _missing(folder: Path | None, patterns: Sequence[str]) -> list[str]:
    """Patterns that no file of the folder matches; `a|b` is matched by either."""
    return [p for p in patterns if folder is None or not any(any(folder.glob(part)) for part in p.split("|"))]


def _hunyuan15(config: RunConfig) -> list[Requirement]:
    path = config.model.path or HUNYUAN
    folder = model_folder(path)
    if folder is not None and any((folder / "transformer").glob("*/config.json")):
        named = local_folder(path)
        return _official(folder, named.name if named is not None and named != folder else config.model.variant)
    patterns = []
    for part in ("transformer", "vae", "text_encoder", "text_encoder_2"):
        patterns += [f"{part}/config.json", f"{part}/*.safetensors"]
    patterns += ["tokenizer/tokenizer_config.json", "tokenizer_2/tokenizer_config.json"]
    repository = HUNYUAN.replace("480p", "720p") if "720p" in path else HUNYUAN
    whole = _check("HunyuanVideo-1.5", path, patterns, repository)
    shards = _missing_shards(folder) if folder is not None else []
    return [Requirement(name=whole.name, where=path, missing=whole.missing + shards, fetch=whole.fetch)]


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
    """The official ckpts folder, whose text encoders come from other repositories."""
    chosen = variant or "480p_t2v"
    text = root / "text_encoder"
    parts = [
        (
            "HunyuanVideo-1.5",
            root,
            [f"transformer/{variant or '*_t2v*'}/*.safetensors", "vae/config.json", "vae/*.safetensors"],
            f"hf download {OFFICIAL} --include 'transformer/{chosen}/*' 'vae/*' --local-dir {root}",
        ),
        (
            "text encoder",
            text / "llm",
            ["config.json", "tokenizer_config.json", "*.safetensors"],
            f"hf download Qwen/Qwen2.5-VL-7B-Instruct --local-dir {text / 'llm'}",
        ),
        (
            "ByT5",
            text / "byt5-small",
            ["config.json", "tokenizer_config.json"],
            f"hf download google/byt5-small --local-dir {text / 'byt5-small'}",
        ),
        (
            "glyph encoder",
            text / "Glyph-SDXL-v2",
            ["assets/color_idx.json", "assets/multilingual_10-lang_idx.json", "checkpoints/byt5_model.pt"],
            f"modelscope download --model AI-ModelScope/Glyph-SDXL-v2 --local_dir {text / 'Glyph-SDXL-v2'}",
        ),
    ]
    return [
        Requirement(name=name, where=str(folder), missing=[p for p in patterns if not any(folder.glob(p))], fetch=fetch)
        for name, folder, patterns, fetch in parts
    ]


def _videoalign(options: Mapping[str, Any]) -> list[Requirement]:
    path = str(options.get("path", _REWARD_PATHS["videoalign"]))
    base = str(options.get("base_model", "Qwen/Qwen2-VL-2B-Instruct"))
    # It is read from a folder only: the id of a repository would not do.
    folder = Path(path).expanduser()
    reward = Requirement(
        name="VideoAlign",
        where=path,
        missing=_missing(
            folder, ["model_config.json", "checkpoint-*/model.pth|checkpoint-*/adapter_model.safetensors"]
        ),
        fetch=f"hf download KwaiVGI/VideoReward --local-dir {path}",
    )
    full = any(folder.glob("checkpoint-*/model.pth"))
    # With model.pth only configuration and tokenizer of the base model are read.
    patterns = ["config.json", "tokenizer_config.json", *([] if full else ["*.safetensors"])]
    include = " --include '*.json' '*.txt'" if full else ""
    return [reward, _check("VideoAlign's base model", base, patterns, "Qwen/Qwen2-VL-2B-Instruct", include)]


def _clip_score(options: Mapping[str, Any]) -> list[Requirement]:
    path = str(options.get("path", _REWARD_PATHS["clip_score"]))
    patterns = ["config.json", "*.safetensors|*.bin", "preprocessor_config.json", "tokenizer_config.json"]
    return [_check("CLIPScore", path, patterns, "openai/clip-vit-large-patch14")]


def _pick_score(options: Mapping[str, Any]) -> list[Requirement]:
    path = str(options.get("path", _REWARD_PATHS["pick_score"]))
    model = _check("PickScore", path, ["config.json", "*.safetensors|*.bin"], "yuvalkirstain/PickScore_v1")
    processor = options.get("processor")
    if processor is None:
        folder = Path(path).expanduser()
        if (folder / "preprocessor_config.json").is_file():
            return [model]
        processor = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K"
    return [
        model,
        _check(
            "PickScore's processor",
            str(processor),
            ["preprocessor_config.json", "tokenizer_config.json"],
            "laion/CLIP-ViT-H-14-laion2B-s32B-b79K",
            " --include '*.json' '*.txt'",
        ),
    ]


_REWARD_PATHS = {
    "videoalign": "models/VideoReward",
    "clip_score": "openai/clip-vit-large-patch14",
    "pick_score": "yuvalkirstain/PickScore_v1",
}
_FAMILIES = {"hunyuan15": _hunyuan15}
_REWARDS = {"videoalign": _videoalign, "clip_score": _clip_score, "pick_score": _pick_score}
