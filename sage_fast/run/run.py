"""A training run as the user sees it: directory, progress, metrics, samples,
checkpoints, resume, result.

runs/NAME/
    config.yaml  environment.json        configuration, versions, hardware
    metrics.jsonl  tensorboard/          numbers, one line per rollout
    samples/                             mp4s and contact sheets from fixed prompts and noise
    evaluation/                          scores per prompt; result.json is the paired test of last against first
    checkpoints/                         see `checkpoint/`
    index.html                           everything on one page, rewritten while the run goes on: look here first
    reward.png  before_after.png         the same for a document
    status.json  lease.txt               progress, and the process that writes here, for `sage-fast status`
"""

import logging
import os
import platform
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from sage_fast.checkpoint.folder import update_of
from sage_fast.checkpoint.reader import Checkpoint
from sage_fast.checkpoint.writer import CheckpointData, CheckpointWriter
from sage_fast.config.errors import (
    CheckpointError,
    ConfigError,
    RankFailure,
    RunDirectoryError,
)
from sage_fast.config.files import loads, replacing
from sage_fast.config.load import save_config
from sage_fast.config.schema import RunConfig, check_batch, to_dict
from sage_fast.config.sections import check_heads
from sage_fast.distributed.failure import (
    HangGuard,
    check_same_everywhere,
    is_communication_error,
)
from sage_fast.distributed.start import rank_device, start_world
from sage_fast.distributed.world import SINGLE_PROCESS, World
from sage_fast.evaluation import PairedTest
from sage_fast.models.family import describe_model
from sage_fast.policy.adapters import load_model, weights_digest
from sage_fast.policy.lora import copy_lora
from sage_fast.rewards.base import seed_generators
from sage_fast.rewards.composite import CompositeReward
from sage_fast.rollout import Progress
from sage_fast.run.directory import (
    GracefulStop,
    Lease,
    RunDirectory,
    read_metrics,
    unwritable,
)
from sage_fast.run.metrics import MetricsLogger, peak_memory_gib
from sage_fast.run.page import write_run_page
from sage_fast.run.plots import figure_file, reward_figure
from sage_fast.run.prompt_files import load_prompts, prompts_digest, run_prompts
from sage_fast.run.provenance import write_environment
from sage_fast.run.results import RunEvaluation
from sage_fast.run.resume import (
    abandon_after,
    find_start,
    keep_videos,
    move_aside,
    recorded,
    settle_attention,
)
from sage_fast.run.run_status import (
    Callback,
    Callbacks,
    EvaluationRecord,
    RunProgress,
    SaveRecord,
    State,
    Status,
    UpdateRecord,
)
from sage_fast.trainer import Trainer

SECONDS_BETWEEN_PAGES = 30.0
"""The page of a run is written at its end, and after an update where it is older than
that: it takes a second.
"""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """End of a run: `finished` is False when it was asked to stop, `test` compares the
    last and first evaluation.

    Attributes:
        stop_reason: from the callback that stopped it, or how it got worse where
            `evaluation.stop_when_worse` did; None where none did, and on ranks other
            than 0.
        worse: how the last evaluation is below update 0, see `describe_worse`.

    Example: `RunResult(output_dir=Path("runs/demo"), update=60, finished=True,
    test=PairedTest(...))`
    """

    output_dir: Path
    update: int
    finished: bool
    test: PairedTest | None
    stop_reason: str | None = None
    worse: str | None = None


def build_trainer(
    config: RunConfig,
    world: World = SINGLE_PROCESS,
    progress: Progress = lambda phase, done, total, subject: None,
    done: tuple[int, int] = (0, 0),
    attention: str = "auto",
) -> Trainer:
    """Load the model, the rewards and the prompts of a run. Collective.

    Args:
        progress, done: see `Trainer`.
        attention: backend of the checkpoint that the run goes on from, see
            `settle_attention`.

    Raises:
        ConfigError: a part is missing or does not fit.
    """
    # Before the rewards are imported: custom ones may draw from the global generators
    # from then on.
    seed_generators(config.seed)
    prompts, eval_prompts = load_prompts(config)
    # Before the model is loaded, which takes minutes.
    rollout = config.rollout
    check_batch(rollout.batch_size, world.dp_degree, rollout.num_generations)
    description = None
    # nothing is known before it is loaded; then `shard_sequence` asks
    with suppress(ConfigError):
        description = describe_model(config.model)
    try:
        if description is not None:
            check_heads(world.sp, description.transformer["num_attention_heads"])
            config = settle_attention(config, description, world, attention)
        components = load_model(config.model, config.lora, read=False)
        used = run_prompts(config, prompts, eval_prompts, world.dp_degree, done)
        reward = CompositeReward.from_config(
            config.reward,
            [prompt.text for prompt in used],
            device=str(rank_device(config.model.device)),
            fps=config.video.fps,
        )
        return Trainer(
            config, components, reward, prompts, eval_prompts, world, progress, done
        )
    except (ValueError, OSError) as error:
        raise ConfigError(str(error)) from error


