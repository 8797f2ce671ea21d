"""The one place where sage_fast meets sage_kernels: every formula that has a plain and a fused form.

`sage_kernels.reference` is plain PyTorch; `sage_kernels` has the same functions as Triton kernels, equal to float32
rounding. Both are modules of one interface, `Kernels`, and `model.kernels` chooses between them in `select_kernels`.
Both draw the noise of a sample from its key, so a run may change sides between two checkpoints.

The sampler's step, the loss and the noise themselves are used by `sde.py`, `objective.py` and `noise.py` from here.

Shapes: B batch, C channels, F frames, H, W; of the transformer B, N video tokens, L text tokens, D width, H heads.
"""

import importlib.util
from collections.abc import Callable
from typing import Literal, Protocol

import torch
from torch import Tensor

import sage_kernels
from sage_fast.config.errors import ConfigError
from sage_kernels import LossSettings, PolicyTerms, StepColumns, reference
from sage_kernels.reference.philox import MASK32, philox_normal
from sage_kernels.reference.policy_loss import policy_loss_of_noise
from sage_kernels.reference.sde_step import transition

__all__ = [
    "MASK32",
    "REFERENCE",
    "BlockKernels",
    "Choice",
    "Kernels",
    "LossSettings",
    "PolicyTerms",
    "StepColumns",
    "bytes_moved",
    "philox_normal",
    "policy_loss_of_noise",
    "select_kernels",
    "transition",
    "without_graph",
]

Choice = Literal["auto", "reference", "triton"]


