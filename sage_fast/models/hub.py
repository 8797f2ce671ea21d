"""Folders of a model in diffusers' layout: here, in the hub's local cache, or missing,
and then the command that fetches them.

A path may be a folder or the id of a repository on the Hugging Face hub, which counts
as present when it is in the local cache. A run downloads what is missing, unless
HF_HUB_OFFLINE is set; a plan downloads nothing.
"""

import inspect
import os
import re
import shlex
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import torch

from sage_fast.config.errors import ConfigError
from sage_fast.config.sections import ModelConfig
from sage_fast.models.stored import (
    STEMS,
    load_pretrained,
    open_weights,
    read_json,
    weight_files,
)


@dataclass(frozen=True, kw_only=True)
class Requirement:
    """Some files that must be there. `missing`: patterns that nothing matches; `fetch`:
    the command that gets them; `repository`: of the hub, where they come from one;
    `gigabytes`: 1e9 bytes that the command fetches, at most; `licence`: what it
    forbids, where that stops some users.

    Example: `Requirement(name="VideoAlign", where="models/VideoReward",
    missing=["model_config.json"], fetch="hf ...")`
    """

    name: str
    where: str
    missing: list[str]
    fetch: str
    repository: str | None = None
    gigabytes: float = 0.0
    licence: str = ""


def download_folder(requirement: Requirement) -> Path:
    """Where the command of a requirement puts the files: the hub's cache, or the folder
    that is named.
    """
    from huggingface_hub.constants import HF_HUB_CACHE

    where = requirement.where
    return Path(HF_HUB_CACHE) if is_repository(where) else Path(where).expanduser()


def fetch_command(
    repository: str, *include: str, folder: str | Path | None = None
) -> str:
    """The command that downloads a repository, or what matches the patterns `include`,
    to a folder or the hub's cache.

    Every pattern has a separate `--include`: the hub's command takes a second one
    behind it for a file's name.

    Example: `fetch_command("a/b", "*.json")` is `"hf download a/b --include '*.json'"`.
    """
    chosen = [word for pattern in include for word in ("--include", pattern)]
    # A shell leaves `~` alone between quotes.
    target = [] if folder is None else ["--local-dir", str(Path(folder).expanduser())]
    return shlex.join(["hf", "download", repository, *chosen, *target])


def require(
    name: str,
    path: str,
    patterns: Sequence[str],
    repository: str,
    *include: str,
    gigabytes: float = 0.0,
) -> Requirement:
    """A requirement that one repository of the hub fulfils.

    Args:
        path: a folder, or the id of the repository or of another one like it.
        patterns: glob patterns of its files; `a|b` is matched by either.
        repository: where the files come from when `path` is a folder.
        include: glob patterns of what is downloaded; none are everything.
        gigabytes: 1e9 bytes of that, at most.
    """
    folder = None if is_repository(path) else path
    if folder is None:
        repository = path
    return Requirement(
        name=name,
        where=path,
        missing=missing_files(local_folder(path), patterns),
        fetch=fetch_command(repository, *include, folder=folder),
        repository=repository,
        gigabytes=gigabytes,
    )


def missing_files(folder: Path | None, patterns: Sequence[str]) -> list[str]:
    """Patterns that no file of the folder matches; `a|b` is matched by either."""
    return [
        p
        for p in patterns
        if folder is None or not any(any(folder.glob(part)) for part in p.split("|"))
    ]


def local_folder(path: str) -> Path | None:
    """The folder that a path means: itself, or a repository's snapshot in the hub's
    local cache; None for neither.
    """
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


def stored_value(path: str, file: str, key: str) -> Any:
    """A value of a JSON file in the folder that a path means; None where it is not here
    or damaged.
    """
    with suppress(OSError, ValueError):  # the loader's checks name what is wrong
        return read_json((local_folder(path) or Path("/nowhere")) / file).get(key)
    return None


