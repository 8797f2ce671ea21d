"""Memory of a run by component and phase, in bytes, on each of its GPUs.

Exact: weights, adapters, gradients, optimizer state, copies, accumulators, trajectories
(counted), and what graphs keep and what works beside them (traced on the meta device).
Taken from elsewhere: weights beside the transformer, what decoding and scoring need,
the runtime, NCCL's buffers, and a reserve for fragmentation.

With weights over R ranks (`sharding/parallelize.py`) each holds 1/R of the weights, and
with training.mode full of gradients, optimizer state, anchor and average. Kept and
working memory of a call of the model is in `work.py`.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from math import prod
from typing import NamedTuple

import torch

from sage_fast.config.schema import RunConfig
from sage_fast.config.sections import VideoConfig
from sage_fast.data import num_trained
from sage_fast.models.family import ModelDescription
from sage_fast.objective import anchor_kind
from sage_fast.objectives.base import Costs, objective_of, second_half
from sage_fast.planning.trace import Cost
from sage_fast.planning.work import Calls, Gathered, Layout, Weights, model_calls
from sage_fast.rewards.base import RewardCosts, reward_costs

GB = 1e9

PHASES = (
    "encode",
    "rollout",
    "decode",
    "reward",
    "anchor",
    "update",
    "optimizer",
    "evaluation",
)

CUDA_RUNTIME = 1.5 * GB
"""CUDA context and libraries."""

PICTURES = 0.1 * GB
"""CPU memory of the pictures of an evaluation while they are drawn; measured with the
toy run.
"""

PROCESS = 2.5 * GB
"""CPU memory of a process on a GPU, with the libraries of a run, a CUDA context and
what is being read; assumed.
"""

FRAGMENTATION = 0.05
CPU_FRAGMENTATION = 0.3
"""Share of what comes and goes that the allocator is assumed to lose: a GPU's caching
one, and the C library's, which keeps freed blocks of up to 32 MB. The latter is fitted
to the toy run.
"""


@dataclass(frozen=True, kw_only=True)
class PhaseMemory:
    """Bytes on each GPU in one phase, by what they hold. The fields are the rows of the
    plan, in its order.

    Example: `memory.phases["update"].kept_activations` is 14.9e9 for LoRA at 480x832x81
    with split guidance.
    """

    runtime: float = 0.0
    communication_buffers: float = 0.0
    reward_models: float = 0.0
    prompt_encoder: float = 0.0
    transformer: float = 0.0
    adapters: float = 0.0
    optimizer_state: float = 0.0
    anchor: float = 0.0
    average: float = field(default=0.0, metadata={"label": "average (EMA)"})
    video_decoder: float = 0.0
    reward_tables: float = field(default=0.0, metadata={"label": "rewards' tables"})
    tables: float = 0.0
    gathered_weights: float = 0.0
    trajectories: float = 0.0
    videos: float = 0.0
    gradient_accumulators: float = 0.0
    kept_activations: float = 0.0
    working_set: float = 0.0
    decoding: float = 0.0
    scoring: float = 0.0
    anchor_velocities: float = 0.0
    weights_in_flight: float = 0.0
    gradients: float = 0.0
    optimizer_step: float = 0.0
    fragmentation: float = 0.0

    def parts(self) -> dict[str, float]:
        """Label -> bytes of every field."""
        return {
            f.metadata.get("label", f.name.replace("_", " ")): getattr(self, f.name)
            for f in fields(self)
        }

    @property
    def total(self) -> float:
        return sum(self.parts().values())

    def fragmented(self, on_gpu: bool) -> "PhaseMemory":
        """With the share of what comes and goes that the allocator loses."""
        passing = (
            self.kept_activations
            + self.working_set
            + self.decoding
            + self.optimizer_step
        )
        passing += self.weights_in_flight
        passing += (
            self.scoring if on_gpu else self.trajectories + self.anchor_velocities
        )
        return replace(
            self,
            fragmentation=(FRAGMENTATION if on_gpu else CPU_FRAGMENTATION) * passing,
        )


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Memory of a run by phase, in the order of `PHASES`; phases that a run does not
    have are left out.
    """

    phases: Mapping[str, PhaseMemory]

    @property
    def peak_phase(self) -> str:
        return max(self.phases, key=lambda name: self.phases[name].total)

    @property
    def peak(self) -> float:
        return self.phases[self.peak_phase].total


