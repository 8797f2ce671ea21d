"""Configuration keys that may differ between the run that saved a checkpoint and the one that goes on from it.

Each field says so itself, in its metadata; a section's mark covers every key in it. A key without a mark changes what
is trained: it may differ only where the user names it (`--allow-changes`), and the change goes on record.
"""

import hashlib
import json
from dataclasses import field, fields, is_dataclass
from typing import Any, TypeVar

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
