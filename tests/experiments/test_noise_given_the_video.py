"""The mean of a step's noise, given its state and the finished video: gain (u - v), or
another.

With u = (x_t - x0) / sigma, GRPO's gradient could take gain (u - v) in the place of the
noise that was drawn. For every reward its expectation stays what it is only if that is
the noise's mean given x_t and x0: if x0 given x_t has the law of data given their
noised version. A sampler that keeps the law of x_t does not thereby have that of the
pair. It forgets x_t at the pace of its own noise: `sage_exact` as linear noising does
at eta = sqrt(2) alone, with many steps.

Nothing here is drawn: Gaussian data by moments, three atoms on a line by integrals over
a grid.
"""

import math

import pytest
import torch
from torch import Tensor

from experiments.exact_policy import ExactPolicy
from sage_fast.sde import TransitionTable, sigma_schedule, transition_table
from tests.experiments.test_testbed import LINE

LIKE_NOISING = math.sqrt(2)
SPREAD = 0.8

CAPTION = torch.tensor([[1]])
GRID = torch.linspace(-5, 5, 251, dtype=torch.float64)


def of_gaussian(
    sampler: str, eta: float, num_steps: int
) -> tuple[TransitionTable, Tensor, Tensor]:
    """For each step with noise: its gradient with gain (u - v) over that with the drawn
    noise, for a reward that is linear in the video and a velocity that is trained by a
    constant; and the coefficient of the noise on gain (u - v).
    """
    policy = ExactPolicy(torch.zeros(1, 1, dtype=torch.float64), spread=SPREAD)
    table = transition_table(sampler, sigma_schedule(num_steps, 3.0), eta)
    one = torch.ones(num_steps, 1, dtype=torch.float64)
    slope = policy.velocity(0, one, table.sigmas[:-1])[:, 0]
    factor = table.a + table.b * slope
    # The share of a state at step i that is left in the video.
    kept = [torch.ones((), dtype=torch.float64)]
    for one_factor in factor.flip(0):
        kept.insert(0, one_factor * kept[0])
    variances = [torch.ones((), dtype=torch.float64)]
    for one_factor, std in zip(factor, table.std, strict=True):
        variances.append(one_factor.square() * variances[-1] + std.square())
    left = torch.stack(kept)
    variance = torch.stack(variances)
    final = variances[-1]
    sigma = table.sigmas[:-1]
    with_noise = table.std * left[1:]
    # u - v = (1 / sigma - slope) x_t - x0 / sigma
    own = 1 / sigma - slope
    with_video = own * left[:-1] * variance[:-1] - final / sigma
    squared = (
        own.square() * variance[:-1]
        - 2 * own / sigma * left[:-1] * variance[:-1]
        + final / sigma.square()
    )
    coefficient = table.gain * with_video / with_noise
    return table, coefficient, -with_noise / sigma / (table.gain * squared)


def in_the_limit(eta: float, sigma: Tensor) -> tuple[Tensor, Tensor]:
    """The limit of `of_gaussian` with many steps of a sampler whose noise has the rate
    eta^2 sigma / (1 - sigma).

    noised: correlation of the data with their noised version; sampled: that of the
    video with the state it came from.
    """
    noised = (
        (1 - sigma)
        * SPREAD
        / ((1 - sigma).square() * SPREAD**2 + sigma.square()).sqrt()
    )
    sampled = noised ** (eta**2 / 2)
    rate = (1 + eta**2 / 2) / eta**2
    own = 1 - noised.square()
    coefficient = rate * noised / sampled * (1 - sampled * noised) / own
    return coefficient, sampled / noised * own / (
        1 - 2 * sampled * noised + noised.square()
    ) / rate


