"""Results: which figures count, how they compare with each other, and a table of them.

The format is that of `benchmarks.session`. A timing counts when it is done and every
parity check that it needs is in the same result and has passed, so a check that is
missing is as red as one that failed.
"""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

Record = dict[str, Any]
Result = dict[str, Any]
Rows = dict[tuple[str, str, str], dict[str, Record]]
"""(suite, step, shape) -> contender -> row."""

LATE = "skipped: the time is used up"
"""Status of a cell that waits for another run."""
COMPLETE = ("done", "out of memory", "absent")
"""Beginnings of the status of a record that needs no more work."""


def read_result(path: Path) -> Result:
    """The result of a file.

    Raises:
        ValueError: the file does not hold a benchmark's result.
    """
    try:
        content = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    result: Result = content if isinstance(content, dict) else {}
    environment = result.get("environment")
    cells = result.get("cells")
    if not (
        isinstance(environment, dict)
        and "gpu" in environment
        and isinstance(cells, dict)
    ):
        raise ValueError(
            f'{path} has no "environment" and "cells": not a result of '
            "`python -m benchmarks`."
        )
    return result


def name_of(*parts: str) -> str:
    """How a timing is called: its suite, step, shape and contender, as far as it has
    them.
    """
    return " ".join(part for part in parts if part)


def passed(result: Result, name: str) -> bool:
    """True if a parity check was made and found nothing."""
    record = result["cells"].get(name, {})
    return record.get("status") == "done" and record.get("passed") is True


def red(result: Result, needs: Iterable[str]) -> list[str]:
    """Parity checks among these that have failed or were not made."""
    return [name for name in needs if not passed(result, name)]


def counts(result: Result, record: Record) -> bool:
    """True if the figures of a record may be shown."""
    return record["status"].startswith("done") and not red(
        result, record.get("needs", ())
    )


def rows(result: Result) -> Rows:
    """Every timing that counts."""
    found: Rows = {}
    for record in result["cells"].values():
        for row in record.get("rows", []) if counts(result, record) else []:
            found.setdefault((record["suite"], row["step"], row["shape"]), {})[
                row["contender"]
            ] = row
    return found


def ceiling(result: Result, name: str) -> float | None:
    """Rate of the device that the shares of a result are shares of: TFLOP/s of
    `matmul`, GB/s of `copy`.
    """
    rates = [
        float(row["rate"])
        for row in rows(result).get(("ceilings", name, ""), {}).values()
    ]
    return max(rates, default=None)


def ratios(result: Result) -> dict[str, float]:
    """Ours over each contender of the same step and shape, by name, seconds of an
    iteration's video and gigabytes; less is better. What failed its parity has none,
    nor have two that attended by different libraries.
    """
    found: dict[str, float] = {}
    timings = rows(result)
    for (suite, step, shape), contenders in timings.items():
        if (ours := contenders.get("ours")) is None:
            continue
        name = name_of(suite, step, shape)
        median = ours["seconds"]["median"]
        # The split gradient and the single pass stand beside the peers' training step.
        beside = contenders
        if step in ("train_split", "single_pass"):
            beside = timings.get((suite, "train", shape), {}) | contenders
        for who, row in beside.items():
            if who != "ours" and comparable(ours, row):
                # Where they took turns, the median of the turns' ratios.
                turns = ours.get("over", {}).get(who)
                found[f"{name} / {who}"] = (
                    turns["median"] if turns else median / row["seconds"]["median"]
                )
        if "videos" in ours:
            found[f"{name} seconds per video"] = median / ours["videos"]
        if "peak_memory_gb" in ours:
            found[f"{name} GB of memory"] = ours["peak_memory_gb"]
        if planned := ours.get("planned_memory_gb"):
            share = ours["peak_memory_gb"] / planned
            found[f"{name} GB of memory / planned"] = share
    return found


def comparable(ours: Record, row: Record) -> bool:
    """False where two rows, of different runs, attended by different libraries: their
    ratio would be that of these.
    """
    return bool(ours.get("attention") == row.get("attention"))


