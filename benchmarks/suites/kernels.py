"""Every op of sage_kernels against eager PyTorch and torch.compile, forward and
backward.

    python -m benchmarks kernels              on a GPU: every variant that training runs, in its type
    python -m benchmarks kernels --smoke      anywhere: tiny shapes, all of the code, no meaning in the numbers
    python -m benchmarks kernels --op adaln   some ops only

Parity comes first: an op that is further from the float64 oracle than its bound is not
timed, and the exit status is 1. Bytes are those that an operator reads and writes once
each, so GB/s of ours are what the table in kernels/README.md promises. A variant that
returns more than eager code does (an activation beside a gradient) is timed with it.

The same calls under pytest-benchmark, which stores and compares runs:

    pytest benchmarks/suites/kernels.py --benchmark-timer=benchmarks.harness.device_clock
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch

from benchmarks import harness
from benchmarks.errors import WORST
from benchmarks.results import Record, Result
from benchmarks.session import Cell, Session, timing
from sage_kernels import parity
from sage_kernels.registry import Case, OpSpec, specs
from sage_kernels.tracer import backward_call, count_op

SUITE = "kernels"
L2_BYTES = 256 * 2**20
"""Bytes over which repeated calls are spread, several times the largest L2 cache: each
call finds it cold.
"""
CONTENDERS = ("ours", "eager", "compiled")
DIRECTIONS = ("forward", "backward")
Variant = tuple[OpSpec, Case, str, str]
"""Op, shape, direction, contender."""


def cases_of(spec: OpSpec, *, smoke: bool) -> tuple[Case, ...]:
    """Shapes to time: A and B, or in smoke mode one small test shape."""
    if not smoke:
        return spec.bench_cases
    odd = (case for case in spec.test_cases if case.id.startswith("odd"))
    return (next(odd, spec.test_cases[0]),)


def check(spec: OpSpec, device: torch.device, cases: Iterable[Case]) -> Record:
    """An op against the oracle, as training calls it."""
    comparisons: list[parity.Comparison] = []
    failed: list[str] = []
    for case in cases:
        try:
            found = parity.compare(spec, case, spec.bench_dtype, device)
        except ValueError as error:
            failed.append(f"{case.id}: {error}")
            continue
        comparisons += found
        failed += [f"{case.id}: {text}" for text in parity.failures(found)]
    errors: dict[str, float] = {}
    for comparison in comparisons:
        name = str(comparison.dtype).removeprefix("torch.")
        # NaN too is beyond every bound, and JSON has neither it nor infinity
        worst = comparison.max_error if comparison.max_error < WORST else WORST
        errors[name] = max(errors.get(name, 0.0), worst)
    record = {"passed": not failed, "errors": errors}
    return record | {"reason": "; ".join(failed[:4])} if failed else record


def calls_of(
    spec: OpSpec,
    case: Case,
    direction: str,
    contender: str,
    device: torch.device,
    *,
    smoke: bool,
) -> tuple[Callable[[], object], int]:
    """(a call that rotates through sets of inputs, bytes that the fused op moves in
    it).
    """
    forward, backward = count_op(spec, case, spec.bench_dtype)
    nbytes = (forward if direction == "forward" else backward).total
    function = spec.op if contender == "ours" else spec.eager or spec.reference
    if contender == "compiled":
        torch._dynamo.reset()
        # Backward passes are repeated on one graph, which forbids reusing the saved
        # tensors' memory.
        torch._functorch.config.donated_buffer = False
        # Inductor needs a compiler for CPUs and many seconds; the smoke run only has to
        # go through.
        function = torch.compile(function, backend="aot_eager" if smoke else "inductor")
    calls: list[Callable[[], object]] = []
    # So many sets of inputs that none is in the cache when its turn comes.
    copies = 1
    if torch.cuda.is_available():
        copies = max(1, min(32, math.ceil(L2_BYTES / max(nbytes, 1))))
    for number in range(copies):
        values = spec.make_inputs(
            case, spec.bench_dtype, device, torch.Generator(device).manual_seed(number)
        )
        if direction == "forward":
            calls.append(partial(function, **values))
            continue
        if contender == "ours":
            # The operator itself, with what the model gives it beyond autograd's
            # arguments.
            calls.append(backward_call(spec, case, values))
            continue
        outputs, leaves = parity.run_forward(spec.for_case(case), function, values)
        outputs = spec.with_gradient(outputs)
        cotangents = [torch.randn_like(output) for output in outputs]
        calls.append(
            partial(
                torch.autograd.grad,
                outputs,
                list(leaves.values()),
                cotangents,
                retain_graph=True,
            )
        )
    turn = itertools.cycle(calls)
    return lambda: next(turn)(), nbytes


def chosen_ops(session: Session) -> list[OpSpec]:
    """Ops that --op names, or all."""
    every = specs()
    return [every[name] for name in session.ops or every]


def parity_cells(session: Session) -> Iterator[Cell]:
    """Every op as training calls it, which its timings rest on."""
    for spec in chosen_ops(session):
        work = partial(check, spec, session.device, cases_of(spec, smoke=session.smoke))
        yield Cell(suite=SUITE, name=f"parity {spec.name}", work=work)


def red_ops(result: Result) -> tuple[str, ...]:
    """Ops whose kernel is wrong on this device: their parity check in this result is
    red (one that has not been made says nothing about the kernel).
    """
    checks = {
        name: result["cells"].get(f"{SUITE} parity {name}", {}) for name in specs()
    }
    return tuple(
        name
        for name, record in checks.items()
        if record.get("passed") is False
        or record.get("status", "").startswith("failed")
    )


def variants(
    ops: Iterable[OpSpec], contenders: tuple[str, ...], *, smoke: bool
) -> Iterator[Variant]:
    """All that is timed, op by op; by Inductor, which compiles for seconds, at B alone."""
    for spec in ops:
        directions = DIRECTIONS if spec.differentiable else DIRECTIONS[:1]
        for case, direction, contender in itertools.product(
            cases_of(spec, smoke=smoke), directions, contenders
        ):
            if smoke or contender != "compiled" or case.id == "B":
                yield spec, case, direction, contender


def timing_cells(session: Session, contenders: tuple[str, ...]) -> Iterator[Cell]:
    """Timings of some contenders."""
    for spec, case, direction, contender in variants(
        chosen_ops(session), contenders, smoke=session.smoke
    ):
        yield Cell(
            suite=SUITE,
            name=f"{spec.name} {direction} {case.id} {contender}",
            work=partial(time_op, session, spec, case, direction, contender),
            needs=(f"{SUITE} parity {spec.name}",),
        )


def time_op(
    session: Session, spec: OpSpec, case: Case, direction: str, contender: str
) -> Record:
    """The row of one op, shape, direction and implementation."""
    call, nbytes = calls_of(
        spec, case, direction, contender, session.device, smoke=session.smoke
    )
    with torch.set_grad_enabled(direction == "backward"):
        seconds = session.time(
            call, rounds=20, calls=harness.calls_per_stretch(nbytes), warmup=3
        )
    step = f"{spec.name} {direction}"
    dtype = str(spec.bench_dtype).removeprefix("torch.")
    more = {"bytes": nbytes, "op": spec.name, "dtype": dtype}
    return {"rows": [timing(step, case.id, contender, seconds, **more)]}


bandwidth_cells = partial(timing_cells, contenders=CONTENDERS[:2])
compiled_cells = partial(timing_cells, contenders=CONTENDERS[2:])


def pytest_generate_tests(metafunc: Any) -> None:
    """Hand `test_speed` every op, shape, direction and contender."""
    found = list(
        variants(specs().values(), CONTENDERS, smoke=not torch.cuda.is_available())
    )
    ids = [
        f"{spec.name}-{case.id}-{direction}-{contender}"
        for spec, case, direction, contender in found
    ]
    metafunc.parametrize(("spec", "case", "direction", "contender"), found, ids=ids)


def test_speed(
    benchmark: Any, spec: OpSpec, case: Case, direction: str, contender: str
) -> None:
    """Time a call by pytest-benchmark, behind the same parity check."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    assert not parity.failures(parity.compare(spec, case, spec.bench_dtype, device))
    call, nbytes = calls_of(
        spec, case, direction, contender, device, smoke=device.type == "cpu"
    )
    with torch.set_grad_enabled(direction == "backward"):
        benchmark.pedantic(
            call,
            rounds=20,
            warmup_rounds=3,
            iterations=harness.calls_per_stretch(nbytes),
        )
