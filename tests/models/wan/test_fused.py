"""The fused forward of Wan against diffusers' class in float64, its kernels, its
shares of tokens, its refusals.
"""

import copy
import re
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import WanTransformer3DModel
from torch import Tensor, nn

from sage_fast.models.fused import Rotary, accelerate
from sage_fast.models.wan.block import TEXT_TOKENS
from sage_fast.models.wan.fused import NAMES, WanTransformer
from sage_fast.models.wan.wan import Wan
from sage_fast.policy.guidance import GuidedPolicy
from sage_fast.policy.lora import add_lora
from sage_fast.records import PromptEmbeds
from sage_fast.sharding.ulysses import shard_sequence
from tests.distributed.test_ulysses import thread_collectives, thread_group
from tests.tiny.wan import TEXT_WIDTH, tiny_transformer

ROOT = Path(__file__).resolve().parents[3]
CHECKPOINTING = ("none", "feed_forward", "selective", "full")
Result = tuple[Tensor, dict[str, Tensor]]
"""Velocity, and gradients by parameter."""


def transformer(
    trained: str = "full", dtype: torch.dtype = torch.float64, **sizes: Any
) -> WanTransformer3DModel:
    model = tiny_transformer(**sizes).to(dtype)
    model.rope.to(dtype)
    if trained == "lora":
        add_lora(
            model.requires_grad_(False),
            rank=8,
            alpha=3,
            target_modules=list(NAMES),
            seed=0,
        )
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                # adapters are made in float32
                parameter.data = parameter.data.to(dtype)
                nn.init.normal_(
                    parameter,
                    std=0.1,
                    generator=torch.Generator().manual_seed(len(name)),
                )
    return model


def fuse(model: WanTransformer3DModel, **options: Any) -> Any:
    return accelerate(model, **options)


def prompt(tokens: int, dtype: torch.dtype = torch.float64) -> PromptEmbeds:
    text = torch.randn(
        tokens, TEXT_WIDTH, generator=torch.Generator().manual_seed(tokens)
    )
    return PromptEmbeds(text=text.to(dtype), glyph=torch.zeros(0, 1))


def compute(
    model: WanTransformer3DModel,
    size: tuple[int, ...],
    split: bool | None,
    batch: int = 2,
) -> Result:
    """A guided velocity and every gradient of it; without guidance where `split` is
    None.
    """
    generator = torch.Generator().manual_seed(1)
    dtype = model.patch_embedding.weight.dtype
    latents, cotangent = (
        torch.randn(batch, 4, *size, generator=generator).to(dtype) for _ in range(2)
    )
    policy = GuidedPolicy(model, prompt(1, dtype), 1.0 if split is None else 5.0)
    prompts = [prompt(7, dtype), prompt(3, dtype)][:batch]
    sigma = torch.tensor([0.75, 0.25])[:batch]
    velocity = policy.velocity_and_gradient(
        latents, sigma, prompts, [cotangent], split=bool(split)
    )
    return velocity.detach(), {
        name: p.grad for name, p in model.named_parameters() if p.grad is not None
    }


def check(given: Result, expected: Result, limit: float) -> None:
    """Within a share of the largest value; some gradients are zero but for rounding, as
    that of a key's bias.
    """
    assert (given[0] - expected[0]).abs().max() <= limit * expected[0].abs().max()
    assert given[1].keys() == expected[1].keys()
    least = 1e-6 * max(float(gradient.abs().max()) for gradient in expected[1].values())
    for name, gradient in expected[1].items():
        error = (given[1][name] - gradient).abs().max()
        assert error <= limit * max(float(gradient.abs().max()), least), (
            name,
            float(error),
        )


@pytest.fixture
def in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """Diffusers' class takes its norms in float32, whatever its weights are."""
    monkeypatch.setattr(Tensor, "float", Tensor.double)


@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize("split", [False, True], ids=["paired", "split"])
@pytest.mark.parametrize("trained", ["full", "lora"])
def test_guided_velocity_and_every_gradient_are_those_of_the_stock_class(
    trained: str, split: bool
) -> None:
    # With 64 tokens of width 24 the adapters' products are widened.
    size = (4, 8, 8) if trained == "lora" else (2, 4, 6)
    expected = compute(transformer(trained), size, split)
    for checkpointing in CHECKPOINTING:
        model = transformer(trained)
        fuse(model, checkpointing=checkpointing)
        given = compute(model, size, split)
        assert all(gradient.any() for gradient in given[1].values())
        check(given, expected, 1e-10)


