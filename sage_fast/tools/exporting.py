"""Trained weights for other programs: a LoRA adapter, or a whole transformer in
diffusers' layout.

FOLDER/
    pytorch_lora_weights.safetensors               format lora
    high_noise.safetensors  low_noise.safetensors  the same of two experts
    adapter_model.safetensors  adapter_config.json  the same in peft's layout
    config.json  diffusion_pytorch_model*          format full
    README.md  config.yaml  *.png  export.json     the model card (template `model_card.md`); its source
"""

import json
import logging
import shlex
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, Protocol, get_args

import torch
from huggingface_hub import HfApi, ModelCard, ModelCardData
from torch import Tensor

from sage_fast import __version__
from sage_fast.checkpoint.reader import Checkpoint, open_checkpoint
from sage_fast.config.errors import ConfigError
from sage_fast.config.files import loads, replacing, write_text
from sage_fast.config.load import check_trust, load_config, named_code, save_config
from sage_fast.config.schema import RunConfig, to_dict
from sage_fast.evaluation import Evaluation, paired_tests
from sage_fast.models.family import model_family
from sage_fast.models.hub import is_repository
from sage_fast.policy.adapters import load_model, use_weights
from sage_fast.policy.layouts import Layout, file_names, read_adapter, write_adapter
from sage_fast.run.directory import EXPORT_RECORD as RECORD
from sage_fast.run.directory import RunDirectory
from sage_fast.run.resume import check_same_run
from sage_fast.tools.generation import TRAINED_MODEL, choose_checkpoint

logger = logging.getLogger(__name__)

Format = Literal["lora", "full"]

TEMPLATE = Path(__file__).with_name("model_card.md")


@dataclass(frozen=True, kw_only=True)
class Export:
    """A written export.

    Attributes:
        averaged: the weights are the moving average that the run evaluated with.
        dtype: of the stored weights.
        adapter_files: names of an adapter's file, or of each expert's, as the programs
            of its layout look for them.

    Example: `Export(folder=Path("exported"), format="lora", layout="diffusers",
    update=200, averaged=True, ...)`
    """

    folder: Path
    format: Format
    layout: Layout
    update: int
    averaged: bool
    dtype: Literal["float32", "bfloat16"]
    adapter_files: Sequence[str]

    @property
    def adapter_file(self) -> str:
        """The first of `adapter_files`."""
        return self.adapter_files[0]


class _InDirectory(Protocol):
    """A run, or its configuration: it names the directory."""

    @property
    def output_dir(self) -> str | Path: ...


