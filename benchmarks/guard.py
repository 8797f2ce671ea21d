"""The guard of throughput: exact budgets on any machine, and timings against a committed baseline.

    python -m benchmarks guard                      every budget of benchmarks/budgets.yaml; on a CPU the baseline
    python -m benchmarks guard --only block         one group of budgets, or the baseline alone
    python -m benchmarks guard --result RUN.json    this run against the baseline of its device
    python -m benchmarks guard --kernels FILE       with the timings of `pytest --benchmark-json FILE` in it

The run of a GPU is given: benchmarks/guard.sbatch makes one. On a CPU time is noise but for ratios: ours and diffusers'
forward take turns, some twenty seconds. What regresses is measured again before it counts. Everything else is a count:
operations, bytes, launches, kept tensors, waits, modules (`benchmarks.budgets`). Exit status 1 with a table of what
regressed, and where something that budgets.yaml requires was not measured.
"""

import argparse
import importlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks import baseline, budgets, harness
from benchmarks.baseline import Comparison
from benchmarks.budgets import Verdict
from benchmarks.results import Result
from benchmarks.session import CEILINGS, Session

BASELINE = "baseline"
"""Name of the timings for `--only`; they stand in no group of budgets."""
REPETITIONS = 2
"""Times that a flagged suite is measured again."""


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
        lines.append(form.format(budget.name, number(verdict.measured), limit, budget.unit, shown).rstrip())
    return "\n".join(lines)


def regressions(verdicts: Sequence[Verdict]) -> str:
    """Failures, with the budget's reasons; empty where nothing failed."""
    failed = [verdict for verdict in verdicts if not verdict.ok]
    if not failed:
        return ""
    lines = [table(failed)]
    for guards in dict.fromkeys((verdict.budget.guards, verdict.budget.source) for verdict in failed):
        lines.append(f"  guards against: {guards[0]} (limit: {guards[1]})")
    return "\n".join(lines)


def measure(suites: Sequence[str]) -> Result:
    """A run of these suites on this machine."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    result: Result = {"environment": harness.environment(), "smoke": False, "cells": {}}
    session = Session(device=device, smoke=False, result=result)
    ceilings = [CEILINGS] if device.type == "cuda" else []
    for suite in [
        *ceilings,
        *(s for name in suites for s in importlib.import_module(f"benchmarks.suites.{name}").SUITES),
    ]:
        session.run(suite)
    return result


def compare(given: Path | None, kernels: Path | None) -> Comparison:
    """A given run, or on a CPU one that is made now, against the baseline; what regressed is measured again.

    Raises:
        ValueError: no run is given on a GPU, or the one that is cannot be compared.
    """
    if given is not None:
        now: Result = json.loads(given.read_text("utf-8"))
    elif torch.cuda.is_available():
        raise ValueError(
            "The guard compares a run of this GPU: python -m benchmarks device --output_file RUN.json, --result."
        )
    else:
        now = measure(["cpu"])
    if kernels is not None:
        now["cells"] = now.get("cells", {}) | baseline.from_pytest_benchmark(kernels)["cells"]
    found = baseline.compare_run(now)
    own = harness.environment()["gpu"] == now["environment"]["gpu"]
    for _ in range(REPETITIONS):
        if found.flagged and own:
            found = found.confirmed(baseline.compare_run(measure(found.flagged)))
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns 1 when a budget or the baseline is broken."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks guard", description=(__doc__ or "").split("\n")[0])
    every = list(budgets.MEASUREMENTS)
    parser.add_argument("--only", action="append", choices=[*every, BASELINE], help="this alone; may be repeated")
    parser.add_argument("--result", type=Path, help="JSON file of a run; a CPU makes its own")
    parser.add_argument("--kernels", type=Path, help="JSON file of pytest-benchmark, for the figures of the kernels")
    options = parser.parse_args(argv)
    chosen = options.only or [*every, BASELINE]
    verdicts = budgets.judge(budgets.read_budgets(), [name for name in every if name in chosen])
    try:
        comparison = compare(options.result, options.kernels) if options.result or BASELINE in chosen else None
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    ok = all(verdict.ok for verdict in verdicts) and (comparison is None or comparison.ok)
    if comparison is not None:
        print(f"{comparison.table()}\n")
    if verdicts:
        failed = regressions(verdicts)
        print(table(verdicts), f"REGRESSED\n{failed}" if failed else f"All {len(verdicts)} budgets hold.", sep="\n\n")
    return 0 if ok else 1
