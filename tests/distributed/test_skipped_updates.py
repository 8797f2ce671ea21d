"""An update whose gradient is not finite on one rank is skipped on all, and leaves no
trace in any engine.
"""

import math
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.distributed.ranks import build, run_ranks, whole, write_run

pytestmark = pytest.mark.slow

LAYOUTS = {
    "replicated": ["--training.mode=lora"],
    "fsdp": ["--training.mode=full"],
    "zero-2": ["--training.mode=lora", "--distributed.zero_stage=2"],
}


def train(
    file: str, words: list[str], poisoned: bool
) -> tuple[list[dict[str, float]], dict[str, Tensor]]:
    """Metrics, weights and optimizer state after a skipped update and a sound one.

    poisoned: rank 1 has NaN in the first gradient; otherwise that gradient is sound and
    only said not to be finite.
    """
    trainer = build(file, words)
    engine = trainer.engine
    vjp = engine.vjp
    clip = engine.clip_gradients

    def poison(output: Tensor, cotangents: Sequence[Tensor]) -> None:
        ruined = poisoned and trainer.update == 0 and trainer.world.rank == 1
        vjp(output, [c * math.nan for c in cotangents] if ruined else cotangents)

    def deny() -> float:
        norm = clip()
        return norm if poisoned or trainer.update > 0 else math.inf

    engine.vjp = poison
    engine.clip_gradients = deny
    records = [trainer.iterate() for _ in range(2)]
    tensors = {
        f"{g}/{name}": value
        for g, group in trainer.tensors().items()
        for name, value in group.items()
    }
    return records, whole(tensors)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_rank_with_nan_makes_all_skip_and_none_remember(
    layout: str, tiny_model: Path, tmp_path: Path
) -> None:
    if "zero" in layout:
        pytest.importorskip("deepspeed")
    file = write_run(tiny_model, tmp_path, training={"skip_nonfinite_updates": 1})
    given, expected = (
        run_ranks(train, 2, file, LAYOUTS[layout], poisoned)
        for poisoned in (True, False)
    )
    for (records, tensors), (sound, wanted) in zip(given, expected, strict=True):
        assert [record["update/skipped_nonfinite"] for record in records] == [1, 1]
        assert "loss" not in records[0] and math.isfinite(records[1]["grad_norm"])
        assert records[1]["grad_norm"] == sound[1]["grad_norm"]
        assert tensors.keys() == wanted.keys() and all(
            torch.equal(tensors[n], wanted[n]) for n in tensors
        )
