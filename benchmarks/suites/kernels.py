"""Every op of sage_kernels against eager PyTorch and torch.compile, forward and backward.

    python -m benchmarks kernels             on a GPU: every variant that training runs, in its type
    python -m benchmarks kernels --smoke     anywhere: tiny shapes, all of the code, no meaning in the numbers
    python -m benchmarks kernels --op adaln  some ops only

Parity comes first: an op that is further from the float64 oracle than its bound is not timed, and the exit status is 1.
Bytes are those that an operator reads and writes once each, so GB/s of ours are what the table in kernels/README.md
promises. A variant that returns more than eager code does (an activation beside a gradient) is timed with it.

The same calls under pytest-benchmark, for its comparisons and histograms:

    pytest benchmarks/suites/kernels.py --benchmark-timer=benchmarks.harness.device_clock
"""

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from benchmarks import harness
from benchmarks.results import Record
from benchmarks.session import Cell, Session, Suite, timing
from sage_kernels import parity
from sage_kernels.registry import Case, Inputs, OpSpec, specs
from sage_kernels.tracer import backward_call, count_op

SUITE = "kernels"
CONTENDERS = ("ours", "eager", "compiled")
DIRECTIONS = ("forward", "backward")


def cases_of(spec: OpSpec, *, smoke: bool) -> tuple[Case, ...]:
    """Shapes to time: A and B, or in smoke mode one small test shape."""
    if not smoke:
        return spec.bench_cases
    return (next((case for case in spec.test_cases if case.id.startswith("odd")), spec.test_cases[0]),)


def check(spec: OpSpec, device: torch.device, *, smoke: bool) -> Record:
    """Every test shape in every type against the oracle, and on a GPU the timed shapes too."""
    comparisons: list[parity.Comparison] = []
    failed: list[str] = []
    for case, dtype in itertools.product(spec.test_cases + (() if smoke else spec.bench_cases), spec.dtypes):
        try:
            found = parity.compare(spec, case, dtype, device)
        except ValueError as error:
            failed.append(f"{case.id}: {error}")
            continue
        comparisons += found
        failed += [f"{case.id}: {text}" for text in parity.failures(found)]
    errors = {
        str(dtype).removeprefix("torch."): max((c.max_error for c in comparisons if c.dtype == dtype), default=0.0)
        for dtype in spec.dtypes
    }
    finite = {name: value if value < float("inf") else None for name, value in errors.items()}
    return {"passed": not failed, "errors": finite} | ({"reason": "; ".join(failed[:4])} if failed else {})


