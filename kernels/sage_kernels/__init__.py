"""Fused Triton kernels for flow-matching reinforcement learning; needs only torch and
triton, no GPU to import.

`sage_kernels.adaln` and its like are functions; an op's file is
`sage_kernels/ops/<op>.py`, its plain PyTorch twin `sage_kernels.reference.<op>`. See
kernels/README.md.
"""

import importlib.util

from sage_kernels.reference import gaussian_log_prob
from sage_kernels.reference.policy_loss import LossSettings, PolicyTerms, StepColumns

__version__ = "0.1.0"

__all__ = ["LossSettings", "PolicyTerms", "StepColumns", "gaussian_log_prob"]

if importlib.util.find_spec("triton") is not None:
    # Where Triton has no build there are no ops, but the references still serve.
    from sage_kernels.ops.adaln import adaln, adaln_backward
    from sage_kernels.ops.gated_residual import gated_residual, gated_residual_backward
    from sage_kernels.ops.gated_residual_adaln import (
        gated_residual_adaln,
        gated_residual_adaln_backward,
    )
    from sage_kernels.ops.gelu_tanh import (
        gelu_tanh,
        gelu_tanh_backward,
        linear_gelu_tanh,
    )
    from sage_kernels.ops.policy_loss import policy_loss
    from sage_kernels.ops.qk_norm_across_heads import (
        qk_norm_across_heads,
        qk_norm_across_heads_backward,
    )
    from sage_kernels.ops.qk_norm_rope import qk_norm_rope, qk_norm_rope_backward
    from sage_kernels.ops.sde_step import sde_step, sde_step_log_prob

    __all__ += [
        "adaln",
        "adaln_backward",
        "gated_residual",
        "gated_residual_adaln",
        "gated_residual_adaln_backward",
        "gated_residual_backward",
        "gelu_tanh",
        "gelu_tanh_backward",
        "linear_gelu_tanh",
        "policy_loss",
        "qk_norm_across_heads",
        "qk_norm_across_heads_backward",
        "qk_norm_rope",
        "qk_norm_rope_backward",
        "sde_step",
        "sde_step_log_prob",
    ]
