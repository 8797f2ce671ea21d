"""Trained weights for other programs: a LoRA adapter, or a whole transformer in diffusers' layout.

FOLDER/
    pytorch_lora_weights.safetensors               format lora
    config.json  diffusion_pytorch_model*          format full
    README.md  config.yaml  *.png  export.json     the model card (template `model_card.md`); its source
"""

import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import torch
from huggingface_hub import ModelCard, ModelCardData
from safetensors.torch import save_file
from torch import Tensor

from sage_fast import __version__
from sage_fast.checkpoint import Checkpoint, list_checkpoints, newest_checkpoint, open_checkpoint
from sage_fast.config.errors import ConfigError
from sage_fast.config.files import replacing, write_text
from sage_fast.config.load import check_trust, load_config, named_code, save_config
from sage_fast.config.schema import RunConfig
from sage_fast.evaluation import PairedTest
from sage_fast.models.family import load_components, model_family
from sage_fast.models.hub import is_repository
from sage_fast.models.transformer import Layout, backbone
from sage_fast.policy.lora import ADAPTER_FILE, cast_weights
from sage_fast.policy.trained import read_adapter, use_weights

Format = Literal["lora", "full"]

RECORD = "export.json"
TEMPLATE = Path(__file__).with_name("model_card.md")
PICTURES = {"reward.png": "Reward of the run", "before_after.png": "Same prompts and noise, before and after"}
"""Files of a run that the card shows, where they are."""


@dataclass(frozen=True, kw_only=True)
class Export:
    """A written export.

    averaged: the weights are the moving average that the run evaluated with. dtype: type to load the
    transformer in, such as bfloat16; a full export is stored in it.

    Example: `Export(folder=Path("exported"), format="lora", layout="diffusers", update=200, averaged=True, ...)`
    """

    folder: Path
    format: Format
    layout: Layout
    update: int
    averaged: bool
    dtype: Literal["float32", "bfloat16"]


