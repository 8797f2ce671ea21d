"""Times every op of sage_kernels against eager PyTorch and torch.compile, with pytest-benchmark underneath.

    python -m benchmarks kernels             on a GPU: every variant that training runs, in its type
    python -m benchmarks kernels --smoke     anywhere: tiny shapes, all of the code, no meaning in the numbers
    python -m benchmarks kernels --op adaln  some ops only

Parity comes first: an op that is further from the float64 oracle than its bound is not timed, has no ratio in the
table, and makes the exit status 1. Bytes are those that the operator reads and writes once each, so GB/s of the fused
op is what the table in kernels/README.md promises; the same bytes over the time of eager code would flatter nobody and
are not shown. A variant that returns more than eager code does (an activation beside a gradient) is timed with it.
"""

import argparse
import itertools
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import benchmarks  # noqa: F401  first, because it decides where kernels run
from benchmarks import harness, timed
from sage_kernels import parity
from sage_kernels.registry import Case, Inputs, OpSpec, specs
from sage_kernels.tracer import backward_call, count_op

DIRECTIONS = ("forward", "backward")
IMPLEMENTATIONS = ("fused", "eager", "compiled")
TARGETS = {"forward": 0.85, "backward": 0.80}
"""Share of the copy bandwidth that a memory-bound kernel aims for."""


@dataclass(kw_only=True)
class Plan:
    """What a run measures; also the pytest plugin that hands it to the benchmark below."""

    ops: list[str]
    device: torch.device
    smoke: bool
    rounds: int = 20
    specs: dict[str, OpSpec] = field(default_factory=specs)
    failures: dict[str, list[str]] = field(default_factory=dict)
    """Op -> what its parity check found, for the ops that failed."""

    _inputs: tuple[tuple[str, str], list[Inputs]] = (("", ""), [])

    def inputs(self, spec: OpSpec, case: Case, count: int) -> list[Inputs]:
        """`count` sets of inputs of a shape, kept until another shape is asked for: drawing them takes seconds."""
        if self._inputs[0] != (spec.name, case.id):
            self._inputs = ((spec.name, case.id), [])
        sets = self._inputs[1]
        while len(sets) < count:
            generator = torch.Generator().manual_seed(len(sets))
            sets.append(spec.make_inputs(case, spec.bench_dtype, self.device, generator))
        return sets[:count]

    def cases(self, spec: OpSpec) -> tuple[Case, ...]:
        """Shapes to time: A and B, or in smoke mode one small test shape."""
        if not self.smoke:
            return spec.bench_cases
        return (next((case for case in spec.test_cases if case.id.startswith("odd")), spec.test_cases[0]),)

    def check_parity(self) -> dict[str, Any]:
        """Fill `failures`. Every test shape in float32 and bfloat16, and on a GPU the timed shapes too."""
        worst: dict[str, Any] = {}
        for name in self.ops:
            spec = self.specs[name]
            cases = spec.test_cases + (() if self.smoke else spec.bench_cases)
            comparisons = []
            for case, dtype in itertools.product(cases, spec.dtypes):
                try:
                    found = parity.compare(spec, case, dtype, self.device)
                except ValueError as error:
                    self.failures.setdefault(name, []).append(f"{case.id}: {error}")
                    continue
                comparisons += found
                self._note(name, [f"{case.id}: {text}" for text in parity.failures(found)])
            worst[name] = {
                str(dtype).removeprefix("torch."): {
                    "comparisons": len(of_dtype),
                    "max_error": max(c.max_error for c in of_dtype),
                    "rms_error": max(c.rms_error for c in of_dtype),
                    "reference_rms_error": max(c.reference_rms_error for c in of_dtype),
                }
                for dtype in spec.dtypes
                if (of_dtype := [c for c in comparisons if c.dtype == dtype])
            } | {"passed": name not in self.failures}
        return worst

    def _note(self, name: str, failures: list[str]) -> None:
        if failures:
            self.failures.setdefault(name, []).extend(failures)

    @pytest.fixture
    def plan(self) -> "Plan":
        """The plan itself, for the benchmark."""
        return self

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """One benchmark per op that passed, shape, direction and implementation."""
        if "implementation" in metafunc.fixturenames:
            rows = [
                pytest.param(name, case, direction, implementation, id=f"{name}-{case.id}-{direction}-{implementation}")
                for name in self.ops
                if name not in self.failures
                for case in self.cases(self.specs[name])
                for direction in (DIRECTIONS if self.specs[name].differentiable else DIRECTIONS[:1])
                for implementation in IMPLEMENTATIONS
            ]
            metafunc.parametrize(("op", "case", "direction", "implementation"), rows)


