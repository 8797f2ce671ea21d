"""The rewards of a run as one: every configured reward is called, every score is
checked, none is made up.
"""

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sage_fast.config.errors import ConfigError, RewardError, RewardServerError
from sage_fast.config.sections import EvaluationConfig, RewardConfig, RolloutConfig
from sage_fast.distributed.world import World
from sage_fast.models.media_files import read_picture
from sage_fast.records import Sample
from sage_fast.rewards.base import (
    Reward,
    describe_batch,
    find_reward,
    kept_generators,
    scored_elsewhere,
)
from sage_fast.rewards.guard import Guard, end_processes, running_threads
from sage_fast.rewards.remote import RemoteReward, connect
from sage_fast.rewards.server import (
    TAKEN,
    RewardSample,
    SetupError,
    build_reward,
    call_reward,
    fill_options,
    lower_is_better,
    reads,
    takes_samples,
    whole_groups,
)

LARGEST = 1e30
"""Of a score: sums and squares of larger ones are not finite in float32."""
SLOW = 300.0
"""Seconds after which a call of a reward is said to be still running, and again each
time.
"""

logger = logging.getLogger(__name__)


@contextmanager
def _reward_code(
    name: str, guard: Guard | None, when: str, *, keeps: bool = False
) -> Iterator[None]:
    """Turn whatever code of reward `name` raises into a RewardError that says so and
    `when`.

    guard: keeps what it does to this process from the run; None where it runs in
    another one. keeps: see `Guard`.
    """
    try:
        with guard(when, keeps=keeps) if guard else nullcontext():
            yield
    # The user interrupts the run, or no reward has failed.
    except (KeyboardInterrupt, ConfigError, RewardServerError):
        raise
    except SystemExit as call:
        # It would end the run as if it had succeeded.
        raise RewardError(
            f"Reward {name!r} tried to end the process by sys.exit({call.code!r}) "
            f"{when}."
        ) from call
    except BaseException as error:
        raise RewardError(
            f"Reward {name!r} raised {type(error).__name__}: {error} {when}."
        ) from error


@dataclass(frozen=True, kw_only=True)
class ScoredBatch:
    """The scores of B of a rollout's V videos; `numbers` are theirs.

    Attributes:
        scores: name -> (B,) float64, finite, and 0 where `failed`; a name that failed
            for every video is absent.
        failed: (B,) bool.

    Example: `ScoredBatch(numbers=[4, 5], scores={"VQ": tensor([0.3, 0.0])},
    failed=tensor([False, True]))`
    """

    numbers: Sequence[int]
    scores: Mapping[str, Tensor]
    failed: Tensor