def is_repository(path: str) -> bool:
    """Tell whether a path means `owner/name` on the hub. Where its parent is a folder,
    as in models/VideoReward, a folder is meant, here or not.
    """
    return (
        re.fullmatch(r"[\w.-]+/[\w.-]+", path) is not None
        and not Path(path).parent.is_dir()
    )


def checkpoint_folder(path: str, key: str, *include: str) -> Path:
    """The folder of a checkpoint: a local one, or the cached snapshot of a hub id.

    Nothing is downloaded: a cluster without network answers at once, and a run starts
    no download by itself.

    Args:
        path: folder or hub id.
        key: the config key it comes from.
        include: glob patterns of what has to be downloaded; none are everything.

    Raises:
        OSError: there is none; the message says how to fetch it.
    """
    folder = local_folder(path)
    if folder is None:
        if not is_repository(path):
            raise OSError(
                f"{path!r} does not exist. Set {key} to a folder or a hub id."
            )
        raise OSError(
            f"{path!r} is neither a folder nor in the hub's local cache. Fetch it with "
            f"`{fetch_command(path, *include)}`, or set {key} to a folder that holds "
            "it."
        )
    return folder


def stored_bytes(path: str) -> int:
    """Bytes of the weight files in a folder or in the hub's local cache; 0 where there
    are none.
    """
    folder = local_folder(path)
    files = folder.rglob("*") if folder is not None else ()
    return sum(
        file.stat().st_size for file in files if file.suffix in (".safetensors", ".pth")
    )


WEIGHTS = {
    "transformer": STEMS["diffusers"],
    "transformer_2": STEMS["diffusers"],
    "vae": STEMS["diffusers"],
    "text_encoder": STEMS["transformers"],
    "text_encoder_2": STEMS["transformers"],
    "image_encoder": STEMS["transformers"],
}
"""Folders with weights, and the stem of their files."""

_CONFIGURATION = {
    "tokenizer": "tokenizer_config.json",
    "feature_extractor": "preprocessor_config.json",
    "image_processor": "preprocessor_config.json",
}
"""Kinds of folders -> the file that each has, where it is not config.json."""

_UNREAD = {
    ".gguf": "quantised",
    ".bin": "pickled",
    ".pt": "pickled",
    ".safetensors": "of a variant or another layout",
}
"""Ends of files with weights -> why they are not read where others are missing."""


def cache_folder(model: ModelConfig) -> Path:
    """Folder of a model's encoded prompts (see `ModelConfig.cache_dir`).

    ValueError when `model.cache_dir` cannot be written to.
    """
    if model.cache_dir is not None:
        folder = Path(model.cache_dir).expanduser()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            TemporaryFile(dir=folder).close()
        except OSError as error:
            raise ValueError(
                f"model.cache_dir is {model.cache_dir!r}, which cannot be written to: "
                f"{error}. Choose another folder."
            ) from error
        return folder
    if model.path is not None:
        root = Path(model.path).expanduser()
        if root.is_dir() and os.access(root, os.W_OK):
            return root / ".sage_fast"
    return Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "sage_fast"


def refuse_file(path: str, likely: str) -> None:
    """ConfigError for a `model.path` that is one file; `likely`: a repository to take
    instead.
    """
    if Path(path).expanduser().is_file():
        raise ConfigError(
            f"model.path is {path!r}, which is one file{_unread(Path(path))}. Weights "
            "are read from a folder in "
            f"diffusers' layout: set model.path to {likely}, and get it with: "
            f"{fetch_command(likely)}"
        )


