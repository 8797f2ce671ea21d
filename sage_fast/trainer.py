"""The GRPO loop: rollout, reward, advantage, update.

Read `Trainer.iterate` first. The mathematics is in `sde.py` and `objective.py`, sampling in `rollout.py`, the gradient
in `gradient.py` and `single_pass.py`, files and progress in `run.py`. Everything specific to one model arrives as
`Components`.
"""

import logging
import math
import random
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from diffusers import HunyuanVideo15Transformer3DModel
from torch import Tensor
from torch.profiler import record_function

from sage_fast.config.errors import ConfigError, TrainingError
from sage_fast.config.schema import RunConfig
from sage_fast.data import PromptSchedule, make_groups, split_evenly
from sage_fast.distributed.engine import Engine, Snapshot, TensorSource
from sage_fast.distributed.launch import rank_device
from sage_fast.distributed.parallelize import parallelize
from sage_fast.distributed.snapshot import check_same_shapes
from sage_fast.distributed.torch_engine import TorchEngine
from sage_fast.distributed.world import ALONE, World
from sage_fast.evaluation import Evaluation, evaluate
from sage_fast.gradient import PolicyGradient, Progress, ScoredRollout, TwoPhaseGradient, trained_steps
from sage_fast.kernels import select_kernels
from sage_fast.models.family import Components
from sage_fast.noise import NoiseKey
from sage_fast.objective import (
    KLWeightState,
    PolicyTerms,
    anchor_kind,
    initial_kl_weight,
    next_kl_weight,
    weighted_advantages,
)
from sage_fast.policy.guidance import GuidedPolicy
from sage_fast.policy.lora import add_lora, base_digest, train_all, trainable_parameters
from sage_fast.policy.trained import load_adapter
from sage_fast.records import Prompt, Sample, Trajectory
from sage_fast.rewards.base import PendingScores, Scorer, describe_batch
from sage_fast.rewards.gather import gather_scores, submit_scores
from sage_fast.rollout import micro_batches, noise_keys, rollout_table, sample_trajectory
from sage_fast.sde import sigma_schedule, transition_table
from sage_fast.single_pass import SinglePassGradient
from sage_fast.training_metrics import reward_metrics, update_metrics, weighted_kl

logger = logging.getLogger(__name__)

RATIO_TOLERANCE = 1e-6
"""How far from 1 the first ratio of a run may be. It is 0 away: rollout and update compute the same function."""

PHASE_PREFIX = "phase: "
"""Begins the names of the trainer's ranges in a profiler's trace."""


