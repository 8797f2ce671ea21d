"""The contract between the trainer and an objective, and the terms of a loss over all
ranks.

Shapes: B samples of a micro-batch, V samples of a rollout on all ranks, N of this rank,
K positions: the trained steps of a sample in the order of its visits, or its noise
levels.
"""

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Generic, Literal, TypeVar

import torch
from torch import Tensor

from sage_fast.config.errors import ConfigError
from sage_fast.config.registry import UPDATES, resolve
from sage_fast.config.schema import RunConfig
from sage_fast.data import kl_factors, split_evenly
from sage_fast.distributed.engine import Engine, WeightSnapshot
from sage_fast.distributed.world import World
from sage_fast.kernels import Kernels
from sage_fast.noise import NoiseKey
from sage_fast.objective import (
    KLWeightState,
    anchor_kind,
    initial_kl_weight,
    next_kl_weight,
)
from sage_fast.optim import GRPO_RECIPES
from sage_fast.policy.guidance import GuidedPolicy
from sage_fast.records import Prompt, Sample, ScoredRollout
from sage_fast.rollout import (
    Progress,
    StepVelocity,
    policy_velocity,
    rollout_tables,
)
from sage_fast.sde import TransitionTable

logger = logging.getLogger(__name__)

FEW_VIDEOS = 64
FEW_PROMPTS = 8
"""Videos and prompts per update below which a run is warned, and so is its plan."""

Place = tuple[int, int]
"""Numbers of a micro-batch and of a position."""

Terms = TypeVar("Terms", bound=tuple[Tensor, ...])
"""A NamedTuple of columns, the first of them `loss`: `PolicyTerms`, or those of the
forward process.
"""


