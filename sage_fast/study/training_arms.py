"""The trainings of the table of experiments: what each arm changes in the study's configuration."""

from collections.abc import Callable, Mapping

from sage_fast.study.measures import SAMPLERS
from sage_fast.study.trainings import PROBE, PROBE_WEIGHT, Training, constant_lambda


def _arm(name: str, *overrides: str, kl_share: float | None = None) -> tuple[str, Callable[[int], Training]]:
    return name, lambda seed: Training(arm=name, overrides=overrides, seed=seed, kl_share=kl_share)


SETTING_A = "--reward.weights={VQ: 1.0, MQ: 1.0, TA: 1.0}"
SETTING_B = "--reward.weights={VQ: 0.5, MQ: 0.5, TA: 1.0}"
TWICE = "sage_grpo-40-updates"
"""The demo's recipe for twice as many updates."""
LONG = ("--training.updates_per_rollout=2", "--training.num_updates=100")
SHARES = (0.1, 1.0)
WEIGHTS = (1e-5, 0.03)
"""Of the KL: the largest published, and that of `ablations/kl_strong`."""
ANCHORED = ("fixed", "stepwise", "moving", "dual")
PLAIN = ("sage_grpo", "sage_exact", "flow_grpo", "dance_grpo")
"""Samplers that the equalizer is switched off for."""


def kl_arm(mode: str, share: float | None) -> str:
    """Name of the arm of a KL mode with the published lambda, or with one that gives it a share of the gradient."""
    return f"kl-{mode}-{'published' if share is None else f'{share:g}'}"


def weight_arm(weight: float) -> str:
    """Name of the arm that measures the KL's share at a constant lambda."""
    return f"kl-weight-{weight:g}"


def _sampler(name: str) -> tuple[str, str]:
    return f"--rollout.sde_type={name}", "--objective.equalizer=true"


ARMS: Mapping[str, Callable[[int], Training]] = dict(
    [
        *(_arm(name, *_sampler(name)) for name in SAMPLERS),
        *(_arm(f"{name}-plain", f"--rollout.sde_type={name}", "--objective.equalizer=false") for name in PLAIN),
        _arm(TWICE, *_sampler("sage_grpo"), "--training.num_updates=40"),
        *(_arm(f"B-{name}", *_sampler(name), SETTING_B) for name in SAMPLERS),
        *(_arm(f"A-{name}", *_sampler(name), SETTING_A) for name in SAMPLERS),
        *(
            _arm(
                weight_arm(weight),
                *("--training.num_updates=8", "--training.kl_share_every=1", "--objective.kl_mode=fixed"),
                *constant_lambda(weight),
            )
            for weight in WEIGHTS
        ),
        _arm("kl-none", *LONG, "--objective.kl_mode=none"),
        *(
            _arm(kl_arm(mode, share), *LONG, f"--objective.kl_mode={mode}", kl_share=share)
            for share in (None, *SHARES)
            for mode in ANCHORED
        ),
        _arm("lambda-tighten", *LONG, "--objective.kl_mode=dual", "--kl_weight.direction=tighten"),
        _arm("lambda-constant", *LONG, "--objective.kl_mode=dual", *constant_lambda(1e-5)),
        _arm(
            PROBE,
            *("--training.updates_per_rollout=2", "--training.num_updates=20", "--training.kl_share_every=1"),
            *("--objective.kl_mode=fixed", *constant_lambda(PROBE_WEIGHT)),
        ),
    ]
)
"""Trainings of a seed by the name of their arm."""


def probe() -> Training:
    """The training that measures the share of the KL in the gradient."""
    return ARMS[PROBE](0)