def export(
    source: Path,
    folder: Path,
    *,
    format: Format | None = None,
    layout: Layout = "diffusers",
    dtype: torch.dtype | None = None,
    overrides: Sequence[str] = (),
    trust_config: bool = False,
    overwrite: bool = False,
) -> Export:
    """Export a checkpoint.

    Args:
        source: a checkpoint folder, or a run, whose newest complete checkpoint is taken.
        folder: where to write; new, empty, or an earlier export, whose files are removed.
        format: `lora` (the adapter) or `full` (the whole transformer, an adapter merged into it); None is `lora` for a
            run that trained adapters, and `full` for one that trained every weight.
        layout: the program that it is for; a whole transformer is for diffusers.
        dtype: of a full export; None keeps the one that the run computed with (model.dtype).
        overrides: `--section.key=value` words laid over the run's configuration, such as a model.path that has moved.
        trust_config: whether a model family of the checkpoint from outside SAGE-Fast may be imported and called.
        overwrite: replace the export of another run in `folder`.

    Raises:
        ConfigError: a format or layout that the run does not have, or a folder with other files.
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
    if chosen == "full" and layout != "diffusers":
        raise ConfigError(f"--layout {layout} is for adapters; a whole transformer is exported by --layout diffusers.")
    _make_room(folder, checkpoint.folder.parent if not overwrite else None)
    averaged = "ema" in checkpoint.tensors
    name: Any = str(dtype).removeprefix("torch.") if dtype else config.model.dtype
    result = Export(
        folder=folder,
        format=chosen,
        layout=layout,
        update=int(checkpoint.state["trainer"]["update"]),
        averaged=averaged,
        dtype=name,
    )
    if chosen == "lora":
        adapter = read_adapter(checkpoint.folder / "lora" / ADAPTER_FILE)
        with replacing(folder / ADAPTER_FILE) as partial:
            save_file(backbone().named_adapter(adapter, layout), partial, metadata={"format": "pt"})
    else:
        transformer = _whole_transformer(config, checkpoint.tensors["ema" if averaged else "weights"], result.dtype)
        transformer.save_pretrained(folder)
    _write_card(result, config, checkpoint.folder.parent.parent)
    write_text(folder / RECORD, json.dumps(_record(result, config, checkpoint.folder), indent=1) + "\n")
    return result


def _make_room(folder: Path, run: Path | None) -> None:
    """Empty a folder that holds nothing but an earlier export, of the same run unless that is None; else ConfigError.

    run: where its checkpoints are.
    """
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"--output {folder} is a file. Give a folder.")
    folder.mkdir(parents=True, exist_ok=True)
    record = folder / RECORD
    files = {RECORD}
    if record.is_file():
        try:
            earlier = json.loads(record.read_text(encoding="utf-8"))
            files |= set(earlier["files"])
            exported = Path(earlier["checkpoint"]) if "checkpoint" in earlier else None
        except (ValueError, TypeError, KeyError) as error:
            raise ConfigError(f"{record} is not the record of an export ({error}). Give another --output.") from error
        if run is not None and exported is not None and exported.parent.resolve() != run.resolve():
            raise ConfigError(
                f"--output {folder} holds the export of {exported}, which is another run's. Give another folder, or "
                "--overwrite to replace it."
            )
    others = sorted(path.name for path in folder.iterdir() if path.name not in files)
    if others:
        raise ConfigError(
            f"--output {folder} holds other files, such as {others[0]}. Give a new folder, or one with nothing but an "
            "earlier export."
        )
    # The record goes first: without a whole export beside it it would pass for one.
    for path in (record, *sorted(folder.iterdir())):
        path.unlink(missing_ok=True)


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


def _whole_transformer(config: RunConfig, weights: Mapping[str, Tensor], dtype: Literal["float32", "bfloat16"]) -> Any:
    """The base transformer with the trained weights: in place of the base ones, or an adapter merged into them."""
    lora = config.training.mode == "lora"
    # Weights that replace the base model's need it in no wider type than they are written in.
    model = config.model if lora else replace(config.model, dtype=dtype)
    with _naming("A full export needs the base model of the run: if it has moved, add --model.path=FOLDER."):
        transformer = load_components(model).transformer
    cast_weights(transformer, getattr(torch, model.dtype))
    with _naming("The checkpoint does not fit its base model."):
        use_weights(transformer, weights, mode=config.training.mode, lora=config.lora)
    if lora:
        # Before the merge, with the adapter still in float32: the sum is rounded once.
        for name, parameter in transformer.named_parameters():
            if ".lora_" not in name:
                parameter.data = parameter.data.to(getattr(torch, dtype))
        transformer.fuse_lora(safe_fusing=True)
        transformer.unload_lora()
    return transformer


@contextmanager
def _naming(cause: str) -> Iterator[None]:
    try:
        yield
    except (ValueError, OSError) as error:
        raise ConfigError(f"{error} {cause}") from error


def _record(result: Export, config: RunConfig, checkpoint: Path) -> dict[str, Any]:
    """The source of an export, as JSON values."""
    lora = config.lora
    record: dict[str, Any] = {
        "sage_fast": __version__,
        "diffusers": metadata.version("diffusers"),
        "format": result.format,
        "layout": result.layout,
        "files": sorted(path.name for path in result.folder.iterdir()),
        "checkpoint": str(checkpoint),
        "update": result.update,
        "averaged": result.averaged,
        "dtype": result.dtype if result.format == "full" else "float32",
        "base_model": {"family": config.model.family, "path": config.model.path},
    }
    if config.training.mode == "lora":
        alpha = lora.rank if lora.alpha is None else lora.alpha
        record["lora"] = {"rank": lora.rank, "alpha": alpha, "target_modules": lora.target_modules}
    return record


def _write_card(result: Export, config: RunConfig, run: Path) -> None:
    """Write README.md, config.yaml and the pictures of a run that the card shows."""
    folder, lora = result.folder, result.format == "lora"
    save_config(config, folder / "config.yaml")
    pictures = {name: caption for name, caption in PICTURES.items() if (run / name).is_file()}
    for name in pictures:
        with replacing(folder / name) as partial:
            shutil.copyfile(run / name, partial)
    paired: dict[str, Any] = {}
    if (result_file := run / "evaluation" / "result.json").is_file():
        paired = json.loads(result_file.read_text(encoding="utf-8"))
        found = {"reward": paired["reward"], **paired["scores"]}
        paired["tests"] = {name: PairedTest(**test) for name, test in found.items()}
    family = model_family(config.model.family)
    base, licence, diffusers = family.pipeline_base(config.model), family.licence(), metadata.version("diffusers")
    data = ModelCardData(
        base_model=base if base is not None and is_repository(base) else None,
        base_model_relation="adapter" if lora else "finetune",
        library_name="diffusers" if result.layout == "diffusers" else None,
        license="other" if licence else None,
        license_name=licence[0] if licence else None,
        license_link=licence[1] if licence else None,
        pipeline_tag="text-to-video",
        tags=["grpo", "reinforcement-learning", "sage-fast", *(["lora"] if lora else [])],
    )
    card = ModelCard.from_template(
        data,
        template_str=TEMPLATE.read_text(encoding="utf-8"),
        folder=repr(str(folder)),
        layout=result.layout,
        lora=lora,
        merged=not lora and config.training.mode == "lora",
        update=result.update,
        averaged=result.averaged,
        dtype=result.dtype,
        base=base,
        config=config,
        adapter_file=ADAPTER_FILE,
        version=__version__,
        diffusers=diffusers,
        # Pipelines took `torch_dtype` until 0.39, and since 0.40 `dtype`, with a warning for the other.
        pipeline_dtype="dtype" if tuple(map(int, diffusers.split(".")[:2])) >= (0, 40) else "torch_dtype",
        paired=paired,
        pictures=pictures,
    )
    write_text(folder / "README.md", str(card))
