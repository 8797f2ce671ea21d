"""The limits of `budgets.yaml`, and what is measured to hold them: counts, which do not
depend on the machine.

Each entry of the file says what it limits, what it guards against and where the limit
comes from. A measurement without a limit is an error, and so is a limit that nothing
measures.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import yaml

import benchmarks  # noqa: F401  first, because it decides where kernels run
from benchmarks.counts import host, iteration, processes, traced
from sage_kernels.aot import RECORDS, Build, launched_kernels
from sage_kernels.registry import specs

BUDGETS = Path(__file__).with_name("budgets.yaml")
ARCHITECTURE = 90
"""Architecture of the compiled kernels: H100 and H200."""

Rule = Literal["at most", "at least", "exactly"]


@dataclass(frozen=True, kw_only=True)
class Budget:
    """One limit.

    Example: `Budget(name="kernels.spills", unit="", rule="exactly", limit=0, guards="a
    spill", source="counted")`
    """

    name: str
    """group.quantity, and the case behind slashes."""
    unit: str
    rule: Rule
    limit: float
    guards: str
    """Cause of a breach."""
    source: str
    """Where the limit comes from."""

    @property
    def group(self) -> str:
        """The measurement it belongs to, a key of `MEASUREMENTS`."""
        return self.name.split(".")[0]


class Verdict(NamedTuple):
    """A budget beside its measurement; None where nothing was measured."""

    budget: Budget
    measured: float | None

    @property
    def ok(self) -> bool:
        """True if a value was measured and is within the limit."""
        value = self.measured
        limit = self.budget.limit
        if value is None:
            return False
        return {
            "at most": value <= limit,
            "at least": value >= limit,
            "exactly": value == limit,
        }[self.budget.rule]


def read_budgets() -> list[Budget]:
    """The limits of `budgets.yaml`, a table of limits being one budget per case."""
    entries = yaml.safe_load(BUDGETS.read_text("utf-8"))["budgets"]
    return [
        Budget(
            **{"rule": "at most", **entry}
            | {"name": f"{entry['name']}{case}", "limit": limit}
        )
        for entry in entries
        for case, limit in _cases(entry["limit"])
    ]


def timing_limits(kind: str) -> list[Budget]:
    """The limits of what a run on a `cpu` or a `gpu` must have measured, see
    `results.ratios`.
    """
    limits = yaml.safe_load(BUDGETS.read_text("utf-8"))["timings"][kind]
    guards = "work, a copy or a graph that was added to our side"
    source = f"the timings in {BUDGETS.name}"
    return [
        Budget(
            name=name,
            unit="",
            rule="at most",
            limit=limit,
            guards=guards,
            source=source,
        )
        for name, limit in limits.items()
    ]


def _cases(limit: Any) -> Iterator[tuple[str, Any]]:
    """("/lora/full", number) of every case of a table, ("", number) of a single limit."""
    if not isinstance(limit, Mapping):
        yield "", limit
        return
    for key, inner in limit.items():
        for case, value in _cases(inner):
            yield f"/{key}{case}", value


# --------------------------------------------------------------------------------------
# measurements


def measure_kernels() -> dict[str, float]:
    """The Triton kernels as compiled for sm_90."""
    known = specs()
    # Building them takes minutes: `python -m sage_kernels.aot --write` does it, and a
    # test holds the file to it.
    records = json.loads(RECORDS.read_text("utf-8"))["builds"]
    rows = [Build(**row) for row in records if row["arch"] == ARCHITECTURE]
    if not rows:
        raise ValueError(
            f"{RECORDS} has no build for sm_{ARCHITECTURE}: python -m "
            "sage_kernels.aot --write."
        )
    found: dict[str, float] = {}
    for op in known:
        found[f"kernels.registers/{op}"] = max(
            (row.registers for row in rows if row.op == op), default=0
        )
    found["kernels.local_memory"] = max(row.stack + row.local for row in rows)
    found["kernels.spills"] = sum(row.spills for row in rows)
    found["kernels.narrowest_stream"] = min(
        width for row in rows for width in row.widths.values()
    )
    launched = {
        kernel
        for spec in known.values()
        for kernel in launched_kernels(spec, ARCHITECTURE)
    }
    found["kernels.unlisted"] = len(launched ^ {row.kernel for row in rows})
    return found


MEASUREMENTS: dict[str, Callable[[], dict[str, float]]] = {
    "block": traced.measure_block,
    "forward": traced.measure_forward,
    "iteration": iteration.measure_iteration,
    "loop": iteration.measure_loop,
    "kernels": measure_kernels,
    "host": host.measure_host,
    "imports": processes.measure_imports,
    "commands": processes.measure_commands,
}
"""Group of budgets -> what measures all of it."""


def judge(found: Sequence[Budget], groups: Sequence[str]) -> list[Verdict]:
    """Measure the groups and hold the budgets to them.

    Raises:
        RuntimeError: something is measured for which there is no budget.
    """
    verdicts: list[Verdict] = []
    for group in groups:
        measured = MEASUREMENTS[group]()
        mine = [budget for budget in found if budget.group == group]
        unlimited = sorted(measured.keys() - {budget.name for budget in mine})
        if unlimited:
            raise RuntimeError(
                f"{BUDGETS.name} has no limit for {', '.join(unlimited)}; add them "
                "there."
            )
        verdicts += [Verdict(budget, measured.get(budget.name)) for budget in mine]
    return verdicts
