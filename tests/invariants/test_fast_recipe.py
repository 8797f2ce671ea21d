"""A toy training with the update and the KL share of the `_fast` presets ends where the whole two-phase one ends."""

import statistics

import pytest

from sage_fast.config.load import load_config
from sage_fast.run.run import build_trainer

SMALL = {
    "video.num_frames": 8,
    "rollout.num_steps": 4,
    "rollout.num_generations": 8,
    "rollout.batch_size": 16,
    "training.ema_decay": None,
    "evaluation.num_prompts": 24,
    "evaluation.batch_size": 24,
    "evaluation.noises": 1,
}
FAST = ("hv15_480p_lora_8gpu_fast", "hv15_352x624_lora_8gpu_fast")
SEEDS, UPDATES = (0, 1, 2), 6


def rewards(seed: int, **changes: object) -> list[float]:
    """Evaluated reward of every prompt after a training, less that before it."""
    trainer = build_trainer(load_config("toy_cpu", {**SMALL, "seed": seed, **changes}))
    before, _ = trainer.evaluate()
    for _ in range(UPDATES):
        trainer.iterate()
    after, _ = trainer.evaluate()
    return [b - a for a, b in zip(before.reward, after.reward, strict=True)]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_fast_update_ends_where_two_phases_end() -> None:
    presets = [load_config(name) for name in FAST]
    ((update, share),) = {(p.training.update, p.objective.kl_position_fraction) for p in presets}
    fast = {"training.update": update, "objective.kl_position_fraction": share, "rollout.micro_batch_size": 1}
    whole = {"training.update": "two_phase", "rollout.micro_batch_size": 16}
    ends = [[rewards(seed, **arm) for seed in SEEDS] for arm in (fast, whole)]
    means = [[statistics.mean(gains) for gains in arm] for arm in ends]
    error = (sum(statistics.variance(arm) for arm in means) / len(SEEDS)) ** 0.5
    difference = statistics.mean(means[0]) - statistics.mean(means[1])
    print(f"gains {means}, difference {difference:+.4f}, standard error {error:.4f}")
    assert abs(difference) <= 2 * error
    assert min(statistics.mean(arm) for arm in means) > 0, "both learn"
