"""policy_terms beyond parity: exact zeros, sage_fast's objective, shards, both stages of the sum, both gradients."""

import importlib

import pytest
import torch
from torch import Tensor

from sage_fast.noise import NoiseKey, gaussian, key_words
from sage_fast.objective import gaussian_kl, log_ratio, ratio_norm_log_ratio
from sage_kernels import policy_terms
from sage_kernels.reference import policy_terms as reference
from tests.kernels.support import assert_backward_is_autograd

module = importlib.import_module("sage_kernels.policy_terms")

SHAPE = (3, 4, 3, 5, 7)
OWNERS = [NoiseKey(seed=1, update=2, prompt_index=i, sample_index=7) for i in range(3)]
STEPS = [4, 0, 2]
GAIN = torch.tensor([-0.5, -0.2, -1.3])


def latents(count: int, device: torch.device, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(SHAPE, generator=generator).to(device, dtype) for _ in range(count)]


def noise_of(device: torch.device) -> dict[str, Tensor]:
    return {"keys": key_words(OWNERS, device), "step": torch.tensor(STEPS, device=device)}


@pytest.mark.parametrize("guidance", [0.0, 1.0, 2.5, 6.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_terms_are_exactly_zero_where_the_policy_has_not_moved(
    guidance: float, dtype: torch.dtype, device: torch.device
) -> None:
    """v_old is what eager PyTorch stored: the kernel's guidance must round in the same places."""
    cond, uncond = latents(2, device, dtype)
    v_old = uncond.float() + guidance * (cond.float() - uncond.float())
    terms = policy_terms(cond, uncond, v_old, v_old, guidance_scale=guidance, gain=GAIN.to(device), **noise_of(device))
    assert torch.equal(terms, torch.zeros(3, 4, device=device))


def test_terms_are_those_of_the_objective(device: torch.device) -> None:
    v_new, v_old, v_anchor = latents(3, device)
    terms = policy_terms(v_new, None, v_old, v_anchor, gain=GAIN.to(device), **noise_of(device)).cpu()
    noise, delta = gaussian(OWNERS, STEPS, SHAPE[1:]), (v_new - v_old).cpu()
    expected = [
        log_ratio(GAIN, noise, delta),
        ratio_norm_log_ratio(GAIN, noise, delta),
        gaussian_kl(GAIN, (v_new - v_anchor).cpu()),
        gaussian_kl(GAIN, delta),
    ]
    torch.testing.assert_close(terms, torch.stack(expected, dim=1), rtol=2e-6, atol=2e-7)


def test_drawn_and_given_noise_agree(device: torch.device) -> None:
    v_new, v_old, v_anchor = latents(3, device)
    noise = gaussian(OWNERS, STEPS, SHAPE[1:]).to(device)
    drawn = policy_terms(v_new, None, v_old, v_anchor, gain=GAIN.to(device), **noise_of(device))
    given = policy_terms(v_new, None, v_old, v_anchor, gain=GAIN.to(device), noise=noise)
    torch.testing.assert_close(drawn, given, rtol=0, atol=2e-6)
    assert torch.equal(drawn[:, 2:], given[:, 2:])


def test_both_branches_share_one_gradient(device: torch.device) -> None:
    cond, uncond, v_old, v_anchor = latents(4, device)
    cond.requires_grad_(), uncond.requires_grad_()
    guidance = 6.0
    terms = policy_terms(
        cond, uncond, v_old, v_anchor, guidance_scale=guidance, gain=GAIN.to(device), **noise_of(device)
    )
    cotangents = torch.randn(3, 4, generator=torch.Generator().manual_seed(1)).to(device)
    dv_cond, dv_uncond = torch.autograd.grad(terms, (cond, uncond), cotangents)
    torch.testing.assert_close(dv_cond * (1 - guidance), dv_uncond * guidance, rtol=1e-5, atol=1e-9)

    velocity = (uncond + guidance * (cond - uncond)).detach().requires_grad_()
    whole = policy_terms(velocity, None, v_old, v_anchor, gain=GAIN.to(device), **noise_of(device))
    (dv,) = torch.autograd.grad(whole, velocity, cotangents)
    torch.testing.assert_close(dv_cond, guidance * dv, rtol=1e-5, atol=1e-9)


def test_stored_velocities_and_noise_get_no_gradient(device: torch.device) -> None:
    v_new, v_old, v_anchor, noise = (t.requires_grad_() for t in latents(4, device))
    gain = GAIN.to(device).requires_grad_()
    policy_terms(v_new, None, v_old, v_anchor, gain=gain, noise=noise).sum().backward()
    assert v_new.grad is not None
    assert all(t.grad is None for t in (v_old, v_anchor, noise, gain))


def test_means_of_shards_add_up(device: torch.device) -> None:
    v_new, v_old, v_anchor = (t.flatten(1) for t in latents(3, device))
    owner = noise_of(device)
    whole = policy_terms(v_new, None, v_old, v_anchor, gain=GAIN.to(device), **owner)
    numel, total = v_new.shape[1], torch.zeros(3, 4, device=device)
    for first, last in ((0, 101), (101, 102), (102, numel)):
        part = [t[:, first:last] for t in (v_new, v_old, v_anchor)]
        terms = policy_terms(part[0], None, *part[1:], gain=GAIN.to(device), element_offset=first, **owner)
        total += terms * (last - first) / numel
    torch.testing.assert_close(total, whole, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("sum_block", [1, 2, 16])
def test_second_stage_reads_every_partial_sum(
    sum_block: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(0)
    v_new, v_old = torch.randn(2, 2, 7 * module.BLOCK + 3, generator=generator).to(device)
    noise = torch.randn(v_new.shape, generator=generator).to(device)
    gain = torch.tensor([0.5, 1.0], device=device)
    expected = reference.policy_terms(v_new, None, v_old, gain=gain, noise=noise)
    monkeypatch.setattr(module, "SUM_BLOCK", sum_block)
    torch.testing.assert_close(policy_terms(v_new, None, v_old, gain=gain, noise=noise), expected, rtol=2e-6, atol=1e-6)


def test_reference_backward_is_autograd_of_the_reference() -> None:
    cond, uncond, v_old, v_anchor = (t.double() for t in latents(4, torch.device("cpu")))
    options = {"guidance_scale": 6.0, "gain": GAIN.double(), **noise_of(torch.device("cpu"))}

    def forward(cond: Tensor, uncond: Tensor) -> Tensor:
        return reference.policy_terms(cond, uncond, v_old, v_anchor, **options)

    def backward(cotangents: list[Tensor]) -> tuple[Tensor, Tensor]:
        return reference.policy_terms_backward(
            cotangents[0], cond, uncond, v_old, v_anchor, noise=None, element_offset=0, **options
        )

    assert_backward_is_autograd(forward, (cond, uncond), backward)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param({"keys": None}, "neither of noise and keys", id="no-noise"),
        pytest.param({"noise": torch.zeros(SHAPE)}, "both of noise and keys", id="two-noises"),
        pytest.param({"gain": torch.ones(2)}, r"gain has shape \(2,\)", id="too-few-gains"),
        pytest.param({"v_old": torch.zeros(3, 4)}, r"v_old has shape \(3, 4\)", id="other-shape"),
        pytest.param({"v_anchor": torch.zeros(SHAPE).double()}, "v_anchor has dtype torch.float64", id="float64"),
    ],
)
def test_refuses(change: dict[str, object], message: str) -> None:
    v_new, v_old = latents(2, torch.device("cpu"))
    arguments: dict[str, object] = {"v_old": v_old, "gain": GAIN, "keys": key_words(OWNERS)}
    with pytest.raises(ValueError, match=message):
        policy_terms(v_new, None, **arguments | change)  # type: ignore[arg-type]


def test_refuses_a_mean_over_nothing() -> None:
    empty = torch.zeros(2, 0)
    with pytest.raises(ValueError, match="mean over no elements"):
        policy_terms(empty, None, empty, gain=torch.ones(2), noise=empty)
