"""Attention against a float64 oracle, and the choice of its backend."""

import importlib
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from sage_fast.config.errors import ConfigError
from sage_fast.models.attention import attention as module
from sage_fast.models.attention.attention import (
    BACKENDS,
    attention,
    backend_report,
    resolve_backend,
)
from sage_fast.models.attention.libraries import LIBRARIES, Use
from tests.models.attention.attention_cases import (
    CASES,
    CPU,
    GPU,
    TOLERANCE,
    Inputs,
    assert_close,
    assert_matches_oracle,
    make_inputs,
    oracle,
)

ON_CPU = ("sdpa", "reference")


def run(
    inputs: Inputs, backend: str, deterministic: bool = False
) -> tuple[Tensor, ...]:
    """out, lse and gradients through autograd."""
    *leaves, grad_out = inputs
    q, k, v = (tensor.detach().requires_grad_() for tensor in leaves)
    out, lse = attention(q, k, v, backend=backend, deterministic=deterministic)
    assert out.is_contiguous() and lse.is_contiguous()
    assert out.requires_grad and not lse.requires_grad
    return out.detach(), lse, *torch.autograd.grad(out, (q, k, v), grad_out)


LAYOUTS = ("contiguous", "fused", "tokens-first")
# Every case in every type; the layouts take turns.
GRID = [
    (case, dtype, LAYOUTS[(i + j) % 3])
    for i, case in enumerate(CASES)
    for j, dtype in enumerate(TOLERANCE)
]


@pytest.mark.parametrize(("case", "dtype", "layout"), GRID, ids=str)
@pytest.mark.parametrize("backend", ON_CPU)
def test_out_lse_and_gradients_match_float64(
    backend: str, case: str, dtype: torch.dtype, layout: str
) -> None:
    inputs = make_inputs(case, dtype, layout)
    results = run(inputs, backend)
    assert_matches_oracle(results, inputs, TOLERANCE[dtype])
    assert results[1].dtype == (
        torch.float64 if dtype == torch.float64 else torch.float32
    )
    assert all(tensor.dtype == dtype for tensor in (results[0], *results[2:]))


@pytest.mark.parametrize("backend", ON_CPU)
def test_scores_of_a_thousand_do_not_overflow(backend: str) -> None:
    q, k, v, grad_out = make_inputs("odd", torch.float32)
    inputs = (q * 100, k * 100, v, grad_out)
    out, lse, *_ = run(inputs, backend)
    expected_out, expected_lse, *_ = oracle(*inputs)
    assert expected_lse.max() > 1000
    assert_close("out", out, expected_out, 1e-2)
    assert_close("lse", lse, expected_lse, 1e-6)