class CompositeReward:
    """Calls several rewards on the same videos and collects their named scores.

    weights: score name -> weight, without those that are 0. lower_is_better: names of
    the scores that fall as videos get better: those that a reward declares, and those
    with a negative weight.

    Raises:
        ConfigError: a score of which less is better has a positive weight.
    """

    def __init__(
        self,
        rewards: Mapping[str, Reward],
        weights: Mapping[str, float],
        guards: Mapping[str, Guard] | None = None,
        judges: Collection[str] = (),
    ) -> None:
        self.rewards = dict(rewards)
        self.judges = frozenset(judges)
        """Names of the rewards that evaluations alone call."""
        if guards is None:
            guards = {name: Guard(name) for name in rewards}
        self._guards = guards
        remote = all(isinstance(rewards[name], RemoteReward) for name in self.called())
        self.thread = ThreadPoolExecutor(1, "reward") if remote else None
        """Waits for the scores while the next videos are sampled, where this process
        scores nothing itself.
        """
        self.on_hang: Callable[[str | None], None] = lambda text: None
        """Told, in words and from another thread, of a call that has run for long, and
        None once such a call ends.
        """
        self._compares_next = False
        self._again: tuple[_Batch, Mapping[str, Tensor]] | None = None
        self.weights = {name: weight for name, weight in weights.items() if weight}
        lower = {name for name, weight in weights.items() if weight < 0}
        if taken := weights.keys() & TAKEN:
            name = taken.pop()
            raise ConfigError(
                f"reward.weights.{name} stands for a sum of scores. The numbers of a "
                f"function of that name are called {name}_score."
            )
        for name, reward in rewards.items():
            try:
                lower.update(lower_is_better(reward))
                reads(reward)
            except TypeError as error:
                raise ConfigError(f"Reward {name!r}: {error}") from error
        for name in lower & self.weights.keys():
            if self.weights[name] > 0:
                raise ConfigError(
                    f"reward.weights.{name} is {self.weights[name]:g}, but its reward "
                    "says that lower is better, so that training would make it worse. "
                    f"Give it a negative weight, such as {-self.weights[name]:g}."
                )
        self.lower_is_better = frozenset(lower)

    @classmethod
    def from_config(
        cls,
        config: RewardConfig,
        prompts: Sequence[str] = (),
        *,
        device: str | None = None,
        fps: float | None = None,
    ) -> "CompositeReward":
        """Build every reward of a config, and show it the prompts if it has a method
        `check_prompts`.

        Args:
            prompts: texts of the videos to be scored.
            device: the policy's, for rewards with an option `device` that
                `reward.options` does not give.
            fps: of the videos, for rewards with an option `fps`.

        Raises:
            ConfigError: names the reward whose options do not fit, or the prompt that
                it refuses, and why. RewardError: a reward failed in any other way while
                it was set up.
        """
        rewards: dict[str, Reward] = {}
        elsewhere = scored_elsewhere(config)
        guards = {name: Guard(name) for name in config.named if name not in elsewhere}
        for name, guard in guards.items():
            found = find_reward(name, guard)
            given = config.options.get(name, {})
            options = fill_options(found, given, device=device, fps=fps)
            if fps is not None and options.get("fps", fps) != fps:
                logger.warning(
                    "reward.options.%s.fps is %s, but the videos have video.fps = %s. "
                    "The reward samples frames at its own rate.",
                    *(name, options["fps"], fps),
                )
            with _reward_code(name, guard, "while it was set up", keeps=True):
                try:
                    rewards[name] = build_reward(name, found, options)
                except SetupError as error:
                    raise ConfigError(str(error)) from error
        judges = set(config.evaluation)
        if remote := connect(config, device, fps):
            for part in (config.rewards, config.evaluation):
                if names := [name for name in elsewhere if name in part]:
                    label = f"{', '.join(names)} at {remote.url}"
                    rewards[label] = remote.only(names)
                    judges |= {label} if part is config.evaluation else set()
        for name, reward in rewards.items():
            check = getattr(reward, "check_prompts", None)
            if check is None:
                continue
            with _reward_code(name, guards.get(name), "while it was set up"):
                try:
                    check(list(prompts))
                except RewardError as error:
                    raise ConfigError(
                        f"data.prompts or evaluation.prompts: {error}"
                    ) from error
        return cls(rewards, config.weights, guards, judges)

    def close(self) -> None:
        """End the processes that the rewards have started, and warn of threads that
        cannot be ended.
        """
        for reward in self.rewards.values():
            if isinstance(reward, RemoteReward):
                reward.close()
        end_processes()
        for thread, name in running_threads().items():
            logger.warning(
                "Reward %r has started the thread %r, which is still running. A "
                "command ends without it; in Python it goes on. Have the reward end "
                "it, or start it with daemon=True.",
                *(name, thread),
            )

    def overall(self, scores: Mapping[str, Tensor]) -> Tensor:
        """Weighted sum of the scores, (B,) float64."""
        return torch.stack(
            [weight * scores[name] for name, weight in self.weights.items()]
        ).sum(0)

    def called(self, evaluating: bool = False) -> list[str]:
        """Names of the rewards that score: in an evaluation the judges too."""
        return [name for name in self.rewards if evaluating or name not in self.judges]

    def whole_groups(self, evaluating: bool = False) -> bool:
        """True where every batch must hold whole groups."""
        return any(whole_groups(self.rewards[name]) for name in self.called(evaluating))

    def reads(self, evaluating: bool = False) -> set[str]:
        """Fields of a `RewardSample` that some reward reads."""
        return {
            key for name in self.called(evaluating) for key in reads(self.rewards[name])
        }

    def check_layout(
        self, rollout: RolloutConfig, evaluation: EvaluationConfig, dp_degree: int
    ) -> None:
        """ConfigError where a group that a reward needs whole would span ranks."""
        groups = []
        if self.whole_groups():
            size = rollout.num_generations
            groups += [("rollout", rollout.batch_size, "num_generations", size)]
        if evaluation.every and self.whole_groups(evaluating=True):
            size = evaluation.noises
            groups += [("evaluation", evaluation.batch_size, "noises", size)]
        for section, given, key, size in groups:
            if dp_degree > 1 and given % size:
                raise ConfigError(
                    f"{section}.batch_size is {given} on each of {dp_degree} "
                    "data-parallel ranks, but a reward with WHOLE_GROUPS needs all "
                    f"{section}.{key} = {size} videos of a group on the same rank. "
                    "Make it a multiple of that."
                )

    def score(
        self,
        videos: Tensor | None,
        samples: Sequence[Sample],
        *,
        evaluating: bool = False,
    ) -> dict[str, Tensor]:
        """Scores of one batch.

        Args:
            videos: (B, F, 3, H, W) uint8; None where no reward reads them.
            samples: B records, for the prompts and for error messages.
            evaluating: whether the judges score too.

        Returns:
            name -> (B,) float64, all finite.

        Raises:
            RewardError: a reward raised, tried to exit, or returned a wrong shape, a
                taken name or a score that is not finite.
        """
        scores: dict[str, Tensor] = {}
        prompts = [sample.prompt.text for sample in samples]
        when = f"on {describe_batch(samples)}"
        for name in self.called(evaluating):
            result = self.call(name, videos, prompts, when, samples)
            if not isinstance(result, Mapping):
                raise RewardError(
                    f"Reward {name!r} returned a {type(result).__name__}, but it must "
                    f"be {{name: scores}} with {len(samples)} numbers a name."
                )
            for key, returned in result.items():
                if not isinstance(key, str) or key in TAKEN:
                    raise RewardError(
                        f"Reward {name!r} returned a score named {key!r}. A name is a "
                        f"text, and {', '.join(TAKEN)} stand for sums of scores: "
                        "return it by another name."
                    )
                if key in scores:
                    raise RewardError(
                        f"Two rewards return a score named {key!r}; the second is "
                        f"{name!r}."
                    )
                if name in self.judges and key in self.weights:
                    raise ConfigError(
                        f"reward.weights.{key} is {self.weights[key]:g}, but {name!r} "
                        "is in reward.evaluation and not trained on. Remove the "
                        "weight, or move the reward to reward.rewards."
                    )
                scores[key] = _checked(
                    f"Reward {name!r} returned {key}", returned, samples
                )
        missing = sorted(set(self.weights) - set(scores))
        if missing:
            raise ConfigError(
                f"reward.weights names {missing}, but the rewards "
                f"{list(self.rewards)} return {sorted(scores)}."
            )
        if self._compares_next and len(samples) > 1:
            self._compares_next = False
            self._compare_alone((videos, samples), scores, evaluating)
        return scores

    # ----------------------------------------------------------------------------------
    # scored again

    def compare_next(self) -> None:
        """Score a video of the next batch once more, alone: its score must not depend
        on the others. Where a reward needs whole groups it is a group.
        """
        self._compares_next = True

    def compare_last(self) -> None:
        """Score that video once more at the end of a run: a reward that drifts rises by
        itself.
        """
        if self._again is not None:
            one, before = self._again
            after = self._score_again(one)
            rows = list(range(len(one[1])))
            self._tell_difference(before, "when the run began", after, "now", rows)

    def _compare_alone(
        self, batch: "_Batch", scores: Mapping[str, Tensor], evaluating: bool
    ) -> None:
        # The best: what a reward does with the whole batch shows least in its middle.
        row = int(self.overall(scores).argmax())
        units = self._units(batch[1], evaluating)
        rows = next(rows for rows in units if row in rows)
        one = _part(batch, rows)
        alone = self._score_again(one, evaluating)
        self._again = (one, alone)
        self._tell_difference(scores, "in its batch", alone, "alone", rows)

    def _units(self, samples: Sequence[Sample], evaluating: bool) -> list[list[int]]:
        """Rows that can be scored by themselves: each, or each group."""
        whole = self.whole_groups(evaluating)
        units: dict[int, list[int]] = {}
        for row, sample in enumerate(samples):
            units.setdefault(sample.group if whole else row, []).append(row)
        return list(units.values())

    def _score_again(
        self, one: "_Batch", evaluating: bool = False
    ) -> Mapping[str, Tensor]:
        """Scores outside the run's own sequence of calls: a reward that draws finds its
        generators as they were.
        """
        with kept_generators():
            try:
                return self.score(*one, evaluating=evaluating)
            except (RewardError, RewardServerError) as error:
                logger.warning(
                    "A video that was scored in a batch cannot be scored again, "
                    "alone: %s",
                    error,
                )
                return {}

    def _tell_difference(
        self,
        first: Mapping[str, Tensor],
        when_first: str,
        second: Mapping[str, Tensor],
        when_second: str,
        rows: list[int],
    ) -> None:
        """Warn of scores of the videos of `second` that are not those of `rows` of
        `first`.
        """
        for name in first.keys() & second.keys():
            worst = int((first[name][rows] - second[name]).abs().argmax())
            one = first[name][rows[worst]].item()
            other = second[name][worst].item()
            # A model may round otherwise in another batch, in bfloat16 by some percent.
            rounding = 0.02 * abs(one) + 0.1 * first[name].std(correction=0).item()
            if abs(one - other) > rounding + 1e-6:
                logger.warning(
                    "The same video has %s %.4g %s and %.4g %s. A score must depend "
                    "on its video and prompt alone, or with WHOLE_GROUPS on its group: "
                    "else the gain of a run is not that of its videos "
                    "(docs/rewards.md).",
                    *(name, one, when_first, other, when_second),
                )

    def call(
        self,
        name: str,
        videos: Tensor | None,
        prompts: Sequence[str],
        when: str,
        samples: Sequence[Sample] = (),
    ) -> Any:
        """Result of one reward, unchecked. The reward gets copies.

        Args:
            videos, prompts: see `Reward.score`.
            when: for messages, such as "on prompt 3".
            samples: for a reward with `score_samples`.

        Raises:
            RewardError: it raised or tried to exit. RewardServerError: its server is
                gone.
        """
        guard = self._guards.get(name)
        # A clone, which is compared afterwards; what goes to a server is a copy
        # already.
        given = videos if videos is None or not guard else videos.clone()
        reward = self.rewards[name]
        records = (
            _records(given, samples, reads(reward)) if takes_samples(reward) else []
        )
        with self._watched(name, when), _reward_code(name, guard, when):
            result = call_reward(reward, given, list(prompts), records)
        if given is None or videos is None or guard is None:
            return result
        if not (given.dtype == videos.dtype and torch.equal(given, videos)):
            guard.tell("the videos that it was given", when)
        return result

    @contextmanager
    def _watched(self, name: str, when: str) -> Iterator[None]:
        """Say of a call that runs for long that it does: on one process nothing else
        ends it.
        """
        ended = threading.Event()
        begin = time.monotonic()

        def tell() -> None:
            while not ended.wait(SLOW):
                minutes = (time.monotonic() - begin) / 60
                text = f"Reward {name!r} has been running for {minutes:.0f} min {when}."
                logger.warning(
                    "%s Ctrl-C or SIGTERM ends the run without waiting for it; "
                    "checkpoints stay.",
                    text,
                )
                self.on_hang(text)

        thread = threading.Thread(target=tell, name="slow reward", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
            self.on_hang(None)

    def score_or_mark(
        self,
        videos: Tensor | None,
        samples: Sequence[Sample],
        *,
        evaluating: bool = False,
    ) -> tuple[dict[str, Tensor], Tensor]:
        """As `score`, but a failure marks its sample instead of raising, or its group
        where a reward needs whole ones.

        Returns:
            scores: those that could be computed, 0 where a reward failed; a name that
            failed everywhere is absent. failed: (B,) bool, True where a reward failed.
        """
        try:
            # A server that is gone raises no RewardError: no video is at fault, so that
            # ends the run.
            scores = self.score(videos, samples, evaluating=evaluating)
            return scores, torch.zeros(len(samples), dtype=torch.bool)
        except RewardError as error:
            logger.warning(
                "%s Its %s are scored one by one; a group with one that fails again is "
                "dropped.",
                *(error, "groups" if self.whole_groups(evaluating) else "videos"),
            )
        singles: list[dict[str, Tensor]] = []
        units = self._units(samples, evaluating)
        for rows in units:
            try:
                part = _part((videos, samples), rows)
                singles.append(self.score(*part, evaluating=evaluating))
            except RewardError:
                singles.append({})
        names = dict.fromkeys(name for single in singles for name in single)
        scores = {
            name: torch.zeros(len(samples), dtype=torch.float64) for name in names
        }
        failed = torch.ones(len(samples), dtype=torch.bool)
        for rows, single in zip(units, singles, strict=True):
            # One that lacks a score of the others has failed too.
            if single and single.keys() == names.keys():
                failed[rows] = False
                for name, value in single.items():
                    scores[name][rows] = value
        return scores, failed


_Batch = tuple[Tensor | None, Sequence[Sample]]
"""Videos and samples."""


def _part(batch: _Batch, rows: list[int]) -> _Batch:
    """Some rows of a batch, copied."""
    videos, samples = batch
    return None if videos is None else videos[rows], [samples[row] for row in rows]


def _records(
    videos: Tensor | None, samples: Sequence[Sample], fields: Sequence[str]
) -> list[RewardSample]:
    """Samples for a reward that reads these fields; of latents and pictures, copies."""
    found = []
    for row, sample in enumerate(samples):
        prompt = sample.prompt
        place = (prompt.text, dict(prompt.columns), sample.group, sample.member)
        parts: dict[str, Any] = {}
        if videos is not None and "video" in fields:
            parts["video"] = videos[row]
        if sample.latents is not None and "latents" in fields:
            parts["latents"] = sample.latents.clone()
        if prompt.image is not None and "picture" in fields:
            parts["picture"] = _picture(prompt.image).clone()
        found.append(RewardSample(*place, **parts))
    return found


@lru_cache(maxsize=8)
def _picture(file: str) -> Tensor:
    pixels = torch.from_numpy(np.array(read_picture(file)))
    return pixels.permute(2, 0, 1).contiguous()


def _checked(what: str, returned: Any, samples: Sequence[Sample]) -> Tensor:
    """A returned score as (B,) float64. RewardError unless it is B finite numbers."""
    try:
        # Python's numbers keep all their digits, as they do on the way from a server.
        dtype = None if isinstance(returned, Tensor) else torch.float64
        given = torch.as_tensor(returned, dtype=dtype).detach()
        if given.is_complex() or given.layout != torch.strided:
            raise TypeError(f"it is {given.dtype} of layout {given.layout}")
        # A copy: the reward may use its tensor again.
        value = given.to("cpu", torch.float64, copy=True)
    except (TypeError, ValueError, ArithmeticError, RuntimeError) as error:
        raise RewardError(
            f"{what}, which is not a tensor of numbers: {error}."
        ) from error
    if value.shape != (len(samples),):
        raise RewardError(
            f"{what} of shape {tuple(value.shape)} for {len(samples)} videos; it must "
            f"be ({len(samples)},)."
        )
    bad = (~(value.abs() <= LARGEST)).nonzero().flatten().tolist()
    if bad:
        raise RewardError(
            f"{what} = {value[bad[0]].item()} for {describe_batch([samples[bad[0]]])}."
        )
    return value


def gather_scores(
    scored: Sequence[ScoredBatch], error: str | None, count: int, world: World
) -> tuple[dict[str, Tensor], Tensor]:
    """Exchange the scores of a rollout or an evaluation. Collective; every video is
    scored on one rank.

    Args:
        scored: batches of this rank.
        error: why it could not score one.
        count: V, videos on all ranks.

    Returns:
        scores: name -> (V,) float64, 0 where a video failed.
        failed: (V,) bool.

    Raises:
        RewardError: a reward failed on any rank and must stop the run, or videos have
            different scores. The same on every rank.
    """
    # Errors travel with the scores: a rank that has failed must still take part, or the
    # others would wait for it.
    ranks = world.gather((list(scored), error))
    for rank, (_, failure) in enumerate(ranks):
        if failure is not None:
            raise RewardError(f"On rank {rank}: {failure}")
    batches = [batch for batches, _ in ranks for batch in batches]
    names = sorted({name for batch in batches for name in batch.scores})
    columns = {name: torch.zeros(count, dtype=torch.float64) for name in names}
    failed = torch.zeros(count, dtype=torch.bool)
    for batch in batches:
        numbers = list(batch.numbers)
        failed[numbers] = batch.failed
        # A batch that failed as a whole has no scores; its groups are dropped, so the
        # zeros are never read.
        if batch.scores and sorted(batch.scores) != names:
            raise RewardError(
                f"The rewards returned the scores {sorted(batch.scores)} for some "
                f"videos and {names} in all; every video needs the same ones."
            )
        for name, values in batch.scores.items():
            columns[name][numbers] = values
    return columns, failed
