"""Where a run begins: at which checkpoint, whether its configuration may go on from
there, and what is kept aside.

    --resume none      a new run; refused where there is one already
    --resume auto      the newest checkpoint; a run that was stopped before its first one starts again
    --resume PATH      that checkpoint of this run, what came later is renamed, not deleted; or of another, in a new
                       directory
    --resume restart   a new run; what is there is moved to previous-1/, previous-2/, ...

A run's history is never overwritten by one that starts at update 0: where checkpoints
should be and none can be used, the run stops and asks for `--resume restart`.

A new run with `model.attention: auto` times the installed backends once, at the size of
its videos, and its checkpoints keep the choice. A table cannot know: published figures
of FlashAttention-4 and cuDNN on a B200 differ by a factor of two, in both directions
(flash-attention, pull request 2605; sglang, pull request 33655).
"""

import difflib
import inspect
import logging
import math
import os
import re
import sys
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from sage_fast.checkpoint.folder import agree, list_checkpoints
from sage_fast.checkpoint.reader import Checkpoint, find_checkpoint
from sage_fast.config.errors import CheckpointError, ConfigError, RunDirectoryError
from sage_fast.config.load import outside_code
from sage_fast.config.registry import PARTS, REGISTERED, resolve
from sage_fast.config.schema import RunConfig, settings_of, to_dict
from sage_fast.config.sections import FIXED, FREE, digest, marked_keys
from sage_fast.distributed.failure import check_same_everywhere
from sage_fast.distributed.start import rank_device
from sage_fast.distributed.world import World
from sage_fast.models.attention.attention import (
    backend_report,
    call_backward,
    call_forward,
)
from sage_fast.models.attention.libraries import Use
from sage_fast.models.family import ModelDescription
from sage_fast.run.directory import RunDirectory, read_metrics
from sage_fast.run.run_status import read_status

logger = logging.getLogger(__name__)


def settle_attention(
    config: RunConfig, model: ModelDescription, world: World, kept: str = "auto"
) -> RunConfig:
    """The configuration with the fastest backend instead of `model.attention: auto`.
    Collective.

    It is the same on every rank: of the backends that run on all of them, the one whose
    slowest rank is fastest. `auto` stays without a GPU, with diffusers' own forward,
    where at most one backend runs, and with `model.deterministic`: a measurement may
    end in another way next time.

    Args:
        kept: backend of the checkpoint that the run goes on from; it stays if it runs
            on every rank.
    """
    device = rank_device(config.model.device)
    asked = config.model.attention, config.model.forward, config.model.deterministic
    if asked != ("auto", "fused", False) or device.type != "cuda":
        return config
    head_dim = model.transformer["attention_head_dim"]
    use = Use(device, getattr(torch, config.compute_dtype), head_dim)
    reasons = backend_report(use.device, use.dtype, use.head_dim)
    own = [
        name
        for name, reason in reasons.items()
        if reason is None and name != "reference"
    ]
    ranks = world.gather(own)
    shared = [name for name in own if all(name in names for names in ranks)]
    if kept not in shared:
        if kept != "auto":
            why = reasons.get(kept) or "it is not on every rank"
            logger.warning(
                "The run's attention was computed by %s, which cannot go on here: %s.",
                kept,
                why,
            )
        if len(shared) < 2:
            return config
        latent = model.latent_shape(
            config.video.num_frames, config.video.height, config.video.width
        )
        tokens = model.tokens(latent) + model.text_tokens
        heads = model.transformer["num_attention_heads"] // world.sp
        size = (config.rollout.videos_at_once, tokens, heads, head_dim)
        measured = world.gather(
            {name: time_backend(name, size, use) for name in shared}
        )
        slowest = {name: max(seconds[name] for seconds in measured) for name in shared}
        kept = min(shared, key=slowest.__getitem__)
        shown = ", ".join(
            f"{name} {1e3 * seconds:.1f} ms" for name, seconds in slowest.items()
        )
        logger.info(
            "model.attention auto: %s (%s; forward and backward of %d tokens)",
            kept,
            shown,
            tokens,
        )
    return replace(config, model=replace(config.model, attention=kept))  # type: ignore[arg-type]  # a backend's name


def time_backend(name: str, size: tuple[int, int, int, int], use: Use) -> float:
    """Seconds of a forward and a backward pass of (B, N, H, D); infinity where the
    library fails.
    """
    # the run's own stays where it is
    generator = torch.Generator(use.device).manual_seed(0)
    q, k, v, grad = torch.randn(
        4, *size, generator=generator, device=use.device, dtype=use.dtype
    )
    seconds = []
    try:
        for _ in range(3):
            torch.cuda.synchronize(use.device)
            start = time.perf_counter()
            out, lse = call_forward(q, k, v, name, use.deterministic)
            call_backward(grad, q, k, v, out, lse, name, use.deterministic)
            torch.cuda.synchronize(use.device)
            seconds.append(time.perf_counter() - start)
    except RuntimeError as error:
        # Before `auto` was measured, a library behind the first one was never called.
        logger.warning("Attention by %s fails and is not taken: %s", name, error)
        return math.inf
    return min(seconds[1:])  # the first round warms up


