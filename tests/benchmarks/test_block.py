"""The block's suite: every contender's block is called as its forward calls it, behind a parity check."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from benchmarks import results
from benchmarks.session import CEILINGS, Session
from benchmarks.suites import block
from benchmarks.workload import HUNYUAN_VIDEO_15, TINY, B, forward_work

CPU = torch.device("cpu")
MakeSession = Callable[..., Session]


def test_work_of_a_block() -> None:
    """24 linear layers' worth of 2048 x 2048 for every token; the modulation of both streams."""
    tokens = B.video_tokens + B.text_tokens
    work = block.block_work(HUNYUAN_VIDEO_15, B)
    assert work.linear == pytest.approx(2 * tokens * 12 * 2048**2, rel=1e-3)
    assert work.attention == 4 * tokens**2 * 2048
    assert 54 * work.total == pytest.approx(forward_work(HUNYUAN_VIDEO_15, B).total, rel=1e-2)


def test_parity_is_green_and_every_contender_is_timed(session: MakeSession, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block, "CONTENDERS", ("ours", "P1", "P2"))
    found = session()
    found.run(CEILINGS)
    found.run(block.SUITES[0])
    rows = results.rows(found.result)
    assert {(step, *sorted(rows["block", step, "A"])) for step in block.WORK} == {
        (step, "P1", "P2", "ours") for step in block.WORK
    }
    peak = results.ceiling(found.result, "matmul")
    assert all(row["share"] == row["rate"] / peak for row in rows["block", "both", "A"].values())
    assert results.succeeded(found.result)


def test_a_wrong_block_is_not_timed(session: MakeSession, monkeypatch: pytest.MonkeyPatch) -> None:
    right = block.switched_on

    def wrong(contender: str, transformer: Any, *arguments: Any) -> Any:
        for parameter in transformer.transformer_blocks[0].ff.parameters():
            parameter.data *= 1.2 if contender == "ours" else 1.0
        return right(contender, transformer, *arguments)

    monkeypatch.setattr(block, "switched_on", wrong)
    monkeypatch.setattr(block, "CONTENDERS", ("ours",))
    found = session()
    found.run(block.SUITES[0])
    assert not found.cells["block parity ours"]["passed"] and results.rows(found.result) == {}
    assert any(line.startswith("block parity ours: PARITY FAILED") for line in results.problems(found.result))


def test_the_oracle_is_of_the_same_block() -> None:
    """An oracle of other inputs would make every error large and every comparison meaningless."""
    found = block.Parity(TINY, CPU, "sdpa", smoke=True).check("P2", None)
    assert found["passed"] and max(found["errors"].values()) < 0.05
