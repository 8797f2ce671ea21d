"""The toy run's iterations, the stall of a checkpoint, the host's share: what is timed, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import trainer_costs
from sage_fast.checkpoint import CheckpointData
from sage_fast.trainer import Trainer

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
    result = trainer_costs.toy_iterations(iterations=2, overrides=TINY_TOY)
    assert turns == ["stock", "fused", "fused", "stock", "stock", "fused"]
    assert result["passed"] and max(result["parity"].values()) < trainer_costs.TOLERANCE
    medians = {forward: result["seconds"][forward]["median"] for forward in ("stock", "fused")}
    assert result["times_stock"] == medians["stock"] / medians["fused"]
    assert result["seconds"]["fused"]["rounds"] == result["wall_seconds"]["fused"]["rounds"] == 2


def test_another_result_has_no_ratio(monkeypatch: pytest.MonkeyPatch) -> None:
    iterate = Trainer.iterate

    def wrong(self: Trainer) -> dict[str, float]:
        metrics = iterate(self)
        return metrics | {"grad_norm": metrics["grad_norm"] * (1.01 if self.config.model.forward == "fused" else 1.0)}

    monkeypatch.setattr(Trainer, "iterate", wrong)
    result = trainer_costs.toy_iterations(iterations=1, overrides=TINY_TOY)
    assert not result["passed"] and "seconds" not in result
    shown: dict[str, Any] = {"toy": result, "checkpoint": {}, "host": {"passed": False, "seconds": {}, "parity": {}}}
    text = trainer_costs.table(shown)
    assert "toy iteration: PARITY FAILED, no ratio" in text and "host: PARITY FAILED" in text
    assert not trainer_costs.succeeded(shown)


def test_the_lora_state_has_the_size_of_a_run() -> None:
    data = trainer_costs.lora_state(num_layers=2)
    count = sum(tensor.numel() for tensor in data.tensors["weights"].values())
    # Rank 32 on the eight 2048 x 2048 layers of a block; the last block has no text output, and no text queries.
    assert count == (8 + 6) * 2 * 32 * 2048
    assert data.tensors["anchor"].keys() == data.tensors["weights"].keys()
    assert data.tensors["optimizer"].keys() == {f"{name}.momentum_buffer" for name in data.tensors["weights"]}


def test_a_checkpoint_is_written_and_forgotten(tmp_path: Path) -> None:
    data = trainer_costs.lora_state(num_layers=1)
    found = trainer_costs.checkpoint_stall(data, tmp_path, rounds=2)
    weights = sum(tensor.nbytes for tensor in data.tensors["weights"].values())
    # Weights, anchor, momentum, and the adapter once more.
    assert 4 * weights <= found["bytes"] < 4.1 * weights
    assert found["seconds"]["rounds"] == 2 and list(tmp_path.iterdir()) == []
    background = found["background"]
    assert background["seconds"]["rounds"] == 2
    assert 0 < background["seconds"]["median"] < background["until_saved"]["median"]
    assert found["background_over_foreground"] == background["seconds"]["median"] / found["seconds"]["median"]


def test_saving_in_the_background_holds_training_up_less(tmp_path: Path) -> None:
    weights = {str(number): torch.ones(1000, 1000) for number in range(10)}
    data = CheckpointData(tensors={"weights": weights}, state={})
    assert trainer_costs.checkpoint_stall(data, tmp_path, rounds=3)["background_over_foreground"] < 0.7


def test_the_host_share_is_refused_when_velocities_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    found = trainer_costs.host_overhead(torch.device("cpu"), num_layers=2, rounds=1)
    assert found["passed"] and set(found["seconds"]) == {"ours", "P1", "P2"} and found["dtype"] == "float32"
    monkeypatch.setitem(trainer_costs.NARROW_PARITY, torch.float32, 1e-12)
    assert not trainer_costs.host_overhead(torch.device("cpu"), num_layers=2, rounds=1)["passed"]


def test_peak_of_a_stretch() -> None:
    if not trainer_costs.forget_peak() or trainer_costs.peak_resident_gib() is None:
        pytest.skip("the system does not tell the peak of a stretch")
    before = trainer_costs.peak_resident_gib()
    block = torch.ones(2**26)
    del block
    during = trainer_costs.peak_resident_gib()
    assert before is not None and during is not None and during > before + 0.2
    trainer_costs.forget_peak()
    after = trainer_costs.peak_resident_gib()
    assert after is not None and after < during - 0.2


def test_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(trainer_costs, "SMALL_TOY", TINY_TOY)
    file = tmp_path / "costs.json"
    assert trainer_costs.main(["--smoke", "--output", str(file), "--folder", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "mean nothing" in text and "stock / fused:" in text and "checkpoint, lora:" in text
    result = json.loads(file.read_text("utf-8"))
    assert set(result["checkpoint"]) == {"toy", "lora"} and result["host"]["blocks"] == 2
