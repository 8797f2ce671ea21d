"""GELU in its tanh form: y = 0.5 x (1 + tanh(u)) = x sigmoid(2 u), u = sqrt(2/pi) (x +
0.044715 x^3).

The kernels compute y = x / (1 + 2^p), p = -2 u log2(e) = x (c1 + c2 x^2), in the fewest
instructions.

Source: Hendrycks and Gimpel (arXiv 1606.08415), section 2;
`torch.nn.functional.gelu(approximate="tanh")`. The sigmoid form loses no digits where
tanh(u) is near -1, and runs in Triton's interpreter, which has no tanh.

Gradient: dx = g (s + 2 x s (1 - s) u'), with s = sigmoid(2 u) and u' = sqrt(2/pi) (1 +
3 * 0.044715 x^2). The backward pass can return y as well, for a caller that recomputes
activations and needs y for the next layer's weights.

`linear_gelu_tanh` is the other route: the matrix product with the GELU in its epilogue,
where the activation costs no memory traffic at all. cuBLASLt keeps no pre-activation
for a backward pass through PyTorch, so it serves where nothing needs a gradient:
rollouts and anchor passes.

Names in kernels: i_ index, o_ offsets, m_ mask.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Generator, Tensor
from torch.nn import functional as F
from torch.utils.flop_counter import register_flop_formula

from sage_kernels import common, reference
from sage_kernels.common import load, store
from sage_kernels.custom_op import operator
from sage_kernels.launch import Launch, cdiv, launch
from sage_kernels.registry import Case, Device, Inputs, OpSpec, nbytes, random_tensor

LINEAR = tl.constexpr(-2 * math.sqrt(2 / math.pi) / math.log(2))
CUBIC = tl.constexpr(-2 * math.sqrt(2 / math.pi) / math.log(2) * 0.044715)
LN_2 = tl.constexpr(math.log(2))

FORWARD_BLOCK = 4096
BACKWARD_BLOCK = 2048
"""Elements of a program."""
LAUNCH = Launch(num_warps=4)
"""32 and 16 elements a thread share the instructions that do not depend on their
number.
"""


@triton.jit
def gelu_tanh_forward_kernel(x_ptr, out_ptr, size, BLOCK: tl.constexpr):
    """Program i handles elements i * BLOCK ... of contiguous tensors."""
    o_e = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    m_e = o_e < size
    x = load(x_ptr + o_e, m_e)
    out = x / (1.0 + tl.exp2(x * (LINEAR + CUBIC * (x * x))))
    store(out_ptr + o_e, out, m_e)


@triton.jit
def gelu_tanh_backward_kernel(
    grad_ptr, x_ptr, dx_ptr, out_ptr, size, BLOCK: tl.constexpr
):
    """Program i handles elements i * BLOCK ... of contiguous tensors; out_ptr may be
    None.
    """
    o_e = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    m_e = o_e < size
    grad = load(grad_ptr + o_e, m_e)
    x = load(x_ptr + o_e, m_e)
    square = x * x
    inverse = 1.0 + tl.exp2(x * (LINEAR + CUBIC * square))
    s = 1.0 / inverse
    dx = grad * s * (1.0 - (LN_2 * x) * (1.0 - s) * (LINEAR + 3.0 * CUBIC * square))
    store(dx_ptr + o_e, dx, m_e)
    if out_ptr is not None:
        store(out_ptr + o_e, x / inverse, m_e)


def launch_forward(x: Tensor) -> Tensor:
    """Run the forward kernel; x of any shape."""
    x = x.contiguous()
    out = common.empty_like(x)
    grid = (cdiv(x.numel(), FORWARD_BLOCK),)
    launch(
        gelu_tanh_forward_kernel,
        grid,
        x,
        out,
        x.numel(),
        BLOCK=FORWARD_BLOCK,
        settings=LAUNCH,
    )
    return out


def launch_backward(
    grad: Tensor, x: Tensor, output: bool = False
) -> tuple[Tensor, Tensor]:
    """Run the backward kernel; grad and x of one shape. Returns dx, and y where
    `output` asks for it (else empty).
    """
    grad = grad.contiguous()
    x = x.contiguous()
    dx = common.empty_like(x)
    out = common.empty_like(x) if output else None
    grid = (cdiv(x.numel(), BACKWARD_BLOCK),)
    launch(
        gelu_tanh_backward_kernel,
        grid,
        grad,
        x,
        dx,
        out,
        x.numel(),
        BLOCK=BACKWARD_BLOCK,
        settings=LAUNCH,
    )
    return dx, x.new_empty(0) if out is None else out


def launch_linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Run the matrix product with the GELU in its epilogue; arguments and result as
    `linear_gelu_tanh`.
    """
    if x.device.type == "cpu":
        # There the PyTorch function below applies the erf form of GELU, another
        # function.
        return launch_forward(F.linear(x, weight, bias))
    *shape, width = x.shape  # one row has no dimension to flatten
    rows = torch.ops.aten._addmm_activation(
        bias, x.reshape(math.prod(shape), width), weight.t(), use_gelu=True
    )
    return rows.view(*shape, weight.shape[0])


