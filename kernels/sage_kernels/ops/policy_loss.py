"""The loss of a trained step and its gradient: log-ratio, clip, gradient equalizer and
KL terms.

With the gain r = b / std, the noise eps that the rollout drew, s = r (v - v_old), t = r
(v - v_anchor), and means over the N elements of a sample (A advantage, S equalizer
scale, c clip range, w weights of the KL terms):

    l    = mean(s (eps - s / 2)) | mean(s eps),  times 2 std^2 if unnormalized;   rho = exp(l)
    loss = S max(-A rho, -A clamp(rho, 1 - c, 1 + c)) + w_position mean(t^2) / 2 + w_velocity KL_velocity
    KL_velocity = -mean(s (eps - s / 2))
    d loss/dv = k_0 eps + k_1 (v - v_old) + k_2 (v - v_anchor)

Source: the log-density ratio and the KL divergence of N(a x + b v, std^2 I) and N(a x +
b v_old, std^2 I), Eq. 15 and 43 of SAGE-GRPO (arXiv 2603.21872) with the reference
code's sign of the KL; RatioNorm of GRPO-Guard; the unnormalized log-probability of the
public CPS code. No log-probability is formed: the difference of two rounded ones is
noise of the size of the clip range.

Three launches. The first leaves three sums of every tile; the second, one program a
sample, adds them in a fixed order, without atomics, and finishes the loss and k_0, k_1,
k_2; the third, in the backward pass, is elementwise. The noise is drawn again from its
key each time, so neither x nor x' is read. Kernels are built without fused
multiply-add, as in `sde_step`.

Shapes: B batch, N elements of a sample, T tiles of a sample.
"""

from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Generator, Tensor

from sage_kernels import common, reference, registry
from sage_kernels.common import load, store, sum_in_order
from sage_kernels.custom_op import operator
from sage_kernels.launch import Launch, cdiv, launch
from sage_kernels.philox import row_noise
from sage_kernels.reference.policy_loss import LossSettings, PolicyTerms, StepColumns
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
"""Elements of a program. It is the same on every device, because the order of the sum
follows from it.
"""
SUM_BLOCK = 1024
"""Partial sums that the second stage reads at once."""
_start = partial(launch, settings=Launch(num_warps=4), fp_fusion=False)


@triton.jit
def policy_loss_partial_kernel(
    p_v,  # (B, N)
    p_old,  # (B, N)
    p_anchor,  # (B, N), or None
    p_noise_ids,  # (B, 3) int64
    p_gain,  # (B,) float32
    p_partial,  # (B, 3, T) float32: log-ratio, RatioNorm's log-ratio, KL to the anchor
    numel,
    num_tiles,
    BLOCK: tl.constexpr,
):
    """Sums of one tile of one row."""
    pid = tl.program_id(0).to(tl.int64)
    i_row = pid // num_tiles
    i_tile = pid % num_tiles
    o = i_tile * BLOCK + tl.arange(0, BLOCK)
    m = o < numel
    o_row = i_row * numel + o

    gain = tl.load(p_gain + i_row)
    b_v = load(p_v + o_row, m)
    b_old = load(p_old + o_row, m)
    if p_anchor is not None:
        # Before the noise and the sums, behind whose barriers it would wait once more.
        b_anchor = load(p_anchor + o_row, m)
    b_noise = row_noise(p_noise_ids, i_row, i_tile, BLOCK)
    # Outside the mask all velocities are 0, so that s and t are 0 there, whatever was
    # drawn.
    b_shift = gain * (b_v - b_old)
    p_out = p_partial + i_row * 3 * num_tiles + i_tile
    tl.store(p_out, tl.sum(b_shift * (b_noise - 0.5 * b_shift)))
    tl.store(p_out + num_tiles, tl.sum(b_shift * b_noise))
    if p_anchor is not None:
        b_away = gain * (b_v - b_anchor)
        tl.store(p_out + 2 * num_tiles, 0.5 * tl.sum(b_away * b_away))


