"""Counts of the fused forward at the true configuration, on the meta device, against bounds and closed forms.

Exact limits, and a deliberate regression of each: benchmarks/budgets.yaml and `tests/benchmarks/test_guard.py`.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from benchmarks.counts.traced import (
    Record,
    accelerated,
    block_cost,
    forward_cost,
    meta_transformer,
    needed_flops,
)
from benchmarks.workload import A, B

TOKENS = A.video_tokens + A.text_tokens


@pytest.mark.parametrize("checkpointing", ["none", "selective"])
def test_flops_are_the_packed_closed_form(checkpointing: Any) -> None:
    assert forward_cost(A, accelerated(54, "nothing", checkpointing))["flops"] == needed_flops(A, 54)


def test_flops_at_the_other_shape() -> None:
    assert forward_cost(B, accelerated(2, "nothing"))["flops"] == needed_flops(B, 2)


def test_the_model_is_the_true_one() -> None:
    assert sum(p.numel() for p in meta_transformer(54, "everything").parameters()) == 8_326_608_160
    # 99.4 and 147.6 TFLOP of linear layers and attention, 250 text tokens.
    assert needed_flops(A, 54) == pytest.approx(247.0e12, rel=1e-3)


def test_nothing_of_the_size_of_a_mask() -> None:
    tokens = B.video_tokens + B.text_tokens
    assert block_cost(B, "lora", "selective").largest_tensor < tokens**2 / 4


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
def test_what_waits_is_recognised(wait: Callable[[torch.Tensor], object], name: str) -> None:
    with Record() as record:
        wait(torch.ones(3, device="meta"))
    assert record.syncs == [name]


def test_a_padded_token_is_seen() -> None:
    padded = type(A)(name="A+1", latent=A.latent, text_tokens=A.text_tokens + 1, padding=A.padding)
    assert forward_cost(padded, accelerated(2, "nothing"))["flops"] > needed_flops(A, 2)
