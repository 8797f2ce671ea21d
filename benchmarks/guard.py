"""The guard of throughput: exact budgets on any machine, and on a GPU the committed baseline.

    python -m benchmarks guard                      every budget of benchmarks/budgets.yaml, then the baseline
    python -m benchmarks guard --only block         one group of budgets
    python -m benchmarks guard --result RUN.json    this run against the baseline of its device
    python -m benchmarks guard --json               the same for programs

On a CPU time is noise, so what is held there are counts: operations, bytes, launches, kept tensors, waits, modules. The
limits stand in benchmarks/budgets.yaml, each with what it guards against and where it comes from. Seconds are compared
where they mean something, as ratios within a run (`benchmarks.baseline`). Exit status 1 with a table of what regressed.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import yaml

import benchmarks  # noqa: F401  first, because it decides where kernels run
from benchmarks import baseline, budgets, compiled, iteration, processes
from benchmarks.workload import HUNYUAN_VIDEO_15, A, B
from sage_fast.models.transformer import Checkpointing
from sage_kernels.aot import launched_kernels
from sage_kernels.registry import specs

BUDGETS = Path(__file__).with_name("budgets.yaml")
ARCHITECTURE = 90
"""Whose compiled kernels are held: H100 and H200."""

PHASES = ("rollout", "anchor", "update")
"""Of an iteration, where the transformer may run."""

Rule = Literal["at most", "at least", "exactly"]


@dataclass(frozen=True, kw_only=True)
class Budget:
    """One limit.

    Example:
        >>> Budget(name="compile.graph_breaks", unit="", rule="exactly", limit=0, guards="", source="").holds(1)
        False
    """

    name: str
    """group.quantity, and the case behind slashes."""
    unit: str
    rule: Rule
    limit: float
    guards: str
    """What would break it."""
    source: str
    """Where the limit comes from."""

    @property
    def group(self) -> str:
        """The measurement it belongs to, a key of `MEASUREMENTS`."""
        return self.name.split(".")[0]

    def holds(self, value: float | None) -> bool:
        """Whether a measured value is within the limit; nothing measured is not."""
        if value is None:
            return False
        return {"at most": value <= self.limit, "at least": value >= self.limit, "exactly": value == self.limit}[
            self.rule
        ]


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """A budget beside what was measured; None where nothing was.

    Example: `Verdict(budget=..., measured=13.25, ok=True)`
    """

    budget: Budget
    measured: float | None
    ok: bool


def read_budgets(path: Path = BUDGETS) -> list[Budget]:
    """The limits of a file, a table of limits being one budget per case.

    Raises:
        ValueError: an entry lacks a field, has one too many, an unknown rule or group, or a limit that is no number.
    """
    found: list[Budget] = []
    fields = {"name", "unit", "limit", "guards", "source"}
    for entry in yaml.safe_load(path.read_text("utf-8"))["budgets"]:
        if not fields <= entry.keys() <= fields | {"rule"}:
            raise ValueError(
                f"{path.name}: entry {entry.get('name')!r} has the fields {sorted(entry)}; it needs {sorted(fields)}, "
                "and may have rule."
            )
        rule = entry.get("rule", "at most")
        if rule not in get_args(Rule):
            raise ValueError(f"{path.name}: {entry['name']} has the rule {rule!r}; rules are {list(get_args(Rule))}.")
        for case, limit in _cases(entry["limit"]):
            if isinstance(limit, bool) or not isinstance(limit, int | float):
                raise ValueError(f"{path.name}: the limit of {entry['name']}{case} is {limit!r}; it must be a number.")
            found.append(
                Budget(
                    name=f"{entry['name']}{case}",
                    unit=entry["unit"],
                    rule=rule,
                    limit=limit,
                    guards=entry["guards"],
                    source=entry["source"],
                )
            )
            if found[-1].group not in MEASUREMENTS:
                raise ValueError(
                    f"{path.name}: nothing measures {found[-1].name}; a name begins with {list(MEASUREMENTS)}."
                )
    names = [budget.name for budget in found]
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise ValueError(f"{path.name}: {repeated} stand there more than once.")
    return found


def _cases(limit: Any) -> Iterator[tuple[str, Any]]:
    """("/lora/full", number) of every case of a table, ("", number) of a single limit."""
    if not isinstance(limit, Mapping):
        yield "", limit
        return
    for key, inner in limit.items():
        for case, value in _cases(inner):
            yield f"/{key}{case}", value


# ------------------------------------------------------------------------------------------ measurements


def measure_block() -> dict[str, float]:
    """One block in the middle, at 352x624x81 with 250 text tokens."""
    found: dict[str, float] = {}
    for trained in get_args(budgets.Trained):
        for checkpointing in get_args(Checkpointing):
            cost = budgets.block_cost(A, trained, checkpointing)
            case = f"{trained}/{checkpointing}"
            found |= {
                f"block.forward_bytes/{case}": cost.forward,
                f"block.backward_bytes/{case}": cost.backward,
                f"block.recomputed_bytes/{case}": cost.recomputed,
                f"block.forward_flops/{case}": cost.forward_flops,
                f"block.backward_flops/{case}": cost.backward_flops,
                f"block.launches/{case}": cost.launches,
                f"block.kept/{case}": cost.kept,
                f"block.largest_tensor/{case}": cost.largest,
                f"block.host_syncs/{case}": len(cost.syncs),
            }
    return found


def measure_forward() -> dict[str, float]:
    """The whole packed forward of one sample at the true configuration."""
    layers = HUNYUAN_VIDEO_15["num_layers"]
    found: dict[str, float] = {}
    for shape in (A, B):
        # A transformer each: the second forward of one would find its modulation in the table.
        transformer = budgets.accelerated(layers, "nothing")
        cost = budgets.forward_cost(shape, transformer)
        found |= {
            "forward.parameters": sum(weight.numel() for weight in transformer.parameters()),
            f"forward.flops/{shape.name}": cost.flops,
            f"forward.flops_beyond_closed_form/{shape.name}": cost.flops - budgets.needed_flops(shape, layers),
            f"forward.largest_tensor/{shape.name}": cost.largest,
            f"forward.host_syncs/{shape.name}": len(cost.syncs),
        }
    return found


def measure_iteration() -> dict[str, float]:
    """An iteration of the trainer, by the way of computing the gradient, the guidance scale and the anchor's age."""
    found: dict[str, float] = {}
    for update in get_args(iteration.Update):
        for scale in (1, 6):
            for anchor, cost in iteration.count_iterations(update, scale).items():
                case = f"{update}/{scale}/{anchor}"
                elsewhere = sum(number for phase, number in cost.forwards.items() if phase not in PHASES)
                found |= {f"iteration.forwards/{case}/{phase}": cost.forwards.get(phase, 0.0) for phase in PHASES}
                found[f"iteration.forwards_elsewhere/{case}"] = elsewhere
                found[f"iteration.optimizer_updates/{case}"] = cost.updates
    return found


