"""Matrix products in FP8 for passes without a gradient, with a scale for each row of both operands.

    x = s_x q_x,   W = s_W q_W,        y = s_x (q_x q_W^T) s_W + b

q is float8_e4m3fn, largest value 448; a scale is a row's largest magnitude over 448, so each token and each output
channel has one (torchao's `rowwise` recipe). Weights are frozen and quantized once, activations in every product. On a
GPU it is `torch._scaled_mm`. On a CPU the same rounding is emulated in float32, which saves nothing: it is what tests
and the toy world see of it. On Hopper `torch._scaled_mm` accumulates in fewer bits than float32 (`use_fast_accum`, as
in torchao's recipe), which is not emulated.

Shapes: R rows (tokens), K input width, M output width.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from sage_fast.config.errors import ConfigError

FP8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FP8).max
CAPABILITY = (8, 9)
"""Compute capability of the first GPUs that multiply FP8: Ada, then Hopper and Blackwell."""

_REMEDY = "Set model.fp8 to none, or use a GPU that has it (H100, H200, B200, L40S)."


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


def scaled_product(x: Quantized, weight: Quantized, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """x W^T + b, (R, M) in `dtype`, which is bfloat16 on a GPU.

    Args:
        x: (R, K). weight: of (M, K), transposed: values (K, M), scales (1, M).
    """
    if x.values.device.type == "cpu":
        return emulated_product(x, weight, bias, dtype)
    return torch._scaled_mm(
        *(x.values, weight.values, x.scales, weight.scales, bias), out_dtype=dtype, use_fast_accum=True
    )


def emulated_product(x: Quantized, weight: Quantized, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """`scaled_product` of the same rounded values, multiplied and added up in float32."""
    product = (x.values.float() @ weight.values.float()) * x.scales * weight.scales
    return (product if bias is None else product + bias.float()).to(dtype)


class QuantizedWeights:
    """FP8 copies of frozen weights, each made when it is first asked for; a weight that changes gets another one."""

    def __init__(self) -> None:
        self._found = WeakTensorKeyDictionary()

    def joined(self, weights: Sequence[Tensor]) -> Quantized:
        """Weights (M, K) of layers with one input, below each other and transposed, as `scaled_product` takes them."""
        version = tuple((id(weight), weight._version, weight.device) for weight in weights)
        found = self._found.get(weights[0])
        if found is None or found[0] != version:
            values, scales = quantize_rows(torch.cat([weight.detach() for weight in weights]))
            found = version, Quantized(values.t(), scales.t())
            self._found[weights[0]] = found
        quantized: Quantized = found[1]
        return quantized

    def __reduce__(self) -> tuple[type["QuantizedWeights"], tuple[()]]:
        """A copy or a pickle is empty: it holds weights by identity."""
        return QuantizedWeights, ()

    def tensors(self) -> list[Tensor]:
        """What it holds."""
        return [tensor for _, quantized in self._found.values() for tensor in quantized]

    def forget(self) -> None:
        """Drop the copies, after weights were written through `.data`, which leaves no trace."""
        self._found.clear()


def check_fp8(transformer: nn.Module) -> None:
    """Whether `model.fp8` can be computed where a transformer is.

    Raises:
        ConfigError: a GPU without FP8 products, or weights that are not bfloat16 on one that has them.
    """
    weight = next(transformer.parameters())
    if weight.device.type != "cuda":
        return
    name, found = torch.cuda.get_device_name(weight.device), torch.cuda.get_device_capability(weight.device)
    if found < CAPABILITY:
        raise ConfigError(
            f"model.fp8 needs a GPU of compute capability {'.'.join(map(str, CAPABILITY))} or more, and {name} has "
            f"{'.'.join(map(str, found))}. {_REMEDY}"
        )
    frozen = {p.dtype for p in transformer.parameters() if not p.requires_grad}
    if torch.bfloat16 not in frozen:
        raise ConfigError(
            "model.fp8 needs bfloat16 weights on a GPU. Set model.dtype to bfloat16, or model.fp8 to none."
        )
    try:
        one = quantize_rows(torch.ones(16, 16, dtype=torch.bfloat16, device=weight.device))
        scaled_product(one, Quantized(one.values.t(), one.scales.t()), None, torch.bfloat16)
    except RuntimeError as error:
        # Not every build of torch has the product with a scale per row for every GPU that multiplies FP8.
        raise ConfigError(f"torch {torch.__version__} has no FP8 product for {name}: {error}. {_REMEDY}") from error