def train(
    config: RunConfig,
    allow_changes: Collection[str] = (),
    callbacks: Sequence[Callback] = (),
) -> RunResult:
    """Train in the processes that a launcher has started, or in this one.

    Args:
        allow_changes: dotted keys that may differ from those of the checkpoint which
            the run goes on from.
        callbacks: called on rank 0.

    Raises:
        RankFailure: another rank has died, failed or hung. Else what `Run.train`
            raises.
    """
    section = config.distributed
    # where NCCL writes what it waited for; else each node's /tmp
    if "TORCH_FR_BUFFER_SIZE" in os.environ:
        folder = Path(config.output_dir).absolute() / "flight_recorder"
        folder.mkdir(parents=True, exist_ok=True)
        os.environ.setdefault(
            "TORCH_FR_DUMP_TEMP_FILE", str(folder / "nccl_trace_rank_")
        )
    device = rank_device(config.model.device)
    try:
        world = start_world(section, config.training.mode, device, to_dict(config))
        with HangGuard(world, section.startup_timeout_seconds) as guard:
            return Run(
                config, world, guard, allow_changes=allow_changes, callbacks=callbacks
            ).train()
    except RuntimeError as error:
        if not is_communication_error(error):
            raise
        # torch's messages go on with a stack; what has failed is in the first line.
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise RankFailure(
            f"A collective failed: {first} Another rank has died, failed or hung; its "
            "own message or the stacks of its threads say where. Its checkpoints are "
            "intact: start the same command again with --resume auto, or let torchrun "
            "do so (--max-restarts)."
        ) from error


