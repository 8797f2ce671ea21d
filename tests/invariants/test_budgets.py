"""Everything that waits for a GPU is seen on the meta device, where the guard counts
waits against their budget.

The budgets, and a deliberate regression of each: benchmarks/budgets.yaml and
`tests/benchmarks/test_guard.py`.
"""

from collections.abc import Callable

import pytest
import torch

from benchmarks.counts.traced import Record


def test_the_host_may_copy_and_read_what_it_has() -> None:
    with Record() as record:
        torch.ones(2)[torch.tensor([True, False])].sum().item()
        torch.ones(2, device="meta").to(torch.bfloat16)
        torch.ones(2).to("meta", non_blocking=True)
    assert record.syncs == []


@pytest.mark.parametrize(
    ("wait", "name"),
    [
        (lambda x: x.sum().item(), "_local_scalar_dense"),
        (lambda x: bool(x[0]), "_local_scalar_dense"),
        (lambda x: x.cpu(), "_to_copy"),
        (lambda x: torch.ones(3).to(x), "_to_copy"),
        (lambda x: x.copy_(torch.ones(3)), "copy_"),
        (lambda x: torch.empty(3).copy_(x), "copy_"),
        (lambda x: x[x > 0], "index"),
        (lambda x: x.masked_select(x > 0), "masked_select"),
        (lambda x: torch.equal(x, x), "equal"),
        (lambda x: (x > 0).nonzero(), "nonzero"),
    ],
)
def test_what_waits_is_recognised(
    wait: Callable[[torch.Tensor], object], name: str
) -> None:
    with Record() as record:
        wait(torch.ones(3, device="meta"))
    assert record.syncs == [name]
