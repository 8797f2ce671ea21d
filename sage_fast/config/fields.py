"""Fields of a configuration: their ranges, and which may differ between a checkpoint's run and the one that goes on.

Each field says so in its metadata; a section's mark covers every key in it. A key without a mark changes what is
trained: it may differ only where the user names it (`--allow-changes`), and the change goes on record.
"""

import hashlib
import json
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, ClassVar, TypeVar, get_args

from sage_fast.config.errors import ConfigError

T = TypeVar("T")

FREE, FIXED = "free_on_resume", "fixed_on_resume"

PLACE = "where files lie; the content of those that are read is compared"
PACE = "how long the run is, and how often it saves, evaluates and reports"
MACHINE = "how much of which machine computes it, and by which equal formula: at most the rounding changes"
REMEDY = "what a message tells the user to change so that the run can go on"

SHAPES = "the checkpoint's weights and optimizer state are made for it"
PAIRS = "the evaluations before and after would no longer be of the same thing"


def free(default: T, reason: str) -> T:
    """A field that may always differ.

    Args:
        reason: why no number of the run depends on it, or why it must be possible all the same.
    """
    return field(default=default, metadata={FREE: reason})  # type: ignore[return-value]


def fixed(default: T, reason: str) -> T:
    """A field that may never differ, not even by `--allow-changes`."""
    return field(default=default, metadata={FIXED: reason})  # type: ignore[return-value]


def marked_keys(config: type, mark: str, prefix: str = "", inherited: str | None = None) -> dict[str, str]:
    """Dotted key -> reason, of all keys of a configuration class that carry a mark (`FREE` or `FIXED`)."""
    marked: dict[str, str] = {}
    for f in fields(config):
        reason = f.metadata.get(mark, inherited)
        if isinstance(f.type, type) and is_dataclass(f.type):
            marked |= marked_keys(f.type, mark, f"{prefix}{f.name}.", reason)
        elif reason is not None:
            marked[prefix + f.name] = reason
    return marked


def digest(values: Any) -> str:
    """SHA-256 of JSON values, the same for the same values: the identity of settings, prompts and the like."""
    return hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()


def require(condition: bool, key: str, value: object, allowed: str) -> None:
    """ConfigError that names the key, what it is and what it must be, unless the condition holds."""
    if not condition:
        raise ConfigError(f"{key} is {value!r}, but it must be {allowed}.")


@dataclass(frozen=True)
class Limit:
    """Range of a number, as metadata of its type.

    above: `least` itself is excluded. below: `most` itself is.

    Example: `Annotated[float, Limit(0, 1, above=True)]` is a number in (0, 1].
    """

    least: float
    most: float
    above: bool = False
    below: bool = False

    def __str__(self) -> str:
        lower = f"{'more than' if self.above else 'at least'} {self.least:,}"
        return f"{lower} and {'less than' if self.below else 'at most'} {self.most:,}"

    def holds(self, value: float) -> bool:
        """True for a number in the range; False for a NaN."""
        inside = self.least <= value <= self.most
        return inside and not (self.above and value == self.least) and not (self.below and value == self.most)


class Section:
    """Base of the sections: numbers are checked against the ranges in their types when one is made."""

    KEY: ClassVar[str]
    """Dotted key of the section."""

    def __init_subclass__(cls, key: str) -> None:
        cls.KEY = key

    def __post_init__(self) -> None:
        for f in fields(self):  # type: ignore[arg-type]  # every subclass is a dataclass
            value = getattr(self, f.name)
            for limit in _limits(f.type):
                for number in value if isinstance(value, list | tuple) else [value]:
                    if isinstance(number, int | float):
                        require(limit.holds(number), f"{self.KEY}.{f.name}", value, str(limit))


def _limits(kind: Any) -> list[Limit]:
    """Ranges in a type, in those of a union and of a tuple too."""
    inner = [limit for part in get_args(kind) if not isinstance(part, str) for limit in _limits(part)]
    return inner + [part for part in getattr(kind, "__metadata__", ()) if isinstance(part, Limit)]
