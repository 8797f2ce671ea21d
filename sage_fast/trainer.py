"""The GRPO loop: rollout, reward, advantage, update.

Read `Trainer.iterate` first. The mathematics is in `sde.py` and `objective.py`, sampling in `rollout.py`, the gradient
in `gradient.py` and `single_pass.py`, files and progress in `run.py`. Everything specific to one model arrives as
`Components`.
"""

import logging
import random
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.profiler import record_function

from sage_fast.config import ConfigError, RunConfig
from sage_fast.data import PromptSchedule, make_groups, split_evenly
from sage_fast.evaluation import Evaluation, evaluate
from sage_fast.gradient import PolicyGradient, Progress, ScoredRollout, TwoPhaseGradient, trained_steps
from sage_fast.kernels import select_kernels
from sage_fast.objective import (
    KLWeightState,
    PolicyTerms,
    anchor_kind,
    initial_kl_weight,
    next_kl_weight,
    weighted_advantages,
)
from sage_fast.optim import OptimizerSet
from sage_fast.policy.base import Components
from sage_fast.policy.forward import choose_forward
from sage_fast.policy.guidance import GuidedPolicy
from sage_fast.policy.lora import add_lora, train_all, trainable_parameters
from sage_fast.policy.snapshot import WeightSnapshot, check_same_tensors
from sage_fast.records import Prompt, Sample, Trajectory
from sage_fast.rewards.base import PendingScores, RewardError, Scorer
from sage_fast.rollout import micro_batches, noise_keys, rollout_table, sample_trajectory
from sage_fast.sde import sigma_schedule, transition_table
from sage_fast.single_pass import SinglePassGradient
from sage_fast.training_metrics import reward_metrics, update_metrics, weighted_kl

logger = logging.getLogger(__name__)

PHASE_PREFIX = "phase: "
"""Begins the names of the trainer's ranges in a profiler's trace."""


class TrainingError(RuntimeError):
    """The run cannot go on; the message says at which update, why, and what to do."""


