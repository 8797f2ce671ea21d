"""The GRPO loop: rollout, reward, advantage, update.

Read `Trainer.iterate` first. The mathematics is in `sde.py` and `objective.py`, sampling in `rollout.py`, the gradient
in `gradient.py` and `single_pass.py`, files and progress in `run/`. Everything specific to one model arrives as
`Components`.
"""

import logging
import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch
from diffusers import HunyuanVideo15Transformer3DModel
from torch import Tensor
from torch.profiler import record_function

from sage_fast.config.errors import TrainingError
from sage_fast.config.schema import RunConfig
from sage_fast.data import (
    GroupOrder,
    PromptSchedule,
    best_and_worst,
    group_members,
    kl_factors,
    make_groups,
    num_trained,
    split_evenly,
)
from sage_fast.distributed.engine import Engine, Snapshot, TensorSource, check_same_shapes
from sage_fast.distributed.parallelize import TorchEngine, check_lockstep, parallelize
from sage_fast.distributed.start import rank_device
from sage_fast.distributed.world import SINGLE_PROCESS, World
from sage_fast.evaluation import Evaluation, evaluate
from sage_fast.forward_process import ForwardProcessGradient, old_decay
from sage_fast.gradient import PolicyGradient, TwoPhaseGradient, gather_terms, name_prompts
from sage_fast.kernels import PolicyTerms, select_kernels
from sage_fast.models.family import Components, PromptEncoder
from sage_fast.models.stored import StoredWeights
from sage_fast.noise import NoiseKey
from sage_fast.objective import (
    ADVANTAGE_CLIP,
    KLWeightState,
    anchor_kind,
    initial_kl_weight,
    next_kl_weight,
    weighted_advantages,
)
from sage_fast.optim import unusual_movement
from sage_fast.policy.guidance import GuidedPolicy
from sage_fast.policy.lora import base_digest, make_trainable, trainable_parameters
from sage_fast.records import Prompt, PromptEmbeds, RolloutRecord, ScoredRollout, Trajectory, reward_metrics
from sage_fast.rewards.base import describe_batch, generator_state, load_generator_state
from sage_fast.rewards.composite import CompositeReward
from sage_fast.rollout import (
    Progress,
    Sampler,
    VideoScoring,
    check_trainable_steps,
    evaluation_sampler,
    fixed_starts,
    initial_latents,
    micro_batches,
    noise_key,
    rollout_table,
)
from sage_fast.single_pass import SinglePassGradient

logger = logging.getLogger(__name__)

RATIO_TOLERANCE = 1e-6
"""How far from 1 the first ratio of a run may be. It is 0 away: rollout and update compute the same function."""

FEW_PROMPTS = 8
"""Prompts per update below which the forward process warns."""

PHASE_PREFIX = "phase: "
"""Begins the names of the trainer's ranges in a profiler's trace."""


def used_prompts(
    config: RunConfig,
    prompts: Sequence[Prompt],
    eval_prompts: Sequence[Prompt],
    dp_degree: int,
    done: tuple[int, int] = (0, 0),
) -> list[Prompt]:
    """Prompts that a run will sample from, each once, in the order of their first use; an evaluation's come last.

    Args:
        dp_degree: data-parallel ranks. done: updates and rollouts that lie behind the run.
    """
    left = max(0, math.ceil((config.training.num_updates - done[0]) / config.training.updates_per_rollout))
    per_rollout = config.rollout.batch_size * dp_degree // config.rollout.num_generations
    schedule = PromptSchedule(prompts, config.seed, config.data.shuffle)
    # Two epochs' length holds a whole epoch, wherever it begins.
    taken = schedule.take(done[1] * per_rollout, min(left * per_rollout, 2 * len(prompts)))
    return list(dict.fromkeys([*taken, *(eval_prompts if config.evaluation.every else ())]))