def measure_loop() -> dict[str, float]:
    """What the step loops of an iteration wait for, with guidance and an anchor that lies behind."""
    found: dict[str, float] = {}
    for update in get_args(iteration.Update):
        cost = iteration.watch_iteration(update, 6)
        found |= {f"loop.host_syncs/{update}/{phase}": cost.waits.get(phase, 0) for phase in PHASES}
        found[f"loop.host_syncs/{update}/elsewhere"] = sum(n for p, n in cost.waits.items() if p not in PHASES)
        found[f"loop.collectives/{update}"] = cost.collectives
    return found


def measure_kernels() -> dict[str, float]:
    """The Triton kernels as compiled for sm_90."""
    known = specs()
    rows = compiled.compiled_kernels(ARCHITECTURE)
    found: dict[str, float] = {}
    for op in known:
        found[f"kernels.registers/{op}"] = max((row.registers for row in rows if row.op == op), default=0)
    launched = {name for spec in known.values() for name in launched_kernels(spec)}
    found["kernels.local_memory"] = max(row.stack + row.local for row in rows)
    found["kernels.spills"] = sum(row.spills for row in rows)
    found["kernels.narrowest_stream"] = min(width for row in rows for width in row.widths.values())
    found["kernels.unlisted"] = len(launched ^ {row.kernel for row in rows})
    return found


