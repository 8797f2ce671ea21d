"""The transformer's kernels without argument checks, dispatcher and autograd, which
cost 18 to 98 us of Python a call.

For a caller that differentiates by itself. Names, arguments and results are those of
the operators; the tensors fit together and are on one GPU, or on the CPU where Triton
interprets.
"""

from sage_kernels.ops.adaln import launch_backward as adaln_backward
from sage_kernels.ops.adaln import launch_forward as adaln
from sage_kernels.ops.gated_residual import launch_backward as gated_residual_backward
from sage_kernels.ops.gated_residual import launch_forward as gated_residual
from sage_kernels.ops.gated_residual_adaln import (
    launch_backward as gated_residual_adaln_backward,
)
from sage_kernels.ops.gated_residual_adaln import launch_forward as gated_residual_adaln
from sage_kernels.ops.gelu_tanh import launch_backward as gelu_tanh_backward
from sage_kernels.ops.gelu_tanh import launch_forward as gelu_tanh
from sage_kernels.ops.gelu_tanh import launch_linear as linear_gelu_tanh
from sage_kernels.ops.qk_norm_across_heads import (
    launch_backward as qk_norm_across_heads_backward,
)
from sage_kernels.ops.qk_norm_across_heads import launch_forward as qk_norm_across_heads
from sage_kernels.ops.qk_norm_rope import launch_backward as qk_norm_rope_backward
from sage_kernels.ops.qk_norm_rope import launch_forward as qk_norm_rope

__all__ = [
    "adaln",
    "adaln_backward",
    "gated_residual",
    "gated_residual_adaln",
    "gated_residual_adaln_backward",
    "gated_residual_backward",
    "gelu_tanh",
    "gelu_tanh_backward",
    "linear_gelu_tanh",
    "qk_norm_across_heads",
    "qk_norm_across_heads_backward",
    "qk_norm_rope",
    "qk_norm_rope_backward",
]
