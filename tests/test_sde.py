"""Noise levels, transition tables and the plain transition; golden values are in
tests/invariants/test_golden_transitions.py.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise, product

import pytest
import torch
from torch import Tensor

from sage_fast.config.sections import RolloutConfig, SDEWindowConfig
from sage_fast.records import Prompt, PromptEmbeds, Sample
from sage_fast.rollout import noise_keys, rollout_table, sample_trajectory
from sage_fast.sde import (
    SDE_TYPES,
    TransitionTable,
    sigma_schedule,
    table_of_variance,
    transition_table,
)

NOISY = tuple(sde_type for sde_type in SDE_TYPES if sde_type != "ode")


# Noise levels


@pytest.mark.parametrize(
    ("num_steps", "shift"), [(1, 5.0), (2, 0.2), (20, 17.3), (1000, 1.0)]
)
def test_schedule_falls_from_exactly_one_to_exactly_zero(
    num_steps: int, shift: float
) -> None:
    sigmas = sigma_schedule(num_steps=num_steps, shift=shift)
    assert sigmas.dtype == torch.float64 and sigmas.shape == (num_steps + 1,)
    assert float(sigmas[0]) == 1 and float(sigmas[-1]) == 0
    assert bool((sigmas.diff() < 0).all())


def test_schedule_by_hand() -> None:
    # t = 3/4, 1/2, 1/4 with shift 5: 3.75/4, 2.5/3, 1.25/2.
    assert sigma_schedule(4, 5.0).tolist() == pytest.approx(
        [1, 0.9375, 2.5 / 3, 0.625, 0], abs=1e-15
    )


# Tables


@pytest.mark.parametrize("sde_type", SDE_TYPES)
def test_no_table_holds_anything_but_finite_numbers(sde_type: str) -> None:
    for shift, num_steps, eta in product(
        (0.1, 1.0, 5.0, 7.0, 100.0), (1, 2, 20, 50, 333), (0.0, 1e-12, 0.01, 0.5, 1.0)
    ):
        table = transition_table(sde_type, sigma_schedule(num_steps, shift), eta)
        for column in (table.a, table.b, table.std, table.gain, table.scale):
            assert column.dtype == torch.float64 and column.shape == (num_steps,)
            assert bool(torch.isfinite(column).all())
        assert bool((table.b < 0).all())
        assert torch.equal(table.trainable, table.std > 0)
        still = ~table.trainable
        assert bool((table.a[still] == 1).all())
        assert torch.equal(table.b[still], table.sigmas.diff()[still])
        assert not bool(table.gain[still].any()) and not bool(table.scale[still].any())
        assert eta > 0 or bool(still.all())
        asked_for_noise = sde_type != "ode" and eta > 0
        assert table.degenerate == (
            tuple(still.nonzero()[:, 0].tolist()) if asked_for_noise else ()
        )
        if bool(table.trainable.any()):
            gain = table.gain[table.trainable].abs()
            scale = table.scale[table.trainable]
            torch.testing.assert_close(
                gain * scale, torch.median(gain).expand_as(gain), rtol=1e-12, atol=0
            )


def test_sage_variance_is_exact_near_zero_noise() -> None:
    """For small sigma the integral of sigma / (1 - sigma) is (s^2 - n^2)/2 + (s^3 -
    n^3)/3 + ...
    """
    s = 2e-6
    n = 1e-6
    table = transition_table(
        "sage_grpo", torch.tensor([s, n], dtype=torch.float64), 1.0
    )
    series = (s**2 - n**2) / 2 + (s**3 - n**3) / 3 + (s**4 - n**4) / 4
    assert float(table.std[0]) ** 2 == pytest.approx(series, rel=1e-9, abs=0)


def test_sage_exact_is_the_ornstein_uhlenbeck_step_of_sages_noise_rate() -> None:
    """rho and std from the rate eta^2 sigma / (1 - sigma), integrated numerically; the
    mean from x0 and z by hand.
    """
    eta = 0.7
    s = 0.8
    n = 0.55
    levels = torch.linspace(n, s, 200_001, dtype=torch.float64)
    pull = eta**2 * levels / (1 - levels) / (2 * levels**2)
    rho = math.exp(-float(torch.trapezoid(pull, levels)))
    table = transition_table(
        "sage_exact", torch.tensor([s, n], dtype=torch.float64), eta
    )
    assert float(table.std[0]) == pytest.approx(n * math.sqrt(1 - rho**2), rel=1e-9)
    data = 0.3
    noise = -1.7
    x = (1 - s) * data + s * noise
    v = noise - data
    assert float(table.a[0] * x + table.b[0] * v) == pytest.approx(
        (1 - n) * data + n * rho * noise, rel=1e-9
    )


def test_sage_exact_forgets_the_noise_at_both_ends() -> None:
    """rho = 0 at sigma = 1, where all noise is redrawn, and at 0, where none is left:
    x' is the estimated data.
    """
    table = transition_table("sage_exact", sigma_schedule(20, 5.0), 0.5)
    n = float(table.sigmas[1])
    assert float(table.std[0]) == n and [
        float(table.a[0]),
        float(table.b[0]),
    ] == pytest.approx([1 - n, n - 1], abs=0)
    assert float(table.std[-1]) == 0
    assert [float(table.a[-1]), float(table.b[-1])] == [1, -float(table.sigmas[-2])]


def test_the_margin_of_sage_moves_its_first_step_only() -> None:
    sigmas = sigma_schedule(20, 5.0)
    variances = [
        transition_table("sage_grpo", sigmas, 0.5, sage_margin=m).std ** 2
        for m in (1e-3, 3e-3, 1e-2)
    ]
    assert [round(float(v[0]), 3) for v in variances] == [0.583, 0.309, 0.008]
    assert float(variances[1][0] / variances[1].sum()) == pytest.approx(0.26, abs=0.005)
    assert torch.equal(variances[0][1:], variances[2][1:])
    assert torch.equal(
        transition_table("sage_grpo", sigmas, 0.5).std ** 2, variances[1]
    )


GOLDEN_WAN = [
    (0, 1919 / 2000, -1 / 10, math.sqrt(81 / 1000)),
    (1, 37813 / 40000, -62187 / 400000, math.sqrt(19683 / 200000)),
    (2, 2957 / 3200, -3443 / 12800, 27 / 80),
    (3, 719 / 800, -881 / 1600, math.sqrt(81 / 800)),
]
"""(step, a, b, std) at the levels 1, 9/10, 3/4, 1/2 and 0, by hand with fractions. The
function itself, `sde_step_with_logprob` of flow_grpo/diffusers_patch/
wan_pipeline_with_logprob.py, gave the same means and log-probabilities as ours to 3e-7
and 3e-6 in its float32, at 6, 14 and 20 steps with shifts 3 and 5.
"""


@pytest.mark.parametrize(("step", "a", "b", "std"), GOLDEN_WAN)
def test_flow_grpo_wan_is_the_step_of_flow_grpos_code_for_wan(
    step: int, a: float, b: float, std: float
) -> None:
    """Its standard deviation per root of the step is the second level times sigma. It
    has no noise level, so eta is a factor.
    """
    sigmas = sigma_schedule(4, 3.0)
    table = transition_table("flow_grpo_wan", sigmas, 1.0)
    found = [float(column[step]) for column in (table.a, table.b, table.std)]
    assert found == pytest.approx([a, b, std], rel=1e-12)
    half = transition_table("flow_grpo_wan", sigmas, 0.5)
    assert float(half.std[step]) == pytest.approx(std / 2, rel=1e-12)
    # It runs from the last level, which may lie above 0, to the second one.
    early = transition_table("flow_grpo_wan", sigmas[:4], 1.0)
    rate = 0.5 + (0.9 - 0.5) * sigmas[:3]
    torch.testing.assert_close(early.std, rate * (-sigmas[:4].diff()).sqrt())


@pytest.mark.parametrize("sde_type", NOISY)
def test_restrict_keeps_the_window_and_makes_the_rest_ode(sde_type: str) -> None:
    full = transition_table(sde_type, sigma_schedule(12, 5.0), 0.5)
    window = full.restrict([4, 2, 4, 11])
    kept = torch.zeros(12, dtype=torch.bool)
    kept[[2, 4, 11]] = True
    kept &= full.trainable
    assert torch.equal(window.trainable, kept)
    for name in ("a", "b", "std", "gain", "scale"):
        assert torch.equal(getattr(window, name)[kept], getattr(full, name)[kept])
    assert bool((window.a[~kept] == 1).all())
    assert torch.equal(window.b[~kept], full.sigmas.diff()[~kept])
    assert not bool(
        window.std[~kept].any() or window.gain[~kept].any() or window.scale[~kept].any()
    )
    assert window.degenerate == full.degenerate
    assert not bool(full.restrict([]).trainable.any())


def flow_error(num_steps: int, table: Callable[[Tensor], TransitionTable]) -> float:
    """Error of a sampler at data ~ N(m, d^2) in one dimension, whose flow is known: x
    keeps its distance from the mean in units of the standard deviation.
    """
    mean, deviation = 0.7, 0.4
    start = torch.tensor([-1.5, 0.2, 1.1], dtype=torch.float64).view(3, 1, 1, 1, 1)

    def velocity(step: int, x: Tensor, sigma: Tensor) -> Tensor:
        s = sigma.double().view(-1, 1, 1, 1, 1)
        variance = (1 - s).square() * deviation**2 + s.square()
        slope = (s - (1 - s) * deviation**2) / variance
        return slope * (x - (1 - s) * mean) - mean

    prompt = Prompt(text="", index=0)
    empty = PromptEmbeds(text=torch.zeros(1, 1), glyph=torch.zeros(0, 1))
    samples = [
        Sample(prompt=prompt, embeds=empty, member=member, group=0)
        for member in range(3)
    ]
    found = sample_trajectory(
        velocity,
        samples,
        noise_keys(samples, 0, 0),
        table(sigma_schedule(num_steps, 3.0)),
        start,
    )
    return float((found.final - (mean + deviation * start)).abs().max())


def test_second_order_steps_follow_the_flow_more_closely() -> None:
    """Twice the steps leave half of Euler's error, and less than a quarter of theirs."""

    def euler(sigmas: Tensor) -> TransitionTable:
        return transition_table("ode", sigmas, 0.0)

    def second(sigmas: Tensor) -> TransitionTable:
        return euler(sigmas).second_order()

    errors = {n: (flow_error(n, euler), flow_error(n, second)) for n in (6, 8, 64, 128)}
    halved = [wide / fine for wide, fine in zip(errors[64], errors[128], strict=True)]
    assert halved[0] == pytest.approx(2, rel=0.05)
    assert halved[1] > 4
    assert errors[6][1] < errors[8][0]


