"""Fused Triton kernels for flow-matching reinforcement learning; needs only torch and triton, no GPU to import.

`sage_kernels.adaln` and its like are functions; the file of an op is `sage_kernels/<op>.py`, its plain PyTorch twin
`sage_kernels.reference.<op>`. See kernels/README.md.
"""

import importlib.util

if importlib.util.find_spec("triton") is not None:
    # Where Triton has no build there are no ops, but the references still serve.
    from sage_kernels.adaln import adaln
    from sage_kernels.gated_residual import gated_residual
    from sage_kernels.gated_residual_adaln import gated_residual_adaln
    from sage_kernels.gelu_tanh import gelu_tanh, linear_gelu_tanh
    from sage_kernels.grpo_objective import grpo_objective
    from sage_kernels.policy_terms import policy_terms
    from sage_kernels.qk_norm_rope import qk_norm_rope
    from sage_kernels.sde_step import sde_step

    __all__ = [
        "adaln",
        "gated_residual",
        "gated_residual_adaln",
        "gelu_tanh",
        "grpo_objective",
        "linear_gelu_tanh",
        "policy_terms",
        "qk_norm_rope",
        "sde_step",
    ]
