"""The guard of throughput: exact budgets on any machine, and on a GPU the committed baseline.

    python -m benchmarks guard                      every budget of benchmarks/budgets.yaml, then the baseline
    python -m benchmarks guard --only block         one group of budgets
    python -m benchmarks guard --result RUN.json    this run against the baseline of its device

On a CPU time is noise, so what is held there are counts: operations, bytes, launches, kept tensors, waits, modules
(`benchmarks.budgets`). Seconds are compared where they mean something, as ratios within a run (`benchmarks.baseline`).
Exit status 1 with a table of what regressed.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from benchmarks import baseline, budgets
from benchmarks.budgets import Verdict


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


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns 1 when a budget or the baseline is broken."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks guard", description=(__doc__ or "").split("\n")[0])
    every = list(budgets.MEASUREMENTS)
    parser.add_argument("--only", action="append", choices=every, help="this group; may be repeated")
    parser.add_argument("--result", type=Path, help="JSON file of a run; default: the newest of this device")
    options = parser.parse_args(argv)
    verdicts = budgets.judge(budgets.read_budgets(), options.only or every)
    comparison = baseline.compare_newest(options.result) if options.result or not options.only else None
    ok = all(verdict.ok for verdict in verdicts) and (comparison is None or comparison.ok)
    print(table(verdicts))
    if comparison is not None:
        print(f"\n{comparison.table()}")
    failed = regressions(verdicts)
    print(f"\nREGRESSED\n{failed}" if failed else f"\nAll {len(verdicts)} budgets hold.")
    return 0 if ok else 1
