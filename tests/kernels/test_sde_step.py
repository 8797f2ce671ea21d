"""sde_step beyond parity: the sampler's own step, rounding as eager PyTorch does, refusal of half a noise."""

import pytest
import torch
from torch import Tensor

from sage_fast.noise import NoiseKey, gaussian, key_words
from sage_fast.sde import SDE_TYPES, sigma_schedule, transition, transition_table
from sage_kernels import sde_step
from sage_kernels.reference import sde_step as reference
from tests.kernels.support import assert_backward_is_autograd

SHAPE = (3, 4, 3, 5, 7)
OWNERS = [NoiseKey(seed=1, update=2, prompt_index=i, sample_index=7) for i in range(3)]


def latents(count: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(SHAPE, generator=generator).to(dtype) for _ in range(count)]


@pytest.mark.parametrize("sde_type", SDE_TYPES)
def test_every_sampler_takes_its_own_step(sde_type: str, device: torch.device) -> None:
    x, v = latents(2)
    table = transition_table(sde_type, sigma_schedule(6, 5.0), 0.5)
    keys = key_words(OWNERS, device)
    for step in range(table.num_steps):
        a, b, std = (float(column[step]) for column in (table.a, table.b, table.std))
        noise = gaussian(OWNERS, step, SHAPE[1:]) if std else None
        expected = transition(x, v, noise, a=a, b=b, std=std)
        given = sde_step(v.to(device), None, x.to(device), a=a, b=b, std=std, keys=keys if std else None, step=step)
        torch.testing.assert_close(given.x.cpu(), expected, rtol=1e-6, atol=2e-6)


def test_rows_may_be_at_different_steps(device: torch.device) -> None:
    x, v = (t.to(device) for t in latents(2))
    keys, steps = key_words(OWNERS, device), torch.tensor([4, 0, 2], device=device)
    a, b, std = (torch.rand(3, generator=torch.Generator().manual_seed(i)).to(device) for i in range(3))
    together = sde_step(v, None, x, a=a, b=b, std=std, keys=keys, step=steps).x
    for i in range(3):
        row = slice(i, i + 1)
        alone = sde_step(
            v[row], None, x[row], a=float(a[i]), b=float(b[i]), std=float(std[i]), keys=keys[row], step=int(steps[i])
        ).x
        assert torch.equal(alone[0], together[i])


def test_guided_velocity_is_that_of_eager_pytorch_bit_for_bit(device: torch.device) -> None:
    x, cond, uncond = (t.to(device) for t in latents(3))
    result = sde_step(cond, uncond, x, guidance_scale=6.0, a=1.0, b=-0.1, std=0.0, sigma=0.7, return_velocity=True)
    assert result.velocity is not None and result.x0 is None
    velocity = uncond + 6.0 * (cond - uncond)
    assert torch.equal(result.velocity, velocity)
    assert torch.equal(result.x, 1.0 * x + -0.1 * velocity)


def test_data_prediction(device: torch.device) -> None:
    clean, noise = (t.to(device) for t in latents(2))
    sigma = torch.tensor([0.2, 0.5, 0.9], device=device)
    rows = sigma.view(-1, 1, 1, 1, 1)
    x = (1 - rows) * clean + rows * noise
    result = sde_step(noise - clean, None, x, a=1.0, b=0.0, std=0.0, sigma=sigma, return_x0=True)
    torch.testing.assert_close(result.x0, clean, rtol=0, atol=1e-6)


def test_state_stays_float32_and_inputs_keep_their_types(device: torch.device) -> None:
    x, cond, uncond = (t.to(device) for t in latents(3, torch.bfloat16))
    x = x.float().requires_grad_()
    cond.requires_grad_(), uncond.half().requires_grad_()
    result = sde_step(cond, uncond, x, guidance_scale=2.0, a=1.0, b=-0.1, std=0.3, keys=key_words(OWNERS, device))
    assert result.x.dtype == torch.float32
    result.x.sum().backward()
    assert x.grad is not None and cond.grad is not None
    assert (x.grad.dtype, cond.grad.dtype) == (torch.float32, torch.bfloat16)


