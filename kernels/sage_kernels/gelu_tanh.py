"""GELU in its tanh form: y = 0.5 x (1 + tanh(u)) = x sigmoid(2 u), u = sqrt(2/pi) (x + 0.044715 x^3).

Source: Hendrycks and Gimpel (arXiv 1606.08415), section 2; `torch.nn.functional.gelu(approximate="tanh")`.
The sigmoid form loses no digits where tanh(u) is near -1, and runs in Triton's interpreter, which has no tanh.

Gradient: dx = g (s + 2 x s (1 - s) u'), with s = sigmoid(2 u) and u' = sqrt(2/pi) (1 + 3 * 0.044715 x^2). The
backward pass can return y as well, for a caller that recomputes activations and needs y for the next layer's weights.

`linear_gelu_tanh` is the other route: the matrix product with the GELU in its epilogue, where the activation costs no
memory traffic at all. cuBLASLt keeps no pre-activation for a backward pass through PyTorch, so it serves where nothing
needs a gradient: rollouts and anchor passes.

Names in kernels: i_ index, o_ offsets, m_ mask.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F
from torch.utils.flop_counter import register_flop_formula

from sage_kernels import common
from sage_kernels.common import Launch, LaunchTable, narrow
from sage_kernels.reference import gelu_tanh as reference
from sage_kernels.registry import Case, Inputs, Kernel, OpSpec, nbytes, random_tensor

ROOT_TWO_OVER_PI = tl.constexpr(math.sqrt(2 / math.pi))
CUBIC = tl.constexpr(0.044715)

# Elements of a program; the launch table is keyed by it.
BLOCK = 2048
LAUNCH = LaunchTable({(None, None): Launch(num_warps=8)})


@triton.jit
def gelu_tanh_forward_kernel(x_ptr, out_ptr, size, BLOCK: tl.constexpr):
    """Program i handles elements i * BLOCK ... of contiguous tensors."""
    o_e = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    m_e = o_e < size
    x = tl.load(x_ptr + o_e, mask=m_e, other=0.0).to(tl.float32)
    u = ROOT_TWO_OVER_PI * x * (1.0 + CUBIC * x * x)
    tl.store(out_ptr + o_e, narrow(x * tl.sigmoid(2.0 * u), out_ptr.dtype.element_ty), mask=m_e)


@triton.jit
def gelu_tanh_backward_kernel(grad_ptr, x_ptr, dx_ptr, out_ptr, size, BLOCK: tl.constexpr, OUTPUT: tl.constexpr):
    """Program i handles elements i * BLOCK ... of contiguous tensors. Without OUTPUT out_ptr is None."""
    o_e = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    m_e = o_e < size
    grad = tl.load(grad_ptr + o_e, mask=m_e, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + o_e, mask=m_e, other=0.0).to(tl.float32)
    u = ROOT_TWO_OVER_PI * x * (1.0 + CUBIC * x * x)
    u_slope = ROOT_TWO_OVER_PI * (1.0 + 3.0 * CUBIC * x * x)
    s = tl.sigmoid(2.0 * u)
    dx = grad * (s + 2.0 * x * s * (1.0 - s) * u_slope)
    tl.store(dx_ptr + o_e, narrow(dx, dx_ptr.dtype.element_ty), mask=m_e)
    if OUTPUT:
        tl.store(out_ptr + o_e, narrow(x * s, out_ptr.dtype.element_ty), mask=m_e)


def launch_forward(x: Tensor) -> Tensor:
    """Run the forward kernel; x of any shape."""
    x = x.contiguous()
    out = common.empty_like(x)
    launch = LAUNCH.find(BLOCK, x.device)
    if out.numel():
        with common.on_device_of(x):
            gelu_tanh_forward_kernel[common.cdiv(x.numel(), BLOCK),](
                x, out, x.numel(), BLOCK=BLOCK, num_warps=launch.num_warps
            )
    return out


def launch_backward(grad: Tensor, x: Tensor, output: bool = False) -> tuple[Tensor, Tensor]:
    """Run the backward kernel; grad and x of one shape. Returns dx, and y where `output` asks for it (else empty)."""
    grad, x = grad.contiguous(), x.contiguous()
    dx = common.empty_like(x)
    out = common.empty_like(x) if output else x.new_empty(0)
    launch = LAUNCH.find(BLOCK, x.device)
    if dx.numel():
        with common.on_device_of(x):
            gelu_tanh_backward_kernel[common.cdiv(x.numel(), BLOCK),](
                grad,
                x,
                dx,
                out if output else None,
                x.numel(),
                BLOCK=BLOCK,
                OUTPUT=output,
                num_warps=launch.num_warps,
            )
    return dx, out


@torch.library.custom_op("sage_kernels::gelu_tanh", mutates_args=())
def _gelu_tanh(x: Tensor) -> Tensor:
    return (launch_forward if common.runs_triton(x) else reference.gelu_tanh)(x)


@torch.library.custom_op("sage_kernels::gelu_tanh_backward", mutates_args=())
def _gelu_tanh_backward(grad: Tensor, x: Tensor, output: bool = False) -> tuple[Tensor, Tensor]:
    return (launch_backward if common.runs_triton(x) else reference.gelu_tanh_backward)(grad, x, output)


@_gelu_tanh.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty(x.shape)


@_gelu_tanh_backward.register_fake
def _(grad: Tensor, x: Tensor, output: bool = False) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape if output else (0,))


def _setup_context(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx, grad: Tensor) -> Tensor:
    return _gelu_tanh_backward(grad, *ctx.saved_tensors)[0]


_gelu_tanh.register_autograd(_backward, setup_context=_setup_context)


def gelu_tanh(x: Tensor) -> Tensor:
    """Tanh GELU of every element.

    Args:
        x: any shape, float32, bfloat16 or float16. Copied if it is not contiguous.

    Returns:
        The shape and dtype of x, contiguous. Computed in float32, rounded once.

    Raises:
        ValueError: another dtype.
    """
    common.check_tensors("gelu_tanh", {"x": x})
    return _gelu_tanh(x)


@register_flop_formula(torch.ops.aten._addmm_activation)
def _linear_flops(bias_shape, rows_shape, weight_shape, *args, out_shape=None, **kwargs) -> int:
    """torch counts `addmm`, not its variant with an activation."""
    return 2 * rows_shape[0] * rows_shape[1] * weight_shape[1]


def linear_gelu_tanh(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """gelu_tanh(x @ weight.T + bias), in the epilogue of the matrix product where no gradient is needed on CUDA.

    Args:
        x: (..., K) float32, bfloat16 or float16.
        weight: (M, K), bias: (M,), both in x's dtype, as torch.nn.Linear has them.

    Returns:
        (..., M) in x's dtype. With a gradient to come, or on a CPU: torch's linear, then `gelu_tanh`.

    Raises:
        ValueError: shapes or dtypes that do not fit, tensors on several devices.
    """
    common.check_tensors("gelu_tanh", {"x": x, "weight": weight, "bias": bias})
    common.check_ndim("linear_gelu_tanh", "weight", weight, "(M, K)")
    common.check_shape("linear_gelu_tanh", "bias", bias, weight.shape[:1], "(M,)")
    if x.ndim == 0 or x.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"linear_gelu_tanh: x has shape {tuple(x.shape)}; its last dimension must be K = {weight.shape[1]}, "
            "the columns of weight"
        )
    if not x.dtype == weight.dtype == bias.dtype:
        raise ValueError(
            f"linear_gelu_tanh: x, weight and bias have dtypes {x.dtype}, {weight.dtype} and {bias.dtype}; "
            "they must be equal, as for torch.nn.functional.linear"
        )
    needs_gradient = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (x, weight, bias))
    if x.device.type != "cpu" and not needs_gradient:
        # On a CPU the same PyTorch function applies the erf form of GELU, another function.
        rows = torch.ops.aten._addmm_activation(bias, x.flatten(0, -2), weight.t(), use_gelu=True)
        return rows.unflatten(0, x.shape[:-1])
    return gelu_tanh(F.linear(x, weight, bias))


def _make_inputs(
    case: Case, dtype: torch.dtype, device: torch.device | str, generator: torch.Generator | None
) -> Inputs:
    x = random_tensor(*case.shape.values(), dtype=dtype, device=device, generator=generator, strided=case.strided)
    return {"x": x if generator is None else x * 3}


def _kernels() -> tuple[Kernel, ...]:
    built = []
    for dtype in ("bf16", "fp32"):
        for direction, function, pointers in (
            ("forward", gelu_tanh_forward_kernel, ("x_ptr", "out_ptr")),
            ("backward_output", gelu_tanh_backward_kernel, ("grad_ptr", "x_ptr", "dx_ptr", "out_ptr")),
        ):
            kernel = Kernel(
                name=f"gelu_tanh_{direction}[{dtype}]",
                function=function,
                signature={name: f"*{dtype}" for name in pointers} | {"size": "i32"},
                constexprs={"BLOCK": BLOCK} | ({"OUTPUT": True} if "backward" in direction else {}),
                num_warps=LAUNCH.find(BLOCK).num_warps,
                streaming=pointers,
            )
            built.append(kernel)
        built.append(kernel.variant(f"gelu_tanh_backward[{dtype}]", out_ptr=None, OUTPUT=False))
    return tuple(built)


SPEC = OpSpec(
    name="gelu_tanh",
    formula="0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))",
    source="arXiv 1606.08415 section 2; torch gelu(approximate='tanh')",
    op=gelu_tanh,
    reference=reference.gelu_tanh,
    eager=reference.gelu_tanh_eager,
    make_inputs=_make_inputs,
    differentiable=("x",),
    test_cases=(
        Case(id="one-element", shape={"tokens": 1, "width": 1}),
        Case(id="odd", shape={"batch": 3, "tokens": 17, "width": 37}),
        Case(id="strided", shape={"batch": 2, "tokens": 9, "width": 24}, strided=True),
        Case(id="several-blocks", shape={"elements": 5000}),
    ),
    bench_cases=(
        Case(id="A", shape={"batch": 1, "tokens": 18018, "width": 8192}),
        Case(id="B", shape={"batch": 1, "tokens": 32760, "width": 8192}),
    ),
    bytes_forward=lambda i: 2 * nbytes(i["x"]),
    bytes_backward=lambda i: 3 * nbytes(i["x"]),
    bytes_formula=("2 S", "3 S"),
    k_bf16=1.1,
    dtypes=(torch.float32, torch.bfloat16, torch.float16),
    kernels=_kernels,
)
