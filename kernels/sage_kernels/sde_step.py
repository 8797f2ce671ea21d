"""One step of a sampler: guidance, affine transition and in-kernel Gaussian noise, each input read once.

    v  = v_uncond + g (v_cond - v_uncond)
    x' = a x + b v + std eps              eps = `philox` of (key, step, element)
    x0 = x - sigma v                      optional

Source: every sampler of SAGE-GRPO (arXiv 2603.21872), DanceGRPO, FlowGRPO and CPS is this affine Gaussian transition
with its own a, b, std. The state is float32 whatever the velocities are.

The kernels are built without fused multiply-add, so that they round as the same formula in eager PyTorch does: a
guided velocity that eager code stored and one that a kernel forms agree bit for bit.

Shapes: B batch, N elements of a sample.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from sage_kernels.common import (
    Launch,
    LaunchTable,
    cdiv,
    check_tensors,
    empty_like,
    narrow,
    on_device_of,
    runs_triton,
)
from sage_kernels.philox import check_noise_owner, step_column
from sage_kernels.reference import sde_step as reference
from sage_kernels.reference.sde_step import SDEStep
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
"""Elements of a program; 8 a thread, which is one 16-byte access in bf16 and two in fp32."""
INTERPRETED_BLOCK = 8192
"""The same in the interpreter, whose cost is per program. The numbers do not depend on it."""


@triton.jit
def sde_step_forward_kernel(
    p_cond,
    p_uncond,
    p_x,
    p_a,
    p_b,
    p_std,
    p_sigma,
    p_keys,
    p_step,
    p_next,
    p_x0,
    p_velocity,
    guidance_scale,
    numel,
    num_tiles,
    first_block,
    shift,
    HAS_UNCOND: tl.constexpr,
    HAS_NOISE: tl.constexpr,
    HAS_X0: tl.constexpr,
    HAS_VELOCITY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One tile of one row. `shift` elements of the first tile lie before the shard, whose first block is shared."""
    pid = tl.program_id(0).to(tl.int64)
    i_row, i_tile = pid // num_tiles, pid % num_tiles
    o = i_tile * BLOCK + tl.arange(0, BLOCK) - shift
    m = (o >= 0) & (o < numel)
    o_row = i_row * numel + o

    b_x = tl.load(p_x + o_row, mask=m, other=0.0).to(tl.float32)
    b_cond = tl.load(p_cond + o_row, mask=m, other=0.0).to(tl.float32)
    b_velocity = combine_guidance(b_cond, p_uncond, o_row, m, guidance_scale, HAS_UNCOND)
    b_next = tl.load(p_a + i_row) * b_x + tl.load(p_b + i_row) * b_velocity
    if HAS_NOISE:
        b_noise = row_noise(p_keys, p_step, i_row, first_block, i_tile, BLOCK)
        b_next += tl.load(p_std + i_row) * b_noise
    tl.store(p_next + o_row, b_next, mask=m)
    if HAS_X0:
        tl.store(p_x0 + o_row, b_x - tl.load(p_sigma + i_row) * b_velocity, mask=m)
    if HAS_VELOCITY:
        tl.store(p_velocity + o_row, b_velocity, mask=m)


