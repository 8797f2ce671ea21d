"""A training run as the user sees it: directory, progress, metrics, samples, checkpoints, resume, result.

runs/NAME/
    config.yaml  environment.json        what was run, with what
    metrics.jsonl  tensorboard/          numbers, one line per rollout
    samples/                             mp4s and contact sheets from fixed prompts and noise
    evaluation/                          scores per prompt; result.json is the paired test of last against first
    checkpoints/                         see `checkpoint/`
    reward.png  before_after.png         what to look at first
"""

import hashlib
import json
import logging
import re
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sage_fast.checkpoint import (
    Checkpoint,
    CheckpointData,
    CheckpointWriter,
    checkpoint_name,
    find_checkpoint,
    list_checkpoints,
    newest_checkpoint,
)
from sage_fast.config.distributed import check_heads
from sage_fast.config.errors import CheckpointError, ConfigError
from sage_fast.config.files import replacing
from sage_fast.config.load import save_config
from sage_fast.config.schema import RunConfig, by_dotted_key, check_batch, to_dict
from sage_fast.distributed.deepspeed.zero_config import read_config
from sage_fast.distributed.failure.selfcheck import check_world, noise_digests
from sage_fast.distributed.failure.watchdog import Watchdog, start_watchdog, use_steady_timeout
from sage_fast.distributed.launch import effective_resume, rank_device, restart_count
from sage_fast.distributed.start import start_world
from sage_fast.distributed.world import ALONE, World
from sage_fast.evaluation import Evaluation, PairedTest, format_comparison, paired_test
from sage_fast.models import video_files
from sage_fast.models.family import describe_model, load_components
from sage_fast.objective import kl_uses
from sage_fast.policy.lora import cast_weights, copy_lora
from sage_fast.records import Prompt
from sage_fast.rewards.generators import seed_generators
from sage_fast.rewards.worker import load_scorer
from sage_fast.run import media
from sage_fast.run.interrupt import GracefulStop
from sage_fast.run.metrics import MetricsLogger, NoMetrics, read_metrics
from sage_fast.run.progress import RunProgress, peak_memory_gib
from sage_fast.run.prompts import read_prompts
from sage_fast.run.provenance import write_environment
from sage_fast.trainer import Trainer

logger = logging.getLogger(__name__)

# What may differ between the run that saved a checkpoint and the one that resumes it: where things go, how often and on
# how much of what machine. (Another device, number of threads, batch through the model, or way to compute the same
# velocity and gradient changes the rounding, and nothing else; so does another number of ranks, as long as all of them
# together roll out as many videos, which is compared apart.) What a message tells the user to change is among them,
# so that the run can go on. The model's folder may have moved: its weights are compared instead.
FREE_ON_RESUME = re.compile(
    r"output_dir|resume|num_threads|distributed\..*|rollout\.(micro_)?batch_size"
    r"|training\.(num_updates|guidance|update|skip_nonfinite_updates)"
    r"|model\.(path|device|cache_dir|decode_memory_gib|vae_dtype|forward|kernels|attention|deterministic|checkpointing"
    r"|offload_activations|adaln|compile)"
    r"|checkpoint\..*|logging\..*|evaluation\.(every|num_samples|batch_size)"
    r"|reward\.(placement|device|queue_size|timeout_seconds)"
)


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """How a run ended: `finished` is False when it was asked to stop, `test` compares the last and first evaluation.

    Example: `RunResult(output_dir=Path("runs/demo"), update=60, finished=True, test=PairedTest(...))`
    """

    output_dir: Path
    update: int
    finished: bool
    test: PairedTest | None


def load_prompts(config: RunConfig) -> tuple[list[Prompt], list[Prompt]]:
    """Training and evaluation prompts of a run. ConfigError names the config key of a file that cannot be used."""
    return _read_prompts("data.prompts", config.data.prompts), load_eval_prompts(config)


