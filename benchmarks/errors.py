"""How far a measurement's numbers are from what they should be; what is too far is not
timed.
"""

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor

ALLOWED = 1.25
"""Error of a contender over that of diffusers in the same type (P2), both against
float64.
"""
SANE = 0.05
"""Error that P2 itself may have."""
WORST = 1e9
"""An error that is not finite, as a number that JSON has."""


def relative_error(given: Tensor, exact: Tensor) -> float:
    """Root mean square of the difference over that of the exact values; `WORST` where
    it is not finite.
    """
    error = float((given.double() - exact.double()).norm() / exact.double().norm())
    return error if math.isfinite(error) else WORST


def pooled_error(
    given: Mapping[str, Tensor | None], exact: Mapping[str, Tensor]
) -> float:
    """Root mean square of the relative errors of all tensors; `WORST` where one is
    missing.
    """
    pairs = [(given.get(name), oracle) for name, oracle in exact.items()]
    squares = [
        WORST**2 if g is None else relative_error(g, e.to(g.device)) ** 2
        for g, e in pairs
    ]
    return min(WORST, math.sqrt(sum(squares) / len(squares)))


def verdict(
    errors: Mapping[str, float], bounds: Mapping[str, float] | float
) -> dict[str, Any]:
    """{"errors", "bounds", "passed"} of a parity check.

    Args:
        bounds: by name of the error, or one for all.
    """
    limits = bounds if isinstance(bounds, Mapping) else dict.fromkeys(errors, bounds)
    passed = all(error <= limits[name] for name, error in errors.items())
    return {"errors": dict(errors), "bounds": dict(limits), "passed": passed}
