"""Counts of the fused forward at the true configuration, on the meta device, against bounds and closed forms.

Each count also meets a deliberate regression, and must see it. What exactly is allowed stands in
benchmarks/budgets.yaml, which `tests/benchmarks/test_guard.py` tests.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from diffusers import HunyuanVideo15Transformer3DModel

from benchmarks.counts.traced import (
    BlockCost,
    Record,
    accelerated,
    block_cost,
    forward_cost,
    meta_transformer,
    needed_flops,
)
from benchmarks.workload import A, B
from sage_fast.models.hunyuan15 import block as block_module
from sage_fast.models.hunyuan15.block import LocalAttention

TOKENS = A.video_tokens + A.text_tokens


@pytest.mark.parametrize("checkpointing", ["none", "selective"])
def test_flops_are_the_packed_closed_form(checkpointing: Any) -> None:
    assert forward_cost(A, accelerated(54, "nothing", checkpointing)).flops == needed_flops(A, 54)


def test_flops_at_the_other_shape() -> None:
    assert forward_cost(B, accelerated(2, "nothing")).flops == needed_flops(B, 2)


def test_the_model_is_the_true_one() -> None:
    assert sum(p.numel() for p in meta_transformer(54, "everything").parameters()) == 8_326_608_160
    # 99.4 and 147.6 TFLOP of linear layers and attention, 250 text tokens.
    assert needed_flops(A, 54) == pytest.approx(247.0e12, rel=1e-3)


@pytest.mark.parametrize("trained", ["nothing", "lora", "everything"])
@pytest.mark.parametrize(
    ("checkpointing", "kept"), [("none", 11.0), ("feed_forward", 6.02), ("selective", 2.02), ("full", 1.0)]
)
def test_block_budgets(trained: Any, checkpointing: Any, kept: float) -> None:
    cost = block_cost(A, trained, checkpointing)
    # Keeping the GELU's input, which nobody does at 80 GB, means writing it: 8 S that the product's epilogue saves.
    # LoRA copies the weights of q, k and v: 0.7 S, which saves 2 S of thin products, and 4 S in the backward.
    copied = 0.9 if trained == "lora" else 0.0
    assert cost.forward_bytes <= (21.2 if checkpointing == "none" else 13.2) + copied
    assert cost.backward_bytes <= (42 if trained == "everything" else 29.2 + copied)
    assert cost.forward_thin_bytes <= 4
    assert cost.backward_thin_bytes <= 14
    assert cost.recomputed_bytes <= (15 if trained == "everything" else 11)
    # LoRA adds a cast, 3 operators that lay out factors and 7 thin products.
    assert cost.launches <= (29 if trained == "lora" else 20)
    assert cost.backward_launches <= (95 if trained == "everything" else 90)
    assert cost.kept <= kept
    # The feed-forward's hidden layer; at B that is less than a quarter of N^2.
    assert cost.largest_tensor == A.video_tokens * 4 * 2048
    assert cost.syncs == ()


def test_nothing_of_the_size_of_a_mask() -> None:
    tokens = B.video_tokens + B.text_tokens
    assert block_cost(B, "lora", "selective").largest_tensor < tokens**2 / 4


def regress(monkeypatch: pytest.MonkeyPatch, name: str, wrap: Callable[[Any], Any]) -> BlockCost:
    """The cost with one method of the block replaced."""
    monkeypatch.setattr(block_module._Block, name, wrap(getattr(block_module._Block, name)))
    return block_cost(A, "lora", "selective")


def test_an_extra_copy_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def copied(method: Any) -> Any:
        return lambda self, *args: [y + 0 for y in method(self, *args)]

    cost = regress(monkeypatch, "normed_inputs", copied)
    assert cost.forward_bytes > 14.1
    assert cost.launches > 28


def test_recomputed_attention_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def forgotten(method: Any) -> Any:
        return lambda self: method(self)[:2]

    assert regress(monkeypatch, "saved", forgotten).kept == 1.0
    calls: list[int] = []
    attend = LocalAttention.forward
    monkeypatch.setattr(LocalAttention, "forward", lambda self, *args: calls.append(1) or attend(self, *args))
    block_cost(A, "lora", "selective")
    assert len(calls) == 3  # before the count, in the forward, and again in the backward


def test_the_host_may_copy_and_read_what_it_has() -> None:
    with Record() as record:
        torch.ones(2)[torch.tensor([True, False])].sum().item()
        torch.ones(2, device="meta").to(torch.bfloat16)
    assert record.syncs == []


@pytest.mark.parametrize(
    ("wait", "name"),
    [
        (lambda x: x.sum().item(), "_local_scalar_dense"),
        (lambda x: bool(x[0]), "_local_scalar_dense"),
        (lambda x: x.cpu(), "_to_copy"),
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


def test_more_kept_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def hoarding(method: Any) -> Any:
        return lambda self: [*method(self)[:3], method(self)[3].double()]

    assert regress(monkeypatch, "saved", hoarding).kept > 2.02


def test_a_host_sync_is_seen() -> None:
    def peek(transformer: HunyuanVideo15Transformer3DModel) -> None:
        block: Any = transformer.transformer_blocks[1]
        forward = block.forward

        def slow(x: torch.Tensor, *args: Any) -> Any:
            x.nonzero()
            return forward(x, *args)

        block.forward = slow

    assert block_cost(A, "lora", "selective", prepare=peek).syncs == ("nonzero",)


def test_a_padded_token_is_seen() -> None:
    padded = type(A)(name="A+1", latent=A.latent, text_tokens=A.text_tokens + 1, padding=A.padding)
    assert forward_cost(padded, accelerated(2, "nothing")).flops > needed_flops(A, 2)


def test_a_mask_is_seen() -> None:
    def mask(transformer: HunyuanVideo15Transformer3DModel) -> None:
        block: Any = transformer.transformer_blocks[1]
        forward = block.forward

        def masked(x: torch.Tensor, *args: Any) -> Any:
            torch.ones(TOKENS, TOKENS, dtype=torch.bool, device="meta")
            return forward(x, *args)

        block.forward = masked

    assert block_cost(A, "lora", "selective", prepare=mask).largest_tensor == TOKENS**2
