"""The scalars of a GRPO loss and their cotangents, one launch for what is two dozen in eager PyTorch.

For every sample, from the terms of `policy_terms` (A advantage, S equalizer scale, c clip range, lambda KL weight):

    l    = log_ratio | ratio_norm,  times 2 std^2 if the log-probability is unnormalized;   rho = exp(l)
    loss = S max(-A rho, -A clamp(rho, 1 - c, 1 + c)) + lambda_position KL_position + lambda_velocity KL_velocity
    d loss / d l = -S A rho, or 0 where the clip holds the sample back

Source: SAGE-GRPO (arXiv 2603.21872) Eq. 15 and 43 with the reference code's sign of the KL; RatioNorm of GRPO-Guard;
the unnormalized log-probability of the public CPS code. The forward pass leaves the cotangents of the four terms beside
the loss, so the backward pass is one product.

Shapes: B batch.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sage_kernels.common import (
    Launch,
    LaunchTable,
    cdiv,
    check_ndim,
    check_shape,
    check_tensors,
    empty,
    narrow,
    on_device_of,
    runs_triton,
)
from sage_kernels.reference import grpo_objective as reference
from sage_kernels.reference.grpo_objective import Objective
from sage_kernels.reference.policy_terms import TERMS
from sage_kernels.registry import Case, Inputs, Kernel, OpSpec, nbytes, random_tensor

LAUNCHES = LaunchTable({(None, None): Launch(num_warps=1)})
BLOCK = 128
"""Samples of a program."""
PARTS = ("log_ratio", "ratio", "surrogate", "kl_position", "kl_velocity")
"""Columns of the second result of the operator; the loss and `clipped` are tensors of their own."""
NUM_TERMS, NUM_PARTS = tl.constexpr(len(TERMS)), tl.constexpr(len(PARTS))


@triton.jit
def grpo_objective_forward_kernel(
    p_terms,
    p_advantage,
    p_std,
    p_scale,
    p_loss,
    p_parts,
    p_clipped,
    p_cotangents,
    num_rows,
    clip_low,
    clip_high,
    position_weight,
    velocity_weight,
    RATIO_NORM: tl.constexpr,
    UNNORMALIZED: tl.constexpr,
    EQUALIZER: tl.constexpr,
    KL_POSITION: tl.constexpr,
    KL_VELOCITY: tl.constexpr,
    KL_EXACT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """loss (B,), parts (B, 5) in the order of `PARTS`, clipped (B,), cotangents (B, 4)."""
    o = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    m = o < num_rows
    b_gaussian = tl.load(p_terms + o * NUM_TERMS, mask=m, other=0.0).to(tl.float32)
    b_advantage = tl.load(p_advantage + o, mask=m, other=0.0).to(tl.float32)
    b_used = b_gaussian
    if RATIO_NORM:
        b_used = tl.load(p_terms + o * NUM_TERMS + 1, mask=m, other=0.0).to(tl.float32)
    b_factor = tl.full([BLOCK], 1.0, dtype=tl.float32)
    if UNNORMALIZED:
        b_std = tl.load(p_std + o, mask=m, other=0.0).to(tl.float32)
        b_factor = 2.0 * (b_std * b_std)
        b_used = b_used * b_factor
    b_ratio = tl.exp(b_used)
    b_clamped = tl.minimum(tl.maximum(b_ratio, clip_low), clip_high)
    # Written as a select, so that a ratio that is not finite reaches the loss as it does in eager PyTorch.
    b_free, b_held = -b_advantage * b_ratio, -b_advantage * b_clamped
    m_clipped = ((b_advantage > 0) & (b_ratio > clip_high)) | ((b_advantage < 0) & (b_ratio < clip_low))
    b_surrogate = tl.where(m_clipped, b_held, b_free)
    b_slope = tl.where(m_clipped, 0.0, b_free) * b_factor
    b_loss = b_surrogate
    if EQUALIZER:
        b_scale = tl.load(p_scale + o, mask=m, other=0.0).to(tl.float32)
        b_loss = b_surrogate * b_scale
        b_slope = b_slope * b_scale

    b_zero = tl.zeros([BLOCK], dtype=tl.float32)
    b_kl_position, b_kl_velocity = b_zero, b_zero
    b_c_gaussian, b_c_guard, b_c_anchor, b_c_step = b_slope, b_zero, b_zero, b_zero
    if RATIO_NORM:
        b_c_gaussian, b_c_guard = b_zero, b_slope
    if KL_POSITION:
        b_kl_position = tl.load(p_terms + o * NUM_TERMS + 2, mask=m, other=0.0).to(tl.float32)
        b_loss += position_weight * b_kl_position
        b_c_anchor = b_zero + position_weight
    if KL_VELOCITY:
        if KL_EXACT:
            b_kl_velocity = tl.load(p_terms + o * NUM_TERMS + 3, mask=m, other=0.0).to(tl.float32)
            b_c_step = b_zero + velocity_weight
        else:
            b_kl_velocity = -b_gaussian
            b_c_gaussian = b_c_gaussian - velocity_weight
        b_loss += velocity_weight * b_kl_velocity

    tl.store(p_loss + o, b_loss, mask=m)
    tl.store(p_clipped + o, m_clipped, mask=m)
    p_row = p_parts + o * NUM_PARTS
    tl.store(p_row, b_used, mask=m)
    tl.store(p_row + 1, b_ratio, mask=m)
    tl.store(p_row + 2, b_surrogate, mask=m)
    tl.store(p_row + 3, b_kl_position, mask=m)
    tl.store(p_row + 4, b_kl_velocity, mask=m)
    p_row = p_cotangents + o * NUM_TERMS
    tl.store(p_row, b_c_gaussian, mask=m)
    tl.store(p_row + 1, b_c_guard, mask=m)
    tl.store(p_row + 2, b_c_anchor, mask=m)
    tl.store(p_row + 3, b_c_step, mask=m)


@triton.jit
def grpo_objective_backward_kernel(p_grad_loss, p_cotangents, p_grad_terms, numel, BLOCK: tl.constexpr):
    """grad_terms = grad_loss * cotangents."""
    o = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    m = o < numel
    b_grad_loss = tl.load(p_grad_loss + o // NUM_TERMS, mask=m, other=0.0).to(tl.float32)
    tl.store(
        p_grad_terms + o,
        narrow(b_grad_loss * tl.load(p_cotangents + o, mask=m, other=0.0), p_grad_terms.dtype.element_ty),
        mask=m,
    )


def grpo_objective_forward(
    terms: Tensor,
    advantage: Tensor,
    std: Tensor,
    scale: Tensor,
    clip_range: float,
    ratio_norm: bool,
    unnormalized: bool,
    equalizer: bool,
    use_kl_position: bool,
    position_weight: float,
    use_kl_velocity: bool,
    velocity_weight: float,
    kl_velocity_exact: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Launch the forward kernel: loss (B,), parts (B, 5), clipped (B,) bool and cotangents (B, 4)."""
    terms, advantage, std, scale = (t.contiguous() for t in (terms, advantage, std, scale))
    rows = terms.shape[0]
    loss = empty((rows,), dtype=torch.float32, device=terms.device)
    parts = empty((rows, len(PARTS)), dtype=torch.float32, device=terms.device)
    clipped = empty((rows,), dtype=torch.bool, device=terms.device)
    cotangents = empty((rows, len(TERMS)), dtype=torch.float32, device=terms.device)
    if rows:
        with on_device_of(terms):
            grpo_objective_forward_kernel[(cdiv(rows, BLOCK),)](
                terms,
                advantage,
                std,
                scale,
                loss,
                parts,
                clipped,
                cotangents,
                rows,
                1 - clip_range,
                1 + clip_range,
                position_weight,
                velocity_weight,
                RATIO_NORM=ratio_norm,
                UNNORMALIZED=unnormalized,
                EQUALIZER=equalizer,
                KL_POSITION=use_kl_position,
                KL_VELOCITY=use_kl_velocity,
                KL_EXACT=kl_velocity_exact,
                BLOCK=BLOCK,
                num_warps=LAUNCHES.find(BLOCK, terms.device).num_warps,
                enable_fp_fusion=False,
            )
    return loss, parts, clipped, cotangents


