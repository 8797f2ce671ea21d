"""Differences between a machine and the needs of a configuration, each with what mends
it.

Every finding is a `Check`: nothing is fixed, downloaded or loaded, and a check that
fails does not end the others.
"""

import os
import platform
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import av
import torch

from sage_fast import __version__
from sage_fast.checkpoint.folder import list_checkpoints
from sage_fast.config.errors import CheckpointError, ConfigError
from sage_fast.config.load import EVIDENCE, preset_evidence
from sage_fast.config.registry import REWARDS, TRACKERS
from sage_fast.config.schema import RunConfig
from sage_fast.config.sections import ModelConfig, RewardConfig
from sage_fast.distributed.failure import version_of
from sage_fast.distributed.start import rank_device
from sage_fast.models.attention.attention import backend_report
from sage_fast.models.family import describe_model, model_family
from sage_fast.models.hub import Requirement, download_folder, local_folder
from sage_fast.models.media_files import check_pictures
from sage_fast.objectives.base import objective_of
from sage_fast.optim import unusual_movement
from sage_fast.planning.devices import gpu_memory_gb, host_memory
from sage_fast.planning.estimate import SAFE_SHARE, make_memory_plan
from sage_fast.planning.memory import checkpoint_bytes
from sage_fast.planning.work import Weights, count_weights, least_gpus
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
    if passes:
        return Check(section, name, "ok", detail)
    return Check(section, name, otherwise, detail, fix)


