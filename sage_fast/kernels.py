"""The one place where sage_fast meets sage_kernels: every formula that has a plain and
a fused form.

`sage_kernels.reference` is plain PyTorch; `sage_kernels` has the same functions as
Triton kernels, equal to float32 rounding. Both are modules of one interface, `Kernels`,
and `model.kernels` chooses between them in `select_kernels`. The signatures are the
reference's, which says what each computes and in which shapes. Both draw the noise of a
sample
from its key, so a run may change sides between two checkpoints.

The sampler's step, the loss and the noise themselves are used by `sde.py`,
`objective.py` and `noise.py` from here.
"""

# mypy: disable-error-code="misc"
# A member of a protocol has to have its type written out; here it is taken from the
# reference, and modules are held to it all the same.

import importlib.util
from typing import Literal, Protocol, cast

import torch

import sage_kernels
from sage_fast.config.errors import ConfigError
from sage_kernels import LossSettings, PolicyTerms, StepColumns, reference
from sage_kernels.reference.adaln import row_length
from sage_kernels.reference.philox import philox_normal
from sage_kernels.reference.policy_loss import policy_loss_of_noise
from sage_kernels.reference.sde_step import transition
from sage_kernels.tracer import moved

__all__ = [
    "REFERENCE",
    "BlockKernels",
    "Choice",
    "Kernels",
    "LossSettings",
    "PolicyTerms",
    "StepColumns",
    "moved",
    "philox_normal",
    "policy_loss_of_noise",
    "row_length",
    "select_kernels",
    "transition",
    "without_graph",
]

Choice = Literal["auto", "reference", "triton"]


class BlockKernels(Protocol):
    """The transformer's elementwise work. A block calls forward and backward itself, so
    neither builds a graph.
    """

    adaln = staticmethod(reference.adaln)
    adaln_backward = staticmethod(reference.adaln_backward)
    gated_residual = staticmethod(reference.gated_residual)
    gated_residual_backward = staticmethod(reference.gated_residual_backward)
    gated_residual_adaln = staticmethod(reference.gated_residual_adaln)
    gated_residual_adaln_backward = staticmethod(
        reference.gated_residual_adaln_backward
    )
    qk_norm_rope = staticmethod(reference.qk_norm_rope)
    qk_norm_rope_backward = staticmethod(reference.qk_norm_rope_backward)
    qk_norm_across_heads = staticmethod(reference.qk_norm_across_heads)
    qk_norm_across_heads_backward = staticmethod(
        reference.qk_norm_across_heads_backward
    )
    gelu_tanh = staticmethod(reference.gelu_tanh)
    gelu_tanh_backward = staticmethod(reference.gelu_tanh_backward)
    linear_gelu_tanh = staticmethod(reference.linear_gelu_tanh)


class Kernels(BlockKernels, Protocol):
    """Work of training other than matrix products and attention; here `adaln` is also
    used with autograd.
    """

    sde_step = staticmethod(reference.sde_step)
    policy_loss = staticmethod(reference.policy_loss)


REFERENCE: Kernels = reference


def select_kernels(
    choice: Choice, device: torch.device, dtype: torch.dtype = torch.float32
) -> Kernels:
    """The implementation that `model.kernels` names for tensors of a device and dtype.

    `auto` is Triton on a GPU where Triton is installed, and the reference elsewhere and
    in float64. `triton` runs on the meta device too, where an op counts as one
    operator, and on a CPU in Triton's interpreter, which is for tests and needs
    TRITON_INTERPRET=1 from the start of the process.

    Raises:
        ConfigError: `triton` was asked for and cannot run.
    """
    if choice == "reference":
        return REFERENCE
    installed = importlib.util.find_spec("triton") is not None
    if choice == "auto":
        if installed and device.type == "cuda" and dtype != torch.float64:
            return sage_kernels
        return REFERENCE
    if not installed:
        raise ConfigError(
            "model.kernels is 'triton', but Triton is not installed here. "
            "Install it (pip install triton) or set model.kernels to auto."
        )
    if dtype == torch.float64:
        raise ConfigError(
            "model.kernels is 'triton', but the model is float64, which only "
            "'reference' computes."
        )
    from sage_kernels.common import INTERPRETED

    if device.type not in ("cuda", "meta") and not INTERPRETED:
        raise ConfigError(
            f"model.kernels is 'triton', but model.device is {device.type!r} and "
            "Triton kernels need a GPU. Set "
            "model.kernels to auto, or TRITON_INTERPRET=1 in the environment to run "
            "them slowly in the interpreter."
        )
    return sage_kernels


def without_graph(kernels: Kernels, device: torch.device) -> BlockKernels:
    """Calls of a block, which differentiates by itself: launchers instead of operators,
    whose argument checks and dispatch take more of the host's time than a launch. On
    the meta device it is operators that are counted.
    """
    if kernels is REFERENCE or device.type == "meta":
        return kernels
    from sage_kernels import launchers

    # A block gives every argument, so they have no defaults.
    return cast(BlockKernels, launchers)
