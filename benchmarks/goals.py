"""Ratios, shares and seconds of the full-size transformer beside their targets and floors."""

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

from benchmarks import results
from benchmarks.results import Record, Result, Rows
from benchmarks.roofline import bound
from benchmarks.workload import NUM_STEPS

SUITE = "transformer"
Value = Callable[[Rows], float | None]


class Goal(NamedTuple):
    """One figure with its target. floor: the least that will do, or the most where less is better.

    Example:
        >>> Goal("forward B vs P2", lambda rows: 1.25, 1.3, 1.2).judge(1.25)
        'within floor'
    """

    name: str
    value: Value
    target: float | None = None
    floor: float | None = None
    form: str = "{:.2f}x"
    less_is_better: bool = False

    def judge(self, value: float) -> str:
        """Verdict in words."""
        sign = -1.0 if self.less_is_better else 1.0
        if self.target is None or self.floor is None:
            return ""
        if sign * value >= sign * self.target:
            return "target met"
        return "within floor" if sign * value >= sign * self.floor else "MISSES FLOOR"


def total(shape: str, contender: str, *steps: str, times: float = 1.0) -> Value:
    """Median seconds of steps together."""

    def value(rows: Rows) -> float | None:
        found = [rows.get((SUITE, step, shape), {}).get(contender) for step in steps]
        seconds = [row["seconds"]["median"] for row in found if row is not None]
        return times * math.fsum(seconds) if len(seconds) == len(steps) else None

    return value


def ratio(step: str, shape: str, peer: str, *theirs: str) -> Value:
    """Seconds of a peer's steps (the same step, unless named) over ours."""
    ours, others = total(shape, "ours", step), total(shape, peer, *(theirs or (step,)))

    def value(rows: Rows) -> float | None:
        mine, other = ours(rows), others(rows)
        return None if mine is None or other is None else other / mine

    return value


def entry(step: str, shape: str, key: str, scale: float = 1.0) -> Value:
    """A figure of one of our rows."""

    def value(rows: Rows) -> float | None:
        row: Record = rows.get((SUITE, step, shape), {}).get("ours", {})
        return None if key not in row else scale * row[key]

    return value


def share_of_bound(step: str, shape: str) -> Value:
    """Percent of the roofline bound, with the attention backend of that row, that a step of ours reaches."""

    def value(rows: Rows) -> float | None:
        row: Record = rows.get((SUITE, step, shape), {}).get("ours", {})
        # The bound is that of the true size, which only a GPU runs.
        if "peak_memory_gb" not in row or "attention" not in row:
            return None
        seconds = bound(rows, step, shape, row["attention"])
        return None if seconds is None else 100.0 * seconds / float(row["seconds"]["median"])

    return value


def _goals() -> Iterator[Goal]:
    share, memory, seconds = "{:.1f} %", "{:.1f} GB", "{:.0f} s"
    targets = {
        "forward A P2": (1.45, 1.30),
        "forward B P2": (1.30, 1.20),
        "forward B P1": (2.00, 1.60),
        "forward B P2c": (1.10, 1.00),
        "train A P2": (1.60, 1.40),
        "train B P2": (1.45, 1.30),
    }
    compared = {"forward": ("P2", "P1", "P2c"), "train": ("P2", "P2c"), "rollout": ("P2",)}
    for step, peers in compared.items():
        for peer in peers:
            for shape in "AB":
                bounds = targets.get(f"{step} {shape} {peer}", (None, None))
                yield Goal(f"{step} {shape} vs {peer}", ratio(step, shape, peer), *bounds)
    for step, target, floor in (("forward", 90.0, 80.0), ("train", 85.0, 75.0)):
        yield Goal(f"share of its roofline bound, {step} B", share_of_bound(step, "B"), target, floor, share)
        for shape in "AB":
            yield Goal(f"MFU {step} {shape}", entry(step, shape, "share", 100.0), form=share)
    for step, target in (("train", 60.0), ("train_split", 42.0)):
        yield Goal(f"peak memory B, {step}", entry(step, "B", "peak_memory_gb"), target, 80.0, memory, True)
    for shape, target, floor in (("A", 105.0, 154.0), ("B", 280.0, 365.0)):
        yield Goal(
            f"single pass {shape} vs P2's rollout + train step",
            ratio("single_pass", shape, "P2", "rollout", "train"),
        )
        three = total(shape, "ours", "rollout", "rollout", "train", times=NUM_STEPS)
        yield Goal(f"video {shape}: rollout, anchor, train", three, target, floor, seconds, True)
        one = total(shape, "ours", "single_pass", times=NUM_STEPS)
        yield Goal(f"video {shape}: single pass, no anchor", one, form=seconds)


GOALS = tuple(_goals())


class Outcome(NamedTuple):
    """A goal in a result, as text; `measured` is "" where there is no figure."""

    name: str
    target: str
    floor: str
    measured: str
    verdict: str

    @property
    def text(self) -> str:
        return ", ".join(part for part in (self.measured, self.verdict) if part)


def outcomes(result: Result) -> list[Outcome]:
    """Every goal in a result. A step that did not pass its parity has no figure."""
    rows = results.rows(result)
    found = []
    for goal in GOALS:
        value = goal.value(rows)
        target, floor, measured = ("" if v is None else goal.form.format(v) for v in (goal.target, goal.floor, value))
        found.append(
            Outcome(goal.name, target, floor, measured, "not measured" if value is None else goal.judge(value))
        )
    return found


def lines(result: Result) -> Iterator[str]:
    """The goals of a result that has any of the transformer's figures; a smoke run is not judged."""
    if not any(suite == SUITE for suite, *_ in results.rows(result)):
        return
    form = "{:48} {:>9} {:>9} {:>9}  {}"
    yield form.format("ours", "measured", "target", "floor", "")
    for outcome in outcomes(result):
        verdict = "" if result["smoke"] and outcome.measured else outcome.verdict
        yield form.format(outcome.name, outcome.measured or "-", outcome.target, outcome.floor, verdict).rstrip()
