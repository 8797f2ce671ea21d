"""What a policy-gradient loss needs of one step: guidance, log-ratio and KL terms in one pass over the velocities.

With v = v_uncond + g (v_cond - v_uncond), the gain r = b / std, the noise eps that the rollout drew, and means over the
elements of a sample:

    log_ratio  = mean(s (eps - s / 2))       s = r (v - v_old)           exactly 0 when v = v_old
    ratio_norm = mean(s eps)                                             GRPO-Guard's log-ratio
    kl_anchor  = mean(t^2) / 2               t = r (v - v_anchor)        KL to the anchor policy
    kl_step    = mean(s^2) / 2                                           KL to the rollout policy

    dv = r / N (c_log_ratio (eps - s) + c_ratio_norm eps + c_anchor t + c_step s)
    dv_cond = g dv,  dv_uncond = (1 - g) dv

Source: the log-density ratio and the KL divergence of N(a x + b v, std^2 I) and N(a x + b v_old, std^2 I), Eq. 15 and
43 of SAGE-GRPO (arXiv 2603.21872). No log-probability is formed: the difference of two rounded ones is noise of the
size of the clip range.

The noise is drawn again from its key in both passes, so neither x nor x' is read; explicit noise
((x' - a x - b v_old) / std, say) is taken too. The reduction has two stages with a fixed order and no atomics: the same
inputs give the same bits. Kernels are built without fused multiply-add, as in `sde_step`.

Shapes: B batch, N elements of a sample, K partial sums of a row.
"""

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from sage_kernels.common import (
    Launch,
    LaunchTable,
    cdiv,
    check_tensors,
    empty,
    empty_like,
    narrow,
    on_device_of,
    runs_triton,
)
from sage_kernels.philox import check_noise_owner, step_column
from sage_kernels.reference import policy_terms as reference
from sage_kernels.reference.policy_terms import TERMS
from sage_kernels.registry import Case, Inputs, Kernel, OpSpec, nbytes
from sage_kernels.step_common import (
    check_batch,
    coefficient_columns,
    combine_guidance,
    latent_shape,
    noise_keys,
    random_latents,
    row_noise,
)

LAUNCHES = LaunchTable({(None, None): Launch(num_warps=4)})
BLOCK = 1024
"""Elements of a program. It is the same on every device, because the order of the sum follows from it."""
SUM_BLOCK = 1024
"""Partial sums that the second stage reads at once."""
NUM_TERMS = tl.constexpr(len(TERMS))


