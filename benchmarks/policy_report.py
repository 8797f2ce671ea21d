"""What a run of `benchmarks.policy` says: ratios and shares beside their targets, and whether it passed."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from benchmarks import attention
from benchmarks.workload import NUM_STEPS

Result = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Goal:
    """One figure with what it should be.

    Example:
        >>> Goal(name="forward B vs P2", target=1.3, floor=1.2, value=lambda result: 1.25, form="{:.2f}x").judge(1.25)
        'within floor'
    """

    name: str
    target: float | None
    floor: float | None
    """The least that will do; the most, where less is better."""
    value: Callable[[Result], float | None]
    """The figure, None where it was not measured."""
    form: str
    contenders: tuple[str, ...] = ("ours",)
    """Whose parity must be green."""
    less_is_better: bool = False

    def judge(self, value: float) -> str:
        """In words."""
        sign = -1.0 if self.less_is_better else 1.0
        if self.target is None or self.floor is None:
            return ""
        if sign * value >= sign * self.target:
            return "target met"
        return "within floor" if sign * value >= sign * self.floor else "MISSES FLOOR"


def median(result: Result, cell: str) -> float | None:
    """Median seconds of a cell that was measured."""
    found = result["policy_cells"].get(cell, {})
    return found["seconds"]["median"] if found.get("status") == "done" else None


def ratio(ours: str, *theirs: str) -> Callable[[Result], float | None]:
    """Seconds of the peer's cells together over those of ours."""

    def value(result: Result) -> float | None:
        mine, parts = median(result, ours), [median(result, cell) for cell in theirs]
        if mine is None or None in parts:
            return None
        return math.fsum(part for part in parts if part is not None) / mine

    return value


def entry(cell: str, key: str, scale: float = 1.0) -> Callable[[Result], float | None]:
    """A figure of a measured cell."""

    def value(result: Result) -> float | None:
        found = result["policy_cells"].get(cell, {})
        return found[key] * scale if found.get("status") == "done" and found.get(key) is not None else None

    return value


def recipe_seconds(shape: str, *steps: str) -> Callable[[Result], float | None]:
    """Transformer seconds of a video when each of the sampler's steps takes the given steps of ours."""

    def value(result: Result) -> float | None:
        parts = [median(result, f"{step} {shape} ours") for step in steps]
        return None if None in parts else NUM_STEPS * math.fsum(part for part in parts if part is not None)

    return value


def _goals() -> list[Goal]:
    goals: list[Goal] = []

    def add(
        name: str,
        target: float | None,
        floor: float | None,
        value: Callable[[Result], float | None],
        form: str,
        peer: str | None = None,
        less_is_better: bool = False,
    ) -> None:
        contenders = ("ours",) if peer is None else ("ours", peer)
        goals.append(
            Goal(
                name=name,
                target=target,
                floor=floor,
                value=value,
                form=form,
                contenders=contenders,
                less_is_better=less_is_better,
            )
        )

    times, share, memory, seconds = "{:.2f}x", "{:.1f} %", "{:.1f} GB", "{:.0f} s"
    add("forward A vs P2", 1.45, 1.30, ratio("forward A ours", "forward A P2"), times, "P2")
    add("forward B vs P2", 1.30, 1.20, ratio("forward B ours", "forward B P2"), times, "P2")
    add("forward A vs P1", None, None, ratio("forward A ours", "forward A P1"), times, "P1")
    add("forward B vs P1", 2.00, 1.60, ratio("forward B ours", "forward B P1"), times, "P1")
    add("forward A vs P2c", None, None, ratio("forward A ours", "forward A P2c"), times, "P2c")
    add("forward B vs P2c", 1.10, 1.00, ratio("forward B ours", "forward B P2c"), times, "P2c")
    add("train step A vs P2", 1.60, 1.40, ratio("train A ours", "train A P2"), times, "P2")
    add("train step B vs P2", 1.45, 1.30, ratio("train B ours", "train B P2"), times, "P2")
    add("train step B vs P2c", None, None, ratio("train B ours", "train B P2c"), times, "P2c")
    for shape in "AB":
        theirs = (f"rollout {shape} P2", f"train {shape} P2")
        add(f"rollout step {shape} vs P2", None, None, ratio(f"rollout {shape} ours", theirs[0]), times, "P2")
        name = f"single pass {shape} vs P2's rollout + train step"
        add(name, None, None, ratio(f"single_pass {shape} ours", *theirs), times, "P2")
    for shape in "AB":
        add(f"MFU forward {shape}", 72.0, 65.0, entry(f"forward {shape} ours", "mfu", 100.0), share)
    add("MFU train step A", None, None, entry("train A ours", "mfu", 100.0), share)
    add("MFU train step B", 62.0, 55.0, entry("train B ours", "mfu", 100.0), share)
    add("peak memory B, pair", 60.0, 80.0, entry("train B ours", "peak_memory_gb"), memory, less_is_better=True)
    add("peak memory B, split", 42.0, 80.0, entry("train_split B ours", "peak_memory_gb"), memory, less_is_better=True)
    for shape, target, floor in (("A", 105.0, 154.0), ("B", 280.0, 365.0)):
        three = recipe_seconds(shape, "rollout", "rollout", "train")
        add(f"video {shape}: rollout, anchor, train", target, floor, three, seconds, less_is_better=True)
        add(f"video {shape}: single pass, no anchor", None, None, recipe_seconds(shape, "single_pass"), seconds)
    return goals


