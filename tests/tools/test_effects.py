"""Effects over seeds by hand, crossed effects against a bootstrap, Holm's adjustment."""

import math

import pytest
import torch

from sage_fast.tools.effects import Effect, crossed_effect, holm, seed_effect


def test_an_effect_over_seeds_by_hand() -> None:
    effect = seed_effect([1.0, 2.0, 3.0])
    assert (effect.mean, effect.num_seeds, effect.df) == (2.0, 3, 2)
    assert effect.stderr == pytest.approx(3**-0.5)
    assert effect.low == pytest.approx(2 - 4.3027 * 3**-0.5, abs=1e-4)
    assert effect.high == pytest.approx(2 + 4.3027 * 3**-0.5, abs=1e-4)
    # df 2 has a closed form
    assert effect.p == pytest.approx(1 - math.sqrt(12 / 14), abs=1e-12)
    assert (seed_effect([0.5, 0.5]).p, seed_effect([0.0, 0.0]).p) == (0.0, 1.0), (
        "without any scatter it is certain"
    )
    many = Effect(mean=0, stderr=1, num_seeds=10_000, df=9_999, p=1)
    assert many.detectable == pytest.approx(2.802, abs=1e-3), (
        "the smallest effect of the normal law"
    )


def crossed(
    seeds: int, prompts: int, of_seeds: float, of_prompts: float, rest: float
) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seeds)
    parts = torch.randn(seeds, 1, generator=generator, dtype=torch.float64) * of_seeds
    parts = (
        parts
        + torch.randn(1, prompts, generator=generator, dtype=torch.float64) * of_prompts
    )
    return (
        parts
        + torch.randn(seeds, prompts, generator=generator, dtype=torch.float64) * rest
    )


def test_a_crossed_effect_is_what_a_bootstrap_over_seeds_and_prompts_finds() -> None:
    values = crossed(30, 40, 0.3, 0.5, 0.2)
    generator = torch.Generator().manual_seed(0)
    means = [
        values[torch.randint(30, (30,), generator=generator)][
            :, torch.randint(40, (40,), generator=generator)
        ].mean()
        for _ in range(2000)
    ]
    assert crossed_effect(values.tolist()).stderr == pytest.approx(
        float(torch.stack(means).std()), rel=0.08
    )


def test_an_effect_is_no_surer_than_its_seeds_nor_than_its_prompts() -> None:
    values = crossed(6, 20, 1.0, 0.0, 0.1)
    by_seed = seed_effect(values.mean(1).tolist())
    effect = crossed_effect(values.tolist())
    assert effect.stderr >= by_seed.stderr * (1 - 1e-12) and effect.df == pytest.approx(
        5, rel=0.01
    )
    one = crossed_effect(values[:1].tolist())
    assert (one.num_seeds, one.df) == (1, 19)
    assert one.stderr == pytest.approx(float(values[0].std()) / 20**0.5)


@pytest.mark.parametrize(("of_seeds", "of_prompts"), [(0.2, 1.0), (1.0, 0.2)])
def test_an_effect_of_zero_is_found_in_one_study_of_twenty(
    of_seeds: float, of_prompts: float
) -> None:
    """Six seeds and 60 prompts, 1,000 studies."""
    generator = torch.Generator().manual_seed(0)
    found = 0
    for _ in range(1000):
        rows = torch.randn(6, 60, generator=generator, dtype=torch.float64)
        rows += of_seeds * torch.randn(6, 1, generator=generator, dtype=torch.float64)
        rows += of_prompts * torch.randn(
            1, 60, generator=generator, dtype=torch.float64
        )
        found += crossed_effect(rows.tolist()).p < 0.05
    assert 0.03 < found / 1000 < 0.07


def test_holm_by_hand() -> None:
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.9, 0.5]) == [1.0, 1.0] and holm([]) == []
