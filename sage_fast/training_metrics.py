"""The numbers that an iteration reports about its rewards and its updates; `docs/` and dashboards use their names.

Shapes: P prompts, G videos per prompt, N rows of trained steps.
"""

from collections.abc import Mapping

from torch import Tensor

from sage_fast.objective import GroupAdvantages, ObjectiveSettings, PolicyTerms
from sage_fast.sde import TransitionTable


def reward_metrics(
    scores: Mapping[str, Tensor],
    overall: Tensor,
    advantages: GroupAdvantages,
    dropped: Tensor,
    table: TransitionTable,
) -> dict[str, float]:
    """What the rewards of a rollout look like.

    Args:
        scores: name -> (P, G) of the groups that are trained on. overall: (P, G), their weighted sum.
        advantages: of these groups.
        dropped: bool, one per group of the rollout.
        table: the rollout's sampler.
    """
    gains = table.gain[table.trainable].abs()
    metrics = {
        "reward/mean": float(overall.mean()),
        "reward/std": float(overall.std(correction=0)),
        "reward/dropped_groups": int(dropped.sum()),
        "advantage/group_std": float(overall.std(dim=1, correction=0).mean()),
        "advantage/abs_mean": float(advantages.advantages.abs().mean()),
        "advantage/zero_spread_groups": int(advantages.zero_spread.sum()),
        "gain/abs_min": float(gains.min()),
        "gain/abs_max": float(gains.max()),
    }
    for name, values in scores.items():
        metrics[f"reward/{name}_mean"] = float(values.mean())
        metrics[f"reward/{name}_std"] = float(values.std(correction=0))
    return metrics


def weighted_kl(terms: PolicyTerms, settings: ObjectiveSettings) -> float:
    """Mean of the weighted KL terms: what the KL weight's controller watches. `terms` are (N,)."""
    kl = settings.kl_position_weight * terms.kl_position + settings.kl_velocity_weight * terms.kl_velocity
    return float(kl.mean())


def update_metrics(terms: PolicyTerms) -> dict[str, float]:
    """What the objective of an update looks like; `terms` are (N,) rows that were trained on."""
    return {
        "loss": float(terms.loss.mean()),
        "ratio/mean": float(terms.ratio.mean()),
        "ratio/max_deviation": float((terms.ratio - 1).abs().max()),
        "log_ratio/mean": float(terms.log_ratio.mean()),
        "log_ratio/std": float(terms.log_ratio.std(correction=0)),
        "ratio/clip_fraction": float(terms.clipped.float().mean()),
        "kl/position": float(terms.kl_position.mean()),
        "kl/velocity": float(terms.kl_velocity.mean()),
    }