def grpo_objective_backward(grad_loss: Tensor, cotangents: Tensor, dtype: torch.dtype) -> Tensor:
    """Launch the backward kernel: (B, 4) of `dtype` from the gradient (B,) of the loss."""
    grad_loss, cotangents = grad_loss.contiguous(), cotangents.contiguous()
    grad_terms = empty(cotangents.shape, dtype=dtype, device=cotangents.device)
    if grad_terms.numel():
        with on_device_of(cotangents):
            grpo_objective_backward_kernel[(cdiv(grad_terms.numel(), BLOCK),)](
                grad_loss,
                cotangents,
                grad_terms,
                grad_terms.numel(),
                BLOCK=BLOCK,
                num_warps=LAUNCHES.find(BLOCK, cotangents.device).num_warps,
            )
    return grad_terms


@torch.library.custom_op("sage_kernels::grpo_objective", mutates_args=())
def _forward_op(
    terms: Tensor,
    advantage: Tensor,
    std: Tensor,
    scale: Tensor,
    clip_range: float,
    ratio_norm: bool,
    unnormalized: bool,
    equalizer: bool,
    use_kl_position: bool,
    position_weight: float,
    use_kl_velocity: bool,
    velocity_weight: float,
    kl_velocity_exact: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    numbers = (
        clip_range,
        ratio_norm,
        unnormalized,
        equalizer,
        use_kl_position,
        position_weight,
        use_kl_velocity,
        velocity_weight,
        kl_velocity_exact,
    )
    if runs_triton(terms):
        return grpo_objective_forward(terms, advantage, std, scale, *numbers)
    settings: dict[str, Any] = dict(zip(SETTINGS, numbers, strict=True))
    objective = reference.grpo_objective(terms, advantage, std=std, scale=scale, **settings)
    cotangents = reference.grpo_objective_cotangents(terms, advantage, std=std, scale=scale, **settings)
    parts = torch.stack([getattr(objective, name) for name in PARTS], dim=1)
    return objective.loss.clone(), parts, objective.clipped, cotangents


SETTINGS = (
    "clip_range",
    "ratio_norm",
    "unnormalized",
    "equalizer",
    "use_kl_position",
    "position_weight",
    "use_kl_velocity",
    "velocity_weight",
    "kl_velocity_exact",
)
"""Arguments of the op that are numbers, in its order."""


@_forward_op.register_fake
def _(
    terms: Tensor,
    advantage: Tensor,
    std: Tensor,
    scale: Tensor,
    clip_range: float,
    ratio_norm: bool,
    unnormalized: bool,
    equalizer: bool,
    use_kl_position: bool,
    position_weight: float,
    use_kl_velocity: bool,
    velocity_weight: float,
    kl_velocity_exact: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows = terms.shape[0]
    return (
        terms.new_empty((rows,), dtype=torch.float32),
        terms.new_empty((rows, len(PARTS)), dtype=torch.float32),
        terms.new_empty((rows,), dtype=torch.bool),
        terms.new_empty((rows, len(TERMS)), dtype=torch.float32),
    )


@torch.library.custom_op("sage_kernels::grpo_objective_backward", mutates_args=())
def _backward_op(grad_loss: Tensor, cotangents: Tensor, dtype: torch.dtype) -> Tensor:
    if runs_triton(grad_loss):
        return grpo_objective_backward(grad_loss, cotangents, dtype)
    return (grad_loss.unsqueeze(1) * cotangents).to(dtype)


@_backward_op.register_fake
def _(grad_loss: Tensor, cotangents: Tensor, dtype: torch.dtype) -> Tensor:
    return cotangents.new_empty(cotangents.shape, dtype=dtype)


def _setup_context(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    *_, cotangents = output
    ctx.save_for_backward(cotangents)
    ctx.dtype = inputs[0].dtype
    ctx.set_materialize_grads(False)


def _backward(ctx, grad_loss, *others):  # type: ignore[no-untyped-def]
    (cotangents,) = ctx.saved_tensors
    grad_terms = None if grad_loss is None else _backward_op(grad_loss, cotangents, ctx.dtype)
    return grad_terms, *[None] * 12


_forward_op.register_autograd(_backward, setup_context=_setup_context)


def grpo_objective(
    terms: Tensor,
    advantage: Tensor,
    *,
    std: Tensor,
    scale: Tensor,
    clip_range: float,
    ratio_norm: bool = False,
    unnormalized: bool = False,
    equalizer: bool = True,
    use_kl_position: bool = False,
    position_weight: float = 0.0,
    use_kl_velocity: bool = False,
    velocity_weight: float = 0.0,
    kl_velocity_exact: bool = False,
) -> Objective:
    """Loss per sample from the terms of `policy_terms`.

    Args:
        terms: (B, 4), columns `TERMS`.
        advantage: (B,).
        std: (B,) standard deviation of each sample's step; used by `unnormalized`.
        scale: (B,) gradient equalizer S of each sample's step; used by `equalizer`.
        clip_range: c, between 0 and 1.
        ratio_norm: use GRPO-Guard's log-ratio instead of the Gaussian one.
        unnormalized: multiply the log-ratio by 2 std^2, as the public CPS code does.
        equalizer: multiply the surrogate by S.
        use_kl_position, position_weight: add weight * KL to the anchor.
        use_kl_velocity, velocity_weight: add weight * KL to the rollout policy.
        kl_velocity_exact: its exact value instead of its estimate, minus the log-ratio.

    Returns:
        `Objective`, (B,) float32 each and bool `clipped`. The gradient of `loss` flows into `terms`.

    Raises:
        ValueError: for a wrong shape, dtype or device, or a clip range or a weight out of range.
    """
    name = "grpo_objective"
    check_tensors(name, {"terms": terms, "advantage": advantage, "std": std, "scale": scale})
    check_ndim(name, "terms", terms, "(B, 4)")
    rows = terms.shape[0]
    check_shape(name, "terms", terms, (rows, len(TERMS)), "(B, 4)")
    for label, tensor in (("advantage", advantage), ("std", std), ("scale", scale)):
        check_shape(name, label, tensor, (rows,), "(B,)")
    if not 0 < clip_range < 1:
        raise ValueError(f"{name}: clip_range is {clip_range!r}; it must be between 0 and 1, for instance 1e-4")
    for label, weight in (("position_weight", position_weight), ("velocity_weight", velocity_weight)):
        if not 0 <= weight < float("inf"):
            raise ValueError(f"{name}: {label} is {weight!r}; it must be finite and not negative")
    loss, parts, clipped, _ = _forward_op(
        terms,
        advantage.detach(),
        std.detach(),
        scale.detach(),
        float(clip_range),
        ratio_norm,
        unnormalized,
        equalizer,
        use_kl_position,
        float(position_weight),
        use_kl_velocity,
        float(velocity_weight),
        kl_velocity_exact,
    )
    return Objective(loss, *parts.detach().unbind(1), clipped)  # type: ignore[call-arg]


def make_inputs(
    case: Case, dtype: torch.dtype, device: torch.device | str, generator: torch.Generator | None
) -> Inputs:
    """Inputs of a case whose ratios lie on both sides of the clip; options of the op stand in its shape."""
    rows = case.shape["batch"]
    how: dict[str, Any] = {"device": device, "generator": generator, "strided": case.strided}
    small = torch.float32 if case.mixed else dtype
    options = {key: bool(value) for key, value in case.shape.items() if key != "batch"}
    return {
        "terms": 0.25 * random_tensor(rows, len(TERMS), dtype=dtype, **how),
        "advantage": random_tensor(rows, dtype=small, **how),
        "std": random_tensor(rows, dtype=small, **how).abs(),
        "scale": random_tensor(rows, dtype=small, **how).abs(),
        "clip_range": 0.125,
        "position_weight": 0.5,
        "velocity_weight": 0.25,
        **options,
    }


def aot_kernels() -> tuple[Kernel, ...]:
    """Builds with every term switched on."""
    num_warps = LAUNCHES.find(BLOCK, torch.device("cpu")).num_warps
    pointers = ("p_terms", "p_advantage", "p_std", "p_scale", "p_loss", "p_parts", "p_cotangents")
    numbers = ("clip_low", "clip_high", "position_weight", "velocity_weight")
    switches = ("RATIO_NORM", "UNNORMALIZED", "EQUALIZER", "KL_POSITION", "KL_VELOCITY", "KL_EXACT")
    return (
        Kernel(
            name="grpo_objective_forward",
            function=grpo_objective_forward_kernel,
            signature=dict.fromkeys(pointers, "*fp32")
            | {"p_clipped": "*i1", "num_rows": "i32"}
            | dict.fromkeys(numbers, "fp32"),
            constexprs=dict.fromkeys(switches, True) | {"BLOCK": BLOCK},
            num_warps=num_warps,
            fp_fusion=False,
            unaligned=("num_rows",),
        ),
        Kernel(
            name="grpo_objective_backward",
            function=grpo_objective_backward_kernel,
            signature=dict.fromkeys(("p_grad_loss", "p_cotangents", "p_grad_terms"), "*fp32") | {"numel": "i32"},
            constexprs={"BLOCK": BLOCK},
            num_warps=num_warps,
            fp_fusion=False,
            unaligned=("numel",),
        ),
    )


SPEC = OpSpec(
    name="grpo_objective",
    formula="rho = exp(log_ratio); loss = S max(-A rho, -A clamp(rho, 1-c, 1+c)) + l_pos KL_pos + l_vel KL_vel",
    source="SAGE-GRPO (arXiv 2603.21872) Eq. 15 and 43; RatioNorm of GRPO-Guard; CPS log-probability",
    op=grpo_objective,
    reference=reference.grpo_objective,
    make_inputs=make_inputs,
    differentiable=("terms",),
    differentiable_outputs=(0,),
    test_cases=(
        Case(id="dual", shape={"batch": 64, "use_kl_position": 1, "use_kl_velocity": 1}),
        Case(id="one-sample", shape={"batch": 1, "equalizer": 0}),
        Case(id="odd-exact", shape={"batch": 333, "use_kl_velocity": 1, "kl_velocity_exact": 1, "ratio_norm": 1}),
        Case(id="strided-cps", shape={"batch": 37, "unnormalized": 1, "use_kl_position": 1}, strided=True),
        Case(id="mixed-dtypes", shape={"batch": 16, "ratio_norm": 1, "unnormalized": 1}, mixed=True),
    ),
    bench_cases=(Case(id="A", shape={"batch": 8}, mixed=True), Case(id="B", shape={"batch": 64}, mixed=True)),
    # Written forward, per sample: 10 float32 numbers and a bool. Read backward: the loss gradient and 4 cotangents.
    bytes_forward=lambda i: nbytes(i["terms"], i["advantage"], i["std"], i["scale"]) + len(i["terms"]) * 41,
    bytes_backward=lambda i: nbytes(i["terms"]) + len(i["terms"]) * 20,
    bytes_formula=("69 B", "36 B"),
    k_bf16=1.1,
    kernels=aot_kernels,
)
