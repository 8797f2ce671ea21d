"""The byte counter on operators whose traffic is known."""

import pytest
import torch

from sage_kernels.tracer import ByteCounter, count


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_counts_what_is_read_and_written(device: str) -> None:
    x = torch.zeros(8, 4, device=device)
    half = torch.zeros(8, 4, device=device, dtype=torch.bfloat16)
    cases = {
        "add": (lambda: x + x[0], 32 * 4 + 4 * 4, 32 * 4),
        "same argument twice": (lambda: x * x, 32 * 4, 32 * 4),
        "expanded": (lambda: x + x[:, :1].expand(8, 4), 32 * 4 + 8 * 4, 32 * 4),
        "view": (lambda: x.view(4, 8).transpose(0, 1)[1:], 0, 0),
        "detach": (lambda: x.detach(), 0, 0),
        "empty": (lambda: torch.empty_like(x), 0, 0),
        "zeros": (lambda: x.new_zeros(8, 4), 32 * 4, 32 * 4),
        "in place": (lambda: x.mul_(2), 32 * 4, 32 * 4),
        "copy": (lambda: x.copy_(half), 32 * 4 + 32 * 2, 32 * 4),
        "cast": (lambda: half.float(), 32 * 2, 32 * 4),
        "two operators": (lambda: (x + 1) * 2, 2 * 32 * 4, 2 * 32 * 4),
    }
    for name, (function, read, written) in cases.items():
        traffic = count(function)
        if name == "zeros":
            assert traffic.written == written, name
        else:
            assert (traffic.read, traffic.written) == (read, written), name
        assert traffic.total == traffic.read + traffic.written


def test_counts_a_backward_pass() -> None:
    x = torch.zeros(8, 4, device="meta", requires_grad=True)
    y = x * 2
    cotangent = torch.empty_like(y)
    with ByteCounter() as counter:
        torch.autograd.grad(y, x, cotangent)
    assert (counter.traffic.read, counter.traffic.written, counter.traffic.operators) == (32 * 4, 32 * 4, 1)
