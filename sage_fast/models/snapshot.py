"""The folder of a model in diffusers' layout: found or downloaded, whole or what is missing, and its cache."""

import inspect
import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import torch

from sage_fast.config.sections import ModelConfig
from sage_fast.models.hub import Requirement, fetch_command, local_folder, require
from sage_fast.models.stored import STEMS, load_pretrained, open_weights, read_json, weight_files

WEIGHTS = {
    **dict.fromkeys(("transformer", "vae"), STEMS["diffusers"]),
    **dict.fromkeys(("text_encoder", "text_encoder_2", "image_encoder"), STEMS["transformers"]),
}
"""Folders with weights, and the stem of their files."""

_CONFIGURATION = {"tokenizer": "tokenizer_config.json", "feature_extractor": "preprocessor_config.json"}
"""Kinds of folders -> the file that each has, where it is not config.json."""


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
                f"model.cache_dir is {model.cache_dir!r}, which cannot be written to: {error}. Choose another folder."
            ) from error
        return folder
    root = Path(model.path).expanduser() if model.path is not None else None
    if root is not None and root.is_dir() and os.access(root, os.W_OK):
        return root / ".sage_fast"
    return Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "sage_fast"


def find_folder(
    path: str, parts: Sequence[str], default: str, convert: str, *, download: bool
) -> tuple[Path, str | None]:
    """The folder that `model.path` names, and the repository that it is the snapshot of, if it is of one.

    Args:
        parts: folders of the repository that are needed.
        default: a repository to name to the user. convert: a script of diffusers.
        download: whether a hub repository may be downloaded; otherwise it has to be in the local cache.

    ValueError: there is none, or it has another layout; the message says what to do.
    """
    folder, repository = Path(path).expanduser(), None
    if not folder.is_dir():
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError, RepositoryNotFoundError

        if not re.fullmatch(r"[\w.-]+/[\w.-]+", path):
            raise ValueError(
                f"model.path is {path!r}, which is no folder here and no repository of the form owner/name. Get the "
                f"weights with: {fetch_command(default, folder=path)}"
            )
        patterns = ["model_index.json", *(f"{part}/*" for part in parts)]
        try:
            found = snapshot_download(path, allow_patterns=patterns, local_files_only=not download)
        except (LocalEntryNotFoundError, RepositoryNotFoundError, HFValidationError) as error:
            raise ValueError(
                f"model.path is {path!r}, which is no folder here; as a repository of the Hugging Face hub it is "
                f"neither in the local cache nor can it be downloaded ({type(error).__name__}). With a network, run: "
                f"{fetch_command(path)}    Without one, set model.path to a folder that holds the weights."
            ) from error
        folder, repository = Path(found), path
    if not any((folder / name).is_file() for name in ("model_index.json", "transformer/config.json")):
        raise ValueError(
            f"model.path {path!r} has neither model_index.json nor transformer/config.json: it is not in diffusers' "
            f"layout. Get the weights with: {fetch_command(default, folder=folder)}    Weights in the "
            f"official layout are converted by diffusers' scripts/{convert}_to_diffusers.py."
        )
    return folder, repository


def configuration_file(part: str) -> str:
    """A file that a folder of a kind has, relative to the model's."""
    return f"{part}/{_CONFIGURATION.get(part.removesuffix('_2'), 'config.json')}"


def require_parts(root: Path, parts: Sequence[str], command: Callable[[str], str]) -> None:
    """ValueError unless the folders have their configuration and all of their safetensors, none cut off or quantised.

    Args:
        command: of a folder, the command that gets it.
    """
    for part in parts:
        weights = weight_files(root / part, WEIGHTS[part]) if part in WEIGHTS else []
        for file in (root / configuration_file(part), *weights):
            if not file.is_file():
                raise ValueError(f"{file} is missing. Get it with: {command(part)}")
        for file in weights:
            try:
                # Opening compares the size of the file with the one that its header tells.
                open_weights(file)
            except ValueError as error:
                raise ValueError(f"{error} Delete it and run: {command(part)}") from error


def requirement(
    name: str, path: str, parts: Sequence[str], repository: str, *include: str, gigabytes: float
) -> Requirement:
    """The folders of a model as a requirement, with the shards that an index names; arguments as of `hub.require`."""
    patterns = [configuration_file(part) for part in parts]
    patterns += [f"{part}/*.safetensors" for part in parts if part in WEIGHTS]
    whole = require(name, path, patterns, repository, *include, gigabytes=gigabytes)
    missing = list(whole.missing)
    # Shards that are not there, as after an interrupted download.
    for index in sorted((local_folder(path) or Path("/nowhere")).glob("*/*.safetensors.index.json")):
        with suppress(ValueError):  # damaged and not missing: the loader's checks name it
            shards = weight_files(index.parent, index.name.removesuffix(".safetensors.index.json"))
            missing += [f"{file.parent.name}/{file.name}" for file in shards if not file.is_file()]
    return replace(whole, missing=missing)


def stored_config(
    folder: Path | None, part: str, published: Mapping[str, Any], kind: type[Any] | None = None
) -> dict[str, Any]:
    """The configuration of a folder of the model where it is here, over the published one.

    Without diffusers' own entries, such as `_class_name`.

    Args:
        kind: the class of diffusers that is built of it; what it does not take is left out, as diffusers does.

    ValueError where it is that of another class.
    """
    file = folder / part / "config.json" if folder is not None else None
    stored = read_json(file) if file is not None and file.is_file() else {}
    takes = stored.keys() if kind is None else inspect.signature(kind).parameters
    if kind is not None and (name := stored.get("_class_name", kind.__name__)) != kind.__name__:
        raise ValueError(
            f"{file} is of a {name}, and model.family is for a {kind.__name__}. Set model.family to that of the model, "
            "or model.path to another folder."
        )
    return dict(published) | {k: value for k, value in stored.items() if k in takes and not k.startswith("_")}


def published_shift(root: Path) -> float | None:
    """The timestep shift that the folder's scheduler has; None where nothing says."""
    file = root / "scheduler" / "scheduler_config.json"
    stored = read_json(file) if file.is_file() else {}
    # UniPC's scheduler calls it flow_shift.
    shift = stored.get("flow_shift", stored.get("shift"))
    return None if shift is None else float(shift)


def model_device(model: ModelConfig) -> str:
    """`model.device`; `auto` is cuda where there is one."""
    return ("cuda" if torch.cuda.is_available() else "cpu") if model.device == "auto" else model.device


def load_vae(kind: Any, folder: Path, dtype: str) -> Any:
    """The video autoencoder of a folder in diffusers' layout, in evaluation mode.

    Args:
        kind: diffusers' class. dtype: name of a type of torch.

    ValueError as `load_pretrained`.
    """
    return load_pretrained(kind, folder, torch_dtype=getattr(torch, dtype), use_safetensors=True)