def test_the_kernels_compute_it() -> None:
    """In Triton's interpreter, in float32, with everything trained; one block by
    itself.
    """
    results = []
    for kernels in ("reference", "triton"):
        model = transformer(dtype=torch.float32, num_layers=1)
        handle = fuse(
            model, kernels=kernels, attention="reference", checkpointing="selective"
        )
        generator = torch.Generator().manual_seed(1)
        x, text, time = (
            torch.randn(1, n, 24, generator=generator, requires_grad=True)
            for n in (4, 3, 6)
        )
        handle.rotary = Rotary(*handle.make_rope(torch.empty(1, 4, 1, 4, 4)))  # type: ignore[attr-defined]
        output = model.blocks[0](x, text, time)
        output.square().sum().backward()
        inputs = {"x": x.grad, "text": text.grad, "time": time.grad}
        weights = {name: p.grad for name, p in model.blocks[0].named_parameters()}
        results.append((output.detach(), inputs | weights))
    check(results[1], results[0], 1e-4)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("degree", "checkpointing"),
    [(2, "full"), (3, "selective"), (4, "none"), (6, "feed_forward")],
)
def test_shares_of_the_tokens_compute_what_one_process_computes(
    degree: int, checkpointing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twelve heads, as the published model has; 15 tokens do not divide by most
    degrees.
    """
    whole = transformer(num_attention_heads=12, num_layers=1)
    size = (1, 6, 10)
    models = [copy.deepcopy(whole) for _ in range(degree)]
    fuse(whole, checkpointing=checkpointing)
    expected = compute(whole, size, None)
    thread_collectives(monkeypatch)

    def of_rank(model: WanTransformer3DModel, member: Any) -> Result:
        shard_sequence(fuse(model, checkpointing=checkpointing), member)
        return compute(model, size, None)

    with ThreadPoolExecutor(degree) as pool:
        results = list(pool.map(of_rank, models, thread_group(degree)))
    assert all(torch.equal(velocity, results[0][0]) for velocity, _ in results)
    total = {name: sum(own[name] for _, own in results) for name in expected[1]}
    check((results[0][0], total), expected, 1e-10)  # type: ignore[arg-type]


def test_bfloat16_is_as_near_as_the_stock_class() -> None:
    """The time embedding and the modulation stay float32, and what is elementwise is
    rounded once.
    """
    latents = torch.randn(1, 4, 2, 8, 8)
    sigma = torch.tensor([0.7777])
    text = [prompt(5, torch.float32)]
    exact = WanTransformer.velocity(tiny_transformer(), latents, sigma, text)
    models = [tiny_transformer() for _ in range(2)]
    for model in models:
        Wan().cast(model, torch.bfloat16)
    fuse(models[1])
    with torch.no_grad():
        stock, fused = (
            WanTransformer.velocity(model, latents, sigma, text) for model in models
        )
    assert fused.dtype == torch.float32 and not torch.equal(stock, fused)
    assert (fused - exact).norm() <= 1.1 * (stock - exact).norm()


def test_what_it_does_not_compute_is_refused() -> None:
    model = transformer(dtype=torch.float32)
    with pytest.raises(ValueError, match=r"model\.adaln is 'table'"):
        fuse(model, adaln="table")
    with pytest.raises(ValueError, match="cross_attn_norm is False"):
        fuse(transformer(cross_attn_norm=False))
    fuse(model)
    with pytest.raises(ValueError, match=r"model\.forward to stock"):
        model(
            hidden_states=torch.zeros(1, 4, 1, 4, 4),
            timestep=torch.ones(1),
            encoder_hidden_states=torch.zeros(1, TEXT_TOKENS, TEXT_WIDTH),
            attention_kwargs={"scale": 0.5},
        )


def test_autocast_is_warned_of_once_where_the_weights_stay_float32() -> None:
    latents = torch.randn(1, 4, 2, 4, 4)
    text = torch.randn(1, 512, TEXT_WIDTH)
    for dtype, said in ((torch.float32, 1), (torch.bfloat16, 0)):
        model = tiny_transformer().to(dtype)
        fuse(model)
        with (
            warnings.catch_warnings(record=True) as caught,
            torch.autocast("cpu", torch.bfloat16),
        ):
            warnings.simplefilter("default")
            for _ in range(2):
                inputs = latents.to(dtype), torch.tensor([300.0]), text.to(dtype)
                assert model(*inputs)[0].dtype == dtype
        assert sum("torch.autocast is on" in str(w.message) for w in caught) == said


def test_the_example_with_peft_trains_as_with_the_stock_forward(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code = (ROOT / "examples/accelerate_peft.py").read_text("utf-8")
    call = "acceleration = accelerate(model)"
    assert code.count(call) == 1
    losses = []
    for version in (code, code.replace(call, "")):
        torch.manual_seed(0)
        exec(version, {"__name__": "example"})
        losses.append(re.findall(r"loss (\S+)", capsys.readouterr().out))
    ours, stock = [[float(loss) for loss in found] for found in losses]
    assert len(ours) == 3 and ours == pytest.approx(stock, abs=2e-4)
