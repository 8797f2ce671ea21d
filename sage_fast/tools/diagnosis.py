"""What a machine has, what a configuration needs, and what to do about the difference.

Every finding is a `Check`: nothing is fixed, downloaded or loaded, and a check that fails does not end the others.
"""

import inspect
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from sage_fast import __version__
from sage_fast.checkpoint import list_checkpoints
from sage_fast.config.errors import ConfigError
from sage_fast.config.registry import REWARDS
from sage_fast.config.schema import RunConfig
from sage_fast.distributed.failure import version_of
from sage_fast.distributed.start import rank_device
from sage_fast.models.attention.attention import backend_report
from sage_fast.models.family import (
    ModelDescription,
    ModelFamily,
    check_guidance,
    describe_model,
    model_family,
    shift_difference,
)
from sage_fast.models.hub import Requirement, download_folder
from sage_fast.planning.devices import gpu_memory_gb, host_memory
from sage_fast.planning.estimate import SAFE_SHARE, checkpoint_bytes, make_memory_plan
from sage_fast.planning.layout import least_gpus
from sage_fast.planning.memory import MemoryPlan
from sage_fast.planning.text import loading_text, summary
from sage_fast.planning.weights import count_weights
from sage_fast.rewards.base import find_reward, reward_requirements
from sage_fast.run.run import load_prompts
from sage_fast.tools.machine import Check, Status, hardware, software

LARGE_WIDTH = 1024
"""Width from which a model is too large for a CPU."""


def examine(config: RunConfig | None) -> list[Check]:
    """All checks: those of the machine, and those of a configuration when one is given."""
    checks = [*software(), *hardware(), *_attention(config)]
    if config is not None:
        checks += [*_settings(config), *_files(config), *_memory(config), *_disk(config)]
    return checks


def can_run(checks: Sequence[Check]) -> bool:
    """Whether nothing is missing, and nothing has failed."""
    return all(check.status not in ("missing", "failed") for check in checks)


def to_json(checks: Sequence[Check]) -> dict[str, Any]:
    """The checks as JSON values."""
    return {"sage_fast": __version__, "can_run": can_run(checks), "checks": [asdict(check) for check in checks]}


def to_text(checks: Sequence[Check], config_given: bool) -> str:
    """The checks as aligned lines, and a verdict."""
    width = max(len(check.name) for check in checks)
    lines: list[str] = []
    section = ""
    for check in checks:
        if check.section != section:
            section = check.section
            lines += ["", section] if lines else [section]
        mark = "" if check.status == "info" else check.status
        lines.append(f"  {mark:<8} {check.name:<{width}}  {check.detail}")
        if check.fix:
            lines.append(f"  {'':<8} {'':<{width}}  -> {check.fix}")
    missing = sum(check.status == "missing" for check in checks)
    failed = sum(check.status == "failed" for check in checks)
    warnings = sum(check.status == "warning" for check in checks)
    what = "This configuration" if config_given else "This machine"
    verdict = f"{what} {'can run.' if config_given else 'is ready.'}"
    if missing:
        verdict = f"{what} {'cannot run' if config_given else 'is not ready'}: see the {missing} marked missing."
    elif failed:
        verdict = f"{what} does not do what it should: see the {failed} marked failed."
    if warnings:
        verdict += f" {warnings} warning{'s' if warnings > 1 else ''}."
    return "\n".join([*lines, "", verdict])


def _attention(config: RunConfig | None) -> Iterator[Check]:
    """Backends that run on the device; the one a config names must be among them."""
    section = "attention"
    device, dtype, wanted = "cuda" if torch.cuda.is_available() else "cpu", torch.bfloat16, "auto"
    if config is not None:
        device, dtype = _device(config) or device, getattr(torch, config.model.dtype)
        wanted = config.model.attention
    for name, reason in backend_report(torch.device(device), dtype).items():
        if reason is None:
            yield Check(section, name, "ok", f"runs on {device}")
        elif name == wanted:
            yield Check(section, name, "missing", reason, fix="install it, or set model.attention to auto")
        else:
            yield Check(section, name, "info", reason)


# ------------------------------------------------------------------------------------------------ configuration


def _device(config: RunConfig) -> str | None:
    """The device a run would use; None where torch cannot use the one that is named."""
    try:
        return str(rank_device(config.model.device))
    except ConfigError:
        return None


