"""The rewards of a run as one: every configured reward is called, every score is checked, none is made up."""

import inspect
import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor

from sage_fast.config.errors import ConfigError, RewardError
from sage_fast.config.training_sections import RewardConfig
from sage_fast.records import Sample
from sage_fast.rewards.base import OnFailure, Reward, ScoredBatch, Scorer, describe, describe_batch, find_reward

logger = logging.getLogger(__name__)


class _ExitCall(BaseException):
    """Raised in place of `os._exit`, past the `except Exception` of a reward."""


@contextmanager
def _reward_code(name: str, when: str, refusals: tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """Within the context runs code of reward `name`. Whatever it raises becomes a RewardError that says so and `when`.

    That includes the attempt to end the process: a reward that calls `sys.exit(0)` or `os._exit(0)` would end the run
    as if it had succeeded. An interrupt stays an interrupt, and `refusals` pass as they are.
    """
    exit_process = os._exit
    caller = os.getpid(), threading.get_ident()

    def refuse_exit(status: int) -> NoReturn:
        # Forked children of a reward end this way, and so do threads that watch over this process.
        if (os.getpid(), threading.get_ident()) == caller:
            raise _ExitCall(status)
        exit_process(status)

    os._exit = refuse_exit
    try:
        yield
    except refusals:
        raise
    except KeyboardInterrupt:
        raise
    except _ExitCall as call:
        raise RewardError(f"Reward {name!r} tried to end the process by os._exit({call}) {when}.") from call
    except SystemExit as call:
        raise RewardError(f"Reward {name!r} tried to end the process by sys.exit({call.code!r}) {when}.") from call
    except BaseException as error:
        raise RewardError(f"Reward {name!r} raised {type(error).__name__}: {error} {when}.") from error
    finally:
        os._exit = exit_process


class CompositeReward(Scorer):
    """Calls several rewards on the same videos, in this process, and collects their named scores."""

    def __init__(self, rewards: Mapping[str, Reward], weights: Mapping[str, float]) -> None:
        super().__init__(weights, [score for name, reward in rewards.items() for score in _lower(name, reward)])
        self.rewards = dict(rewards)

    @classmethod
    def from_config(
        cls, config: RewardConfig, prompts: Sequence[str] = (), defaults: Mapping[str, Any] | None = None
    ) -> "CompositeReward":
        """Build every reward of a config, and show it the prompts if it has a method `check_prompts`.

        Args:
            config: which rewards.
            prompts: texts that they will be asked about.
            defaults: values for options `device` and `fps` that neither `reward.device` nor `reward.options` give, for
                rewards that have them.

        Raises:
            ConfigError: names the reward whose options do not fit, or the prompt that it refuses, and why.
            RewardError: a reward failed in any other way while it was set up.
        """
        defaults = defaults or {}
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

    def submit(self, videos: Tensor, samples: Sequence[Sample], on_failure: OnFailure = "stop") -> "Scored":
        """Score one batch now; see `Scorer.submit`."""
        start = time.perf_counter()
        if on_failure == "stop":
            scores, failed = self.score(videos, samples), torch.zeros(len(samples), dtype=torch.bool)
        else:
            scores, failed = self.score_or_mark(videos, samples)
        return Scored(ScoredBatch(scores=scores, failed=failed, seconds=time.perf_counter() - start))

    def close(self) -> None:
        """Nothing to release."""

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


@dataclass(frozen=True)
class Scored:
    """`PendingScores` that are known already."""

    batch: ScoredBatch

    def result(self) -> ScoredBatch:
        """The scores."""
        return self.batch


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