class Run:
    """One call of `sage-fast train`; on many ranks, each has one, and rank 0 writes the
    files.
    """

    def __init__(
        self,
        config: RunConfig,
        world: World = SINGLE_PROCESS,
        guard: HangGuard | None = None,
        allow_changes: Collection[str] = (),
        callbacks: Sequence[Callback] = (),
    ) -> None:
        self.world = world
        self.callbacks = Callbacks(callbacks if world.is_main else ())
        self.guard = guard or HangGuard(world, config.distributed.timeout_seconds)
        # whatever else changes the working directory
        self.directory = Path(config.output_dir).absolute()
        self.files = RunDirectory(self.directory)
        self.checkpoints = self.files.checkpoints
        # Before the model is loaded: another writer, or a checkpoint that cannot be
        # used, is found in a second.
        self.lease = Lease(self.directory, world)
        self._traces = self.files.traces()
        self.checkpoint, self._sets_aside, self._branches, self._changes = find_start(
            config, world, allow_changes
        )
        done = (0, 0)
        attention = "auto"
        if self.checkpoint is not None:
            state = self.checkpoint.state
            done = int(state["trainer"]["update"]), int(state["trainer"]["rollouts"])
            attention = state.get("attention", "auto")
            config = keep_videos(config, state["videos_per_rollout"], world.dp_degree)
        self.config = config

        def go_on(*_: object) -> None:
            self.guard.progress()

        self.trainer = trainer = build_trainer(config, world, go_on, done, attention)
        self.prompts_digest = prompts_digest(
            trainer.schedule.prompts, trainer.eval_prompts
        )
        self._check_fit()
        self.evaluation = RunEvaluation(trainer, self.files)
        one_node = world.size == int(os.environ.get("LOCAL_WORLD_SIZE") or 1)
        self.progress = RunProgress(
            self.directory,
            Status(
                num_updates=config.training.num_updates,
                videos_per_rollout=trainer.videos_per_rollout,
                folder=os.getcwd(),
                gpus=world.size if one_node else 1,
            ),
            step=config.training.updates_per_rollout,
            evaluation_every=config.evaluation.every,
            shown=world.is_main,
        )
        self._page_written = time.monotonic()

    def train(self) -> RunResult:
        """Train to the last update, or until a signal to any rank asks to stop.

        Raises:
            ConfigError, CheckpointError, RunDirectoryError, TrainingError, RewardError,
                OSError: each says what to do; what was saved before stays as it was.
            CallbackError: a callback raised; the run was saved after that update.
        """
        with self.lease:
            try:
                finished = self._train()
                result = self._conclude(finished)
                # Within the try, so that the status tells of a failure, though all of
                # the run is saved.
                self.callbacks.raise_failure(result.update, self.directory)
            except BaseException as error:
                # the time that a collective has waited is not that of the last words
                self.guard.progress()
                self._write_final_status("failed", error)
                raise
            finally:
                # nothing of this run may write once the lease is free
                self.trainer.reward.close()
            self._write_final_status("finished" if finished else "stopped")
            return result

    def _write_final_status(
        self, state: State, error: BaseException | None = None
    ) -> None:
        # A directory that another run has taken over is that run's.
        if self.lease.is_own():
            self.progress.end(state, error)
            self._write_page()

    def _train(self) -> bool:
        """Train between opening and closing what a run needs. Returns whether there is
        nothing left to do.
        """
        # Not kept by this object: a run that just fits would not fit beside its own
        # checkpoint.
        checkpoint = self.checkpoint
        self.checkpoint = None
        resumed = int(checkpoint.state["trainer"]["update"]) if checkpoint else 0
        saving = self.config.checkpoint
        with ExitStack() as stack:
            self.metrics = MetricsLogger(None)
            if self.world.is_main:
                environment = self._prepare_directory(resumed)
                self.progress.begin(resumed)
                settings = {
                    "config": to_dict(self.config),
                    "environment": loads(environment.read_text("utf-8")),
                }
                self.metrics = MetricsLogger(
                    self.directory, **vars(self.config.logging), settings=settings
                )
                # The pace and the gains of the updates that stay: the time left and
                # `worse` go by them.
                for row in read_metrics(self.files.metrics):
                    if checkpoint is not None and row["update"] <= resumed:
                        self.progress.learn(row)
            # Left in the reverse order: a checkpoint in progress is completed first,
            # and the log is closed last.
            stack.callback(self.metrics.close)
            stop = GracefulStop(self.directory, announce=self.world.is_main)
            self.stop = stack.enter_context(stop)
            self.trainer.reward.on_hang = self.stop.watch
            stack.enter_context(self.progress)
            writer = CheckpointWriter(
                self.checkpoints,
                keep_last=saving.keep_last,
                asynchronous=saving.asynchronous,
                world=self.world,
            )
            self.writer = stack.enter_context(writer)
            # Until here progress went to the guard alone, since the run did not own its
            # directory yet.
            self.trainer.progress = self._tell
            self.trainer.on_rollout = partial(self.callbacks.tell, "on_rollout")
            self._begin(checkpoint)
            del checkpoint
            finished = self._loop()
            if finished:
                self.trainer.reward.compare_last()
            # The last checkpoint may still be on its way to disk, and callbacks get
            # complete ones alone.
            self.writer.wait()
            self._tell_of_checkpoints()
            return finished

    def _begin(self, checkpoint: Checkpoint | None) -> None:
        """Bring the trainer, the metrics and the baseline to where the checkpoint was,
        or to update 0.
        """
        if checkpoint is None:
            if self.world.is_main:
                self.trainer.reward.compare_next()
            self.metrics.truncate_after(-1)
            self._measure_baseline()  # scores on disk are not this run's
            return
        state = checkpoint.state
        update = int(state["trainer"]["update"])
        record = state["record"]
        pending = state["pending"]
        # The changes of an earlier start from here have led to no checkpoint: the run
        # never had them.
        self.metrics.truncate_after(update, but="config/changes")
        # The weights of the checkpoint are loaded afterwards: the baseline is that of
        # the model the run starts from.
        self.evaluation.restore_baseline(None if self._branches else state["baseline"])
        self._measure_baseline()
        self.trainer.load(checkpoint, state["trainer"])
        changed = [f"{key} {old} -> {new}" for key, (old, new) in self._changes.items()]
        changes = ["; ".join(changed)]
        if self._branches:
            # Another run's, whose records are in its directory. From now on this one
            # goes on by itself.
            record = None
            self._save(record, pending=pending, changes=changes[0])
            self.writer.wait()
            if self.world.is_main:
                save_config(replace(self.config, resume="auto"), self.files.config)
        else:
            changes.insert(0, state.get("changes", ""))
        self._restore_record(record, pending=pending)
        for text in filter(None, changes):
            self.metrics.log({"update": update, "config/changes": text})

    def _loop(self) -> bool:
        """Iterate, save, evaluate and log until the last update or a request to stop.

        Returns:
            Whether the run is finished: not where it was stopped, or its last
            evaluation was put off.
        """
        config = self.config
        trainer = self.trainer
        world = self.world
        total = config.training.num_updates
        record: dict[str, Any] | None = None
        saved = trainer.update
        seconds_saving = 0.0
        # Collective: a signal may reach one rank alone, and all must leave the loop at
        # the same update.
        while trainer.update < total and not world.any(self._stop_requested):
            # Before the work of an update, which a directory that was lost or taken
            # over could not keep.
            self.lease.check()
            # A checkpoint holds the record of its update, so the time that it took is
            # in the next record.
            record = {**trainer.iterate(), "time/checkpoint": seconds_saving}
            # From the first update on nothing loads or compiles any more, and a hang
            # shows sooner.
            self.guard.use_steady_timeout(config.distributed.timeout_seconds)
            # What the videos of this rank took; in the whole iteration all ranks wait
            # for the slowest.
            phases = ("time/rollout", "time/decode", "time/reward")
            own = sum(record.get(phase, 0.0) for phase in phases)
            # One exchange for all that the ranks have to tell each other after an
            # update.
            peak = peak_memory_gib(trainer.device)
            answer = self._stop_requested, peak, own, platform.node()
            stops, peaks, seconds, hosts = zip(*world.gather(answer), strict=True)
            record["memory/peak_gib"] = max(peaks)
            if world.size > 1:
                slow = seconds.index(max(seconds))
                record["time/slowest"] = (
                    f"rank {slow} on {hosts[slow]}: {seconds[slow]:.3g} s for its "
                    f"videos, median {median(seconds):.3g} s"
                )
            done = trainer.update >= total
            stopping = any(stops)
            # Saving and evaluating are due where the iteration has reached or passed a
            # multiple of their updates.
            evaluates = config.evaluation.every > 0 and (
                done or self._due(config.evaluation.every)
            )
            seconds_saving = 0.0
            # Before the evaluation, which can take as long as many updates and fail in
            # its own ways.
            if done or evaluates or stopping or self._due(config.checkpoint.every):
                seconds_saving = self._save(record, pending=evaluates)
                saved = trainer.update
            if evaluates and stopping:
                self.progress.finished(record)
                # who asks to stop does not wait for an evaluation: the checkpoint knows
                # that it is due
                return False
            self._finish_update(record, evaluates=evaluates)
            self._tell_of_checkpoints()
        if saved != trainer.update:
            # Asked to stop after the ranks had agreed that nobody was.
            self._save(record, pending=False)
        return trainer.update >= total

    @property
    def _stop_requested(self) -> bool:
        """A signal, a file or a callback has asked this rank to stop, or the model got
        worse.
        """
        # Rank 0 has the metrics. A run that was stopped for this stops again unless it
        # goes on from an earlier update.
        got_worse = self.progress.status.worse is not None
        if got_worse and self.config.evaluation.stop_when_worse:
            return True
        return self.stop.requested or self.callbacks.wants_stop

    def _tell_of_checkpoints(self) -> None:
        """Tell the callbacks of the checkpoints that have become complete."""
        while self.writer.published:
            folder = self.writer.published.popleft()
            saved = SaveRecord(update=update_of(folder), folder=folder)
            self.callbacks.tell("on_save", saved)

    def _finish_update(self, record: dict[str, Any], *, evaluates: bool) -> None:
        """Evaluate where that is due, and log the update in any case."""
        try:
            if evaluates:
                scores = self.evaluation.run()
                gain = scores.get("eval/paired_gain", 0.0)  # rank 0 has the scores
                # Before the row has them: an evaluation that is in the metrics is not
                # made again.
                self.writer.pin_best(self.trainer.update, gain)
                record = record | scores
        finally:
            self.metrics.log(record)
        self.progress.finished(record)
        if time.monotonic() - self._page_written > SECONDS_BETWEEN_PAGES:
            self._write_page()
        total = self.config.training.num_updates
        done = UpdateRecord(update=self.trainer.update, total=total, metrics=record)
        self.callbacks.tell("on_update", done)
        if evaluates:
            self._show_evaluation(record)

    def _show_evaluation(self, metrics: Mapping[str, Any]) -> None:
        """Hand the evaluation that has just been made to trackers and callbacks."""
        evaluation = self.evaluation
        update = self.trainer.update
        if samples := evaluation.samples(update):
            self.metrics.show(update, self.files.sheet(update), samples)
        assert evaluation.latest is not None and evaluation.baseline is not None
        record = EvaluationRecord(
            update=update,
            metrics=metrics,
            evaluation=evaluation.latest,
            baseline=evaluation.baseline,
        )
        self.callbacks.tell("on_evaluation", record)

    def _tell(self, phase: str, done: int, total: int, subject: str) -> None:
        """Pass on what the trainer is doing."""
        self.guard.progress()
        self.progress.phase(phase, done, total)

    def _write_page(self) -> None:
        """Write the page of the run."""
        # Who has deleted the directory does not want it back.
        if self.world.is_main and self.directory.exists():
            write_run_page(self.directory)
            self._page_written = time.monotonic()

    # ----------------------------------------------------------------------------------
    # begin

    def _check_fit(self) -> None:
        """Refuse a model, prompts or a checkpoint that do not belong together; nothing
        has been written yet.
        """
        config = self.config
        trainer = self.trainer
        digests = {"model.path": trainer.model_digest, "prompts": self.prompts_digest}
        if config.model.adapter is not None:
            digests["model.adapter"] = weights_digest(Path(config.model.adapter))
        # A path may name other files on another node.
        check_same_everywhere(digests)
        if config.evaluation.every and len(trainer.eval_prompts) < 2:
            raise ConfigError(
                "The paired evaluation needs at least 2 prompts; add some, or set "
                "evaluation.every to 0."
            )
        if self.checkpoint is None:
            return
        if self.checkpoint.state["model"] != trainer.model_digest:
            raise ConfigError(
                f"model.path: the weights at {config.model.path} are not those that "
                "the run was started with. Restore them (another folder will do), or "
                "start a new run."
            )
        if self.checkpoint.state["prompts"] != self.prompts_digest:
            raise ConfigError(
                "data.prompts or evaluation.prompts: a file has changed since the "
                "checkpoint was saved, so its prompts would no longer be the ones the "
                "run compares. Restore the file, or start a new run."
            )
        try:
            trainer.check_fit(self.checkpoint.shapes)
        except ValueError as error:
            message = f"The checkpoint does not fit this run: {error}"
            raise CheckpointError(message) from error

    def _prepare_directory(self, resumed: int) -> Path:
        """Create the run directory, move aside what is not this run's, and record what
        is run; the file of versions.
        """
        if self.files.traces() != self._traces:
            raise RunDirectoryError(
                f"Another run has written to output_dir {str(self.directory)!r} while "
                "this one was being loaded. Start again, with --resume auto to "
                "continue that run."
            )
        resume = self.config.resume
        try:
            if self._sets_aside:
                move_aside(self.files)
            elif resume not in ("none", "auto") and not self._branches:
                abandon_after(self.files, resumed)
            # A resumed config must neither restart the run nor go back once more;
            # another run's checkpoint is where it begins until its own is saved.
            if resume != "none" and not self._branches:
                resume = "auto"
            save_config(replace(self.config, resume=resume), self.files.config)
            return write_environment(self.directory, resumed)
        except OSError as error:
            raise unwritable(self.files, error) from error

    def _measure_baseline(self) -> None:
        """Have the scores of update 0, and their record in the metrics, before the
        first update.
        """
        if not self.config.evaluation.every:
            return
        if self.evaluation.baseline is None:
            record = {"update": 0} | self.evaluation.run()
            self.metrics.log(record)
            self.progress.finished(record)
            self._show_evaluation(record)
        elif not self._has_logged(0, {"eval/reward_mean"}):
            scores = self.evaluation.metrics(self.evaluation.baseline)
            self.metrics.log({"update": 0} | scores)

    def _restore_record(self, record: dict[str, Any] | None, *, pending: bool) -> None:
        """Log the checkpoint's update if a kill or a full disk came between, and make
        up for an evaluation due then.

        Args:
            record: the metrics of that update, without its evaluation.
            pending: whether an evaluation was due.
        """
        update = self.trainer.update
        found = self.world.is_main and self.evaluation.load(update) is not None
        scored = self.world.broadcast(found)
        evaluated = scored and self._has_logged(update, {"eval/reward_mean"})
        # Evaluation may have been switched on since the last update.
        due = pending or update >= self.config.training.num_updates
        if due and self.config.evaluation.every and not evaluated:
            # The update may be logged without its evaluation; it is logged again, with
            # the scores.
            self.metrics.truncate_after(update - 1)
            self._finish_update(record or {"update": update}, evaluates=True)
        elif record is not None and not self._has_logged(update, record.keys()):
            self.metrics.log(record)

    def _has_logged(self, update: int, keys: Collection[str]) -> bool:
        """Look for a record of an update with these keys in the metrics. Collective."""
        rows = read_metrics(self.files.metrics) if self.world.is_main else []
        found = any(row["update"] == update and set(keys) <= row.keys() for row in rows)
        return self.world.broadcast(found)

    def _save(
        self, record: dict[str, Any] | None, *, pending: bool, changes: str = ""
    ) -> float:
        """Save a checkpoint, and return the seconds that training waited for it.

        Args:
            record: the metrics of its update. The log may lose them before the
                checkpoint does.
            pending: whether an evaluation of this update is still to be made.
            changes: what a run that begins here has changed of another one's
                configuration.
        """
        start = time.perf_counter()
        self._tell("checkpoint", 0, 1, "")
        trainer = self.trainer
        baseline = self.evaluation.baseline
        state = {
            "trainer": trainer.state(),
            "videos_per_rollout": trainer.videos_per_rollout,
            "attention": trainer.config.model.attention,
            "prompts": self.prompts_digest,
            "model": trainer.model_digest,
            "record": record,
            "pending": pending,
            "changes": changes,
            "baseline": None if baseline is None else asdict(baseline),
            **recorded(self.config),
        }
        data = CheckpointData(tensors=trainer.tensors(), state=state)
        self.writer.save(trainer.update, data, extra=self._add_adapter)
        return time.perf_counter() - start

    def _add_adapter(self, folder: Path) -> Callable[[], None] | None:
        """Copy the evaluated adapter, and return the writing of it in diffusers'
        layout, which rank 0 does.
        """
        trainer = self.trainer
        if self.config.training.mode != "lora":
            return None
        # All ranks enter, because to gather the adapters is collective; rank 0 copies
        # them.
        with trainer.evaluated_weights(), trainer.engine.whole():
            if not self.world.is_main:
                return None
            return copy_lora(trainer.policy.transformer, folder / "lora")

    def _due(self, every: int) -> bool:
        """Return if the last iteration reached or passed a multiple of `every`."""
        step = self.config.training.updates_per_rollout
        return self.trainer.update // every > (self.trainer.update - step) // every

    def _conclude(self, finished: bool) -> RunResult:
        """Plot, before/after sheet and the paired test of what has been trained so far."""
        test = None
        worse = self.progress.status.worse
        stop_reason = self.callbacks.stop_reason
        if self.config.evaluation.stop_when_worse and not finished:
            stop_reason = stop_reason or worse
        if self.world.is_main:
            rows = read_metrics(self.files.metrics)
            if rows:
                rows.sort(key=lambda row: row["update"])
                with replacing(self.files.reward_plot) as partial:
                    partial.write_bytes(figure_file(reward_figure(rows), "png"))
            test = self.evaluation.conclude(rows)
        return RunResult(
            output_dir=self.directory,
            update=self.trainer.update,
            finished=finished,
            test=test,
            stop_reason=stop_reason,
            worse=worse,
        )
