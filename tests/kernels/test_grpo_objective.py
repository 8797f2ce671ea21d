"""policy_terms and grpo_objective together are the policy loss of sage_fast, value and gradient, for every setting."""

import itertools

import pytest
import torch
from torch import Tensor

from sage_fast.kernels import FusedKernels
from sage_fast.noise import NoiseKey, gaussian
from sage_fast.objective import KL_MODES, ObjectiveSettings, policy_loss
from sage_kernels import grpo_objective
from sage_kernels.reference import grpo_objective as reference

ROWS = 6
OWNERS = [NoiseKey(seed=1, update=2, prompt_index=i, sample_index=0) for i in range(ROWS)]
STEPS = [3, 1, 4, 1, 5, 9]
SETTINGS = [
    ObjectiveSettings(
        kl_mode=kl_mode, ratio=ratio, logprob=logprob, equalizer=equalizer, kl_velocity=kl_velocity, clip_range=0.02
    )
    for kl_mode, ratio, logprob, equalizer, kl_velocity in itertools.product(
        KL_MODES, ("gaussian", "ratio_norm"), ("gaussian", "unnormalized"), (True, False), ("estimator", "exact")
    )
]


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda s: f"{s.kl_mode}-{s.ratio}-{s.logprob}-{s.equalizer:d}")
def test_fused_loss_is_the_loss_of_sage_fast(settings: ObjectiveSettings, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(0)
    shape = (ROWS, 2, 3, 4, 5)
    v_old, noise_like, away = (torch.randn(shape, generator=generator) for _ in range(3))
    # Rows that the clip holds back and rows that it does not, on either side of 1.
    moved = torch.tensor([0.0, 0.05, 0.4, -0.4, 1.0, -1.0]).view(-1, 1, 1, 1, 1)
    v_new, v_anchor = v_old + moved * noise_like, v_old + 0.3 * away
    columns = {
        "gain": torch.tensor([-0.5, -0.2, -0.9, -0.4, -0.7, -0.3]),
        "std": torch.linspace(0.2, 0.9, ROWS),
        "scale": torch.linspace(0.5, 2.0, ROWS),
        "advantage": torch.tensor([1.0, -2.0, 0.5, 1.5, -1.0, 0.0]),
    }
    weight = 0.7

    leaf = v_new.clone().requires_grad_()
    noise = gaussian(OWNERS, STEPS, shape[1:])
    expected = policy_loss(leaf, v_old, v_anchor, noise, **columns, kl_weight=weight, settings=settings)
    (expected_gradient,) = torch.autograd.grad(expected.loss.sum(), leaf)

    leaf = v_new.to(device).requires_grad_()
    given = FusedKernels().policy_loss(
        leaf,
        v_old.to(device),
        v_anchor.to(device),
        OWNERS,
        STEPS,
        **{name: column.to(device) for name, column in columns.items()},
        kl_weight=weight,
        settings=settings,
    )
    (gradient,) = torch.autograd.grad(given.loss.sum(), leaf)
    for name in expected._fields[:-1]:
        a, b = getattr(given, name).detach().cpu(), getattr(expected, name).detach()
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")
    assert torch.equal(given.clipped.cpu(), expected.clipped)
    torch.testing.assert_close(gradient.cpu(), expected_gradient, rtol=1e-4, atol=1e-7)
    assert float(given.ratio[0]) == 1.0


def arguments(rows: int, device: torch.device) -> dict[str, Tensor]:
    one = torch.ones(rows, device=device)
    return {"std": one, "scale": one}


@pytest.mark.parametrize("advantage", [-1.0, 0.0, 1.0])
def test_gradient_stops_where_the_clip_holds_back_and_nowhere_else(advantage: float, device: torch.device) -> None:
    terms = torch.zeros(5, 4, device=device)
    terms[:, 0] = torch.tensor([-0.3, -0.1, 0.0, 0.1, 0.3])
    terms.requires_grad_()
    result = grpo_objective(terms, torch.full((5,), advantage, device=device), clip_range=0.2, **arguments(5, device))
    result.loss.sum().backward()
    assert terms.grad is not None
    held = (terms.detach()[:, 0] > 0.2) if advantage > 0 else (terms.detach()[:, 0] < -0.2)
    held &= advantage != 0
    assert torch.equal(result.clipped, held)
    expected = torch.where(held, 0.0, -advantage * terms.detach()[:, 0].exp())
    torch.testing.assert_close(terms.grad[:, 0], expected)
    assert torch.equal(terms.grad[:, 1:], torch.zeros_like(terms.grad[:, 1:]))


def test_only_the_loss_has_a_gradient(device: torch.device) -> None:
    terms = torch.zeros(3, 4, device=device, requires_grad=True)
    result = grpo_objective(terms, torch.ones(3, device=device), clip_range=0.1, **arguments(3, device))
    assert result.loss.requires_grad
    assert not any(part.requires_grad for part in result[1:])


def test_a_ratio_that_overflows_is_not_hidden(device: torch.device) -> None:
    terms = torch.zeros(2, 4, device=device)
    terms[:, 0] = torch.tensor([200.0, float("nan")])
    loss = grpo_objective(terms, -torch.ones(2, device=device), clip_range=0.1, **arguments(2, device)).loss
    assert not bool(torch.isfinite(loss).any())


def test_reference_cotangents_are_autograd_of_the_reference() -> None:
    generator = torch.Generator().manual_seed(0)
    for mask in range(16):
        options = {
            "clip_range": 0.1,
            "ratio_norm": bool(mask & 1),
            "unnormalized": bool(mask & 2),
            "equalizer": bool(mask & 4),
            "use_kl_position": True,
            "position_weight": 0.3,
            "use_kl_velocity": True,
            "velocity_weight": 0.2,
            "kl_velocity_exact": bool(mask & 8),
        }
        terms = (0.2 * torch.randn(50, 4, generator=generator, dtype=torch.float64)).requires_grad_()
        advantage, std, scale = torch.randn(3, 50, generator=generator, dtype=torch.float64)
        loss = reference.grpo_objective(terms, advantage, std=std, scale=scale, **options).loss
        (expected,) = torch.autograd.grad(loss.sum(), terms)
        given = reference.grpo_objective_cotangents(terms.detach(), advantage, std=std, scale=scale, **options)
        torch.testing.assert_close(given, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param({"clip_range": 0.0}, "clip_range is 0.0", id="no-clip"),
        pytest.param({"position_weight": -1.0}, "position_weight is -1.0", id="negative-weight"),
        pytest.param({"velocity_weight": float("inf")}, "velocity_weight is inf", id="infinite-weight"),
        pytest.param({"std": torch.ones(4)}, r"std has shape \(4,\)", id="too-many-stds"),
        pytest.param({"terms": torch.zeros(3, 5)}, r"terms has shape \(3, 5\)", id="five-terms"),
    ],
)
def test_refuses(change: dict[str, object], message: str) -> None:
    given = {"terms": torch.zeros(3, 4), "advantage": torch.ones(3), "clip_range": 0.1}
    with pytest.raises(ValueError, match=message):
        grpo_objective(**given | arguments(3, torch.device("cpu")) | change)  # type: ignore[arg-type]
