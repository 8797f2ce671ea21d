"""The toy run's iterations, the stall of a checkpoint, the host's share: what is timed, and what is refused."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from benchmarks import results
from benchmarks import session as sessions
from benchmarks.session import Session
from benchmarks.suites import trainer as suite
from sage_fast.checkpoint import CheckpointData
from sage_fast.trainer import Trainer

MakeSession = Callable[..., Session]
TINY_TOY = [
    "--rollout.num_generations=2",
    "--rollout.batch_size=2",
    "--rollout.micro_batch_size=2",
    "--rollout.num_steps=3",
]


def test_stock_and_fused_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    turns: list[str] = []
    iterate = Trainer.iterate
    monkeypatch.setattr(Trainer, "iterate", lambda self: turns.append(self.config.model.forward) or iterate(self))
    contest = suite.ToyContest(TINY_TOY)
    found = contest.check()
    assert found["passed"] and max(found["errors"].values()) < suite.TOLERANCE
    rows = contest.measure(2)["rows"]
    assert turns == ["stock", "fused", "fused", "stock", "stock", "fused"]
    assert [row["contender"] for row in rows] == ["stock", "ours"]
    assert all(row["seconds"]["rounds"] == row["wall_seconds"]["rounds"] == 2 for row in rows)


def test_another_result_has_no_ratio(session: MakeSession, monkeypatch: pytest.MonkeyPatch) -> None:
    iterate = Trainer.iterate

    def wrong(self: Trainer) -> dict[str, float]:
        metrics = iterate(self)
        return metrics | {"grad_norm": metrics["grad_norm"] * (1.01 if self.config.model.forward == "fused" else 1.0)}

    monkeypatch.setattr(Trainer, "iterate", wrong)
    monkeypatch.setattr(suite, "SMALL_TOY", TINY_TOY)
    found = session()
    found.run(suite.SUITES[0])
    assert not found.cells["toy parity"]["passed"]
    assert found.cells["toy iteration"]["status"] == "skipped: toy parity has not passed"
    assert found.cells["checkpoint toy"]["status"] == "done" and not results.succeeded(found.result)


def test_the_lora_state_has_the_size_of_a_run() -> None:
    data = suite.lora_state(num_layers=2)
    count = sum(tensor.numel() for tensor in data.tensors["weights"].values())
    # Rank 32 on the eight 2048 x 2048 layers of a block; the last block has no text output, and no text queries.
    assert count == (8 + 6) * 2 * 32 * 2048
    assert data.tensors["anchor"].keys() == data.tensors["weights"].keys()
    assert data.tensors["optimizer"].keys() == {f"{name}.momentum_buffer" for name in data.tensors["weights"]}


def test_a_checkpoint_is_written_and_forgotten(tmp_path: Path) -> None:
    data = suite.lora_state(num_layers=1)
    found = suite.checkpoint_stall("LoRA run", data, tmp_path, rounds=2)
    weights = sum(tensor.nbytes for tensor in data.tensors["weights"].values())
    # Weights, anchor, momentum, and the adapter once more.
    assert 4 * weights <= found["file_bytes"] < 4.1 * weights and list(tmp_path.iterdir()) == []
    foreground, ours = found["rows"]
    assert foreground["seconds"]["rounds"] == ours["seconds"]["rounds"] == 2
    assert 0 < ours["seconds"]["median"] < ours["until_saved"]["median"]


def test_saving_in_the_background_holds_training_up_less(tmp_path: Path) -> None:
    weights = {str(number): torch.ones(1000, 1000) for number in range(10)}
    data = CheckpointData(tensors={"weights": weights}, state={})
    foreground, ours = suite.checkpoint_stall("some", data, tmp_path, rounds=3)["rows"]
    assert ours["seconds"]["median"] < 0.7 * foreground["seconds"]["median"]


def test_the_host_share_is_refused_when_velocities_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    contest = suite.HostContest(torch.device("cpu"), num_layers=2)
    assert contest.check()["passed"]
    monkeypatch.setitem(suite.NARROW_PARITY, torch.float32, 1e-12)
    assert not contest.check()["passed"]


def test_peak_of_a_stretch() -> None:
    if not suite.forget_peak() or suite.peak_resident_gib() is None:
        pytest.skip("the system does not tell the peak of a stretch")
    before = suite.peak_resident_gib()
    block = torch.ones(2**26)
    del block
    during = suite.peak_resident_gib()
    assert before is not None and during is not None and during > before + 0.2
    suite.forget_peak()
    after = suite.peak_resident_gib()
    assert after is not None and after < during - 0.2


def test_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(suite, "SMALL_TOY", TINY_TOY)
    assert sessions.main("trainer", ["--smoke", "--folder", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "mean nothing" in text
    for name in ("toy iteration ours", "checkpoint save LoRA run ours", "host forward of 2 narrow blocks P1"):
        assert name in text