@pytest.mark.parametrize("window", [[], [0], [3], [2, 3], [5], [1, 4]])
def test_second_order_steps_keep_away_from_noise(window: list[int]) -> None:
    sigmas = sigma_schedule(6, 5.0)
    table = transition_table("dance_grpo", sigmas, 0.5).restrict(window)
    second = table.second_order()
    assert second.extrapolation is not None
    noisy = set(window)
    for step, led in enumerate(second.extrapolation.tolist()):
        if step == 0 or {step, step - 1} & noisy:
            assert led == 0.0
        else:
            now, before = -sigmas.diff()[[step, step - 1]]
            assert led == pytest.approx(float(now / before) / 2)
    for name in ("a", "b", "std", "gain", "scale", "trainable", "sigmas"):
        assert torch.equal(getattr(second, name), getattr(table, name))


def test_a_rollout_is_of_the_order_that_it_is_given() -> None:
    window = SDEWindowConfig(size=2)
    config = RolloutConfig(num_steps=6, shift=5.0, sde_window=window, solver_order=2)
    first = rollout_table(replace(config, solver_order=1), 1)
    table = rollout_table(config, 1)
    assert first.extrapolation is None and table.extrapolation is not None
    assert torch.equal(table.trainable, first.trainable)
    assert table.extrapolation.nonzero().flatten().tolist() == [4, 5]


