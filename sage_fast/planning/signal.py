"""How much of the gradient's signal the levers of a configuration keep, from factors measured in the toy world.

What is left out of an estimate adds noise in proportion to 1/f - 1, where f is the share that is kept: the signal is
1 / (1 + c (1/f - 1)) of the whole gradient's, and one measurement gives c. That is exact for random shares, and for the
others it is how the factor goes on from the measured share. Factors of different levers are multiplied. Of a biased
lever only the noise counts, as if its mean were the whole gradient's; docs/efficiency.md has what is known of its bias.
What has no factor yet counts as if it kept everything, and `is_measured` tells.
"""

from sage_fast.config.schema import RunConfig

KEPT = {
    "KL at a quarter of the steps": 1.0,
    "uniform pairs": 0.52,
    "weighted pairs": 0.7,
    "SDE window": 0.25,
}
"""tr Var r of the reference over tr Var g by combination, as docs/results/efficiency.jsonl has it."""


def relative_signal(config: RunConfig) -> float:
    """|E g|^2 / tr Var g of a rollout's gradient, over that of the full gradient.

    Only the levers that leave a part out count; exact ones keep 1. The size of the groups does not change the noise.

    Example: 1.0 for the reference recipe, and 0.52 for it with `training.pairs: uniform`, at one half of them.
    """
    training, rollout = config.training, config.rollout
    signal = _of_share("KL at a quarter of the steps", 0.25, config.objective.kl_position_fraction)
    if training.pairs == "weighted":
        signal *= _of_share("weighted pairs", 0.5, training.pair_fraction)
    signal *= _of_share("uniform pairs", 0.5, training.step_fraction)
    window = rollout.sde_window
    noisy = window.size if window.steps is None else len(set(window.steps))
    if noisy is not None:
        signal *= _of_share("SDE window", 0.25, noisy / rollout.num_steps)
    return signal


def is_measured(config: RunConfig) -> bool:
    """Whether every lever has a factor: best and worst, a shared start, the feature cache and FP8 have none."""
    rollout, other = config.rollout, config.training.train_on.count or config.model.fp8
    return not (other or rollout.shared_initial_noise or rollout.cache_threshold)


def _of_share(lever: str, measured: float, share: float) -> float:
    """What a lever keeps at a share, from what it keeps at the measured one."""
    added = (1 / KEPT[lever] - 1) / (1 / measured - 1)
    return 1 / (1 + added * (1 / share - 1))
