"""qk_norm_rope beyond parity: layout, addresses, refusals."""

import pytest
import torch
from torch import Tensor

from sage_kernels import qk_norm_rope, qk_norm_rope_backward
from sage_kernels.ops.qk_norm_rope import dense_tokens

VIDEO, TEXT, HEADS, HEAD_DIM = 6, 4, 3, 8


def sample(dtype: torch.dtype = torch.float32, batch: int = 2) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    tokens = [draw(batch, length, HEADS, HEAD_DIM) for length in (VIDEO, VIDEO, TEXT, TEXT)]
    angles = draw(VIDEO, HEAD_DIM // 2).repeat_interleave(2, dim=-1)
    return [*tokens, *(draw(HEAD_DIM) for _ in range(4)), angles.cos(), angles.sin()]


def test_slices_of_one_projection_are_not_copied(device: torch.device) -> None:
    q, k, *rest = (tensor.to(device) for tensor in sample())
    fused = torch.cat([q.flatten(2), k.flatten(2), torch.randn_like(q).flatten(2)], dim=-1)
    q_slice, k_slice, _ = (part.unflatten(-1, (HEADS, HEAD_DIM)) for part in fused.chunk(3, dim=-1))
    assert dense_tokens(q_slice) is q_slice
    assert dense_tokens(q_slice.transpose(1, 2).contiguous().transpose(1, 2)).is_contiguous()
    for a, b in zip(qk_norm_rope(q_slice, k_slice, *rest), qk_norm_rope(q, k, *rest), strict=True):
        assert torch.equal(a, b)


def test_addresses_beyond_two_to_the_31(device: torch.device) -> None:
    if device.type == "cuda" and torch.cuda.get_device_properties(device).total_memory < 12 << 30:
        pytest.skip("needs 12 GiB of GPU memory")
    # The text begins 6 * 400,000,000 elements into the gradient. On a CPU only the pages of the tokens are touched.
    inputs = [tensor.to(device) for tensor in sample(torch.bfloat16, batch=1)]
    near = torch.randn(1, VIDEO + TEXT, HEADS, HEAD_DIM, generator=torch.Generator().manual_seed(6)).bfloat16()
    stride = 400_000_000
    buffer = torch.empty((VIDEO + TEXT) * stride, dtype=torch.bfloat16, device=device)
    far = buffer.as_strided(near.shape, (stride, stride, HEAD_DIM, 1))
    far.copy_(near)
    assert dense_tokens(far) is far
    expected = qk_norm_rope_backward(near.to(device), near.to(device), *inputs, 1e-6, True)
    for a, b in zip(qk_norm_rope_backward(far, far, *inputs, 1e-6, True), expected, strict=True):
        assert torch.equal(a, b)


def test_refuses_an_odd_head_dim() -> None:
    inputs = sample()
    odd = [tensor[..., :7] for tensor in inputs]
    with pytest.raises(ValueError, match="head dim of q is 7"):
        qk_norm_rope(*odd)
