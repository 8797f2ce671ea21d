"""Differences between a machine and the needs of a configuration, each with what mends
it.

Every finding is a `Check`: nothing is fixed, downloaded or loaded, and a check that
fails does not end the others.
"""

import os
import platform
import shutil
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import av
import torch

from sage_fast import __version__
from sage_fast.checkpoint.folder import list_checkpoints
from sage_fast.config.errors import CheckpointError, ConfigError
from sage_fast.config.registry import REWARDS
from sage_fast.config.schema import RunConfig
from sage_fast.config.sections import ModelConfig, RewardConfig
from sage_fast.distributed.failure import version_of
from sage_fast.distributed.start import rank_device
from sage_fast.models.attention.attention import backend_report
from sage_fast.models.family import ModelDescription, describe_model, model_family
from sage_fast.models.hub import Requirement, download_folder, local_folder
from sage_fast.models.picture_files import check_pictures
from sage_fast.objectives.base import objective_of
from sage_fast.optim import unusual_movement
from sage_fast.planning.devices import choose_device, gpu_memory_gb, host_memory
from sage_fast.planning.estimate import SAFE_SHARE, make_memory_plan, plan_encoding
from sage_fast.planning.layout import least_gpus
from sage_fast.planning.memory import checkpoint_bytes
from sage_fast.planning.text import encoding_text
from sage_fast.planning.weights import count_weights
from sage_fast.rewards.base import find_reward, reward_requirements, scored_elsewhere
from sage_fast.rewards.server import SetupError, check_reward, fill_options, parameters
from sage_fast.run.directory import RunDirectory
from sage_fast.run.prompt_files import load_prompts

Status = Literal["ok", "info", "warning", "missing", "failed"]


@dataclass(frozen=True)
class Check:
    """One finding. `fix`: the remedy for anything that is not ok.

    status: `missing` means that the configuration cannot run, `failed` that it has run,
    and not as it should.

    Example: `Check("files", "VideoAlign", "missing", "...", fix="hf download ...")`
    """

    section: str
    name: str
    status: Status
    detail: str
    fix: str = ""


def judged(
    section: str,
    name: str,
    passes: bool,
    detail: str,
    fix: str = "",
    otherwise: Status = "missing",
) -> Check:
    """A finding that is ok, or needs its remedy."""
    return (
        Check(section, name, "ok", detail)
        if passes
        else Check(section, name, otherwise, detail, fix)
    )


def examine(config: RunConfig | None, gpus: int | None = None) -> list[Check]:
    """All checks: those of the machine, and those of a configuration when one is given.

    gpus: processes of the run; None means the fewest that the configuration fits.
    """
    checks = [*software(), *hardware(), *_attention(config)]
    if config is not None:
        gpus = gpus or least_gpus(config.distributed, config.rollout)
        checks += [
            *_settings(config, gpus),
            *_files(config),
            *_memory(config, gpus),
            *_disk(config),
        ]
    return checks


def can_run(checks: Sequence[Check]) -> bool:
    """True when nothing is missing, and nothing has failed."""
    return all(check.status not in ("missing", "failed") for check in checks)


def to_text(checks: Sequence[Check], config_given: bool) -> str:
    """The checks as aligned lines, and a verdict."""
    width = max(len(check.name) for check in checks)
    lines: list[str] = []
    section = ""
    for check in checks:
        if check.section != section:
            section = check.section
            lines += ["", section]
        mark = "" if check.status == "info" else check.status
        lines.append(f"  {mark:<8} {check.name:<{width}}  {check.detail}")
        if check.fix:
            lines.append(f"  {'':<8} {'':<{width}}  -> {check.fix}")
    missing, failed, warnings = (
        sum(c.status == s for c in checks) for s in ("missing", "failed", "warning")
    )
    verdict = (
        "This configuration can run." if config_given else "This machine is ready."
    )
    if missing:
        subject = (
            "This configuration cannot run"
            if config_given
            else "This machine is not ready"
        )
        verdict = f"{subject}: see the {missing} marked missing."
    elif failed:
        verdict = (
            f"This configuration does not do what it should: see the {failed} marked "
            "failed."
        )
    if warnings:
        verdict += f" {warnings} warning{'s' if warnings > 1 else ''}."
    return "\n".join([*lines[1:], "", verdict])


# ------------------------------------------------------------------------------------------------------------
# machine