def recorded(config: RunConfig) -> dict[str, Any]:
    """A run's configuration as its checkpoints keep it, `config`, and digests of the
    source of the user's own parts: `code`, by dotted key, and `rewards`, by name.

    `code` has those whose keys `--allow-changes` may name: a family is held by other
    means, and a reward's faults may be mended.

    Raises:
        ConfigError: one of `code` has no source.
    """
    marked = marked_keys(RunConfig, FIXED) | marked_keys(RunConfig, FREE)
    outside = outside_code(config)
    code = {}
    for key, (name, *_) in outside.items():
        if key not in marked:
            found = source_digest(resolve(name, PARTS[key], key))
            if found is None:
                raise ConfigError(
                    f"{key} is {name!r}, whose source is not to be found, so a resume "
                    "could not tell whether it has changed. Write it to a file, and "
                    "name it as module:name."
                )
            code[key] = f"{name} (source {found[:12]})"
    named = [*outside.get("reward.rewards", []), *outside.get("reward.evaluation", [])]
    # of other processes it is not known
    local = config.reward.url is None and config.reward.python is None
    rewards = {name: reward_digest(name) for name in named if local}
    return {"config": to_dict(config), "code": code, "rewards": rewards}


@cache
def source_digest(part: Any) -> str | None:
    """SHA-256 of the source of a part's module, as it was when it was first asked for;
    of the part itself where it was written in a notebook. None without source.
    """
    for found in (sys.modules[part.__module__], part):
        with suppress(TypeError, OSError):
            return digest(inspect.getsource(found))
    return None


def reward_digest(name: str) -> str | None:
    """SHA-256 of the source of a reward's module; of one in a script or notebook, where
    every call of `train` would change it, that of the reward itself. None without
    source.
    """
    module = name.partition(":")[0]
    if module != "__main__":
        return file_digest(module)
    found = REGISTERED.get(name)
    with suppress(TypeError, OSError):
        named: Any = found if hasattr(found, "__qualname__") else type(found)
        return digest(inspect.getsource(named))
    return None


@cache
def file_digest(module: str) -> str | None:
    """SHA-256 of a module's file as it was when it was first asked for; None without
    one. Of what it needs only the packages that it lies in are imported: the rest is
    left to the reward's guard.
    """
    with suppress(ImportError, OSError, ValueError):
        spec = find_spec(module)
        if spec is not None and spec.origin is not None:
            return digest(Path(spec.origin).read_text("utf-8"))
    return None


Changes = Mapping[str, tuple[Any, Any]]
"""Dotted key -> (value in the checkpoint, value now)."""


