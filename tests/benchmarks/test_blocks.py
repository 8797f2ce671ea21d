"""The block benchmark: every contender's block is called as its forward calls it, behind a parity check."""

from typing import Any

import pytest
import torch

from benchmarks import blocks
from benchmarks.budgets import HUNYUAN_VIDEO_15
from benchmarks.workload import TINY, B, forward_work

CPU = torch.device("cpu")


def test_work_of_a_block() -> None:
    """24 linear layers' worth of 2048 x 2048 for every token; the modulation of both streams besides."""
    tokens = B.video_tokens + B.text_tokens
    work = blocks.block_work(HUNYUAN_VIDEO_15, B)
    assert work.linear == pytest.approx(2 * tokens * 12 * 2048**2, rel=1e-3)
    assert work.attention == 4 * tokens**2 * 2048
    assert 54 * work.total == pytest.approx(forward_work(HUNYUAN_VIDEO_15, B).total, rel=1e-2)


def test_parity_is_green_and_every_contender_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "CONTENDERS", ("ours", "P1", "P2"))
    result = blocks.run(CPU, smoke=True, matmul_tflop_per_s=1.0)
    assert all(found["passed"] for found in result["block_parity"].values()), result["block_parity"]
    assert {(row["contender"], row["direction"]) for row in result["blocks"]} == {
        (contender, direction) for contender in ("ours", "P1", "P2") for direction in blocks.DIRECTIONS
    }
    assert all(row["mfu"] == pytest.approx(row["tflop_per_s"]) for row in result["blocks"])
    assert blocks.succeeded(result)


def test_a_wrong_block_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    right = blocks.switched_on

    def wrong(transformer: Any, contender: str, *arguments: Any) -> Any:
        for parameter in transformer.transformer_blocks[0].ff.parameters():
            parameter.data *= 1.2 if contender == "ours" else 1.0
        return right(transformer, contender, *arguments)

    monkeypatch.setattr(blocks, "switched_on", wrong)
    monkeypatch.setattr(blocks, "CONTENDERS", ("ours",))
    result = blocks.run(CPU, smoke=True)
    assert not result["block_parity"]["ours"]["passed"] and result["blocks"] == []
    assert "ours   PARITY FAILED, not timed" in blocks.table(result) and not blocks.succeeded(result)


def test_the_oracle_is_of_the_same_block() -> None:
    """An oracle of other inputs would make every error large and every comparison meaningless."""
    errors = blocks.check(TINY, CPU, "sdpa", smoke=True)
    assert max(errors["P2"]["output"], errors["P2"]["gradient"]) < 0.05
