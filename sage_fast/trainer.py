"""The GRPO loop: rollout, reward, advantage, update.

Read `Trainer.iterate` first. The mathematics is in `sde.py` and `objective.py`,
sampling in `rollout.py`, what an update minimises and its gradient in `objectives/`,
files and progress in `run/`. Everything specific to one model arrives as `Components`.
"""

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.profiler import record_function

from sage_fast.checkpoint.reader import Checkpoint
from sage_fast.config.errors import TrainingError
from sage_fast.config.schema import RunConfig
from sage_fast.data import (
    PromptSchedule,
    best_and_worst,
    deal,
    group_members,
    make_groups,
    used_prompts,
)
from sage_fast.distributed.engine import Engine, WeightSnapshot, check_same_shapes
from sage_fast.distributed.start import rank_device
from sage_fast.distributed.world import SINGLE_PROCESS, World
from sage_fast.evaluation import Evaluation, evaluate
from sage_fast.kernels import select_kernels
from sage_fast.models.family import Components, PromptEncoder, family_of
from sage_fast.noise import NoiseKey
from sage_fast.objective import weighted_advantages
from sage_fast.objectives.base import (
    Parts,
    gather_terms,
    name_prompts,
    objective_of,
    second_half,
)
from sage_fast.optim import norm_is_finite, unusual_movement
from sage_fast.policy.guidance import GuidedPolicy
from sage_fast.policy.lora import base_digest, make_trainable, trainable_parameters
from sage_fast.records import (
    Pictured,
    Prompt,
    PromptEmbeds,
    RolloutRecord,
    ScoredRollout,
    Trajectory,
    reward_metrics,
)
from sage_fast.rewards.base import describe_batch
from sage_fast.rewards.composite import CompositeReward
from sage_fast.rollout import (
    FirstSteps,
    Progress,
    Sampler,
    VideoScoring,
    evaluation_sampler,
    exchange_trajectories,
    initial_latents,
    micro_batches,
    noise_key,
    policy_velocity,
    rollout_table,
    shares_first_steps,
)
from sage_fast.sharding.parallelize import TorchEngine, check_lockstep, parallelize

logger = logging.getLogger(__name__)

LARGE_EPS_SHARE = 0.5
"""Share of AdamW's eps in its denominator above which a run is warned."""

PHASE_PREFIX = "phase: "
"""Begins the names of the trainer's ranges in a profiler's trace."""