def export(
    run: _InDirectory | str | Path,
    output_dir: str | Path | None = None,
    *,
    checkpoint: str = "auto",
    format: Format | None = None,
    layout: Layout = "diffusers",
    overrides: Sequence[str] = (),
    trust_config: bool = False,
    overwrite: bool = False,
    push_to_hub: str | None = None,
) -> Export:
    """Write the trained weights of a run, or of one checkpoint, into a folder for other
    programs.

    Args:
        run: a run, or a checkpoint folder.
        output_dir: folder to write to; new, empty, or an earlier export alike, whose
            files are removed. None means `exported` in the run's directory.
        checkpoint: of a run: `auto` (the newest complete one), `best` (by its
            evaluations) or a folder.
        format: `lora` (the adapter) or `full` (the whole transformer, an adapter merged
            into it); None means `lora` for a run that trained adapters, and `full` for
            one that trained every weight.
        layout: the program that it is for; a whole transformer is for diffusers.
        overrides: `--section.key=value` words laid over the run's configuration, such
            as a model.path that has moved.
        trust_config: whether a model family of the checkpoint from outside SAGE-Fast
            may be imported and called.
        overwrite: replace an export of another run, format or layout in `output_dir`.
        push_to_hub: repository of the Hugging Face hub, as `me/mine`, that the folder
            is uploaded to; made if it is not there.

    Raises:
        ConfigError: a format or layout that the run does not have, overrides that make
            another model of it, a folder with other files, or an upload that failed.
        CheckpointError: a damaged checkpoint. OSError: the folder cannot be written.
    """
    if format not in (None, *get_args(Format)):
        raise ConfigError(
            f"--format is {format!r}; choose lora or full, or leave it out."
        )
    source = _open(
        Path(run if isinstance(run, str | Path) else run.output_dir), checkpoint
    )
    directory = RunDirectory(source.folder.parent.parent)
    folder = Path(output_dir or directory.exported).expanduser()
    with tempfile.TemporaryDirectory() as saved:
        # By way of a file, so that what the checkpoint holds is checked and overridden
        # as any configuration is.
        file = Path(saved) / "checkpoint.yaml"
        # JSON is YAML
        file.write_text(
            json.dumps(source.state["config"], ensure_ascii=False), encoding="utf-8"
        )
        config = load_config(file, overrides)
    if not trust_config:
        check_trust(config, source.folder, named_code([], overrides), rewards=False)
    check_same_run(
        source.state["config"], to_dict(config), source.folder, only=TRAINED_MODEL
    )
    chosen = format or ("full" if config.training.mode == "full" else "lora")
    if chosen == "lora" and config.training.mode == "full":
        raise ConfigError(
            f"{source.folder} is of a run with training.mode full, which has no "
            "adapter. Export it by --format full."
        )
    if chosen == "full" and layout != "diffusers":
        raise ConfigError(
            f"--layout {layout} is for adapters; a whole transformer is exported by "
            "--layout diffusers."
        )
    family = model_family(config.model.family)
    if chosen == "full" and len(family.experts) > 1:
        raise ConfigError(
            f"--format full is for one transformer, and model.family "
            f"{config.model.family} has several. Give --format lora."
        )
    if layout not in family.clients:
        raise ConfigError(
            f"--layout is {layout}, and model.family {config.model.family} has names "
            f"for {', '.join(family.clients)} alone."
        )
    _make_room(folder, source.folder.parent, chosen, layout, overwrite)
    averaged = "ema" in source.tensors
    result = Export(
        folder=folder,
        format=chosen,
        layout=layout,
        update=int(source.state["trainer"]["update"]),
        averaged=averaged,
        dtype=config.model.dtype if chosen == "full" else "float32",
        adapter_files=file_names(layout, family),
    )
    if chosen == "lora":
        pairs = read_adapter(source.folder / "lora", family)
        base = family.pipeline_base(config.model) or config.model.path
        write_adapter(
            folder, family, pairs, layout, config.lora.rank, base or config.model.family
        )
    else:
        transformer = _whole_transformer(
            config, source.tensors["ema" if averaged else "weights"]
        )
        transformer.save_pretrained(folder)
    _write_card(result, config, directory)
    record = {
        "sage_fast": __version__,
        "diffusers": metadata.version("diffusers"),
        "files": sorted(path.name for path in folder.iterdir()),
        "checkpoint": str(source.folder),
        "base_model": {"family": config.model.family, "path": config.model.path},
        **{key: value for key, value in asdict(result).items() if key != "folder"},
    }
    # Last, with the names of all files: a later export removes these and no others.
    write_text(folder / RECORD, json.dumps(record, indent=1) + "\n")
    if push_to_hub is not None:
        _upload(folder, push_to_hub)
    return result


def _upload(folder: Path, repository: str) -> None:
    """Upload a written export. ConfigError, with the command that tries again."""
    hub = HfApi()
    try:
        hub.create_repo(repository, exist_ok=True)
        hub.upload_folder(repo_id=repository, folder_path=folder)
    # no token, no connection, no such user, a name that is none
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{folder} is written, but it is not at {repository}: "
            f"{str(error).strip()} Try again by `hf upload {repository} "
            f"{shlex.quote(str(folder))}`, after `hf auth login` where nobody is "
            "logged in."
        ) from error


def _make_room(
    folder: Path, run: Path, format: Format, layout: Layout, overwrite: bool
) -> None:
    """Empty a folder that holds nothing but an earlier export, which must be of the
    same run, format and layout unless it is overwritten; else ConfigError.

    run: where its checkpoints are.
    """
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"--output_dir {folder} is a file. Give a folder.")
    folder.mkdir(parents=True, exist_ok=True)
    record = folder / RECORD
    files = {RECORD}
    if record.is_file():
        try:
            earlier = loads(record.read_text(encoding="utf-8"))
            files |= set(earlier["files"])
            exported = Path(earlier["checkpoint"])
            kind = f"--format {earlier['format']} --layout {earlier['layout']}"
        except (ValueError, TypeError, KeyError) as error:
            raise ConfigError(
                f"{record} is not the record of an export ({error}). Give another "
                "--output_dir."
            ) from error
        same = exported.parent.resolve() == run.resolve()
        if not overwrite and (
            not same or kind != f"--format {format} --layout {layout}"
        ):
            raise ConfigError(
                f"--output_dir {folder} holds an export of {exported} by {kind}. Give "
                "another folder, or --overwrite to replace it."
            )
    others = sorted(path.name for path in folder.iterdir() if path.name not in files)
    if others:
        raise ConfigError(
            f"--output_dir {folder} holds other files, such as {others[0]}. Give a "
            "new folder, or one with nothing but an earlier export. If they are of an "
            "export that was interrupted, delete them."
        )
    # The record goes first: without a whole export beside it it would pass for one.
    for path in (record, *sorted(folder.iterdir())):
        path.unlink(missing_ok=True)