class BlockKernels(Protocol):
    """The transformer's elementwise work. A block calls forward and backward itself, so neither builds a graph."""

    def adaln(self, x: Tensor, scale: Tensor, shift: Tensor, eps: float, tail: int = 0) -> Tensor:
        """LayerNorm(x) * (1 + scale) + shift. x (B, N, D); scale, shift (B, D). `tail` unused columns behind it."""
        ...

    def adaln_backward(
        self,
        grad: Tensor,
        x: Tensor,
        scale: Tensor,
        shift_dtype: torch.dtype,
        eps: float,
        modulation: bool,
        grad_residual: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of x, scale and shift."""
        ...

    def gated_residual(self, x: Tensor, y: Tensor, gate: Tensor) -> Tensor:
        """x + gate * y. x, y (B, N, D); gate (B, D)."""
        ...

    def gated_residual_backward(
        self, grad: Tensor, y: Tensor | None, gate: Tensor, y_dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Gradients of y and gate."""
        ...

    def gated_residual_adaln(
        self, x: Tensor, y: Tensor, gate: Tensor, scale: Tensor, shift: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """r = x + gate * y, and adaln(r, scale, shift)."""
        ...

    def gated_residual_adaln_backward(
        self,
        grad_residual: Tensor,
        grad: Tensor,
        residual: Tensor,
        y: Tensor | None,
        gate: Tensor,
        scale: Tensor,
        y_dtype: torch.dtype,
        shift_dtype: torch.dtype,
        eps: float,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Gradients of x, y, gate, scale and shift."""
        ...

    def qk_norm_rope(
        self,
        q: Tensor,
        k: Tensor,
        q_text: Tensor,
        k_text: Tensor,
        q_weight: Tensor,
        k_weight: Tensor,
        q_text_weight: Tensor,
        k_text_weight: Tensor,
        cos: Tensor,
        sin: Tensor,
        eps: float,
    ) -> tuple[Tensor, Tensor]:
        """Normalised queries and keys (B, N + L, H, D), those of the video rotated and first."""
        ...

    def qk_norm_rope_backward(
        self,
        grad_q: Tensor,
        grad_k: Tensor,
        q: Tensor,
        k: Tensor,
        q_text: Tensor,
        k_text: Tensor,
        q_weight: Tensor,
        k_weight: Tensor,
        q_text_weight: Tensor,
        k_text_weight: Tensor,
        cos: Tensor,
        sin: Tensor,
        eps: float,
        weight_gradients: bool,
    ) -> tuple[Tensor, ...]:
        """Gradients of the first eight arguments of `qk_norm_rope`; those of weights where `weight_gradients` asks."""
        ...

    def qk_norm_across_heads(
        self,
        q: Tensor,
        k: Tensor,
        q_weight: Tensor,
        k_weight: Tensor,
        cos: Tensor | None,
        sin: Tensor | None,
        eps: float,
    ) -> tuple[Tensor, Tensor]:
        """Queries and keys normalised over all heads of a token, and rotated where there are tables."""
        ...

    def qk_norm_across_heads_backward(
        self,
        grad_q: Tensor,
        grad_k: Tensor,
        q: Tensor,
        k: Tensor,
        q_weight: Tensor,
        k_weight: Tensor,
        cos: Tensor | None,
        sin: Tensor | None,
        eps: float,
        weight_gradients: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Gradients of q, k and their weights."""
        ...

    def gelu_tanh(self, x: Tensor) -> Tensor:
        """GELU in its tanh form."""
        ...

    def gelu_tanh_backward(self, grad: Tensor, x: Tensor, output: bool) -> tuple[Tensor, Tensor]:
        """Gradient of x, and gelu_tanh(x) where `output` asks for it."""
        ...

    def linear_gelu_tanh(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """gelu_tanh(x W^T + b), in the epilogue of the matrix product where that exists."""
        ...


class Kernels(BlockKernels, Protocol):
    """Work of training other than matrix products and attention; here `adaln` is also used with autograd.

    `sage_kernels.sde_step` and `sage_kernels.policy_loss` say what they compute.
    """

    def sde_step(self, x: Tensor, v: Tensor, noise_ids: Tensor | None, a: float, b: float, std: float) -> Tensor:
        """Next state  a x + b v + std eps  of a sampler's step, (B, C, F, H, W) float32."""
        ...

    def policy_loss(
        self,
        v: Tensor,
        v_old: Tensor,
        v_anchor: Tensor | None,
        noise_ids: Tensor,
        columns: StepColumns,
        settings: LossSettings,
    ) -> PolicyTerms:
        """Loss per sample of one trained step; its gradient flows into v alone."""
        ...


REFERENCE: Kernels = reference


def select_kernels(choice: Choice, device: torch.device, dtype: torch.dtype = torch.float32) -> Kernels:
    """The implementation that `model.kernels` names for tensors of a device and dtype.

    `auto` is Triton on a GPU where Triton is installed, and the reference elsewhere and in float64. `triton` runs on
    the meta device too, where an op counts as one operator, and on a CPU in Triton's interpreter, which is for tests
    and needs TRITON_INTERPRET=1 from the start of the process.

    Raises:
        ConfigError: `triton` was asked for and cannot run.
    """
    if choice == "reference":
        return REFERENCE
    installed = importlib.util.find_spec("triton") is not None
    if choice == "auto":
        return sage_kernels if installed and device.type == "cuda" and dtype != torch.float64 else REFERENCE
    if not installed:
        raise ConfigError(
            "model.kernels is 'triton', but Triton is not installed here. "
            "Install it (pip install triton) or set model.kernels to auto."
        )
    if dtype == torch.float64:
        raise ConfigError("model.kernels is 'triton', but the model is float64, which only 'reference' computes.")
    from sage_kernels.common import INTERPRETED

    if device.type not in ("cuda", "meta") and not INTERPRETED:
        raise ConfigError(
            f"model.kernels is 'triton', but model.device is {device.type!r} and Triton kernels need a GPU. Set "
            "model.kernels to auto, or TRITON_INTERPRET=1 in the environment to run them slowly in the interpreter."
        )
    return sage_kernels


def without_graph(kernels: Kernels, device: torch.device) -> BlockKernels:
    """Calls of a block, which differentiates by itself: launchers instead of operators, whose argument checks and
    dispatch take more of the host's time than a launch. On the meta device it is operators that are counted.
    """
    if kernels is REFERENCE or device.type == "meta":
        return kernels
    from sage_kernels import launchers

    return launchers


def bytes_moved(function: Callable[[], object], *, without: frozenset[str] = frozenset()) -> int:
    """Bytes that PyTorch operators read and write in a call, on any device; an op of sage_kernels is one operator.

    Args:
        without: names of operators that do not count.
    """
    from sage_kernels.tracer import count

    return count(function, without=without).total
