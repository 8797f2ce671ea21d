"""Code of the user inside a run: its records, how it stops the run, and the end of a
run that it fails in.

    class StopWhenGood(Callback):
        def on_evaluation(self, record: EvaluationRecord) -> None:
            if record.metrics["eval/paired_gain"] > 0.5:
                raise StopRun("the gain is 0.5")

    train(config, callbacks=[StopWhenGood()])

Callbacks are called on rank 0 alone, in the order in which they were given, between the
steps of the run; what they take, training waits for. They must not change what they are
given, and must not communicate with other ranks.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sage_fast.config.errors import CallbackError, ConfigError
from sage_fast.config.registry import describe
from sage_fast.evaluation import Evaluation
from sage_fast.records import RolloutRecord

logger = logging.getLogger(__name__)


class StopRun(Exception):
    """Raised by a callback to end the run: it finishes its update, saves, and says the
    reason. No error.
    """


@dataclass(frozen=True, kw_only=True)
class UpdateRecord:
    """An iteration that is finished and in metrics.jsonl.

    update: optimizer updates done. total: `training.num_updates`. metrics: its row of
    metrics.jsonl.

    Example: `UpdateRecord(update=3, total=50, metrics={"reward/mean": 0.41,
    "grad_norm": 0.2, ...})`
    """

    update: int
    total: int
    metrics: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class EvaluationRecord:
    """An evaluation whose scores, videos and metrics are on disk. Update 0 is the model
    that the run starts from.

    metrics: its row of metrics.jsonl, with `eval/...`. evaluation: the scores of every
    prompt. baseline: those of update 0.

    Example: `EvaluationRecord(update=10, metrics={"eval/paired_gain": 0.1, ...},
    evaluation=..., baseline=...)`
    """

    update: int
    metrics: Mapping[str, Any]
    evaluation: Evaluation
    baseline: Evaluation


@dataclass(frozen=True, kw_only=True)
class SaveRecord:
    """A checkpoint that is complete on disk; with `checkpoint.asynchronous`, training
    has gone on since.

    Example: `SaveRecord(update=10, folder=Path("runs/mine/checkpoints/update-000010"))`
    """

    update: int
    folder: Path


class Callback:
    """Base class of callbacks: override what you need. Each may raise `StopRun`.

    Any other exception of a callback ends the run in the same orderly way: the update
    in progress is finished and saved, and `CallbackError` is raised, with the
    callback's exception as its cause. The callback is not called again.
    """

    def on_rollout(self, record: RolloutRecord) -> None:
        """The videos of the coming update are scored; its gradient is not taken yet."""

    def on_update(self, record: UpdateRecord) -> None:
        """An iteration is finished; where an evaluation was due, `on_evaluation` comes
        next.
        """

    def on_evaluation(self, record: EvaluationRecord) -> None:
        """An evaluation is finished, that of update 0 included."""

    def on_save(self, record: SaveRecord) -> None:
        """A checkpoint is complete."""


class Callbacks:
    """The callbacks of a run as one that raises nothing: what they want is asked for
    when the run can act on it.

    Args:
        callbacks: none of them on ranks other than 0.

    Raises:
        ConfigError: one is not a `Callback`.
    """

    def __init__(self, callbacks: Sequence[Callback] = ()) -> None:
        for callback in callbacks:
            if not isinstance(callback, Callback):
                raise ConfigError(
                    f"callbacks: {callback!r} is not a sage_fast.Callback. Give "
                    "objects of classes derived from it, "
                    "such as [Mine()]."
                )
        self._active = list(callbacks)
        self.stop_reason: str | None = None
        """Reason of the first `StopRun`; None where there was none."""
        self._failure: tuple[str, Exception] | None = None

    @property
    def wants_stop(self) -> bool:
        """A callback has raised, `StopRun` or anything else."""
        return self.stop_reason is not None or self._failure is not None

    def raise_failure(self, update: int, directory: Path) -> None:
        """CallbackError where a callback has failed, now that the run is saved at
        `update`.
        """
        if self._failure is None:
            return
        name, error = self._failure
        ended = f"after update {update} and nothing of it is lost"
        go_on = "continue"
        if update == 0:
            ended = "before its first update"
            go_on = "start it again"
        raise CallbackError(
            f"Callback {name} raised {describe(error)}. The run in {directory} was "
            f"ended {ended}: fix or remove the "
            f"callback, and {go_on} with resume set to auto."
        ) from error

    def tell(self, event: str, record: object) -> None:
        """Call the method of this name, such as `on_update`, of every callback."""
        # A copy, because one that fails is removed on the way.
        for callback in list(self._active):
            name = f"{type(callback).__name__}.{event}"
            try:
                getattr(callback, event)(record)
            except StopRun as stop:
                if not self.wants_stop:
                    logger.info("%s stops the run: %s", name, stop)
                self.stop_reason = self.stop_reason or str(stop) or name
            except Exception as error:  # noqa: BLE001  the user's own code; raised again when the run is saved
                logger.error(
                    "%s raised %s: the run is saved and ends.", name, describe(error)
                )
                self._active.remove(callback)
                self._failure = self._failure or (name, error)
