"""Limits that a setting must keep, and how a breach of one is told."""

import math
from collections.abc import Mapping

from sage_fast.config.errors import ConfigError


def require(condition: bool, key: str, value: object, allowed: str) -> None:
    """ConfigError that names the key, what it is and what it must be, unless the condition holds."""
    if not condition:
        raise ConfigError(f"{key} is {value!r}, but it must be {allowed}.")


MOST_INTEGER = 10**6
MOST_NUMBER = 1e9
"""Magnitudes that no setting exceeds, except where `_MOST` says otherwise. Far above any use: they keep typing errors
such as 1e30 from overflowing, or from filling memory, deep inside a run."""

_MOST: dict[str, float] = {
    "seed": 2**63 - 1,
    "evaluation.seed": 2**63 - 1,
    "num_threads": 1024,
    "video.num_frames": 10_000,
    "video.height": 16_384,
    "video.width": 16_384,
    "video.fps": 1000,
    "rollout.num_steps": 10_000,
    "rollout.num_generations": 10_000,
    "rollout.batch_size": 10_000,
    "evaluation.num_steps": 10_000,
    "evaluation.num_frames": 10_000,
    "evaluation.height": 16_384,
    "evaluation.width": 16_384,
    "evaluation.batch_size": 10_000,
    "optimizer.learning_rate": 1e30,  # what a step does to the weights is checked where it is made
    "distributed.startup_timeout_seconds": 30 * 86_400,
    "distributed.timeout_seconds": 30 * 86_400,
    "training.num_updates": 10**9,
    "training.anchor_interval": 10**9,
    "evaluation.every": 10**9,
    "checkpoint.every": 10**9,
}


def check_leaves(value: object, key: str) -> None:
    """Every number is finite and of a magnitude that can be meant; every string can be a path and be printed."""
    if isinstance(value, Mapping):
        for name, part in value.items():
            check_leaves(name, f"a name in {key}")
            check_leaves(part, f"{key}.{name}" if key else name)
    elif isinstance(value, list | tuple):
        for part in value:
            check_leaves(part, key)
    elif isinstance(value, str):
        require("\0" not in value and _is_unicode(value), key, value, "text without NUL and unpaired surrogates")
    elif isinstance(value, int | float) and not isinstance(value, bool):
        require(math.isfinite(value), key, value, "a finite number")
        if not key.startswith("reward.options."):
            most = _MOST.get(key, MOST_INTEGER if isinstance(value, int) else MOST_NUMBER)
            require(abs(value) <= most, key, value, f"at most {most:,}")


def _is_unicode(text: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in text)