def duration(seconds: Mapping[str, float]) -> str:
    """Median and the quantiles at .2 and .8, in a unit that suits them."""
    scale = 1.0
    unit = "s"
    digits = 2
    if seconds["median"] < 1e-3:
        scale = 1e6
        unit = "µs"
        digits = 1
    elif seconds["median"] < 0.5:
        scale = 1e3
        unit = "ms"
        digits = 1
    shown = [f"{scale * seconds[name]:.{digits}f}" for name in ("median", "q20", "q80")]
    return f"{shown[0]} ({shown[1]} – {shown[2]}) {unit}"


def cells_of(row: Record, contenders: Mapping[str, Record]) -> list[str]:
    """The columns of `HEAD` for a row; "" where there is nothing."""
    ours = contenders.get("ours")
    over = ""
    if ours is not None and ours is not row and comparable(ours, row):
        over = f"{row['seconds']['median'] / ours['seconds']['median']:.2f}x"
        # they took turns: with the quantiles of these
        if turns := ours.get("over", {}).get(row["contender"]):
            over = (
                f"{1 / turns['median']:.2f}x ({1 / turns['q80']:.2f} – "
                f"{1 / turns['q20']:.2f})"
            )
    plan = ""
    if "predicted" in row:
        missed = row["seconds"]["median"] / row["predicted"]
        plan = f"{missed:.2f}x of {row['predicted']:.3g} s"
    return [
        duration(row["seconds"]),
        f"{row['rate']:.0f} {row['unit']}" if row.get("rate", 0.0) >= 1.0 else "",
        f"{row['share']:.0%}" if "share" in row else "",
        f"{row['peak_memory_gb']:.1f}" if "peak_memory_gb" in row else "",
        over,
        plan,
        row.get("note", ""),
    ]


HEAD = (
    "median (20 – 80 %)",
    "rate",
    "of ceiling",
    "peak GB",
    "over ours",
    "of the plan",
    "",
)


def table(result: Result) -> str:
    """A run in a screenful or two: every figure, and what is missing and why."""
    lines = []
    if result["smoke"]:
        lines = ["SMOKE RUN: tiny shapes. The numbers below mean nothing.", ""]
    form = "{:44} {:30} {:>13} {:>10} {:>8} {:>20} {:>16}  {}"
    lines.append(form.format("", *HEAD).rstrip())
    for (suite, step, shape), contenders in rows(result).items():
        for contender, row in contenders.items():
            name = name_of(suite, step, shape, contender)
            lines.append(form.format(name, *cells_of(row, contenders)).rstrip())
    lines += ["", *problems(result)]
    if not succeeded(result):
        lines += [
            "",
            (
                "Not everything was measured and passed. The same command goes on "
                "from here."
            ),
        ]
    return "\n".join(lines)


def problems(result: Result) -> Iterator[str]:
    """Cells without a figure, with the reason."""
    for name, record in result["cells"].items():
        if record.get("passed") is False:
            errors = ", ".join(
                f"{kind} {value:.3g}"
                for kind, value in record.get("errors", {}).items()
            )
            reason = record.get("reason") or f"errors {errors}"
            yield f"{name}: PARITY FAILED, no ratio of what needs it: {reason}"
        elif record["status"] != "done":
            yield f"{name}: {record['status']}"
        elif missing := red(result, record.get("needs", ())):
            yield f"{name}: no figure, because {missing[0]} has not passed"


def left(result: Result) -> str:
    """Number of cells by suite that wait for another run."""
    waiting = Counter(
        r["suite"] for r in result["cells"].values() if r["status"] in (LATE, "running")
    )
    return (
        ", ".join(f"{suite} {count}" for suite, count in waiting.items()) or "nothing"
    )


def succeeded(result: Result) -> bool:
    """True if everything was measured, nothing failed, and every parity check was made
    and passed.
    """
    return all(
        record["status"].startswith(COMPLETE)
        and record.get("passed") is not False
        and (record["status"] != "done" or counts(result, record))
        for record in result["cells"].values()
    )