@dataclass(frozen=True, kw_only=True)
class Parts:
    """Parts that the trainer gives an objective.

    Attributes:
        policy: the model that is trained.
        engine: sums its gradient.
        kernels: of the loss.
        own_videos: this rank's among those of a rollout.
        progress: called at every pass of the model.
    """

    policy: GuidedPolicy
    engine: Engine
    kernels: Kernels
    own_videos: slice
    progress: Progress


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Passes through the model and copies that an objective needs; a plan counts them.

    Attributes:
        positions: K of each rollout, in turn.
        room: positions at which a plan has room for velocities of other weights.
        keeps_steps: the states and velocities of the sampler's steps are needed after
            the rollout.
        knows_fresh_anchor: the KL to an anchor that is the rollout's policy needs no
            forward: its value and gradient are zero, and in later updates of the
            rollout the velocities of its sampler stand for the anchor's.
        policy_moves: an update cannot take the rollout's velocities for its own, so
            split guidance needs one more forward. Of several updates only the later
            ones need it; a plan counts it in all of them.
        keeps_old: a second copy of the trained weights samples.
        measures_old: that copy runs once more before an update.
        accumulators: copies of the trained weights that a rollout fills with the
            gradients of its videos; 0 where the gradient is taken after the rollout.
    """

    positions: Sequence[int]
    room: int
    policy_moves: bool
    keeps_steps: bool = True
    knows_fresh_anchor: bool = True
    keeps_old: bool = False
    measures_old: bool = False
    accumulators: int = 0

    @property
    def in_rollout(self) -> bool:
        """True if the gradient is taken while the rollout is sampled."""
        return self.accumulators > 0


class Objective(ABC):
    """A loss that is minimised after a rollout, and a way to its gradient.

    It owns the weights that the loss compares with (`snapshots`) and the weight lambda
    of its KL. In every iteration the trainer calls `begin`; `velocity` for each
    micro-batch, in the context of `sampling`; `measure` when the rewards are there; and
    for each of `mini_batches`: `accumulate`, then `verify`, the optimizer's step,
    `moved` and `report`.
    """

    splits_videos: ClassVar[bool] = False
    """Several updates of a rollout have some of its videos each, not some positions."""
    same_gradient: ClassVar[str | None] = None
    """`training.update` of another objective with the same gradient."""
    published: ClassVar[Mapping[Literal["lora", "full"], str]] = GRPO_RECIPES
    """Key of a published recipe by training.mode."""

    @staticmethod
    @abstractmethod
    def check_config(config: RunConfig) -> None:
        """ConfigError where a configuration has what this objective cannot have."""

    @staticmethod
    @abstractmethod
    def costs(config: RunConfig) -> Costs:
        """Costs of a run, from its configuration alone."""

    @staticmethod  # noqa: B027  they do by default
    def check_steps_agree(config: RunConfig) -> None:
        """ConfigError if ranks may differ in whether a pass has a backward.

        They would gather the weights of different layers. Where weights stay gathered
        through a rollout it does not matter.
        """

    @classmethod
    def videos_per_update(cls, config: RunConfig, prompts_per_rollout: int) -> int:
        """Videos of all ranks in one update."""
        videos = prompts_per_rollout * config.rollout.num_generations
        if cls.splits_videos:
            videos //= config.training.updates_per_rollout
        return videos

    @classmethod
    def check_run(cls, config: RunConfig, prompts_per_rollout: int) -> None:
        """Warn before the model is loaded of what a run may regret. ConfigError."""
        if config.rollout.solver_order == 2 and not any(
            table.extrapolation is not None and bool(table.extrapolation.any())
            for table in rollout_tables(config.rollout)
        ):
            logger.warning(
                "rollout.solver_order 2 changes nothing: it is for two and more steps "
                "without noise, and rollout.sde_type %s draws it at nearly every one. "
                "Set rollout.sde_window.size.",
                config.rollout.sde_type,
            )
        videos = cls.videos_per_update(config, prompts_per_rollout)
        if too_few(videos, prompts_per_rollout):
            logger.warning(
                "%d video(s) of %d prompt(s) per update: nearly all public recipes "
                "have at least %d of %d. With fewer, the reward is reported to only "
                "fluctuate, or the model to collapse. Raise rollout.batch_size (of "
                "each data-parallel rank), or have more prompts by a smaller "
                "rollout.num_generations.",
                videos,
                prompts_per_rollout,
                FEW_VIDEOS,
                FEW_PROMPTS,
            )

    def __init__(self, config: RunConfig, parts: Parts) -> None:
        self.config = config
        self.settings = config.objective
        self.training = config.training
        self.policy = parts.policy
        self.engine = parts.engine
        self.kernels = parts.kernels
        self.anchor_kind = anchor_kind(self.settings.kl_mode)
        self.anchor: WeightSnapshot | None = (
            self.engine.snapshot() if self.anchor_kind != "none" else None
        )
        self.anchor_update = 0
        """Updates done when the anchor was last refreshed."""
        self.needs = self.costs(config)
        self.old: WeightSnapshot | None = (
            self.engine.snapshot() if self.needs.keeps_old else None
        )
        """The policy that samples, where it is not the trained one."""
        self.sampler = self.policy
        """Its guided velocity samples."""
        self.kl_weight: KLWeightState = initial_kl_weight(config.kl_weight)
        self.measured_anchor: WeightSnapshot | None = None
        """The anchor, in rollouts whose KL to it is measured."""
        self.kl_factors: Sequence[float] = ()
        """K numbers: what the KL to the anchor counts at each position in this rollout.
        """
        self.anchor_velocities: dict[Place, Tensor] = {}
        self.old_velocities: dict[Place, Tensor] = {}
        """Velocities of `anchor` and `old` that were measured for this rollout."""

    # ----------------------------------------------------------------------------------
    # a rollout

    def begin(self, update: int, rollouts: int) -> None:
        """A rollout starts, after so many updates and rollouts; the anchor is refreshed
        if that is due.
        """
        self.anchor_velocities = {}
        self.old_velocities = {}
        due = (
            self.anchor_kind == "moving"
            and update - self.anchor_update >= self.training.anchor_interval
        )
        if self.anchor is not None and due:
            self.anchor.refresh()
            self.anchor_update = update
        # True of a fixed anchor too, before the first update.
        fresh = self.anchor_update == update
        known = fresh and self.needs.knows_fresh_anchor
        self.measured_anchor = None if known else self.anchor
        positions = self.needs.positions
        count = positions[rollouts % len(positions)]
        # A function of seed and update: the same on every rank, and after a resume.
        self.kl_factors = kl_factors(
            self.config.seed, update, count, self.settings.kl_position_fraction
        )

    def sampling(self) -> AbstractContextManager[None]:
        """Within the context the model has the weights that sample."""
        return self.old.applied() if self.old is not None else nullcontext()

    def velocity(
        self,
        samples: Sequence[Sample],
        keys: Sequence[NoiseKey],
        table: TransitionTable,
    ) -> StepVelocity:
        """Velocities of a micro-batch, for the sampler."""
        return policy_velocity(self.sampler, samples)

    @abstractmethod
    def orders(
        self, keys: Sequence[NoiseKey], table: TransitionTable
    ) -> list[list[int]]:
        """Lists of K: the trained steps of each sample in the order of its visits, or
        the numbers of its levels.
        """

    def measure(self, scored: ScoredRollout) -> None:  # noqa: B027  it may be known from the rollout
        """Prepare what `accumulate` needs of other weights."""

    def measures(self, position: int) -> bool:
        """True if the KL to the anchor counts at a position."""
        return self.measured_anchor is not None and self.kl_factors[position] > 0

    def mini_batches(
        self, scored: ScoredRollout
    ) -> Iterator[tuple[ScoredRollout, Sequence[int]]]:
        """The share of each update of a rollout: some positions of all videos."""
        for positions in split_evenly(
            len(scored.orders[0]), self.training.updates_per_rollout
        ):
            yield scored, positions

    # ----------------------------------------------------------------------------------
    # an update

    @abstractmethod
    def accumulate(
        self, scored: ScoredRollout, positions: Sequence[int], update: int
    ) -> Any:
        """Add to `.grad` the gradient of the mean loss over these positions of every
        trained sample's order.

        The loss is a sum over samples and steps divided by their global count, so it
        depends on neither the micro-batch size nor the number of ranks.

        Args:
            update: updates done.

        Returns:
            Terms (N len(positions),), detached: micro-batch after micro-batch, step
            after step, its samples. Where the model need not run, they are the terms at
            the rollout's velocity.
        """

    def verify(self, terms: Any, update: int) -> None:  # noqa: B027  nothing to find by default
        """TrainingError if the terms of all ranks show a fault of the software; the
        weights have not moved yet.
        """

    def moved(self, update: int) -> None:  # noqa: B027  nothing follows by default
        """`update` updates are done, of which the last one may have been skipped."""

    def report(self, terms: Any, visits: int) -> dict[str, float]:
        """Metrics of an update from the terms of all ranks; lambda moves.

        Args:
            visits: of a rank's videos to their steps in this update.
        """
        metrics, kl = self.statistics(terms)
        for _ in range(visits if self.config.kl_weight.advance == "step" else 1):
            self.kl_weight = next_kl_weight(self.kl_weight, kl, self.config.kl_weight)
        return metrics

    @abstractmethod
    def statistics(self, terms: Any) -> tuple[dict[str, float], float]:
        """Metrics of an update, and the KL that the controller of lambda watches."""

    # ----------------------------------------------------------------------------------
    # state

    def snapshots(self) -> dict[str, WeightSnapshot]:
        """Weights of a checkpoint beside the trained ones."""
        found = {"anchor": self.anchor, "old": self.old}
        return {name: weights for name, weights in found.items() if weights is not None}

    def state(self) -> dict[str, Any]:
        """State of a checkpoint without its tensors, fit for JSON."""
        return {
            "anchor_update": self.anchor_update,
            "kl_weight": asdict(self.kl_weight),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Take over what `state` has given."""
        self.anchor_update = int(state["anchor_update"])
        saved = state["kl_weight"]
        # JSON knows lists alone
        self.kl_weight = KLWeightState(**{**saved, "history": tuple(saved["history"])})