class Trainer:
    """State of a GRPO run and the step that advances it.

    Args:
        config: the run.
        components: the model, as `load_model` gives it; its transformer is modified in place (adapters, requires_grad).
        reward: what is maximised.
        prompts: training prompts.
        eval_prompts: prompts of the paired evaluation.
        world: the ranks; each has a trainer, and they call the same methods in the same order.
        progress: see the attribute.
        done: updates and rollouts of the checkpoint that will be loaded.

    Raises:
        ConfigError, ValueError: the parts do not fit each other; the message names the config key.
    """

    def __init__(
        self,
        config: RunConfig,
        components: Components,
        reward: CompositeReward,
        prompts: Sequence[Prompt],
        eval_prompts: Sequence[Prompt],
        world: World = SINGLE_PROCESS,
        progress: Progress = lambda phase, done, total, subject: None,
        done: tuple[int, int] = (0, 0),
    ) -> None:
        self.config = config
        self.world = world
        self.reward = reward
        self.progress = progress
        """Called while prompts are encoded and during an iteration; may be replaced between two."""
        self.on_rollout: Callable[[RolloutRecord], None] = lambda record: None
        """Called on every rank when a rollout is scored; may be replaced between two iterations."""
        self.device = rank_device(config.model.device)
        # Where torch picks cuDNN's attention by itself, its kernel depends on whether a gradient is wanted, and the
        # first ratio would not be 1. `model.attention: cudnn` calls it by name and is not affected.
        torch.backends.cuda.enable_cudnn_sdp(False)
        self.kernels = select_kernels(config.model.kernels, self.device)
        self.forward_process = config.forward_process if config.training.update == "forward_process" else None
        if self.forward_process is None:
            check_trainable_steps(config.rollout, config.training)

        components.check_guidance(config.rollout.guidance_scale)
        components.check_guidance(config.sampling_guidance, "forward_process.sampling_guidance")
        components.warn(config.rollout.shift, config.steps_by_key)
        size = sum(parameter.numel() for parameter in components.transformer.parameters())
        if unusual := unusual_movement(config.optimizer, config.lora, config.training, size):
            logger.warning("%s", unusual[0])
        self.decoder = components.video_decoder
        self.latent_shape, self.evaluation_latent_shape = (
            self.decoder.latent_shape(video.num_frames, video.height, video.width)
            for video in (config.video, config.evaluation_video)
        )
        used = used_prompts(config, prompts, eval_prompts, world.dp_degree, done)
        lengths = self._prepare_prompts(components.prompt_encoder, used)
        self._prepare_model(components)
        self._divide_rollout(prompts, eval_prompts, lengths)

        # What advances.
        self.update = 0
        """Updates done; the skipped ones count."""
        self.skipped_updates = 0
        """Updates that were left out because their loss or gradient was not finite."""
        self.rollouts = 0
        """Rollouts done; it determines the next prompts."""
        self.anchor_update = 0
        """Value of `update` when the anchor was last refreshed."""
        self.kl_weight: KLWeightState = initial_kl_weight(config.kl_weight)
        self.gradient = self._make_gradient()
        self._seconds: dict[str, float] = {}
        self._first_update = True
        self._had_spread = True

    def _prepare_prompts(self, encoder: PromptEncoder, prompts: Sequence[Prompt]) -> dict[str, tuple[int, int]]:
        """Encode the prompts, and return the numbers of tokens by text.

        Before the transformer is on the GPU, because there may not be room for both.
        """
        self.encoder = encoder
        texts = [self.config.rollout.negative_prompt, *(prompt.text for prompt in prompts)]
        lengths = encoder.prepare(
            texts, self.world, lambda done, total: self.progress("encoding of prompts", done, total, "")
        )
        return dict(zip(texts, lengths, strict=True))

    def embed(self, text: str) -> PromptEmbeds:
        """Conditioning of one of the run's prompts, or of the negative one, on this rank's device."""
        return self.encoder.encode([text])[0].to(self.device)

    def _prepare_model(self, components: Components) -> None:
        """Settle what is trained, spread the transformer over the ranks, and take snapshots."""
        config, transformer = self.config, components.transformer
        self.model_digest = base_digest(transformer, components.weights)
        """Digest of the weights that the run starts from."""
        make_trainable(transformer, config.training.mode, config.lora, config.seed)
        self.engine = self._make_engine(transformer, components.weights)
        self.parameters = self.engine.parameters
        negative = self.embed(config.rollout.negative_prompt)
        self.policy = GuidedPolicy(transformer, negative, config.rollout.guidance_scale)
        self.anchor_kind = anchor_kind(config.objective.kl_mode)
        self.anchor: Snapshot | None = self.engine.snapshot() if self.anchor_kind != "none" else None
        self.ema: Snapshot | None = self.engine.snapshot() if config.training.ema_decay else None
        averaged = self.forward_process is not None and self.forward_process.old == "ema"
        self.old: Snapshot | None = self.engine.snapshot() if averaged else None
        """The old policy of the forward process, which samples, where it is not the trained one."""

    def _divide_rollout(
        self, prompts: Sequence[Prompt], eval_prompts: Sequence[Prompt], lengths: Mapping[str, tuple[int, int]]
    ) -> None:
        """The prompts of the run, the used ones of these lengths, and this rank's share of a rollout."""
        config, world = self.config, self.world
        self.schedule = PromptSchedule(prompts, config.seed, config.data.shuffle)
        self.eval_prompts = list(eval_prompts)
        size = config.rollout.batch_size
        self.videos_per_rollout = size * world.dp_degree
        """On all ranks."""
        self.own_videos = slice(world.dp_rank * size, (world.dp_rank + 1) * size)
        """Videos of this rank."""
        self.prompts_per_rollout = self.videos_per_rollout // config.rollout.num_generations
        if self.forward_process is not None and self.prompts_per_rollout < FEW_PROMPTS:
            logger.warning(
                "%d prompt(s) per update (rollout.batch_size x data-parallel ranks / rollout.num_generations): public "
                "recipes of the forward process have at least %d; with fewer, runs are reported to collapse.",
                *(self.prompts_per_rollout, FEW_PROMPTS),
            )
        if self.engine.sharded:
            train, scored = ({lengths[p.text] for p in group if p.text in lengths} for group in (prompts, eval_prompts))
            check_lockstep(config.rollout, config.evaluation, train, scored)

    def _make_engine(self, transformer: HunyuanVideo15Transformer3DModel, weights: StoredWeights | None) -> Engine:
        """The engine of `distributed.zero_stage` over the transformer, which now gets its weights if it lacks them."""
        config, world = self.config, self.world
        sections = config.distributed, config.model, config.training
        gathering = parallelize(
            transformer,
            *sections,
            world,
            self.device,
            weights,
            kl_position_fraction=config.objective.kl_position_fraction,
        )
        if config.distributed.zero_stage is not None:
            from sage_fast.distributed.zero import DeepSpeedEngine

            mode = config.training.mode
            return DeepSpeedEngine(transformer, config.optimizer, config.distributed, world, mode=mode)
        return TorchEngine(trainable_parameters(transformer), config.optimizer, world, gathering)

    def _make_gradient(self) -> PolicyGradient:
        """The gradient that `training.update` names."""
        config, training = self.config, self.config.training
        if training.guidance == "split" and config.rollout.guidance_scale == 1.0:
            logger.info("training.guidance split does nothing: with rollout.guidance_scale 1 there is only one branch.")
        shared: dict[str, Any] = {
            "policy": self.policy,
            "kernels": self.kernels,
            "settings": config.objective,
            "training": training,
        }
        if training.update == "single_pass":
            groups = GroupOrder(config.rollout.num_generations, self.own_videos.start)
            return SinglePassGradient(**shared, parameters=list(self.parameters.values()), groups=groups)
        # `progress` may be replaced later.
        shared |= {"engine": self.engine, "progress": lambda *arguments: self.progress(*arguments)}
        if self.forward_process is None:
            return TwoPhaseGradient(**shared)
        return ForwardProcessGradient(
            **shared,
            process=self.forward_process,
            shift=config.rollout.shift,
            advantage_bound=ADVANTAGE_CLIP,
            old=self.old,
            sampler=GuidedPolicy(self.policy.transformer, self.policy.uncond, config.sampling_guidance),
        )

    # ------------------------------------------------------------------------------------------ one iteration

    def iterate(self) -> dict[str, float]:
        """One rollout and its optimizer updates. Returns the metrics of the iteration.

        Raises:
            RewardError: a reward failed and the config says to stop.
            TrainingError: a loss or gradient is not finite and may not be skipped; the weights are those before the
                update.
        """
        training = self.config.training
        self._seconds = {}
        metrics: dict[str, float] = {}
        # Before the rollout, because the single pass takes its gradient, and measures the anchor, during it.
        self.gradient.begin(self.kl_weight.weight, self._due_anchor(), self._kl_factors())
        with self.engine.phase("rollout"), self.sampled_weights():
            trajectories = self._rollout()
        with self._phase("reward"):
            scored = self._score(trajectories, metrics)
        with self._phase("anchor"), self.engine.phase("anchor"):
            self.gradient.measure_anchor(scored)
        with self._phase("update"), self.engine.phase("update"):
            for part, positions in self._mini_batches(scored):
                self._optimizer_update(part, positions, metrics)
        self.rollouts += 1
        if training.skip_nonfinite_updates:
            metrics["update/skipped_nonfinite"] = self.skipped_updates
        metrics |= {f"time/{phase}": seconds for phase, seconds in self._seconds.items()}
        metrics["time/iteration"] = sum(self._seconds.values())
        return {"update": self.update} | metrics

    def _mini_batches(self, scored: ScoredRollout) -> Iterator[tuple[ScoredRollout, Sequence[int]]]:
        """The share of each update of a rollout: some steps of all videos, or by the forward process some videos."""
        updates, count = self.config.training.updates_per_rollout, len(scored.orders[0])
        if self.forward_process is None or updates == 1:
            yield from ((scored, positions) for positions in split_evenly(count, updates))
            return
        turns = torch.arange(len(scored.all_trained)) % updates  # as many on every rank
        for turn in range(updates):
            trained = scored.all_trained & (turns == turn)
            # Where a reward has failed for all of a part, its update trains the rest once more.
            yield replace(scored, all_trained=trained if trained.any() else scored.all_trained), range(count)

    def _due_anchor(self) -> Snapshot | None:
        """The anchor of the coming rollout, refreshed if that is due; None where it is the policy itself."""
        age = self.update - self.anchor_update
        if self.anchor and self.anchor_kind == "moving" and age >= self.config.training.anchor_interval:
            self.anchor.refresh()
            self.anchor_update = self.update
        # A fresh anchor is the policy: its KL is zero with a gradient of zero, and needs no forwards. In later updates
        # the rollout's velocities stand for the anchor's, but the forward process has none at its levels.
        later = self.forward_process is not None and self.config.training.updates_per_rollout > 1
        return None if self.anchor_update == self.update and not later else self.anchor

    def _kl_factors(self) -> list[float]:
        """Weights of the position KL of the coming rollout at each position of a sample's order."""
        config = self.config
        if self.forward_process is not None:
            num_steps = self.forward_process.levels
        else:
            trainable = int(rollout_table(config.rollout, self.rollouts).trainable.sum())
            num_steps = num_trained(config.training.timestep_fraction, trainable)
        return kl_factors(config.seed, self.update, num_steps, config.objective.kl_position_fraction)

    def _rollout(self) -> list[Trajectory]:
        """Sample this rank's videos, decode them, and score them.

        Ranks that share videos (sequence parallelism) decode once all are sampled, because sampling needs all of these
        ranks at the same time.
        """
        rollout, members = self.config.rollout, self.config.rollout.num_generations
        samples = make_groups(self._prompts(), lambda prompt: self.embed(prompt.text), members, self.own_videos)
        table = rollout_table(rollout, self.rollouts)

        def initial(keys: Sequence[NoiseKey]) -> Tensor:
            starts = fixed_starts(keys, members) if rollout.fixed_initial_noise else keys
            group = members if rollout.shared_initial_noise else 1
            return initial_latents(starts, self.latent_shape, self.device, group=group)

        sampler = Sampler(
            velocity=lambda batch, keys: self.gradient.velocity(batch, keys, table),
            embed=self.embed,
            initial=initial,
            table=table,
            seed=self.config.seed,
            update=self.update,
            kernels=self.kernels,
            keep_steps=self.forward_process is None,
        )
        batches = list(micro_batches(samples, rollout.videos_at_once))
        trajectories: list[Trajectory] = []
        unscored: list[tuple[int, Trajectory]] = []
        self._scoring = self._new_scoring(phase=self._phase)
        for done, batch in enumerate(batches):
            self.progress("rollout", done, len(batches), describe_batch(batch))
            with self._phase("rollout"):
                trajectory = sampler(batch)
            trajectories.append(trajectory)
            unscored.append((self.own_videos.start + done * rollout.videos_at_once, trajectory))
            if self.world.sp > 1 and done + 1 < len(batches):
                continue  # the ranks that share a video are still needed for the next batch
            for first, trajectory in unscored:
                self._scoring.add(trajectory, first=first, turn=first)
            unscored.clear()
        return trajectories

    def _new_scoring(self, **options: Any) -> VideoScoring:
        return VideoScoring(
            decoder=self.decoder,
            reward=self.reward,
            on_failure=self.config.reward.on_failure,
            world=self.world,
            progress=self.progress,
            **options,
        )

    def _prompts(self) -> list[Prompt]:
        """The prompts of the next rollout on all ranks."""
        return self.schedule.take(self.rollouts * self.prompts_per_rollout, self.prompts_per_rollout)

    def _score(self, trajectories: Sequence[Trajectory], metrics: dict[str, float]) -> ScoredRollout:
        """Gather the scores of the last rollout from all ranks, and turn them into advantages."""
        config = self.config
        columns, failed = self._scoring.gather(self.videos_per_rollout)
        groups = (self.prompts_per_rollout, config.rollout.num_generations)
        trained_groups = ~failed.view(groups).any(1)
        if not trained_groups.any():
            raise TrainingError(
                f"Update {self.update + 1}: the reward failed in every group of the rollout, so there is nothing to "
                "train on. Set reward.on_failure to stop to see the first error."
            )
        components = {name: values.view(groups)[trained_groups] for name, values in columns.items()}
        result = weighted_advantages(components, self.reward.weights, **asdict(config.advantage))
        self._warn_of_no_spread(bool(result.zero_spread.all()))
        advantages = torch.zeros(groups)
        advantages[trained_groups] = result.advantages
        table = trajectories[0].table
        metrics |= reward_metrics(components, self.reward.overall(components), result, ~trained_groups, table)
        scores = {name: values.view(groups) for name, values in columns.items()}
        self.on_rollout(
            RolloutRecord(
                update=self.update,
                prompts=self._prompts(),
                scores=scores,
                reward=self.reward.overall(scores),
                advantages=advantages,
                trained=trained_groups,
            )
        )
        trained = (trained_groups[:, None] & best_and_worst(advantages, config.training.best_and_worst)).flatten()
        members = group_members(self._prompts(), groups[1])
        keys = [noise_key(prompt, member, config.seed, self.update) for prompt, member in members]
        return ScoredRollout(
            trajectories=trajectories,
            all_orders=self.gradient.orders(keys, table),
            own=self.own_videos,
            all_advantages=advantages.flatten(),
            all_trained=trained,
        )

    def _warn_of_no_spread(self, none: bool) -> None:
        """Say once that a rollout has nothing to learn from, because no group has two different rewards."""
        if none and self._had_spread and self.world.is_main:
            self._had_spread = False
            logger.warning(
                "Update %d: the videos of each prompt all have the same reward, so every advantage is 0 and the reward "
                "teaches nothing. Look at what %s returns: it is constant, or too coarse to tell these videos apart. "
                "advantage/zero_spread_groups counts such groups from here on.",
                *(self.update + 1, ", ".join(self.reward.weights)),
            )

    def _optimizer_update(self, scored: ScoredRollout, positions: Sequence[int], metrics: dict[str, float]) -> None:
        """One optimizer step with the gradient of the trained steps at `positions` of every sample's order."""
        weight, learning_rate = self.kl_weight.weight, self.engine.learning_rate
        every = self.config.training.kl_share_every
        if every and (self.update + 1) % every == 0 and isinstance(self.gradient, TwoPhaseGradient):
            share = self.gradient.kl_share(scored, positions, weight)
            if math.isfinite(share):
                metrics["kl/grad_share"] = share
            else:
                logger.warning(
                    "Update %d: kl/grad_share is left out, because the rewards leave no gradient to compare the KL's "
                    "with (all advantages are 0).",
                    self.update + 1,
                )
        own = self.gradient.accumulate(scored, positions, weight)
        # Every rank clips and gathers whatever its own loss is: those that skipped would leave the others waiting.
        grad_norm = self.engine.clip_gradients()
        terms, fault = gather_terms(scored, own, positions, self.world)
        if fault is None and not math.isfinite(grad_norm):
            fault = f"the gradient norm ({grad_norm}) of prompt {name_prompts(self._prompts())}"
        if fault is None:
            if isinstance(terms, PolicyTerms):
                self._check_first_ratio(terms, metrics)
            with record_function(PHASE_PREFIX + "optimizer"):
                self.engine.step()
            if self.ema is not None and self.config.training.ema_decay:
                self.ema.average(min(self.config.training.ema_decay, (1 + self.update) / (10 + self.update)))
            last = (self.update + 1) % self.config.training.updates_per_rollout == 0
            if self.old is not None and self.forward_process is not None and last:
                self.old.average(old_decay(self.forward_process, self.update + 1))
            found, kl = self.gradient.report(terms)
            moves = len(scored.orders) * len(positions) if self.config.kl_weight.advance == "step" else 1
            for _ in range(moves):
                self.kl_weight = next_kl_weight(self.kl_weight, kl, self.config.kl_weight)
            # With several updates per rollout the last one's values stand for the iteration.
            metrics |= found | {"kl/weight": weight, "grad_norm": grad_norm}
        else:
            self._skip_update(fault)
            metrics["kl/weight"] = weight
        metrics["learning_rate"] = learning_rate
        self.update += 1

    def _skip_update(self, fault: str) -> None:
        """Drop the gradient of the present update, or stop where that is not allowed. The same on every rank."""
        self.engine.zero_grad()
        self._check_weights()  # if they are at fault, no later update is any better
        allowed = self.config.training.skip_nonfinite_updates
        if self.skipped_updates >= allowed:
            before = f", after {allowed} that training.skip_nonfinite_updates let pass" if allowed else ""
            raise TrainingError(
                f"Update {self.update + 1}: {fault} is not finite{before}. The weights were not changed, and the last "
                "checkpoint is intact. Start a new run with a lower optimizer.learning_rate or with model.dtype "
                "float32, or resume with a higher training.skip_nonfinite_updates to leave such updates out."
            )
        self.skipped_updates += 1
        if self.world.is_main:
            logger.warning(
                "Update %d is skipped and the weights stay as they are: %s is not finite. training."
                "skip_nonfinite_updates allows %d more.",
                self.update + 1,
                fault,
                allowed - self.skipped_updates,
            )

    def _check_first_ratio(self, terms: PolicyTerms, metrics: dict[str, float]) -> None:
        """At the first update of a rollout the policy is the one that made it: a ratio other than 1 is a fault."""
        deviation = float((terms.ratio - 1).abs().max())
        if metrics.setdefault("ratio/first_max_deviation", deviation) > RATIO_TOLERANCE and self._first_update:
            self.engine.zero_grad()
            raise TrainingError(
                f"Update {self.update + 1}: the policy that is trained is not the one that made the rollout (their "
                f"ratio differs from 1 by {deviation:.1e}). The weights were not changed. Compare with model.kernels "
                "reference, model.forward stock and model.attention sdpa, one after the other, to find the part."
            )
        self._first_update = False

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        with record_function(PHASE_PREFIX + name):
            yield
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - start

    # ------------------------------------------------------------------------------------------ evaluation

    def evaluate(self, return_videos: Collection[int] = ()) -> tuple[Evaluation, dict[int, Tensor]]:
        """Score the evaluation's samples with the present (or, with EMA on, the averaged) weights."""
        section = self.config.evaluation
        initial = partial(initial_latents, shape=self.evaluation_latent_shape, device=self.device)
        sampler = evaluation_sampler(self.config.rollout, section, self.policy, self.embed, initial)
        with self.evaluated_weights(), self.engine.phase("evaluation"):
            return evaluate(sampler, self._new_scoring(), self.eval_prompts, section, return_videos=return_videos)

    def evaluated_weights(self) -> AbstractContextManager[None]:
        """Within the context the model has the weights that are evaluated and shipped: the average, with EMA on."""
        return self.ema.applied() if self.ema is not None else nullcontext()

    def sampled_weights(self) -> AbstractContextManager[None]:
        """Within the context the model has the weights that sample: the old policy's in the forward process."""
        return self.old.applied() if self.old is not None else nullcontext()

    # ------------------------------------------------------------------------------------------ state

    def tensors(self) -> dict[str, Mapping[str, Tensor]]:
        """Tensors of a checkpoint by group: weights, optimizer, and where the run has them anchor and ema. Collective.

        Raises:
            TrainingError: the weights are not finite, so they must not become a checkpoint. The same on every rank.
        """
        self._check_weights()
        snapshots = {name: snapshot.tensors() for name, snapshot in self._snapshots().items()}
        return {**self.engine.tensors(), **snapshots}

    def _check_weights(self) -> None:
        """TrainingError unless the weights are finite. Collective; waits for the GPU once."""
        if self.world.any(not self.engine.weights_finite()):
            raise TrainingError(
                f"Update {self.update}: the optimizer step left weights that are not finite, or so large that their "
                "norm overflows. They were not saved, and the last checkpoint is intact. Start a new run with a lower "
                f"optimizer.learning_rate (it is {self.config.optimizer.learning_rate:g})."
            )

    def state(self) -> dict[str, Any]:
        """State of a checkpoint without its tensors, fit for JSON. Ranks other than 0 take over rank 0's."""
        return {
            "update": self.update,
            "skipped_updates": self.skipped_updates,
            "rollouts": self.rollouts,
            "anchor_update": self.anchor_update,
            "kl_weight": self.kl_weight.to_dict(),
            "optimizer": self.engine.state(),
            "rng": generator_state(),
        }

    def check_fit(self, shapes: Mapping[str, Mapping[str, Sequence[int]]]) -> None:
        """ValueError unless the weights of a checkpoint have this run's names and shapes. Nothing is changed.

        Args:
            shapes: group -> name -> whole shape.
        """
        own = {name: tuple(shape) for name, shape in self.engine.shapes.items()}
        check_same_shapes(own, shapes["weights"], "weights")
        for group in self._snapshots():
            if group not in shapes:
                raise ValueError(f"The checkpoint has no {group} weights, but this run's config needs them.")
            check_same_shapes(own, shapes[group], group)

    def load(self, tensors: TensorSource, state: Mapping[str, Any]) -> None:
        """Take over the state of a checkpoint that fits. Collective."""
        self.engine.load_tensors(tensors)
        for group, snapshot in self._snapshots().items():
            snapshot.load_tensors(tensors, group)
        self.engine.load_state(state["optimizer"])
        load_generator_state(state["rng"])
        self.update = int(state["update"])
        self.skipped_updates = int(state.get("skipped_updates", 0))
        self.rollouts = int(state["rollouts"])
        self.anchor_update = int(state["anchor_update"])
        self.kl_weight = KLWeightState.from_dict(state["kl_weight"])

    def _snapshots(self) -> dict[str, Snapshot]:
        snapshots = {"anchor": self.anchor, "ema": self.ema, "old": self.old}
        return {name: snapshot for name, snapshot in snapshots.items() if snapshot is not None}
