"""FP8 products: against torch's own and diffusers with rounded layers, and that they act where nothing is trained."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sage_fast import accelerate
from sage_fast.config.errors import ConfigError
from sage_fast.config.schema import RunConfig
from sage_fast.models import fp8
from sage_fast.models.fp8 import LARGEST, Copies, Quantized, quantize_rows, quantized_weights, scaled_product
from sage_fast.models.hunyuan15.projection import LowRank, Projection, project, read_adapters
from sage_fast.models.hunyuan15.velocity import velocity
from sage_fast.planning.memory import fp8_copies
from sage_fast.run.run import build_trainer
from tests.models.hunyuan15.oracle import latents, prompt, tiny_transformer
from tests.tiny.velocity_field import relative

MakeRun = Callable[..., RunConfig]
STEPS, NOISY = 6, (2, 3)
WINDOW = (
    f"--rollout.num_steps={STEPS}",
    "--rollout.sde_window.size=2",
    "--rollout.sde_window.start=2",
    "--rollout.sde_window.stride=0",
)
LARGE = ("to_q", "to_k", "to_v", "add_q_proj", "add_k_proj", "add_v_proj", "to_out.0", "to_add_out", "proj", "net.2")
"""Ends of the names of a block's large layers."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_emulation_is_torchs_own_product(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(rows, 64, generator=generator) * 10 ** torch.randn(rows, 1) for rows in (23, 48))
    bias = torch.randn(48, generator=generator, dtype=dtype)
    x[3] = 0
    rows, weight = quantize_rows(x.to(dtype)), quantize_rows(w.to(dtype))
    weight = Quantized(weight.values.t(), weight.scales.t())
    own = torch._scaled_mm(
        rows.values, weight.values, scale_a=rows.scales, scale_b=weight.scales, out_dtype=torch.float32
    )
    emulated = scaled_product(rows, weight, None, torch.float32)
    torch.testing.assert_close(emulated, own, rtol=1e-5, atol=1e-5 * float(own.abs().max()))
    with_bias = scaled_product(rows, weight, bias, dtype)
    assert with_bias.dtype == dtype and torch.equal(with_bias[3], bias)
    torch.testing.assert_close(with_bias, (own + bias.float()).to(dtype), rtol=1e-2, atol=1e-5)


def test_a_row_fills_the_range_and_is_rounded_to_nearest() -> None:
    x = torch.randn(7, 32, dtype=torch.bfloat16) * torch.logspace(-9, 20, 7)[:, None]
    values, scales = quantize_rows(x)
    assert torch.equal(values.float().abs().amax(1), torch.full((7,), LARGEST))
    exact = x.float() / scales
    # Three bits behind the point: half of the last one, and below 2^-6 half of 2^-9.
    assert ((values.float() - exact).abs() <= (2**-4 * exact.abs()).clamp(min=2**-10) * (1 + 1e-5)).all()