@triton.jit
def policy_loss_finish_kernel(
    p_partial,  # (B, 3, T) float32
    p_gain,  # (B,) float32, as all columns
    p_std,  # None unless unnormalized
    p_scale,  # None without the equalizer
    p_advantage,
    p_loss,  # (B,) float32
    # (B, 4) float32: log-ratio, ratio, KL to the anchor, KL to the rollout policy
    p_parts,
    p_clipped,  # (B,) bool
    p_coefficients,  # (B, 3) float32: k_0, k_1, k_2
    clip_low,
    clip_high,
    position_weight,  # None without the KL to the anchor
    velocity_weight,  # None without the KL to the rollout policy
    numel,
    num_tiles,
    RATIO_NORM: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """All scalars of one row."""
    i_row = tl.program_id(0).to(tl.int64)
    p_row = p_partial + i_row * 3 * num_tiles
    gain = tl.load(p_gain + i_row)
    advantage = tl.load(p_advantage + i_row)

    gaussian = sum_in_order(p_row, num_tiles, CHUNKS, BLOCK) / numel
    used = gaussian
    if RATIO_NORM:
        used = sum_in_order(p_row + num_tiles, num_tiles, CHUNKS, BLOCK) / numel
    factor = 1.0
    if p_std is not None:
        std = tl.load(p_std + i_row)
        factor = 2.0 * (std * std)
        used = used * factor
    ratio = tl.exp(used)
    clamped = tl.minimum(tl.maximum(ratio, clip_low), clip_high)
    # Written as a select, so that a ratio that is not finite reaches the loss as it
    # does in eager PyTorch.
    is_clipped = ((advantage > 0) & (ratio > clip_high)) | (
        (advantage < 0) & (ratio < clip_low)
    )
    loss = tl.where(is_clipped, -advantage * clamped, -advantage * ratio)
    slope = tl.where(is_clipped, 0.0, -advantage * ratio) * factor
    if p_scale is not None:
        scale = tl.load(p_scale + i_row)
        loss *= scale
        slope = slope * scale

    of_noise = slope
    of_old = -slope
    if RATIO_NORM:
        of_old = slope * 0.0
    kl_position = gaussian * 0.0
    kl_velocity = gaussian * 0.0
    of_anchor = gaussian * 0.0
    if position_weight is not None:
        kl_position = (
            sum_in_order(p_row + 2 * num_tiles, num_tiles, CHUNKS, BLOCK) / numel
        )
        loss += position_weight * kl_position
        of_anchor += position_weight
    if velocity_weight is not None:
        kl_velocity = -gaussian
        of_noise -= velocity_weight
        loss += velocity_weight * kl_velocity
        of_old += velocity_weight

    tl.store(p_loss + i_row, loss)
    tl.store(p_clipped + i_row, is_clipped)
    p_out = p_parts + i_row * 4
    tl.store(p_out, used)
    tl.store(p_out + 1, ratio)
    tl.store(p_out + 2, kl_position)
    tl.store(p_out + 3, kl_velocity)
    p_out = p_coefficients + i_row * 3
    mean_gain = gain / numel
    tl.store(p_out, mean_gain * of_noise)
    tl.store(p_out + 1, mean_gain * gain * of_old)
    tl.store(p_out + 2, mean_gain * gain * of_anchor)


@triton.jit
def policy_loss_backward_kernel(
    p_grad_loss,  # (B,)
    p_v,  # (B, N)
    p_old,  # (B, N)
    p_anchor,  # (B, N), or None
    p_noise_ids,  # (B, 3) int64
    p_coefficients,  # (B, 3) float32
    p_grad,  # (B, N)
    grad_loss_stride,
    numel,
    num_tiles,
    BLOCK: tl.constexpr,
):
    """The gradient of one tile of one row."""
    pid = tl.program_id(0).to(tl.int64)
    i_row = pid // num_tiles
    i_tile = pid % num_tiles
    o = i_tile * BLOCK + tl.arange(0, BLOCK)
    m = o < numel
    o_row = i_row * numel + o

    grad_loss = tl.load(p_grad_loss + i_row * grad_loss_stride)
    p_row = p_coefficients + i_row * 3
    b_v = load(p_v + o_row, m)
    b_old = load(p_old + o_row, m)
    if p_anchor is not None:
        b_anchor = load(p_anchor + o_row, m)
    b_grad = grad_loss * tl.load(p_row) * row_noise(p_noise_ids, i_row, i_tile, BLOCK)
    b_grad += grad_loss * tl.load(p_row + 1) * (b_v - b_old)
    if p_anchor is not None:
        b_grad += grad_loss * tl.load(p_row + 2) * (b_v - b_anchor)
    store(p_grad + o_row, b_grad, m)


def launch_forward(
    v, v_old, v_anchor, noise_ids, gain, advantage, std, scale, *settings
) -> tuple[Tensor, ...]:
    """Run the first two stages: loss (B,), parts (B, 4), clipped (B,) bool,
    coefficients of the gradient (B, 3).
    """
    clip_range, position_weight, velocity_weight, ratio_norm = settings
    rows = v.shape[0]
    numel = v.shape[1:].numel()
    tiles = cdiv(numel, BLOCK)
    partial, loss, parts, coefficients = (
        common.empty((rows, *shape), dtype=torch.float32, device=v.device)
        for shape in ((3, tiles), (), (4,), (3,))
    )
    clipped = common.empty((rows,), dtype=torch.bool, device=v.device)
    v, v_old, v_anchor, noise_ids, gain, advantage, std, scale = common.contiguous(
        v, v_old, v_anchor, noise_ids, gain, advantage, std, scale
    )
    _start(
        policy_loss_partial_kernel,
        (rows * tiles,),
        v,
        v_old,
        v_anchor,
        noise_ids,
        gain,
        partial,
        numel,
        tiles,
        BLOCK=BLOCK,
    )
    _start(
        policy_loss_finish_kernel,
        (rows,),
        partial,
        gain,
        std,
        scale,
        advantage,
        loss,
        parts,
        clipped,
        coefficients,
        1 - clip_range,
        1 + clip_range,
        position_weight,
        velocity_weight,
        numel,
        tiles,
        RATIO_NORM=ratio_norm,
        CHUNKS=cdiv(tiles, SUM_BLOCK),
        BLOCK=SUM_BLOCK,
    )
    return loss, parts, clipped, coefficients


def launch_backward(grad_loss, v, v_old, v_anchor, noise_ids, coefficients) -> Tensor:
    """Run the third stage: the gradient of v."""
    numel = v.shape[1:].numel()
    tiles = cdiv(numel, BLOCK)
    grad = common.empty_like(v)
    v, v_old, v_anchor, noise_ids = common.contiguous(v, v_old, v_anchor, noise_ids)
    _start(
        policy_loss_backward_kernel,
        (grad.shape[0] * tiles,),
        grad_loss,
        v,
        v_old,
        v_anchor,
        noise_ids,
        coefficients,
        grad,
        grad_loss.stride(0),
        numel,
        tiles,
        BLOCK=BLOCK,
    )
    return grad


def _reference_forward(
    v, v_old, v_anchor, noise_ids, gain, advantage, std, scale, *settings
) -> tuple[Tensor, ...]:
    columns = StepColumns(
        gain, gain if std is None else std, gain if scale is None else scale, advantage
    )
    chosen = LossSettings._make((*settings, std is not None, scale is not None))
    terms, coefficients = reference.policy_loss_forward(
        v, v_old, v_anchor, noise_ids, columns, chosen
    )
    return terms.loss, torch.stack(terms[1:5], dim=1), terms.clipped, coefficients


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs[:4], output[3])
    ctx.set_materialize_grads(False)