def measure_imports() -> dict[str, float]:
    """Importing the package and its command line, each in a process of its own."""
    found: dict[str, float] = {}
    for module in ("sage_fast", "sage_fast.commands.cli"):
        cost = processes.import_cost(module)
        found |= {
            f"imports.seconds/{module}": cost.seconds,
            f"imports.project_modules/{module}": cost.project,
            f"imports.standard_modules/{module}": cost.standard,
            f"imports.third_party/{module}": len(cost.third_party),
        }
    return found


def measure_memory() -> dict[str, float]:
    """Peak memory of the toy run."""
    growth = processes.toy_run_growth()
    return {} if growth is None else {"memory.toy_run": growth}


MEASUREMENTS: dict[str, Callable[[], dict[str, float]]] = {
    "block": measure_block,
    "forward": measure_forward,
    "compile": lambda: {"compile.graph_breaks": budgets.graph_breaks()},
    "iteration": measure_iteration,
    "loop": measure_loop,
    "kernels": measure_kernels,
    "imports": measure_imports,
    "memory": measure_memory,
}
"""Group of budgets -> what measures all of it."""

NEEDS_PROC = ("memory",)
"""Groups that a system without /proc cannot measure; there they are left out and named."""


def judge(found: Sequence[Budget], groups: Sequence[str]) -> list[Verdict]:
    """Measure the groups and hold the budgets to them.

    Raises:
        RuntimeError: something is measured for which there is no budget.
    """
    verdicts = []
    for group in groups:
        measured = MEASUREMENTS[group]()
        mine = [budget for budget in found if budget.group == group]
        unlimited = sorted(measured.keys() - {budget.name for budget in mine})
        if unlimited:
            raise RuntimeError(f"{BUDGETS.name} has no limit for {', '.join(unlimited)}; add them there.")
        if not measured and group in NEEDS_PROC:
            continue
        for budget in mine:
            value = measured.get(budget.name)
            verdicts.append(Verdict(budget=budget, measured=value, ok=budget.holds(value)))
    return verdicts


# ------------------------------------------------------------------------------------------ tables


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
    """What failed, with what the budget guards against; empty where nothing did."""
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
    parser.add_argument("--only", action="append", choices=list(MEASUREMENTS), help="this group; may be repeated")
    parser.add_argument("--result", type=Path, help="JSON file of a run; default: the newest of this device")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    options = parser.parse_args(argv)
    groups = options.only or list(MEASUREMENTS)
    verdicts = judge(read_budgets(), groups)
    comparison = baseline.compare_newest(options.result) if options.result or not options.only else None
    ok = all(verdict.ok for verdict in verdicts) and (comparison is None or comparison.ok)
    if options.json:
        shown = {
            "ok": ok,
            "budgets": [
                asdict(verdict.budget) | {"measured": verdict.measured, "ok": verdict.ok} for verdict in verdicts
            ],
            "baseline": None if comparison is None else asdict(comparison),
        }
        print(json.dumps(shown, indent=1))
        return 0 if ok else 1
    print(table(verdicts))
    left_out = [group for group in groups if not any(verdict.budget.group == group for verdict in verdicts)]
    lines = [f"{group}: not measured, this system has no /proc" for group in left_out]
    if comparison is not None:
        lines += ["", comparison.table()]
    failed = regressions(verdicts)
    lines += ["", f"REGRESSED\n{failed}" if failed else f"All {len(verdicts)} budgets hold."]
    print("\n".join(lines))
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
