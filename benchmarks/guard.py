"""The guard of throughput: exact budgets on any machine, and limits of timings.

    python -m benchmarks guard                      every budget of benchmarks/budgets.yaml; on a CPU the timings
    python -m benchmarks guard --only block         one group of budgets, or the timings alone
    python -m benchmarks guard --result RUN.json    the timings of this run

The run of a GPU is given: benchmarks/guard.sbatch makes one. On a CPU time is noise but
for ratios: contenders take turns, some forty seconds, and what is too slow is measured
again before it counts. Everything else is a count: operations, bytes, launches, kept
tensors, waits, modules (`benchmarks.budgets`). Exit status 1 with a table of what is
over its limit or was not measured.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks import budgets, harness, results
from benchmarks.budgets import Verdict
from benchmarks.device import SUITES
from benchmarks.results import Result
from benchmarks.session import Session

TIMINGS = "timings"
"""Their name for `--only`; they stand in no group of budgets."""
ATTEMPTS = 3
"""Times that a CPU is measured before a limit counts as broken."""


def number(value: float | None) -> str:
    """A figure with as many digits as it deserves."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:,.3f}"


def table(verdicts: Sequence[Verdict]) -> str:
    """Budget, measured, limit, verdict."""
    form = "{:52} {:>24} {:>32}  {:12} {}"
    lines = [form.format("budget", "measured", "limit", "unit", "")]
    for verdict in verdicts:
        budget = verdict.budget
        limit = f"{budget.rule} {number(budget.limit)}"
        shown = "ok" if verdict.ok else "FAIL"
        lines.append(
            form.format(
                budget.name, number(verdict.measured), limit, budget.unit, shown
            ).rstrip()
        )
    return "\n".join(lines)


def regressions(verdicts: Sequence[Verdict]) -> str:
    """Failures, with the budget's reasons; empty where nothing failed."""
    failed = [verdict for verdict in verdicts if not verdict.ok]
    if not failed:
        return ""
    lines = [table(failed)]
    for guards in dict.fromkeys(
        (verdict.budget.guards, verdict.budget.source) for verdict in failed
    ):
        lines.append(f"  guards against: {guards[0]} (limit: {guards[1]})")
    return "\n".join(lines)


def measure() -> Result:
    """A run of the CPU's suite on this machine."""
    result: Result = {"environment": harness.environment(), "smoke": False, "cells": {}}
    session = Session(device=torch.device("cpu"), smoke=False, result=result)
    session.run(SUITES["cpu"])
    return result


def read_run(path: Path | None) -> Result | None:
    """The run of a file; None on a CPU, which makes its own.

    Raises:
        ValueError: no run is given on a GPU, or the one that is given is not a full
            one.
    """
    if path is None:
        if torch.cuda.is_available():
            raise ValueError(
                "The guard is given the run of a GPU: python -m benchmarks device "
                "--output_file RUN.json, --result."
            )
        return None
    run = results.read_result(path)
    if run.get("smoke"):
        raise ValueError(
            f"{path} is not a full run of a benchmark: measure without --smoke."
        )
    return run


def judge_timings(given: Result | None) -> list[Verdict]:
    """Hold the timings of a given run, or of one that is made now, to their limits."""
    verdicts: list[Verdict] = []
    for _ in range(ATTEMPTS if given is None else 1):
        run = measure() if given is None else given
        found = results.ratios(run)
        limits = budgets.timing_limits("gpu" if run["environment"]["gpu"] else "cpu")
        verdicts = [Verdict(limit, found.get(limit.name)) for limit in limits]
        if all(verdict.ok for verdict in verdicts):
            break
    return verdicts


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns 1 when a budget or a limit of the timings is broken."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks guard", description=(__doc__ or "").split("\n")[0]
    )
    every = list(budgets.MEASUREMENTS)
    parser.add_argument(
        "--only",
        action="append",
        choices=[*every, TIMINGS],
        help="this alone; may be repeated",
    )
    parser.add_argument(
        "--result", type=Path, help="JSON file of a run; a CPU makes its own"
    )
    options = parser.parse_args(argv)
    chosen = options.only or [*every, TIMINGS]
    with_timings = options.result is not None or TIMINGS in chosen
    try:
        # before the counts, which take a minute
        run = read_run(options.result) if with_timings else None
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    verdicts = budgets.judge(
        budgets.read_budgets(), [name for name in every if name in chosen]
    )
    verdicts += judge_timings(run) if with_timings else []
    failed = regressions(verdicts)
    print(
        table(verdicts),
        f"REGRESSED\n{failed}" if failed else f"All {len(verdicts)} budgets hold.",
        sep="\n\n",
    )
    return 1 if failed else 0