class InputSets:
    """Inputs of the shape that was asked for last, kept because drawing them takes seconds."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._key, self._sets = ("", ""), list[Inputs]()

    def get(self, spec: OpSpec, case: Case, count: int) -> list[Inputs]:
        """`count` sets of inputs."""
        if self._key != (spec.name, case.id):
            self._key, self._sets = (spec.name, case.id), []
        while len(self._sets) < count:
            generator = torch.Generator().manual_seed(len(self._sets))
            self._sets.append(spec.make_inputs(case, spec.bench_dtype, self.device, generator))
        return self._sets[:count]


def calls_of(
    spec: OpSpec, case: Case, direction: str, contender: str, inputs: InputSets, *, smoke: bool
) -> tuple[Callable[[], object], int]:
    """(a call that rotates through sets of inputs, bytes that the fused op moves in it)."""
    forward, backward = count_op(spec, case, spec.bench_dtype)
    nbytes = (forward if direction == "forward" else backward).total
    function = spec.op if contender == "ours" else spec.eager or spec.reference
    if contender == "compiled":
        torch._dynamo.reset()
        # Backward passes are repeated on one graph, which forbids reusing the saved tensors' memory.
        torch._functorch.config.donated_buffer = False
        # Inductor needs a compiler for CPUs and many seconds; the smoke run only has to go through.
        function = torch.compile(function, backend="aot_eager" if smoke else "inductor")
    calls: list[Callable[[], object]] = []
    for values in inputs.get(spec, case, harness.copies_beyond_cache(nbytes)):
        if direction == "forward":
            calls.append(partial(function, **values))
            continue
        if contender == "ours":
            # The operator itself, with what the model gives it beyond autograd's arguments.
            calls.append(backward_call(spec, case, values))
            continue
        outputs, leaves = parity.run_forward(spec.for_case(case), function, values)
        outputs = spec.with_gradient(outputs)
        cotangents = [torch.randn_like(output) for output in outputs]
        calls.append(partial(torch.autograd.grad, outputs, list(leaves.values()), cotangents, retain_graph=True))
    turn = itertools.cycle(calls)
    return lambda: next(turn)(), nbytes


def cells(session: Session) -> Iterator[Cell]:
    """Parity of every op, then its timings."""
    every = specs()
    unknown = set(session.options.get("op") or []) - every.keys()
    if unknown:
        raise ValueError(f"--op {', '.join(sorted(unknown))} is no op; there are {', '.join(every)}")
    chosen = [every[name] for name in session.options.get("op") or every]
    for spec in chosen:
        work = partial(check, spec, session.device, smoke=session.smoke)
        yield Cell(suite=SUITE, name=f"parity {spec.name}", work=work)
    inputs = InputSets(session.device)
    for spec in chosen:
        for case in cases_of(spec, smoke=session.smoke):
            for direction in DIRECTIONS if spec.differentiable else DIRECTIONS[:1]:
                for contender in CONTENDERS:
                    yield Cell(
                        suite=SUITE,
                        name=f"{spec.name} {direction} {case.id} {contender}",
                        work=partial(time_op, session, spec, case, direction, contender, inputs),
                        needs=(f"{SUITE} parity {spec.name}",),
                    )


def time_op(session: Session, spec: OpSpec, case: Case, direction: str, contender: str, inputs: InputSets) -> Record:
    """The row of one op, shape, direction and implementation."""
    call, nbytes = calls_of(spec, case, direction, contender, inputs, smoke=session.smoke)
    with torch.set_grad_enabled(direction == "backward"):
        seconds = session.time(call, rounds=20, calls=harness.calls_per_stretch(nbytes), warmup=3)
    step, dtype = f"{spec.name} {direction}", str(spec.bench_dtype).removeprefix("torch.")
    return {"rows": [timing(step, case.id, contender, seconds, nbytes=nbytes, op=spec.name, dtype=dtype)]}


SUITES = (Suite(name=SUITE, cells=cells, limit=195.0),)


def pytest_generate_tests(metafunc: Any) -> None:
    """The cases of `test_speed`."""
    smoke = not torch.cuda.is_available()
    every = specs()
    found = [
        (op, case, direction)
        for op, spec in every.items()
        for case in cases_of(spec, smoke=smoke)
        for direction in (DIRECTIONS if spec.differentiable else DIRECTIONS[:1])
    ]
    ids = [f"{op}-{case.id}-{direction}" for op, case, direction in found]
    metafunc.parametrize(("op", "case", "direction"), found, ids=ids)
    metafunc.parametrize("contender", CONTENDERS)


def test_speed(benchmark: Any, op: str, case: Case, direction: str, contender: str) -> None:
    """A timing by pytest-benchmark, behind the same parity check."""
    spec, device = specs()[op], torch.device("cuda" if torch.cuda.is_available() else "cpu")
    assert not parity.failures(parity.compare(spec, case, spec.bench_dtype, device))
    call, nbytes = calls_of(spec, case, direction, contender, InputSets(device), smoke=device.type == "cpu")
    with torch.set_grad_enabled(direction == "backward"):
        benchmark.pedantic(call, rounds=20, warmup_rounds=3, iterations=harness.calls_per_stretch(nbytes))
