"""Duties of every op of the registry: parity, operator contract, compile, bytes,
refusals.
"""

import dataclasses
import itertools
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import sage_kernels
from sage_kernels import common, launch, parity, readme, registry
from sage_kernels.registry import Case, OpSpec
from sage_kernels.tracer import count_op

SPECS = registry.specs()
each_op = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())


def parity_cases() -> list[Any]:
    """The odd case in every type; float32 and bfloat16 take turns with the others, and
    the three layouts with them.
    """
    layouts: tuple[parity.Layout, ...] = ("as built", "gaps", "permuted")
    cases = []
    for spec in SPECS.values():
        for (i, case), (j, dtype) in itertools.product(
            enumerate(spec.test_cases), enumerate(spec.dtypes)
        ):
            if case != odd_case(spec) and j != i % 2:
                continue
            layout = layouts[i % 3] if case.strided else "as built"
            name = f"{spec.name}-{case.id}-{str(dtype).removeprefix('torch.')}-{layout.replace(' ', '-')}"
            cases.append(pytest.param(spec, case, dtype, layout, id=name))
    return cases


def odd_case(spec: OpSpec) -> Case:
    """A case of middling size and awkward shape."""
    return next(
        (case for case in spec.test_cases if case.id.startswith("odd")),
        spec.test_cases[0],
    )


ROWS = ("adaln", "gated_residual", "gated_residual_adaln")
SMALL = {
    name: Case(id="small", shape={"batch": 2, "tokens": 3, "width": 8}) for name in ROWS
}
SMALL |= {
    "qk_norm_rope": Case(
        id="small", shape={"batch": 2, "video": 2, "text": 2, "heads": 1, "head_dim": 4}
    ),
    "qk_norm_across_heads": Case(
        id="small",
        shape={"batch": 2, "tokens": 2, "keys": 0, "heads": 1, "head_dim": 4},
    ),
    "sde_step": Case(
        id="small", shape=registry.latent_shape(2, 2, 1, 2, 2, log_prob=1)
    ),
    "policy_loss": Case(id="small", shape=registry.latent_shape(2, 2, 1, 2, 2)),
}
"""Where an op runs many times, and its shape is another test's matter."""


def inputs_of(
    spec: OpSpec, device: torch.device, case: Case | None = None
) -> registry.Inputs:
    return spec.make_inputs(
        case or odd_case(spec), torch.float32, device, torch.Generator().manual_seed(0)
    )


def permuted(inputs: registry.Inputs) -> registry.Inputs:
    return {
        name: parity.permuted(value) if isinstance(value, Tensor) else value
        for name, value in inputs.items()
    }


