"""The exact velocity is the one of the true score, and the samplers on it do what the
documents say.
"""

import re
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor

from experiments.exact_policy import ExactPolicy, ExactWorld
from experiments.measures import OF_GROUPS, sample_exactly
from sage_fast.config.sections import VideoConfig
from sage_fast.sde import SDE_TYPES, sigma_schedule, transition_table

ROOT = Path(__file__).resolve().parents[2]
WORLD = ExactWorld(VideoConfig(num_frames=8, height=16, width=16))


def velocity_of_score(
    x: Tensor,
    atoms: Tensor,
    sigma: float,
    spread: float,
    log_shares: Tensor | float = 0.0,
) -> Tensor:
    """By autograd of the log-density of the marginal at sigma, whose score is -(x + (1
    - sigma) v) / sigma.
    """
    x = x.detach().requires_grad_()
    variance = sigma**2 + (1 - sigma) ** 2 * spread**2
    away = x.flatten(1)[:, None] - (1 - sigma) * atoms.flatten(1)
    squares = away.square().sum(2)
    density = (log_shares - squares / (2 * variance)).logsumexp(1)
    (score,) = torch.autograd.grad(density.sum(), x)
    return -(x + sigma * score).detach() / (1 - sigma)


@pytest.mark.parametrize("sigma", [0.99, 0.05])
def test_the_velocity_is_that_of_autograds_score(sigma: float) -> None:
    generator = torch.Generator().manual_seed(0)
    atoms = torch.randn(7, 2, 3, 2, 2, generator=generator, dtype=torch.float64)
    noise = torch.randn(5, 2, 3, 2, 2, generator=generator, dtype=torch.float64)
    x = (1 - sigma) * atoms[:5] + sigma * noise
    given = ExactPolicy(atoms, 0.3).velocity(
        0, x, torch.full((5,), sigma, dtype=torch.float64)
    )
    torch.testing.assert_close(
        given, velocity_of_score(x, atoms, sigma, 0.3), rtol=0, atol=1e-6
    )


def row(sde_type: str) -> list[float]:
    """The numbers of a sampler in docs/algorithm.md: 20 steps, shift 5, eta 0.5; 96
    starts, and 3 starts of 32 members for the last two.
    """
    table = transition_table(sde_type, sigma_schedule(20, 5.0), 0.5)
    found = sample_exactly(WORLD, table, seed=0, starts=96, members=1)
    groups = sample_exactly(WORLD, table, seed=0, starts=3, members=32)
    return list((found | {name: groups[name] for name in OF_GROUPS}).values())


@pytest.mark.slow
@pytest.mark.parametrize("sde_type", SDE_TYPES)
def test_the_documented_measures_are_what_the_exact_policy_gives(sde_type: str) -> None:
    text = (ROOT / "docs/algorithm.md").read_text(encoding="utf-8")
    table = text.split("| sampler | leftover noise | dispersion |")[1]
    cells = re.search(rf"^\| `{sde_type}` \| (.*) \|$", table, re.M)
    assert cells is not None
    documented = [float(cell) for cell in cells[1].split(" | ")]
    assert row(sde_type) == pytest.approx(documented, rel=0.015, abs=6e-4)


LEARNABLE = WORLD.learnable()


def some_numbers() -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return 0.5 * torch.randn(len(LEARNABLE.base), generator=generator)


def all_captions() -> Tensor:
    return torch.cartesian_prod(*(torch.arange(n) for n in LEARNABLE.sizes))


def test_the_aligned_mass_is_that_of_the_atoms_that_show_the_caption() -> None:
    captions = all_captions()
    psi = some_numbers()
    mass = LEARNABLE.log_prior(psi, captions).softmax(1)
    shows = (LEARNABLE.attributes[None] == captions[:, None]).all(2)
    assert len(captions) == 120 and len(LEARNABLE.atoms) == 360
    assert float(LEARNABLE.aligned(psi)) == pytest.approx(
        float((mass * shows).sum(1).mean()), rel=1e-5
    )
    assert float(LEARNABLE.aligned(LEARNABLE.initial())) == pytest.approx(
        0.55 * 0.97 * 0.85, rel=1e-5
    )


def test_the_learnable_velocity_is_that_of_the_shifted_mixture() -> None:
    """By the score of the density, in float64, with shares of the atoms and with the
    data off the manifold.
    """
    psi = some_numbers()
    sigma = 0.4
    captions = all_captions()[[7, 60]]
    shift = LEARNABLE._theta(psi)[1] @ LEARNABLE.directions
    atoms = (LEARNABLE.atoms + shift).double()
    assert (
        float(LEARNABLE.drift(psi)) == pytest.approx(float(shift.norm()))
        and float(shift[:160].norm()) == 0
    )
    noise = torch.randn(2, 168, generator=torch.Generator().manual_seed(2))
    x = (1 - sigma) * atoms[[5, 300]] + sigma * noise
    shares = LEARNABLE.log_prior(psi, captions).double().log_softmax(1)
    given = LEARNABLE.velocity_at(psi, captions, x.float(), torch.full((2,), sigma))
    torch.testing.assert_close(
        given.double(),
        velocity_of_score(x, atoms, sigma, 0.02, shares),
        rtol=0,
        atol=2e-4,
    )


def test_the_share_of_samples_that_follow_their_caption_is_the_aligned_mass() -> None:
    captions = all_captions().repeat(4, 1)
    x = torch.randn(len(captions), 168, generator=torch.Generator().manual_seed(3))
    psi = LEARNABLE.initial()
    sigmas = sigma_schedule(40, 3.0)
    for s, n in pairwise(sigmas):
        velocity = LEARNABLE.velocity_at(psi, captions, x, s.expand(len(x)))
        x = x + float(n - s) * velocity
    rows, distance = LEARNABLE.nearest(x)
    share = float((LEARNABLE.attributes[rows] == captions).all(1).float().mean())
    assert share == pytest.approx(
        float(LEARNABLE.aligned(psi)), abs=3 * 0.5 / len(captions) ** 0.5
    )
    assert float(distance.max()) < 0.03
