"""Plain PyTorch twins of every op, with the same names, arguments and results, and the
noise that they draw.

They are frozen: a kernel is judged by them, never the other way round. They take every
float dtype, float64 included, and need no Triton. `sage_kernels.reference` and
`sage_kernels` are two implementations of one interface.
"""

from sage_kernels.reference.adaln import adaln, adaln_backward, adaln_eager
from sage_kernels.reference.gated_residual import (
    gated_residual,
    gated_residual_backward,
    gated_residual_eager,
)
from sage_kernels.reference.gated_residual_adaln import (
    gated_residual_adaln,
    gated_residual_adaln_backward,
    gated_residual_adaln_eager,
)
from sage_kernels.reference.gelu_tanh import (
    gelu_tanh,
    gelu_tanh_backward,
    gelu_tanh_eager,
    linear_gelu_tanh,
)
from sage_kernels.reference.philox import philox_normal
from sage_kernels.reference.policy_loss import (
    LossSettings,
    PolicyTerms,
    StepColumns,
    policy_loss,
    policy_loss_backward,
    policy_loss_forward,
)
from sage_kernels.reference.qk_norm_across_heads import (
    qk_norm_across_heads,
    qk_norm_across_heads_backward,
    qk_norm_across_heads_eager,
)
from sage_kernels.reference.qk_norm_rope import (
    qk_norm_rope,
    qk_norm_rope_backward,
    qk_norm_rope_eager,
)
from sage_kernels.reference.sde_step import (
    gaussian_log_prob,
    sde_step,
    sde_step_log_prob,
)

__all__ = [
    "LossSettings",
    "PolicyTerms",
    "StepColumns",
    "adaln",
    "adaln_backward",
    "adaln_eager",
    "gated_residual",
    "gated_residual_adaln",
    "gated_residual_adaln_backward",
    "gated_residual_adaln_eager",
    "gated_residual_backward",
    "gated_residual_eager",
    "gaussian_log_prob",
    "gelu_tanh",
    "gelu_tanh_backward",
    "gelu_tanh_eager",
    "linear_gelu_tanh",
    "philox_normal",
    "policy_loss",
    "policy_loss_backward",
    "policy_loss_forward",
    "qk_norm_across_heads",
    "qk_norm_across_heads_backward",
    "qk_norm_across_heads_eager",
    "qk_norm_rope",
    "qk_norm_rope_backward",
    "qk_norm_rope_eager",
    "sde_step",
    "sde_step_log_prob",
]