gelu_tanh_backward = operator(
    "gelu_tanh_backward(Tensor grad, Tensor x, bool output=False) -> (Tensor, Tensor)",
    launcher=launch_backward,
    reference=reference.gelu_tanh_backward,
)
_gelu_tanh = operator(
    "gelu_tanh(Tensor x) -> Tensor",
    launcher=launch_forward,
    reference=reference.gelu_tanh,
    save=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    backward=lambda ctx, grad: gelu_tanh_backward(grad, *ctx.saved_tensors)[0],
)


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
def _linear_flops(
    bias_shape, rows_shape, weight_shape, *args, out_shape=None, **kwargs
) -> int:
    """torch counts `addmm`, not its variant with an activation."""
    return 2 * rows_shape[0] * rows_shape[1] * weight_shape[1]


def linear_gelu_tanh(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """gelu_tanh(x @ weight.T + bias), in the epilogue of the matrix product where no
    gradient is needed on CUDA.

    Args:
        x: (..., K) float32, bfloat16 or float16.
        weight: (M, K), bias: (M,), both in x's dtype, as torch.nn.Linear has them.

    Returns:
        (..., M) in x's dtype. With a gradient to come, or on a CPU: torch's linear,
        then `gelu_tanh`.

    Raises:
        ValueError: shapes or dtypes that do not fit, tensors on several devices.
    """
    common.check_tensors("linear_gelu_tanh", {"x": x, "weight": weight, "bias": bias})
    common.check_ndim("linear_gelu_tanh", "weight", weight, "(M, K)")
    common.check_shape("linear_gelu_tanh", "bias", bias, weight.shape[:1], "(M,)")
    if x.ndim == 0 or x.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"linear_gelu_tanh: x has shape {tuple(x.shape)}; its last dimension must "
            f"be K = {weight.shape[1]}, "
            "the columns of weight"
        )
    if not x.dtype == weight.dtype == bias.dtype:
        raise ValueError(
            f"linear_gelu_tanh: x, weight and bias have dtypes {x.dtype}, "
            f"{weight.dtype} and {bias.dtype}; "
            "they must be equal, as for torch.nn.functional.linear"
        )
    needs_gradient = torch.is_grad_enabled() and any(
        tensor.requires_grad for tensor in (x, weight, bias)
    )
    if needs_gradient or x.device.type == "cpu":
        return gelu_tanh(F.linear(x, weight, bias))
    return launch_linear(x, weight, bias)


def _make_inputs(
    case: Case, dtype: torch.dtype, device: Device, generator: Generator | None
) -> Inputs:
    x = random_tensor(
        *case.shape.values(),
        dtype=dtype,
        device=device,
        generator=generator,
        strided=case.strided,
    )
    return {"x": x if generator is None else x * 3}


_SHAPES = {
    "A": {"batch": 1, "tokens": 18018, "width": 8192},
    "B": {"batch": 1, "tokens": 32760, "width": 8192},
}

SPEC = OpSpec(
    name="gelu_tanh",
    formula="0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))",
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
        *(
            Case(id=id, shape=shape, backward={"output": True})
            for id, shape in _SHAPES.items()
        ),
        Case(id="B, second layer frozen", shape=_SHAPES["B"]),
    ),
    letters=lambda i: {"S": nbytes(i["x"])},
    bytes_formula=("2 S", "4 S"),
)
