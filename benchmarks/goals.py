"""Ratios, shares and seconds of the full-size transformer beside their targets and floors."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from benchmarks import results
from benchmarks.results import Record, Result, Rows
from benchmarks.roofline import bound
from benchmarks.workload import NUM_STEPS

SUITE = "transformer"
Value = Callable[[Rows], float | None]


@dataclass(frozen=True, kw_only=True)
class Goal:
    """One figure with what it should be. floor: the least that will do, or the most where less is better.

    Example:
        >>> Goal(name="forward B vs P2", target=1.3, floor=1.2, value=lambda rows: 1.25).judge(1.25)
        'within floor'
    """

    name: str
    value: Value
    target: float | None = None
    floor: float | None = None
    form: str = "{:.2f}x"
    less_is_better: bool = False

    def judge(self, value: float) -> str:
        """In words."""
        sign = -1.0 if self.less_is_better else 1.0
        if self.target is None or self.floor is None:
            return ""
        if sign * value >= sign * self.target:
            return "target met"
        return "within floor" if sign * value >= sign * self.floor else "MISSES FLOOR"


def total(shape: str, contender: str, *steps: str, times: float = 1.0) -> Value:
    """Median seconds of steps together."""

    def value(rows: Rows) -> float | None:
        parts = [results.median(rows, (SUITE, step, shape), contender) for step in steps]
        return None if None in parts else times * math.fsum(part for part in parts if part is not None)

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


def with_backend(value: Value, step: str, shape: str, backend: str) -> Value:
    """A figure, where that step of ours was measured with an attention backend."""

    def found(rows: Rows) -> float | None:
        row = rows.get((SUITE, step, shape), {}).get("ours", {})
        return value(rows) if row.get("attention") == backend else None

    return found


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
    bounds = {"A P2": (1.45, 1.30), "B P2": (1.30, 1.20), "B P1": (2.00, 1.60), "B P2c": (1.10, 1.00)}
    for peer in ("P2", "P1", "P2c"):
        for shape in "AB":
            target, floor = bounds.get(f"{shape} {peer}", (None, None))
            name = f"forward {shape} vs {peer}"
            yield Goal(name=name, target=target, floor=floor, value=ratio("forward", shape, peer))
    yield Goal(name="train step A vs P2", target=1.60, floor=1.40, value=ratio("train", "A", "P2"))
    yield Goal(name="train step B vs P2", target=1.45, floor=1.30, value=ratio("train", "B", "P2"))
    yield Goal(name="train step B vs P2c", value=ratio("train", "B", "P2c"))
    for shape in "AB":
        yield Goal(name=f"rollout step {shape} vs P2", value=ratio("rollout", shape, "P2"))
        both = ratio("single_pass", shape, "P2", "rollout", "train")
        yield Goal(name=f"single pass {shape} vs P2's rollout + train step", value=both)
    for step, what, target, floor in (("forward", "forward", 90.0, 80.0), ("train", "train step", 85.0, 75.0)):
        name = f"share of its roofline bound, {what} B"
        yield Goal(name=name, target=target, floor=floor, value=share_of_bound(step, "B"), form=share)
    for backend, forward, train in (("cudnn", 70.0, 52.0), ("flash3", 72.0, 56.0)):
        for step, what, target, floor in (("forward", "forward", forward, 62.0), ("train", "train step", train, 46.0)):
            mfu = with_backend(entry(step, "B", "share", 100.0), step, "B", backend)
            yield Goal(name=f"MFU {what} B with {backend}", target=target, floor=floor, value=mfu, form=share)
    for step, what in (("forward", "forward"), ("train", "train step")):
        for shape in "AB":
            yield Goal(name=f"MFU {what} {shape}", value=entry(step, shape, "share", 100.0), form=share)
    for name, step, target in (("pair", "train", 60.0), ("split", "train_split", 42.0)):
        peak = entry(step, "B", "peak_memory_gb")
        name = f"peak memory B, {name}"
        yield Goal(name=name, target=target, floor=80.0, value=peak, form=memory, less_is_better=True)
    for shape, target, floor in (("A", 105.0, 154.0), ("B", 280.0, 365.0)):
        three = total(shape, "ours", "rollout", "rollout", "train", times=NUM_STEPS)
        name = f"video {shape}: rollout, anchor, train"
        yield Goal(name=name, target=target, floor=floor, value=three, form=seconds, less_is_better=True)
        one = total(shape, "ours", "single_pass", times=NUM_STEPS)
        yield Goal(name=f"video {shape}: single pass, no anchor", value=one, form=seconds)


GOALS = tuple(_goals())


@dataclass(frozen=True, kw_only=True)
class Outcome:
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
    """Every goal in a result. What did not pass its parity has no figure."""
    rows = results.rows(result)
    found = []
    for goal in GOALS:
        value = goal.value(rows)
        target, floor, measured = ("" if v is None else goal.form.format(v) for v in (goal.target, goal.floor, value))
        verdict = "not measured" if value is None else goal.judge(value)
        found.append(Outcome(name=goal.name, target=target, floor=floor, measured=measured, verdict=verdict))
    return found


def lines(result: Result) -> Iterator[str]:
    """The goals of a result that has any of the transformer's figures, for people; a smoke run is not judged."""
    if not any(suite == SUITE for suite, *_ in results.rows(result)):
        return
    form = "{:48} {:>9} {:>9} {:>9}  {}"
    yield form.format("ours", "measured", "target", "floor", "")
    for outcome in outcomes(result):
        verdict = "" if result["smoke"] and outcome.measured else outcome.verdict
        yield form.format(outcome.name, outcome.measured or "-", outcome.target, outcome.floor, verdict).rstrip()