def software() -> Iterator[Check]:
    """Versions of the packages that decide the numbers, and whether videos can be
    written.
    """
    found = ", ".join(
        f"{name} {version_of(name)}"
        for name in ("torch", "diffusers", "transformers", "peft")
    )
    yield Check(
        "software",
        "sage-fast",
        "ok",
        f"{__version__}, Python {platform.python_version()}, {found}",
    )
    writes = "libx264" in av.codecs_available
    detail = (
        f"PyAV {version_of('av')} {'with' if writes else 'without'} libx264, which "
        "writes the videos"
    )
    yield judged(
        "software",
        "mp4",
        writes,
        detail,
        "pip install --force-reinstall av   (PyPI's wheels have it)",
    )


def hardware() -> Iterator[Check]:
    """Processor, memory and GPUs."""
    section = "hardware"
    gib = 2**30
    memory = host_memory()
    yield Check(
        section,
        "cpu",
        "ok",
        f"{os.cpu_count()} cores" + (f", {memory / gib:.0f} GiB" if memory else ""),
    )
    if not torch.cuda.is_available():
        if shutil.which("nvidia-smi"):
            detail = (
                f"there is an NVIDIA driver, but torch {torch.__version__} cannot use "
                "it"
            )
            fix = (
                "install a torch with CUDA that fits the driver: "
                "https://pytorch.org/get-started/locally"
            )
            yield Check(section, "cuda", "missing", detail, fix=fix)
        else:
            yield Check(
                section, "cuda", "info", "none; the preset toy_cpu trains on the CPU"
            )
        return
    for index in range(torch.cuda.device_count()):
        found = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        detail = (
            f"{found.name}, sm_{found.major}{found.minor}, {free / gib:.0f} of "
            f"{total / gib:.0f} GiB free"
        )
        fix = "another process uses this GPU: see nvidia-smi"
        yield judged(
            section, f"cuda:{index}", free >= 0.9 * total, detail, fix, "warning"
        )


