"""qk_norm_rope beyond parity: layout, addresses."""

import pytest
import torch

from sage_kernels import qk_norm_rope, qk_norm_rope_backward
from sage_kernels.ops.qk_norm_rope import SPEC, dense_tokens
from sage_kernels.registry import Case, Inputs

VIDEO = 6
TEXT = 4
HEADS = 3
HEAD_DIM = 8


def sample(batch: int, dtype: torch.dtype, device: torch.device) -> Inputs:
    shape = {
        "batch": batch,
        "video": VIDEO,
        "text": TEXT,
        "heads": HEADS,
        "head_dim": HEAD_DIM,
    }
    return SPEC.make_inputs(
        Case(id="small", shape=shape), dtype, device, torch.Generator().manual_seed(3)
    )


def test_slices_of_one_projection_are_not_copied(device: torch.device) -> None:
    inputs = sample(2, torch.float32, device)
    q, k = (inputs[name].flatten(2) for name in "qk")
    q_slice, k_slice, _ = (
        torch.cat([q, k, torch.randn_like(q)], dim=-1)
        .unflatten(-1, (3, HEADS, HEAD_DIM))
        .unbind(2)
    )
    assert dense_tokens(q_slice) is q_slice
    assert dense_tokens(
        q_slice.transpose(1, 2).contiguous().transpose(1, 2)
    ).is_contiguous()
    given = qk_norm_rope(**inputs | {"q": q_slice, "k": k_slice})
    assert all(
        torch.equal(a, b) for a, b in zip(given, qk_norm_rope(**inputs), strict=True)
    )


def test_addresses_beyond_two_to_the_31(device: torch.device) -> None:
    if (
        device.type == "cuda"
        and torch.cuda.get_device_properties(device).total_memory < 12 << 30
    ):
        pytest.skip("needs 12 GiB of GPU memory")
    # The text begins 6 * 400,000,000 elements into the gradient. On a CPU only the
    # pages of the tokens are touched.
    inputs = sample(1, torch.bfloat16, device).values()
    near = torch.randn(
        1, VIDEO + TEXT, HEADS, HEAD_DIM, generator=torch.Generator().manual_seed(6)
    ).bfloat16()
    stride = 400_000_000
    buffer = torch.empty((VIDEO + TEXT) * stride, dtype=torch.bfloat16, device=device)
    far = buffer.as_strided(near.shape, (stride, stride, HEAD_DIM, 1))
    far.copy_(near)
    assert dense_tokens(far) is far
    expected = qk_norm_rope_backward(
        near.to(device), near.to(device), *inputs, 1e-6, True
    )
    for a, b in zip(
        qk_norm_rope_backward(far, far, *inputs, 1e-6, True), expected, strict=True
    ):
        assert torch.equal(a, b)
