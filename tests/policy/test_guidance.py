"""Guidance and its gradient: both branches at once or one after the other, the same
numbers.
"""

import itertools
import math
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from sage_fast import objective
from sage_fast.config.errors import TrainingError
from sage_fast.config.schema import RunConfig
from sage_fast.policy import guidance
from sage_fast.policy.guidance import GuidedPolicy
from sage_fast.records import PromptEmbeds
from sage_fast.run.run import build_trainer
from sage_fast.trainer import Trainer
from tests.test_single_pass import train
from tests.tiny.velocity_field import move_weights, relative

MakeRun = Callable[..., RunConfig]


@pytest.fixture
def trainer(tiny_run: MakeRun) -> Trainer:
    result = build_trainer(tiny_run("--rollout.guidance_scale=6"))
    move_weights(result)
    return result


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, bool]]:
    """(branch, with gradient) of every forward of the model."""
    made: list[tuple[str, bool]] = []
    velocity = guidance.model_velocity

    def counted(
        transformer: Any,
        latents: Tensor,
        sigma: Tensor,
        prompts: list[PromptEmbeds],
        *rest: Any,
    ) -> Tensor:
        # The empty prompt is one token long.
        made.append(
            ("free" if len(prompts[0].text) == 1 else "prompt", torch.is_grad_enabled())
        )
        return velocity(transformer, latents, sigma, prompts, *rest)

    monkeypatch.setattr(guidance, "model_velocity", counted)
    return made


def batch(trainer: Trainer) -> tuple[Tensor, Tensor, list[PromptEmbeds]]:
    generator = torch.Generator().manual_seed(3)
    latents = torch.randn(2, *trainer.latent_shape, generator=generator)
    return (
        latents,
        torch.tensor([0.9, 0.4]),
        [trainer.embed(p.text) for p in trainer.eval_prompts[:2]],
    )


def gradients(trainer: Trainer) -> Tensor:
    """All gradients as one vector, which are then forgotten."""
    result = torch.cat(
        [p.grad.flatten() for p in trainer.parameters.values() if p.grad is not None]
    )
    trainer.engine.zero_grad()
    return result


def test_the_formula_of_guidance(trainer: Trainer) -> None:
    latents, sigma, prompts = batch(trainer)
    policy = trainer.policy
    with torch.no_grad():
        conditional = guidance.model_velocity(
            policy.transformer, latents, sigma, prompts
        )
        free = guidance.model_velocity(
            policy.transformer, latents, sigma, [policy.uncond] * 2
        )
        assert not torch.allclose(conditional, free, atol=1e-3)
        torch.testing.assert_close(
            policy.velocity(latents, sigma, prompts), 6 * conditional - 5 * free
        )
        policy.guidance_scale = 1.0
        assert torch.equal(policy.velocity(latents, sigma, prompts), conditional)


@pytest.mark.parametrize("scale", [0.0, 1.0, 2.5])
def test_split_and_paired_give_one_velocity_and_one_gradient(
    trainer: Trainer, scale: float
) -> None:
    """Also where the cotangent depends on the velocity."""
    policy = trainer.policy
    policy.guidance_scale = scale
    arguments = batch(trainer)
    plain = policy.velocity(*arguments)
    plain.sin().sum().backward()
    expected = gradients(trainer)
    given: list[Any] = [[plain.detach().cos()], lambda velocity: [velocity.cos()]]
    for cotangents, split in itertools.product(given, (False, True)):
        velocity = policy.velocity_and_gradient(*arguments, cotangents, split=split)
        assert torch.equal(velocity, plain) and not velocity.requires_grad
        assert relative(gradients(trainer), expected) < 3e-6


