"""Matrix products in FP8 for passes without a gradient, with a scale for each row of both operands.

    x = s_x q_x,   W = s_W q_W,        y = s_x (q_x q_W^T) s_W + b

q is float8_e4m3fn, largest value 448; a scale is a row's largest magnitude over 448, so each token and each output
channel has one (torchao's `rowwise` recipe). Weights are frozen and rounded once, activations in every product. On a
GPU it is `torch._scaled_mm`. On a CPU the same rounding is emulated in float32, which saves nothing: it is what tests
and the toy world see of it. On Hopper `torch._scaled_mm` accumulates in fewer bits than float32 (`use_fast_accum`, as
in torchao's recipe), which is not emulated.

Shapes: R rows (tokens), K input width, M output width.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from sage_fast.config.errors import ConfigError

FP8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FP8).max

Copies = WeakTensorKeyDictionary
"""By the first weight of layers with one input: which versions of them were copied, and the `Quantized` copy."""


class Quantized(NamedTuple):
    """A matrix (R, K) as float8_e4m3fn values and float32 scales (R, 1)."""

    values: Tensor
    scales: Tensor


def quantize_rows(rows: Tensor) -> Quantized:
    """Round a matrix (R, K) to FP8; two kernels, neither of which writes a wider matrix."""
    largest = torch.linalg.vector_norm(rows, math.inf, dim=1, keepdim=True, dtype=torch.float32)
    scales = largest.clamp_(min=1e-12).div_(LARGEST)
    values = torch.empty(rows.shape, dtype=FP8, device=rows.device)
    return Quantized(torch.mul(rows, scales.reciprocal(), out=values), scales)


def quantized_weights(weights: Sequence[Tensor], copies: Copies) -> Quantized:
    """Frozen weights (M, K) of layers with one input, below each other and transposed, as `scaled_product` takes them.

    Args:
        copies: what was made before; a weight that has changed since gets another one.
    """
    version = tuple((id(weight), weight._version, weight.device) for weight in weights)
    found = copies.get(weights[0])
    if found is None or found[0] != version:
        values, scales = quantize_rows(torch.cat([weight.detach() for weight in weights]))
        found = copies[weights[0]] = version, Quantized(values.t(), scales.t())
    quantized: Quantized = found[1]
    return quantized


def scaled_product(x: Quantized, weight: Quantized, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """x W^T + b, (R, M) in `dtype`, which is bfloat16 on a GPU.

    Args:
        x: (R, K). weight: of (M, K), transposed: values (K, M), scales (1, M).
    """
    if x.values.device.type == "cpu":
        product = (x.values.float() @ weight.values.float()) * x.scales * weight.scales
        return (product if bias is None else product + bias).to(dtype)
    return torch._scaled_mm(
        *(x.values, weight.values, x.scales, weight.scales, bias), out_dtype=dtype, use_fast_accum=True
    )


def check_fp8(device: torch.device, dtype: torch.dtype) -> None:
    """ConfigError where products of weights of a type cannot be in FP8 on a device, found by trying one."""
    one = torch.ones(16, 16, dtype=dtype, device=device)
    try:
        scaled_product(quantize_rows(one), quantized_weights([one], Copies()), None, dtype)
    except (RuntimeError, ValueError) as error:
        raise ConfigError(
            f"model.fp8 is true, but torch {torch.__version__} has no FP8 product with a result of {dtype} on {device} "
            f"({error}). Set model.fp8 to false, or use a GPU that has it (H100, H200, B200, L40S) with model.dtype "
            "bfloat16."
        ) from error