def calls_of(
    spec: OpSpec, case: Case, direction: str, implementation: str, plan: Plan
) -> tuple[list[Callable[[], object]], int]:
    """(one call per set of inputs, bytes that the fused op moves in a call)."""
    forward, backward = count_op(spec, case, spec.bench_dtype)
    nbytes = (forward if direction == "forward" else backward).total
    function = spec.op if implementation == "fused" else spec.eager or spec.reference
    if implementation == "compiled":
        torch._dynamo.reset()
        # Backward passes are repeated on one graph, which forbids reusing the saved tensors' memory.
        torch._functorch.config.donated_buffer = False
        # Inductor needs a compiler for CPUs and many seconds; the smoke run only has to go through.
        function = torch.compile(function, backend="aot_eager" if plan.smoke else "inductor")

    calls: list[Callable[[], object]] = []
    for inputs in plan.inputs(spec, case, harness.copies_beyond_cache(nbytes)):
        if direction == "forward":
            calls.append(partial(function, **inputs))
            continue
        if implementation == "fused":
            # The operator itself, with what the model gives it beyond autograd's arguments.
            calls.append(backward_call(spec, case, inputs))
            continue
        outputs, leaves = parity.run_forward(spec.for_case(case), function, inputs)
        if spec.differentiable_outputs is not None:
            outputs = [outputs[i] for i in spec.differentiable_outputs]
        cotangents = [torch.randn_like(output) for output in outputs]
        calls.append(partial(torch.autograd.grad, outputs, list(leaves.values()), cotangents, retain_graph=True))
    return calls, nbytes


def test_speed(benchmark: Any, plan: Plan, op: str, case: Case, direction: str, implementation: str) -> None:
    """Collected by pytest through `main`; the figures stand in pytest-benchmark's JSON."""
    calls, nbytes = calls_of(plan.specs[op], case, direction, implementation, plan)
    turn = itertools.cycle(calls)
    dtype = str(plan.specs[op].bench_dtype).removeprefix("torch.")
    benchmark.extra_info.update(
        op=op, case=case.id, direction=direction, implementation=implementation, dtype=dtype, bytes=nbytes
    )
    with torch.set_grad_enabled(direction == "backward"):
        benchmark.pedantic(
            lambda: next(turn)(),
            rounds=2 if plan.smoke else plan.rounds,
            warmup_rounds=1 if plan.smoke else 3,
            iterations=harness.calls_per_stretch(nbytes),
        )


def time_kernels(plan: Plan, copy_gb_per_s: float) -> list[dict[str, Any]]:
    """Time every op that passed `check_parity`.

    Returns:
        Rows with op, case, direction, dtype, bytes, seconds per implementation, gb_per_s, share_of_copy and the ratios
        to eager and torch.compile.

    Raises:
        RuntimeError: a timing itself failed; pytest has printed why.
    """
    if len(plan.failures) == len(plan.ops):
        return []
    raw = timed.run(__file__, plan)
    return rows_of(raw, copy_gb_per_s, plan)


def run(plan: Plan) -> dict[str, Any]:
    """Parity, then the copy bandwidth, then the timings of what passed."""
    checked = plan.check_parity()
    copy = harness.copy_bandwidth(plan.device, smoke=plan.smoke)
    rows = time_kernels(plan, copy["gb_per_s"])
    return {"parity": checked, "parity_failures": plan.failures, "copy": copy, "kernels": rows}


