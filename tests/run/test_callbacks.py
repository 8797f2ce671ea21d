"""Callbacks: their records, how one stops the run, and that one which fails costs
nothing.
"""

from collections.abc import Callable
from functools import partialmethod
from typing import Any

import pytest
import torch

from sage_fast.checkpoint.folder import list_checkpoints
from sage_fast.config.errors import CallbackError
from sage_fast.config.schema import RunConfig
from sage_fast.run.directory import read_metrics
from sage_fast.run.run import Run
from sage_fast.run.run_status import Callback
from tests.made_runs import numbers

pytestmark = pytest.mark.usefixtures("nothing_drawn")
MakeRun = Callable[..., RunConfig]
EVENTS = ("on_rollout", "on_update", "on_evaluation", "on_save")


class Recorder(Callback):
    """Keeps its records, and raises once, when `fault` has an error for the event at
    that update.
    """

    def __init__(self, fault: tuple[str, int, Exception] | None = None) -> None:
        self.told: list[tuple[str, Any]] = []
        self.fault = fault

    def _hear(self, event: str, record: Any) -> None:
        self.told.append((event, record))
        assert event != "on_save" or record.folder.is_dir(), "it is complete"
        if self.fault is not None and (event, record.update) == self.fault[:2]:
            raise self.fault[2]

    def heard(self) -> list[tuple[str, int]]:
        return [(event, record.update) for event, record in self.told]


for event in EVENTS:
    setattr(Recorder, event, partialmethod(Recorder._hear, event))


def test_callbacks_hear_of_every_step_in_order(tiny_run: MakeRun) -> None:
    recorder = Recorder()
    background = Recorder()
    result = Run(tiny_run(), callbacks=[background]).train()
    in_turn = ["--checkpoint.asynchronous=false", "--resume=restart"]
    Run(tiny_run(*in_turn), callbacks=[recorder]).train()
    assert {*background.heard()} == {*recorder.heard()}
    assert recorder.heard() == [
        ("on_evaluation", 0),
        ("on_rollout", 0), ("on_update", 1), ("on_save", 1),
        ("on_rollout", 1), ("on_update", 2), ("on_evaluation", 2), ("on_save", 2),
    ]  # fmt: skip
    records = dict(
        zip(recorder.heard(), (record for _, record in recorder.told), strict=True)
    )
    rollout = records["on_rollout", 1]
    assert (
        rollout.reward.shape
        == rollout.advantages.shape
        == rollout.scores["VQ"].shape
        == (2, 2)
    )
    assert len(rollout.prompts) == 2 and rollout.trained.tolist() == [True, True]
    torch.testing.assert_close(
        rollout.reward, sum(rollout.scores[name] for name in ("VQ", "MQ", "TA"))
    )
    rows = {
        row["update"]: row for row in read_metrics(result.output_dir / "metrics.jsonl")
    }
    assert float(rollout.reward.mean()) == pytest.approx(rows[2]["reward/mean"])
    assert (
        dict(records["on_update", 2].metrics) == rows[2]
        and records["on_update", 2].total == 2
    )
    evaluation = records["on_evaluation", 2]
    gains = [
        a - b
        for a, b in zip(
            evaluation.evaluation.reward, evaluation.baseline.reward, strict=True
        )
    ]
    assert sum(gains) / len(gains) == pytest.approx(
        evaluation.metrics["eval/paired_gain"]
    )
    assert result.finished and result.stop_reason is None


@pytest.mark.slow
def test_a_callback_that_raises_ends_the_run_after_it_is_saved(
    tiny_run: MakeRun,
) -> None:
    """And going on gives the numbers of a run that nothing has stopped."""
    words = ("--training.num_updates=3", "--checkpoint.asynchronous=false")
    expected = numbers(Run(tiny_run(*words)).train().output_dir)
    for event in EVENTS:
        ends_after_it_is_saved(
            tiny_run(*words, "--resume=restart"), event, ZeroDivisionError("mine")
        )
        assert (
            numbers(Run(tiny_run(*words, "--resume=auto")).train().output_dir)
            == expected
        ), event


def test_a_callback_that_raises_before_the_first_update_ends_the_run_there(
    tiny_run: MakeRun,
) -> None:
    failing = Recorder(("on_evaluation", 0, ZeroDivisionError("mine")))
    with pytest.raises(CallbackError, match="after update 0 .*resume set to auto"):
        Run(tiny_run(), callbacks=[failing]).train()
    assert failing.heard() == [("on_evaluation", 0)]


def ends_after_it_is_saved(config: RunConfig, event: str, error: Exception) -> None:
    at = 2 if event == "on_evaluation" else 1
    failing = Recorder((event, at, error))
    other = Recorder()
    run = Run(config, callbacks=[failing, other])
    with pytest.raises(
        CallbackError, match=rf"Recorder\.{event} raised ZeroDivisionError: mine"
    ) as caught:
        run.train()
    assert caught.value.__cause__ is error and "after update" in str(caught.value)
    assert failing.heard()[-1] == (event, at), "it is not called again"
    saved = list_checkpoints(run.checkpoints)[-1]
    assert saved.name == f"update-{2 if event == 'on_rollout' else at:06d}"
    assert other.heard()[-1] == ("on_save", int(saved.name[-6:]))
