"""What settles a claim that no two arms settle alone: over steps and schedules, at equal exploration, against a law.

Each function gets findings that are all there, or raises KeyError.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise

from sage_fast.study.claims import Evidence
from sage_fast.study.findings import Findings
from sage_fast.tools.effects import seed_effect

REFERENCE = "T=20, eta=0.5"
"""The reference's rollout, in the names of the arms of Figure 2."""


def below_flow(first: bool) -> Callable[[Findings], Evidence]:
    """Whether SAGE's noise is below FlowGRPO's at the first step, or at all others, for every number of steps."""

    def measure(findings: Findings) -> Evidence:
        steps: list[tuple[str, float, float]] = []
        for arm in findings.arms("table1", "std"):
            name, _, count = arm.partition(", ")
            if name == "sage_grpo":
                (ours,), (theirs,) = (findings.select("table1", "std", f"{n}, {count}") for n in (name, "flow_grpo"))
                chosen = slice(0, 1) if first else slice(1, None)
                steps += [(count, *pair) for pair in zip(ours.parts[chosen], theirs.parts[chosen], strict=True)]
        if not steps:
            raise KeyError("table1")
        below = sum(one < other for _, one, other in steps)
        text = "; ".join(f"{count}: {one:.2f} and {other:.2f}" for count, one, other in steps)
        return Evidence(ours=text if first else f"at {below} of {len(steps)} steps", holds=below == len(steps))

    return measure


def last_smallest(findings: Findings) -> Evidence:
    """Whether the noise of the last step grows from SAGE over FlowGRPO to DanceGRPO."""
    rows = [
        [findings.mean("table1", "last", f"{name}, T=20") for name in ("sage_grpo", "flow_grpo", "dance_grpo")],
        [findings.mean("table1", "last", f"{name}, T=100") for name in ("sage_grpo", "flow_grpo", "dance_grpo")],
    ]
    text = "; ".join(f"T = {t}: {a:.3f}, {b:.3f}, {c:.3f}" for t, (a, b, c) in zip((20, 100), rows, strict=True))
    return Evidence(ours=text, holds=all(a < b < c for a, b, c in rows))


def spread_over(experiment: str, prefix: str) -> Callable[[Findings], Evidence]:
    """Whether the noise of the high-noise region varies less for SAGE than for FlowGRPO over a schedule setting."""

    def measure(findings: Findings) -> Evidence:
        ratios = []
        for name in ("sage_grpo", "flow_grpo"):
            arms = [a for a in findings.arms(experiment, "high_noise_variance") if a.startswith(f"{name}, {prefix}")]
            values = [findings.mean(experiment, "high_noise_variance", arm) for arm in arms]
            if not values:
                raise KeyError(experiment)
            ratios.append((max(values) / min(values), min(values), max(values)))
        (sage, low, high), (flow, flow_low, flow_high) = ratios
        text = f"{low:.2f} to {high:.2f} and {flow_low:.2f} to {flow_high:.2f}"
        return Evidence(ours=text, holds=sage < flow)

    return measure


def steadier(findings: Findings) -> Evidence:
    """Whether SAGE's largest step is fewer times its smallest than FlowGRPO's and DanceGRPO's."""
    ratios = []
    for name in ("sage_grpo", "flow_grpo", "dance_grpo"):
        rows = findings.select("fig1a", "std", name)
        if not rows:
            raise KeyError("fig1a")
        ratios.append(max(rows[0].parts) / min(rows[0].parts))
    return Evidence(ours=", ".join(f"{ratio:.1f}" for ratio in ratios), holds=ratios[0] < min(ratios[1:]))


def less_in_high_noise(findings: Findings) -> Evidence:
    """Whether SAGE adds less variance than FlowGRPO from sigma 0.9 up."""
    values = [findings.mean("fig1a", "high_noise_variance", name) for name in ("sage_grpo", "flow_grpo")]
    return Evidence(ours=f"{values[0]:.3f} and {values[1]:.3f}", holds=values[0] < values[1])


def margin_decides(findings: Findings) -> Evidence:
    """Whether the variance of the first step changes more than tenfold over the margins."""
    arms = [arm for arm in findings.arms("fig9", "first") if "margin=" in arm]
    variances = [findings.mean("fig9", "first", arm) ** 2 for arm in arms]
    if not variances:
        raise KeyError("fig9")
    text = ", ".join(f"{v:.2g} ({arm.partition('=')[2]})" for v, arm in zip(variances, arms, strict=True))
    return Evidence(ours=text, holds=max(variances) > 10 * min(variances))


def nearer_at_equal_exploration(findings: Findings) -> Evidence:
    """FlowGRPO's distance, interpolated over eta to where it explores as much as SAGE, minus SAGE's."""
    seeds = findings.seeds("fig2")
    ours, theirs = [], []
    for seed in seeds:
        points = sorted(
            (
                findings.by_seed("fig2", "exploration", arm)[seed].value,
                findings.by_seed("fig2", "distance", arm)[seed].value,
            )
            for arm in findings.arms("fig2", "distance")
            if arm.startswith("flow_grpo, T=20")
        )
        wanted = findings.by_seed("fig2", "exploration", f"sage_grpo, {REFERENCE}")[seed].value
        ours.append(findings.by_seed("fig2", "distance", f"sage_grpo, {REFERENCE}")[seed].value)
        theirs.append(_interpolate(points, wanted))
    if len(seeds) < 2:
        raise KeyError("fig2")
    effect = seed_effect([b - a for a, b in zip(ours, theirs, strict=True)])
    return Evidence(ours=f"{sum(ours) / len(ours):.4f} and {sum(theirs) / len(theirs):.4f}", effect=effect)


def _interpolate(points: Sequence[tuple[float, float]], x: float) -> float:
    """The y at an x between points that ascend in x; that of the nearest end outside of them."""
    for (x0, y0), (x1, y1) in pairwise(points):
        if x0 <= x <= x1:
            return y0 if x1 == x0 else y0 + (y1 - y0) * (x - x0) / (x1 - x0)
    return points[0][1] if x < points[0][0] else points[-1][1]


def slope_is_one(findings: Findings) -> Evidence:
    """Positive as far as the slope lies inside 1 +- 0.25."""
    values = [row.value for row in findings.select("fig4", "slope", "sage_grpo, plain")]
    if len(values) < 2:
        raise KeyError("fig4")
    effect = seed_effect([0.25 - abs(value - 1) for value in values])
    return Evidence(ours=f"slope {sum(values) / len(values):.2f}", effect=effect)