def _attention(config: RunConfig | None) -> Iterator[Check]:
    """Backends that run on the device; the one a config names must be among them."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16
    wanted = "auto"
    if config is not None:
        dtype = getattr(torch, config.model.dtype)
        wanted = config.model.attention
        with suppress(ConfigError):
            device = str(rank_device(config.model.device))
    for name, reason in backend_report(torch.device(device), dtype).items():
        if reason is not None and name != wanted:
            yield Check("attention", name, "info", reason)
        else:
            fix = "install it, or set model.attention to auto"
            yield judged(
                "attention", name, reason is None, reason or f"runs on {device}", fix
            )


# ------------------------------------------------------------------------------------------------------
# configuration


def _known(model: ModelConfig) -> tuple[str | None, ModelDescription | None]:
    """The device that a run would use, and the model before it is loaded.

    None where torch cannot use the device that is named, and where the model's family
    or its folder says nothing.
    """
    device = None
    description = None
    with suppress(ConfigError):
        device = str(rank_device(model.device))
    with suppress(ConfigError):
        description = describe_model(model)
    return device, description


def _settings(config: RunConfig, gpus: int) -> Iterator[Check]:
    section = "configuration"
    device, description = _known(config.model)
    try:
        yield Check(
            section, "model.device", "ok", str(rank_device(config.model.device))
        )
    except ConfigError as error:
        yield Check(
            section, "model.device", "missing", str(error), fix="--model.device=auto"
        )
    for name in config.reward.rewards:
        yield _reward(config.reward, config.video.fps, name)
    try:
        prompts, evaluated = load_prompts(config)
        yield Check(
            section,
            "prompts",
            "ok",
            f"{len(prompts)} for training, {len(evaluated)} for evaluation",
        )
        if description is not None:
            planned = choose_device(None, device or "auto", description.width)
            if (
                encoding := plan_encoding(config, planned, description, gpus)
            ) is not None:
                detail = f"{encoding_text(encoding)}; predicted for {planned.name}"
                yield Check(section, "encoding of prompts", "info", detail)
    except ConfigError as error:
        yield Check(
            section,
            "prompts",
            "missing",
            str(error),
            fix="mend the file, or name another",
        )
    uses = {
        **{
            name: ("logging.report_to", name in config.logging.report_to)
            for name in ("tensorboard", "wandb")
        },
        "deepspeed": ("distributed.zero_stage", config.distributed.zero_stage),
    }
    for package, (key, value) in uses.items():
        if value and version_of(package) is None:
            fix = f"pip install {package}, or leave {key} out"
            yield Check(section, key, "missing", f"{package} is not installed", fix=fix)
    here = torch.cuda.device_count()
    if gpus > 1:
        enough = device == "cpu" or here >= gpus
        detail = f"{gpus}, started by torchrun or SLURM; this machine has {here} GPU(s)"
        fix = (
            "start it on several machines (docs/distributed.md), or set other degrees "
            "under `distributed`"
        )
        yield judged(section, "processes", enough, detail, fix, "warning")
    yield _output_dir(config)
    if description is not None:
        size = count_weights(config, description.transformer).total
        published = objective_of(config).published[config.training.mode]
        if unusual := unusual_movement(config.optimizer, config.lora, published, size):
            fix = f"--optimizer.learning_rate={unusual[1]:g}"
            yield Check(
                section, "optimizer.learning_rate", "warning", unusual[0], fix=fix
            )


def _output_dir(config: RunConfig) -> Check:
    """Check that a run may read and write its directory, and that no other run is in
    it.
    """
    section = "configuration"
    name = "output_dir"
    folder = RunDirectory(config.output_dir)
    existing = _existing(folder.path)
    fix = "--output_dir=FOLDER on a disk that you may write to"
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        return Check(
            section, name, "missing", f"{existing} cannot be written to", fix=fix
        )
    try:
        holds_run = folder.metrics.exists() or list_checkpoints(folder.checkpoints)
    except (OSError, CheckpointError) as error:
        return Check(section, name, "missing", str(error), fix=fix)
    if config.resume == "none" and holds_run:
        fix = "--resume auto to go on with it, or another --output_dir"
        return Check(section, name, "warning", f"{folder} already holds a run", fix=fix)
    return Check(section, name, "ok", str(folder))


def _reward(section: RewardConfig, video_fps: float, name: str) -> Check:
    """Check that a reward can be imported and takes the options it is given."""
    key = f"reward {name}"
    if name in scored_elsewhere(section):
        python = section.python
        there = python is None or shutil.which(Path(python).expanduser()) is not None
        check = judged(
            "configuration",
            key,
            there,
            f"scored by {python or section.url}",
            "--reward.python=PATH",
        )
        # nobody has asked the server
        return replace(check, status="info") if there else check
    try:
        found = find_reward(name)
        # as a run does
        options = fill_options(
            found, section.options.get(name, {}), device="cpu", fps=video_fps
        )
        check_reward(name, found, options)
        if "fps" in parameters(found) and options["fps"] != video_fps:
            detail = (
                f"fps is {options['fps']}, but video.fps is {video_fps:g}; it decides "
                "which frames are scored"
            )
            return Check(
                "configuration",
                key,
                "warning",
                detail,
                fix=f"--reward.options.{name}.fps={video_fps:g}",
            )
    except (ConfigError, SetupError) as error:
        return Check(
            "configuration",
            key,
            "missing",
            str(error),
            fix=f"see reward.options.{name}",
        )
    return Check("configuration", key, "ok", REWARDS.get(name, name))


def _existing(path: Path) -> Path:
    """The deepest part of a path that exists."""
    path = path.expanduser().absolute()
    # where Path's raises: in a folder that may not be read
    while not os.path.exists(path):
        path = path.parent
    return path


# ------------------------------------------------------------------------------------------------
# files, memory, disk


def needed_files(model: ModelConfig, reward: RewardConfig) -> list[Requirement]:
    """The files of the model and of every reward; nothing for one that cannot be
    imported.
    """
    needed: list[Requirement] = []
    with suppress(ConfigError):
        needed += model_family(model.family).requirements(model)
    for name in reward.rewards:
        if name not in scored_elsewhere(reward):
            with suppress(ConfigError):
                needed += reward_requirements(name, reward.options.get(name, {}))
    return needed


def _files(config: RunConfig) -> Iterator[Check]:
    section = "files"
    for requirement in needed_files(config.model, config.reward):
        missing = requirement.missing
        detail = requirement.where
        if missing:
            named = ", ".join(missing[:3]) + (", ..." if len(missing) > 3 else "")
            detail += (
                " is not here"
                if local_folder(requirement.where) is None
                else f" lacks {named}"
            )
        detail += f" ({requirement.licence})" if requirement.licence else ""
        yield judged(section, requirement.name, not missing, detail, requirement.fetch)
    fix = "see the message"
    try:
        family = model_family(config.model.family)
        if any(
            requirement.missing for requirement in family.requirements(config.model)
        ):
            return
        # It opens files, but loads, converts and downloads none.
        facts = family.inspect(config.model)
        if facts is None:
            return
        # The remedy of what comes next: one handler below reports whatever fails here.
        fix = "--rollout.guidance_scale=1"
        facts.check_guidance(config.rollout.guidance_scale)
        fix = "--forward_process.sampling_guidance=null"
        facts.check_guidance(
            config.sampling_guidance, "forward_process.sampling_guidance"
        )
        fix = "see the message"
        with suppress(ConfigError):  # the check of the prompts says it
            prompts = [prompt for group in load_prompts(config) for prompt in group]
            facts.check_pictures(prompts)
            check_pictures(
                prompt.asked(config.video.height, config.video.width)
                for prompt in prompts
            )
    except (ValueError, OSError) as error:
        yield Check(section, "model weights", "missing", str(error), fix=fix)
        return
    yield Check(section, "model weights", "ok", "can be trained")
    if (difference := facts.shift_difference(config.rollout.shift)) is not None:
        yield Check(
            section,
            "rollout.shift",
            "warning",
            difference,
            fix=f"--rollout.shift={facts.shift:g}",
        )
    for key, text in facts.few_steps(config.steps_by_key).items():
        yield Check(section, key, "warning", text, fix=f"--{key}={facts.least_steps}")


def _memory(config: RunConfig, gpus: int) -> Iterator[Check]:
    section = "memory"
    device, _ = _known(config.model)
    host = host_memory()
    try:
        description = describe_model(config.model)
    except ConfigError as error:
        yield Check(section, "training", "info", f"not predicted: {error}")
        return
    if device is None or host is None:
        return
    if config.model.forward == "stock" or config.distributed.zero_stage is not None:
        yield Check(
            section,
            "training",
            "info",
            "not predicted: the plan knows the fused forward and FSDP2 alone",
        )
        return
    on_gpu = device.startswith("cuda")
    available = gpu_memory_gb(device) if on_gpu else host / 1e9
    try:
        plan = make_memory_plan(
            config,
            on_gpu=on_gpu,
            gpus=gpus,
            memory_gb=available,
            description=description,
        )
    except ConfigError as error:
        yield Check(section, "training", "missing", str(error), fix="see the message")
        return
    peak = plan.memory.peak / 1e9
    detail = (
        f"about {peak:.0f} GB of {available:.0f} GB on {device}, by the plan's estimate"
    )
    fix = (
        "`sage-fast plan` with the same words has every part, and the settings that "
        "need less"
    )
    otherwise: Status = "warning" if peak <= available else "missing"
    yield judged(
        section, "training", peak <= SAFE_SHARE * available, detail, fix, otherwise
    )
    if plan.loading is not None:
        needed = sum(plan.loading.values())
        detail = f"about {needed / 1e9:.0f} GB of {host / 1e9:.0f} GB of this node"
        fix = "fewer processes on this node, or a node with more memory"
        yield judged(section, "CPU memory", needed < SAFE_SHARE * host, detail, fix)


def _disk(config: RunConfig) -> Iterator[Check]:
    """Room on every disk for the downloads and checkpoints that go to it."""
    needed: dict[Path, float] = {}
    for requirement in needed_files(config.model, config.reward):
        if requirement.missing:
            folder = _existing(download_folder(requirement))
            needed[folder] = needed.get(folder, 0.0) + requirement.gigabytes * 1e9
    _, description = _known(config.model)
    if description is not None:
        # One more than is kept: the new one is written before the oldest goes.
        count = config.checkpoint.keep_last + 1 + (config.evaluation.every > 0)
        folder = _existing(Path(config.output_dir))
        size = (
            checkpoint_bytes(config, count_weights(config, description.transformer))
            * count
        )
        needed[folder] = needed.get(folder, 0.0) + size
    # Folders of one disk share its room, so their needs are added.
    for disk in {folder.stat().st_dev for folder in needed}:
        folders = [folder for folder in needed if folder.stat().st_dev == disk]
        size = sum(needed[folder] for folder in folders)
        free = shutil.disk_usage(folders[0]).free
        needs = f"about {size / 1e9:.0f} GB for downloads and checkpoints"
        detail = f"{needs}, {free / 1e9:.0f} GB free, of which a tenth is kept"
        fix = (
            "--output_dir or HF_HOME on a larger disk, or a smaller "
            "--checkpoint.keep_last"
        )
        yield judged("disk", str(folders[0]), size < 0.9 * free, detail, fix)