def _settings(config: RunConfig) -> Iterator[Check]:
    section = "configuration"
    try:
        device = str(rank_device(config.model.device))
        yield Check(section, "model.device", "ok", device)
        if device == "cpu" and _is_large(config):
            fix = "use a GPU of 80 GB, or the preset toy_cpu to try things out"
            yield Check(section, "speed", "warning", "a model of this size on a CPU: one video takes hours", fix=fix)
    except ConfigError as error:
        yield Check(section, "model.device", "missing", str(error), fix="--model.device=auto")
    yield _family(config)
    for name in config.reward.rewards:
        yield _reward(config, name)
    try:
        prompts, evaluated = load_prompts(config)
        detail = f"{len(prompts)} for training, {len(evaluated)} for evaluation"
        yield Check(section, "prompts", "ok", detail)
    except ConfigError as error:
        yield Check(section, "prompts", "missing", str(error), fix="mend the file, or name another")
    yield from _video_size(config)
    if config.logging.wandb_project and version_of("wandb") is None:
        fix = "pip install wandb, or leave logging.wandb_project out"
        yield Check(section, "logging.wandb_project", "missing", "wandb is not installed", fix=fix)
    yield from _processes(config)
    yield _output_dir(config)


def _processes(config: RunConfig) -> Iterator[Check]:
    """How many processes a run needs, where one is not enough, and whether this machine has a GPU for each."""
    needed = least_gpus(config.distributed, config.rollout)
    if needed == 1:
        return
    section = config.distributed
    degrees = f"dp_replicate {section.dp_replicate}, dp_shard {section.dp_shard}, sp {section.sp}".replace(
        "None", "null"
    )
    detail = f"{needed}, started by torchrun or SLURM ({degrees})"
    here = torch.cuda.device_count()
    if _device(config) == "cpu" or here >= needed:
        yield Check("configuration", "processes", "ok", detail)
        return
    fix = "start it on several machines (docs/distributed.md), or set other degrees under `distributed`"
    yield Check("configuration", "processes", "warning", f"{detail}; this machine has {here} GPU(s)", fix=fix)


def _family(config: RunConfig) -> Check:
    name, key = config.model.family, "model.family"
    try:
        model_family(name)
    except ConfigError as error:
        return Check("configuration", key, "missing", str(error), fix="see the message")
    return Check("configuration", key, "ok", name)


def _reward(config: RunConfig, name: str) -> Check:
    """Whether a reward can be imported and takes the options it is given."""
    section, key = "configuration", f"reward {name}"
    options = config.reward.options.get(name, {})
    try:
        found = find_reward(name)
        if inspect.isclass(found):
            inspect.signature(found).bind(**options)
    except (ConfigError, TypeError) as error:
        return Check(section, key, "missing", str(error), fix=f"see reward.options.{name}")
    if inspect.isclass(found) and "fps" in inspect.signature(found).parameters:
        # A run fills it in where it is left out.
        fps, wanted = options.get("fps", config.video.fps), config.video.fps
        fix = f"--reward.options.{name}.fps={wanted:g}"
        if fps is None:
            detail = "fps is not set; it decides which frames are scored"
            return Check(section, key, "missing", detail, fix=fix)
        if fps != wanted:
            detail = f"fps is {fps:g}, but video.fps is {wanted:g}, so the reward scores other frames than intended"
            return Check(section, key, "warning", detail, fix=fix)
    return Check(section, key, "ok", REWARDS.get(name, name))


def _video_size(config: RunConfig) -> Iterator[Check]:
    """Whether the model has latents for videos of these sizes."""
    description, section = _description(config), "configuration"
    if description is None:
        return
    sizes = {"video": config.video, "evaluation": config.evaluation_video}
    for name, video in sizes.items():
        if name == "evaluation" and video == config.video:
            continue
        size = f"{video.num_frames} frames of {video.height}x{video.width}"
        try:
            description.latent_shape(video.num_frames, video.height, video.width)
        except ValueError as error:
            fix = f"set {name}.num_frames, {name}.height and {name}.width to a size that the model has"
            yield Check(section, name, "missing", f"{size}: {error}", fix=fix)
        else:
            yield Check(section, name, "ok", size)


