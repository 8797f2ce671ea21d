"""One step of a sampler: affine transition with in-kernel Gaussian noise, each input
read once.

    x' = a x + b v + std eps              eps = `philox` of (key, step, element)
    log p(x' | x) / N = -mean(eps^2) / 2 - log(std) - log(2 pi) / 2                 optional

Source: every sampler of SAGE-GRPO (arXiv 2603.21872), DanceGRPO, FlowGRPO and CPS is
this affine Gaussian transition with its own a, b, std. The state is float32 whatever
the velocity is.

The kernel is built without fused multiply-add, so that it rounds as the same formula in
eager PyTorch does. The log-probability is summed in two stages with a fixed order and
no atomics: the same inputs give the same bits.

Shapes: B batch, N elements of a sample, T tiles of a sample.
"""

import math
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Generator, Tensor

from sage_kernels import common, reference
from sage_kernels.common import load, sum_in_order
from sage_kernels.custom_op import operator
from sage_kernels.launch import Launch, cdiv, launch
from sage_kernels.philox import row_noise
from sage_kernels.registry import (
    Case,
    Device,
    Inputs,
    OpSpec,
    latent_shape,
    nbytes,
    noise_ids_of,
    random_latents,
)

BLOCK = 1024
"""Elements of a program; 8 a thread, which is one 16-byte access in bf16 and two in
fp32.
"""
INTERPRETED_BLOCK = 8192
"""The same in the interpreter, whose cost is per program. The next state does not
depend on it.
"""
SUM_BLOCK = 1024
"""Partial sums that the second stage reads at once."""
_start = partial(launch, settings=Launch(num_warps=4), fp_fusion=False)


@triton.jit
def sde_step_kernel(
    p_x,  # (B, N) float32
    p_v,  # (B, N)
    p_noise_ids,  # (B, 3) int64; None draws no noise
    p_next,  # (B, N) float32
    # (B, T) float32: sum of eps^2 of every tile; None where nobody wants a
    # log-probability
    p_partial,
    a,
    b,
    std,
    numel,
    num_tiles,
    BLOCK: tl.constexpr,
):
    """One tile of one row."""
    pid = tl.program_id(0).to(tl.int64)
    i_row = pid // num_tiles
    i_tile = pid % num_tiles
    o = i_tile * BLOCK + tl.arange(0, BLOCK)
    m = o < numel
    o_row = i_row * numel + o

    b_x = load(p_x + o_row, m)
    b_v = load(p_v + o_row, m)
    b_next = a * b_x + b * b_v
    if p_noise_ids is not None:
        b_noise = row_noise(p_noise_ids, i_row, i_tile, BLOCK)
        b_next += std * b_noise
        if p_partial is not None:
            tl.store(p_partial + pid, tl.sum(tl.where(m, b_noise * b_noise, 0.0)))
    tl.store(p_next + o_row, b_next, mask=m)


