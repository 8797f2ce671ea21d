"""The table of experiments of experiments.toml: the paper's tables and figures, their claims and their trainings."""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from sage_fast.config.errors import ConfigError
from sage_fast.study.claims import Claim

Tier = Literal["quick", "standard", "full"]
TIERS: tuple[Tier, ...] = ("quick", "standard", "full")
"""Each includes those before it."""

SEEDS_OF_A_PROCESS = 16
"""Of trainings of the exact policy, which are shorter than the start of a process."""

_TABLE = tomllib.loads((Path(__file__).parent / "experiments.toml").read_text("utf-8"))


@dataclass(frozen=True, kw_only=True)
class Training:
    """One run of `sage-fast train`.

    arm: its name, the same for all seeds. overrides: of the study's configuration.

    Example: `Training(arm="cps", overrides=("--rollout.sde_type=cps",), seed=3)`
    """

    arm: str
    overrides: tuple[str, ...]
    seed: int

    @property
    def name(self) -> str:
        """Arm and seed; the place of the run below the study's folder."""
        return f"{self.arm}/seed-{self.seed}"


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """One table or figure of the paper.

    caption: of its picture. seeds: of its measurements; none where nothing is random. measure: key of
    `measures.MEASURES`, for samples without a training. runs: trainings of the exact policy by name, as what they
    change in `testbed.ExactTraining`. arms: of the trainings. drawn: quantity in the picture of trainings.
    needs_manifold: left out where the data manifold is not known.

    Example: `chosen_experiments("quick", ["fig4"])[0].seeds` is `(0, 1, 2)`.
    """

    key: str
    title: str
    tier: Tier
    caption: str
    claims: Sequence[Claim] = ()
    seeds: tuple[int, ...] = ()
    measure: str | None = None
    runs: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    arms: tuple[str, ...] = ()
    drawn: str = "final_reward"
    needs_manifold: bool = False

    def measurements(self) -> dict[str, tuple[int, ...]]:
        """Seeds of the measurements by name; each is made in its own process."""
        size = SEEDS_OF_A_PROCESS if self.runs else 1
        chunks = [self.seeds[first : first + size] for first in range(0, len(self.seeds), size)]
        return {f"{self.key}-seed-{chunk[0]}": chunk for chunk in chunks} if self.measure else {}

    @property
    def trained(self) -> tuple[str, ...]:
        """Names of its trainings, of networks or of the exact policy."""
        return self.arms or tuple(self.runs)

    def trainings(self) -> list[Training]:
        """Trainings, seed by seed, so that a study that is stopped early has all arms."""
        return [training(arm, seed) for seed in self.seeds for arm in self.arms]


def training(arm: str, seed: int) -> Training:
    """A training of the table."""
    return Training(arm=arm, overrides=tuple(f"--{word}" for word in _TABLE["arms"][arm]), seed=seed)


def _experiment(key: str, tree: dict[str, Any]) -> Experiment:
    claims = tuple(Claim(experiment=key, **claim) for claim in tree["claims"])
    tuples = {"seeds": tuple(tree.get("seeds", range(tree.pop("num_seeds", 0)))), "arms": tuple(tree.get("arms", ()))}
    return Experiment(key=key, **tree | tuples | {"claims": claims})


ARMS = tuple(_TABLE["arms"])
EXPERIMENTS = tuple(_experiment(key, tree) for key, tree in _TABLE.items() if key != "arms")


def chosen_experiments(tier: Tier, only: Sequence[str] = ()) -> list[Experiment]:
    """The experiments of a tier and the tiers below it, or those named. ConfigError for an unknown name."""
    known = [experiment.key for experiment in EXPERIMENTS]
    if unknown := [key for key in only if key not in known]:
        raise ConfigError(f"--only names {', '.join(unknown)}; choose among {', '.join(known)}.")
    allowed = TIERS[: TIERS.index(tier) + 1]
    return [e for e in EXPERIMENTS if (e.key in only if only else e.tier in allowed)]
