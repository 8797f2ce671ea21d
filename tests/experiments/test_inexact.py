"""Rollouts of a less exact sampler: the derivation, and the experiment in miniature."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.distributions import Normal

from experiments import inexact
from experiments.inexact import SETTINGS, Rounding, measure
from sage_fast.config.load import dump_config, load_config
from sage_fast.config.schema import RunConfig
from sage_fast.run.run import build_trainer
from sage_kernels.reference.policy_loss import log_ratio, ratio_norm_log_ratio

MakeRun = Callable[..., RunConfig]


def normal(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=dtype)


@pytest.mark.parametrize("sampler_error", [0.0, 0.3])
def test_the_log_ratio_of_an_inexact_sampler(sampler_error: float) -> None:
    """Of the probabilities of the drawn state, without a formula of this project."""
    state, velocity, noise, error = (normal(4, 600, seed=seed) for seed in range(4))
    a, b, std = 0.9, -0.2, 0.1
    sampled = velocity + sampler_error * error
    drawn = a * state + b * sampled + std * noise
    policy = Normal(a * state + b * velocity, std)
    sampler = Normal(a * state + b * sampled, std)
    expected = (policy.log_prob(drawn) - sampler.log_prob(drawn)).mean(1)
    s = b / std * (velocity - sampled)
    cross = (s * noise).mean(1)
    torch.testing.assert_close(expected, cross - s.square().mean(1) / 2)
    gain = torch.full((4,), b / std, dtype=torch.float64)
    torch.testing.assert_close(log_ratio(gain, noise, velocity - sampled), expected)
    if not sampler_error:
        assert not log_ratio(gain, noise, velocity - sampled).any()


def test_the_cross_term_vanishes_with_the_number_of_elements() -> None:
    """As rms(s) / sqrt(n), while mean(s^2) / 2 stays: from rms(s) = 4 / sqrt(n) on the
    log-ratio is negative at two standard deviations.
    """
    for elements in (256, 4096):
        s = 4 / math.sqrt(elements) * normal(1, elements, seed=0).sign()
        noise = normal(2000, elements, seed=1)
        cross = (s * noise).mean(1)
        assert float(cross.std()) == pytest.approx(4 / elements, rel=0.05)
        assert abs(float(cross.mean())) < 4 * float(cross.std()) / 2000**0.5
        found = log_ratio(torch.ones(2000), noise, s.expand_as(noise))
        # Of a normal distribution 2.3 % lie above two standard deviations.
        assert float((found > 0).double().mean()) == pytest.approx(0.0228, abs=0.01)


def test_the_score_has_the_samplers_error_and_the_corrected_one_has_not() -> None:
    """Of the log-ratio it is r (eps - s) / n, of GRPO-Guard's r eps / n, as of a
    sampler that is the policy.
    """
    noise, error = (normal(3, 50, seed=seed) for seed in range(2))
    gain = torch.tensor([2.0, -1.0, 0.5], dtype=torch.float64)
    rows = gain[:, None]
    for form, score in (
        (log_ratio, rows * (noise - rows * error) / 50),
        (ratio_norm_log_ratio, rows * noise / 50),
    ):
        delta = error.clone().requires_grad_()
        (found,) = torch.autograd.grad(form(gain, noise, delta).sum(), delta)
        torch.testing.assert_close(found, score)


def test_products_are_those_of_the_rounded_numbers() -> None:
    x = normal(5, 32, seed=0).float() * torch.tensor([1.0, 10, 1e-3, 5, 0])[:, None]
    weight = normal(48, 32, seed=1).float()
    rounded = []
    for operand in (x, weight):
        small, scale = inexact.scaled(operand, by_row=True)
        rounded.append(small.double() * scale)
        # three bits of mantissa, and the largest number of a row is one that e4m3 has
        error = (rounded[-1] - operand).abs()
        largest = operand.abs().amax(1, keepdim=True)
        assert bool((error <= operand.abs() / 16 + largest / 448 / 1024).all())
    for product, operands, digits in (
        (inexact.eight_bit_product, rounded, 2**-8),
        (inexact.bfloat16_product, [x.bfloat16(), weight.bfloat16()], 2**-8),
    ):
        first, second = (operand.double() for operand in operands)
        expected = first @ second.t()
        found = product(x, weight).double()
        scale = first.abs() @ second.abs().t()
        assert bool(((found - expected).abs() <= digits * scale).all())


def test_layers_of_attention_and_feed_forward_are_rounded(tiny_run: MakeRun) -> None:
    """Neither adapters nor modulations."""
    config = load_config(dumped(tiny_run()), dict(SETTINGS))
    transformer = build_trainer(config).objective.policy.transformer
    chosen = Rounding(transformer, inexact.SAMPLERS["bfloat16"]).weights
    names = {
        name.removesuffix(".weight").removesuffix(".base_layer")
        for name, parameter in transformer.named_parameters()
        if id(parameter) in chosen
    }
    blocks = len(transformer.transformer_blocks)
    assert len(names) == len(chosen) == 12 * blocks
    assert all(".attn." in name or ".ff" in name for name in names)


def dumped(config: RunConfig) -> Path:
    """A configuration as a file."""
    file = Path(config.output_dir).with_suffix(".yaml")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(dump_config(config))
    return file


def test_the_experiment_in_miniature(
    tiny_run: MakeRun, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a command. That the straight-through ratio is 1, the trainer checks."""
    file = dumped(tiny_run())
    inexact.main(["--config", str(file), "--seeds", "5", "--videos", "4"])
    rows = {
        row["sampler"]: row
        for row in map(json.loads, capsys.readouterr().out.splitlines())
    }
    assert list(rows) == [*inexact.SAMPLERS, inexact.OTHER_NOISE]
    control = rows.pop(inexact.OTHER_NOISE)
    for name in ("velocity_error", "mean_square", "log_ratio", "cross"):
        # to the bit
        assert set(control[name]) == {0.0}
    assert len(set(control["cosine"].values())) == 1
    assert control["cosine"]["correction"] < 0.9
    for row in rows.values():
        assert (row["seed"], row["videos"]) == (5, 4)
        assert row["cosine"]["straight_through"] > row["cosine"]["unclipped"] - 0.1
        for found, square in zip(row["log_ratio"], row["mean_square"], strict=True):
            error = (square / row["elements"] / row["videos"]) ** 0.5
            assert abs(found + square / 2) < 5 * error + 1e-9
    assert max(rows["bfloat16"]["velocity_error"]) < min(
        rows["8-bit products"]["velocity_error"]
    )
    assert rows["bfloat16"]["cosine"]["straight_through"] > 0.99


def test_a_row_counts_what_the_clip_stops(
    tiny_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a clip that holds nothing back the correction is the one without a clip."""
    name = "bfloat16"
    monkeypatch.setattr(inexact, "SAMPLERS", {name: inexact.SAMPLERS[name]})
    wide = {"objective.clip_range": inexact.WIDE, "rollout.batch_size": 4}
    config = load_config(dumped(tiny_run()), {**SETTINGS, **wide})
    for row in measure(config):
        assert row["cosine"]["correction"] == row["cosine"]["unclipped"]
        assert not any(row["clipped_negative"] + row["clipped_positive"])
