"""Trained weights for diffusers, the official code or ComfyUI: a LoRA adapter, or a whole transformer.

FOLDER/
    pytorch_lora_weights.safetensors               format lora
    config.json  diffusion_pytorch_model*          format full; ComfyUI's is one file without config.json
    README.md  config.yaml  *.png  export.json     the model card (`model_card.py`); what it was made from
"""

import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import HfApi
from safetensors.torch import save_file

from sage_fast import __version__
from sage_fast.checkpoint import Checkpoint, SavedTensors, list_checkpoints, newest_checkpoint, open_checkpoint
from sage_fast.config.errors import ConfigError
from sage_fast.config.files import replacing, write_text
from sage_fast.config.load import check_trust, load_config, named_code
from sage_fast.config.schema import RunConfig
from sage_fast.distributed.snapshot import check_same_shapes, shapes_of
from sage_fast.models.family import load_components, model_family
from sage_fast.models.hub import is_repository
from sage_fast.models.streamed import save_transformer
from sage_fast.models.transformer import Layout, backbone
from sage_fast.policy.lora import ADAPTER_FILE, cast_weights
from sage_fast.policy.trained import read_adapter, use_weights, whole_parameters
from sage_fast.tools.model_card import Export, Format, write_card

RECORD = "export.json"


def export(
    source: Path,
    folder: Path,
    *,
    format: Format | None = None,
    layout: Layout = "diffusers",
    dtype: torch.dtype | None = None,
    push_to_hub: str | None = None,
    overrides: Sequence[str] = (),
    trust_config: bool = False,
) -> Export:
    """Export a checkpoint.

    Args:
        source: a checkpoint folder, or a run, whose newest complete checkpoint is taken.
        folder: where to write; new, empty, or an earlier export, whose files are removed.
        format: `lora` (the adapter) or `full` (the whole transformer, an adapter merged into it); None is `lora` for a
            run that trained adapters, and `full` for one that trained every weight.
        layout: the program that it is for.
        dtype: of a full export; None keeps the one that the run computed with (model.dtype).
        push_to_hub: repository of the Hugging Face hub that gets the folder, created where it is missing.
        overrides: `--section.key=value` words laid over the run's configuration, such as a model.path that has moved.
        trust_config: whether a model family of the checkpoint that is no part of SAGE-Fast may be imported and called.

    Raises:
        ConfigError: a format or layout that the run does not have, a folder with other files, or a hub that refuses.
        CheckpointError: a damaged checkpoint. OSError: the folder cannot be written.
    """
    checkpoint = _open(source)
    config = _config_of(checkpoint, overrides)
    if not trust_config:
        check_trust(config, checkpoint.folder, named_code([], overrides), rewards=False)
    chosen = format or ("full" if config.training.mode == "full" else "lora")
    if chosen == "lora" and config.training.mode == "full":
        raise ConfigError(
            f"{checkpoint.folder} is of a run with training.mode full, which has no adapter. Export it by "
            "--format full."
        )
    if chosen == "lora" and dtype is not None:
        raise ConfigError("--dtype is for --format full; an adapter is exported in float32, as it was trained.")
    if push_to_hub is not None and not is_repository(push_to_hub):
        raise ConfigError(f"--push-to-hub is {push_to_hub!r}, which is no repository of the form owner/name.")
    _make_room(folder)
    averaged = "ema" in checkpoint.tensors
    if chosen == "lora":
        adapter = read_adapter(checkpoint.folder / "lora" / ADAPTER_FILE)
        with replacing(folder / ADAPTER_FILE) as partial:
            save_file(backbone().stored_adapter(adapter, layout), partial, metadata={"format": "pt"})
    else:
        weights = checkpoint.tensors["ema" if averaged else "weights"]
        save = _save_merged_transformer if config.training.mode == "lora" else _save_trained_transformer
        save(config, weights, folder, dtype or getattr(torch, config.model.dtype), layout)
    result = Export(
        folder=folder,
        format=chosen,
        layout=layout,
        update=int(checkpoint.state["trainer"]["update"]),
        averaged=averaged,
        dtype=str(dtype).removeprefix("torch.") if dtype else config.model.dtype,
        repository=push_to_hub,
    )
    write_card(result, config, checkpoint.folder.parent.parent)
    record = _record(result, config, checkpoint.folder)
    write_text(folder / RECORD, json.dumps(record, indent=1) + "\n")
    if push_to_hub is not None:
        _publish(folder, push_to_hub)
    return result


def _make_room(folder: Path) -> None:
    """An empty folder; the files of an earlier export in it are removed. ConfigError where it has any others."""
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"--output {folder} is a file. Give a folder.")
    folder.mkdir(parents=True, exist_ok=True)
    record = folder / RECORD
    files = set(_read_record(record).get("files", ())) | {RECORD} if record.is_file() else set()
    others = sorted(path.name for path in folder.iterdir() if path.name not in files)
    if others:
        raise ConfigError(
            f"--output {folder} holds other files, such as {others[0]}. Give a new folder, or one with nothing but an "
            "earlier export."
        )
    # The record goes first: without a whole export beside it it would pass for one.
    for path in (record, *sorted(folder.iterdir())):
        path.unlink(missing_ok=True)