def find_start(
    config: RunConfig, world: World, allow_changes: Collection[str] = ()
) -> tuple[Checkpoint | None, bool, bool, Changes]:
    """Decide where a run begins; nothing is touched. Collective.

    Args:
        allow_changes: dotted keys that may differ from the checkpoint's, in addition to
            the free ones; several in a word are separated by commas.

    Returns:
        The checkpoint, None for update 0; whether an earlier run's files have to be
        moved out of the way first; whether the checkpoint is another run's; and the
        keys that the user allowed to differ from the checkpoint's.

    Raises:
        ConfigError: a new run, or the checkpoint of another one, would start where
            there is one already, the checkpoint is of another configuration, or a
            launcher repeats what would fail again.
        CheckpointError: the checkpoint cannot be used, or none can where there should
            be some.
    """
    allow_changes = [
        key.strip() for word in allow_changes for key in word.split(",") if key.strip()
    ]
    check_allowed(allow_changes, config)
    present = recorded(config)
    # A module may be another file on another node.
    check_same_everywhere(present["code"])
    directory = RunDirectory(config.output_dir)
    resume = config.resume
    _refuse_repetition(directory, world)
    checkpoints = directory.checkpoints
    # Rank 0 says: a slower rank would take what rank 0 has begun for an earlier run.
    # without a row nothing has begun
    has_history = directory.metrics.exists() and directory.metrics.stat().st_size > 0
    has_run = world.broadcast(
        has_history or bool(list_checkpoints(checkpoints)) or _has_resumed(directory)
    )
    if resume == "none" and has_run:
        raise ConfigError(
            f"output_dir {str(directory)!r} already holds a run. Continue it by "
            "--resume auto, move it aside and "
            "start again by --resume restart, or choose another output_dir."
        )
    if resume == "restart":
        return None, has_run, False, {}
    checkpoint = find_checkpoint(resume, checkpoints, world)
    if checkpoint is None:
        if has_run:
            # Rank 0 reads the log, and what it finds wrong is raised on all ranks.
            agree(
                world, lambda: _check_may_start_again(config) if world.is_main else None
            )
        return None, has_run, False, {}
    # Not one that was abandoned either: its records are no longer those of this run.
    branches = not world.broadcast(
        any(map(checkpoint.folder.samefile, list_checkpoints(checkpoints)))
    )
    if branches and world.broadcast(_holds_updates(directory)):
        raise ConfigError(
            f"output_dir {str(directory)!r} already holds a run, and "
            f"{checkpoint.folder} is not one of its checkpoints."
            " Continue that run by --resume auto, move it aside, or choose another "
            "output_dir."
        )
    saved = checkpoint.state
    changes = check_same_run(
        {**saved["config"], **saved.get("code", {})},
        {**present["config"], **present["code"]},
        checkpoint.folder,
        allow_changes,
    )
    sources = present["rewards"]
    held = saved.get("rewards", {})
    if edited := [n for n in sources if sources[n] != held.get(n, sources[n])]:
        logger.warning(
            "The source of %s is not the one that %s was made with. If it scores "
            "otherwise now, neither rewards nor the gain over update 0 can be compared "
            "with those before: start a new run in another output_dir.",
            ", ".join(edited),
            checkpoint.folder,
        )
    done = int(checkpoint.state["trainer"]["update"])
    step = config.training.updates_per_rollout
    if done % step and done < config.training.num_updates:
        raise ConfigError(
            f"training.updates_per_rollout is {step}, but {checkpoint.folder} has "
            f"{done} updates, not a multiple of "
            "it. Keep the value, or go on from another checkpoint by --resume PATH."
        )
    logger.info("Going on from %s.", checkpoint.folder)
    return checkpoint, has_run and branches, branches, changes


def _has_resumed(directory: RunDirectory) -> bool:
    """True if a run here has begun at a checkpoint."""
    return any(directory.path.glob("environment-update-*.json"))


def _holds_updates(directory: RunDirectory) -> bool:
    """True if there is more than the evaluation of update 0, which is made again."""
    try:
        rows = read_metrics(directory.metrics) if directory.metrics.exists() else []
    except RunDirectoryError:
        return True
    return bool(list_checkpoints(directory.checkpoints)) or any(
        row["update"] > 0 for row in rows
    )


def _refuse_repetition(directory: RunDirectory, world: World) -> None:
    """Refuse a start that a launcher repeats after the run has failed by its own error.
    Collective.

    A resume repeats the run exactly, so the failure would come back, after all GPUs
    have loaded the model. Who starts it by hand has changed something that no
    configuration tells of, such as the room on a disk.

    Raises:
        ConfigError: it would fail again.
    """
    retries = (
        os.environ.get(name, "0")
        for name in ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")
    )
    status, _ = (
        read_status(directory.path)
        if world.is_main and any(map(int, retries))
        else (None, None)
    )
    failed = (
        None if status is None or not status.repeats else (status.update, status.error)
    )
    if found := world.broadcast(failed):
        raise ConfigError(
            f"The run has failed after update {found[0]} by its own error, and would "
            f"fail again: {found[1]} Change "
            "what it names, then start a new job with --resume auto."
        )


def _check_may_start_again(config: RunConfig) -> None:
    """CheckpointError unless a run without a usable checkpoint was stopped before it
    had saved its first one.

    The next checkpoint waits for the one before it, so a log that has reached the
    second has outlived the first. An evaluation and the end of a run wait for theirs,
    and a run that has gone on after an update had one.
    """
    directory = RunDirectory(config.output_dir)
    folders = list_checkpoints(directory.checkpoints)
    rows = read_metrics(directory.metrics) if directory.metrics.exists() else []
    reached = max((row["update"] for row in rows), default=0)
    status, _ = read_status(directory)
    ended = (
        status is not None
        and status.state in ("finished", "stopped")
        and status.update > 0
    )
    evaluated = any(row["update"] > 0 and "eval/reward_mean" in row for row in rows)
    resumed = _has_resumed(directory)
    if resumed and not folders and reached == 0:
        raise CheckpointError(
            f"The run in {directory} was stopped before it had saved the checkpoint "
            "that it begins with. Repeat its "
            "--resume PATH, or start from the first update by --resume restart."
        )
    if not (
        folders
        or reached >= 2 * config.checkpoint.every
        or ended
        or evaluated
        or resumed
    ):
        logger.warning(
            "The run in %s was stopped before its first checkpoint: starting again.",
            directory,
        )
        return
    if folders:
        why = f"none of its {len(folders)} checkpoints can be used"
    else:
        why = "its checkpoints are gone"
    raise CheckpointError(
        f"The run in {directory} has reached update {reached}, but {why}. Bring a "
        "checkpoint back into "
        f"{directory.checkpoints}, or start again from the first update by --resume "
        "restart, which keeps what is "
        "there in a folder previous-N."
    )