class Recorder(TorchDispatchMode):
    """Remembers every operator of sage_kernels that runs, with its arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func.namespace == "sage_kernels":
            self.calls.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def cotangents_of(spec: OpSpec, inputs: registry.Inputs) -> list[Tensor]:
    outputs, _ = parity.run_forward(spec, spec.reference, inputs)
    generator = torch.Generator().manual_seed(1)
    return [
        torch.randn(output.shape, generator=generator).to(output)
        for output in spec.with_gradient(outputs)
    ]


@pytest.mark.parametrize(("spec", "case", "dtype", "layout"), parity_cases())
def test_kernel_is_as_close_to_float64_as_the_reference(
    spec: OpSpec,
    case: Case,
    dtype: torch.dtype,
    layout: parity.Layout,
    device: torch.device,
) -> None:
    comparisons = parity.compare(spec, case, dtype, device, layout=layout)
    inputs = inputs_of(spec, device, case)
    differentiable = [name for name in spec.differentiable if inputs[name] is not None]
    assert [c.tensor for c in comparisons if c.tensor.startswith("d ")] == [
        f"d {name}" for name in differentiable
    ]
    assert any(c.tensor.startswith("out") for c in comparisons)
    assert parity.failures(comparisons) == []


def assert_same_bits(
    given: list[tuple[str, Tensor]], expected: list[tuple[str, Tensor]]
) -> None:
    for (name, a), (_, b) in zip(given, expected, strict=True):
        assert torch.equal(a, b), name


on_a_gpu = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA device"
)


@pytest.mark.gpu
@on_a_gpu  # Triton's interpreter runs the programs one after another
@each_op
def test_same_input_same_bits(spec: OpSpec, device: torch.device) -> None:
    inputs = inputs_of(spec, device)
    cotangents = cotangents_of(spec, inputs)
    first, second = (parity.run(spec, spec.op, inputs, cotangents) for _ in range(2))
    assert_same_bits(first, second)


@pytest.mark.gpu
@on_a_gpu
@pytest.mark.xdist_group("memory")
@each_op
def test_shapes_of_the_model_on_a_gpu(spec: OpSpec) -> None:
    for case, dtype in itertools.product(spec.bench_cases, spec.dtypes):
        assert parity.failures(parity.compare(spec, case, dtype, "cuda")) == [], case


@each_op
def test_cpu_without_interpreter_runs_the_reference(
    spec: OpSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(common, "INTERPRETED", False)
    inputs = permuted(inputs_of(spec, torch.device("cpu")))
    given, _ = parity.run_forward(spec, spec.op, inputs)
    expected, _ = parity.run_forward(spec, spec.reference, inputs)
    for a, b in zip(given, expected, strict=True):
        assert torch.equal(a, b) and (a.ndim == 1 or a.is_contiguous())
    # The reference's backward pass is written by hand: it is held against autograd in
    # float64.
    for dtype in (torch.float32, torch.bfloat16):
        assert parity.failures(parity.compare(spec, odd_case(spec), dtype, "cpu")) == []


@pytest.mark.parametrize("name", [*ROWS, "qk_norm_rope", "qk_norm_across_heads"])
def test_a_sample_does_not_see_its_batch(name: str, device: torch.device) -> None:
    spec = SPECS[name]
    inputs = inputs_of(spec, device)
    together, _ = parity.run_forward(spec, spec.op, inputs)
    shared = ("cos", "sin")
    alone = {
        k: v[1:2] if isinstance(v, Tensor) and v.ndim > 1 and k not in shared else v
        for k, v in inputs.items()
    }
    for one, all_rows in zip(
        parity.run_forward(spec, spec.op, alone)[0], together, strict=True
    ):
        assert len(all_rows) > 1 and torch.equal(one[0], all_rows[1])


@pytest.mark.parametrize(
    "name", ["adaln", "gated_residual_adaln", "qk_norm_rope", "qk_norm_across_heads"]
)
def test_eps_is_the_one_given(name: str, device: torch.device) -> None:
    spec = SPECS[name]
    make_inputs: Any = spec.make_inputs
    other = dataclasses.replace(
        spec, make_inputs=lambda *args: make_inputs(*args) | {"eps": 0.5}
    )
    found = parity.compare(other, SMALL[name], torch.float32, device)
    assert parity.failures(found) == []
    for eps in (0.0, float("nan"), None, "1e-6"):
        with pytest.raises(
            ValueError, match=f"^{name}: eps is {eps!r}; it must be a number above zero"
        ):
            spec.op(**inputs_of(spec, device, SMALL[name]), eps=eps)


def test_a_picture_has_keys_without_queries(device: torch.device) -> None:
    spec = SPECS["qk_norm_across_heads"]
    case = next(case for case in spec.test_cases if case.id == "more-keys")
    inputs = inputs_of(spec, device, case)
    keys = inputs["k"]
    weights = inputs["q_weight"], inputs["k_weight"]
    both = spec.op(inputs["q"], keys, *weights)
    queries, alone = spec.op(keys[:, :0], keys, *weights)
    assert queries.shape == keys[:, :0].shape and torch.equal(alone, both[1])
    backward = sage_kernels.qk_norm_across_heads_backward
    tail = keys, *weights, None, None, 1e-6, True
    both = backward(inputs["q"], keys, inputs["q"], *tail)
    found = backward(keys[:, :0], keys, keys[:, :0], *tail)
    assert torch.equal(found[1], both[1]) and torch.equal(found[3], both[3])
    assert not found[2].any()


# with `--dist loadgroup` one after another: each takes 9 to 35 GB of a GPU
@pytest.mark.xdist_group("memory")
@pytest.mark.parametrize("dims", [(3, 1, 32), (1, 3, 32)], ids=["samples", "tokens"])
@pytest.mark.parametrize("name", ROWS)
def test_inputs_beyond_two_to_the_31_elements(
    name: str, dims: tuple[int, int, int], device: torch.device
) -> None:
    if (
        device.type == "cuda"
        and torch.cuda.get_device_properties(device).total_memory < 60 << 30
    ):
        pytest.skip("needs 60 GiB of GPU memory")

    def far_apart(tensor: Tensor) -> Tensor:
        # Strides of 2^30 fit 32 bits, the third sample or token does not. An address
        # that wraps around is in the first half of the buffer: wrong, but there. On a
        # CPU no other page is ever touched.
        strides = tuple(2**30 if size == 3 else 32 for size in dims[:2])
        buffer = torch.empty(2**32 + 32, dtype=tensor.dtype, device=device)
        return buffer.as_strided(dims, (*strides, 1), 2**31).copy_(tensor)

    spec = SPECS[name]
    case = Case(
        id="far apart", shape=dict(zip(("batch", "tokens", "width"), dims, strict=True))
    )
    inputs = spec.make_inputs(
        case, torch.bfloat16, device, torch.Generator().manual_seed(0)
    )
    cotangents = cotangents_of(spec, inputs)
    expected = parity.run(spec, spec.op, inputs, cotangents)
    spread = {
        k: far_apart(v) if isinstance(v, Tensor) and v.shape == dims else v
        for k, v in inputs.items()
    }
    given = parity.run(
        spec, spec.op, spread, [far_apart(cotangent) for cotangent in cotangents]
    )
    assert_same_bits(given, expected)


CONTRACT = ("test_schema", "test_autograd_registration", "test_faketensor")
"""All of opcheck but the compilation, which the next test does."""


@each_op
def test_operators_pass_opcheck(spec: OpSpec, device: torch.device) -> None:
    # Permuted, for results must be contiguous whatever the layout: the shapes that
    # opcheck compares them with are.
    inputs = permuted(inputs_of(spec, device, SMALL.get(spec.name)))
    cotangents = cotangents_of(spec, inputs)
    with Recorder() as recorder:
        parity.run(spec, spec.op, inputs, cotangents)
    names = {func.overloadpacket.__name__ for func, _, _ in recorder.calls}
    assert len(names) == (2 if spec.differentiable else 1), (
        "forward and backward are operators of their own"
    )
    for func, args, kwargs in recorder.calls:
        if func.overloadpacket.__name__.endswith("_backward"):
            # There is no second derivative: a backward op has no autograd formula.
            args, kwargs = tree_map_only(Tensor, Tensor.detach, (args, kwargs))
        torch.library.opcheck(func, args, kwargs, test_utils=CONTRACT)


@pytest.mark.parametrize(
    "dynamic", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["", "dynamic"]
)
@each_op
def test_compiles_into_one_graph(
    spec: OpSpec, dynamic: bool, device: torch.device
) -> None:
    torch._dynamo.reset()
    backend = "inductor" if device.type == "cuda" else "aot_eager"
    compiled = torch.compile(spec.op, fullgraph=True, backend=backend, dynamic=dynamic)
    inputs = inputs_of(spec, device, SMALL.get(spec.name))
    cotangents = cotangents_of(spec, inputs)
    expected = parity.run(spec, spec.op, inputs, cotangents)
    assert_same_bits(parity.run(spec, compiled, inputs, cotangents), expected)


@pytest.mark.parametrize("runs", [1, 2], ids=["kept", "recomputed"])
def test_selective_checkpointing_sees_one_operator(
    runs: int, device: torch.device
) -> None:
    spec = SPECS["gated_residual_adaln"]
    operator = torch.ops.sage_kernels.gated_residual_adaln.default
    inputs = inputs_of(spec, device, SMALL[spec.name])
    kept = [operator] if runs == 1 else []

    def block(**arguments: Any) -> list[Tensor]:
        # The square keeps the op's results for the backward pass, so that there is
        # something to recompute.
        return [output * output for output in spec.op(**arguments)]

    def checkpointed(**arguments: Any) -> list[Tensor]:
        contexts = partial(create_selective_checkpoint_contexts, kept)
        result: list[Tensor] = checkpoint(
            block, use_reentrant=False, context_fn=contexts, **arguments
        )
        return result

    cotangents = cotangents_of(spec, inputs)
    expected = parity.run(spec, block, inputs, cotangents)
    with Recorder() as recorder:
        given = parity.run(spec, checkpointed, inputs, cotangents)
    assert_same_bits(given, expected)
    assert sum(func == operator for func, _, _ in recorder.calls) == runs


@each_op
def test_a_pass_is_one_operator_that_moves_the_bytes_of_the_formula(
    spec: OpSpec,
) -> None:
    for case in (odd_case(spec), *spec.bench_cases):
        forward, backward = count_op(spec, case, torch.bfloat16)
        assert (forward.operators, backward.operators) == (
            1,
            1 if spec.differentiable else 0,
        ), case
        if case in spec.bench_cases[:2]:
            inputs = spec.make_inputs(case, torch.bfloat16, "meta", None)
            assert (forward.total, backward.total) == spec.bytes_by_formula(inputs), (
                case
            )


@pytest.mark.parametrize("name", [*ROWS, "qk_norm_rope", "qk_norm_across_heads"])
def test_gradients_of_some_inputs(name: str, device: torch.device) -> None:
    spec = SPECS[name]
    inputs = inputs_of(spec, device, SMALL.get(name))
    cotangents = cotangents_of(spec, inputs)
    expected = dict(parity.run(spec, spec.op, inputs, cotangents))
    # Each alone, and what is left where the modulation is frozen.
    unfrozen = tuple(one for one in ("x", "y") if one in inputs)
    for wanted in (unfrozen, *((one,) for one in spec.differentiable)):
        some = dataclasses.replace(spec, differentiable=wanted)
        for tensor, value in parity.run(some, spec.op, inputs, cotangents):
            assert torch.equal(value, expected[tensor])


@pytest.mark.parametrize("used", [0, 1])
def test_one_output_may_go_unused(used: int, device: torch.device) -> None:
    spec = dataclasses.replace(
        SPECS["gated_residual_adaln"], differentiable_outputs=(used,)
    )
    found = parity.compare(spec, SMALL[spec.name], torch.float32, device)
    assert parity.failures(found) == []


@each_op
def test_refuses_what_does_not_fit(spec: OpSpec, device: torch.device) -> None:
    inputs = inputs_of(spec, device)
    names = [
        name
        for name, value in inputs.items()
        if isinstance(value, Tensor) and value.dtype.is_floating_point
    ]
    for name in names:
        with pytest.raises(ValueError, match=rf"^{spec.name}: {name} .*complex64"):
            spec.op(**inputs | {name: inputs[name].to(torch.complex64)})
        with pytest.raises(
            ValueError, match=rf"^{spec.name}: .*\b{name}\b.* is None[;,]"
        ):
            spec.op(**inputs | {name: None})
    for name in names if len(names) > 1 else ():
        # Which of two arguments is at fault is a matter of taste, that the shape is
        # named is not.
        with pytest.raises(ValueError, match=rf"^{spec.name}: .* shape \("):
            spec.op(**inputs | {name: inputs[name].expand(7, *inputs[name].shape)})


def test_comparison_fails_a_wrong_gradient(device: torch.device) -> None:
    spec = SPECS["gelu_tanh"]

    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return spec.op(x)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad

    for dtype in spec.dtypes:
        failed = parity.failures(
            parity.compare(spec, odd_case(spec), dtype, device, op=Wrong.apply)
        )
        assert len(failed) == 1 and failed[0].startswith("d x")


def test_launch_table_takes_the_narrowest_row_that_fits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    narrow, hopper, wide, default = (
        launch.Launch(num_warps=warps) for warps in (1, 2, 4, 8)
    )
    table = launch.LaunchTable(
        {
            (None, None): default,
            (4096, None): wide,
            (2048, None): narrow,
            (2048, (9, 0)): hopper,
        }
    )
    assert [table.find(width) for width in (64, 2048, 2049, 4096, 4097)] == [
        narrow,
        narrow,
        wide,
        wide,
        default,
    ]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert [table.find(width, torch.device("cuda")) for width in (2048, 4096)] == [
        hopper,
        wide,
    ]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert table.find(2048, torch.device("cuda")) is narrow


def test_readme_table_is_current() -> None:
    text = readme.README.read_text("utf-8")
    assert readme.with_table(text, readme.table()) == text, (
        "run python -m sage_kernels.readme --write"
    )
