"""The convergence pair of the policy: whole toy trainings with the fused forward and with diffusers' own.

Bounds and their reason are those of the pair of kernels (`test_kernels_in_training.py`).
"""

from typing import Any

import pytest
from torch import Tensor

from sage_fast.models.hunyuan15 import block
from sage_fast.models.hunyuan15.projection import project
from tests.invariants.paired_training import STRONG, WEIGHTS_TOLERANCE, MakeRun, assert_same_metrics, distance, train

RUNS = {
    "lora-guided": ["--rollout.guidance_scale=3.0", "--objective.kl_mode=moving"],
    "lora-selective": ["--model.checkpointing=selective", "--training.updates_per_rollout=2"],
    "lora-feed-forward": [
        "--lora.target_modules=[attn.to_q,attn.to_out.0,ff.net.0.proj,ff.net.2,ff_context.net.0.proj]",
        "--rollout.sde_type=cps",
    ],
    "full": ["--training.mode=full", "--model.checkpointing=full", "--training.updates_per_rollout=2"],
    "ragged-batches": ["--rollout.batch_size=8", "--rollout.micro_batch_size=8", "--rollout.num_generations=2"],
}


@pytest.mark.parametrize("overrides", RUNS.values(), ids=RUNS.keys())
def test_training_is_the_same_with_the_stock_and_the_fused_forward(tiny_run: MakeRun, overrides: list[str]) -> None:
    same = [o for o in overrides if not o.startswith("--model.checkpointing")]
    stock = train(tiny_run(*STRONG, *same, "--model.forward=stock"))
    fused = train(tiny_run(*STRONG, *overrides))
    assert_same_metrics(stock, fused)
    assert distance(stock, fused) < WEIGHTS_TOLERANCE
    assert fused.records[0]["ratio/first_max_deviation"] == 0.0


def test_a_slightly_wrong_block_is_noticed(tiny_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    stock = train(tiny_run(*STRONG, "--model.forward=stock"))

    def wrong(*arguments: Any) -> tuple[Tensor, Tensor | None]:
        result, low = project(*arguments)
        return result.mul_(1.001), low

    monkeypatch.setattr(block, "project", wrong)
    fused = train(tiny_run(*STRONG))
    assert distance(stock, fused) > 2 * WEIGHTS_TOLERANCE


@pytest.mark.slow
def test_training_the_shipped_toy_model_is_the_same(tiny_run: MakeRun) -> None:
    """Rewards that tell the videos apart, so that the advantages depend on the rollouts' last digits too."""
    toy = ["--model.path=null", "--video.num_frames=8", "--rollout.batch_size=8", "--rollout.micro_batch_size=8"]
    toy += ["--rollout.num_generations=4", "--optimizer.learning_rate=1e-3"]
    stock, fused = (train(tiny_run(*STRONG, *toy, f"--model.forward={side}")) for side in ("stock", "fused"))
    assert min(r["reward/std"] for r in stock.records) > 0.05
    assert_same_metrics(stock, fused)
    assert distance(stock, fused) < 20 * WEIGHTS_TOLERANCE