def _open(source: Path, chosen: str) -> Checkpoint:
    """The checkpoint that is meant. ConfigError when there is none, CheckpointError for
    a damaged one.
    """
    if (source / "state.json").exists():
        if chosen != "auto":
            raise ConfigError(
                f"{source} is a checkpoint, and --checkpoint {chosen} is for a run. "
                "Give one of the two."
            )
        return open_checkpoint(source)
    if not RunDirectory(source).checkpoints.is_dir():
        raise ConfigError(
            f"{source} is neither a checkpoint nor a run: it has neither state.json "
            "nor checkpoints/. Give a run, or "
            "one of the folders in its checkpoints/."
        )
    found = choose_checkpoint(chosen, RunDirectory(source))
    if found is None:
        raise ConfigError(
            f"--checkpoint {chosen} exports nothing. Give auto, best or a checkpoint "
            "folder."
        )
    return found


def _whole_transformer(config: RunConfig, weights: Mapping[str, Tensor]) -> Any:
    """The base transformer with the trained weights: instead of the base ones, or an
    adapter merged into them.
    """
    dtype = getattr(torch, config.model.dtype)
    try:
        # The checkpoint has what became of `model.adapter`, which may be gone.
        transformer = load_model(
            replace(config.model, adapter=None), config.lora
        ).transformer
        use_weights(transformer, weights, mode=config.training.mode, lora=config.lora)
    except (ValueError, OSError) as error:
        raise ConfigError(
            f"{error} A full export needs the base model of the run: if it has moved, "
            "add --model.path=FOLDER."
        ) from error
    if config.training.mode == "lora":
        for name, parameter in transformer.named_parameters():
            if ".lora_" not in name:
                parameter.data = parameter.data.to(dtype)
        # In place: peft's safe merge would round the adapter's product to 16 bits, and
        # then the sum.
        transformer.fuse_lora()
        transformer.unload_lora()
    for name, parameter in transformer.named_parameters():
        if not parameter.isfinite().all():
            raise ConfigError(
                f"{name} is not finite in the exported model. Choose an earlier "
                "--checkpoint."
            )
    return transformer


def _measured(run: RunDirectory, update: int) -> dict[str, Any]:
    """Paired tests after an update, or after the last evaluation where it has none;
    nothing of a run without any.
    """
    files = run.evaluations()
    last = max(files, default=0)
    after = update if update in files else last
    if not after or 0 not in files:
        return {}
    try:
        evaluation = Evaluation.load(files[after])
        tests = paired_tests(Evaluation.load(files[0]), evaluation)
    except ValueError as error:
        logger.warning("The model card has no table: %s", error)
        return {}
    return {
        "after": after,
        "is_last": after == last,
        "noises": evaluation.noises,
        "tests": tests,
    }


def _write_card(result: Export, config: RunConfig, run: RunDirectory) -> None:
    """Write README.md, config.yaml and the pictures of a run that the card shows."""
    save_config(config, RunDirectory(result.folder).config)
    paired = _measured(run, result.update)
    pictures = {run.reward_plot: "Reward of the run"}
    if paired.get("is_last"):  # the picture is of the last evaluation
        pictures[run.before_after] = "Same prompts and noise, before and after"
    pictures = {file: said for file, said in pictures.items() if file.is_file()}
    for file in pictures:
        with replacing(result.folder / file.name) as partial:
            shutil.copyfile(file, partial)
    lora = result.format == "lora"
    family = model_family(config.model.family)
    base = family.pipeline_base(config.model)
    licence, licence_link = family.licence or (None, None)
    # The hub knows this name; of another licence it wants name and link.
    known = licence == "apache-2.0"
    pipeline, task = family.pipeline_of(config.model)
    diffusers = metadata.version("diffusers")
    newer = tuple(map(int, diffusers.split(".")[:2])) >= (0, 40)
    tags = ["grpo", "reinforcement-learning", "sage-fast"]
    if lora:
        tags.append("lora")
    data = ModelCardData(
        base_model=base if base is not None and is_repository(base) else None,
        base_model_relation="adapter" if lora else "finetune",
        library_name=result.layout if result.layout in ("diffusers", "peft") else None,
        license="other" if licence and not known else licence,
        license_name=None if known else licence,
        license_link=None if known else licence_link,
        pipeline_tag=task,
        tags=tags,
    )
    card = ModelCard.from_template(
        data,
        template_str=TEMPLATE.read_text(encoding="utf-8"),
        result=result,
        lora=lora,
        folder=repr(str(result.folder)),
        base=base,
        config=config,
        adapter_file=result.adapter_file,
        family=family,
        pipeline=pipeline,
        command=family.clients[result.layout].command.format(
            folder=repr(str(result.folder)),
            file=result.adapter_file,
            resolution="720p" if config.video.height > 600 else "480p",
        ),
        version=__version__,
        diffusers=diffusers,
        # Pipelines took `torch_dtype` until 0.39, and since 0.40 `dtype`, with a
        # warning for the other.
        pipeline_dtype="dtype" if newer else "torch_dtype",
        paired=paired,
        pictures={file.name: said for file, said in pictures.items()},
    )
    write_text(result.folder / "README.md", str(card))
