"""Where the transformer meets sage_kernels: its elementwise ops with explicit backward passes, plain or fused.

The reference is plain PyTorch and takes every dtype, float64 included; the others are the custom ops of sage_kernels. A
block calls forward and backward itself, so neither builds a graph; `adaln` alone is also used with autograd.

Shapes: B batch, N video tokens, L text tokens, D width, H heads.
"""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

Choice = Literal["auto", "reference", "triton"]


@dataclass(frozen=True, kw_only=True)
class TransformerKernels:
    """One implementation; signatures are those of `sage_kernels.reference`, with every argument given by position."""

    name: str
    adaln: Callable[..., Tensor]
    adaln_backward: Callable[..., tuple[Tensor, Tensor, Tensor]]
    gated_residual: Callable[..., Tensor]
    gated_residual_backward: Callable[..., tuple[Tensor, Tensor]]
    gated_residual_adaln: Callable[..., tuple[Tensor, Tensor]]
    gated_residual_adaln_backward: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor, Tensor]]
    qk_norm_rope: Callable[..., tuple[Tensor, Tensor]]
    qk_norm_rope_backward: Callable[..., tuple[Tensor, ...]]
    gelu_tanh: Callable[[Tensor], Tensor]
    gelu_tanh_backward: Callable[[Tensor, Tensor, bool], tuple[Tensor, Tensor]]
    linear_gelu_tanh: Callable[[Tensor, Tensor, Tensor], Tensor]
    """gelu_tanh(x W^T + b), in the epilogue of the matrix product where that exists."""


def _linear_gelu_tanh(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    from sage_kernels.reference import gelu_tanh

    return gelu_tanh.gelu_tanh(F.linear(x, weight, bias))


def _reference() -> TransformerKernels:
    from sage_kernels.reference import adaln, gated_residual, gated_residual_adaln, gelu_tanh, qk_norm_rope

    return TransformerKernels(
        name="reference",
        adaln=adaln.adaln,
        adaln_backward=adaln.adaln_backward,
        gated_residual=gated_residual.gated_residual,
        gated_residual_backward=gated_residual.gated_residual_backward,
        gated_residual_adaln=gated_residual_adaln.gated_residual_adaln,
        gated_residual_adaln_backward=gated_residual_adaln.gated_residual_adaln_backward,
        qk_norm_rope=qk_norm_rope.qk_norm_rope,
        qk_norm_rope_backward=qk_norm_rope.qk_norm_rope_backward,
        gelu_tanh=gelu_tanh.gelu_tanh,
        gelu_tanh_backward=gelu_tanh.gelu_tanh_backward,
        linear_gelu_tanh=_linear_gelu_tanh,
    )


def _fused() -> TransformerKernels:
    # Importing the package registers the operators.
    from sage_kernels.gelu_tanh import linear_gelu_tanh

    ops: Any = torch.ops.sage_kernels
    return TransformerKernels(
        name="triton",
        adaln=ops.adaln,
        adaln_backward=ops.adaln_backward,
        gated_residual=ops.gated_residual,
        gated_residual_backward=ops.gated_residual_backward,
        gated_residual_adaln=ops.gated_residual_adaln,
        gated_residual_adaln_backward=ops.gated_residual_adaln_backward,
        qk_norm_rope=ops.qk_norm_rope,
        qk_norm_rope_backward=ops.qk_norm_rope_backward,
        gelu_tanh=ops.gelu_tanh,
        gelu_tanh_backward=ops.gelu_tanh_backward,
        linear_gelu_tanh=linear_gelu_tanh,
    )


def select_transformer_kernels(choice: Choice, device: torch.device, dtype: torch.dtype) -> TransformerKernels:
    """The implementation that `model.kernels` names for tensors of a device and dtype.

    `auto` is Triton on a GPU, and the reference elsewhere and in float64. `triton` runs on the meta device too, where
    an op counts as one operator, and on a CPU under TRITON_INTERPRET=1.

    Raises:
        ValueError: `triton` was asked for and cannot run.
    """
    installed = importlib.util.find_spec("triton") is not None
    if choice == "reference" or (
        choice == "auto" and not (installed and device.type == "cuda" and dtype != torch.float64)
    ):
        return _reference()
    if not installed:
        raise ValueError(
            "kernels is 'triton', but Triton is not installed here. Install it (pip install triton), or choose auto."
        )
    if dtype == torch.float64:
        raise ValueError("kernels is 'triton', but the model is float64, which only the kernels 'reference' take.")
    from sage_kernels.common import INTERPRETED

    if device.type == "cpu" and not INTERPRETED:
        raise ValueError(
            "kernels is 'triton', but the model is on the CPU and Triton kernels need a GPU. Choose auto, or set "
            "TRITON_INTERPRET=1 in the environment to run them slowly in the interpreter."
        )
    return _fused()