def load_eval_prompts(config: RunConfig) -> list[Prompt]:
    """Evaluation prompts of a run: the training prompts where it has none of its own. ConfigError as `load_prompts`."""
    section = config.evaluation
    if section.prompts is None:
        prompts = _read_prompts("data.prompts", config.data.prompts)
    else:
        prompts = _read_prompts("evaluation.prompts", section.prompts)
    if section.num_prompts is None:
        return prompts
    if section.num_prompts > len(prompts):
        raise ConfigError(
            f"evaluation.num_prompts is {section.num_prompts}, but the file holds {len(prompts)} prompts."
        )
    return prompts[: section.num_prompts]


def _read_prompts(key: str, path: str) -> list[Prompt]:
    try:
        return read_prompts(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{key}: {error}") from error


def build_trainer(config: RunConfig, world: World = ALONE) -> Trainer:
    """Load the model, the rewards and the prompts of a run. Collective.

    Raises:
        ConfigError: a part is missing or does not fit.
    """
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    seed_generators(config.seed)
    prompts, eval_prompts = load_prompts(config)
    # Before the model is loaded, which takes minutes.
    check_batch(config.rollout.batch_size, world.dp_degree, config.rollout.num_generations)
    if world.sp > 1:
        _check_described_heads(config, world.sp)
    section, mode, dtype = config.distributed, config.training.mode, getattr(torch, config.model.dtype)
    if section.deepspeed_config is not None:
        read_config(section.deepspeed_config, config.optimizer, mode=mode, dtype=dtype, warn=False)
    try:
        components = load_components(config.model)
        cast_weights(components.transformer, dtype)
        reward = load_scorer(
            config.reward,
            [p.text for p in (*prompts, *eval_prompts)],
            device=str(rank_device(config.model.device)),
            fps=config.video.fps,
            seed=config.seed + world.rank,
        )
        return Trainer(config, components, reward, prompts, eval_prompts, world=world)
    except (ValueError, OSError) as error:
        raise ConfigError(str(error)) from error


def _check_described_heads(config: RunConfig, sp: int) -> None:
    """ConfigError unless the ranks of a video can share the heads that the model's family says it has."""
    try:
        description = describe_model(config.model)
    except ConfigError:
        return  # nothing is known before it is loaded; then `shard_sequence` asks
    check_heads(sp, description.transformer["num_attention_heads"])


def train(config: RunConfig) -> RunResult:
    """Train in the processes that a launcher has started, or in this one.

    Raises:
        RankFailure: another rank has died, failed or hung. Else what `Run.train` raises.
    """
    section = config.distributed
    device = rank_device(config.model.device)
    world = start_world(section, config.training.mode, device, to_dict(config))
    # Nodes count restarts for themselves: where one has been restarted, all go on with the run.
    if world.any(effective_resume(config.resume) != config.resume):
        config = replace(config, resume="auto")
    stacks = Path(config.output_dir) / "failure"
    with start_watchdog(world, section.startup_timeout_seconds, stacks) as watchdog:
        return Run(config, world, watchdog).train()


class Run:
    """One call of `sage-fast train`; on many ranks, each has one, and rank 0 writes the files."""

    def __init__(self, config: RunConfig, world: World = ALONE, watchdog: Watchdog | None = None) -> None:
        self.config = config
        self.world = world
        self.watchdog = watchdog or start_watchdog(ALONE, config.distributed.timeout_seconds)
        self.directory = Path(config.output_dir)
        self.checkpoints = self.directory / "checkpoints"
        # Before the model is loaded: a checkpoint that cannot be used is found in a second.
        self.checkpoint = self._find_checkpoint()
        self.trainer = build_trainer(config, self.world)
        eval_prompts = [sample.prompt for sample in self.trainer.eval_samples]
        self.prompts_digest = prompts_digest(self.trainer.schedule.prompts, eval_prompts)
        check_world(
            world,
            self.directory,
            self.trainer.device,
            noise=noise_digests(self.trainer.next_noise()),
            inputs={"model.path": self.trainer.model_digest, "prompts": self.prompts_digest},
        )
        self._check_fit()
        # Spread over the file: neighbouring prompts are often variations of one another.
        count, wanted = len(self.trainer.eval_samples), config.evaluation.num_samples
        self.sample_rows = sorted({count * i // wanted for i in range(wanted)}) if wanted else []

    def train(self) -> RunResult:
        """Train to the last update, or until a signal to any rank asks to stop.

        Raises:
            ConfigError, CheckpointError, TrainingError, RewardError, OSError: each says what to do; what was saved
            before stays as it was.
        """
        config, trainer, world = self.config, self.trainer, self.world
        # Not kept by this object: a run that just fits would not fit beside its own checkpoint.
        checkpoint, self.checkpoint = self.checkpoint, None
        total = config.training.num_updates
        resumed = int(checkpoint.state["trainer"]["update"]) if checkpoint else 0
        if world.is_main:
            self._prepare_directory(resumed)
        metrics = self._open_metrics()
        with (
            GracefulStop(self.directory, announce=world.is_main) as stop,
            RunProgress(total, resumed, shown=world.is_main) as progress,
            self._open_writer() as writer,
        ):

            def tell(phase: str, done: int, total: int, subject: str) -> None:
                self.watchdog.progress(phase, done, total)
                self.watchdog.working_on(subject)
                progress.phase(phase, done, total)

            trainer.progress = tell
            try:
                # A fresh start trusts nothing that an earlier attempt left behind.
                metrics.truncate_after(resumed if checkpoint else -1)
                has_baseline = world.broadcast(checkpoint is not None and self._evaluation_file(0).exists())
                if config.evaluation.every and not has_baseline:
                    # The weights of a checkpoint are loaded below: the baseline is the base model's.
                    record = {"update": 0} | self._evaluate()
                    metrics.log(record)
                    progress.finished(record)
                if checkpoint is not None:
                    trainer.load(checkpoint, checkpoint.state["trainer"])
                    self._evaluate_pending(checkpoint.state.get("pending"), metrics, progress)
                del checkpoint
                seconds_saving, unsaved, pending = 0.0, False, False
                while trainer.update < total and not world.any(stop.requested):
                    record = trainer.iterate() | {"time/checkpoint": seconds_saving}
                    use_steady_timeout(self.watchdog, config.distributed.timeout_seconds)
                    everywhere = world.gather((stop.requested, peak_memory_gib(trainer.device)))
                    stops, peaks = zip(*everywhere, strict=True)
                    stopping, record["memory/peak_gib"] = any(stops), max(peaks)
                    done = trainer.update >= total
                    evaluates = config.evaluation.every > 0 and (done or self._due(config.evaluation.every))
                    seconds_saving, unsaved = 0.0, True
                    # Before the evaluation, which can take as long as many updates and fail in its own ways. Who asks
                    # to stop does not wait for one either: the checkpoint knows that it is due.
                    if done or evaluates or stopping or self._due(config.checkpoint.every):
                        start = time.perf_counter()
                        tell("checkpoint", 0, 1, "")
                        self._save(writer, pending=record if evaluates else None)
                        seconds_saving, unsaved = time.perf_counter() - start, False
                    pending = evaluates and stopping
                    if not pending:
                        try:
                            record |= self._evaluate() if evaluates else {}
                        finally:
                            metrics.log(record)
                        progress.finished(record)
                if unsaved:
                    # Asked to stop after the ranks had told each other that nobody was.
                    tell("checkpoint", 0, 1, "")
                    self._save(writer)
            finally:
                metrics.close()
                trainer.reward.close()
        return self._conclude(finished=trainer.update >= total and not pending)

    # ------------------------------------------------------------------------------------------ directory, resume

    def _find_checkpoint(self) -> Checkpoint | None:
        """The checkpoint to go on from, None for a fresh start. Nothing of an existing run is touched."""
        log, resume = self.directory / "metrics.jsonl", self.config.resume
        # Rank 0 says: a slower rank would take what rank 0 has begun for an earlier run.
        has_run = self.world.broadcast(
            (log.exists() and log.stat().st_size > 0) or bool(list_checkpoints(self.checkpoints))
        )
        if resume == "none" and has_run:
            raise ConfigError(
                f"output_dir {str(self.directory)!r} already holds a run. Go on with it by --resume auto, or choose "
                "another output_dir."
            )
        checkpoint = self._checkpoint_of_this_job() or find_checkpoint(resume, self.checkpoints, self.world)
        if checkpoint is None:
            if resume == "auto" and has_run:
                logger.warning("No complete checkpoint in %s: starting from the first update.", self.checkpoints)
            return None
        check_same_run(checkpoint.state["config"], to_dict(self.config), checkpoint.folder)
        logger.info("Going on from %s.", checkpoint.folder)
        return checkpoint

    def _checkpoint_of_this_job(self) -> Checkpoint | None:
        """The newest checkpoint of a restarted job that was told where to begin: it does not begin there again."""
        resume = self.config.resume
        if resume in ("none", "auto") or not self.world.any(restart_count() > 0):
            return None
        newest = newest_checkpoint(self.checkpoints, self.world)
        return newest if newest is not None and newest.state["config"]["resume"] == resume else None

    def _check_fit(self) -> None:
        """The model, the prompts and the checkpoint belong together; still nothing is written."""
        config, trainer = self.config, self.trainer
        if config.evaluation.every and len(trainer.eval_samples) < 2:
            raise ConfigError("The paired evaluation needs at least 2 prompts; add some, or set evaluation.every to 0.")
        if kl_uses(config.objective.kl_mode)[1] and config.training.updates_per_rollout == 1:
            logger.info(
                "objective.kl_mode %s: with training.updates_per_rollout = 1 the step-wise KL is zero at every update "
                "and its gradient is zero in expectation; it acts from the second update of a rollout on.",
                config.objective.kl_mode,
            )
        if self.checkpoint is None:
            return
        if self.checkpoint.state["model"] != trainer.model_digest:
            raise ConfigError(
                f"model.path: the weights at {config.model.path} are not those that the run was started with. Restore "
                "them (another folder will do), or start a new run."
            )
        if self.checkpoint.state["prompts"] != self.prompts_digest:
            raise ConfigError(
                "data.prompts or evaluation.prompts: a file has changed since the checkpoint was saved, so its prompts "
                "would no longer be the ones the run compares. Restore the file, or start a new run."
            )
        videos = self.checkpoint.state["videos_per_rollout"]
        if videos != trainer.videos_per_rollout:
            ranks = trainer.world.dp_degree
            raise ConfigError(
                f"The checkpoint's run has {videos} videos per rollout, this one {trainer.videos_per_rollout} "
                f"(rollout.batch_size {config.rollout.batch_size} on {ranks} data-parallel rank(s)), which would be "
                f"another run. "
                + (f"Set rollout.batch_size to {videos // ranks}." if videos % ranks == 0 else "Use other degrees.")
            )
        try:
            trainer.check_fit(self.checkpoint.shapes)
        except ValueError as error:
            raise CheckpointError(f"The checkpoint does not fit this run: {error}") from error

    def _prepare_directory(self, resumed: int) -> None:
        """Create the run directory and record what is being run."""
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            if self.config.resume not in ("none", "auto"):
                self._set_aside_after(resumed)
            save_config(self.config, self.directory / "config.yaml")
            write_environment(self.directory, resumed)
        except OSError as error:
            raise ConfigError(
                f"output_dir {str(self.directory)!r} cannot be written: {error}. Choose a folder on a disk with free "
                "space and write permission."
            ) from error

    def _set_aside_after(self, resumed: int) -> None:
        """Rename the checkpoints of updates that will be made again, so that the newest is always this run's."""
        for folder in list_checkpoints(self.checkpoints):
            if folder.name > checkpoint_name(resumed):
                aside = folder.with_name(f"abandoned-{folder.name}")
                shutil.rmtree(aside, ignore_errors=True)
                folder.rename(aside)
                logger.warning("Going back to update %d; what came later is kept as %s.", resumed, aside)

    def _open_metrics(self) -> MetricsLogger | NoMetrics:
        section = self.config.logging
        if not self.world.is_main:
            return NoMetrics()
        try:
            return MetricsLogger(self.directory, tensorboard=section.tensorboard, wandb_project=section.wandb_project)
        except ValueError as error:
            raise ConfigError(f"logging.*: {error}") from error

    def _open_writer(self) -> CheckpointWriter:
        section = self.config.checkpoint
        return CheckpointWriter(
            self.checkpoints, keep_last=section.keep_last, asynchronous=section.asynchronous, world=self.world
        )

    def _evaluate_pending(
        self, record: dict[str, float] | None, metrics: MetricsLogger | NoMetrics, progress: RunProgress
    ) -> None:
        """Make up for the evaluation that was due at a checkpoint, unless it was made after it was saved."""
        if record is None:
            return
        rows = read_metrics(self.directory / "metrics.jsonl") if self.world.is_main else []
        made = any(row["update"] == self.trainer.update and "eval/reward_mean" in row for row in rows)
        if not self.world.broadcast(made):
            metrics.truncate_after(self.trainer.update - 1)
            record = record | self._evaluate()
            metrics.log(record)
            progress.finished(record)

    def _save(self, writer: CheckpointWriter, pending: dict[str, float] | None = None) -> None:
        """Save a checkpoint; `pending` are the metrics of an update whose evaluation is still to be made."""
        trainer, mode = self.trainer, self.config.training.mode

        def add_adapter(folder: Path) -> Callable[[], None] | None:
            if mode != "lora":
                return None
            with trainer.evaluated_weights(), trainer.engine.whole():
                return copy_lora(trainer.policy.transformer, folder / "lora") if self.world.is_main else None

        state = {
            "trainer": trainer.state(),
            "videos_per_rollout": trainer.videos_per_rollout,
            "prompts": self.prompts_digest,
            "model": trainer.model_digest,
            "pending": pending,
            "config": to_dict(self.config),
        }
        writer.save(trainer.update, CheckpointData(tensors=trainer.tensors(), state=state), extra=add_adapter)

    def _due(self, every: int) -> bool:
        """Whether the last iteration reached or passed a multiple of `every`."""
        step = self.config.training.updates_per_rollout
        return self.trainer.update // every > (self.trainer.update - step) // every

    # ------------------------------------------------------------------------------------------ evaluation, result

    def _evaluate(self) -> dict[str, float]:
        """Evaluate, write samples and scores, and return the metrics; on ranks other than 0, evaluate alone."""
        trainer, config = self.trainer, self.config
        start = time.perf_counter()
        evaluation, videos = trainer.evaluate(return_videos=self.sample_rows)
        seconds = time.perf_counter() - start
        if not self.world.is_main:
            return {}
        name = f"update-{trainer.update:06d}"
        evaluation.save(self._evaluation_file(trainer.update))
        for row, video in videos.items():
            file = self.directory / "samples" / name / video_files.video_file_name(row, evaluation.prompts[row])
            video_files.write_video(file, video, config.video.fps)
        if videos:
            rows = [(evaluation.prompts[row], video) for row, video in videos.items()]
            media.contact_sheet(self.directory / "samples" / f"{name}.png", rows, title=f"update {trainer.update}")
            self._keep_frames(videos)
        first = Evaluation.load(self._evaluation_file(0))
        test = paired_test(first.reward, evaluation.reward)
        overall = torch.tensor(evaluation.reward, dtype=torch.float64)
        metrics = {
            "eval/reward_mean": float(overall.mean()),
            "eval/reward_stderr": float(overall.std()) / len(overall) ** 0.5,
            "eval/paired_gain": test.mean,
            "eval/paired_gain_stderr": test.stderr,
            "time/evaluation": seconds,
        }
        for score, values in evaluation.scores.items():
            column = torch.tensor(values, dtype=torch.float64)
            metrics[f"eval/{score}_mean"] = float(column.mean())
            metrics[f"eval/{score}_stderr"] = float(column.std()) / len(column) ** 0.5
        return metrics

    def _evaluation_file(self, update: int) -> Path:
        return self.directory / "evaluation" / f"update-{update:06d}.json"

    def _frames_file(self, update: int) -> Path:
        return self.directory / "samples" / f"update-{update:06d}.npz"

    def _keep_frames(self, videos: Mapping[int, Tensor]) -> None:
        """Keep a few frames of the first and the latest samples for the before/after sheet, also across a resume."""
        frames = {}
        for row, video in videos.items():
            chosen = torch.linspace(0, len(video) - 1, min(8, len(video))).round().long()
            frames[str(row)] = video[chosen].numpy()
        present = self._frames_file(self.trainer.update)
        with replacing(present) as partial, partial.open("wb") as file:
            np.savez_compressed(file, allow_pickle=False, **frames)
        for old in present.parent.glob("update-*.npz"):
            if old not in (present, self._frames_file(0)):
                old.unlink()

    def _conclude(self, *, finished: bool) -> RunResult:
        """Plot, before/after sheet and the paired test of what has been trained so far."""
        update = self.trainer.update
        if not self.world.is_main:
            return RunResult(output_dir=self.directory, update=update, finished=finished, test=None)
        rows = sorted(read_metrics(self.directory / "metrics.jsonl"), key=lambda row: row["update"])
        if rows:
            media.plot_reward(self.directory / "reward.png", rows)
        test = None
        evaluated = [r["update"] for r in rows if "eval/reward_mean" in r]
        if len(evaluated) > 1:
            first, last = (Evaluation.load(self._evaluation_file(u)) for u in (evaluated[0], evaluated[-1]))
            test = paired_test(first.reward, last.reward)
            result = {"before": evaluated[0], "after": evaluated[-1], "reward": asdict(test)}
            result["scores"] = {n: asdict(paired_test(first.scores[n], last.scores[n])) for n in first.scores}
            result["standard_errors"] = test.standard_errors
            with replacing(self.directory / "evaluation" / "result.json") as partial:
                partial.write_text(json.dumps(result, indent=1), encoding="utf-8")
            self._before_after_sheet(first, evaluated[-1])
            print(
                f"Paired evaluation: {test.count} prompts, same noise, ODE sampler, update {evaluated[-1]} against "
                f"update {evaluated[0]}\n{format_comparison(first, last)}\n"
                f"The reward changed by {test.mean:+.4f} +- {test.stderr:.4f}, which is "
                f"{test.standard_errors:+.1f} standard errors."
            )
        return RunResult(output_dir=self.directory, update=update, finished=finished, test=test)

    def _before_after_sheet(self, first: Evaluation, update: int) -> None:
        files = [self._frames_file(0), self._frames_file(update)]
        if not all(f.exists() for f in files):
            return
        with np.load(files[0]) as before, np.load(files[1]) as after:
            rows = [
                (first.prompts[int(row)], torch.from_numpy(before[row]), torch.from_numpy(after[row]))
                for row in before.files
                if row in after.files
            ]
        title = f"same prompt, same noise: before training and after update {update}"
        media.before_after_sheet(self.directory / "before_after.png", rows, title=title)


def prompts_digest(prompts: Sequence[Prompt], eval_prompts: Sequence[Prompt]) -> str:
    """SHA-256 of the training and evaluation prompts with their indices and seeds."""
    rows = [[(p.text, p.index, p.seed) for p in group] for group in (prompts, eval_prompts)]
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()


def check_same_run(saved: Mapping[str, Any], present: Mapping[str, Any], checkpoint: Path, only: str = ".*") -> None:
    """ConfigError unless two configurations agree in what changes numbers.

    Args:
        saved, present: nested dicts, as `to_dict` makes them. Keys that one of them does not know (another version)
            are not compared.
        only: regular expression of the dotted keys that matter.
    """
    # Weights and options of rewards are one value each: there a missing entry is a difference.
    old, new = (by_dotted_key(tree, whole=("reward.weights", "reward.options")) for tree in (saved, present))
    different = [
        f"{key}: {old[key]!r} in the checkpoint, {new[key]!r} now"
        for key in sorted(old.keys() & new.keys())
        if old[key] != new[key] and re.fullmatch(only, key) and not FREE_ON_RESUME.fullmatch(key)
    ]
    if different:
        raise ConfigError(
            f"{checkpoint} was made with another configuration: {'; '.join(different[:4])}. Use the same values, or "
            "start a new run in another output_dir."
        )