class RoundedLinear(nn.Module):
    """A linear layer with both operands cast to FP8 and back, written without the code under test."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias

    def forward(self, x: Tensor) -> Tensor:
        def rounded(values: Tensor) -> Tensor:
            scale = values.abs().amax(-1, keepdim=True).clamp(min=1e-12) / 448
            return (values / scale).to(torch.float8_e4m3fn).to(values.dtype) * scale

        return F.linear(rounded(x), rounded(self.weight), self.bias)


@pytest.mark.parametrize("batch", [1, 2])
def test_it_is_diffusers_with_rounded_operands_in_the_large_layers(batch: int) -> None:
    stock = tiny_transformer()
    own = copy.deepcopy(stock)
    x, sigma, words = latents(batch), torch.full((batch,), 0.7), [prompt(5, 2)] * batch
    with torch.no_grad():
        exact = velocity(stock, x, sigma, words)
        for name, module in list(stock.transformer_blocks.named_modules()):
            if isinstance(module, nn.Linear) and name.endswith(LARGE):
                owner, _, last = name.rpartition(".")
                stock.transformer_blocks.get_submodule(owner)._modules[last] = RoundedLinear(module)
        expected = velocity(stock, x, sigma, words)
    acceleration = accelerate(own)
    with torch.no_grad():
        given = velocity(own, x, sigma, words, fp8=True)
    assert relative(expected, exact) > 0.01
    # A number on the border of two FP8 values may be rounded either way.
    assert relative(given, expected) < 0.05 * relative(expected, exact)
    copies = [quantized for _, quantized in acceleration._quantized.values()]
    assert sum(tensor.nbytes for quantized in copies for tensor in quantized) == fp8_copies(own.config)
    with torch.no_grad():
        torch.testing.assert_close(velocity(own, x, sigma, words), exact, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("into", [False, True], ids=["new", "into"])
def test_low_rank_updates_keep_their_precision(into: bool) -> None:
    """What they add to the product is what they are, although its weights are rounded."""
    generator = torch.Generator().manual_seed(0)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator)

    x, copies = normal(2, 5, 32), Copies()
    plain = [Projection(normal(48, 32), normal(48), ()) for _ in range(3)]
    updates = [(LowRank(normal(4, 32), normal(48, 4), 2.0),), (), (LowRank(normal(4, 32), normal(48, 4), 0.5),)]
    layers = [layer._replace(low_rank=low_rank) for layer, low_rank in zip(plain, updates, strict=True)]
    (adapter,) = read_adapters([layers], torch.float32)
    out = torch.zeros(10, 160)[:, 16:] if into else None
    given, low = project(x, layers, adapter, out, copies)
    without, _ = project(x, plain, None, None, copies)
    zero = torch.zeros(2, 5, 48)
    expected = torch.cat([sum((u.scale * x @ u.a.t() @ u.b.t() for u in own), zero) for own in updates], dim=2)
    torch.testing.assert_close(given.view(2, 5, -1) - without, expected, rtol=1e-4, atol=1e-4)
    assert low is not None and (out is None or given is out)
    exact, _ = project(x, plain)
    assert 0.01 < relative(without, exact) < 0.06


def test_copies_are_made_once_and_again_when_a_weight_changes() -> None:
    weights = [torch.randn(16, 32), torch.randn(32, 32)]
    copies = Copies()
    first = quantized_weights(weights, copies)
    assert quantized_weights(weights, copies) is first and first.values.shape == (32, 48)
    weights[1].mul_(2)
    second = quantized_weights(weights, copies)
    assert torch.equal(second.scales[:, 16:], 2 * first.scales[:, 16:]) and len(copies) == 1


@pytest.mark.parametrize(
    "words",
    [("--training.update=two_phase",), ("--training.update=single_pass",), ("--rollout.cache_threshold=0.5",)],
    ids=["two_phase", "single_pass", "feature-cache"],
)
def test_steps_that_are_trained_and_the_ratio_keep_their_precision(
    tiny_run: MakeRun, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    options = (*WINDOW, "--rollout.batch_size=2", "--rollout.micro_batch_size=1", "--objective.kl_mode=fixed")
    trainer = build_trainer(tiny_run(*options, "--model.fp8=true", *words))
    rounded: list[int] = []
    exact: dict[int, list[bool]] = {step: [] for step in range(STEPS)}
    rolled: list[int] = []
    given = trainer.policy.velocity

    def counted(*arguments: Any, trained: bool = True) -> Tensor:
        rounded.extend([] if trained else [1])
        return given(*arguments, trained=trained)

    monkeypatch.setattr(trainer.policy, "velocity", counted)
    trainer.on_rollout = lambda record: rolled.append(len(rounded))
    first = trainer.iterate()
    assert rolled == [2 * (STEPS - len(NOISY))] and len(rounded) == rolled[0]
    second = trainer.iterate()
    # The anchor lies behind now: one pass per video and trained step.
    assert len(rounded) == 2 * rolled[0] + 2 * len(NOISY)
    for record in (first, second):
        assert record["ratio/max_deviation"] == record["log_ratio/mean"] == 0.0
    assert first["kl/position"] == 0.0 < second["kl/position"]
    assert ("rollout/skipped_forwards" in first) == (trainer.policy.reuse is not None)
    assert first.get("rollout/skipped_forwards", 1.0) > 0
    trainer.gradient.begin(0.0, None, trainer._kl_factors())
    with torch.no_grad():
        for t in trainer._rollout():
            for step in range(STEPS):
                v = given(t.latents[step], t.table.sigmas[[step]].float(), [t.samples[0].embeds])
                exact[step].append(torch.equal(v, t.velocities[step]))
    assert [step for step, rows in exact.items() if all(rows)] == list(NOISY)


def test_an_evaluation_is_never_in_fp8(tiny_run: MakeRun) -> None:
    plain, rounded = (build_trainer(tiny_run(*WINDOW, *more)) for more in ((), ("--model.fp8=true",)))
    assert plain.evaluate()[0] == rounded.evaluate()[0]


def test_it_needs_the_fused_forward_and_no_gradient() -> None:
    x, sigma, words = latents(1), torch.tensor([0.7]), [prompt(5, 2)]
    with pytest.raises(ValueError, match="FP8 need the fused forward"):
        velocity(tiny_transformer(), x, sigma, words, fp8=True)
    accelerated = tiny_transformer()
    accelerate(accelerated)
    with pytest.raises(AssertionError, match="no gradient"):
        velocity(accelerated, x, sigma, words, fp8=True)


SHARDED = "distributed.keep_gathered is .*must be always with model.fp8"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["--training.mode=full", "--model.adaln=auto"], "training.mode is 'full', .* be lora with model.fp8"),
        (["--objective.kl_mode=none"], "all 4 steps draw noise .* has no anchor"),
        (["--distributed.engine=deepspeed", "--distributed.deepspeed_config=deepspeed/zero2.json"], "be fsdp with"),
        (["--model.forward=stock"], "model.fp8 is True, .* false with model.forward stock"),
        (["--distributed.dp_shard=2", "--distributed.keep_gathered=rollout"], SHARDED),
        (["--distributed.dp_replicate=1"], SHARDED),
        (["--distributed.sp=2"], SHARDED),
    ],
    ids=["full", "nowhere", "deepspeed", "stock", "fsdp", "rest-is-sharded", "sp"],
)
def test_fp8_that_cannot_act_is_refused(tiny_run: MakeRun, overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        tiny_run("--model.fp8=true", *overrides)


def test_a_machine_without_the_product_is_refused_by_name(tiny_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> Tensor:
        raise RuntimeError("compute capability >= 9.0 or 8.9")

    build_trainer(tiny_run("--model.fp8=true"))
    monkeypatch.setattr(fp8, "scaled_product", fails)
    with pytest.raises(ConfigError, match=r"bfloat16 on cpu \(compute capability .*\)\. Set model\.fp8 to false"):
        build_trainer(tiny_run("--model.fp8=true", "--model.dtype=bfloat16"))