def test_broadcast_and_strided_gradients_reach_a_library_contiguous(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    library = type(LIBRARIES["reference"])
    backward = library.backward

    def spy(self: Any, grad_out: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
        assert grad_out.is_contiguous()
        return backward(self, grad_out, *rest)

    monkeypatch.setattr(library, "backward", spy)
    q, k, v, grad_out = make_inputs("odd", torch.float32)
    for grad in (torch.ones(()).expand_as(grad_out), grad_out.mT.contiguous().mT):
        assert_matches_oracle(run((q, k, v, grad), "reference"), (q, k, v, grad), 1e-6)


def test_ops_pass_opcheck() -> None:
    backend = "sdpa"
    q, k, v, grad_out = make_inputs("more-keys", torch.float32, "fused")
    out, lse = attention(q, k, v, backend=backend)
    torch.library.opcheck(
        module._attention_backward, (grad_out, q, k, v, out, lse, backend, False)
    )
    q, k, v = (tensor.detach().requires_grad_() for tensor in (q, k, v))
    torch.library.opcheck(module._attention, (q, k, v, backend, False))


@pytest.mark.parametrize("backend", BACKENDS)
def test_meta_tensors_need_no_library(backend: str) -> None:
    q = torch.empty(
        2, 5, 4, 128, dtype=torch.bfloat16, device="meta", requires_grad=True
    )
    k, v = torch.empty(
        2, 9, 2, 4, 128, dtype=torch.bfloat16, device="meta", requires_grad=True
    ).unbind(2)
    out, lse = attention(q, k, v, backend=backend)
    assert out.shape == q.shape and out.dtype == q.dtype and out.is_contiguous()
    assert lse.shape == (2, 4, 5) and lse.dtype == torch.float32
    gradients = torch.autograd.grad(out, (q, k, v), torch.empty_like(out))
    assert [(x.shape, x.dtype) for x in gradients] == [
        (x.shape, x.dtype) for x in (q, k, v)
    ]


# Choosing


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """`gpu(9, 0)` pretends to a GPU of that compute capability with every library
    installed, or those named.
    """
    monkeypatch.setattr(module, "_logged", set())

    def pretend(
        major: int, minor: int = 0, installed: tuple[str, ...] = BACKENDS
    ) -> None:
        monkeypatch.setattr(
            torch.cuda, "get_device_capability", lambda device=None: (major, minor)
        )
        for name in installed:
            monkeypatch.setattr(type(LIBRARIES[name]), "_missing", lambda self: None)

    return pretend


def resolve(name: str = "auto", device: torch.device = GPU, **options: Any) -> str:
    return resolve_backend(
        name, **{"device": device, "dtype": torch.bfloat16, "head_dim": 128, **options}
    )


@pytest.mark.parametrize(
    ("capability", "fastest", "deterministic"),
    [
        ((7, 5), "reference", "reference"),
        ((8, 9), "flash2", "flash2"),
        ((9, 0), "flash3", "flash3"),
        ((10, 0), "flash4", "flash4"),
        ((12, 0), "cudnn", "flash2"),
    ],
)
def test_auto_takes_the_fastest_of_each_gpu(
    gpu: Callable[..., None],
    capability: tuple[int, int],
    fastest: str,
    deterministic: str,
) -> None:
    gpu(*capability)
    assert resolve() == fastest
    assert resolve(deterministic=True) == deterministic
    assert resolve(dtype=torch.float32) == (
        "sdpa" if capability[0] == 7 else "xformers"
    )
    assert resolve(dtype=torch.float32, deterministic=True) == "sdpa"
    assert resolve(dtype=torch.float64) == "reference"


def test_auto_passes_over_what_is_not_installed(gpu: Callable[..., None]) -> None:
    gpu(9, installed=("cudnn", "flash2"))
    assert resolve() == "cudnn"
    assert resolve(head_dim=256) == "flash2"
    assert resolve(device=CPU) == "sdpa"
    assert resolve(device=CPU, dtype=torch.float64, deterministic=True) == "reference"


def test_auto_says_its_choice_and_why_once(
    gpu: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    gpu(9, installed=("cudnn",))
    with caplog.at_level(logging.INFO, logger="sage_fast"):
        for _ in range(3):
            resolve()
            resolve("sdpa", device=CPU)
    (message,) = caplog.messages
    assert message.startswith(
        "Attention on cuda:0: cudnn (not flash3: flash_attn_interface does not import"
    )


@pytest.mark.parametrize(
    "error",
    [
        "No module named 'flash_attn'",
        "flash_attn_2_cuda.so: undefined symbol: _ZN3c105",
    ],
)
def test_a_named_backend_that_does_not_import_fails_with_the_error_and_the_way_to_install_it(
    gpu: Callable[..., None], monkeypatch: pytest.MonkeyPatch, error: str
) -> None:
    def broken(name: str) -> None:
        raise ImportError(f"{error}\nmore")

    gpu(9, installed=())
    monkeypatch.setattr(importlib, "import_module", broken)
    with pytest.raises(ConfigError) as caught:
        resolve("flash2")
    message = str(caught.value)
    assert (
        f"{error})" in message
        and 'pip install --no-build-isolation "flash-attn>=2.7"' in message
    )
    assert "'flash2' cannot run on cuda:0" in message
    assert "set model.attention to auto" in message and "sdpa, reference" in message


@pytest.mark.parametrize(
    ("name", "capability", "options", "reason"),
    [
        ("flash3", (8, 0), {}, "compute capability 9.x, and this one has 8.0"),
        ("sdpa", (7, 5), {}, "bfloat16 needs a GPU of compute capability 8.x"),
        (
            "flash2",
            (9, 0),
            {"dtype": torch.float32},
            "it computes in bfloat16, float16, not in float32",
        ),
        ("cudnn", (9, 0), {"head_dim": 136}, "a multiple of 8 up to 128, not 136"),
        (
            "xformers",
            (9, 0),
            {"deterministic": True},
            "backward pass is not deterministic",
        ),
        (
            "flash4",
            (9, 0),
            {"deterministic": True},
            "deterministic on Blackwell GPUs only",
        ),
    ],
)
def test_a_named_backend_that_cannot_run_says_why(
    gpu: Callable[..., None],
    name: str,
    capability: tuple[int, int],
    options: dict[str, Any],
    reason: str,
) -> None:
    gpu(*capability)
    with pytest.raises(ConfigError, match=reason):
        resolve(name, **options)


def test_unknown_names_and_types_are_refused() -> None:
    with pytest.raises(
        ConfigError,
        match="model.attention is 'flash', but it must be auto or one of cudnn, flash2",
    ):
        resolve("flash", device=CPU)
    with pytest.raises(
        ConfigError, match="No attention backend can run on cpu in int64"
    ):
        resolve(device=CPU, dtype=torch.int64)


def test_report_names_every_backend() -> None:
    report = backend_report(CPU)
    assert tuple(report) == BACKENDS
    assert {name for name, reason in report.items() if reason is None} == set(ON_CPU)
    assert report["flash2"] == "it runs on NVIDIA GPUs, and the device is cpu"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch,
    backend: str,
    dtype: torch.dtype,
    layout: str,
    deterministic: bool,
) -> None:
    monkeypatch.setitem(CASES, "gpu", (2, 333, 1011, 4, 128))
    reason = LIBRARIES[backend].unavailable(Use(GPU, dtype, 128, deterministic))
    if reason:
        pytest.skip(reason)
    inputs = make_inputs("gpu", dtype, layout, GPU)
    results = run(inputs, backend, deterministic)
    expected = oracle(*inputs)
    reference = run(inputs, "reference")
    for name, actual, plain, exact in zip(
        ("out", "lse", "dq", "dk", "dv"), results, reference, expected, strict=True
    ):
        # Rounding p and ds to half precision before their products, as kernels do,
        # costs up to this.
        bound = 4 * (plain.double() - exact).norm() + 1e-5 * exact.norm()
        assert (actual.double() - exact).norm() <= bound, name
    if deterministic:
        again = run(inputs, backend, deterministic)
        assert all(
            torch.equal(first, second)
            for first, second in zip(results, again, strict=True)
        )
