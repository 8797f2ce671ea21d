"""The interface of a reward: its scores, its declared costs and files, and the random
generators that it may use.
"""

import copy
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from sage_fast.config.errors import ConfigError
from sage_fast.config.registry import REGISTERED, REWARDS, outside_names, resolve
from sage_fast.config.sections import RewardConfig, VideoConfig
from sage_fast.models.hub import Requirement
from sage_fast.records import Sample
from sage_fast.rewards.guard import Guard
from sage_fast.rewards.server import RewardSample as RewardSample

OnFailure = Literal["stop", "drop_group"]


class Reward(Protocol):
    """Scores generated videos. Implementations are frozen: they carry no gradient and
    no state between calls.

    A reward may have a method `score_samples(samples)` instead, which gets a list of B
    `RewardSample`s and returns the same. Its attribute `READS` names the fields video,
    latents and picture that it reads; videos are not decoded for rewards that read
    none. With `WHOLE_GROUPS` every call holds all videos of a group, or of several.

        READS: Collection[str] = ("video",)
        WHOLE_GROUPS: bool = False

    What follows is optional. A reward that cannot score every text has a method
    `check_prompts(prompts)` that raises a RewardError; it is shown the prompts that a
    run uses before anything is generated. An attribute `LOWER_IS_BETTER` names those of
    its scores that fall as videos get better, such as a distance: tables, plots and win
    rates follow it.

        LOWER_IS_BETTER: Collection[str]

    For `plan` and `doctor`, which build no reward, its class may have two static
    methods that take `reward.options` of the reward, and the page of `evaluate` shows
    what an attribute `SCALES` says of its scores:

        requirements(options) -> list[Requirement]     files that it loads
        costs(options, video: VideoConfig) -> RewardCosts     memory and time that it takes
        SCALES: Mapping[str, Scale]     name of a score -> its scale
    """

    def score(self, videos: Tensor, prompts: Sequence[str]) -> Mapping[str, Tensor]:
        """Score a batch.

        Args:
            videos: (B, F, 3, H, W) uint8 RGB, on the CPU.
            prompts: B texts.

        Returns:
            name -> (B,) float32, higher is better unless `LOWER_IS_BETTER` names it.
            Names not given a weight in the config are logged only.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class RewardCosts:
    """Memory and time of a reward on its device.

    Attributes:
        weights: bytes of its published weights.
        folder: folder or hub id that holds them; the files that are there count
            instead.
        tables: bytes kept between calls.
        working: bytes alive while it scores.
        seconds: to score one video on a GPU.

    Example: `RewardCosts(weights=4.5e9, folder="models/VideoReward", working=1e9,
    seconds=0.5)`
    """

    weights: float = 0.0
    folder: str | None = None
    tables: float = 0.0
    working: float = 0.0
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Scale:
    """Definition of a score, here and in Table 2 of the SAGE-GRPO paper.

    Attributes:
        here: its definition.
        published: that of the paper's.
        factor: ours times it is the paper's.

    Example: `Scale(here="exp(logit_scale) cos", published="divided by 26", factor=1 /
    26)`
    """

    here: str
    published: str
    factor: float = 1.0


def reward_scales(names: Sequence[str]) -> dict[str, Scale]:
    """The scales of the scores of some rewards, as far as they say and can be imported
    here.
    """
    scales: dict[str, Scale] = {}
    for name in names:
        # it is scored elsewhere, or it could not have scored
        with suppress(ConfigError):
            scales |= getattr(find_reward(name), "SCALES", {})
    return scales


def find_reward(name: str, guard: Guard | None = None) -> Any:
    """The class, function or object behind an entry of `reward.rewards`. ConfigError
    where it names nothing.
    """
    with (guard or Guard(name))("while it was imported", keeps=True):
        return resolve(name, REWARDS, "reward.rewards")


def scored_elsewhere(config: RewardConfig) -> list[str]:
    """Rewards of a config that `reward.url` or `reward.python` scores: those of that
    interpreter have no short name.
    """
    if config.url is not None:
        return config.named
    names = outside_names(config.named, REWARDS) if config.python is not None else []
    return [name for name in names if name not in REGISTERED]


def reward_costs(config: RewardConfig, video: VideoConfig) -> dict[str, RewardCosts]:
    """Declared costs of the rewards of a config; zeros for one that declares none or is
    scored elsewhere. ConfigError as above.
    """
    found = {}
    elsewhere = scored_elsewhere(config)
    for name in config.named:
        found[name] = RewardCosts()
        costs = None if name in elsewhere else getattr(find_reward(name), "costs", None)
        if costs is not None:
            # A copy, which code of others may change.
            options = copy.deepcopy(config.options.get(name, {}))
            with Guard(name)("while it was asked for its costs"):
                found[name] = costs(options, video)
    return found


def reward_requirements(name: str, options: Mapping[str, Any]) -> list[Requirement]:
    """Declared files of a reward with its options; none for one that declares none.
    ConfigError as above.
    """
    requirements = getattr(find_reward(name), "requirements", None)
    if requirements is None:
        return []
    with Guard(name)("while it was asked for its requirements"):
        return list(requirements(copy.deepcopy(options)))


def describe_batch(samples: Sequence[Sample]) -> str:
    """A batch, for a message: prompt and place in its group of the first video, and how
    many more share the batch.
    """
    first = samples[0]
    text = f"prompt {first.prompt.index} ({first.prompt.text!r}), sample {first.member}"
    if len(samples) == 1:
        return text
    if len(samples) == 2:
        return f"{text} or the video scored with it"
    return f"{text} or one of the {len(samples) - 1} videos scored with it"


def resolve_device(name: str) -> torch.device:
    """`auto` is cuda where there is one. ValueError for a device that torch cannot use
    here.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        # torch.device itself takes a GPU that is not there; to use it tells.
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(
            f"device is {name!r}, which torch cannot use here: {error}. Use auto or "
            "cpu."
        ) from error
    return torch.device(name)