class _Rewards(NamedTuple):
    """Bytes of all rewards: models, tables, and the most that one has at work."""

    models: float
    tables: float
    working: float


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """How a configuration fills the memory of each of its GPUs.

    Attributes:
        asked: the configuration that was planned; in `config` its `auto`s are settled.
        layout, gathered: how GPUs share the work and the weights.
        sizes: gigabytes of the weights that are here, by reward.
        runtime: bytes of the process before it loads anything.
        memory_limit: bytes that may be used.
    """

    asked: RunConfig
    config: RunConfig
    description: ModelDescription
    on_gpu: bool
    layout: Layout
    weights: Weights
    gathered: Gathered
    sizes: Mapping[str, float]
    runtime: float
    memory_limit: float

    def latent_of(self, video: VideoConfig) -> tuple[int, int, int, int]:
        """(C, F, H, W) of a video; ValueError for sizes that the decoder does not have."""
        return self.description.latent_shape(
            video.num_frames, video.height, video.width
        )

    @property
    def latent(self) -> tuple[int, int, int, int]:
        """(C, F, H, W) of a rollout's video."""
        return self.latent_of(self.config.video)

    @cached_property
    def video_tokens(self) -> int:
        return self.description.tokens(self.latent)

    @property
    def fits(self) -> bool:
        return self.memory.peak <= self.memory_limit

    @cached_property
    def costs(self) -> Costs:
        """Passes and copies of the objective."""
        return objective_of(self.config).costs(self.config)

    @cached_property
    def calls(self) -> Calls:
        """Costs of one GPU's calls of the model."""
        return model_calls(self.config, self.description, self.on_gpu, self.layout.sp)

    @cached_property
    def memory(self) -> Memory:
        """Memory of every phase."""
        config = self.config
        resident = self._resident
        gathered = self.gathered
        in_rollout = self.costs.in_rollout
        # Where sharded weights do not stay gathered, only a few blocks of them are in
        # flight at a time.
        without_gradient = replace(
            resident,
            gathered_weights=gathered.whole
            if gathered.sharded and gathered.keep != "never"
            else 0.0,
            weights_in_flight=gathered.flying if gathered.keep == "never" else 0.0,
        )
        # The trajectories, as large as they are when the rollout ends.
        sampling = replace(without_gradient, **self._produced)
        decoding = self.description.decoding(
            self.latent, config.rollout.videos_at_once, config.model, self.on_gpu
        )
        phases = {
            "encode": PhaseMemory(
                runtime=self.runtime,
                reward_models=self._rewards.models,
                prompt_encoder=self.description.encoder_gb * GB,
                # A family may have loaded the transformer into CPU memory before.
                transformer=0.0 if self.on_gpu else resident.transformer,
            ),
            "rollout": self._working(
                sampling, self.calls.gradient if in_rollout else self.calls.sampling
            ),
            "decode": replace(sampling, decoding=decoding.peak_bytes),
            "reward": replace(sampling, scoring=self._rewards.working),
        }
        # In the rollout the anchor is measured step by step, and no velocity is kept.
        velocities = 0.0 if in_rollout else self._kept_velocities
        if velocities:
            phases["anchor"] = self._working(
                replace(sampling, anchor_velocities=velocities), self.calls.velocity
            )
        # A copy of the first half's is there until the gradient is summed.
        copies = 1 if second_half(config, self.layout.data_parallel) is None else 2
        update = replace(
            resident,
            **self._produced,
            anchor_velocities=velocities,
            gradients=copies * self._state,
        )
        # AdamW's second moment is copied, on a CPU for `optimizer/eps_share` alone; the
        # others go tensor by tensor.
        if config.optimizer.name == "adamw":
            stepping = self._state
        else:
            stepping = 16.0 * self.weights.largest
        # The accumulators have been added up by then, and are freed.
        step = replace(
            update,
            gradient_accumulators=0.0,
            gradients=self._state,
            optimizer_step=stepping,
        )
        if not in_rollout:
            flying = gathered.summed + (
                0.0 if gathered.keep == "always" else gathered.flying
            )
            update = self._working(
                replace(update, weights_in_flight=flying), self.calls.gradient
            )
        phases |= {"update": update, "optimizer": step}
        if config.evaluation.every:
            phases["evaluation"] = self._evaluation(without_gradient)
        return Memory(
            phases={
                name: phase.fragmented(self.on_gpu) for name, phase in phases.items()
            }
        )

    @cached_property
    def loading(self) -> dict[str, float] | None:
        """Bytes of CPU memory that a node of GPUs needs, at most, by what they hold;
        None on a CPU.

        Transformer and text encoder are read from mapped files straight to the GPUs,
        shard by shard where they are sharded. Files that were read stay in the kernel's
        cache for as long as there is room, which is not counted.
        """
        if not self.on_gpu:
            return None
        layout = self.layout
        item = getattr(torch, self.config.model.dtype).itemsize
        kept = 0.0
        if self.gathered.offloaded:
            kept = item * self.weights.pinned / layout.weight_shards
        elif self.config.model.adaln == "offload":
            kept = item * self.weights.adaln
        if self.config.checkpoint.asynchronous and not self.gathered.offloaded:
            # Copies of what is on the GPU, from the first checkpoint on.
            rounded = self.weights.trained_pinned / self.weights.trained
            kept += rounded * checkpoint_bytes(self.config, self.weights) / layout.gpus
        # On the GPU from the first video on.
        parts = {
            "processes": PROCESS,
            "video decoders": self.description.decoder_gb * GB,
        }
        # Rewards are on the GPU before the transformer is read.
        models = self._rewards.models
        parts |= (
            {"weights that stay": kept} if kept > models else {"reward models": models}
        )
        return {
            name: min(layout.gpus, layout.node) * size for name, size in parts.items()
        }

    # ----------------------------------------------------------------------------------
    # what there is

    @cached_property
    def _rewards(self) -> _Rewards:
        here = rewards_here(self.config)
        return _Rewards(
            models=sum(
                self.sizes.get(name, costs.weights / GB) * GB
                for name, costs in here.items()
            ),
            tables=float(sum(costs.tables for costs in here.values())),
            working=float(max((costs.working for costs in here.values()), default=0.0)),
        )

    @property
    def _state(self) -> float:
        """Bytes of one float32 number per trained weight."""
        return 4.0 * self.weights.trained * self.gathered.share

    @cached_property
    def _resident(self) -> PhaseMemory:
        """Memory held in every phase from the rollout on."""
        config = self.config
        gathered = self.gathered
        lora = config.training.mode == "lora"
        offloads = lora and config.model.adaln == "offload" and self.on_gpu
        offloaded = gathered.item * self.weights.adaln if offloads else 0.0
        has_anchor = anchor_kind(config.objective.kl_mode) != "none"
        return PhaseMemory(
            runtime=self.runtime,
            # From the check of the collectives on, after prompts are encoded.
            communication_buffers=self.layout.communication_buffers
            if self.on_gpu
            else 0.0,
            reward_models=self._rewards.models,
            reward_tables=self._rewards.tables,
            video_decoder=self.description.decoder_gb * GB,
            transformer=max(0.0, gathered.resident - offloaded),
            gathered_weights=gathered.whole
            if gathered.sharded and gathered.keep == "always"
            else 0.0,
            adapters=self._state if lora else 0.0,
            optimizer_state=4.0 * self.weights.moments * gathered.share,
            anchor=self._state * (has_anchor + self.costs.keeps_old),
            average=self._state if config.training.ema_decay is not None else 0.0,
            tables=self._tables(),
        )

    def _tables(self) -> float:
        """Rotary tables, and with frozen AdaLN weights the modulation of every noise
        level.
        """
        config = self.config
        description = self.description
        # An evaluation may have another size and other noise levels.
        count = 2 if config.evaluation.every else 1
        latents = {
            self.latent_of(video)
            for video in (config.video, config.evaluation_video)[:count]
        }
        # Cosine and sine of every token, in float32.
        rope = (
            2
            * 4
            * sum(map(description.tokens, latents))
            * description.transformer["attention_head_dim"]
        )
        # Of sharded weights `auto` makes no table.
        weights = config.model.adaln == "weights" or (
            config.model.adaln == "auto" and self.gathered.sharded
        )
        if weights or config.training.mode == "full":
            return float(rope)
        steps = (config.rollout.num_steps, config.evaluation_steps)[:count]
        # Euler's levels are the rollout's where there are equally many.
        levels = sum(steps if config.evaluation.solver == "unipc" else set(steps))
        return float(rope + levels * description.modulation * self.gathered.item)

    @cached_property
    def _produced(self) -> dict[str, float]:
        """Memory that a rollout leaves for its update."""
        rollout = self.config.rollout
        video = self.config.video
        # A step works on its state and velocity, which are gone with the next one
        # where the final latents alone are needed.
        states = 2 * rollout.num_steps + 1 if self.costs.keeps_steps else 3
        produced = {
            "trajectories": 4.0 * prod(self.latent) * rollout.batch_size * states
        }
        # In uint8. A GPU's videos are in CPU memory.
        if not self.on_gpu:
            produced["videos"] = float(
                rollout.batch_size * video.num_frames * 3 * video.height * video.width
            )
        produced["gradient_accumulators"] = self._state * self.costs.accumulators
        return produced

    @property
    def _kept_velocities(self) -> float:
        """Bytes of the anchor's velocities, one for each step that the KL counts, and
        of the old policy's.
        """
        rollout = self.config.rollout
        objective = self.config.objective
        measured = 0
        if anchor_kind(objective.kl_mode) != "none":
            measured = num_trained(objective.kl_position_fraction, self.costs.room)
        if self.costs.measures_old:
            measured += self.costs.room
        chosen = 2 * self.config.training.best_and_worst or rollout.num_generations
        # At worst each trained video is in another micro-batch; these run whole, and
        # ranks have equally many.
        trained = math.ceil(chosen * rollout.batch_size / rollout.num_generations)
        videos = min(rollout.batch_size, trained * rollout.videos_at_once)
        return 4.0 * prod(self.latent) * videos * measured

    # ----------------------------------------------------------------------------------
    # what comes and goes

    def _working(self, phase: PhaseMemory, cost: Cost) -> PhaseMemory:
        """With what a call of the model keeps and works with."""
        return replace(phase, kept_activations=cost.kept, working_set=cost.working)

    def _evaluation(self, without_gradient: PhaseMemory) -> PhaseMemory:
        """The largest of sampling, decoding and scoring."""
        latent = self.latent_of(self.config.evaluation_video)
        batch = self.config.evaluation.batch_size
        states = 2 * self.config.evaluation_steps + 1
        evaluating = replace(
            without_gradient, trajectories=4.0 * prod(latent) * batch * states
        )
        decoding = self.description.decoding(
            latent, batch, self.config.model, self.on_gpu
        )
        return max(
            self._working(evaluating, self.calls.evaluation),
            replace(evaluating, decoding=decoding.peak_bytes),
            replace(evaluating, scoring=self._rewards.working),
            key=lambda phase: phase.total,
        )


def checkpoint_bytes(config: RunConfig, weights: Weights) -> float:
    """Bytes of one checkpoint: float32 weights, moments, anchor, old policy and
    average, and the adapter once more.
    """
    copies = 1
    copies += config.training.mode == "lora"
    copies += config.training.ema_decay is not None
    copies += anchor_kind(config.objective.kl_mode) != "none"
    copies += objective_of(config).costs(config).keeps_old
    return 4.0 * (weights.trained * copies + weights.moments)


def rewards_here(config: RunConfig) -> dict[str, RewardCosts]:
    """Rewards on the device of the policy, in its process's memory where that is a CPU."""
    here = {}
    for name, costs in reward_costs(config.reward, config.video).items():
        device = config.reward.options.get(name, {}).get("device")
        if device in (None, "auto", config.model.device):
            here[name] = costs
    return here