def objective_of(config: RunConfig) -> type[Objective]:
    """The class that `training.update` names. ConfigError where it refuses the
    configuration.
    """
    found: type[Objective] = resolve(config.training.update, UPDATES, "training.update")
    if not (isinstance(found, type) and issubclass(found, Objective)):
        raise ConfigError(
            f"training.update is {config.training.update!r}, which is not a subclass "
            "of sage_fast.objectives.base.Objective (docs/how_to/own_parts.md)."
        )
    if config.own_step:
        found.check_config(config)
    return found


def too_few(videos: int, prompts: int) -> bool:
    """True below `FEW_VIDEOS` or `FEW_PROMPTS` per update."""
    return videos < FEW_VIDEOS or prompts < FEW_PROMPTS


def second_half(config: RunConfig, ranks: int) -> int | None:
    """Number, among the videos of all ranks, of the first one of the second half of a
    rollout's groups.

    None where the gradients of the halves are not compared: they are where adapters are
    whole on every rank, an update has a whole rollout of two groups or more, and the
    second half begins with a micro-batch.

    Args:
        ranks: data-parallel ones.
    """
    rollout = config.rollout
    training = config.training
    if (
        training.mode != "lora"
        or config.distributed.zero_stage is not None
        or training.updates_per_rollout > 1
    ):
        return None
    groups = rollout.batch_size * ranks // rollout.num_generations
    first = groups // 2 * rollout.num_generations
    # An objective that accumulates in the rollout has a gradient for each video.
    apart = first % rollout.batch_size % rollout.videos_at_once == 0
    if not apart and not objective_of(config).costs(config).in_rollout:
        return None
    return first or None


