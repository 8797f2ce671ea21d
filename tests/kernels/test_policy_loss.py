"""policy_loss beyond parity: every setting, exact zeros, both stages of the sum."""

import itertools

import pytest
import torch
from torch import Tensor

from sage_kernels import LossSettings, StepColumns, policy_loss, reference
from sage_kernels.ops import policy_loss as module

ROWS = 6
SHAPE = (ROWS, 2, 3, 4, 5)
IDS = torch.tensor(
    [[17 * row, 5 + row, step] for row, step in enumerate([3, 1, 4, 1, 5, 9])]
)
COLUMNS = StepColumns(
    gain=torch.tensor([-0.5, -0.2, -0.9, -0.4, -0.7, -0.3]),
    std=torch.linspace(0.2, 0.9, ROWS),
    scale=torch.linspace(0.5, 2.0, ROWS),
    advantage=torch.tensor([1.0, -2.0, 0.5, 1.5, -1.0, 0.0]),
)
SETTINGS = [
    LossSettings(
        0.02,
        0.7 if position else None,
        0.07 if velocity else None,
        ratio_norm,
        position ^ velocity,  # unnormalized
        position ^ ratio_norm,  # equalizer
    )
    # Every two settings are met in all of their combinations.
    for position, velocity, ratio_norm in itertools.product((False, True), repeat=3)
]


def velocities() -> tuple[Tensor, Tensor, Tensor]:
    """(v, v_old, v_anchor); rows that the clip holds back and rows that it does not, on
    either side of 1.
    """
    generator = torch.Generator().manual_seed(0)
    v_old, direction, away = (torch.randn(SHAPE, generator=generator) for _ in range(3))
    moved = torch.tensor([0.0, 0.05, 0.4, -0.4, 1.0, -1.0]).view(-1, 1, 1, 1, 1)
    return v_old + moved * direction, v_old, v_old + 0.3 * away


def on(device: torch.device, columns: StepColumns = COLUMNS) -> StepColumns:
    return StepColumns(*(column.to(device) for column in columns))


@pytest.mark.parametrize(
    "settings", SETTINGS, ids=lambda s: "-".join(f"{value}" for value in s[1:])
)
def test_terms_and_gradient_are_those_of_the_reference(
    settings: LossSettings, device: torch.device
) -> None:
    expected_leaf, v_old, v_anchor = (t.requires_grad_() for t in velocities())
    expected = reference.policy_loss(
        expected_leaf, v_old, v_anchor, IDS, COLUMNS, settings
    )
    leaf, *stored = (
        t.detach().to(device).requires_grad_() for t in (expected_leaf, v_old, v_anchor)
    )
    given = policy_loss(leaf, *stored, IDS.to(device), on(device), settings)
    for name in expected._fields[:-1]:
        a = getattr(given, name).detach().cpu()
        b = getattr(expected, name).detach()
        torch.testing.assert_close(
            a, b, rtol=1e-5, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
        )
    assert torch.equal(given.clipped.cpu(), expected.clipped)
    assert (
        float(given.ratio[0]) == 1.0 and given.log_ratio[0] == given.kl_velocity[0] == 0
    )
    for terms in (given, expected):
        assert terms.loss.requires_grad and not any(
            part.requires_grad for part in terms[1:]
        )
        terms.loss.sum().backward()
    assert leaf.grad is not None and expected_leaf.grad is not None
    torch.testing.assert_close(
        leaf.grad.cpu(), expected_leaf.grad, rtol=1e-4, atol=1e-7
    )
    assert all(tensor.grad is None for tensor in (*stored, v_old, v_anchor))


def test_second_stage_reads_every_partial_sum(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(0)
    v, v_old = 0.05 * torch.randn(2, 2, 7 * module.BLOCK + 3, generator=generator)
    columns = StepColumns(*(column[:2] for column in COLUMNS))
    settings = LossSettings(0.2, velocity_weight=0.5)
    expected = reference.policy_loss(v, v_old, None, IDS[:2], columns, settings)
    monkeypatch.setattr(module, "SUM_BLOCK", 2)
    given = policy_loss(
        v.to(device),
        v_old.to(device),
        None,
        IDS[:2].to(device),
        on(device, columns),
        settings,
    )
    for a, b in zip(given, expected, strict=True):
        torch.testing.assert_close(a.cpu(), b, rtol=2e-6, atol=1e-6)


def test_reference_backward_is_autograd_of_the_reference() -> None:
    v, v_old, v_anchor = (t.double() for t in velocities())
    columns = StepColumns(*(column.double() for column in COLUMNS))
    cotangent = torch.linspace(-1, 2, ROWS, dtype=torch.float64)
    for settings in SETTINGS:
        anchor = None if settings.position_weight is None else v_anchor
        _, coefficients = reference.policy_loss_forward(
            v, v_old, anchor, IDS, columns, settings
        )
        leaf = v.clone().requires_grad_()
        loss = reference.policy_loss(leaf, v_old, anchor, IDS, columns, settings).loss
        (expected,) = torch.autograd.grad(loss, leaf, cotangent)
        given = reference.policy_loss_backward(
            cotangent, v, v_old, anchor, IDS, coefficients
        )
        torch.testing.assert_close(given, expected, rtol=1e-11, atol=1e-11)


def test_a_ratio_that_overflows_is_not_hidden(device: torch.device) -> None:
    v_old = velocities()[1]
    columns = on(device, COLUMNS._replace(advantage=-torch.ones(ROWS)))
    noise = reference.sde_step(0 * v_old, v_old, IDS, 0.0, 0.0, 1.0)
    for v in (v_old - 1e3 * noise.sign(), v_old * float("nan")):
        settings = LossSettings(0.02, ratio_norm=True)
        terms = policy_loss(
            v.to(device), v_old.to(device), None, IDS.to(device), columns, settings
        )
        assert not bool(torch.isfinite(terms.loss).any())