# --------------------------------------------------------------------------------------
# configuration


def check_allowed(allowed: Collection[str], config: RunConfig) -> None:
    """ConfigError unless each of these keys exists and may be changed."""
    known = settings_of(to_dict(config))
    never = marked_keys(RunConfig, FIXED)
    for key in allowed:
        if key not in known:
            close = difflib.get_close_matches(key, known, n=2)
            if close:
                hint = f" Did you mean {' or '.join(close)}?"
            else:
                hint = " `sage-fast train --keys` lists every key."
            raise ConfigError(f"--allow-changes: unknown key {key!r}.{hint}")
        if key in never:
            raise ConfigError(
                f"--allow-changes: {key} cannot change within a run: {never[key]}. "
                "Start a new run in another "
                "output_dir; model.adapter lets it begin with the adapter of this one."
            )


def check_same_run(
    saved: Mapping[str, Any],
    present: Mapping[str, Any],
    checkpoint: Path,
    allowed: Collection[str] = (),
    only: str = ".*",
) -> Changes:
    """Compare two configurations in what changes numbers, and return the differences
    that are allowed.

    Args:
        saved, present: nested dicts, as `to_dict` makes them. Keys that one of them
            does not know (another version) are not compared.
        allowed: dotted keys that may differ in addition to the free ones.
        only: regular expression of the dotted keys that matter.

    Raises:
        ConfigError: they differ in another key.
    """
    # Checkpoints of before that key are of Euler's evaluations, the baseline too.
    old = {"evaluation.solver": "euler"} | settings_of(saved)
    new = settings_of(present)
    free = marked_keys(RunConfig, FREE)
    never = marked_keys(RunConfig, FIXED)
    different = {
        key: (old[key], new[key])
        for key in sorted(old.keys() & new.keys())
        if old[key] != new[key] and re.fullmatch(only, key) and key not in free
    }
    refused = [key for key in different if key not in allowed]
    if refused:
        shown = "; ".join(
            f"{key}: {old[key]!r} in the checkpoint, {new[key]!r} now"
            for key in refused[:4]
        )
        advice = "Use the same values, or start a new run in another output_dir."
        if only != ".*":
            advice = "These weights are of the former: leave the others out."
        elif not never.keys() & refused:
            advice = (
                "Use the same values, start a new run in another output_dir, or go on "
                "with the new ones on record by "
                f"--allow-changes {','.join(refused)}."
            )
        raise ConfigError(
            f"{checkpoint} was made with another configuration: {shown}. {advice}"
        )
    return different


# --------------------------------------------------------------------------------------
# what is kept


def keep_videos(config: RunConfig, videos: int, dp_degree: int) -> RunConfig:
    """The configuration with the `rollout.batch_size` that gives a run its videos per
    rollout on other ranks.

    Args:
        videos: per rollout, of the checkpoint.
        dp_degree: data-parallel ranks that there are now.

    Raises:
        ConfigError: they cannot share the videos evenly, which would be another run.
    """
    size, rest = divmod(videos, dp_degree)
    if rest:
        raise ConfigError(
            f"The checkpoint's run has {videos} videos per rollout, which {dp_degree} "
            "data-parallel ranks cannot share "
            "evenly. Start as many processes, or use such degrees, that their number "
            "divides it."
        )
    if size != config.rollout.batch_size:
        logger.warning(
            "rollout.batch_size is %d here: the run has %d videos per rollout.",
            size,
            videos,
        )
    return replace(config, rollout=replace(config.rollout, batch_size=size))


def move_aside(directory: RunDirectory) -> None:
    """Move what a run has left into a new folder previous-N of its directory."""
    number = 1
    while (aside := directory.path / f"previous-{number}").exists():
        number += 1
    aside.mkdir()
    for path in directory.left_by_a_run():
        path.rename(aside / path.name)
    logger.warning(
        "Starting from the first update; what the run had made before is kept in %s.",
        aside,
    )


def abandon_after(directory: RunDirectory, update: int) -> None:
    """Rename what was made of updates that will be made again, so that the newest is
    always this run's.
    """
    later = directory.made_after(update)
    number = 1
    prefix = "abandoned-"
    # A return to an earlier update, made before, may have left files of these names.
    while any(path.with_name(prefix + path.name).exists() for path in later):
        number += 1
        prefix = f"abandoned-{number}-"
    for path in later:
        path.rename(path.with_name(prefix + path.name))
    if later:
        logger.warning(
            "Going back to update %d; what came later is kept in %s as %s*.",
            update,
            directory,
            prefix,
        )