def test_cps_has_an_angle_of_at_most_a_quarter_turn() -> None:
    with pytest.raises(ValueError, match=r"eta is 1\.2.*between 0 and 1"):
        transition_table("cps", sigma_schedule(4, 5.0), 1.2)


@pytest.mark.parametrize("wrong", ["infinite", "not a number", "one too many"])
def test_variances_of_an_own_sampler_are_one_finite_number_per_step(wrong: str) -> None:
    sigmas = sigma_schedule(4, 3.0)
    variance = {
        # FlowGRPO's without its care for the first level
        "infinite": -sigmas.diff() / (1 - sigmas[:-1]),
        "not a number": torch.tensor([0.1, math.nan, 0.1, 0.1]).double(),
        "one too many": sigmas,
    }[wrong]
    with pytest.raises(ValueError, match=r"rollout.sde_type my:noise .* 4 steps"):
        table_of_variance("my:noise", sigmas, 0.5, variance)


# Marginals. For data N(mu, s0^2) the perfect velocity is affine in x, so the mean and
# the variance of a rollout follow exactly from the table.

MU = 1.0


def velocity_slope(sigma: float, spread: float) -> float:
    """k in  v(x, sigma) = -mu + k (x - (1 - sigma) mu),  the mean of z - x0 given x."""
    return (sigma - (1 - sigma) * spread**2) / target_variance(sigma, spread)