def find_folder(
    path: str, parts: Sequence[str], likely: str, convert: str, *, download: bool
) -> Path:
    """The folder that `model.path` names.

    Args:
        parts: folders of the repository that are needed.
        likely: the repository that the path most likely means.
        convert: a script of diffusers.
        download: whether a hub repository may be downloaded; otherwise it has to be in
            the local cache.

    ValueError: there is none, or it has another layout; the message says what to do.
    """
    refuse_file(path, likely)
    folder = Path(path).expanduser()
    remedy = f"Get the weights with: {fetch_command(likely, folder=path)}"
    if not folder.is_dir():
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import (
            HFValidationError,
            LocalEntryNotFoundError,
            RepositoryNotFoundError,
        )

        if not is_repository(path):
            raise ValueError(
                f"model.path is {path!r}, which is no folder here and no repository "
                f"of the form owner/name. {remedy}"
            )
        patterns = ["model_index.json", *(f"{part}/*" for part in parts)]
        try:
            found = snapshot_download(
                path, allow_patterns=patterns, local_files_only=not download
            )
        except (
            LocalEntryNotFoundError,
            RepositoryNotFoundError,
            HFValidationError,
        ) as error:
            raise ValueError(
                f"model.path is {path!r}, which is no folder here; as a repository of "
                "the Hugging Face hub it is "
                "neither in the local cache nor can it be downloaded "
                f"({type(error).__name__}). With a network, run: "
                f"{fetch_command(path)}    Without one, set model.path to a folder "
                "that holds the weights."
            ) from error
        folder = Path(found)
        # Another repository would not go into the cache's folder of this one.
        remedy = f"Set model.path to a repository that is, such as {likely}."
    if not any(
        (folder / name).is_file()
        for name in ("model_index.json", "transformer/config.json")
    ):
        raise ValueError(
            f"model.path {path!r} has neither model_index.json nor "
            "transformer/config.json: it is not in diffusers' "
            f"layout{_unread(*folder.iterdir())}. {remedy}    Weights in the official "
            "layout are converted by "
            f"diffusers' scripts/{convert}_to_diffusers.py."
        )
    return folder


def configuration_file(part: str) -> str:
    """A file that a folder of a kind has, relative to the model's."""
    return f"{part}/{_CONFIGURATION.get(part.removesuffix('_2'), 'config.json')}"


def _unread(*files: Path) -> str:
    """Words for the first of some files that holds weights, none of which are read."""
    for file in sorted(files):
        if file.suffix in _UNREAD:
            return f" ({file.name} is {_UNREAD[file.suffix]}, and not read)"
    return ""


def check_known(path: str, likely: str, published: Collection[str]) -> None:
    """ConfigError unless a transformer can be described: its config.json is here, or
    its repository is published.

    Args:
        likely: the repository that a folder most likely is of.
        published: those whose transformer is known.
    """
    refuse_file(path, likely)
    file = configuration_file("transformer")
    needed = require("transformer", path, [file], likely, file)
    if needed.missing and path not in published:
        raise ConfigError(
            f"model.path is {path!r}, which is not one of the published repositories, "
            f"such as {likely}, so only {file} "
            f"says how large the model is. Get it (2 KB) with: {needed.fetch}"
        )


def _weights(root: Path, part: str) -> list[Path]:
    return weight_files(root / part, WEIGHTS[part]) if part in WEIGHTS else []


def _missing(root: Path, part: str) -> list[str]:
    """Files that a folder of the model lacks; beside those of weights what is there in
    their place.
    """
    weights = _weights(root, part)
    others = _unread(*{*(root / part).glob("*")} - {*weights})
    lacking = [f"{part}/{file.name}{others}" for file in weights if not file.is_file()]
    needed = configuration_file(part)
    if not (root / needed).is_file():
        return [needed, *lacking]
    if part.removesuffix("_2") == "tokenizer":
        kind = stored_value(str(root), needed, "tokenizer_class")
        words = any(
            file.stem in ("tokenizer", "vocab") or file.suffix == ".model"
            for file in (root / part).iterdir()
        )
        # ByT5's words are bytes, and without a class it may be one
        if not words and kind not in (None, "ByT5Tokenizer"):
            lacking.append(f"{part}/tokenizer.json")
    return lacking