def _backward(
    ctx: Any, grad_loss: Tensor | None, *others: Tensor | None
) -> tuple[Tensor | None, ...]:
    # Read once: under selective checkpointing a saved tensor can be unpacked one time
    # only.
    saved = ctx.saved_tensors
    grad = None if grad_loss is None else _policy_loss_backward(grad_loss, *saved)
    return grad, *[None] * 11


_policy_loss_backward = operator(
    """policy_loss_backward(Tensor grad_loss, Tensor v, Tensor v_old, Tensor? v_anchor, Tensor noise_ids,
    Tensor coefficients) -> Tensor""",
    launcher=launch_backward,
    reference=reference.policy_loss_backward,
)
_policy_loss = operator(
    """policy_loss(Tensor v, Tensor v_old, Tensor? v_anchor, Tensor noise_ids, Tensor gain, Tensor advantage,
    Tensor? std, Tensor? scale, float clip_range, float? position_weight, float? velocity_weight, bool ratio_norm)
    -> (Tensor, Tensor, Tensor, Tensor)""",
    launcher=launch_forward,
    reference=_reference_forward,
    save=_save,
    backward=_backward,
)


def policy_loss(
    v: Tensor,
    v_old: Tensor,
    v_anchor: Tensor | None,
    noise_ids: Tensor,
    columns: StepColumns,
    settings: LossSettings,
) -> PolicyTerms:
    """Loss per sample of one trained step; one call serves samples at different steps.

    Args:
        v: (B, ...) guided velocity of the current weights; float32, bfloat16 or
            float16, as the others.
        v_old: (B, ...) velocity of the rollout.
        v_anchor: (B, ...) velocity of the anchor; read where `position_weight` is
            given, may be None elsewhere.
        noise_ids: (B, 3) int64, whose noise the rollout drew: two key words and the
            step of each row.
        columns: numbers of each sample's step, (B,) float32.
        settings: what the loss consists of.

    Returns:
        `PolicyTerms`, (B,) float32 each and bool `clipped`. The gradient of `loss`
        flows into v; all else is data.

    Raises:
        ValueError: for a wrong shape, dtype or device, a missing anchor, or a clip
            range or a weight out of range.
    """
    name = "policy_loss"
    position = settings.position_weight is not None
    if position and v_anchor is None:
        raise ValueError(
            f"{name}: position_weight is {settings.position_weight}, but v_anchor is "
            "None; pass it"
        )
    common.check_latents(
        name, {"v": v, "v_old": v_old, "v_anchor": v_anchor}, noise_ids
    )
    if noise_ids is None or not v.numel():
        raise ValueError(
            f"{name}: v has shape {tuple(v.shape)}, noise_ids are {noise_ids}; there "
            "is nothing to average"
        )
    common.check_tensors(name, {"v": v, **columns._asdict()})
    for label, column in columns._asdict().items():
        common.check_shape(name, label, column, v.shape[:1], "(B,)")
    if not 0 < settings.clip_range < 1:
        raise ValueError(
            f"{name}: clip_range is {settings.clip_range!r}; it must be between 0 and "
            "1, for instance 1e-4"
        )
    for label in ("position_weight", "velocity_weight"):
        weight = getattr(settings, label)
        if weight is not None and not 0 <= weight < float("inf"):
            raise ValueError(
                f"{name}: {label} is {weight!r}; it must be finite and not negative, "
                "or None"
            )
    gain, std, scale, advantage = (column.detach().float() for column in columns)
    loss, parts, clipped, _ = _policy_loss(
        v,
        v_old.detach(),
        v_anchor.detach() if position and v_anchor is not None else None,
        noise_ids,
        gain,
        advantage,
        std if settings.unnormalized else None,
        scale if settings.equalizer else None,
        float(settings.clip_range),
        settings.position_weight,
        settings.velocity_weight,
        settings.ratio_norm,
    )
    return PolicyTerms(loss, *parts.detach().unbind(1), clipped)  # type: ignore[call-arg]