def _read_record(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{path} is no record of an export ({error}). Give another --output.") from error


def _publish(folder: Path, repository: str) -> None:
    """Make the repository what the folder is: files of an earlier export that are gone here are deleted there."""
    try:
        api = HfApi()
        api.create_repo(repository, exist_ok=True)
        api.upload_folder(
            repo_id=repository, folder_path=folder, commit_message="Export of SAGE-Fast", delete_patterns="*"
        )
    except OSError as error:  # as all its errors are
        raise ConfigError(
            f"--push-to-hub {repository}: the hub refused or was not reached ({error}). The export is in {folder}. Log "
            "in with `hf auth login` as somebody who may write there, and export again."
        ) from error


def _open(source: Path) -> Checkpoint:
    """The checkpoint that `source` means. ConfigError when it means none, CheckpointError for a damaged one."""
    if (source / "checkpoints").is_dir():
        newest = newest_checkpoint(source / "checkpoints")
        if newest is None:
            raise ConfigError(f"{source / 'checkpoints'} holds no complete checkpoint. Train on, or give another run.")
        return newest
    if not (source / "state.json").exists():
        runs = list_checkpoints(source)
        hint = f" Give one of its checkpoints, such as {runs[-1]}." if runs else ""
        raise ConfigError(f"{source} is no checkpoint and no run: it has neither state.json nor checkpoints/.{hint}")
    return open_checkpoint(source)


def _config_of(checkpoint: Checkpoint, overrides: Sequence[str]) -> RunConfig:
    """The configuration that a checkpoint was saved with, and overrides."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "checkpoint.yaml"
        file.write_text(json.dumps(checkpoint.state["config"], ensure_ascii=False), encoding="utf-8")  # JSON is YAML
        return load_config(file, overrides)


def _save_trained_transformer(
    config: RunConfig, weights: SavedTensors, folder: Path, dtype: torch.dtype, layout: Layout
) -> None:
    """Write the transformer of a run that trained every weight; what cannot be trained is the base model's."""
    with _naming_the_model():
        transformer, base = model_family(config.model.family).open_transformer(config.model)
    with _naming_the_checkpoint():
        check_same_shapes(shapes_of(whole_parameters(transformer)), shapes_of(weights.meta), "weights")
    _save(transformer, lambda name: (weights if name in weights else base)[name], folder, dtype, layout)


def _save_merged_transformer(
    config: RunConfig, weights: SavedTensors, folder: Path, dtype: torch.dtype, layout: Layout
) -> None:
    """Write the base transformer with the trained adapter merged into it."""
    with _naming_the_model():
        transformer = load_components(config.model).transformer
    cast_weights(transformer, getattr(torch, config.model.dtype))
    with _naming_the_checkpoint():
        use_weights(transformer, weights, mode=config.training.mode, lora=config.lora)
    # Before the merge, with the adapter still in float32: the sum is rounded once.
    for name, parameter in transformer.named_parameters():
        if ".lora_" not in name:
            parameter.data = parameter.data.to(dtype)
    transformer.fuse_lora(safe_fusing=True)
    transformer.unload_lora()
    _save(transformer, transformer.state_dict().__getitem__, folder, dtype, layout)


def _save(
    transformer: Any, read: Callable[[str], torch.Tensor], folder: Path, dtype: torch.dtype, layout: Layout
) -> None:
    try:
        save_transformer(transformer, read, folder, dtype, layout=layout)
    except ValueError as error:
        raise ConfigError(f"--layout {layout}: {error}. Give --layout diffusers.") from error


@contextmanager
def _naming_the_model() -> Iterator[None]:
    try:
        yield
    except (ValueError, OSError) as error:
        raise ConfigError(
            f"{error} A full export needs the base model of the run: if it has moved, add --model.path=FOLDER."
        ) from error


@contextmanager
def _naming_the_checkpoint() -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise ConfigError(f"The checkpoint does not fit its base model: {error}") from error


def _record(result: Export, config: RunConfig, checkpoint: Path) -> dict[str, Any]:
    """What an export was made from, as JSON values."""
    record: dict[str, Any] = {
        "sage_fast": __version__,
        "diffusers": metadata.version("diffusers"),
        "format": result.format,
        "layout": result.layout,
        "files": sorted(path.name for path in result.folder.iterdir()),
        "checkpoint": str(checkpoint),
        "update": result.update,
        "averaged": result.averaged,
        "base_model": {
            "family": config.model.family,
            "path": config.model.path,
            "variant": model_family(config.model.family).variant(config.model),
        },
    }
    if config.training.mode == "lora":
        lora = config.lora
        record["lora"] = {
            "rank": lora.rank,
            "alpha": lora.rank if lora.alpha is None else lora.alpha,
            "target_modules": lora.target_modules,
        }
    if result.format == "full":
        record["dtype"] = result.dtype
    return record
