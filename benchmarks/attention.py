"""Every attention backend that runs here, side by side: forward and backward pass at the sizes of the transformer.

Each is first compared with float64 on a small odd size; one that is further from it than `ALLOWED` times the plain
softmax is not timed. It is a stage of `python -m benchmarks policy`.

Letters: B batch, N tokens, H heads, D head dimension.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from benchmarks import harness
from benchmarks.workload import Shape
from sage_fast.models.attention.attention import attention, attention_backward, backend_report

ALLOWED = 3.0
"""Error of a backend over the plain softmax's. The latter rounds its results alone; a flash kernel also rounds what it
multiplies in between, probabilities and their gradients. A wrong kernel is off by hundreds."""
PLAIN = "reference"
"""The backend that writes the N x N scores out: the yardstick of the others, and no contender at full size."""
PASSES = {"forward": 4, "backward": 10}
"""Operations over N^2 H D; a flash backward makes five products, one of which computes the scores again."""
WORST = 1e9
"""An error that is not finite, as a number that JSON has."""
SMALL = (1, 333, 4)
"""(B, N, H) of the comparison with float64."""


def relative_error(given: Tensor, exact: Tensor) -> float:
    """Root mean square of the difference over that of the exact values; `WORST` where it is not finite."""
    error = float((given.double() - exact).norm() / exact.norm())
    return error if math.isfinite(error) else WORST


def draw(size: Sequence[int], device: torch.device, dtype: torch.dtype, count: int = 4) -> list[Tensor]:
    """`count` tensors of normal values, the same in every run."""
    generator = torch.Generator(device).manual_seed(0)
    return [torch.randn(*size, generator=generator, device=device).to(dtype) for _ in range(count)]


def gradients(tensors: Sequence[Tensor], backend: str) -> list[Tensor]:
    """[out, dq, dk, dv] for [q, k, v, gradient of out]."""
    q, k, v, grad = tensors
    out, lse = attention(q, k, v, backend=backend)
    return [out, *attention_backward(grad, q, k, v, out, lse, backend=backend)]


def exact(tensors: Sequence[Tensor]) -> list[Tensor]:
    """`gradients` of softmax(q k^T / sqrt(D)) v in float64, by autograd."""
    q, k, v = (t.double().transpose(1, 2).requires_grad_() for t in tensors[:3])
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    out = scores.softmax(-1) @ v
    out.backward(tensors[3].double().transpose(1, 2))
    results = [out.detach(), *(t.grad for t in (q, k, v) if t.grad is not None)]
    return [t.transpose(1, 2) for t in results]


def check(device: torch.device, dtype: torch.dtype, head_dim: int) -> dict[str, dict[str, Any]]:
    """Backend -> why it does not run here, or its errors over the oracle's root mean square and whether they pass."""
    tensors = draw((*SMALL, head_dim), device, dtype)
    names = ("out", "dq", "dk", "dv")
    oracle = exact(tensors)
    plain = [relative_error(t, e) for t, e in zip(gradients(tensors, PLAIN), oracle, strict=True)]
    checked: dict[str, dict[str, Any]] = {}
    for backend, missing in backend_report(device, dtype, head_dim).items():
        if missing is not None:
            checked[backend] = {"status": missing}
            continue
        try:
            given = gradients(tensors, backend)
        except harness.FAILURES as error:
            checked[backend] = {"status": f"failed: {type(error).__name__}: {error}"}
            continue
        errors = [relative_error(t, e) for t, e in zip(given, oracle, strict=True)]
        checked[backend] = {
            "status": "checked",
            "errors": dict(zip(names, errors, strict=True)),
            "plain_errors": dict(zip(names, plain, strict=True)),
            "passed": all(error <= ALLOWED * bound for error, bound in zip(errors, plain, strict=True)),
        }
    return checked


def time_backend(
    backend: str, shape: Shape, config: dict[str, Any], device: torch.device, dtype: torch.dtype, *, rounds: int
) -> list[dict[str, Any]]:
    """A row per direction: backend, shape, direction, tokens, seconds, tflop_per_s."""
    tokens = shape.video_tokens + shape.text_tokens
    heads, head_dim = config["num_attention_heads"], config["attention_head_dim"]
    q, k, v, grad = draw((1, tokens, heads, head_dim), device, dtype)
    out, lse = attention(q, k, v, backend=backend)
    calls = {
        "forward": lambda: attention(q, k, v, backend=backend),
        "backward": lambda: attention_backward(grad, q, k, v, out, lse, backend=backend),
    }
    rows = []
    for direction, call in calls.items():
        seconds = harness.measure(call, calls=1, rounds=rounds)
        operations = PASSES[direction] * tokens**2 * heads * head_dim
        rows.append(
            {
                "backend": backend,
                "shape": shape.name,
                "direction": direction,
                "tokens": tokens,
                "seconds": asdict(seconds),
                "tflop_per_s": operations / seconds.median / 1e12,
            }
        )
    return rows


def table(checked: dict[str, dict[str, Any]], rows: Sequence[dict[str, Any]]) -> list[str]:
    """Lines for people, fastest first within a shape and direction; what failed or is missing has words instead."""
    form = "{:12} {:5} {:9} {:>10} {:>9}"
    lines = [form.format("attention", "shape", "pass", "ms", "TFLOP/s")]
    for row in sorted(rows, key=lambda r: (r["shape"], r["direction"] == "backward", r["seconds"]["median"])):
        if checked[row["backend"]].get("passed"):
            lines.append(
                form.format(
                    row["backend"],
                    row["shape"],
                    row["direction"],
                    f"{row['seconds']['median'] * 1e3:.3f}",
                    f"{row['tflop_per_s']:.1f}",
                )
            )
    for backend, found in checked.items():
        if found["status"] != "checked":
            lines.append(f"{backend:12} not run: {found['status']}")
        elif not found["passed"]:
            errors = ", ".join(f"{name} {error:.2g}" for name, error in found["errors"].items())
            lines.append(f"{backend:12} PARITY FAILED, not timed: relative errors {errors}")
    return lines
