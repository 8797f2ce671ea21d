"""policy_loss beyond parity: every setting, launches, exact zeros, the clip, both stages of the sum, refusals."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from sage_kernels import LossSettings, PolicyTerms, StepColumns, policy_loss, reference
from sage_kernels.launch import recording
from sage_kernels.ops import policy_loss as module
from sage_kernels.tracer import count

ROWS = 6
SHAPE = (ROWS, 2, 3, 4, 5)
IDS = torch.tensor([[17 * row, 5 + row, step] for row, step in enumerate([3, 1, 4, 1, 5, 9])])
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
        velocity ^ ratio_norm,  # exact
    )
    # Every two settings are met in all of their combinations.
    for position, velocity, ratio_norm in itertools.product((False, True), repeat=3)
]


def velocities(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """(v, v_old, v_anchor); rows that the clip holds back and rows that it does not, on either side of 1."""
    generator = torch.Generator().manual_seed(0)
    v_old, direction, away = (torch.randn(SHAPE, generator=generator) for _ in range(3))
    moved = torch.tensor([0.0, 0.05, 0.4, -0.4, 1.0, -1.0]).view(-1, 1, 1, 1, 1)
    return (v_old + moved * direction).to(dtype), v_old.to(dtype), (v_old + 0.3 * away).to(dtype)


def on(device: torch.device, columns: StepColumns = COLUMNS) -> StepColumns:
    return StepColumns(*(column.to(device) for column in columns))


def loss_of(
    v: Tensor, v_old: Tensor, v_anchor: Tensor | None = None, columns: StepColumns = COLUMNS, **settings: Any
) -> PolicyTerms:
    settings = {"clip_range": 0.02} | settings
    return policy_loss(v, v_old, v_anchor, IDS.to(v.device), on(v.device, columns), LossSettings(**settings))


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda s: "-".join(f"{value}" for value in s[1:]))
def test_terms_and_gradient_are_those_of_the_reference(settings: LossSettings, device: torch.device) -> None:
    expected_leaf, v_old, v_anchor = (t.requires_grad_() for t in velocities())
    expected = reference.policy_loss(expected_leaf, v_old, v_anchor, IDS, COLUMNS, settings)
    leaf, *stored = (t.detach().to(device).requires_grad_() for t in (expected_leaf, v_old, v_anchor))
    given = policy_loss(leaf, *stored, IDS.to(device), on(device), settings)
    for name in expected._fields[:-1]:
        a, b = getattr(given, name).detach().cpu(), getattr(expected, name).detach()
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")
    assert torch.equal(given.clipped.cpu(), expected.clipped)
    assert float(given.ratio[0]) == 1.0
    for terms in (given, expected):
        assert terms.loss.requires_grad and not any(part.requires_grad for part in terms[1:])
        terms.loss.sum().backward()
    assert leaf.grad is not None and expected_leaf.grad is not None
    torch.testing.assert_close(leaf.grad.cpu(), expected_leaf.grad, rtol=1e-4, atol=1e-7)
    assert all(tensor.grad is None for tensor in (*stored, v_old, v_anchor))


def test_two_launches_forward_and_one_backward(device: torch.device) -> None:
    v, v_old, v_anchor = (t.to(device) for t in velocities())
    leaf = v.requires_grad_()
    with recording() as kernels:
        terms = loss_of(leaf, v_old, v_anchor, position_weight=0.7, velocity_weight=0.07)
    assert [kernel.name for kernel in kernels] == ["policy_loss_partial", "policy_loss_finish"]
    cotangent = torch.ones_like(terms.loss)
    with recording() as kernels:
        traffic = count(lambda: torch.autograd.grad(terms.loss, leaf, cotangent))
    assert [kernel.name for kernel in kernels] == ["policy_loss_backward"]
    assert traffic.operators == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_terms_are_exactly_zero_where_the_policy_has_not_moved(dtype: torch.dtype, device: torch.device) -> None:
    v = velocities(dtype)[0].to(device)
    terms = loss_of(v, v, v, position_weight=0.7, velocity_weight=0.07, exact=True)
    for part in (terms.log_ratio, terms.kl_position, terms.kl_velocity):
        assert torch.equal(part, torch.zeros_like(part))
    assert torch.equal(terms.loss.cpu(), -COLUMNS.advantage * COLUMNS.scale)
    assert not terms.clipped.any()


def test_gradient_stops_where_the_clip_holds_back_and_nowhere_else(device: torch.device) -> None:
    leaf, v_old, _ = (t.to(device).requires_grad_() for t in velocities())
    terms = loss_of(leaf, v_old)
    terms.loss.sum().backward()
    assert leaf.grad is not None
    held = terms.clipped | (COLUMNS.advantage.to(device) == 0)
    assert 0 < int(terms.clipped.sum()) < ROWS - 1
    assert torch.equal(leaf.grad.flatten(1).abs().amax(1) == 0, held)


def test_a_ratio_that_overflows_is_not_hidden(device: torch.device) -> None:
    _, v_old, _ = (t.to(device) for t in velocities())
    against = COLUMNS._replace(advantage=-torch.ones(ROWS))
    far = v_old - 1e3 * torch.sign(reference.sde_step(0 * v_old.cpu(), v_old.cpu(), IDS, 0.0, 0.0, 1.0)).to(device)
    assert not bool(torch.isfinite(loss_of(far, v_old, columns=against, ratio_norm=True).loss).any())
    assert not bool(torch.isfinite(loss_of(v_old * float("nan"), v_old, columns=against).loss).any())


def test_second_stage_reads_every_partial_sum(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    v, v_old = 0.05 * torch.randn(2, 2, 7 * module.BLOCK + 3, generator=generator)
    columns = StepColumns(*(column[:2] for column in COLUMNS))
    settings = LossSettings(0.2, velocity_weight=0.5, exact=True)
    expected = reference.policy_loss(v, v_old, None, IDS[:2], columns, settings)
    monkeypatch.setattr(module, "SUM_BLOCK", 2)
    given = policy_loss(v.to(device), v_old.to(device), None, IDS[:2].to(device), on(device, columns), settings)
    for a, b in zip(given, expected, strict=True):
        torch.testing.assert_close(a.cpu(), b, rtol=2e-6, atol=1e-6)


def test_reference_backward_is_autograd_of_the_reference() -> None:
    v, v_old, v_anchor = (t.double() for t in velocities())
    columns = StepColumns(*(column.double() for column in COLUMNS))
    cotangent = torch.linspace(-1, 2, ROWS, dtype=torch.float64)
    for settings in SETTINGS:
        anchor = None if settings.position_weight is None else v_anchor
        _, coefficients = reference.policy_loss_forward(v, v_old, anchor, IDS, columns, settings)
        leaf = v.clone().requires_grad_()
        loss = reference.policy_loss(leaf, v_old, anchor, IDS, columns, settings).loss
        (expected,) = torch.autograd.grad(loss, leaf, cotangent)
        given = reference.policy_loss_backward(cotangent, v, v_old, anchor, IDS, coefficients)
        torch.testing.assert_close(given, expected, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param({"noise_ids": IDS[:, :2]}, r"noise_ids are torch.int64 \(6, 2\)", id="no-steps"),
        pytest.param({"gain": torch.ones(2)}, r"gain has shape \(2,\)", id="too-few-gains"),
        pytest.param({"v_anchor": torch.zeros(SHAPE).double()}, "v_anchor has dtype torch.float64", id="float64"),
        pytest.param({"v_anchor": None}, "position_weight is 0.7, but v_anchor is None", id="no-anchor"),
        pytest.param({"clip_range": 0.0}, "clip_range is 0.0", id="no-clip"),
        pytest.param({"velocity_weight": float("inf")}, "velocity_weight is inf", id="infinite-weight"),
    ],
)
def test_refuses(change: dict[str, object], message: str) -> None:
    v, v_old, v_anchor = velocities()
    arguments: dict[str, Any] = {"v": v, "v_old": v_old, "v_anchor": v_anchor, "noise_ids": IDS, **COLUMNS._asdict()}
    arguments |= {"clip_range": 0.02, "position_weight": 0.7} | change
    columns = StepColumns(*(arguments.pop(name) for name in StepColumns._fields))
    tensors = [arguments.pop(name) for name in ("v", "v_old", "v_anchor", "noise_ids")]
    with pytest.raises(ValueError, match=message):
        policy_loss(*tensors, columns, LossSettings(**arguments))