def test_gradient_through_the_data_prediction_alone(device: torch.device) -> None:
    x, cond = (t.to(device).requires_grad_() for t in latents(2))
    x0 = sde_step(cond, None, x, a=0.9, b=-0.1, std=0.0, sigma=0.25, return_x0=True).x0
    assert x0 is not None
    x0.backward(torch.ones_like(x0))
    assert torch.equal(x.grad, torch.ones_like(x)) and torch.equal(cond.grad, torch.full_like(x, -0.25))


def test_numbers_as_coefficients_compile_into_one_graph(device: torch.device) -> None:
    x, cond, uncond = (t.to(device) for t in latents(3))
    keys = key_words(OWNERS, device)

    def step(cond: Tensor, uncond: Tensor, x: Tensor) -> Tensor:
        return sde_step(cond, uncond, x, guidance_scale=6.0, a=0.9, b=-0.1, std=0.3, keys=keys, step=4).x

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend="inductor" if device.type == "cuda" else "aot_eager")
    assert torch.equal(compiled(cond, uncond, x), step(cond, uncond, x))


def test_no_samples(device: torch.device) -> None:
    x = torch.zeros(0, 4, 5, device=device)
    keys = torch.zeros(0, 2, dtype=torch.int64, device=device)
    assert sde_step(x, None, x, a=1.0, b=0.0, std=1.0, keys=keys).x.shape == (0, 4, 5)


def test_reference_backward_is_autograd_of_the_reference() -> None:
    cond, uncond, x = (t.double() for t in latents(3))
    a, b, sigma = (torch.rand(3, dtype=torch.float64, generator=torch.Generator().manual_seed(i)) for i in range(3))

    def forward(cond: Tensor, uncond: Tensor, x: Tensor) -> list[Tensor | None]:
        options = {"return_x0": True, "return_velocity": True}
        return list(reference.sde_step(cond, uncond, x, guidance_scale=6.0, a=a, b=b, std=0.0, sigma=sigma, **options))

    assert_backward_is_autograd(
        forward,
        (cond, uncond, x),
        lambda c: reference.sde_step_backward(*c, guidance_scale=6.0, a=a, b=b, sigma=sigma),
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param({"keys": None}, "keys are None but std is not the number 0", id="noise-without-keys"),
        pytest.param({"keys": torch.zeros(2, 2, dtype=torch.int64)}, r"\(2, 2\).*\(3, 2\)", id="too-few-keys"),
        pytest.param({"keys": torch.zeros(3, 2)}, "keys are torch.float32", id="float-keys"),
        pytest.param({"step": -1}, "step is -1", id="negative-step"),
        pytest.param({"step": 1.5}, "step is 1.5", id="fractional-step"),
        pytest.param({"step": torch.zeros(2, dtype=torch.int64)}, r"step is torch.int64 \(2,\)", id="too-few-steps"),
        pytest.param({"element_offset": -4}, "element_offset is -4", id="negative-offset"),
        pytest.param({"return_x0": True}, "return_x0 needs sigma", id="x0-without-sigma"),
        pytest.param({"a": "1"}, "a is '1', a str", id="text-coefficient"),
        pytest.param({"std": torch.ones(2)}, r"std has shape \(2,\)", id="too-few-coefficients"),
        pytest.param({"x": torch.zeros(3)}, "at least 2 dimensions|one shape", id="no-elements-dimension"),
    ],
)
def test_refuses(change: dict[str, object], message: str) -> None:
    x, cond = latents(2)
    arguments: dict[str, object] = {"x": x, "a": 1.0, "b": -0.1, "std": 0.5, "keys": key_words(OWNERS)}
    with pytest.raises(ValueError, match=message):
        sde_step(cond, None, **arguments | change)  # type: ignore[arg-type]