def target_variance(sigma: float, spread: float) -> float:
    return (1 - sigma) ** 2 * spread**2 + sigma**2


def propagate(table: TransitionTable, spread: float) -> tuple[list[float], list[float]]:
    """Mean and variance of x after every step of a rollout that starts from N(0, 1)."""
    mean = 0.0
    variance = 1.0
    means = []
    variances = []
    columns = (table.a, table.b, table.std, table.sigmas[:-1])
    for a, b, std, sigma in zip(*(column.tolist() for column in columns), strict=True):
        slope = velocity_slope(sigma, spread)
        mean = a * mean + b * (-MU + slope * (mean - (1 - sigma) * MU))
        variance = (a + b * slope) ** 2 * variance + std**2
        means.append(mean)
        variances.append(variance)
    return means, variances


def variance_errors(
    sde_type: str, num_steps: int, spread: float, eta: float = 0.5
) -> list[float]:
    """variance / target - 1 after every step."""
    table = transition_table(sde_type, sigma_schedule(num_steps, 5.0), eta)
    targets = [target_variance(sigma, spread) for sigma in table.sigmas[1:].tolist()]
    return [
        v / target - 1
        for v, target in zip(propagate(table, spread)[1], targets, strict=True)
    ]


@pytest.mark.parametrize("num_steps", [10, 100])
@pytest.mark.parametrize("sde_type", SDE_TYPES)
def test_every_sampler_keeps_the_mean_exactly(sde_type: str, num_steps: int) -> None:
    table = transition_table(sde_type, sigma_schedule(num_steps, 5.0), 0.5)
    means, _ = propagate(table, 0.5)
    assert means == pytest.approx(
        [(1 - sigma) * MU for sigma in table.sigmas[1:].tolist()], abs=1e-13
    )


@pytest.mark.parametrize(
    "sde_type", ["sage_grpo", "sage_exact", "dance_grpo", "flow_grpo_wan", "ode"]
)
def test_the_variance_converges_along_the_whole_way(sde_type: str) -> None:
    """First order: twice the steps, half the largest error on the way."""
    largest = [
        max(map(abs, variance_errors(sde_type, n, 0.5))) for n in (100, 200, 400, 800)
    ]
    for coarse, fine in pairwise(largest):
        assert coarse / fine == pytest.approx(2, abs=0.15)
    assert largest[-1] < (0.014 if sde_type == "sage_exact" else 0.012)


def _row(sde_type: str, values: list[str]) -> str:
    return f"| `{sde_type}` | " + " | ".join(values) + " |"


def leftover(sde_type: str, num_steps: int) -> float:
    """Standard deviation of the noise that the last step leaves in the sample."""
    return float(
        transition_table(sde_type, sigma_schedule(num_steps, 5.0), 0.5).std[-1]
    )


def dispersion(sde_type: str, num_steps: int, spread: float) -> float:
    """Variance of the last step's mean over that of the data, less 1: what is left
    without the last step's noise.
    """
    return (
        variance_errors(sde_type, num_steps, spread)[-1]
        - (leftover(sde_type, num_steps) / spread) ** 2
    )


def leftover_rows() -> list[str]:
    """The rows of the table of leftover noise in docs/algorithm.md."""
    return [
        _row(sde, [f"{leftover(sde, n):.3f}" for n in (10, 20, 50, 100)])
        for sde in SDE_TYPES
    ]


def dispersion_rows(spread: float) -> list[str]:
    """The rows of the tables of dispersion in docs/algorithm.md."""
    return [
        _row(
            sde,
            [f"{100 * dispersion(sde, n, spread):+.1f} %" for n in (10, 20, 50, 100)],
        )
        for sde in SDE_TYPES
    ]