# --------------------------------------------------------------------------------------
# losses


@dataclass(frozen=True, kw_only=True)
class VelocityLoss(Generic[Terms]):
    """Loss of a micro-batch at one state of every sample, as a function of the guided
    velocity there.

    Attributes:
        latents: (B, C, F, H, W), the states.
        sigma: (B,) float32 on the CPU, their noise levels.
        known_velocity: what the velocity is as long as the policy has not moved; None
            if the model has not been there.
    """

    latents: Tensor
    sigma: Tensor
    known_velocity: Tensor | None = None

    def terms(self, velocity: Tensor) -> Terms:
        """The loss and its parts at a velocity (B, C, F, H, W); each (B,)."""
        raise NotImplementedError

    def unmoved(self) -> Terms:
        """The terms where the loss has no gradient, without the model: those at
        `known_velocity`.
        """
        assert self.known_velocity is not None
        return self.terms(self.known_velocity)

    def cotangent(self, velocity: Tensor, row_weights: Tensor) -> tuple[Tensor, Terms]:
        """d sum_b(row_weights_b loss_b)/dv at a velocity without a graph, and the
        detached terms at it.
        """
        # The single pass calls this while it samples, where gradients are off.
        with torch.enable_grad():
            leaf = velocity.detach().requires_grad_()
            terms = self.terms(leaf)
            (result,) = torch.autograd.grad(
                terms[0], leaf, row_weights.to(terms[0], non_blocking=True)
            )
        return result, type(terms)(*(term.detach() for term in terms))


def concatenate_terms(terms: Sequence[Terms]) -> Terms:
    """The terms of several batches as those of one."""
    return type(terms[0])(*(torch.cat(column) for column in zip(*terms, strict=True)))


def gather_terms(
    scored: ScoredRollout, own: Terms, positions: Sequence[int], world: World
) -> tuple[Terms, str | None]:
    """The terms of all ranks, before the optimizer sees their gradient. Collective.

    Args:
        own: this rank's, from `Objective.accumulate` with these positions.

    Returns:
        Those of trained videos, (N,) each, in CPU memory and in the order of one
        process; and a description of a loss that is not finite, with its prompts, or
        None. The same on every rank.
    """
    # The only read of the GPU between the gradient and the optimizer's step, apart from
    # the gradient's norm.
    matrix = torch.stack([column.to(own[0].dtype) for column in own]).cpu()
    bad = ~matrix[0].isfinite()
    names = ""
    if bad.any():
        prompts = [
            s.prompt for t in scored.trajectories for _ in positions for s in t.samples
        ]
        names = name_prompts(
            prompt for prompt, wrong in zip(prompts, bad.tolist(), strict=True) if wrong
        )
    # Samples (ranks, terms) in the order of the terms: micro-batch after micro-batch,
    # step after step.
    samples = scored.rows.unflatten(1, (len(scored.trajectories), 1, -1))
    rows = samples.expand(-1, -1, len(positions), -1).flatten(1)
    trained = scored.all_trained[rows]
    everywhere = world.gather((matrix[:, trained[scored.rank]], names))
    order = (rows[trained] // samples.shape[-1]).argsort(stable=True)
    # Ranks that share a video have the same terms.
    terms = type(own)(
        *torch.cat([columns for columns, _ in everywhere[:: world.sp]], dim=1)[:, order]
    )
    for rank, (_, names) in enumerate(everywhere):
        if names:
            return (
                terms,
                (
                    f"{f'on rank {rank} ' if world.size > 1 else ''}the loss of "
                    f"prompt {names}"
                ),
            )
    return terms, None


def name_prompts(prompts: Iterable[Prompt]) -> str:
    """Up to three of the prompts by index and text, for a message."""
    return ", ".join(
        sorted({f"{prompt.index} ({prompt.text!r})" for prompt in prompts})[:3]
    )