class Trainer:
    """State of a GRPO run and the step that advances it.

    Args:
        config: the run.
        components: the video model; its transformer is modified in place (adapters, requires_grad).
        reward: what is maximised.
        prompts: training prompts.
        eval_prompts: prompts of the paired evaluation.
        progress: called while an iteration runs.

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
        progress: Progress = lambda phase, done, total: None,
    ) -> None:
        self.config = config
        self.reward = reward
        self.progress = progress
        self.device = torch.device(resolve_device(config.model.device))
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

        transformer = components.transformer.to(self.device)
        if config.training.mode == "lora":
            lora = config.lora
            add_lora(
                transformer,
                rank=lora.rank,
                alpha=lora.alpha,
                target_modules=lora.target_modules,
                seed=config.seed,
            )
        else:
            train_all(transformer)
        choose_forward(transformer, config.model)
        self.policy = GuidedPolicy(
            transformer,
            self.embeds[""].to(self.device),
            config.rollout.guidance_scale,
            conditional_gradient=config.training.guidance == "conditional",
        )
        self.parameters = trainable_parameters(transformer)
        self.optimizer = OptimizerSet(self.parameters, config.optimizer)
        kind = anchor_kind(config.objective.kl_mode)
        self.anchor = WeightSnapshot(self.parameters) if kind != "none" else None
        self.anchor_moves = kind == "moving"
        self.ema = WeightSnapshot(self.parameters) if config.training.ema_decay else None

        self.schedule = PromptSchedule(prompts, config.seed, config.data.shuffle)
        self.prompts_per_rollout = config.rollout.batch_size // config.rollout.num_generations
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
        self._pending: list[PendingScores] = []
        """Scores of the last rollout, a batch per trajectory."""
        self._check_trainable_steps()

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
        trajectories = self._rollout()
        with self._phase("reward"):
            scored = self._score(trajectories, metrics)
        with self._phase("anchor"):
            self.gradient.measure_anchor(scored)
        with self._phase("update"):
            num_steps = len(scored.orders[0])
            for positions in split_evenly(num_steps, self.config.training.updates_per_rollout):
                self._optimizer_update(scored, positions, metrics)
        self.rollouts += 1
        metrics |= {f"time/{phase}": seconds for phase, seconds in self._seconds.items()}
        metrics["time/iteration"] = sum(self._seconds.values())
        return {"update": self.update} | metrics

    def _rollout(self) -> list[Trajectory]:
        """Sample the videos, decode them, and submit them to the rewards."""
        rollout = self.config.rollout
        prompts = self.schedule.take(self.rollouts * self.prompts_per_rollout, self.prompts_per_rollout)
        samples = make_groups(prompts, [self.embeds[p.text].to(self.device) for p in prompts], rollout.num_generations)
        table = rollout_table(rollout, self.rollouts)
        batches = list(micro_batches(samples, rollout.micro_batch_size))
        seed, update = self.config.seed, self.update
        trajectories, self._pending = [], []
        for done, batch in enumerate(batches):
            self.progress("rollout", done, len(batches))
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
            with self._phase("decode"):
                videos = self.decoder.decode(trajectory.final)
            # At once, so that rewards in a process of their own work while the next batch is sampled.
            with self._phase("reward"):
                self._pending.append(self.reward.submit(videos, batch, self.config.reward.on_failure))
        return trajectories

    def _score(self, trajectories: Sequence[Trajectory], metrics: dict[str, float]) -> ScoredRollout:
        """Wait for the scores of the last rollout, and turn them into advantages."""
        config = self.config
        results = []
        for done, pending in enumerate(self._pending):
            self.progress("reward", done, len(trajectories))
            results.append(pending.result())
        if config.reward.placement == "process":
            metrics["time/reward_worker"] = sum(result.seconds for result in results)
        collected = [result.scores for result in results]
        failed = [result.failed for result in results]
        groups = (self.prompts_per_rollout, config.rollout.num_generations)
        kept_groups = ~torch.cat(failed).view(groups).any(1)
        if not kept_groups.any():
            raise TrainingError(
                f"Update {self.update + 1}: the reward failed in every group of the rollout, so there is nothing to "
                "train on. Set reward.on_failure to stop to see the first error."
            )
        # A micro-batch that failed as a whole has no scores; its groups are dropped, so the filler is never read.
        names = {name for scores in collected for name in scores}
        for scores in collected:
            if scores and set(scores) != names:
                raise RewardError(
                    f"The rewards returned the scores {sorted(scores)} for some videos and {sorted(names)} in all; "
                    "every video needs the same ones."
                )
        columns = {
            name: torch.cat([s.get(name, lost.double()) for s, lost in zip(collected, failed, strict=True)])
            for name in sorted(names)
        }
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
        return ScoredRollout(
            trajectories=trajectories,
            advantages=advantages.flatten(),
            kept=kept_groups.repeat_interleave(groups[1]),
            orders=[trained_steps(key, table, config.training) for t in trajectories for key in t.keys],
        )

    def _optimizer_update(self, scored: ScoredRollout, positions: Sequence[int], metrics: dict[str, float]) -> None:
        """One optimizer step with the gradient of the trained steps at `positions` of every sample's order."""
        weight, learning_rate = self.kl_weight.weight, self.optimizer.learning_rate
        terms = self.gradient.accumulate(scored, positions, weight)
        grad_norm = self.optimizer.clip_gradients()
        self._check_finite(scored, terms, grad_norm, len(positions))
        with record_function(PHASE_PREFIX + "optimizer"):
            self.optimizer.step()
        self.update += 1
        if self.ema is not None and self.config.training.ema_decay:
            self.ema.average(self.config.training.ema_decay)

        kept = scored.kept_rows(len(positions)).to(self.device)
        terms = PolicyTerms(*(column[kept] for column in terms))
        self.kl_weight = next_kl_weight(
            self.kl_weight, weighted_kl(terms, self.config.objective), self.config.kl_weight
        )
        # At the first update of a rollout the policy is the one that made it: anything but 0 is a fault.
        metrics.setdefault("ratio/first_max_deviation", float((terms.ratio - 1).abs().max()))
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
        with self.evaluated_weights():
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
                on_batch=lambda done, total: self.progress("evaluation", done, total),
            )

    def evaluated_weights(self) -> AbstractContextManager[None]:
        """Within the context the model has the weights that are evaluated and shipped: the average, with EMA on."""
        return self.ema.applied() if self.ema is not None else nullcontext()

    # ------------------------------------------------------------------------------------------ state

    def tensors(self) -> dict[str, Mapping[str, Tensor]]:
        """Weights for a checkpoint, by file stem."""
        result: dict[str, Mapping[str, Tensor]] = {"weights": {n: p.detach() for n, p in self.parameters.items()}}
        if self.anchor is not None:
            result["anchor"] = self.anchor.state_dict()
        if self.ema is not None:
            result["ema"] = self.ema.state_dict()
        return result

    def counters(self) -> dict[str, Any]:
        """JSON-able state for a checkpoint."""
        return {
            "update": self.update,
            "rollouts": self.rollouts,
            "anchor_update": self.anchor_update,
            "kl_weight": self.kl_weight.to_dict(),
        }

    def binary_state(self) -> dict[str, Any]:
        """State that only torch can serialise. The trainer draws from no global generator; a custom reward may."""
        version, words, gauss = random.getstate()
        return {
            "optimizer": self.optimizer.state_dict(),
            "torch_rng": torch.get_rng_state(),
            "python_rng": [version, list(words), gauss],
        }

    def check_fit(self, tensors: Mapping[str, Mapping[str, Tensor]]) -> None:
        """ValueError unless the weights of a checkpoint have this run's names and shapes. Nothing is changed."""
        check_same_tensors(self.parameters, tensors["weights"], "weights")
        for name, snapshot in (("anchor", self.anchor), ("ema", self.ema)):
            if snapshot is not None:
                if name not in tensors:
                    raise ValueError(f"The checkpoint has no {name} weights, but this run's config needs them.")
                check_same_tensors(snapshot.values, tensors[name], name)

    def load(
        self, tensors: Mapping[str, Mapping[str, Tensor]], counters: Mapping[str, Any], binary: Mapping[str, Any]
    ) -> None:
        """Take over the state of a checkpoint. ValueError when it does not fit this run."""
        self.check_fit(tensors)
        self.load_weights(tensors["weights"])
        for name, snapshot in (("anchor", self.anchor), ("ema", self.ema)):
            if snapshot is not None:
                snapshot.load_state_dict(tensors[name])
        self.optimizer.load_state_dict(binary["optimizer"])
        torch.set_rng_state(binary["torch_rng"].cpu())
        version, words, gauss = binary["python_rng"]
        random.setstate((version, tuple(words), gauss))
        self.update = int(counters["update"])
        self.rollouts = int(counters["rollouts"])
        self.anchor_update = int(counters["anchor_update"])
        self.kl_weight = KLWeightState.from_dict(counters["kl_weight"])

    @torch.no_grad()
    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Take over trained weights alone, as the averaged ones too. ValueError unless names and shapes agree."""
        check_same_tensors(self.parameters, weights, "weights")
        for name, parameter in self.parameters.items():
            parameter.copy_(weights[name])
        if self.ema is not None:
            self.ema.refresh()

    # ------------------------------------------------------------------------------------------ helpers

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

    def _check_finite(self, scored: ScoredRollout, terms: PolicyTerms, grad_norm: float, steps: int) -> None:
        """Stop before the optimizer sees a number that is not finite, naming the prompts it came from."""
        bad = (~terms.loss.isfinite()).cpu()
        if not bad.any() and torch.isfinite(torch.tensor(grad_norm)):
            return
        rows = [s for t in scored.trajectories for _ in range(steps) for s in t.samples]
        names = sorted(
            {f"{s.prompt.index} ({s.prompt.text!r})" for s, wrong in zip(rows, bad.tolist(), strict=True) if wrong}
        )
        where = f"the loss of prompt {', '.join(names[:3])}" if names else f"the gradient norm ({grad_norm})"
        self.optimizer.zero_grad()
        raise TrainingError(
            f"Update {self.update + 1}: {where} is not finite. The weights were not changed, and the last checkpoint "
            "is intact. Start a new run with a lower optimizer.learning_rate, or with model.dtype float32."
        )


def resolve_device(name: str) -> str:
    """`auto` becomes cuda where there is one. ConfigError for a device torch cannot use."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(
            f"model.device is {name!r}, which torch cannot use here: {error}. Use auto or cpu."
        ) from error
    return name
