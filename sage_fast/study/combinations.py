"""Which levers are measured together, as overrides of one configuration, and what an estimate with them costs."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from sage_fast.config.load import load_config
from sage_fast.config.schema import RunConfig
from sage_fast.planning.devices import DEVICES
from sage_fast.planning.estimate import make_plan
from sage_fast.planning.layout import least_gpus

REFERENCE = "reference recipe"
FAST = "fast"

Kind = Literal["exact", "unbiased", "biased"]


@dataclass(frozen=True, kw_only=True)
class Combination:
    """Some levers together.

    name: the lever's in docs/performance.md, where it is there. options: overrides without dashes; {half} and {quarter}
    stand for shares of rollout.num_steps. kind: whether the gradient is the reference's, is so on average, or is not.
    single_pass: whether the gradient is taken during the rollout. It is the same gradient.

    Example: `Combination(name="fewer steps", kind="biased", options=("rollout.num_steps={half}",))`
    """

    name: str
    kind: Kind
    options: tuple[str, ...] = ()
    single_pass: bool = False

    def overrides(self, config: RunConfig, *, two_phase: bool = False) -> list[str]:
        """As words of the command line, over a configuration; with two_phase without the single pass."""
        steps = config.rollout.num_steps
        parts = {"{half}": str(max(2, steps // 2)), "{quarter}": str(max(1, steps // 4))}
        words = []
        for option in (*self.options, *(_SINGLE if self.single_pass and not two_phase else ())):
            for name, value in parts.items():
                option = option.replace(name, value)
            words.append(f"--{option}")
        return words


_QUARTER_KL = "objective.kl_position_fraction=0.25"
_UNIFORM, _WEIGHTED = "training.pairs=uniform", "training.pairs=weighted"
_WINDOW = "rollout.sde_window.size={quarter}"
_SINGLE = ("training.update=single_pass", "rollout.micro_batch_size=1")
_EXTREMES = ("rollout.num_generations=16", "training.train_on.best=4", "training.train_on.worst=4")

COMBINATIONS = (
    Combination(name=REFERENCE, kind="exact"),
    Combination(name="single pass", kind="exact", single_pass=True),
    Combination(name="KL at a quarter of the steps", kind="unbiased", options=(_QUARTER_KL,)),
    Combination(name="KL at a quarter, single pass", kind="unbiased", options=(_QUARTER_KL,), single_pass=True),
    Combination(name="uniform pairs", kind="unbiased", options=(_UNIFORM,)),
    Combination(name="weighted pairs", kind="unbiased", options=(_WEIGHTED,)),
    Combination(name="weighted pairs, a quarter", kind="unbiased", options=(_WEIGHTED, "training.pair_fraction=0.25")),
    Combination(name=FAST, kind="unbiased", options=(_QUARTER_KL, _WEIGHTED)),
    Combination(name="no KL to an anchor", kind="biased", options=("objective.kl_mode=none",)),
    Combination(name="no KL, single pass", kind="biased", options=("objective.kl_mode=none",), single_pass=True),
    Combination(name="SDE window", kind="biased", options=(_WINDOW,)),
    Combination(name="SDE window, fast", kind="biased", options=(_WINDOW, _QUARTER_KL, _WEIGHTED)),
    Combination(name="SDE window, shared start", kind="biased", options=(_WINDOW, "rollout.shared_initial_noise=true")),
    Combination(name="SDE window, feature cache", kind="biased", options=(_WINDOW, "rollout.cache_threshold=0.1")),
    Combination(name="fewer steps", kind="biased", options=("rollout.num_steps={half}",)),
    Combination(name="groups of 8", kind="biased", options=("rollout.num_generations=8",)),
    Combination(name="groups of 16", kind="biased", options=("rollout.num_generations=16",)),
    Combination(
        name="groups of 16, fast",
        kind="biased",
        options=("rollout.num_generations=16", _QUARTER_KL, _WEIGHTED),
    ),
    Combination(name="best and worst of 16", kind="biased", options=_EXTREMES),
    Combination(name="best and worst of 16, KL at a quarter", kind="biased", options=(*_EXTREMES, _QUARTER_KL)),
)
"""The first one is the reference of all others."""

KINDS = {combination.name: combination.kind for combination in COMBINATIONS}


def flops_per_video(config: RunConfig) -> float:
    """Counted FLOPs of a video in the transformer and the decoder, as `sage-fast plan` has them for an H100."""
    plan = make_plan(config, DEVICES["h100"], gpus=least_gpus(config.distributed, config.rollout), sizes={})
    return sum(phase.cost.flops for phase in plan.phases) * plan.layout.sp


def pflop_per_estimate(combination: Combination, *, priced: Sequence[str], videos: int) -> float:
    """1e15 FLOPs of a rollout of so many videos and its gradient.

    Args:
        priced: words of the configuration whose model is counted.
    """
    config = load_config(list(priced))
    return videos * flops_per_video(load_config(list(priced), combination.overrides(config))) / 1e15
