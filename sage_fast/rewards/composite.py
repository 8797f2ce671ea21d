"""The rewards of a run as one: every configured reward is called, every score is checked, none is made up."""

import inspect
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sage_fast.config.errors import ConfigError, RewardError
from sage_fast.config.training_sections import RewardConfig
from sage_fast.distributed.world import World
from sage_fast.records import Sample
from sage_fast.rewards.base import Reward, describe, describe_batch, find_reward

logger = logging.getLogger(__name__)


@contextmanager
def _reward_code(name: str, when: str, refusals: tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """Turn whatever code of reward `name` raises into a RewardError that says so and `when`; `refusals` pass.

    A reward that calls `sys.exit(0)` would end the run as if it had succeeded. An interrupt stays an interrupt.
    """
    try:
        yield
    except (KeyboardInterrupt, *refusals):
        raise
    except SystemExit as call:
        raise RewardError(f"Reward {name!r} tried to end the process by sys.exit({call.code!r}) {when}.") from call
    except BaseException as error:
        raise RewardError(f"Reward {name!r} raised {type(error).__name__}: {error} {when}.") from error


@dataclass(frozen=True, kw_only=True)
class ScoredBatch:
    """The scores of some of a rollout's V videos; `numbers` are theirs.

    scores: name -> (B,) float64, finite, and 0 where `failed`; a name that failed for every video is absent.
    failed: (B,) bool.

    Example: `ScoredBatch(numbers=[4, 5], scores={"VQ": tensor([0.3, 0.0])}, failed=tensor([False, True]))`
    """

    numbers: Sequence[int]
    scores: Mapping[str, Tensor]
    failed: Tensor


class CompositeReward:
    """Calls several rewards on the same videos and collects their named scores.

    weights: score name -> weight, without those that are 0. lower_is_better: names of the scores that fall as videos
    get better: those that a reward declares, and those with a negative weight.

    Raises:
        ConfigError: a score of which less is better has a positive weight.
    """

    def __init__(self, rewards: Mapping[str, Reward], weights: Mapping[str, float]) -> None:
        self.rewards = dict(rewards)
        self.weights = {name: weight for name, weight in weights.items() if weight}
        declared = {score for name, reward in rewards.items() for score in _lower(name, reward)}
        self.lower_is_better = frozenset(declared | {name for name, weight in weights.items() if weight < 0})
        for name in self.lower_is_better & self.weights.keys():
            if self.weights[name] > 0:
                raise ConfigError(
                    f"reward.weights.{name} is {self.weights[name]:g}, but its reward says that lower is better, so "
                    f"that training would make it worse. Give it a negative weight, such as {-self.weights[name]:g}."
                )

    @classmethod
    def from_config(
        cls,
        config: RewardConfig,
        prompts: Sequence[str] = (),
        *,
        device: str | None = None,
        fps: float | None = None,
    ) -> "CompositeReward":
        """Build every reward of a config, and show it the prompts if it has a method `check_prompts`.

        Args:
            config: which rewards.
            prompts: texts of the videos to be scored.
            device: the policy's, for rewards with an option `device` that neither `reward.device` nor `reward.options`
                gives. fps: of the videos, for rewards with an option `fps`.

        Raises:
            ConfigError: names the reward whose options do not fit, or the prompt that it refuses, and why.
            RewardError: a reward failed in any other way while it was set up.
        """
        defaults = {name: value for name, value in (("device", device), ("fps", fps)) if value is not None}
        rewards = {}
        takes_device = False
        for name in config.rewards:
            with _reward_code(name, "while it was imported", (ConfigError,)):
                found = find_reward(name)
            options = dict(config.options.get(name, {}))
            if config.device is not None and "device" not in options and "device" in _parameters(found):
                options["device"] = config.device
                takes_device = True
            for option in defaults.keys() & _parameters(found).keys():
                if options.setdefault(option, defaults[option]) != defaults[option] and option == "fps":
                    logger.warning(
                        "reward.options.%s.fps is %s, but the videos have video.fps = %s. The reward samples frames at "
                        "its own rate.",
                        *(name, options["fps"], defaults["fps"]),
                    )
            with _reward_code(name, "while it was set up", (ConfigError,)):
                rewards[name] = build_reward(name, found, options)
            check_prompts = getattr(rewards[name], "check_prompts", None)
            if check_prompts is not None:
                with _reward_code(name, "while it checked the prompts", (ConfigError,)):
                    try:
                        check_prompts(prompts)
                    except RewardError as error:
                        raise ConfigError(f"data.prompts or evaluation.prompts: {error}") from error
        if config.device is not None and not takes_device:
            raise ConfigError(
                f"reward.device is {config.device!r}, but each of {config.rewards} has no option device or has its own "
                "in reward.options. Set reward.device to null."
            )
        return cls(rewards, config.weights)

    def overall(self, scores: Mapping[str, Tensor]) -> Tensor:
        """Weighted sum of the scores, (B,) float64."""
        return torch.stack([weight * scores[name] for name, weight in self.weights.items()]).sum(0)

    def score(self, videos: Tensor, samples: Sequence[Sample]) -> dict[str, Tensor]:
        """Scores of one batch.

        Args:
            videos: (B, F, 3, H, W) uint8.
            samples: B records, for the prompts and for error messages.

        Returns:
            name -> (B,) float64, all finite.

        Raises:
            RewardError: a reward raised, tried to exit, or returned a wrong shape, a taken name or a score that is not
                finite.
        """
        prompts = [s.prompt.text for s in samples]
        scores: dict[str, Tensor] = {}
        for name, reward in self.rewards.items():
            with _reward_code(name, f"on {describe_batch(samples)}"):
                result = reward.score(videos, prompts)
            if not isinstance(result, Mapping):
                raise RewardError(
                    f"Reward {name!r} returned a {type(result).__name__}, but it must be {{name: scores}} with "
                    f"{len(samples)} numbers a name."
                )
            for key, returned in result.items():
                if key in scores:
                    raise RewardError(f"Two rewards return a score named {key!r}; the second is {name!r}.")
                try:
                    value = torch.as_tensor(returned).detach().cpu().double()
                except (TypeError, ValueError, RuntimeError) as error:
                    raise RewardError(
                        f"Reward {name!r} returned {key!r} as something that is no tensor of numbers: {error}."
                    ) from error
                if value.shape != (len(samples),):
                    raise RewardError(
                        f"Reward {name!r} returned {key!r} of shape {tuple(value.shape)} for {len(samples)} videos; "
                        f"it must be ({len(samples)},)."
                    )
                bad = (~value.isfinite()).nonzero().flatten().tolist()
                if bad:
                    raise RewardError(
                        f"Reward {name!r} returned {key} = {value[bad[0]].item()} for {describe(samples[bad[0]])}."
                    )
                scores[key] = value
        missing = sorted(set(self.weights) - set(scores))
        if missing:
            raise ConfigError(
                f"reward.weights names {missing}, but the rewards {list(self.rewards)} return {sorted(scores)}."
            )
        return scores

    def score_or_mark(self, videos: Tensor, samples: Sequence[Sample]) -> tuple[dict[str, Tensor], Tensor]:
        """As `score`, but a failure marks its sample instead of raising.

        Returns:
            scores: those that could be computed, 0 where a reward failed; a name that failed everywhere is absent.
            failed: (B,) bool, True where a reward failed.
        """
        try:
            return self.score(videos, samples), torch.zeros(len(samples), dtype=torch.bool)
        except RewardError as error:
            logger.warning("%s Its videos are scored one by one; a group with one that fails again is dropped.", error)
        # Again one by one, to find the videos at fault.
        scores: dict[str, Tensor] = {}
        failed = torch.ones(len(samples), dtype=torch.bool)
        for row, sample in enumerate(samples):
            try:
                single = self.score(videos[row : row + 1], [sample])
            except RewardError:
                continue
            failed[row] = False
            for name, value in single.items():
                scores.setdefault(name, torch.zeros(len(samples), dtype=torch.float64))[row] = value[0]
        return scores, failed


def gather_scores(
    scored: Sequence[ScoredBatch], error: str | None, count: int, world: World
) -> tuple[dict[str, Tensor], Tensor]:
    """Exchange the scores of a rollout or an evaluation. Collective; every video is scored on one rank.

    Args:
        scored: batches of this rank. error: why it could not score one.
        count: V, videos on all ranks.

    Returns:
        scores: name -> (V,) float64, 0 where a video failed. failed: (V,) bool.

    Raises:
        RewardError: a reward failed on any rank and was to stop the run, or videos have different scores. The same on
        every rank.
    """
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
        # A batch that failed as a whole has no scores; its groups are dropped, so the zeros are never read.
        if batch.scores and sorted(batch.scores) != names:
            raise RewardError(
                f"The rewards returned the scores {sorted(batch.scores)} for some videos and {names} in all; every "
                "video needs the same ones."
            )
        for name, values in batch.scores.items():
            columns[name][numbers] = values
    return columns, failed


@dataclass(frozen=True)
class FunctionReward:
    """A function f(videos, prompts, **options) as a reward; a tensor it returns is the score called `name`."""

    function: Callable[..., Any]
    name: str
    options: Mapping[str, Any]

    def score(self, videos: Tensor, prompts: Sequence[str]) -> Mapping[str, Tensor]:
        """See `Reward.score`."""
        result = self.function(videos, prompts, **self.options)
        return result if isinstance(result, Mapping) else {self.name: result}


def _lower(name: str, reward: Reward) -> Collection[str]:
    """Names of the scores that a reward declares to be better when lower. ConfigError for a declaration of no names."""
    source = reward.function if isinstance(reward, FunctionReward) else reward
    declared = getattr(source, "LOWER_IS_BETTER", ())
    if isinstance(declared, str) or not all(isinstance(score, str) for score in declared):
        raise ConfigError(
            f"LOWER_IS_BETTER of reward {name!r} is {declared!r}, but it must be a tuple of names of scores, such as "
            '("distance",).'
        )
    return tuple(declared)


def build_reward(name: str, found: Any, options: Mapping[str, Any]) -> Reward:
    """The reward behind an entry of `reward.rewards`.

    Args:
        name: the entry. options: its `reward.options`.
        found: what the entry names. A class is constructed with the options, and an object with a method `score` is
            used as it is. A function whose first two parameters have no default is called as f(videos, prompts,
            **options) for every batch; any other function is called with the options and must return a reward.

    Raises:
        ConfigError: the options do not fit, the reward refuses them or lacks a file, or it is not a reward.
    """
    wanted = (
        "Name a class with score(videos, prompts), a function f(videos, prompts), or a function that returns an object "
        "with such a method."
    )
    if not callable(found) and not hasattr(found, "score"):
        raise ConfigError(f"reward.rewards: {name!r} is of type {type(found).__name__}. {wanted}")
    if hasattr(found, "score") and not inspect.isclass(found):
        if options:
            raise ConfigError(f"reward.options.{name} = {options}, but {name} is an object and takes no options.")
        return found
    try:
        if _is_score_function(found, options):
            inspect.signature(found).bind(None, None, **options)
            return FunctionReward(found, name.rpartition(":")[2].rpartition(".")[2], options)
        reward = found(**options)
    except TypeError as error:
        if missing := _missing(found, options):
            raise ConfigError(
                f"reward.options.{name}.{missing[0]} is not set, and {name} cannot do without it. Write "
                f"--reward.options.{name}.{missing[0]}=VALUE, or the same in the YAML."
            ) from error
        raise ConfigError(f"reward.options.{name} = {options} does not fit {name}: {error}.") from error
    except (ValueError, OSError, ImportError) as error:
        raise ConfigError(f"reward.rewards: {name!r} cannot be set up: {error}") from error
    if not callable(getattr(reward, "score", None)):
        raise ConfigError(
            f"reward.rewards: {name!r} gives a {type(reward).__name__}, which has no method score. {wanted}"
        )
    return reward


def _parameters(found: Any) -> Mapping[str, inspect.Parameter]:
    """Parameters by name; none for an object without a signature, such as some built-in functions."""
    try:
        return inspect.signature(found).parameters
    except (TypeError, ValueError):
        return {}


def _missing(found: Any, options: Mapping[str, Any]) -> list[str]:
    """Parameters without a default that the options do not give; none where an option is unknown besides."""
    parameters = _parameters(found)
    if options.keys() - parameters.keys():
        return []
    plain = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [n for n, p in parameters.items() if p.kind in plain and p.default is p.empty and n not in options]


def _is_score_function(found: Any, options: Mapping[str, Any]) -> bool:
    if inspect.isclass(found):
        return False
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    first = list(_parameters(found).values())[:2]
    return len(first) == 2 and all(
        p.kind in positional and p.default is p.empty and p.name not in options for p in first
    )
