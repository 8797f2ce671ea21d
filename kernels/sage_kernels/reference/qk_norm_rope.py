"""Query/key RMSNorm and rotary embedding in plain PyTorch; see
sage_kernels.qk_norm_rope.

Shapes: B batch, N video tokens, L text tokens, H heads, D head dim.
"""

import torch
from torch import Tensor

from sage_kernels.reference.precision import compute_dtype


def qk_norm_rope(
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
    eps: float = 1e-6,
) -> tuple[Tensor, Tensor]:
    """Joint queries and keys (B, N + L, H, D), video first.

    Video (B, N, H, D) is normalised and rotated by cos and sin (N, D), text (B, L, H,
    D) is normalised; weights (D,).
    """
    dtype = compute_dtype(q.dtype)

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        x = x.to(dtype)
        return (
            x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.to(dtype)
        )

    def joint(
        video: Tensor, text: Tensor, video_weight: Tensor, text_weight: Tensor
    ) -> Tensor:
        rotated = rotate(norm(video, video_weight), cos.to(dtype), sin.to(dtype))
        return torch.cat([rotated, norm(text, text_weight)], dim=1).to(video.dtype)

    return joint(q, q_text, q_weight, q_text_weight), joint(
        k, k_text, k_weight, k_text_weight
    )


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x (B, N, H, D) with pair (2i, 2i + 1) of every head turned by the angle of its
    token; cos, sin (N, D).
    """
    return x * cos[:, None] + quarter_turn(x) * sin[:, None]


def quarter_turn(x: Tensor) -> Tensor:
    """(x0, x1, x2, x3, ...) -> (-x1, x0, -x3, x2, ...)."""
    even, odd = x.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack([-odd, even], dim=-1).flatten(-2)


def qk_norm_rope_backward(
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
    eps: float = 1e-6,
    weight_gradients: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of the first eight arguments of `qk_norm_rope`, in their order; those
    of weights empty on request.
    """
    dtype = compute_dtype(q.dtype)
    tokens = q.shape[1]

    def norm_backward(grad: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        wide = x.to(dtype)
        rstd = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        normed = wide * rstd
        inner = grad * weight.to(dtype)
        dx = rstd * (inner - normed * (inner * normed).mean(-1, keepdim=True))
        dweight = weight.new_empty(0)
        if weight_gradients:
            dweight = (grad * normed).sum((0, 1, 2)).to(weight.dtype)
        return dx.to(x.dtype), dweight

    def unrotate(grad: Tensor) -> Tensor:
        # The transpose of a quarter turn is the turn backwards.
        grad = grad.to(dtype)
        return grad * cos.to(dtype)[:, None] - quarter_turn(
            grad * sin.to(dtype)[:, None]
        )

    dq, dq_weight = norm_backward(unrotate(grad_q[:, :tokens]), q, q_weight)
    dk, dk_weight = norm_backward(unrotate(grad_k[:, :tokens]), k, k_weight)
    dq_text, dq_text_weight = norm_backward(
        grad_q[:, tokens:].to(dtype), q_text, q_text_weight
    )
    dk_text, dk_text_weight = norm_backward(
        grad_k[:, tokens:].to(dtype), k_text, k_text_weight
    )
    return (
        dq,
        dk,
        dq_text,
        dk_text,
        dq_weight,
        dk_weight,
        dq_text_weight,
        dk_text_weight,
    )


def qk_norm_rope_eager(
    q: Tensor,
    k: Tensor,
    q_text: Tensor,
    k_text: Tensor,
    *,
    cos: Tensor,
    sin: Tensor,
    eps: float = 1e-6,
    **w: Tensor,
) -> tuple[Tensor, Tensor]:
    """As diffusers writes it (`RMSNorm.forward`, `apply_rotary_emb`,
    `HunyuanVideo15AttnProcessor2_0`).
    """

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        variance = x.to(torch.float32).pow(2).mean(-1, keepdim=True)
        return (x * torch.rsqrt(variance + eps)).to(weight.dtype) * weight

    def rope(x: Tensor) -> Tensor:
        real, imaginary = x.reshape(*x.shape[:-1], -1, 2).unbind(-1)
        turned = torch.stack([-imaginary, real], dim=-1).flatten(3)
        return (
            x.float() * cos[None, :, None] + turned.float() * sin[None, :, None]
        ).to(x.dtype)

    return (
        torch.cat(
            [rope(norm(q, w["q_weight"])), norm(q_text, w["q_text_weight"])], dim=1
        ),
        torch.cat(
            [rope(norm(k, w["k_weight"])), norm(k_text, w["k_text_weight"])], dim=1
        ),
    )