def _flat(function: Any) -> Any:
    """The op with the columns and the settings as keyword arguments, as the registry
    calls it.
    """

    def call(
        v: Tensor,
        v_old: Tensor,
        v_anchor: Tensor | None,
        noise_ids: Tensor,
        **rest: Any,
    ) -> PolicyTerms:
        columns = StepColumns(*(rest.pop(name) for name in StepColumns._fields))
        result: PolicyTerms = function(
            v, v_old, v_anchor, noise_ids, columns, LossSettings(**rest)
        )
        return result

    return call


def _make_inputs(
    case: Case, dtype: torch.dtype, device: Device, generator: Generator | None
) -> Inputs:
    """Inputs of a case whose ratios lie on both sides of the clip; `anchor` and the
    settings stand in its shape.
    """
    rows = case.shape["batch"]
    stored = torch.float32 if case.mixed else dtype
    column: dict[str, Any] = {
        "dtype": torch.float32,
        "device": device,
        "generator": generator,
        "strided": case.strided,
    }
    switches = {
        name: bool(case.shape[name])
        for name in LossSettings._fields[3:]
        if name in case.shape
    }
    kl = case.shape.get("kl", 1)
    return {
        "v": random_latents(case, dtype, device, generator),
        "v_old": random_latents(case, stored, device, generator),
        "v_anchor": random_latents(case, stored, device, generator) if kl else None,
        "noise_ids": noise_ids_of(rows, device),
        "gain": torch.linspace(-0.6, -0.2, rows, dtype=torch.float32).to(device),
        "std": torch.linspace(0.4, 0.8, rows, dtype=torch.float32).to(device),
        "scale": torch.linspace(0.5, 2.0, rows, dtype=torch.float32).to(device),
        "advantage": registry.random_tensor(rows, **column),
        "clip_range": 0.125,
        "position_weight": 0.5 if kl else None,
        "velocity_weight": 0.25 if kl else None,
        **switches,
    }