def _output_dir(config: RunConfig) -> Check:
    section, name = "configuration", "output_dir"
    folder = Path(config.output_dir)
    existing = _existing(folder)
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        fix = "--output_dir=FOLDER on a disk that you may write to"
        return Check(section, name, "missing", f"{existing} cannot be written to", fix=fix)
    if config.resume == "none" and ((folder / "metrics.jsonl").exists() or list_checkpoints(folder / "checkpoints")):
        fix = "--resume auto to go on with it, or another --output_dir"
        return Check(section, name, "warning", f"{folder} already holds a run", fix=fix)
    return Check(section, name, "ok", str(folder))


def _existing(path: Path) -> Path:
    """The deepest part of a path that exists."""
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return path


# ------------------------------------------------------------------------------------------------ files, memory, disk


def _files(config: RunConfig) -> Iterator[Check]:
    yield from map(_file, needed_files(config))
    with suppress(ConfigError):
        family = model_family(config.model.family)
        if not any(requirement.missing for requirement in family.requirements(config.model)):
            yield from _weights(config, family)


def needed_files(config: RunConfig) -> list[Requirement]:
    """The files of the model and of every reward. Of what cannot be imported, `_settings` says so."""
    needed: list[Requirement] = []
    with suppress(ConfigError):
        needed += model_family(config.model.family).requirements(config.model)
    for name in config.reward.rewards:
        with suppress(ConfigError):
            needed += reward_requirements(name, config.reward.options.get(name, {}))
    return needed


def _file(requirement: Requirement) -> Check:
    if not requirement.missing:
        return Check("files", requirement.name, "ok", requirement.where)
    named = ", ".join(requirement.missing[:3]) + (", ..." if len(requirement.missing) > 3 else "")
    what = "is not here" if requirement.absent else f"lacks {named}"
    return Check("files", requirement.name, "missing", f"{requirement.where} {what}", fix=requirement.fetch)


def _weights(config: RunConfig, family: ModelFamily) -> Iterator[Check]:
    """What the loader would say of weights that are all there. It opens files, but loads, converts, downloads none."""
    section, name = "files", "model weights"
    try:
        facts = family.inspect(config.model)
    except (ValueError, OSError) as error:
        yield Check(section, name, "missing", str(error), fix="see the message")
        return
    if facts is None:
        return
    try:
        check_guidance(facts.guidance_distilled, config.rollout.guidance_scale)
    except ValueError as error:
        yield Check(section, name, "missing", str(error), fix="--rollout.guidance_scale=1")
        return
    yield Check(section, name, "ok", "can be trained")
    if (difference := shift_difference(facts.shift, config.rollout.shift)) is not None:
        yield Check(section, "rollout.shift", "warning", difference, fix=f"--rollout.shift={facts.shift:g}")


def _description(config: RunConfig) -> ModelDescription | None:
    """The model before it is loaded; None where its family or its folder says nothing."""
    try:
        return describe_model(config.model)
    except ConfigError:
        return None


def _is_large(config: RunConfig) -> bool:
    description = _description(config)
    return description is not None and description.width >= LARGE_WIDTH


def _memory(config: RunConfig) -> Iterator[Check]:
    description, device = _description(config), _device(config)
    if description is None or device is None:
        return
    on_gpu = device.startswith("cuda")
    if on_gpu:
        available, where = gpu_memory_gb(device), device
    else:
        memory = host_memory()
        if memory is None:
            return
        available, where = memory / 1e9, "the CPU"
    try:
        gpus = least_gpus(config.distributed, config.rollout)
        plan = make_memory_plan(config, on_gpu=on_gpu, gpus=gpus, memory_gb=available, description=description)
    except ConfigError as error:
        yield Check("memory (estimate)", "training", "info", f"not estimated: {error}")
        return
    peak, parts = plan.memory.peak / 1e9, summary(plan.memory)
    detail = f"about {peak:.0f} GB of {available:.0f} GB on {where}"
    status: Status = "ok"
    if peak > available:
        status = "missing"
    elif peak > SAFE_SHARE * available:
        status = "warning"
    fix = ""
    if status != "ok":
        fix = _save_memory(config) if parts["weights"] < available / 2 else "a GPU with more memory"
    yield Check("memory (estimate)", "training", status, detail, fix=fix)
    for name, size in parts.items():
        if size >= 0.05:
            yield Check("memory (estimate)", name, "info", f"{size:6.1f} GB")
    if plan.loading is not None and (host := host_memory()) is not None:
        enough = sum(plan.loading.values()) < SAFE_SHARE * host
        yield Check(
            "memory (estimate)",
            "CPU memory while loading",
            "ok" if enough else "missing",
            f"{loading_text(plan.loading)} on a node of {host / 1e9:.0f} GB",
            fix="" if enough else "fewer processes on this node, or a node with more memory",
        )
    yield Check("memory (estimate)", "assumes", "info", _assumptions(plan))