@triton.jit
def sde_step_backward_kernel(
    p_grad_next,
    p_grad_x0,
    p_grad_velocity,
    p_a,
    p_b,
    p_sigma,
    p_grad_cond,
    p_grad_uncond,
    p_grad_x,
    guidance_scale,
    numel,
    num_tiles,
    HAS_UNCOND: tl.constexpr,
    HAS_X0: tl.constexpr,
    HAS_VELOCITY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """dv = b dx' - sigma dx0 + dv_direct,  dx = a dx' + dx0;  dv_cond = g dv,  dv_uncond = (1 - g) dv."""
    pid = tl.program_id(0).to(tl.int64)
    i_row, i_tile = pid // num_tiles, pid % num_tiles
    o = i_tile * BLOCK + tl.arange(0, BLOCK)
    m = o < numel
    o_row = i_row * numel + o

    b_grad_next = tl.load(p_grad_next + o_row, mask=m, other=0.0).to(tl.float32)
    b_grad_v = tl.load(p_b + i_row) * b_grad_next
    b_grad_x = tl.load(p_a + i_row) * b_grad_next
    if HAS_X0:
        b_grad_x0 = tl.load(p_grad_x0 + o_row, mask=m, other=0.0).to(tl.float32)
        b_grad_v -= tl.load(p_sigma + i_row) * b_grad_x0
        b_grad_x += b_grad_x0
    if HAS_VELOCITY:
        b_grad_v += tl.load(p_grad_velocity + o_row, mask=m, other=0.0).to(tl.float32)
    tl.store(p_grad_x + o_row, narrow(b_grad_x, p_grad_x.dtype.element_ty), mask=m)
    if HAS_UNCOND:
        tl.store(p_grad_cond + o_row, narrow(guidance_scale * b_grad_v, p_grad_cond.dtype.element_ty), mask=m)
        tl.store(
            p_grad_uncond + o_row, narrow((1.0 - guidance_scale) * b_grad_v, p_grad_uncond.dtype.element_ty), mask=m
        )
    else:
        tl.store(p_grad_cond + o_row, narrow(b_grad_v, p_grad_cond.dtype.element_ty), mask=m)


def _block(tensor: Tensor) -> int:
    return BLOCK if tensor.is_cuda else INTERPRETED_BLOCK


def sde_step_forward(
    v_cond: Tensor,
    v_uncond: Tensor | None,
    x: Tensor,
    a: Tensor,
    b: Tensor,
    std: Tensor,
    sigma: Tensor | None,
    keys: Tensor | None,
    step: Tensor | None,
    guidance_scale: float,
    element_offset: int,
    return_x0: bool,
    return_velocity: bool,
    block: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Launch the forward kernel; `block` (a power of two from 4 on) changes the launch geometry and nothing else."""
    v_cond, x, a, b, std = (t.contiguous() for t in (v_cond, x, a, b, std))
    v_uncond, sigma, keys, step = (None if t is None else t.contiguous() for t in (v_uncond, sigma, keys, step))
    block = block or _block(x)
    x_next = empty_like(x, torch.float32)
    x0 = empty_like(x if return_x0 else x.new_empty(0), torch.float32)
    velocity = empty_like(x if return_velocity else x.new_empty(0), torch.float32)
    if x.numel():
        numel = x.numel() // x.shape[0]
        shift = element_offset % 4
        num_tiles = cdiv(numel + shift, block)
        with on_device_of(x):
            sde_step_forward_kernel[(x.shape[0] * num_tiles,)](
                v_cond,
                v_cond if v_uncond is None else v_uncond,
                x,
                a,
                b,
                std,
                std if sigma is None else sigma,
                std if keys is None else keys,
                std if step is None else step,
                x_next,
                x0,
                velocity,
                guidance_scale,
                numel,
                num_tiles,
                element_offset // 4,
                shift,
                HAS_UNCOND=v_uncond is not None,
                HAS_NOISE=keys is not None,
                HAS_X0=return_x0,
                HAS_VELOCITY=return_velocity,
                BLOCK=block,
                num_warps=LAUNCHES.find(block, x.device).num_warps,
                enable_fp_fusion=False,
            )
    return x_next, x0, velocity


def sde_step_backward(
    grad_x_next: Tensor,
    grad_x0: Tensor | None,
    grad_velocity: Tensor | None,
    a: Tensor,
    b: Tensor,
    sigma: Tensor | None,
    guidance_scale: float,
    dtypes: tuple[torch.dtype, torch.dtype | None, torch.dtype],
) -> tuple[Tensor, Tensor, Tensor]:
    """Launch the backward kernel; `dtypes` are those of v_cond, v_uncond (None: there is none) and x."""
    grad_x_next, a, b = (t.contiguous() for t in (grad_x_next, a, b))
    grad_x0, grad_velocity, sigma = (None if t is None else t.contiguous() for t in (grad_x0, grad_velocity, sigma))
    cond_dtype, uncond_dtype, x_dtype = dtypes
    grad_cond, grad_x = empty_like(grad_x_next, cond_dtype), empty_like(grad_x_next, x_dtype)
    grad_uncond = empty_like(grad_x_next if uncond_dtype else grad_x_next.new_empty(0), uncond_dtype)
    if grad_x_next.numel():
        numel = grad_x_next.numel() // grad_x_next.shape[0]
        block = _block(grad_x_next)
        num_tiles = cdiv(numel, block)
        with on_device_of(grad_x_next):
            sde_step_backward_kernel[(grad_x_next.shape[0] * num_tiles,)](
                grad_x_next,
                grad_x_next if grad_x0 is None else grad_x0,
                grad_x_next if grad_velocity is None else grad_velocity,
                a,
                b,
                b if sigma is None else sigma,
                grad_cond,
                grad_uncond,
                grad_x,
                guidance_scale,
                numel,
                num_tiles,
                HAS_UNCOND=uncond_dtype is not None,
                HAS_X0=grad_x0 is not None,
                HAS_VELOCITY=grad_velocity is not None,
                BLOCK=block,
                num_warps=LAUNCHES.find(block, grad_x_next.device).num_warps,
                enable_fp_fusion=False,
            )
    return grad_cond, grad_uncond, grad_x


@torch.library.custom_op("sage_kernels::sde_step", mutates_args=())
def _forward_op(
    v_cond: Tensor,
    v_uncond: Tensor | None,
    x: Tensor,
    a: Tensor,
    b: Tensor,
    std: Tensor,
    sigma: Tensor | None,
    keys: Tensor | None,
    step: Tensor | None,
    guidance_scale: float,
    element_offset: int,
    return_x0: bool,
    return_velocity: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    if runs_triton(x):
        return sde_step_forward(
            v_cond,
            v_uncond,
            x,
            a,
            b,
            std,
            sigma,
            keys,
            step,
            guidance_scale,
            element_offset,
            return_x0,
            return_velocity,
        )
    result = reference.sde_step(
        v_cond,
        v_uncond,
        x,
        guidance_scale=guidance_scale,
        a=a,
        b=b,
        std=std,
        sigma=sigma,
        keys=keys,
        step=0 if step is None else step,
        return_x0=return_x0,
        return_velocity=return_velocity,
        element_offset=element_offset,
    )
    absent = x.new_empty(0, dtype=torch.float32)
    velocity = absent if result.velocity is None else result.velocity
    # An op may not return one of its inputs, which a float32 v_cond without guidance would be.
    velocity = velocity.clone() if velocity.data_ptr() == v_cond.data_ptr() else velocity.contiguous()
    return result.x.contiguous(), absent.clone() if result.x0 is None else result.x0.contiguous(), velocity


@_forward_op.register_fake
def _(
    v_cond: Tensor,
    v_uncond: Tensor | None,
    x: Tensor,
    a: Tensor,
    b: Tensor,
    std: Tensor,
    sigma: Tensor | None,
    keys: Tensor | None,
    step: Tensor | None,
    guidance_scale: float,
    element_offset: int,
    return_x0: bool,
    return_velocity: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    def output(wanted: bool) -> Tensor:
        return x.new_empty(x.shape if wanted else (0,), dtype=torch.float32)

    return output(True), output(return_x0), output(return_velocity)


@torch.library.custom_op("sage_kernels::sde_step_backward", mutates_args=())
def _backward_op(
    grad_x_next: Tensor,
    grad_x0: Tensor | None,
    grad_velocity: Tensor | None,
    a: Tensor,
    b: Tensor,
    sigma: Tensor | None,
    guidance_scale: float,
    cond_dtype: torch.dtype,
    uncond_dtype: torch.dtype | None,
    x_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    dtypes = (cond_dtype, uncond_dtype, x_dtype)
    if runs_triton(grad_x_next):
        return sde_step_backward(grad_x_next, grad_x0, grad_velocity, a, b, sigma, guidance_scale, dtypes)
    scale = 1.0 if uncond_dtype is None else guidance_scale
    grad_cond, grad_uncond, grad_x = reference.sde_step_backward(
        grad_x_next, grad_x0, grad_velocity, guidance_scale=scale, a=a, b=b, sigma=sigma
    )
    grad_uncond = grad_x.new_empty(0) if uncond_dtype is None else grad_uncond.to(uncond_dtype).contiguous()
    return grad_cond.to(cond_dtype).contiguous(), grad_uncond, grad_x.to(x_dtype).contiguous()


@_backward_op.register_fake
def _(
    grad_x_next: Tensor,
    grad_x0: Tensor | None,
    grad_velocity: Tensor | None,
    a: Tensor,
    b: Tensor,
    sigma: Tensor | None,
    guidance_scale: float,
    cond_dtype: torch.dtype,
    uncond_dtype: torch.dtype | None,
    x_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    shape = grad_x_next.shape
    absent = uncond_dtype is None
    return (
        grad_x_next.new_empty(shape, dtype=cond_dtype),
        grad_x_next.new_empty((0,) if absent else shape, dtype=torch.float32 if absent else uncond_dtype),
        grad_x_next.new_empty(shape, dtype=x_dtype),
    )


def _setup_context(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    v_cond, v_uncond, x, a, b, _, sigma, _, _, ctx.guidance_scale, *_ = inputs
    ctx.save_for_backward(a, b, sigma)
    ctx.dtypes = (v_cond.dtype, None if v_uncond is None else v_uncond.dtype, x.dtype)
    ctx.set_materialize_grads(False)


def _backward(ctx, grad_x_next, grad_x0, grad_velocity):  # type: ignore[no-untyped-def]
    if grad_x_next is None:
        grad_x_next = torch.zeros_like(grad_velocity if grad_x0 is None else grad_x0)
    grad_cond, grad_uncond, grad_x = _backward_op(
        grad_x_next, grad_x0, grad_velocity, *ctx.saved_tensors, ctx.guidance_scale, *ctx.dtypes
    )
    return grad_cond, None if ctx.dtypes[1] is None else grad_uncond, grad_x, *[None] * 10


_forward_op.register_autograd(_backward, setup_context=_setup_context)


def sde_step(
    v_cond: Tensor,
    v_uncond: Tensor | None,
    x: Tensor,
    *,
    guidance_scale: float = 1.0,
    a: float | Tensor,
    b: float | Tensor,
    std: float | Tensor,
    keys: Tensor | None = None,
    step: int | Tensor = 0,
    sigma: float | Tensor | None = None,
    return_x0: bool = False,
    return_velocity: bool = False,
    element_offset: int = 0,
) -> SDEStep:
    """One step  x' = a x + b v + std eps  with  v = v_uncond + g (v_cond - v_uncond).

    Args:
        v_cond: (B, ...) velocity with the prompt; float32, bfloat16 or float16, as v_uncond and x, mixed freely.
        v_uncond: (B, ...) velocity without it; None if v_cond is the guided velocity.
        x: (B, ...) state.
        guidance_scale: g.
        a, b, std: coefficients of the step, numbers or (B,), one per row.
        keys: (B, 2) int64, the two 32-bit words of each row's noise key; None draws no noise, for std = 0 only.
        step: index of the step, or (B,); the third counter word of the noise.
        sigma: noise level of the step, a number or (B,); needed for x0.
        return_x0, return_velocity: also return x - sigma v, and v.
        element_offset: index in its sample of the first element given, where rows hold shards of samples.

    Returns:
        `SDEStep`, float32. Gradients flow into v_cond, v_uncond and x.

    Raises:
        ValueError: for a wrong shape, dtype or device, or a missing keys or sigma.
    """
    name = "sde_step"
    tensors = {"v_cond": v_cond, "v_uncond": v_uncond, "x": x}
    check_tensors(name, tensors)
    check_batch(name, tensors)
    rows = x.shape[0]
    if keys is None:
        if isinstance(std, Tensor) or std != 0:
            raise ValueError(f"{name}: keys are None but std is not the number 0; pass keys (B, 2), whose noise it is")
    else:
        check_noise_owner(name, keys, step, rows, x.device, element_offset)
    if return_x0 and sigma is None:
        raise ValueError(f"{name}: return_x0 needs sigma, the noise level of the step; None was given")
    columns = coefficient_columns(name, {"a": a, "b": b, "std": std, "sigma": sigma}, rows, x.device)
    x_next, x0, velocity = _forward_op(
        v_cond,
        v_uncond,
        x,
        *columns,
        keys,
        None if keys is None else step_column(step, keys),
        float(guidance_scale),
        element_offset,
        return_x0,
        return_velocity,
    )
    return SDEStep(x_next, x0 if return_x0 else None, velocity if return_velocity else None)


def make_inputs(
    case: Case, dtype: torch.dtype, device: torch.device | str, generator: torch.Generator | None
) -> Inputs:
    """Inputs of a case; `x0: 1` in its shape asks for the data prediction, `guided: 0` for no unconditional branch."""
    rows = case.shape["batch"]

    def large(kind: torch.dtype) -> Tensor:
        return random_latents(case, kind, device, generator)

    ramp = torch.linspace(0.5, 1.0, rows, dtype=torch.float32).to(device)
    inputs: Inputs = {
        "v_cond": large(dtype),
        "v_uncond": large(dtype) if case.shape.get("guided", 1) else None,
        "x": large(torch.float32 if case.mixed else dtype),
        "guidance_scale": 6.0,
        "a": 1.0 - 0.1 * ramp,
        "b": -0.08 * ramp,
        "std": 0.2 * ramp,
        "sigma": 0.7 * ramp,
        "keys": noise_keys(rows, device),
        "step": torch.arange(rows, dtype=torch.int64).to(device),
        "element_offset": case.shape.get("offset", 0),
    }
    if case.shape.get("x0", 0):
        inputs |= {"return_x0": True, "return_velocity": True}
    return inputs


def outputs_of(result: SDEStep) -> tuple[Tensor, ...]:
    """The tensors that a call returned."""
    return tuple(tensor for tensor in result if tensor is not None)


def bytes_forward(inputs: Inputs) -> int:
    """The inputs once, every output once in float32, and per row four coefficients and three integers."""
    x = inputs["x"]
    outputs = 1 + 2 * bool(inputs.get("return_x0"))
    return nbytes(x, inputs["v_cond"], inputs["v_uncond"]) + outputs * 4 * x.numel() + x.shape[0] * (4 * 4 + 3 * 8)


def bytes_backward(inputs: Inputs) -> int:
    """The float32 cotangents once, the gradients once, three coefficients per row."""
    x = inputs["x"]
    cotangents = 1 + 2 * bool(inputs.get("return_x0"))
    return nbytes(x, inputs["v_cond"], inputs["v_uncond"]) + cotangents * 4 * x.numel() + x.shape[0] * 3 * 4


def aot_kernels() -> tuple[Kernel, ...]:
    """Builds for bfloat16 and float32 velocities beside a float32 state, with every option and without."""
    scalars = {"guidance_scale": "fp32", "numel": "i64", "num_tiles": "i32"}
    num_warps = LAUNCHES.find(BLOCK, torch.device("cpu")).num_warps
    built = []
    for dtype in ("bf16", "fp32"):
        forward = Kernel(
            name=f"sde_step_forward[{dtype}]",
            function=sde_step_forward_kernel,
            signature={
                **dict.fromkeys(("p_cond", "p_uncond"), f"*{dtype}"),
                **dict.fromkeys(("p_x", "p_a", "p_b", "p_std", "p_sigma"), "*fp32"),
                **dict.fromkeys(("p_keys", "p_step"), "*i64"),
                **dict.fromkeys(("p_next", "p_x0", "p_velocity"), "*fp32"),
                **scalars,
                "first_block": "i64",
                "shift": "i32",
            },
            constexprs={"HAS_UNCOND": True, "HAS_NOISE": True, "HAS_X0": True, "HAS_VELOCITY": True, "BLOCK": BLOCK},
            num_warps=num_warps,
            fp_fusion=False,
            streaming=("p_cond", "p_uncond", "p_x", "p_next", "p_x0", "p_velocity"),
            unaligned=("num_tiles", "first_block"),
        )
        backward = Kernel(
            name=f"sde_step_backward[{dtype}]",
            function=sde_step_backward_kernel,
            signature={
                **dict.fromkeys(("p_grad_next", "p_grad_x0", "p_grad_velocity", "p_a", "p_b", "p_sigma"), "*fp32"),
                **dict.fromkeys(("p_grad_cond", "p_grad_uncond"), f"*{dtype}"),
                "p_grad_x": "*fp32",
                **scalars,
            },
            constexprs={"HAS_UNCOND": True, "HAS_X0": True, "HAS_VELOCITY": True, "BLOCK": BLOCK},
            num_warps=num_warps,
            fp_fusion=False,
            streaming=("p_grad_next", "p_grad_x0", "p_grad_velocity", "p_grad_cond", "p_grad_uncond", "p_grad_x"),
            unaligned=("num_tiles",),
        )
        plain = {"HAS_UNCOND": False, "p_uncond": None, "HAS_X0": False, "p_x0": None}
        plain |= {"HAS_VELOCITY": False, "p_velocity": None}
        built += [forward, forward.variant(f"sde_step_forward[{dtype}, guided outside]", **plain), backward]
    return tuple(built)


SPEC = OpSpec(
    name="sde_step",
    formula="v = v_u + g (v_c - v_u);  x' = a x + b v + std eps(key, step, element);  x0 = x - sigma v",
    source="affine Gaussian transition of SAGE-GRPO (arXiv 2603.21872), DanceGRPO, FlowGRPO and CPS",
    op=lambda **inputs: outputs_of(sde_step(**inputs)),
    reference=lambda **inputs: outputs_of(reference.sde_step(**inputs)),
    make_inputs=make_inputs,
    differentiable=("v_cond", "v_uncond", "x"),
    test_cases=(
        Case(id="latents", shape=latent_shape(2, 4, 3, 6, 8)),
        Case(id="odd", shape=latent_shape(3, 3, 5, 7, 11, x0=1)),
        Case(id="one-element", shape=latent_shape(1, 1, 1, 1, 1, x0=1)),
        Case(id="strided", shape=latent_shape(2, 4, 3, 5, 6), strided=True),
        Case(id="mixed-dtypes", shape=latent_shape(2, 4, 3, 6, 8, x0=1), mixed=True),
        Case(id="guided-outside", shape=latent_shape(2, 4, 3, 6, 8, guided=0, x0=1)),
        Case(id="shard", shape=latent_shape(2, 1, 3, 5, 7, offset=35)),
    ),
    bench_cases=(
        Case(id="A", shape=latent_shape(1, 32, 21, 22, 39), mixed=True),
        Case(id="B", shape=latent_shape(1, 32, 21, 30, 52), mixed=True),
    ),
    bytes_forward=bytes_forward,
    bytes_backward=bytes_backward,
    bytes_formula=("2 S_v + S_x + S_x'", "S_x' + 2 S_v + S_x"),
    atol_fp32=5e-6,
    k_bf16=1.1,
    kernels=aot_kernels,
)