def examine(
    config: RunConfig | None, gpus: int | None = None, presets: Sequence[str] = ()
) -> list[Check]:
    """All checks: those of the machine, and those of a configuration when one is given.

    gpus: processes of the run; None means the fewest that the configuration fits.
    presets: that it was made of.
    """
    checks = [*software(), *hardware(), *attention(config)]
    if config is not None:
        gpus = gpus or least_gpus(config.distributed, config.rollout)
        checks += [
            *(
                Check(
                    "configuration",
                    f"preset {name}",
                    "info",
                    EVIDENCE[preset_evidence(name)],
                )
                for name in presets
            ),
            *settings(config, gpus),
            *files(config),
            *memory(config, gpus),
            *disk(config),
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
    count = Counter(check.status for check in checks)
    verdict = "This machine is ready."
    if config_given:
        verdict = "This configuration can run."
    if count["missing"]:
        subject = "This machine is not ready"
        if config_given:
            subject = "This configuration cannot run"
        verdict = f"{subject}: see the {count['missing']} marked missing."
    elif count["failed"]:
        verdict = (
            "This configuration does not do what it should: see the "
            f"{count['failed']} marked failed."
        )
    if count["warning"]:
        verdict += f" Warnings: {count['warning']}."
    return "\n".join([*lines[1:], "", verdict])


# --------------------------------------------------------------------------------------
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
    detail = f"{os.cpu_count()} cores"
    if size := host_memory():
        detail += f", {size / gib:.0f} GiB"
    yield Check(section, "cpu", "ok", detail)
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


def attention(config: RunConfig | None) -> Iterator[Check]:
    """Backends that run on the device; the one a config names must be among them."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16
    wanted = "auto"
    if config is not None:
        dtype = getattr(torch, config.model.dtype)
        wanted = config.model.attention
        device = _device(config.model) or device
    for name, reason in backend_report(torch.device(device), dtype).items():
        if reason is None:
            yield Check("attention", name, "ok", f"runs on {device}")
        elif name == wanted:
            fix = "install it, or set model.attention to auto"
            yield Check("attention", name, "missing", reason, fix)
        else:
            yield Check("attention", name, "info", reason)


# --------------------------------------------------------------------------------------
# configuration


def _device(model: ModelConfig) -> str | None:
    """The device that a run would use; None where torch cannot use the one that is
    named.
    """
    with suppress(ConfigError):
        return str(rank_device(model.device))
    return None


def _weights(config: RunConfig) -> Weights | None:
    """The numbers of weights; None where nothing says them, or an adapter has no place,
    which the check of the memory says.
    """
    with suppress(ValueError):
        return count_weights(config, describe_model(config.model).transformer)
    return None


def settings(config: RunConfig, gpus: int) -> Iterator[Check]:
    """Device, rewards, prompts, packages, processes, directory and learning rate."""
    section = "configuration"
    weights = _weights(config)
    try:
        device = str(rank_device(config.model.device))
        yield Check(section, "model.device", "ok", device)
    except ConfigError as error:
        device = "auto"
        yield Check(
            section, "model.device", "missing", str(error), "--model.device=auto"
        )
    for name in config.reward.named:
        yield _reward(config.reward, config.video.fps, name)
    try:
        prompts, evaluated = load_prompts(config)
        detail = f"{len(prompts)} for training, {len(evaluated)} for evaluation"
        yield Check(section, "prompts", "ok", detail)
    except ConfigError as error:
        fix = "mend the file, or name another"
        yield Check(section, "prompts", "missing", str(error), fix)
    uses: dict[str, str] = {}
    for tracker in set(config.logging.report_to).intersection(TRACKERS):
        uses[tracker] = "logging.report_to"
    if config.distributed.zero_stage is not None:
        uses["deepspeed"] = "distributed.zero_stage"
    for package, key in uses.items():
        if version_of(package) is None:
            fix = f"pip install {package}, or leave {key} out"
            yield Check(section, key, "missing", f"{package} is not installed", fix)
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
    if weights is not None:
        published = objective_of(config).published[config.training.mode]
        unusual = unusual_movement(
            config.optimizer, config.lora, published, weights.total
        )
        if unusual is not None:
            name = "optimizer.learning_rate"
            fix = f"--{name}={unusual[1]:g}"
            yield Check(section, name, "warning", unusual[0], fix)


def _output_dir(config: RunConfig) -> Check:
    """Check that a run may read and write its directory, and that no other run is in
    it.
    """
    found = partial(Check, "configuration", "output_dir")
    folder = RunDirectory(config.output_dir)
    existing = _existing(folder.path)
    fix = "--output_dir=FOLDER on a disk that you may write to"
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        return found("missing", f"{existing} cannot be written to", fix)
    try:
        holds_run = folder.metrics.exists() or list_checkpoints(folder.checkpoints)
    except (OSError, CheckpointError) as error:
        return found("missing", str(error), fix)
    if config.resume == "none" and holds_run:
        fix = "--resume auto to go on with it, or another --output_dir"
        return found("warning", f"{folder} already holds a run", fix)
    return found("ok", str(folder))


def _reward(section: RewardConfig, video_fps: float, name: str) -> Check:
    """Check that a reward can be imported and takes the options it is given."""
    found = partial(Check, "configuration", f"reward {name}")
    if name in scored_elsewhere(section):
        python = section.python
        detail = f"scored by {python or section.url}"
        if python is None or shutil.which(Path(python).expanduser()) is not None:
            return found("info", detail)  # nobody has asked the server
        return found("missing", detail, "--reward.python=PATH")
    try:
        reward = find_reward(name)
        # as a run does
        options = fill_options(
            reward, section.options.get(name, {}), device="cpu", fps=video_fps
        )
        check_reward(name, reward, options)
    except (ConfigError, SetupError) as error:
        return found("missing", str(error), f"see reward.options.{name}")
    if "fps" in parameters(reward) and options["fps"] != video_fps:
        detail = (
            f"fps is {options['fps']}, but video.fps is {video_fps:g}; it decides "
            "which frames are scored"
        )
        return found("warning", detail, f"--reward.options.{name}.fps={video_fps:g}")
    return found("ok", REWARDS.get(name, name))


def _existing(path: Path) -> Path:
    """The deepest part of a path that exists."""
    path = path.expanduser().absolute()
    # where Path's raises: in a folder that may not be read
    while not os.path.exists(path):
        path = path.parent
    return path


# --------------------------------------------------------------------------------------
# files, memory, disk


def needed_files(model: ModelConfig, reward: RewardConfig) -> list[Requirement]:
    """The files of the model and of every reward; nothing for one that cannot be
    imported.
    """
    needed: list[Requirement] = []
    with suppress(ConfigError):
        needed += model_family(model.family).requirements(model)
    for name in reward.named:
        if name not in scored_elsewhere(reward):
            with suppress(ConfigError):
                needed += reward_requirements(name, reward.options.get(name, {}))
    return needed


def files(config: RunConfig) -> Iterator[Check]:
    """The files of the model and of the rewards, and what the weights state."""
    section = "files"
    for requirement in needed_files(config.model, config.reward):
        missing = requirement.missing
        detail = requirement.where
        if missing and local_folder(requirement.where) is None:
            detail += " is not here"
        elif missing:
            more = ", ..." if len(missing) > 3 else ""
            detail += f" lacks {', '.join(missing[:3])}{more}"
        if requirement.licence:
            detail += f" ({requirement.licence})"
        yield judged(section, requirement.name, not missing, detail, requirement.fetch)
    fix = "see the message"
    if config.model.adapter is not None:
        from sage_fast.policy.layouts import read_adapter  # imports diffusers

        problem = ""
        try:
            family = model_family(config.model.family)
            read_adapter(Path(config.model.adapter), family)
        except (ValueError, OSError) as error:
            problem = str(error)
        detail = problem or config.model.adapter
        yield judged(section, "model.adapter", not problem, detail, fix)
    try:
        family = model_family(config.model.family)
        if any(one.missing for one in family.requirements(config.model)):
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
            check_pictures(prompt.asked(config.video) for prompt in prompts)
    except (ValueError, OSError) as error:
        yield Check(section, "model weights", "missing", str(error), fix)
        return
    yield Check(section, "model weights", "ok", "can be trained")
    difference = facts.shift_difference(config.rollout.shift)
    if difference is not None:
        fix = f"--rollout.shift={facts.shift:g}"
        yield Check(section, "rollout.shift", "warning", difference, fix)
    for key, text in facts.few_steps(config.steps_by_key).items():
        yield Check(section, key, "warning", text, f"--{key}={facts.least_steps}")


def memory(config: RunConfig, gpus: int) -> Iterator[Check]:
    """Memory of a GPU, or of the CPU, against the plan's."""
    found = partial(Check, "memory", "training")
    device = _device(config.model)
    host = host_memory()
    try:
        description = describe_model(config.model)
    except ConfigError as error:
        yield found("info", f"not predicted: {error}")
        return
    if device is None or host is None:
        return
    family = model_family(config.model.family)
    untraced = config.model.forward == "stock" and not family.plans_stock
    if untraced or config.distributed.zero_stage is not None:
        detail = "not predicted: the plan knows the fused forward and FSDP2 alone"
        yield found("info", detail)
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
    except ValueError as error:
        yield found("missing", str(error), "see the message")
        return
    peak = plan.memory.peak / 1e9
    detail = (
        f"about {peak:.0f} GB of {available:.0f} GB on {device}, by the plan's estimate"
    )
    fix = (
        "`sage-fast plan` with the same words has every part, and the settings that "
        "need less"
    )
    if peak <= SAFE_SHARE * available:
        yield found("ok", detail)
    else:
        yield found("warning" if peak <= available else "missing", detail, fix)
    if plan.loading is not None:
        needed = sum(plan.loading.values())
        detail = f"about {needed / 1e9:.0f} GB of {host / 1e9:.0f} GB of this node"
        fix = "fewer processes on this node, or a node with more memory"
        yield judged("memory", "CPU memory", needed < SAFE_SHARE * host, detail, fix)


def disk(config: RunConfig) -> Iterator[Check]:
    """Room on every disk for the downloads and checkpoints that go to it."""
    needed: Counter[Path] = Counter()
    for requirement in needed_files(config.model, config.reward):
        if requirement.missing:
            folder = _existing(download_folder(requirement))
            needed[folder] += int(requirement.gigabytes * 1e9)
    weights = _weights(config)
    if weights is not None:
        # One more than is kept: the new one is written before the oldest goes.
        count = config.checkpoint.keep_last + 1 + (config.evaluation.every > 0)
        size = checkpoint_bytes(config, weights) * count
        needed[_existing(Path(config.output_dir))] += int(size)
    # Folders of one disk share its room, so their needs are added.
    for number in {folder.stat().st_dev for folder in needed}:
        folders = [folder for folder in needed if folder.stat().st_dev == number]
        size = sum(needed[folder] for folder in folders)
        free = shutil.disk_usage(folders[0]).free
        detail = (
            f"about {size / 1e9:.0f} GB for downloads and checkpoints, "
            f"{free / 1e9:.0f} GB free, of which a tenth is kept"
        )
        fix = (
            "--output_dir or HF_HOME on a larger disk, or a smaller "
            "--checkpoint.keep_last"
        )
        yield judged("disk", str(folders[0]), size < 0.9 * free, detail, fix)