def _assumptions(plan: MemoryPlan) -> str:
    model, guidance = plan.config.model, plan.config.training.guidance
    return (
        f"{plan.gpus} process(es), each with as much; {plan.video_tokens:,} video tokens; {model.forward} forward, "
        f"{model.settled_checkpointing} checkpointing, {guidance} guidance; the peak is in "
        f"{plan.memory.peak_phase}, each part at its own peak; predicted, not measured: "
        "`sage-fast plan` has every phase"
    )


def _save_memory(config: RunConfig) -> str:
    """The setting that saves most of what is not used yet."""
    if config.training.mode == "full":
        return "more GPUs that share the weights (the preset hv15_480p_full_8gpu), or --training.mode=lora"
    if config.rollout.micro_batch_size > 1:
        return "--rollout.micro_batch_size=1"
    if config.model.dtype == "float32":
        return "--model.dtype=bfloat16"
    if config.model.checkpointing in ("none", "feed_forward"):
        return "--model.checkpointing=selective"
    if config.training.guidance == "paired" and config.rollout.guidance_scale != 1.0:
        return "--training.guidance=split"
    if config.model.checkpointing == "selective":
        return "--model.checkpointing=full"
    return "fewer frames, or a smaller video.height and video.width"


def _disk(config: RunConfig) -> Iterator[Check]:
    yield from _downloads(config)
    description = _description(config)
    if description is None:
        return
    yield from _cache(config, description)
    section = config.checkpoint
    # One more than is kept: the new one is written before the oldest goes.
    count = section.keep_last + 1 + (config.evaluation.every > 0)
    fix = "--checkpoint.keep_last=1, or --output_dir on a larger disk"
    if section.keep_every is not None:
        count += config.training.num_updates // section.keep_every
        fix = "a larger --checkpoint.keep_every, or --output_dir on a larger disk"
    needed = checkpoint_bytes(config, count_weights(config, description.transformer)) * count
    yield _space("checkpoints", Path(config.output_dir), needed, f"for {count} of them", fix)


def _space(name: str, folder: Path, needed: float, what: str, fix: str) -> Check:
    """Whether a disk has room for so many bytes."""
    free = shutil.disk_usage(_existing(folder)).free
    enough = needed < 0.9 * free
    detail = f"about {needed / 1e9:.1f} GB {what}, {free / 1e9:.0f} GB free"
    return Check("disk", name, "ok" if enough else "missing", detail, fix="" if enough else fix)


def _downloads(config: RunConfig) -> Iterator[Check]:
    """Room for what has to be fetched, in every folder that it goes to."""
    sizes: dict[Path, float] = {}
    for requirement in needed_files(config):
        if requirement.missing:
            folder = download_folder(requirement)
            sizes[folder] = sizes.get(folder, 0.0) + requirement.gigabytes
    for folder, size in sizes.items():
        fix = "set HF_HOME to a larger disk, or give the commands above a --local-dir there"
        yield _space("downloads", folder, size * 1e9, f"at most into {folder}", fix)


def _cache(config: RunConfig, description: ModelDescription) -> Iterator[Check]:
    """Room for encoded prompts, and whether they can be written."""
    name, fix = "model.cache_dir", "--model.cache_dir=FOLDER on a larger disk that you may write to"
    try:
        folder = model_family(config.model.family).cache(config.model)
    except ValueError as error:
        yield Check("disk", name, "missing", str(error), fix=fix)
        return
    texts: set[str] = set()
    with suppress(ConfigError):  # `_settings` says so
        texts = {prompt.text for prompts in load_prompts(config) for prompt in prompts}
    if folder is None:
        return
    width = description.transformer.get("text_embed_dim", 0)
    needed = 2.0 * len(texts) * description.text_tokens * width
    yield _space(name, folder, needed, f"for {len(texts)} prompts", fix)