def resolve_dtype(name: str, *allowed: str) -> torch.dtype:
    """The data type of that name. ValueError unless it is one of those allowed."""
    if name not in allowed:
        raise ValueError(f"dtype is {name!r}, but it must be {' or '.join(allowed)}.")
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def check_counts(**counts: int | None) -> None:
    """ValueError, naming the option, for a count below 1; None counts everything."""
    for name, count in counts.items():
        if count is not None and count < 1:
            raise ValueError(f"{name} is {count}, but it must be at least 1.")


def check_videos(videos: Tensor, prompts: Sequence[str]) -> None:
    """ValueError unless `videos` is uint8 (B, F, 3, H, W), F >= 1, with one prompt
    each.
    """
    if (
        videos.dtype != torch.uint8
        or videos.ndim != 5
        or videos.shape[2] != 3
        or not videos.shape[1]
    ):
        raise ValueError(
            f"Expected uint8 videos (B, F, 3, H, W), got {videos.dtype} "
            f"{tuple(videos.shape)}."
        )
    if len(videos) != len(prompts):
        raise ValueError(
            f"Got {len(videos)} videos and {len(prompts)} prompts; there must be one "
            "prompt per video."
        )


def seed_generators(seed: int) -> None:
    """Seed Python's, NumPy's and torch's generators, CUDA's included. Only custom
    rewards draw from them.
    """
    random.seed(seed)
    # NumPy takes words of 32 bits, and a seed has up to 63.
    np.random.seed([seed % 2**32, seed >> 32])
    torch.manual_seed(seed)


@contextmanager
def kept_generators() -> Iterator[None]:
    """Give the generators of `seed_generators` back the states that they had before the
    context.
    """
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else []
    own = random.getstate()
    numpy = np.random.get_state()
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        random.setstate(own)
        np.random.set_state(numpy)