@triton.jit
def policy_terms_partial_kernel(
    p_cond,
    p_uncond,
    p_old,
    p_anchor,
    p_noise,
    p_keys,
    p_step,
    p_gain,
    p_partial,
    guidance_scale,
    numel,
    num_tiles,
    first_block,
    shift,
    HAS_UNCOND: tl.constexpr,
    HAS_ANCHOR: tl.constexpr,
    HAS_NOISE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sums of one tile of one row into p_partial (B, 4, num_tiles). HAS_NOISE reads the noise, else it is drawn."""
    pid = tl.program_id(0).to(tl.int64)
    i_row, i_tile = pid // num_tiles, pid % num_tiles
    o = i_tile * BLOCK + tl.arange(0, BLOCK) - shift
    m = (o >= 0) & (o < numel)
    o_row = i_row * numel + o

    gain = tl.load(p_gain + i_row)
    b_cond = tl.load(p_cond + o_row, mask=m, other=0.0).to(tl.float32)
    b_velocity = combine_guidance(b_cond, p_uncond, o_row, m, guidance_scale, HAS_UNCOND)
    b_old = tl.load(p_old + o_row, mask=m, other=0.0).to(tl.float32)
    if HAS_NOISE:
        b_noise = tl.load(p_noise + o_row, mask=m, other=0.0).to(tl.float32)
    else:
        b_noise = row_noise(p_keys, p_step, i_row, first_block, i_tile, BLOCK)
    # Outside the mask all velocities are 0, so that s and t are 0 there, whatever was drawn.
    b_shift = gain * (b_velocity - b_old)
    p_out = p_partial + i_row * NUM_TERMS * num_tiles + i_tile
    tl.store(p_out, tl.sum(b_shift * (b_noise - 0.5 * b_shift)))
    tl.store(p_out + num_tiles, tl.sum(b_shift * b_noise))
    tl.store(p_out + 3 * num_tiles, 0.5 * tl.sum(b_shift * b_shift))
    if HAS_ANCHOR:
        b_anchor = tl.load(p_anchor + o_row, mask=m, other=0.0).to(tl.float32)
        b_away = gain * (b_velocity - b_anchor)
        tl.store(p_out + 2 * num_tiles, 0.5 * tl.sum(b_away * b_away))
    else:
        tl.store(p_out + 2 * num_tiles, 0.0)


@triton.jit
def policy_terms_sum_kernel(p_partial, p_terms, numel, num_tiles, CHUNKS: tl.constexpr, BLOCK: tl.constexpr):
    """Mean of one term of one row from its partial sums, in their order."""
    i_term = tl.program_id(0).to(tl.int64)
    p_row = p_partial + i_term * num_tiles
    b_sum = tl.zeros([BLOCK], dtype=tl.float32)
    # The number of chunks is a constant: 1 up to a million elements of a sample, 4 at 720p and 121 frames.
    for chunk in range(CHUNKS):
        o = chunk * BLOCK + tl.arange(0, BLOCK)
        b_sum += tl.load(p_row + o, mask=o < num_tiles, other=0.0)
    tl.store(p_terms + i_term, tl.sum(b_sum) / numel)


@triton.jit
def policy_terms_backward_kernel(
    p_grad_terms,
    p_cond,
    p_uncond,
    p_old,
    p_anchor,
    p_noise,
    p_keys,
    p_step,
    p_gain,
    p_grad_cond,
    p_grad_uncond,
    guidance_scale,
    numel,
    num_tiles,
    first_block,
    shift,
    HAS_UNCOND: tl.constexpr,
    HAS_ANCHOR: tl.constexpr,
    HAS_NOISE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Both gradients of one tile of one row, the noise read or drawn again."""
    pid = tl.program_id(0).to(tl.int64)
    i_row, i_tile = pid // num_tiles, pid % num_tiles
    o = i_tile * BLOCK + tl.arange(0, BLOCK) - shift
    m = (o >= 0) & (o < numel)
    o_row = i_row * numel + o

    gain = tl.load(p_gain + i_row)
    p_grad = p_grad_terms + i_row * NUM_TERMS
    b_cond = tl.load(p_cond + o_row, mask=m, other=0.0).to(tl.float32)
    b_velocity = combine_guidance(b_cond, p_uncond, o_row, m, guidance_scale, HAS_UNCOND)
    b_old = tl.load(p_old + o_row, mask=m, other=0.0).to(tl.float32)
    if HAS_NOISE:
        b_noise = tl.load(p_noise + o_row, mask=m, other=0.0).to(tl.float32)
    else:
        b_noise = row_noise(p_keys, p_step, i_row, first_block, i_tile, BLOCK)
    b_shift = gain * (b_velocity - b_old)
    b_grad = tl.load(p_grad) * (b_noise - b_shift) + tl.load(p_grad + 1) * b_noise + tl.load(p_grad + 3) * b_shift
    if HAS_ANCHOR:
        b_anchor = tl.load(p_anchor + o_row, mask=m, other=0.0).to(tl.float32)
        b_grad += tl.load(p_grad + 2) * (gain * (b_velocity - b_anchor))
    b_grad *= gain / numel
    if HAS_UNCOND:
        tl.store(p_grad_cond + o_row, narrow(guidance_scale * b_grad, p_grad_cond.dtype.element_ty), mask=m)
        tl.store(p_grad_uncond + o_row, narrow((1.0 - guidance_scale) * b_grad, p_grad_uncond.dtype.element_ty), mask=m)
    else:
        tl.store(p_grad_cond + o_row, narrow(b_grad, p_grad_cond.dtype.element_ty), mask=m)


def policy_terms_forward(
    v_cond: Tensor,
    v_uncond: Tensor | None,
    v_old: Tensor,
    v_anchor: Tensor | None,
    noise: Tensor | None,
    keys: Tensor | None,
    step: Tensor | None,
    gain: Tensor,
    guidance_scale: float,
    element_offset: int,
) -> Tensor:
    """Launch both stages; gain is (B,) float32, step (B,) int64."""
    v_cond, v_old, gain = (t.contiguous() for t in (v_cond, v_old, gain))
    v_uncond, v_anchor = (None if t is None else t.contiguous() for t in (v_uncond, v_anchor))
    noise, keys, step = (None if t is None else t.contiguous() for t in (noise, keys, step))
    rows = v_cond.shape[0]
    numel = v_cond.numel() // rows
    shift = element_offset % 4 if noise is None else 0
    num_tiles = cdiv(numel + shift, BLOCK)
    terms = empty((rows, len(TERMS)), dtype=torch.float32, device=v_cond.device)
    partial = empty((rows, len(TERMS), num_tiles), dtype=torch.float32, device=v_cond.device)
    with on_device_of(v_cond):
        policy_terms_partial_kernel[(rows * num_tiles,)](
            v_cond,
            v_cond if v_uncond is None else v_uncond,
            v_old,
            v_cond if v_anchor is None else v_anchor,
            v_cond if noise is None else noise,
            gain if keys is None else keys,
            gain if step is None else step,
            gain,
            partial,
            guidance_scale,
            numel,
            num_tiles,
            element_offset // 4,
            shift,
            HAS_UNCOND=v_uncond is not None,
            HAS_ANCHOR=v_anchor is not None,
            HAS_NOISE=noise is not None,
            BLOCK=BLOCK,
            num_warps=LAUNCHES.find(BLOCK, v_cond.device).num_warps,
            enable_fp_fusion=False,
        )
        policy_terms_sum_kernel[(rows * len(TERMS),)](
            partial,
            terms,
            numel,
            num_tiles,
            CHUNKS=cdiv(num_tiles, SUM_BLOCK),
            BLOCK=SUM_BLOCK,
            num_warps=LAUNCHES.find(SUM_BLOCK, v_cond.device).num_warps,
            enable_fp_fusion=False,
        )
    return terms


def policy_terms_backward(
    grad_terms: Tensor,
    v_cond: Tensor,
    v_uncond: Tensor | None,
    v_old: Tensor,
    v_anchor: Tensor | None,
    noise: Tensor | None,
    keys: Tensor | None,
    step: Tensor | None,
    gain: Tensor,
    guidance_scale: float,
    element_offset: int,
) -> tuple[Tensor, Tensor]:
    """Launch the backward kernel: (dv_cond, dv_uncond) in the types of v_cond and v_uncond."""
    grad_terms = grad_terms.contiguous()
    v_cond, v_old, gain = (t.contiguous() for t in (v_cond, v_old, gain))
    v_uncond, v_anchor = (None if t is None else t.contiguous() for t in (v_uncond, v_anchor))
    noise, keys, step = (None if t is None else t.contiguous() for t in (noise, keys, step))
    rows = v_cond.shape[0]
    numel = v_cond.numel() // rows
    shift = element_offset % 4 if noise is None else 0
    num_tiles = cdiv(numel + shift, BLOCK)
    grad_cond = empty_like(v_cond)
    grad_uncond = empty_like(v_cond.new_empty(0) if v_uncond is None else v_uncond)
    with on_device_of(v_cond):
        policy_terms_backward_kernel[(rows * num_tiles,)](
            grad_terms,
            v_cond,
            v_cond if v_uncond is None else v_uncond,
            v_old,
            v_cond if v_anchor is None else v_anchor,
            v_cond if noise is None else noise,
            gain if keys is None else keys,
            gain if step is None else step,
            gain,
            grad_cond,
            grad_uncond,
            guidance_scale,
            numel,
            num_tiles,
            element_offset // 4,
            shift,
            HAS_UNCOND=v_uncond is not None,
            HAS_ANCHOR=v_anchor is not None,
            HAS_NOISE=noise is not None,
            BLOCK=BLOCK,
            num_warps=LAUNCHES.find(BLOCK, v_cond.device).num_warps,
            enable_fp_fusion=False,
        )
    return grad_cond, grad_uncond


@torch.library.custom_op("sage_kernels::policy_terms", mutates_args=())
def _forward_op(
    v_cond: Tensor,
    v_uncond: Tensor | None,
    v_old: Tensor,
    v_anchor: Tensor | None,
    noise: Tensor | None,
    keys: Tensor | None,
    step: Tensor | None,
    gain: Tensor,
    guidance_scale: float,
    element_offset: int,
) -> Tensor:
    if runs_triton(v_cond):
        return policy_terms_forward(
            v_cond, v_uncond, v_old, v_anchor, noise, keys, step, gain, guidance_scale, element_offset
        )
    return reference.policy_terms(
        v_cond,
        v_uncond,
        v_old,
        v_anchor,
        guidance_scale=guidance_scale,
        gain=gain,
        noise=noise,
        keys=keys,
        step=0 if step is None else step,
        element_offset=element_offset,
    )


@_forward_op.register_fake
def _(
    v_cond: Tensor,
    v_uncond: Tensor | None,
    v_old: Tensor,
    v_anchor: Tensor | None,
    noise: Tensor | None,
    keys: Tensor | None,
    step: Tensor | None,
    gain: Tensor,
    guidance_scale: float,
    element_offset: int,
) -> Tensor:
    return v_cond.new_empty((v_cond.shape[0], len(TERMS)), dtype=torch.float32)


@torch.library.custom_op("sage_kernels::policy_terms_backward", mutates_args=())
def _backward_op(
    grad_terms: Tensor,
    v_cond: Tensor,
    v_uncond: Tensor | None,
    v_old: Tensor,
    v_anchor: Tensor | None,
    noise: Tensor | None,
    keys: Tensor | None,
    step: Tensor | None,
    gain: Tensor,
    guidance_scale: float,
    element_offset: int,
) -> tuple[Tensor, Tensor]:
    if runs_triton(v_cond):
        return policy_terms_backward(
            grad_terms, v_cond, v_uncond, v_old, v_anchor, noise, keys, step, gain, guidance_scale, element_offset
        )
    grad_cond, grad_uncond = reference.policy_terms_backward(
        grad_terms,
        v_cond,
        v_uncond,
        v_old,
        v_anchor,
        guidance_scale=1.0 if v_uncond is None else guidance_scale,
        gain=gain,
        noise=noise,
        keys=keys,
        step=0 if step is None else step,
        element_offset=element_offset,
    )
    grad_uncond = v_cond.new_empty(0) if v_uncond is None else grad_uncond.to(v_uncond.dtype).contiguous()
    return grad_cond.to(v_cond.dtype).contiguous(), grad_uncond


@_backward_op.register_fake
def _(
    grad_terms: Tensor,
    v_cond: Tensor,
    v_uncond: Tensor | None,
    v_old: Tensor,
    v_anchor: Tensor | None,
    noise: Tensor | None,
    keys: Tensor | None,
    step: Tensor | None,
    gain: Tensor,
    guidance_scale: float,
    element_offset: int,
) -> tuple[Tensor, Tensor]:
    grad_uncond = v_cond.new_empty(0) if v_uncond is None else v_uncond.new_empty(v_uncond.shape)
    return v_cond.new_empty(v_cond.shape), grad_uncond


def _setup_context(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    *tensors, guidance_scale, element_offset = inputs
    ctx.save_for_backward(*tensors)
    ctx.numbers = (guidance_scale, element_offset)


def _backward(ctx, grad_terms: Tensor):  # type: ignore[no-untyped-def]
    # Read once: under selective checkpointing a saved tensor can be unpacked one time only.
    saved = ctx.saved_tensors
    grad_cond, grad_uncond = _backward_op(grad_terms, *saved, *ctx.numbers)
    return grad_cond, None if saved[1] is None else grad_uncond, *[None] * 8


_forward_op.register_autograd(_backward, setup_context=_setup_context)


def policy_terms(
    v_cond: Tensor,
    v_uncond: Tensor | None,
    v_old: Tensor,
    v_anchor: Tensor | None = None,
    *,
    guidance_scale: float = 1.0,
    gain: Tensor,
    noise: Tensor | None = None,
    keys: Tensor | None = None,
    step: int | Tensor = 0,
    element_offset: int = 0,
) -> Tensor:
    """Terms of a trained step per sample; one call serves samples at different steps.

    Args:
        v_cond: (B, ...) velocity of the current weights with the prompt; float32, bfloat16 or float16, as the others.
        v_uncond: (B, ...) without it; None if v_cond is the guided velocity.
        v_old: (B, ...) guided velocity of the rollout.
        v_anchor: (B, ...) guided velocity of the anchor; None leaves kl_anchor 0.
        guidance_scale: g.
        gain: (B,) r = b / std at each sample's step.
        noise: (B, ...) noise that the rollout drew; None draws it again from keys and step.
        keys, step, element_offset: as in `sde_step`; the means of a shard are over the shard's own elements.

    Returns:
        (B, 4) float32, columns `TERMS`. Gradients flow into v_cond and v_uncond; all else is data.

    Raises:
        ValueError: for a wrong shape, dtype or device, or unless exactly one of noise and keys is given.
    """
    name = "policy_terms"
    tensors = {"v_cond": v_cond, "v_uncond": v_uncond, "v_old": v_old, "v_anchor": v_anchor, "noise": noise}
    check_tensors(name, tensors)
    check_batch(name, tensors)
    if not v_cond.numel():
        raise ValueError(f"{name}: v_cond has shape {tuple(v_cond.shape)}; a mean over no elements has no value")
    if (noise is None) == (keys is None):
        given = "neither" if noise is None else "both"
        raise ValueError(f"{name}: {given} of noise and keys are given; pass the noise, or the keys (B, 2) it is from")
    if keys is not None:
        check_noise_owner(name, keys, step, v_cond.shape[0], v_cond.device, element_offset)
    return _forward_op(
        v_cond,
        v_uncond,
        v_old.detach(),
        None if v_anchor is None else v_anchor.detach(),
        None if noise is None else noise.detach(),
        keys,
        None if keys is None else step_column(step, keys),
        *coefficient_columns(name, {"gain": gain}, v_cond.shape[0], v_cond.device),
        float(guidance_scale),
        element_offset,
    )


def make_inputs(
    case: Case, dtype: torch.dtype, device: torch.device | str, generator: torch.Generator | None
) -> Inputs:
    """Inputs of a case; `guided`, `anchor` and `drawn` (noise from keys) in its shape are on unless they are 0."""
    rows = case.shape["batch"]

    def large(kind: torch.dtype) -> Tensor:
        return random_latents(case, kind, device, generator)

    stored = torch.float32 if case.mixed else dtype
    drawn = case.shape.get("drawn", 1)
    inputs: Inputs = {
        "v_cond": large(dtype),
        "v_uncond": large(dtype) if case.shape.get("guided", 1) else None,
        "v_old": large(stored),
        "v_anchor": large(stored) if case.shape.get("anchor", 1) else None,
        "guidance_scale": 2.0,
        "gain": torch.linspace(-0.6, -0.2, rows, dtype=torch.float32).to(device),
        "noise": None if drawn else large(torch.float32),
        "element_offset": case.shape.get("offset", 0),
    }
    if drawn:
        inputs |= {"keys": noise_keys(rows, device), "step": torch.arange(rows, dtype=torch.int64).to(device)}
    return inputs


def _bytes_read(inputs: Inputs) -> int:
    """Every large input once; per row the gain and three integers."""
    large = nbytes(inputs["v_cond"], inputs["v_uncond"], inputs["v_old"], inputs["v_anchor"], inputs["noise"])
    return large + inputs["v_cond"].shape[0] * (4 + (24 if inputs["noise"] is None else 0))


def bytes_forward(inputs: Inputs) -> int:
    """The inputs once and four terms per row; the partial sums, 16 bytes for 1024 elements, are left out."""
    return _bytes_read(inputs) + inputs["v_cond"].shape[0] * 16


def bytes_backward(inputs: Inputs) -> int:
    """The inputs once, four cotangents per row, and the gradients once."""
    return _bytes_read(inputs) + inputs["v_cond"].shape[0] * 16 + nbytes(inputs["v_cond"], inputs["v_uncond"])


def aot_kernels() -> tuple[Kernel, ...]:
    """Builds for bfloat16 and float32 velocities beside stored float32 ones, noise from keys and given."""
    scalars = {
        "guidance_scale": "fp32",
        "numel": "i64",
        "num_tiles": "i32",
        "first_block": "i64",
        "shift": "i32",
    }
    constexprs = {"HAS_UNCOND": True, "HAS_ANCHOR": True, "HAS_NOISE": False, "BLOCK": BLOCK}
    reads = ("p_cond", "p_uncond", "p_old", "p_anchor")

    def given_noise(kernel: Kernel) -> Kernel:
        return replace(kernel, streaming=(*kernel.streaming, "p_noise"))

    num_warps = LAUNCHES.find(BLOCK, torch.device("cpu")).num_warps
    built = [
        Kernel(
            name="policy_terms_sum",
            function=policy_terms_sum_kernel,
            signature={"p_partial": "*fp32", "p_terms": "*fp32", "numel": "i64", "num_tiles": "i32"},
            constexprs={"CHUNKS": 2, "BLOCK": SUM_BLOCK},
            num_warps=num_warps,
            fp_fusion=False,
            unaligned=("num_tiles",),
        )
    ]
    for dtype in ("bf16", "fp32"):
        large = {
            **dict.fromkeys(("p_cond", "p_uncond"), f"*{dtype}"),
            **dict.fromkeys(("p_old", "p_anchor", "p_noise"), "*fp32"),
            **dict.fromkeys(("p_keys", "p_step"), "*i64"),
            "p_gain": "*fp32",
        }
        partial = Kernel(
            name=f"policy_terms_partial[{dtype}]",
            function=policy_terms_partial_kernel,
            signature={**large, "p_partial": "*fp32", **scalars},
            constexprs=constexprs,
            num_warps=num_warps,
            fp_fusion=False,
            streaming=reads,
            unaligned=("num_tiles", "first_block"),
        )
        backward = Kernel(
            name=f"policy_terms_backward[{dtype}]",
            function=policy_terms_backward_kernel,
            signature={
                "p_grad_terms": "*fp32",
                **large,
                **dict.fromkeys(("p_grad_cond", "p_grad_uncond"), f"*{dtype}"),
                **scalars,
            },
            constexprs=constexprs,
            num_warps=num_warps,
            fp_fusion=False,
            streaming=(*reads, "p_grad_cond", "p_grad_uncond"),
            unaligned=("num_tiles", "first_block"),
        )
        outside = {"HAS_UNCOND": False, "p_uncond": None}
        built += [
            partial,
            partial.variant(f"policy_terms_partial[{dtype}, guided outside]", **outside),
            given_noise(partial.variant(f"policy_terms_partial[{dtype}, given noise]", HAS_NOISE=True)),
            backward,
            backward.variant(f"policy_terms_backward[{dtype}, guided outside]", **outside, p_grad_uncond=None),
            given_noise(backward.variant(f"policy_terms_backward[{dtype}, given noise]", HAS_NOISE=True)),
        ]
    return tuple(built)


SPEC = OpSpec(
    name="policy_terms",
    formula="log_ratio = mean(s (eps - s/2)), ratio_norm = mean(s eps), kl = mean(t^2)/2, mean(s^2)/2; "
    "s = r (v - v_old), t = r (v - v_anchor)",
    source="log-density ratio and KL of the affine Gaussian steps, SAGE-GRPO (arXiv 2603.21872) Eq. 15 and 43",
    op=policy_terms,
    reference=reference.policy_terms,
    make_inputs=make_inputs,
    differentiable=("v_cond", "v_uncond"),
    test_cases=(
        Case(id="latents", shape=latent_shape(2, 4, 3, 6, 8)),
        Case(id="odd", shape=latent_shape(3, 3, 5, 7, 11)),
        Case(id="one-element", shape=latent_shape(1, 1, 1, 1, 1)),
        Case(id="strided", shape=latent_shape(2, 4, 3, 5, 6), strided=True),
        Case(id="mixed-dtypes", shape=latent_shape(2, 4, 3, 6, 8), mixed=True),
        Case(id="given-noise", shape=latent_shape(2, 4, 3, 5, 7, drawn=0)),
        Case(id="guided-outside", shape=latent_shape(2, 4, 3, 5, 7, guided=0, anchor=0)),
        Case(id="shard", shape=latent_shape(2, 1, 3, 5, 7, offset=34)),
    ),
    bench_cases=(
        Case(id="A", shape=latent_shape(1, 32, 21, 22, 39), mixed=True),
        Case(id="B", shape=latent_shape(1, 32, 21, 30, 52), mixed=True),
    ),
    bytes_forward=bytes_forward,
    bytes_backward=bytes_backward,
    bytes_formula=("2 S_v + S_old + S_anchor", "4 S_v + S_old + S_anchor"),
    atol_fp32=5e-6,
    k_bf16=1.1,
    kernels=aot_kernels,
)