def rows_of(raw: list[dict[str, Any]], copy_gb_per_s: float, plan: Plan) -> list[dict[str, Any]]:
    """One row per op, shape and direction from pytest-benchmark's records."""
    rows: dict[tuple[str, str, str], dict[str, Any]] = {}
    for record in raw:
        info = record["extra_info"]
        key = (info["op"], info["case"], info["direction"])
        row = rows.setdefault(
            key,
            dict(zip(("op", "case", "direction"), key, strict=True))
            | {"dtype": info["dtype"], "bytes": info["bytes"], "seconds": {}},
        )
        row["seconds"][info["implementation"]] = asdict(harness.Quantiles.of(record["stats"]["data"]))
    for row in rows.values():
        median = {name: seconds["median"] for name, seconds in row["seconds"].items()}
        row["gb_per_s"] = row["bytes"] / median["fused"] / 1e9
        row["share_of_copy"] = row["gb_per_s"] / copy_gb_per_s
        row["target_share"] = TARGETS[row["direction"]]
        row["times_eager"] = median["eager"] / median["fused"]
        row["times_compiled"] = median["compiled"] / median["fused"]
    return list(rows.values())


def table(result: dict[str, Any], *, smoke: bool) -> str:
    """The figures of a run for people. An op that failed its parity has words in place of figures."""
    lines = []
    if smoke:
        lines += ["SMOKE RUN: tiny shapes on a CPU, kernels in the interpreter. The numbers below mean nothing.", ""]
    lines.append(f"copy bandwidth {result['copy']['gb_per_s']:.1f} GB/s (bytes read and written)")
    form = "{:22} {:14} {:9} {:>9} {:>8} {:>9} {:>9} {:>11}"
    lines.append(form.format("op", "shape", "pass", "us", "GB/s", "of copy", "x eager", "x compiled"))
    for row in result["kernels"]:
        if row["op"] in result["parity_failures"]:
            continue
        lines.append(
            form.format(
                row["op"],
                row["case"],
                row["direction"],
                f"{row['seconds']['fused']['median'] * 1e6:.1f}",
                f"{row['gb_per_s']:.1f}",
                f"{row['share_of_copy']:.0%}",
                f"{row['times_eager']:.2f}",
                f"{row['times_compiled']:.2f}",
            )
        )
    for op, failures in result["parity_failures"].items():
        lines.append(f"{op:22} PARITY FAILED, no ratio: {failures[0]}")
        lines += [f"{'':22} {text}" for text in failures[1:4]]
    return "\n".join(lines)


def parser_of(command: str, description: str) -> argparse.ArgumentParser:
    """Options that the commands share."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks {command}", description=description)
    parser.add_argument("--smoke", action="store_true", help="tiny shapes and few rounds; runs without a GPU")
    parser.add_argument("--op", action="append", choices=list(specs()), help="time this op only; may be repeated")
    parser.add_argument("--output", type=Path, help="JSON file; default benchmarks/results/<gpu>/<date>-<commit>.json")
    return parser


def plan_of(options: argparse.Namespace) -> Plan:
    """The plan that the options ask for.

    Raises:
        SystemExit: there is no GPU and no --smoke.
    """
    if not torch.cuda.is_available() and not options.smoke:
        sys.exit("There is no CUDA device here: run with --smoke, or on a machine with a GPU.")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return Plan(ops=options.op or list(specs()), device=device, smoke=options.smoke)


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns 1 when an op failed its parity."""
    options = parser_of("kernels", __doc__.split("\n")[0]).parse_args(argv)
    plan = plan_of(options)
    environment = harness.environment()
    result = run(plan)
    print(table(result, smoke=plan.smoke))
    path = options.output or (None if plan.smoke else harness.result_file(environment))
    if path is not None:
        harness.write_result(path, {"environment": environment, "smoke": plan.smoke} | result)
        print(f"written to {path}")
    return 1 if plan.failures else 0


if __name__ == "__main__":
    # pytest imports this file under its real name; the plan must be of that module's class.
    from benchmarks import kernels

    sys.exit(kernels.main())