def require_parts(root: Path, parts: Sequence[str], path: str, likely: str) -> None:
    """ValueError unless the folders have their configuration, and all of their
    safetensors, none cut off or quantised.

    Args:
        path, likely: `model.path`, whose folder is `root`, and the repository that it
            most likely means.
    """
    for part in parts:
        fetch = require(part, path, [], likely, f"{part}/*").fetch
        for missing in _missing(root, part):
            raise ValueError(f"{root}/{missing} is missing. Get it with: {fetch}")
        for file in _weights(root, part):
            try:
                # Opening compares the size of the file with the one that its header
                # tells.
                open_weights(file)
            except ValueError as error:
                raise ValueError(f"{error} Delete it and run: {fetch}") from error


def requirement(
    name: str,
    path: str,
    parts: Sequence[str],
    repository: str,
    *include: str,
    kind: str,
    gigabytes: float,
) -> Requirement:
    """The folders of a model as a requirement, with the shards that an index names;
    arguments as of `hub.require`, and the class of the transformer.

    ConfigError for the folder of another one, which the command would fill up.
    """
    refuse_file(path, repository)
    file = "transformer/config.json"
    _refuse_kind(Path(path) / file, stored_value(path, file, "_class_name"), kind)
    root = local_folder(path) or Path("/nowhere")
    missing: list[str] = []
    for part in parts:
        # a damaged index is not missing: the loader's checks name it
        with suppress(ValueError):
            missing += _missing(root, part)
    return replace(
        require(name, path, [], repository, *include, gigabytes=gigabytes),
        missing=missing,
    )


def stored_config(
    folder: Path | None,
    part: str,
    published: Mapping[str, Any],
    kind: type[Any] | None = None,
) -> dict[str, Any]:
    """The configuration of a folder of the model where it is here, over the published
    one.

    Without diffusers' own entries, such as `_class_name`.

    Args:
        kind: the class of diffusers that is built of it; what it does not take is left
            out, as diffusers does.

    ConfigError where it is that of another class.
    """
    file = folder / part / "config.json" if folder is not None else None
    stored = read_json(file) if file is not None and file.is_file() else {}
    takes: Any = stored
    if kind is not None:
        takes = inspect.signature(kind).parameters
        _refuse_kind(file, stored.get("_class_name"), kind.__name__)
    return dict(published) | {
        k: value for k, value in stored.items() if k in takes and not k.startswith("_")
    }


def _refuse_kind(file: Path | None, name: str | None, kind: str) -> None:
    """ConfigError for a configuration of another class than `kind`; one that names no
    class may be any.
    """
    if name not in (None, kind):
        raise ConfigError(
            f"{file} is of a {name}, and model.family is for a {kind}. Set "
            "model.family to that of the model, or model.path to another folder."
        )


def hashable(config: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    """A configuration as a key."""
    return tuple(
        (k, tuple(v) if isinstance(v, list) else v) for k, v in sorted(config.items())
    )


def published_shift(root: Path) -> float | None:
    """The timestep shift that the folder's scheduler has; None where nothing says."""
    file = root / "scheduler" / "scheduler_config.json"
    stored = read_json(file) if file.is_file() else {}
    # UniPC's scheduler calls it flow_shift.
    shift = stored.get("flow_shift", stored.get("shift"))
    return None if shift is None else float(shift)


def model_device(model: ModelConfig) -> str:
    """`model.device`; `auto` is cuda where there is one."""
    if model.device != "auto":
        return model.device
    return "cuda" if torch.cuda.is_available() else "cpu"


def load_vae(kind: Any, folder: Path, dtype: str) -> Any:
    """The video autoencoder of a folder in diffusers' layout, in evaluation mode.

    Args:
        kind: diffusers' class.
        dtype: name of a type of torch.

    ValueError as `load_pretrained`.
    """
    return load_pretrained(
        kind, folder, torch_dtype=getattr(torch, dtype), use_safetensors=True
    )
