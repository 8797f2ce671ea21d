"""Trained weights for other programs: a LoRA adapter in diffusers' layout, or a whole transformer.

FOLDER/
    pytorch_lora_weights.safetensors               format lora
    config.json  diffusion_pytorch_model*          format full, as `save_pretrained` writes it
    README.md  export.json                         how to load it; what it was made from
"""

import json
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import torch

from sage_fast import __version__
from sage_fast.checkpoint import Checkpoint, SavedTensors, list_checkpoints, newest_checkpoint, open_checkpoint
from sage_fast.config.errors import ConfigError
from sage_fast.config.files import replacing
from sage_fast.config.load import check_trust, load_config, named_code
from sage_fast.config.schema import RunConfig
from sage_fast.distributed.snapshot import check_same_shapes, shapes_of
from sage_fast.models.family import load_components, model_family
from sage_fast.models.streamed import save_transformer
from sage_fast.policy.lora import ADAPTER_FILE, cast_weights
from sage_fast.policy.trained import use_weights, whole_parameters

Format = Literal["lora", "full"]

RECORD = "export.json"


@dataclass(frozen=True, kw_only=True)
class Export:
    """What was written.

    averaged: the weights are the moving average that the run evaluated with. dtype: in which the transformer is to be
    loaded, such as bfloat16; of a full export it is also the one that it is stored in.

    Example: `Export(folder=Path("exported"), format="lora", update=200, averaged=True, dtype="bfloat16")`
    """

    folder: Path
    format: Format
    update: int
    averaged: bool
    dtype: str


def export(
    source: Path,
    folder: Path,
    *,
    format: Format | None = None,
    dtype: torch.dtype | None = None,
    overrides: Sequence[str] = (),
    trust_config: bool = False,
) -> Export:
    """Export a checkpoint.

    Args:
        source: a checkpoint folder, or a run, whose newest complete checkpoint is taken.
        folder: where to write; new, empty, or an earlier export.
        format: `lora` (the adapter) or `full` (the whole transformer, an adapter merged into it); None is `lora` for a
            run that trained adapters, and `full` for one that trained every weight.
        dtype: of a full export; None keeps the one that the run computed with (model.dtype).
        overrides: `--section.key=value` words laid over the run's configuration, such as a model.path that has moved.
        trust_config: whether a model family of the checkpoint that is no part of SAGE-Fast may be imported and called.

    Raises:
        ConfigError: a format that the run does not have, or a folder with other files. CheckpointError: a damaged
        checkpoint. OSError: the folder cannot be written.
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
    record = folder / RECORD
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"--output {folder} is a file. Give a folder.")
    if folder.is_dir() and any(folder.iterdir()) and not record.exists():
        raise ConfigError(f"--output {folder} holds other files. Give a new folder, or one of an earlier export.")
    folder.mkdir(parents=True, exist_ok=True)
    # A record without a whole export beside it would pass for one.
    record.unlink(missing_ok=True)
    averaged = "ema" in checkpoint.tensors
    if chosen == "lora":
        with replacing(folder / ADAPTER_FILE) as partial:
            shutil.copyfile(checkpoint.folder / "lora" / ADAPTER_FILE, partial)
    else:
        weights = checkpoint.tensors["ema" if averaged else "weights"]
        if config.training.mode == "lora":
            _save_merged_transformer(config, weights, folder, dtype)
        else:
            _save_trained_transformer(config, weights, folder, dtype or getattr(torch, config.model.dtype))
    result = Export(
        folder=folder,
        format=chosen,
        update=int(checkpoint.state["trainer"]["update"]),
        averaged=averaged,
        dtype=str(dtype).removeprefix("torch.") if dtype else config.model.dtype,
    )
    with replacing(folder / "README.md") as partial:
        partial.write_text(_readme(result, config), encoding="utf-8")
    with replacing(record) as partial:
        partial.write_text(json.dumps(_record(result, config, checkpoint.folder), indent=1) + "\n", encoding="utf-8")
    return result


def loading_code(result: Export, config: RunConfig) -> str:
    """Python that loads an export into a stock diffusers pipeline, or, for a model that none reads, into the bare
    transformer class. It leaves `transformer` behind, and `pipeline` where there is one, with the run's timestep shift.
    """
    dtype = f"torch.{config.model.dtype}"
    base = model_family(config.model.family).pipeline_base(config.model)
    lines = ["import torch"]
    if result.format == "full":
        lines += [
            "from diffusers import HunyuanVideo15Transformer3DModel",
            *(["from diffusers import FlowMatchEulerDiscreteScheduler, HunyuanVideo15Pipeline"] if base else []),
            "",
            "transformer = HunyuanVideo15Transformer3DModel.from_pretrained(",
            f"    {str(result.folder)!r}, torch_dtype=torch.{result.dtype}",
            ")",
        ]
        if base:
            lines.append(
                f"pipeline = HunyuanVideo15Pipeline.from_pretrained(\n    {base!r}, transformer=transformer, "
                f"torch_dtype={dtype}\n)"
            )
            lines.append(_scheduler_code(config))
        return "\n".join(lines)
    if base:
        lines += [
            "from diffusers import FlowMatchEulerDiscreteScheduler, HunyuanVideo15Pipeline",
            "",
            f"pipeline = HunyuanVideo15Pipeline.from_pretrained({base!r}, torch_dtype={dtype})",
            _scheduler_code(config),
            "transformer = pipeline.transformer",
        ]
    else:
        lines += [
            "from sage_fast.config.schema import ModelConfig",
            "from sage_fast.models.family import load_components",
            "",
            f"model = ModelConfig(family={config.model.family!r}, path={config.model.path!r})",
            "transformer = load_components(model).transformer",
        ]
    lines.append(
        f"transformer.load_lora_adapter(\n    {str(result.folder)!r}, prefix=None, weight_name={ADAPTER_FILE!r}\n)"
    )
    return "\n".join(lines)


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


def _save_trained_transformer(config: RunConfig, weights: SavedTensors, folder: Path, dtype: torch.dtype) -> None:
    """Write the transformer of a run that trained every weight; what cannot be trained is the base model's."""
    with _naming_the_model():
        transformer, base = model_family(config.model.family).open_transformer(config.model)
    with _naming_the_checkpoint():
        check_same_shapes(shapes_of(whole_parameters(transformer)), shapes_of(weights.meta), "weights")
    save_transformer(transformer, lambda name: (weights if name in weights else base)[name], folder, dtype)


