"""At the first update of a rollout the policy is the one that made it: the ratio is 1,
not nearly 1.
"""

from collections.abc import Callable

import pytest
import torch

from sage_fast.config.schema import RunConfig
from sage_fast.run.run import build_trainer

MakeRun = Callable[..., RunConfig]


@pytest.mark.parametrize(("mode", "guidance"), [("lora", 2.0), ("full", 1.0)])
def test_the_ratio_of_every_on_policy_update_is_exactly_one(
    tiny_run: MakeRun, mode: str, guidance: float
) -> None:
    trainer = build_trainer(
        tiny_run(f"--training.mode={mode}", f"--rollout.guidance_scale={guidance}")
    )
    for _ in range(3):
        record = trainer.iterate()
        assert record["ratio/max_deviation"] == 0.0
        assert record["log_ratio/mean"] == 0.0


def test_bfloat16_base_keeps_float32_adapters_and_ratio_one(tiny_run: MakeRun) -> None:
    trainer = build_trainer(tiny_run("--model.dtype=bfloat16"))
    assert (
        trainer.policy.transformer.transformer_blocks[
            0
        ].attn.to_q.base_layer.weight.dtype
        == torch.bfloat16
    )
    assert all(p.dtype == torch.float32 for p in trainer.parameters.values())
    assert [trainer.iterate()["ratio/max_deviation"] for _ in range(2)] == [0.0, 0.0]