@pytest.mark.parametrize("sampler", ["sage_exact", "sage_grpo"])
@pytest.mark.parametrize("eta", [0.5, LIKE_NOISING])
def test_gaussian_data_have_the_ratio_of_the_closed_form(
    sampler: str, eta: float
) -> None:
    num_steps = 4000
    table, *found = of_gaussian(sampler, eta, num_steps)
    inner = [num_steps * part // 8 for part in range(1, 8)]
    for measured, limit in zip(
        found, in_the_limit(eta, table.sigmas[inner]), strict=True
    ):
        torch.testing.assert_close(measured[inner], limit, rtol=0.01, atol=0)
        if eta == LIKE_NOISING:
            torch.testing.assert_close(limit, torch.ones_like(limit))


def of_line(
    sampler: str, eta: float, num_steps: int
) -> dict[float, tuple[Tensor, Tensor]]:
    """Gradients with respect to the numbers of LINE by noise level: with the drawn
    noise, and with gain (u - v).
    """
    table = transition_table(sampler, sigma_schedule(num_steps, 3.0), eta)
    psi = LINE.initial()

    def velocity(numbers: Tensor, sigma: Tensor) -> Tensor:
        asked = CAPTION.expand(len(GRID), 1)
        return LINE.velocity_at(numbers, asked, GRID[:, None], sigma.expand(len(GRID)))[
            :, 0
        ]

    steps = [step for step in range(num_steps) if table.trainable[step]]
    velocities = [velocity(psi, sigma) for sigma in table.sigmas[:-1]]
    means = [
        table.a[step] * GRID + table.b[step] * velocities[step]
        for step in range(num_steps)
    ]

    def moved(step: int) -> tuple[Tensor, Tensor]:
        """Probabilities of the grid's points after a step from each of them, and the
        noise that leads there.
        """
        noise = (GRID - means[step][:, None]) / table.std[step]
        weights = (-0.5 * noise.square()).exp()
        return weights / weights.sum(1, keepdim=True), noise

    mass = [(-0.5 * GRID.square()).exp()]
    mass[0] /= mass[0].sum()
    for step in steps:
        mass.append(mass[-1] @ moved(step)[0])
    final = GRID if table.trainable[-1] else means[-1]
    worth = torch.tanh(2 * final) + 0.3 * final
    worth = worth - mass[-1] @ worth
    value = torch.stack([worth, worth * final], 1)
    found = {}
    for step in reversed(steps):
        chances, noise = moved(step)
        with_noise = (chances * noise) @ value[:, 0]
        value = chances @ value
        sigma = table.sigmas[step]
        gain = table.gain[step]
        with_video = gain * (
            (GRID / sigma - velocities[step]) * value[:, 0] - value[:, 1] / sigma
        )
        slope = torch.func.jacfwd(
            lambda numbers, sigma=sigma: velocity(numbers, sigma)
        )(psi)
        found[float(sigma)] = (
            (gain * mass[step] * with_noise) @ slope,
            (gain * mass[step] * with_video) @ slope,
        )
    return found


def at(
    found: dict[float, tuple[Tensor, Tensor]], sigma: float
) -> tuple[Tensor, Tensor]:
    """The pair of gradients at the noise level nearest to sigma."""
    return found[min(found, key=lambda level: abs(level - sigma))]


def ratio(pair: tuple[Tensor, Tensor]) -> float:
    """Length of the second gradient along the first, over the first's."""
    drawn, mean = pair
    return float(drawn @ mean / drawn.square().sum())


def apart(pair: tuple[Tensor, Tensor]) -> float:
    drawn, mean = pair
    return float((drawn - mean).norm() / drawn.norm())


def test_atoms_at_the_exact_eta_tend_to_equality_with_the_steps() -> None:
    """At the noise levels that eight steps have too, from 1 to one half; the later ones
    need more steps.
    """
    runs = [
        of_line("sage_exact", LIKE_NOISING, num_steps) for num_steps in (16, 32, 64)
    ]
    for sigma in sigma_schedule(8, 3.0)[:7].tolist():
        pairs = [at(found, sigma) for found in runs]
        distances = [apart(pair) for pair in pairs]
        assert distances[0] > 1.2 * distances[1] > 1.2 * 1.4 * distances[2]
        assert distances[2] < 0.12
        # Without what is proportional to a step and to its square.
        few, some, many = (ratio(pair) for pair in pairs)
        limit = (8 * many - 6 * some + few) / 3
        assert limit == pytest.approx(1, abs=0.05)


@pytest.mark.parametrize("sampler", ["sage_exact", "sage_grpo"])
def test_atoms_at_eta_one_half_have_another_gradient(sampler: str) -> None:
    """Of nearly the same direction at each step, but too short at an early and too long
    at a late one.
    """
    found = of_line(sampler, 0.5, 32)
    assert ratio(at(found, 0.95)) == pytest.approx(0.28, abs=0.03)
    assert ratio(at(found, 0.90)) == pytest.approx(0.54, abs=0.03)
    assert ratio(at(found, 0.75)) == pytest.approx(1.20, abs=0.05)
    assert ratio(at(found, 0.50)) == pytest.approx(2.20, abs=0.15)


def test_cps_is_further_off_the_more_steps_it_has() -> None:
    """Its noise is a share of all that a state has, at every step: many steps leave
    nothing of it in the video.
    """
    few, more = (
        ratio(at(of_line("cps", 1.0, num_steps), 0.75)) for num_steps in (8, 16)
    )
    assert few == pytest.approx(1.46, abs=0.05)
    assert more > 30