def _save_merged_transformer(config: RunConfig, weights: SavedTensors, folder: Path, dtype: torch.dtype | None) -> None:
    """Write the base transformer with the trained adapter merged into it, by `save_pretrained`."""
    with _naming_the_model():
        transformer = load_components(config.model).transformer
    cast_weights(transformer, getattr(torch, config.model.dtype))
    with _naming_the_checkpoint():
        use_weights(transformer, weights, mode=config.training.mode, lora=config.lora)
    if dtype is not None:
        # Before the merge, with the adapter still in float32: the sum is rounded once.
        for name, parameter in transformer.named_parameters():
            if ".lora_" not in name:
                parameter.data = parameter.data.to(dtype)
    transformer.fuse_lora(safe_fusing=True)
    transformer.unload_lora()
    transformer.save_pretrained(folder)


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


def _scheduler_code(config: RunConfig) -> str:
    """The line that gives a pipeline the timestep shift of the run: its base model may have another one."""
    return (
        "pipeline.scheduler = FlowMatchEulerDiscreteScheduler.from_config(\n"
        f"    pipeline.scheduler.config, shift={config.rollout.shift!r}\n)"
    )


def _record(result: Export, config: RunConfig, checkpoint: Path) -> dict[str, Any]:
    """What an export was made from, as JSON values."""
    record: dict[str, Any] = {
        "sage_fast": __version__,
        "diffusers": metadata.version("diffusers"),
        "format": result.format,
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


def _readme(result: Export, config: RunConfig) -> str:
    """The README.md of an export."""
    what = "A LoRA adapter in diffusers' layout" if result.format == "lora" else "A whole transformer"
    average = ", the moving average of its weights, which is what the run evaluated" if result.averaged else ""
    merged = (
        " The adapter is merged into the weights." if result.format == "full" and config.training.mode == "lora" else ""
    )
    notes = []
    if result.format == "lora":
        notes.append(
            "The adapter was trained and is stored in float32. A stock pipeline rounds it to its own data type when it "
            "loads it; `sage-fast generate --lora` does not."
        )
    notes.append("The base model and its licence are not part of this folder.")
    if model_family(config.model.family).pipeline_base(config.model):
        video, steps = config.video, config.evaluation.num_steps or config.rollout.num_steps
        notes.insert(
            0,
            f"Trained at {video.num_frames} frames of {video.height}x{video.width}, {config.model.family}, shift "
            f"{config.rollout.shift:g}, guidance {config.rollout.guidance_scale:g}; evaluated with {steps} steps.",
        )
    return "\n".join(
        [
            f"# {what}",
            "",
            f"Written by SAGE-Fast {__version__} after {result.update} optimizer updates{average}.{merged}",
            "Trained on " + ", ".join(f"{w:g} {n}" for n, w in config.reward.weights.items() if w) + ".",
            "",
            "```python",
            loading_code(result, config),
            "```",
            "",
            *(f"* {note}" for note in notes),
            "",
        ]
    )
