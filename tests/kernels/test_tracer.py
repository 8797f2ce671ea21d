"""The byte counter on operators whose traffic is known."""

import pytest
import torch

from sage_kernels.tracer import count


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_counts_what_is_read_and_written(device: str) -> None:
    x = torch.zeros(8, 4, device=device)
    half = torch.zeros(8, 4, device=device, dtype=torch.bfloat16)
    cases = {
        "add": (lambda: x + x[0], 32 * 4 + 4 * 4, 32 * 4),
        "same argument twice": (lambda: x * x, 32 * 4, 32 * 4),
        "expanded": (lambda: x + x[:, :1].expand(8, 4), 32 * 4 + 8 * 4, 32 * 4),
        "view": (lambda: x.view(4, 8).transpose(0, 1)[1:], 0, 0),
        "empty": (lambda: torch.empty_like(x), 0, 0),
        "in place": (lambda: x.mul_(2), 32 * 4, 32 * 4),
        "copy": (lambda: x.copy_(half), 32 * 4 + 32 * 2, 32 * 4),
        "cast": (lambda: half.float(), 32 * 2, 32 * 4),
        "two operators": (lambda: (x + 1) * 2, 2 * 32 * 4, 2 * 32 * 4),
    }
    for name, (function, read, written) in cases.items():
        traffic = count(function)
        assert (traffic.read, traffic.written) == (read, written), name