def _least_scale(inputs: Inputs) -> dict[str, float]:
    """Standard error of the mean of s eps, whose terms have both signs: the size of a
    log-ratio without its drift.
    """
    shift = inputs["gain"].view(-1, 1) * (inputs["v"] - inputs["v_old"]).flatten(1)
    factor = torch.ones_like(inputs["std"])
    if inputs.get("unnormalized"):
        factor = 2 * inputs["std"].square()
    error = factor * shift.square().mean(1).sqrt() / shift.shape[1] ** 0.5
    return {"out 1": float(error.square().mean().sqrt())}


SPEC = OpSpec(
    name="policy_loss",
    formula=(
        "rho = exp(mean(s (eps - s/2))); S max(-A rho, -A clamp(rho, 1-c, 1+c)) + KL "
        "terms; s = r (v - v_old)"
    ),
    op=_flat(policy_loss),
    reference=_flat(reference.policy_loss),
    make_inputs=_make_inputs,
    differentiable=("v",),
    differentiable_outputs=(0,),
    test_cases=(
        Case(id="latents", shape=latent_shape(2, 4, 3, 6, 8)),
        Case(id="odd", shape=latent_shape(3, 3, 5, 7, 11)),
        Case(id="one-element", shape=latent_shape(1, 1, 1, 1, 1)),
        Case(
            id="strided-cps",
            shape=latent_shape(2, 4, 3, 5, 6, unnormalized=1),
            strided=True,
        ),
        Case(id="mixed-dtypes", shape=latent_shape(2, 4, 3, 6, 8), mixed=True),
        Case(id="bias-corrected", shape=latent_shape(3, 4, 3, 5, 7, ratio_norm=1)),
        Case(
            id="ratio-norm",
            shape=latent_shape(3, 4, 3, 5, 7, ratio_norm=1, unnormalized=1),
        ),
        Case(id="no-kl", shape=latent_shape(2, 4, 3, 5, 7, kl=0, equalizer=0)),
    ),
    bench_cases=(
        Case(id="A", shape=latent_shape(1, 32, 21, 22, 39)),
        Case(id="B", shape=latent_shape(1, 32, 21, 30, 52)),
        Case(id="B, no KL", shape=latent_shape(1, 32, 21, 30, 52, kl=0)),
        Case(
            id="B, CPS",
            shape=latent_shape(1, 32, 21, 30, 52, unnormalized=1, equalizer=0),
        ),
        Case(
            id="B, RatioNorm",
            shape=latent_shape(1, 32, 21, 30, 52, ratio_norm=1, unnormalized=1),
        ),
        Case(
            id="B, bias-corrected", shape=latent_shape(1, 32, 21, 30, 52, ratio_norm=1)
        ),
    ),
    bench_dtype=torch.float32,
    # Per row: noise ids, three columns and 4 + 4 * 4 + 1 + 3 * 4 bytes of results; loss
    # gradient, ids, coefficients.
    letters=lambda i: {
        "S": nbytes(i["v"]),
        "S_old": nbytes(i["v_old"]),
        "S_anchor": nbytes(i["v_anchor"]),
        "B": len(i["v"]) * (24 + 12 + 33),
        "C": len(i["v"]) * (4 + 24 + 12),
    },
    bytes_formula=("S + S_old + S_anchor + B", "2 S + S_old + S_anchor + C"),
    atol_fp32=5e-6,
    least_scale=_least_scale,
    k_bf16=1.1,
)