class Trainer:
    """State of a GRPO run and the step that advances it.

    Args:
        config: the run.
        components: the model, as `load_model` gives it; its transformer is modified in
            place (adapters, requires_grad).
        reward: what is maximised.
        prompts: training prompts.
        eval_prompts: prompts of the paired evaluation.
        world: the ranks; each has a trainer, and they call the same methods in the same
            order.
        progress: see the attribute.
        done: updates and rollouts of the checkpoint that will be loaded.

    Raises:
        ConfigError, ValueError: the parts do not fit each other; the message names the
            config key.
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
        """Called while prompts are encoded and during an iteration; may be replaced
        between two.
        """
        self.on_rollout: Callable[[RolloutRecord], None] = lambda record: None
        """Called on every rank when a rollout is scored; may be replaced between two
        iterations.
        """
        self.device = rank_device(config.model.device)
        # Where torch picks cuDNN's attention by itself, its kernel depends on whether a
        # gradient is wanted, and the first ratio would not be 1. `model.attention:
        # cudnn` calls it by name and is not affected.
        torch.backends.cuda.enable_cudnn_sdp(False)
        self.kernels = select_kernels(config.model.kernels, self.device)
        self.schedule = PromptSchedule(prompts, config.seed, config.data.shuffle)
        self.eval_prompts = list(eval_prompts)
        size = config.rollout.batch_size
        self.videos_per_rollout = size * world.dp_degree
        """On all ranks."""
        self.own_videos = slice(world.dp_rank * size, (world.dp_rank + 1) * size)
        """Videos of this rank."""
        members = config.rollout.num_generations
        self.prompts_per_rollout = self.videos_per_rollout // members
        chosen = objective_of(config)
        chosen.check_run(config, self.prompts_per_rollout)
        reward.check_layout(config.rollout, config.evaluation, world.dp_degree)

        components.check_guidance(config.rollout.guidance_scale)
        key = "forward_process.sampling_guidance"
        components.check_guidance(config.sampling_guidance, key)
        components.warn(config.rollout.shift, config.steps_by_key)
        published = chosen.published[config.training.mode]
        count = sum(p.numel() for p in components.transformer.parameters())
        if unusual := unusual_movement(config.optimizer, config.lora, published, count):
            logger.warning("%s", unusual[0])
        self.decoder = components.video_decoder
        self.latent_shape, self.evaluation_latent_shape = (
            self.decoder.latent_shape(video.num_frames, video.height, video.width)
            for video in (config.video, config.evaluation_video)
        )
        components.check_pictures([*prompts, *eval_prompts])
        shown = self.eval_prompts if config.evaluation.every else []
        used = used_prompts(
            self.schedule, shown, config.training, self.prompts_per_rollout, done
        )
        lengths = self._prepare_prompts(components.prompt_encoder, used)
        self._prepare_model(components)
        if self.engine.sharded:
            train = {lengths[p] for p in prompts if p in lengths}
            scored = {lengths[p] for p in eval_prompts if p in lengths}
            check_lockstep(config.rollout, config.evaluation, train, scored)
        parts = Parts(
            policy=self.policy,
            engine=self.engine,
            kernels=self.kernels,
            own_videos=self.own_videos,
            # it may be replaced later
            progress=lambda *arguments: self.progress(*arguments),
        )
        self.objective = chosen(config, parts)
        """The loss of an update; it owns anchor, lambda and old policy."""

        # What advances.
        self.update = 0
        """Updates done; the skipped ones count."""
        self.skipped_updates = 0
        """Updates that were left out because their loss or gradient was not finite."""
        self.rollouts = 0
        """Rollouts done; it determines the next prompts."""
        self._seconds: dict[str, float] = {}
        self._had_spread = True
        self._eps_is_small = True

    def _prepare_prompts(
        self, encoder: PromptEncoder, prompts: Sequence[Prompt]
    ) -> dict[Prompt, int | tuple[int, ...]]:
        """Encode the prompts, with a picture for both sizes of videos, and return the
        numbers of tokens of each.

        Before the transformer is on the GPU, because there may not be room for both.
        """
        self.encoder = encoder
        videos = [self.config.video]
        if self.config.evaluation_video != self.config.video:
            videos.append(self.config.evaluation_video)
        asked: list[str | Pictured] = [self.config.rollout.negative_prompt]
        asked += [p.asked(video) for video in videos for p in prompts]
        lengths = encoder.prepare(
            asked,
            self.world,
            lambda done, total: self.progress("encoding of prompts", done, total, ""),
        )
        # of one size; the other has as many tokens
        return dict(zip(prompts, lengths[1:], strict=False))

    def embed(self, asked: str | Pictured) -> PromptEmbeds:
        """Conditioning of one of the run's prompts, or of the negative one, on this
        rank's device.
        """
        return self.encoder.encode([asked])[0].to(self.device)

    def _prepare_model(self, components: Components) -> None:
        """Settle what is trained, spread the transformer over the ranks, and take
        snapshots.
        """
        config = self.config
        transformer = components.transformer
        # While the weights are whole: later a rank may hold a part of each.
        self.model_digest = base_digest(transformer, components.weights)
        """Digest of the weights that the run starts from."""
        config.check_frozen_adaln(family_of(transformer).adaln_targets)
        make_trainable(transformer, config.training.mode, config.lora, config.seed)
        # It also gives the transformer its weights if it lacks them.
        keep_gathered = parallelize(
            transformer,
            config.distributed,
            config.model,
            config.training,
            self.world,
            self.device,
            components.weights,
            check_steps_agree=partial(objective_of(config).check_steps_agree, config),
        )
        self.engine: Engine
        if config.distributed.zero_stage is None:
            trained = trainable_parameters(transformer)
            self.engine = TorchEngine(
                trained, config.optimizer, self.world, transformer, keep_gathered
            )
        else:
            from sage_fast.sharding.zero import DeepSpeedEngine

            mode = config.training.mode
            self.engine = DeepSpeedEngine(
                transformer, config.optimizer, config.distributed, self.world, mode=mode
            )
        self.parameters = self.engine.parameters
        negative = self.embed(config.rollout.negative_prompt)
        self.policy = GuidedPolicy(transformer, negative, config.rollout.guidance_scale)
        self.ema: WeightSnapshot | None = None
        if config.training.ema_decay:
            self.ema = self.engine.snapshot()
        if config.training.guidance == "split" and config.rollout.guidance_scale == 1.0:
            logger.info(
                "training.guidance split does nothing: with rollout.guidance_scale 1 "
                "there is only one branch."
            )

    # ----------------------------------------------------------------------------------
    # one iteration

    def iterate(self) -> dict[str, float]:
        """One rollout and its optimizer updates. Returns the metrics of the iteration.

        Raises:
            RewardError: a reward failed and the config says to stop.
            TrainingError: a loss or gradient is not finite and may not be skipped; the
                weights are those before the update.
        """
        skips = self.config.training.skip_nonfinite_updates
        self._seconds = {}
        # Before the rollout, because the single pass takes its gradient, and measures
        # the anchor, during it.
        self.objective.begin(self.update, self.rollouts)
        with self.engine.phase("rollout"), self.objective.sampling():
            rollout = self._rollout()
        with self._phase("reward"):
            scored, metrics = self._score(*rollout)
        with self._phase("anchor"), self.engine.phase("anchor"):
            self.objective.measure(scored)
        with self._phase("update"), self.engine.phase("update"):
            for part, positions in self.objective.mini_batches(scored):
                # With several updates per rollout the last one's values stand for the
                # iteration.
                metrics |= self._optimizer_update(part, positions)
        self.rollouts += 1
        skipped = {"update/skipped_nonfinite": self.skipped_updates} if skips else {}
        times = {f"time/{phase}": seconds for phase, seconds in self._seconds.items()}
        whole = {"time/iteration": sum(self._seconds.values())}
        return {"update": self.update} | metrics | skipped | times | whole

    def _rollout(self) -> tuple[list[Trajectory], tuple[dict[str, Tensor], Tensor]]:
        """Sample this rank's videos, decode and score them; the scores of all ranks are
        returned beside them.

        Ranks that share videos (sequence parallelism) decode once all are sampled,
        because sampling needs all of these ranks at the same time.
        """
        rollout = self.config.rollout
        members = rollout.num_generations
        table = rollout_table(rollout, self.rollouts)
        first_steps: FirstSteps | None = None
        if shares_first_steps(rollout, self.engine.sharded):
            velocity = partial(policy_velocity, self.objective.sampler)
            first_steps = FirstSteps(velocity=velocity, members=members)
        sampler = Sampler(
            velocity=lambda batch, keys: self.objective.velocity(batch, keys, table),
            embed=self._embed_of_rollout,
            initial=partial(
                initial_latents,
                shape=self.latent_shape,
                device=self.device,
                kind=rollout.initial_noise,
                members=members,
            ),
            table=table,
            seed=self.config.seed,
            update=self.update,
            kernels=self.kernels,
            keep_steps=self.objective.needs.keeps_steps,
            first_steps=first_steps,
        )
        own = range(self.videos_per_rollout)[self.own_videos]
        samples = make_groups(self._prompts(), sampler.embed, members, own)
        batches = list(micro_batches(samples, rollout.videos_at_once))
        trajectories: list[Trajectory] = []
        unscored: list[tuple[int, Trajectory]] = []
        scoring = self._new_scoring(
            phase=self._phase, seed=(self.config.seed, self.update)
        )
        for done, batch in enumerate(batches):
            self.progress("rollout", done, len(batches), describe_batch(batch))
            with self._phase("rollout"):
                trajectory = sampler(batch)
            trajectories.append(trajectory)
            unscored.append(
                (self.own_videos.start + done * rollout.videos_at_once, trajectory)
            )
            if self.world.sp > 1 and done + 1 < len(batches):
                # the ranks that share a video are still needed for the next batch
                continue
            for first, trajectory in unscored:
                scoring.add(trajectory, first=first, turn=first)
            unscored.clear()
        with self._phase("reward"):
            scoring.wait()
        with self._phase("waiting"):  # for the slowest rank, which `time/slowest` names
            return trajectories, scoring.gather(self.videos_per_rollout)

    def _embed_of_rollout(self, prompt: Prompt) -> PromptEmbeds:
        return self.embed(prompt.asked(self.config.video))

    def _new_scoring(self, **options: Any) -> VideoScoring:
        return VideoScoring(
            decoder=self.decoder,
            reward=self.reward,
            on_failure=self.config.reward.on_failure,
            world=self.world,
            progress=self.progress,
            group_size=self.config.rollout.num_generations,
            **options,
        )

    def _prompts(self) -> list[Prompt]:
        """The prompts of the next rollout on all ranks."""
        count = self.prompts_per_rollout
        return self.schedule.take(self.rollouts * count, count)

    def _score(
        self,
        trajectories: list[Trajectory],
        scores_of_all: tuple[dict[str, Tensor], Tensor],
    ) -> tuple[ScoredRollout, dict[str, float]]:
        """Turn the scores of the rollout into advantages, and deal out what is trained;
        metrics of the rewards.
        """
        config = self.config
        columns, failed = scores_of_all
        groups = (self.prompts_per_rollout, config.rollout.num_generations)
        # One failed video drops its group, whose mean reward would lack it.
        trained_groups = ~failed.view(groups).any(1)
        if not trained_groups.any():
            raise TrainingError(
                f"Update {self.update + 1}: the reward failed in every group of the "
                "rollout, so there is nothing to train on. Set reward.on_failure to "
                "stop to see the first error."
            )
        scores = {name: values.view(groups) for name, values in columns.items()}
        components = {name: values[trained_groups] for name, values in scores.items()}
        # Of the trained groups alone: with the global deviation the others would shift
        # it.
        settings = asdict(config.advantage)
        result = weighted_advantages(components, self.reward.weights, **settings)
        self._warn_of_no_spread(bool(result.zero_spread.all()))
        advantages = torch.zeros(groups)
        advantages[trained_groups] = result.advantages
        table = trajectories[0].table
        metrics = reward_metrics(
            components, self.reward.overall(components), result, ~trained_groups, table
        )
        prompts = self._prompts()
        self.on_rollout(
            RolloutRecord(
                update=self.update,
                prompts=prompts,
                scores=scores,
                reward=self.reward.overall(scores),
                advantages=advantages,
                trained=trained_groups,
            )
        )
        chosen = best_and_worst(advantages, config.training.best_and_worst)
        trained = (trained_groups[:, None] & chosen).flatten()
        # Of all ranks' videos, so that each rank knows every order without an exchange.
        keys = [
            noise_key(prompt, member, config.seed, self.update)
            for prompt, member in group_members(prompts, groups[1])
        ]
        rows = torch.arange(self.videos_per_rollout).view(self.world.dp_degree, -1)
        if config.training.best_and_worst and self.world.dp_degree > 1:
            trajectories, rows = self._deal(trajectories, trained, keys)
        scored = ScoredRollout(
            trajectories=trajectories,
            all_orders=self.objective.orders(keys, table),
            rows=rows,
            rank=self.world.dp_rank,
            all_advantages=advantages.flatten(),
            all_trained=trained,
            second_half=second_half(config, self.world.dp_degree),
        )
        return scored, metrics

    def _deal(
        self, trajectories: list[Trajectory], trained: Tensor, keys: Sequence[NoiseKey]
    ) -> tuple[list[Trajectory], Tensor]:
        """Exchange micro-batches so that all ranks train equally many. Collective.

        Args:
            trajectories: that this rank has sampled; emptied.
            trained: (V,) bool.
            keys: V of them.

        Returns:
            This rank's, and the rows (R, N) of a `ScoredRollout`.
        """
        members = self.config.rollout.num_generations
        size = self.config.rollout.videos_at_once
        # Every rank knows all advantages, so they agree without a word.
        dealt = deal(trained.view(self.world.dp_degree, -1, size).any(dim=2))
        prompts = self._prompts()
        samples = partial(make_groups, prompts, self._embed_of_rollout, members)
        own = exchange_trajectories(trajectories, dealt, samples, keys, self.world)
        return own, (dealt[:, :, None] * size + torch.arange(size)).flatten(1)

    def _warn_of_no_spread(self, none: bool) -> None:
        """Say once that a rollout has nothing to learn from, because no group has two
        different rewards.
        """
        if none and self._had_spread and self.world.is_main:
            self._had_spread = False
            logger.warning(
                "Update %d: the videos of each prompt all have the same reward, so "
                "every advantage is 0 and the reward teaches nothing. Look at what %s "
                "returns: it is constant, or too coarse to tell these videos apart. "
                "advantage/zero_spread_groups counts such groups from here on.",
                self.update + 1,
                ", ".join(self.reward.weights),
            )

    def _warn_of_eps(self, share: float) -> None:
        """Say once that AdamW's steps are short of the learning rate, because the
        gradient is as small as its eps.
        """
        if share > LARGE_EPS_SHARE and self._eps_is_small and self.world.is_main:
            self._eps_is_small = False
            eps = self.config.optimizer.eps
            logger.warning(
                "Update %d: optimizer.eps = %g is %.0f%% of AdamW's denominator (mean "
                "over the weights; optimizer/eps_share), so weights move less than "
                "optimizer.learning_rate says. Lower it, for example to %.0e.",
                self.update,
                eps,
                100 * share,
                eps / 1000,
            )

    def _optimizer_update(
        self, scored: ScoredRollout, positions: Sequence[int]
    ) -> dict[str, float]:
        """One optimizer step with the gradient at `positions` of every sample's order.
        Returns its metrics.
        """
        rate = self.engine.learning_rate
        rates = {"learning_rate": rate, "kl/weight": self.objective.kl_weight.weight}
        own = self.objective.accumulate(scored, positions, self.update)
        # Every rank clips and gathers whatever its own loss is: those that skipped
        # would leave the others waiting.
        grad_norm = self.engine.clip_gradients()
        terms, fault = gather_terms(scored, own, positions, self.world)
        if fault is None and not math.isfinite(grad_norm):
            names = name_prompts(self._prompts())
            fault = f"the gradient norm ({grad_norm}) of prompt {names}"
        if fault is not None:
            self._skip_update(fault)
            self.update += 1
            # earlier updates of the rollout may have moved the weights
            self.objective.moved(self.update)
            return rates
        self.objective.verify(terms, self.update)
        with record_function(PHASE_PREFIX + "optimizer"):
            self.engine.step()
        self.update += 1
        decay = self.config.training.ema_decay
        if self.ema is not None and decay:
            # A short run's average must not stay at the first weights.
            self.ema.average(min(decay, self.update / (9 + self.update)))
        self.objective.moved(self.update)
        # A mean over the ranks, so that it is the same on all of them.
        videos = round(scored.num_trained / self.world.dp_degree)
        found = self.objective.report(terms, videos * len(positions)) | rates
        found["grad_norm"] = grad_norm
        if self.engine.signal is not None:
            found["grad/signal"] = self.engine.signal
        if (share := self.engine.eps_share) is not None:
            found["optimizer/eps_share"] = share
            if scored.all_advantages.any():
                self._warn_of_eps(share)
        return found

    def _skip_update(self, fault: str) -> None:
        """Drop the gradient of the present update, or stop where that is not allowed.
        The same on every rank.
        """
        self.engine.zero_grad()
        self._check_weights()  # if they are at fault, no later update is any better
        allowed = self.config.training.skip_nonfinite_updates
        if self.skipped_updates >= allowed:
            passed = f", after {allowed} that training.skip_nonfinite_updates let pass"
            before = passed if allowed else ""
            raise TrainingError(
                f"Update {self.update + 1}: {fault} is not finite{before}. The weights "
                "were not changed, and the last checkpoint is intact. Start a new run "
                "with a lower optimizer.learning_rate or with model.dtype float32, or "
                "resume with a higher training.skip_nonfinite_updates to leave such "
                "updates out."
            )
        self.skipped_updates += 1
        if self.world.is_main:
            logger.warning(
                "Update %d is skipped and the weights stay as they are: %s is not "
                "finite. training.skip_nonfinite_updates allows %d more.",
                self.update + 1,
                fault,
                allowed - self.skipped_updates,
            )

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        with record_function(PHASE_PREFIX + name):
            yield
        # Kernels run on after their launch, and the next phase would be charged for
        # them.
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - start

    # ----------------------------------------------------------------------------------
    # evaluation

    def evaluate(
        self, on_video: Callable[[int, Tensor], None] | None = None
    ) -> Evaluation:
        """Score the evaluation's samples with the present (or, with EMA on, the
        averaged) weights. See `evaluate`.
        """
        section = self.config.evaluation
        video = self.config.evaluation_video
        initial = partial(
            initial_latents, shape=self.evaluation_latent_shape, device=self.device
        )
        sampler = evaluation_sampler(
            self.config.rollout,
            section,
            self.policy,
            lambda prompt: self.embed(prompt.asked(video)),
            initial,
        )
        with self.evaluated_weights(), self.engine.phase("evaluation"):
            # every evaluation's, so that they pair
            scoring = self._new_scoring(seed=(section.seed, -1))
            prompts = self.eval_prompts
            return evaluate(sampler, scoring, prompts, section, on_video=on_video)

    def evaluated_weights(self) -> AbstractContextManager[None]:
        """Within the context the model has the weights that are evaluated and shipped:
        the average, with EMA on.
        """
        return self.ema.applied() if self.ema is not None else nullcontext()

    # ----------------------------------------------------------------------------------
    # state

    def tensors(self) -> dict[str, Mapping[str, Tensor]]:
        """Tensors of a checkpoint by group: weights, optimizer, and where the run has
        them anchor and ema. Collective.

        Raises:
            TrainingError: the weights are not finite, so they must not become a
                checkpoint. The same on every rank.
        """
        self._check_weights()
        kept = {name: held.tensors() for name, held in self._snapshots().items()}
        return {**self.engine.tensors(), **kept}

    def _check_weights(self) -> None:
        """TrainingError unless the weights are finite. Collective; waits for the GPU
        once.
        """
        if self.world.any(not norm_is_finite(self.engine.masters)):
            raise TrainingError(
                f"Update {self.update}: the optimizer step left weights that are not "
                "finite, or so large that their norm overflows. They were not saved, "
                "and the last checkpoint is intact. Start a new run with a lower "
                "optimizer.learning_rate (it is "
                f"{self.config.optimizer.learning_rate:g})."
            )

    def state(self) -> dict[str, Any]:
        """State of a checkpoint without its tensors, fit for JSON. Ranks other than 0
        take over rank 0's.
        """
        return {
            "update": self.update,
            "skipped_updates": self.skipped_updates,
            "rollouts": self.rollouts,
            **self.objective.state(),
            "optimizer": {"updates": self.engine.updates},
        }

    def check_fit(self, shapes: Mapping[str, Mapping[str, Sequence[int]]]) -> None:
        """ValueError unless the weights of a checkpoint have this run's names and
        shapes. Nothing is changed.

        Args:
            shapes: group -> name -> whole shape.
        """
        own = {name: tuple(shape) for name, shape in self.engine.shapes.items()}
        check_same_shapes(own, shapes["weights"], "weights")
        for group in self._snapshots():
            check_same_shapes(own, shapes.get(group, own), group)

    def load(self, checkpoint: Checkpoint, state: Mapping[str, Any]) -> None:
        """Take over the state of a checkpoint that fits. Collective."""
        self.engine.load_tensors(checkpoint)
        for group, snapshot in self._snapshots().items():
            if group in checkpoint.tensors:
                snapshot.load_tensors(checkpoint, group)
                continue
            # A key that was changed on resume asks for it. An anchor is that of update
            # 0, until a moving one is due.
            if group != "anchor":
                snapshot.refresh()
            begins = "those of update 0" if group == "anchor" else "its trained weights"
            logger.warning(
                "The checkpoint has no %s weights: they begin as %s.", group, begins
            )
        # The warm-up of the learning rate goes on from here.
        self.engine.updates = int(state["optimizer"]["updates"])
        self.update = int(state["update"])
        self.skipped_updates = int(state.get("skipped_updates", 0))
        self.rollouts = int(state["rollouts"])
        self.objective.load_state(state)

    def _snapshots(self) -> dict[str, WeightSnapshot]:
        found = self.objective.snapshots()
        if self.ema is not None:
            found["ema"] = self.ema
        return found
