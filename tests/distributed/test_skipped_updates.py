"""An update whose gradient is not finite on one rank is skipped on all, and leaves no trace in any engine."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.conftest import TINY_RUN
from tests.distributed.ranks import join, run_ranks

pytestmark = pytest.mark.slow

LAYOUTS = {
    "replicated": ["--training.mode=lora"],
    "fsdp": ["--training.mode=full", "--model.adaln=weights"],
    "zero-2": ["--training.mode=lora", "--distributed.zero_stage=2"],
}


def train(file: str, words: list[str], poisoned: bool) -> tuple[list[dict[str, float]], dict[str, Tensor], list[str]]:
    """Metrics, weights and optimizer state after a skipped update and a sound one, and what was logged.

    poisoned: rank 1 has NaN in the first gradient; otherwise that gradient is sound and only said not to be finite.
    """
    import logging

    from sage_fast.config.load import load_config
    from sage_fast.run.run import build_trainer

    config = load_config(file, words)
    trainer = build_trainer(config, join(config))
    engine: Any = trainer.engine
    vjp, clip = engine.vjp, engine.clip_gradients

    def poison(output: Tensor, cotangents: Sequence[Tensor]) -> None:
        ruined = poisoned and trainer.update == 0 and trainer.world.rank == 1
        vjp(output, [c * math.nan for c in cotangents] if ruined else cotangents)

    def deny() -> float:
        norm = clip()
        return norm if poisoned or trainer.update > 0 else math.inf

    engine.vjp, engine.clip_gradients = poison, deny
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("sage_fast.trainer").addHandler(handler)
    records = [trainer.iterate() for _ in range(2)]
    tensors = {f"{g}/{name}": value for g, group in trainer.tensors().items() for name, value in group.items()}
    whole = {name: getattr(value, "full_tensor", lambda value=value: value)() for name, value in tensors.items()}
    return records, {name: value.detach().clone() for name, value in whole.items()}, messages


@pytest.mark.parametrize("layout", [pytest.param(n, marks=[pytest.mark.slow] * ("zero" in n)) for n in LAYOUTS])
def test_a_rank_with_nan_makes_all_skip_and_none_remember(layout: str, tiny_model: Path, tmp_path: Path) -> None:
    tree: dict[str, Any] = json.loads(json.dumps(TINY_RUN))
    tree["training"] |= {"skip_nonfinite_updates": 1}
    tree["rollout"] |= {"batch_size": 2, "micro_batch_size": 2}
    tree |= {"model": {"path": str(tiny_model), "device": "cpu"}, "output_dir": str(tmp_path / "run")}
    words = list(LAYOUTS[layout])
    if "zero" in layout:
        pytest.importorskip("deepspeed")
    (tmp_path / "run.yaml").write_text(json.dumps(tree))
    given, expected = (run_ranks(train, 2, str(tmp_path / "run.yaml"), words, poisoned) for poisoned in (True, False))
    for rank, ((records, tensors, messages), (sound, wanted, _)) in enumerate(zip(given, expected, strict=True)):
        assert [record["update/skipped_nonfinite"] for record in records] == [1, 1]
        assert "loss" not in records[0] and math.isfinite(records[1]["grad_norm"])
        assert records[1]["grad_norm"] == sound[1]["grad_norm"]
        assert tensors.keys() == wanted.keys() and all(torch.equal(tensors[n], wanted[n]) for n in tensors)
        assert any("Update 1 is skipped" in message for message in messages) == (rank == 0)