GOALS = _goals()


def goal_records(result: Result) -> list[dict[str, Any]]:
    """The figures with what they should be, as they are kept in the JSON file.

    Example: ``{"name": "forward B vs P2", "value": 1.31, "text": "1.31x", "target": "1.30x", "floor": "1.20x",
    "verdict": "target met"}``; value and text are None where there is no figure, and the verdict says why.
    """
    records = []
    for goal in GOALS:
        red = [contender for contender in goal.contenders if contender in result["policy_failures"]]
        value = None if red else goal.value(result)
        if red:
            verdict = f"PARITY FAILED ({', '.join(red)}), no figure"
        else:
            verdict = "not measured" if value is None else goal.judge(value)
        bounds = ("" if bound is None else goal.form.format(bound) for bound in (goal.target, goal.floor))
        records.append(
            {"name": goal.name, "value": value, "text": None if value is None else goal.form.format(value)}
            | dict(zip(("target", "floor"), bounds, strict=True))
            | {"verdict": verdict}
        )
    return records


def goal_lines(result: Result, *, smoke: bool = False) -> Iterable[str]:
    """The figures beside target and floor. A red parity check has words in place of the figure; smoke is not judged."""
    form = "{:48} {:>9} {:>9} {:>9}  {}"
    yield form.format("ours", "measured", "target", "floor", "")
    for record in goal_records(result):
        verdict = "" if smoke and record["text"] else record["verdict"]
        shown = record["text"] or "-"
        yield form.format(record["name"], shown, record["target"], record["floor"], verdict).rstrip()


def cell_lines(result: Result) -> Iterable[str]:
    """Every measurement, with what was not measured and why."""
    form = "{:24} {:10} {:>9} {:>7} {:>9} {:>7} {:>8}"
    yield form.format("step, shape, contender", "keeps", "ms", "rounds", "TFLOP/s", "MFU", "peak GB")
    for name, cell in result["policy_cells"].items():
        if cell["status"] != "done":
            yield f"{name:24} {cell['status']}"
            continue
        memory = cell.get("peak_memory_gb")
        yield form.format(
            name,
            cell["checkpointing"],
            f"{cell['seconds']['median'] * 1e3:.1f}",
            cell["seconds"]["rounds"],
            f"{cell['tflop_per_s']:.1f}",
            f"{cell['mfu']:.1%}",
            "-" if memory is None else f"{memory:.1f}",
        )


def parity_lines(result: Result) -> Iterable[str]:
    """Relative errors against float64."""
    yield "{:18} {:>12} {:>12}   relative error against float64".format("parity", "velocity", "gradient")
    for name, errors in result.get("policy_parity", {}).items():
        if "status" in errors:
            yield f"{name:18} {errors['status']}"
        else:
            shown = [f"{errors[kind]:.3g}" if kind in errors else "-" for kind in ("velocity", "gradient")]
            yield f"{name:18} {shown[0]:>12} {shown[1]:>12}"
    for contender, found in result["policy_failures"].items():
        yield f"{contender:18} PARITY FAILED, no ratio: {found}"


def table(result: Result, *, smoke: bool) -> str:
    """The run in a screenful or two."""
    lines = ["SMOKE RUN: a tiny model. The numbers below mean nothing.", ""] if smoke else []
    if "matmul" in result:
        rate = result["matmul"]["tflop_per_s"]
        lines.append(f"bfloat16 product {rate:.1f} TFLOP/s; attention backend {result['attention_backend']}")
    lines += ["", *parity_lines(result)]
    if "attention" in result:
        lines += ["", *attention.table(result["attention"], result["attention_rows"])]
    lines += ["", *cell_lines(result), "", *goal_lines(result, smoke=smoke)]
    lines += [f"{stage}: not run, the budget is used up" for stage in result.get("policy_skipped", [])]
    return "\n".join(lines)


def succeeded(result: Result) -> bool:
    """Whether nothing failed. What the budget left no time for is no failure, except the parity check itself."""
    return (
        not result["policy_failures"]
        and "policy_parity" in result
        and all(found.get("passed", True) for found in result.get("attention", {}).values())
        and not any(cell["status"].startswith("failed") for cell in result["policy_cells"].values())
        and not any(found["status"].startswith("failed") for found in result.get("attention", {}).values())
    )