@triton.jit
def sde_log_prob_kernel(
    p_partial,  # (B, T) float32
    p_log_prob,  # (B,) float32
    log_normalizer,
    numel,
    num_tiles,
    CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The log-probability of one row from its partial sums."""
    i_row = tl.program_id(0).to(tl.int64)
    total = sum_in_order(p_partial + i_row * num_tiles, num_tiles, CHUNKS, BLOCK)
    tl.store(p_log_prob + i_row, -0.5 * (total / numel) - log_normalizer)


def launch_step(x, v, noise_ids, a, b, std, log_prob) -> tuple[Tensor, Tensor]:
    """Run the kernel, and the second stage if `log_prob`; else the second result is
    empty.
    """
    x = x.contiguous()
    v = v.contiguous()
    rows = x.shape[0]
    numel = x.shape[1:].numel()
    block = INTERPRETED_BLOCK if x.device.type == "cpu" else BLOCK
    tiles = cdiv(numel, block)
    x_next = common.empty_like(x)
    partial = None
    if log_prob:
        partial = common.empty((rows, tiles), dtype=torch.float32, device=x.device)
    ids = None if noise_ids is None else noise_ids.contiguous()
    _start(
        sde_step_kernel,
        (rows * tiles,),
        x,
        v,
        ids,
        x_next,
        partial,
        a,
        b,
        std,
        numel,
        tiles,
        BLOCK=block,
    )
    result = common.empty(
        (rows if log_prob else 0,), dtype=torch.float32, device=x.device
    )
    if partial is not None:
        _start(
            sde_log_prob_kernel,
            (rows,),
            partial,
            result,
            math.log(std) + math.log(2 * math.pi) / 2,
            numel,
            tiles,
            CHUNKS=cdiv(tiles, SUM_BLOCK),
            BLOCK=SUM_BLOCK,
        )
    return x_next, result


def _reference(x, v, noise_ids, a, b, std, log_prob) -> tuple[Tensor, Tensor]:
    if not log_prob or noise_ids is None:
        return reference.sde_step(x, v, noise_ids, a, b, std), x.new_empty(0)
    return reference.sde_step_log_prob(x, v, noise_ids, a, b, std)


_sde_step = operator(
    "sde_step(Tensor x, Tensor v, Tensor? noise_ids, float a, float b, float std, "
    "bool log_prob) -> (Tensor, Tensor)",
    launcher=launch_step,
    reference=_reference,
)


def sde_step(
    x: Tensor, v: Tensor, noise_ids: Tensor | None, a: float, b: float, std: float
) -> Tensor:
    """One step  x' = a x + b v + std eps.

    Args:
        x: (B, ...) float32 state.
        v: (B, ...) guided velocity; float32, bfloat16 or float16.
        noise_ids: (B, 3) int64, the two 32-bit words of each row's noise key and its
            step, the third word of the counter; None draws no noise, for std = 0 only.
        a, b, std: coefficients of the step.

    Returns:
        (B, ...) float32. It has no gradient; `gaussian_log_prob` has one.

    Raises:
        ValueError: for a wrong shape, dtype or device, or missing noise ids.
    """
    _check(x, v, noise_ids, a, b, std)
    return _sde_step(x, v, noise_ids, a, b, std, False)[0]


def sde_step_log_prob(
    x: Tensor, v: Tensor, noise_ids: Tensor, a: float, b: float, std: float
) -> tuple[Tensor, Tensor]:
    """`sde_step`, and the mean log-density per element (B,) float32 of the step that it
    drew; std is above 0.
    """
    _check(x, v, noise_ids, a, b, std)
    if noise_ids is None or not std > 0:
        raise ValueError(
            f"sde_step: a log-probability needs noise; std is {std!r}, noise_ids are "
            f"{'missing' if noise_ids is None else 'given'}"
        )
    return _sde_step(x, v, noise_ids, a, b, std, True)


def _check(
    x: Tensor, v: Tensor, noise_ids: Tensor | None, a: float, b: float, std: float
) -> None:
    common.check_latents("sde_step", {"x": x, "v": v}, noise_ids)
    if x.dtype != torch.float32:
        raise ValueError(
            f"sde_step: x has dtype {x.dtype}; the state is float32, a 16-bit one "
            "would lose small steps"
        )
    for name, value in (("a", a), ("b", b), ("std", std)):
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(
                f"sde_step: {name} is {value!r}, a {type(value).__name__}; it must be "
                "a number"
            )
    if noise_ids is None and std != 0:
        raise ValueError(
            f"sde_step: noise_ids are None but std is {std!r}; pass them (B, 3), or "
            "std 0"
        )


def _either(plain: Any, with_log_prob: Any) -> Any:
    return lambda log_prob=False, **inputs: (with_log_prob if log_prob else plain)(
        **inputs
    )


def _make_inputs(
    case: Case, dtype: torch.dtype, device: Device, generator: Generator | None
) -> Inputs:
    """Inputs of a case; `log_prob: 1` in its shape asks for the log-probability,
    `noise: 0` for a step without.
    """
    noisy = case.shape.get("noise", 1)
    inputs: Inputs = {
        "x": random_latents(case, torch.float32, device, generator),
        "v": random_latents(case, dtype, device, generator),
        "noise_ids": noise_ids_of(case.shape["batch"], device) if noisy else None,
        "a": 0.95,
        "b": -0.08,
        "std": 0.2 if noisy else 0.0,
    }
    return inputs | ({"log_prob": True} if case.shape.get("log_prob") else {})


SPEC = OpSpec(
    name="sde_step",
    formula="x' = a x + b v + std eps(key, step, element)",
    op=_either(sde_step, sde_step_log_prob),
    reference=_either(reference.sde_step, reference.sde_step_log_prob),
    make_inputs=_make_inputs,
    differentiable=(),
    test_cases=(
        Case(id="latents", shape=latent_shape(2, 4, 3, 6, 8)),
        Case(id="odd", shape=latent_shape(3, 3, 5, 7, 11, log_prob=1)),
        Case(id="one-element", shape=latent_shape(1, 1, 1, 1, 1, log_prob=1)),
        Case(id="strided", shape=latent_shape(2, 4, 3, 5, 6), strided=True),
        Case(id="no-noise", shape=latent_shape(2, 4, 3, 5, 7, noise=0)),
    ),
    bench_cases=(
        Case(id="A", shape=latent_shape(1, 32, 21, 22, 39)),
        Case(id="B", shape=latent_shape(1, 32, 21, 30, 52)),
        Case(id="B, no noise", shape=latent_shape(1, 32, 21, 30, 52, noise=0)),
        Case(
            id="B, log-probability", shape=latent_shape(1, 32, 21, 30, 52, log_prob=1)
        ),
    ),
    bench_dtype=torch.float32,
    letters=lambda i: {
        "S": nbytes(i["x"]),
        "S_v": nbytes(i["v"]),
        "B": len(i["x"])
        * (24 * (i["noise_ids"] is not None) + 4 * bool(i.get("log_prob"))),
    },
    bytes_formula=("2 S + S_v + B", ""),
    atol_fp32=5e-6,
    k_bf16=1.1,
)