def test_forwards_of_a_gradient(
    trainer: Trainer, calls: list[tuple[str, bool]]
) -> None:
    latents, sigma, prompts = batch(trainer)
    known = [torch.ones_like(latents)]

    def made(scale: float, cotangents: Any, split: bool) -> list[tuple[str, bool]]:
        calls.clear()
        trainer.policy.guidance_scale = scale
        with torch.no_grad():  # the caller's mode does not matter
            trainer.policy.velocity_and_gradient(
                latents, sigma, prompts, cotangents, split=split
            )
        return list(calls)

    prompt = ("prompt", True)
    free = ("free", True)
    free_first = ("free", False)
    assert (
        made(6.0, known, False) == made(6.0, lambda v: known, False) == [prompt, free]
    )
    assert made(6.0, known, True) == [prompt, free]
    assert made(6.0, lambda v: known, True) == [prompt, free_first, free]
    for split, cotangents in itertools.product((False, True), (known, lambda v: known)):
        assert made(1.0, cotangents, split) == [prompt]


def test_split_halves_what_is_kept_for_the_backward_pass(trainer: Trainer) -> None:
    latents, sigma, prompts = batch(trainer)
    alive = weakref.WeakSet[Any]()
    sums = list[int]()

    class Held:
        def __init__(self, tensor: Tensor) -> None:
            self.tensor = tensor
            alive.add(self)
            sums.append(sum(held.tensor.nbytes for held in alive))

    def peak(split: bool) -> int:
        sums.clear()
        with torch.autograd.graph.saved_tensors_hooks(Held, lambda held: held.tensor):
            trainer.policy.velocity_and_gradient(
                latents, sigma, prompts, [torch.ones_like(latents)], split=split
            )
        assert not alive
        return max(sums)

    assert peak(True) < 0.6 * peak(False)


# --------------------------------------------------------------------------------------
# training


def test_in_float64_every_gradient_agrees(
    tiny_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = [
        "--objective.kl_mode=dual",
        "--training.updates_per_rollout=2",
        "--training.num_updates=2",
        "--optimizer.eps=1e-3",
        "--objective.clip_range=0.01",
    ]
    paired, split = (
        train(
            tiny_run(*given, f"--training.guidance={guidance}"),
            monkeypatch,
            iterations=1,
            smooth=True,
        )[1]
        for guidance in ("paired", "split")
    )
    assert len(paired) == 2
    for a, b in zip(paired, split, strict=True):
        assert a.dtype == torch.float64 and float(a.norm()) > 0
        assert relative(b, a) < 1e-10


def shaky(
    *arguments: Any, velocity: Callable[..., Tensor] = guidance.model_velocity
) -> Tensor:
    """The model's velocity, which is another one where it is differentiated."""
    v = velocity(*arguments)
    return v * 1.001 if torch.is_grad_enabled() else v


def test_a_velocity_that_cannot_be_repeated_shows_in_the_ratio(
    tiny_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ratio is measured on the velocity that was differentiated, though its
    cotangent came from the rollout's.
    """
    trainer = build_trainer(
        tiny_run("--training.guidance=split", "--rollout.num_steps=2")
    )
    monkeypatch.setattr(guidance, "model_velocity", shaky)
    with pytest.raises(
        TrainingError,
        match="the policy that is trained is not the one that made the rollout",
    ):
        trainer.iterate()


def test_the_ratio_is_verified_at_the_first_update_that_has_a_gradient(
    tiny_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A first rollout without spread trains nothing, and its ratios say nothing."""
    trainer = build_trainer(
        tiny_run("--objective.kl_mode=none", "--rollout.num_steps=2")
    )
    monkeypatch.setattr(guidance, "model_velocity", shaky)
    with monkeypatch.context() as flat:
        flat.setattr(objective, "ZERO_SPREAD_RELATIVE", math.inf)
        assert trainer.iterate()["advantage/abs_mean"] == 0
    with pytest.raises(TrainingError, match="the policy that is trained is not"):
        trainer.iterate()


def test_the_policy_stays_in_eval_mode(trainer: Trainer) -> None:
    assert (
        isinstance(trainer.policy, GuidedPolicy)
        and not trainer.policy.transformer.training
    )
    assert not GuidedPolicy(
        trainer.policy.transformer.train(), trainer.policy.uncond, 1.0
    ).transformer.training
