"""`model.attention: auto` of a run: the fastest by measurement, the same on all ranks
and after a resume.
"""

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from sage_fast.checkpoint.reader import find_checkpoint
from sage_fast.config.load import load_config
from sage_fast.distributed.world import SINGLE_PROCESS, World
from sage_fast.models.attention import attention
from sage_fast.models.attention.libraries import LIBRARIES, Use
from sage_fast.models.family import describe_model
from sage_fast.run import resume
from sage_fast.run.resume import time_backend
from sage_fast.run.run import Run

TinyRun = Callable[..., Any]


class Machine:
    """A GPU with these backends, by seconds."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seconds: dict[str, float] = {}
        self.timed: list[tuple[str, tuple[int, ...]]] = []
        monkeypatch.setattr(resume, "rank_device", lambda name: torch.device("cuda:0"))
        monkeypatch.setattr(resume, "backend_report", self.report)
        monkeypatch.setattr(resume, "time_backend", self.time)

    def report(self, *use: Any) -> dict[str, str | None]:
        return {
            name: None if name in self.seconds else "its library is gone"
            for name in LIBRARIES
        }

    def time(self, name: str, size: tuple[int, ...], use: Use) -> float:
        self.timed.append((name, size))
        return self.seconds[name]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


def settle_attention(config: Any, world: World, kept: str = "auto") -> Any:
    return resume.settle_attention(config, describe_model(config.model), world, kept)


class Ranks(World):
    """Two ranks, of which the other one has these backends and seconds."""

    others: dict[str, float]

    def gather(self, value: Any, group: Any = None) -> list[Any]:
        return [value, self.others if isinstance(value, dict) else list(self.others)]


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        ({}, []),
        ({"sdpa": 1.0}, []),
        ({"sdpa": 1.0, "cudnn": 0.5}, ["--model.attention=sdpa"]),
        ({"sdpa": 1.0, "cudnn": 0.5}, ["--model.forward=stock"]),
        ({"sdpa": 1.0, "flash2": 0.5}, ["--model.deterministic=true"]),
    ],
    ids=["no GPU", "one backend", "named", "stock", "deterministic"],
)
def test_where_nothing_is_to_be_chosen_nothing_changes(
    seconds: dict[str, float],
    words: list[str],
    machine: Machine,
    tiny_run: TinyRun,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine.seconds = seconds
    if not seconds:  # there is no GPU
        monkeypatch.undo()
        monkeypatch.setattr(resume, "backend_report", None)
    config = tiny_run(*words)
    assert settle_attention(config, SINGLE_PROCESS) is config and not machine.timed


def test_ranks_agree_on_the_one_whose_slowest_rank_is_fastest(
    machine: Machine, tiny_run: TinyRun
) -> None:
    world = Ranks(size=2, dp_replicate=2)
    own = {"cudnn": 3.0, "sdpa": 2.0, "flash3": 1.0}
    other = {"cudnn": 1.0, "sdpa": 2.5}
    chosen = []
    for machine.seconds, others in ((own, other), (other, own)):
        object.__setattr__(world, "others", others)
        chosen.append(settle_attention(tiny_run(), world).model.attention)
    assert chosen == ["sdpa", "sdpa"], (
        "flash3 is on one rank alone, and cudnn takes 3 s on the slower one"
    )
    object.__setattr__(world, "others", {"cudnn": 1.0})
    assert settle_attention(tiny_run(), world, kept="sdpa").model.attention == "auto", (
        "one is left"
    )


@pytest.mark.usefixtures("nothing_drawn")
def test_a_run_keeps_its_choice_and_says_so_where_it_is_gone(
    machine: Machine,
    tiny_run: TinyRun,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = tiny_run("--evaluation.every=0")
    # A second one that computes on this CPU.
    monkeypatch.setitem(LIBRARIES, "xformers", LIBRARIES["reference"])  # type: ignore[misc]

    def trained(updates: int) -> Run:
        run = Run(
            replace(
                config,
                resume="auto",
                training=replace(config.training, num_updates=updates),
            )
        )
        run.train()
        return run

    machine.seconds = {"xformers": 1.0, "sdpa": 2.0}
    with caplog.at_level(logging.INFO, logger="sage_fast"):
        run = trained(1)
    (said,) = [text for text in caplog.messages if text.startswith("model.attention")]
    (batch, tokens, heads, head_dim) = machine.timed[0][1]
    assert (batch, heads, head_dim) == (4, 2, 12)
    assert (
        f"auto: xformers (xformers 1000.0 ms, sdpa 2000.0 ms; forward and backward of {tokens} "
        in said
    )
    machine.seconds["sdpa"] = 0.5
    again = trained(2)
    assert [r.trainer.config.model.attention for r in (run, again)] == ["xformers"] * 2
    assert len(machine.timed) == 2, "measured once"
    assert load_config(again.files.config).model.attention == "auto"
    checkpoint = find_checkpoint("auto", again.checkpoints, SINGLE_PROCESS)
    assert checkpoint is not None and checkpoint.state["attention"] == "xformers"
    machine.seconds = {"sdpa": 2.0}
    with caplog.at_level(logging.WARNING, logger="sage_fast"):
        assert trained(3).trainer.config.model.attention == "auto"
    assert (
        "The run's attention was computed by xformers, which cannot go on here: "
        "its library is gone."
    ) in caplog.text


# --------------------------------------------------------------------------------------
# the measurement


class Timed:
    """A library whose calls take so many seconds of a clock, the first one more, or
    fail.
    """

    def __init__(
        self, clock: list[float], seconds: float, error: type[Exception] | None = None
    ) -> None:
        self.clock = clock
        self.seconds = seconds
        self.error = error
        self.planning = 60.0

    def unavailable(self, use: Use) -> str | None:
        return None

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        if self.error is not None:
            raise self.error("no kernel image is available")
        self.clock[0] += self.seconds + self.planning
        self.planning = 0.0
        return q.clone(), q.new_zeros(q.shape[0], q.shape[2], q.shape[1])

    def backward(
        self, grad: Tensor, q: Tensor, *rest: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        self.clock[0] += 2 * self.seconds
        return q.clone(), q.clone(), q.clone()


def test_seconds_are_those_of_both_passes_and_a_library_that_fails_is_infinitely_slow(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock = [0.0]
    known = {
        "cudnn": Timed(clock, 2.0),
        "sdpa": Timed(clock, 1.0),
        "flash3": Timed(clock, 0.0, RuntimeError),
    }
    monkeypatch.setattr(attention, "LIBRARIES", LIBRARIES | known)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(resume, "time", Mock(perf_counter=lambda: clock[0]))
    use = Use(torch.device("cpu"), torch.float32, 16)
    state = torch.get_rng_state()
    found = {name: time_backend(name, (1, 8, 2, 16), use) for name in known}
    assert found == {"cudnn": 6.0, "sdpa": 3.0, "flash3": float("inf")}
    assert (
        "Attention by flash3 fails and is not taken: no kernel image is available"
        in caplog.text
    )
    assert torch.equal(state, torch.get_rng_state()), (
        "the run draws the same noise as without it"
    )