class Trainer:
    """State of a GRPO run and the step that advances it.

    Args:
        config: the run.
        components: the video model; its transformer is modified in place (adapters, requires_grad).
        reward: what is maximised.
        prompts: training prompts.
        eval_prompts: prompts of the paired evaluation.
        progress: called while an iteration runs.
        world: the ranks; each has a trainer, and they call the same methods in the same order.

    Raises:
        ConfigError, ValueError: the parts do not fit each other; the message names the config key.
    """

    def __init__(
        self,
        config: RunConfig,
        components: Components,
        reward: Scorer,
        prompts: Sequence[Prompt],
        eval_prompts: Sequence[Prompt],
        progress: Progress = lambda phase, done, total, subject: None,
        world: World = ALONE,
    ) -> None:
        self.config = config
        self.world = world
        self.reward = reward
        self.progress = progress
        self.device = rank_device(config.model.device)
        self.kernels = select_kernels(config.model.kernels, self.device)
        self.decoder = components.video_decoder
        video = config.video
        self.latent_shape = self.decoder.latent_shape(video.num_frames, video.height, video.width)

        components.check_guidance(config.rollout.guidance_scale)
        components.warn_of_shift(config.rollout.shift)
        # Prompts are encoded once, in one call: neither rollout nor update touches a text encoder. They are encoded
        # before the transformer is on the GPU, because there may not be room for both.
        texts = ["", *(p.text for p in prompts), *(p.text for p in eval_prompts)]
        self.embeds = dict(zip(texts, components.prompt_encoder.encode(texts), strict=True))

        transformer = components.transformer
        self.model_digest = base_digest(transformer)
        """Which weights the run starts from."""
        if config.training.mode == "lora":
            lora = config.lora
            add_lora(
                transformer,
                rank=lora.rank,
                alpha=lora.alpha,
                target_modules=lora.target_modules,
                seed=config.seed,
            )
            if config.model.adapter is not None:
                load_adapter(transformer, Path(config.model.adapter))
        else:
            train_all(transformer)
        self.engine = self._make_engine(transformer)
        self.parameters = self.engine.parameters
        self.policy = GuidedPolicy(
            transformer,
            self.embeds[""].to(self.device),
            config.rollout.guidance_scale,
            conditional_gradient=config.training.guidance == "conditional",
        )
        kind = anchor_kind(config.objective.kl_mode)
        self.anchor: Snapshot | None = self.engine.snapshot() if kind != "none" else None
        self.anchor_moves = kind == "moving"
        self.ema: Snapshot | None = self.engine.snapshot() if config.training.ema_decay else None

        self.schedule = PromptSchedule(prompts, config.seed, config.data.shuffle)
        self.videos_per_rollout = config.rollout.batch_size * world.dp_degree
        """On all ranks."""
        self.own_videos = slice(
            world.dp_rank * config.rollout.batch_size, (world.dp_rank + 1) * config.rollout.batch_size
        )
        """Those of this rank."""
        self.prompts_per_rollout = self.videos_per_rollout // config.rollout.num_generations
        self.eval_samples = [
            Sample(prompt=p, embeds=self.embeds[p.text].to(self.device), member=0) for p in eval_prompts
        ]

        self.update = 0
        """Optimizer updates done."""
        self.rollouts = 0
        """Rollouts done; it determines the next prompts."""
        self.anchor_update = 0
        """Value of `update` when the anchor was last refreshed."""
        self.kl_weight: KLWeightState = initial_kl_weight(config.kl_weight)
        self.gradient = self._make_gradient()
        self._seconds: dict[str, float] = {}
        self._pending: list[tuple[list[int], PendingScores]] = []
        """Scores of the last rollout that were asked for on this rank, with the numbers of their videos."""
        self._first_update = True
        self._check_trainable_steps()
        self._check_lockstep()

    # ------------------------------------------------------------------------------------------ one iteration

    def iterate(self) -> dict[str, float]:
        """One rollout and its optimizer updates. Returns the metrics of the iteration.

        Raises:
            RewardError: a reward failed and the config says to stop.
            TrainingError: a loss or gradient is not finite; the weights are those before the update.
        """
        self._seconds = {}
        metrics: dict[str, float] = {}
        if (
            self.anchor
            and self.anchor_moves
            and self.update - self.anchor_update >= self.config.training.anchor_interval
        ):
            self.anchor.refresh()
            self.anchor_update = self.update
        anchor_is_policy = self.anchor_update == self.update
        self.gradient.begin(self.kl_weight.weight, None if anchor_is_policy else self.anchor)
        with self.engine.phase("rollout"):
            trajectories = self._rollout()
        with self._phase("reward"):
            scored = self._score(trajectories, metrics)
        with self._phase("anchor"), self.engine.phase("anchor"):
            self.gradient.measure_anchor(scored)
        with self._phase("update"), self.engine.phase("update"):
            num_steps = len(scored.orders[0])
            for positions in split_evenly(num_steps, self.config.training.updates_per_rollout):
                self._optimizer_update(scored, positions, metrics)
        self.rollouts += 1
        metrics |= {f"time/{phase}": seconds for phase, seconds in self._seconds.items()}
        metrics["time/iteration"] = sum(self._seconds.values())
        return {"update": self.update} | metrics

    def _rollout(self) -> list[Trajectory]:
        """Sample this rank's videos, decode them, and submit them to the rewards.

        Ranks that share videos (sequence parallelism) share the decoding and scoring too, video by video, once all are
        sampled: sampling needs all of these ranks at the same time.
        """
        rollout, world = self.config.rollout, self.world
        samples = self._samples()[self.own_videos]
        table = rollout_table(rollout, self.rollouts)
        batches = list(micro_batches(samples, rollout.micro_batch_size))
        seed, update = self.config.seed, self.update
        trajectories, self._pending = [], []
        for done, batch in enumerate(batches):
            self.progress("rollout", done, len(batches), describe_batch(batch))
            with self._phase("rollout"):
                trajectory = sample_trajectory(
                    self.policy,
                    batch,
                    table,
                    self.latent_shape,
                    seed=seed,
                    update=update,
                    initial_noise_group=rollout.num_generations if rollout.shared_initial_noise else 1,
                    device=self.device,
                    kernels=self.kernels,
                    velocity=self.gradient.sampler(batch, noise_keys(batch, seed, update), table),
                )
            trajectories.append(trajectory)
            if world.sp == 1:
                # At once, so that rewards in a process of their own work while the next batch is sampled.
                self._submit(trajectory, done * rollout.micro_batch_size)
        if world.sp > 1:
            for done, trajectory in enumerate(trajectories):
                self._submit(trajectory, done * rollout.micro_batch_size)
        return trajectories

    def next_noise(self) -> list[NoiseKey]:
        """What the noise of this rank's next videos is a function of."""
        return noise_keys(self._samples()[self.own_videos], self.config.seed, self.update)

    def _submit(self, trajectory: Trajectory, first: int) -> None:
        """Decode and have scored this rank's part of a batch, whose first video is number `first` of the rank."""
        first += self.own_videos.start
        rows = [i for i in range(len(trajectory.samples)) if (first + i) % self.world.sp == self.world.sp_rank]
        if not rows:
            return
        samples = [trajectory.samples[row] for row in rows]
        self.progress("decode", rows[0], len(trajectory.samples), describe_batch(samples))
        with self._phase("decode"):
            videos = self.decoder.decode(trajectory.final[rows])
        with self._phase("reward"):
            pending = submit_scores(self.reward, videos, samples, self.config.reward.on_failure, self.world)
            self._pending.append(([first + row for row in rows], pending))

    def _samples(self) -> list[Sample]:
        """The samples of the next rollout on all ranks, group after group."""
        prompts = self.schedule.take(self.rollouts * self.prompts_per_rollout, self.prompts_per_rollout)
        embeds = [self.embeds[p.text].to(self.device) for p in prompts]
        return make_groups(prompts, embeds, self.config.rollout.num_generations)

    def _score(self, trajectories: Sequence[Trajectory], metrics: dict[str, float]) -> ScoredRollout:
        """Wait for the scores of the last rollout on all ranks, and turn them into advantages."""
        config = self.config
        columns, failed, seconds = gather_scores(
            self._pending, self.videos_per_rollout, self.world, partial(self.progress, "reward")
        )
        if config.reward.placement == "process":
            metrics["time/reward_worker"] = seconds
        groups = (self.prompts_per_rollout, config.rollout.num_generations)
        kept_groups = ~failed.view(groups).any(1)
        if not kept_groups.any():
            raise TrainingError(
                f"Update {self.update + 1}: the reward failed in every group of the rollout, so there is nothing to "
                "train on. Set reward.on_failure to stop to see the first error."
            )
        components = {name: values.view(groups)[kept_groups] for name, values in columns.items()}
        result = weighted_advantages(
            components,
            self.reward.weights,
            normalization=config.advantage.normalization,
            std=config.advantage.std,
            clip=config.advantage.clip,
            eps=config.advantage.eps,
        )
        advantages = torch.zeros(groups)
        advantages[kept_groups] = result.advantages
        table = trajectories[0].table
        metrics |= reward_metrics(components, self.reward.overall(components), result, ~kept_groups, table)
        kept = kept_groups.repeat_interleave(groups[1])
        return ScoredRollout(
            trajectories=trajectories,
            advantages=advantages.flatten()[self.own_videos],
            kept=kept[self.own_videos],
            num_kept=int(kept.sum()),
            orders=[trained_steps(key, table, config.training) for t in trajectories for key in t.keys],
        )

    def _optimizer_update(self, scored: ScoredRollout, positions: Sequence[int], metrics: dict[str, float]) -> None:
        """One optimizer step with the gradient of the trained steps at `positions` of every sample's order."""
        weight, learning_rate = self.kl_weight.weight, self.engine.learning_rate
        own = self.gradient.accumulate(scored, positions, weight)
        grad_norm = self.engine.clip_gradients()
        terms = self._gather_terms(scored, own, grad_norm, len(positions))
        deviation = float((terms.ratio - 1).abs().max())
        # At the first update of a rollout the policy is the one that made it: anything but 0 is a fault.
        if metrics.setdefault("ratio/first_max_deviation", deviation) > RATIO_TOLERANCE and self._first_update:
            self.engine.zero_grad()
            raise TrainingError(
                f"Update {self.update + 1}: the policy that is trained is not the one that made the rollout (their "
                f"ratio differs from 1 by {deviation:.1e}). The weights were not changed. Compare with model.kernels "
                "reference, model.forward stock and model.attention sdpa, one after the other, to find the part."
            )
        self._first_update = False
        with record_function(PHASE_PREFIX + "optimizer"):
            self.engine.step()
        self.update += 1
        if self.ema is not None and self.config.training.ema_decay:
            self.ema.average(self.config.training.ema_decay)

        self.kl_weight = next_kl_weight(
            self.kl_weight, weighted_kl(terms, self.config.objective), self.config.kl_weight
        )
        # With several updates per rollout the last one's values stand for the iteration.
        metrics |= update_metrics(terms) | {
            "kl/weight": weight,
            "grad_norm": grad_norm,
            "learning_rate": learning_rate,
        }

    # ------------------------------------------------------------------------------------------ evaluation

    def evaluate(self, keep_videos: Collection[int] = ()) -> tuple[Evaluation, dict[int, Tensor]]:
        """Score one ODE sample per evaluation prompt with the present (or, with EMA on, the averaged) weights."""
        config = self.config
        num_steps = config.evaluation.num_steps or config.rollout.num_steps
        table = transition_table("ode", sigma_schedule(num_steps, config.rollout.shift), 0.0)
        with self.evaluated_weights(), self.engine.phase("evaluation"):
            return evaluate(
                self.policy,
                self.decoder,
                self.reward,
                self.eval_samples,
                table,
                self.latent_shape,
                seed=config.evaluation.seed,
                batch_size=config.evaluation.batch_size,
                keep_videos=keep_videos,
                device=self.device,
                world=self.world,
                on_batch=partial(self.progress, "evaluation"),
                on_failure=config.reward.on_failure,
            )

    def evaluated_weights(self) -> AbstractContextManager[None]:
        """Within the context the model has the weights that are evaluated and shipped: the average, with EMA on."""
        return self.ema.applied() if self.ema is not None else nullcontext()

    # ------------------------------------------------------------------------------------------ state

    def tensors(self) -> dict[str, Mapping[str, Tensor]]:
        """Tensors of a checkpoint by group: weights, optimizer, and where the run has them anchor and ema."""
        snapshots = {name: snapshot.tensors() for name, snapshot in self._snapshots().items()}
        return {**self.engine.tensors(), **snapshots}

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds besides tensors, fit for JSON.

        The trainer draws from no global generator; a custom reward may. Ranks other than 0 take over rank 0's.
        """
        version, words, gauss = random.getstate()
        return {
            "update": self.update,
            "rollouts": self.rollouts,
            "anchor_update": self.anchor_update,
            "kl_weight": self.kl_weight.to_dict(),
            "optimizer": self.engine.state(),
            "rng": {"torch": torch.get_rng_state().numpy().tobytes().hex(), "python": [version, list(words), gauss]},
            "reward_rng": self.world.gather(self.reward.state()),
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
        torch.set_rng_state(torch.frombuffer(bytearray.fromhex(state["rng"]["torch"]), dtype=torch.uint8))
        version, words, gauss = state["rng"]["python"]
        random.setstate((version, tuple(words), gauss))
        # One per rank; absent in checkpoints of earlier versions.
        reward_states = state.get("reward_rng", [None])
        reward_state = reward_states[self.world.rank % len(reward_states)]
        if reward_state is not None:
            self.reward.load_state(reward_state)
        self.update = int(state["update"])
        self.rollouts = int(state["rollouts"])
        self.anchor_update = int(state["anchor_update"])
        self.kl_weight = KLWeightState.from_dict(state["kl_weight"])

    def _snapshots(self) -> dict[str, Snapshot]:
        return {
            name: snapshot for name, snapshot in (("anchor", self.anchor), ("ema", self.ema)) if snapshot is not None
        }

    # ------------------------------------------------------------------------------------------ helpers

    def _make_engine(self, transformer: HunyuanVideo15Transformer3DModel) -> Engine:
        """The engine of `distributed.engine` over the transformer, whose trained weights are settled."""
        config = self.config
        gathering = parallelize(transformer, config, self.world, self.device)
        if config.distributed.engine == "deepspeed":
            from sage_fast.distributed.deepspeed.zero_engine import DeepSpeedEngine

            return DeepSpeedEngine(
                transformer, config.optimizer, config.distributed, self.world, mode=config.training.mode
            )
        return TorchEngine(trainable_parameters(transformer), config.optimizer, self.world, gathering)

    def _make_gradient(self) -> PolicyGradient:
        """The way of `training.update` to get the gradient."""
        config, training = self.config, self.config.training
        split = training.guidance == "split"
        if training.guidance != "paired" and config.rollout.guidance_scale == 1.0:
            logger.info(
                "training.guidance %s: with rollout.guidance_scale 1 there is one branch, so it does nothing.",
                training.guidance,
            )
        if training.update == "two_phase":
            return TwoPhaseGradient(
                self.policy,
                self.engine,
                self.kernels,
                config.objective,
                split=split,
                progress=lambda *arguments: self.progress(*arguments),
            )
        if self.anchor is not None and config.objective.kl_position_weight:
            logger.info(
                "training.update single_pass with objective.kl_mode %s: the KL to the anchor takes a second backward "
                "pass in the rollouts that do not follow a refresh, which costs more than the forward that is saved. "
                "two_phase is faster there; single_pass pays with kl_mode none and stepwise.",
                config.objective.kl_mode,
            )
        return SinglePassGradient(
            self.policy,
            list(self.parameters.values()),
            self.kernels,
            config.objective,
            training,
            num_generations=config.rollout.num_generations,
            split=split,
            first_video=self.own_videos.start,
        )

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        with record_function(PHASE_PREFIX + name):
            yield
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - start

    def _check_trainable_steps(self) -> None:
        """Every window position must leave enough trainable steps; degenerate steps are reported once."""
        rollout, training = self.config.rollout, self.config.training
        full = rollout_table(rollout, 0)
        if full.degenerate:
            logger.warning(
                "Steps %s of %s have no positive variance: they are deterministic and not trained.",
                list(full.degenerate),
                rollout.sde_type,
            )
        cycle = rollout.num_steps * rollout.sde_window.interval if rollout.sde_window.size else 1
        fewest = min(
            int(rollout_table(rollout, r).trainable.sum()) for r in range(0, cycle, rollout.sde_window.interval)
        )
        trained = max(1, round(training.timestep_fraction * fewest)) if fewest else 0
        if trained < training.updates_per_rollout:
            raise ConfigError(
                f"{fewest} trainable step(s) of {rollout.sde_type} in the SDE window, of which timestep_fraction "
                f"{training.timestep_fraction} trains {trained}: too few for training.updates_per_rollout = "
                f"{training.updates_per_rollout}. Widen rollout.sde_window or lower updates_per_rollout."
            )

    def _gather_terms(self, scored: ScoredRollout, own: PolicyTerms, grad_norm: float, num_steps: int) -> PolicyTerms:
        """The terms that were trained on, of all ranks, in CPU memory; (N,) each, in the order of one process.

        TrainingError before the optimizer sees a number that is not finite, naming the prompts it came from.
        """
        matrix = torch.stack([column.to(own.loss.dtype) for column in own]).cpu()
        bad = ~matrix[0].isfinite()
        names: set[str] = set()
        if bad.any():
            rows = [s for t in scored.trajectories for _ in range(num_steps) for s in t.samples]
            names = {
                f"{s.prompt.index} ({s.prompt.text!r})" for s, wrong in zip(rows, bad.tolist(), strict=True) if wrong
            }
        everywhere = self.world.gather((matrix[:, scored.kept_rows(num_steps)], sorted(names)))
        culprits = [(rank, names) for rank, (_, names) in enumerate(everywhere) if names]
        if culprits or not math.isfinite(grad_norm):
            where = f"the gradient norm ({grad_norm})"
            if culprits:
                rank, found = culprits[0]
                on_rank = f"on rank {rank} " if self.world.size > 1 else ""
                where = f"{on_rank}the loss of prompt {', '.join(found[:3])}"
            self.engine.zero_grad()
            raise TrainingError(
                f"Update {self.update + 1}: {where} is not finite. The weights were not changed, and the last "
                "checkpoint is intact. Start a new run with a lower optimizer.learning_rate, or with model.dtype "
                "float32."
            )
        # Ranks that share a video have the same terms.
        return PolicyTerms(*torch.cat([columns for columns, _ in everywhere[:: self.world.sp]], dim=1))

    def _check_lockstep(self) -> None:
        """Where a forward communicates weights, all ranks must run as many dense batches.

        A batch of prompts with different numbers of tokens runs as several. ConfigError where that could happen.
        """
        if not self.engine.sharded:
            return
        rollout, evaluation = self.config.rollout, self.config.evaluation

        def ragged(prompts: Sequence[Prompt]) -> bool:
            return len({(len(self.embeds[p.text].text), len(self.embeds[p.text].glyph)) for p in prompts}) > 1

        if rollout.num_generations % rollout.micro_batch_size and ragged(self.schedule.prompts):
            raise ConfigError(
                f"rollout.micro_batch_size is {rollout.micro_batch_size}, which mixes prompts of different lengths, "
                "but weights are sharded over ranks (distributed.dp_shard, sp) and all ranks must run as many "
                f"forwards. Set it to a divisor of rollout.num_generations = {rollout.num_generations}."
            )
        if evaluation.every and evaluation.batch_size > 1 and ragged([s.prompt for s in self.eval_samples]):
            raise ConfigError(
                f"evaluation.batch_size is {evaluation.batch_size}, which mixes prompts of different lengths, but "
                "weights are sharded over ranks (distributed.dp_shard, sp) and all ranks must run as many forwards. "
                "Set it to 1."
            )
