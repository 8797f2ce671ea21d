"""The folder of a model in diffusers' layout: found or downloaded, whole or what is missing, and its cache."""

import os
import re
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from sage_fast.config.sections import ModelConfig
from sage_fast.models.hub import fetch_command
from sage_fast.models.stored import check_fit, weight_files


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
        folder, repository = _download(path, parts, default, download), path
    if not any((folder / name).is_file() for name in ("model_index.json", "transformer/config.json")):
        raise ValueError(
            f"model.path {path!r} has neither model_index.json nor transformer/config.json: it is not in diffusers' "
            f"layout. Get the weights with: {fetch_command(default, folder=folder)}    Weights in the "
            f"official layout are converted by diffusers' scripts/{convert}_to_diffusers.py."
        )
    return folder, repository


def _download(repository: str, parts: Sequence[str], default: str, download: bool) -> Path:
    """The local snapshot of a hub repository. ValueError when there is none and it is not or cannot be downloaded."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError, RepositoryNotFoundError

    if not re.fullmatch(r"[\w.-]+/[\w.-]+", repository):
        raise ValueError(
            f"model.path is {repository!r}, which is no folder here and no repository of the form owner/name. Get the "
            f"weights with: {fetch_command(default, folder=repository)}"
        )
    patterns = [f"{part}/*" for part in parts]
    try:
        return Path(
            snapshot_download(repository, allow_patterns=["model_index.json", *patterns], local_files_only=not download)
        )
    except (LocalEntryNotFoundError, RepositoryNotFoundError, HFValidationError) as error:
        raise ValueError(
            f"model.path is {repository!r}, which is no folder here; as a repository of the Hugging Face hub it is "
            f"neither in the local cache nor can it be downloaded ({type(error).__name__}). With a network, run: "
            f"{fetch_command(repository)}    Without one, set model.path to a folder that holds the weights."
        ) from error


def require_file(file: Path, command: str) -> None:
    """ValueError with the command that gets a file that is missing."""
    if not file.is_file():
        raise ValueError(f"{file} is missing. Get it with: {command}")


def require_weights(folder: Path, stem: str, command: str) -> None:
    """ValueError unless the safetensors of a folder are all there and none was cut off."""
    for file in weight_files(folder, stem):
        require_file(file, command)
        try:
            with safe_open(file, framework="pt"):
                pass
        except SafetensorError as error:
            raise ValueError(
                f"{file} is damaged or was not downloaded to its end ({error}). Delete it and run: {command}"
            ) from error


def load_vae(kind: Any, folder: Path, dtype: torch.dtype) -> Any:
    """The video autoencoder of a folder in diffusers' layout, in evaluation mode.

    Args:
        kind: diffusers' class.

    ValueError: weights and configuration do not fit each other, or a file is damaged.
    """
    vae, info = kind.from_pretrained(
        folder, torch_dtype=dtype, local_files_only=True, output_loading_info=True, use_safetensors=True
    )
    check_fit(folder, missing=info["missing_keys"], unexpected=info["unexpected_keys"])
    return vae.eval()
