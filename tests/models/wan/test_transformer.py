"""The transformer of Wan 2.1 behind `ModelFamily`: velocity, gradients, types, closed forms, and names elsewhere."""

from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from diffusers import WanTransformer3DModel
from safetensors.torch import save_file
from torch import Tensor

from sage_fast.config.load import load_config
from sage_fast.models.family import describe_model, family_of
from sage_fast.models.stored import open_transformer
from sage_fast.models.transformer import Layout
from sage_fast.models.wan.backbone import NAMES, TEXT_TOKENS, WanTransformer, forward_work
from sage_fast.models.wan.wan import WAN_1_3B
from sage_fast.planning.trace import meta_transformer, trace
from sage_fast.planning.work import velocity_call
from sage_fast.policy.adapters import read_adapter
from sage_fast.policy.guidance import GuidedPolicy
from sage_fast.records import PromptEmbeds
from tests.tiny.wan import TEXT_WIDTH, build_wan, tiny_transformer


def prompt(tokens: int) -> PromptEmbeds:
    return PromptEmbeds(text=torch.randn(tokens, TEXT_WIDTH, dtype=torch.float64), glyph=torch.zeros(0, 1))


def stock(transformer: WanTransformer3DModel, latents: Tensor, sigma: Tensor, prompts: list[PromptEmbeds]) -> Tensor:
    """Diffusers' own forward, with what `WanPipeline` gives it."""
    zeros = torch.zeros(TEXT_TOKENS, TEXT_WIDTH, dtype=latents.dtype)
    text = torch.stack([torch.cat([p.text, zeros[len(p.text) :]]) for p in prompts])
    result: Tensor = transformer(
        hidden_states=latents, timestep=1000 * sigma, encoder_hidden_states=text, return_dict=False
    )[0]
    return result


def float64_transformer() -> WanTransformer3DModel:
    transformer = tiny_transformer().double()
    transformer.rope.double()
    return transformer


@pytest.mark.parametrize("split", [False, True])
def test_guided_velocity_and_every_gradient_are_those_of_the_stock_class(split: bool) -> None:
    torch.manual_seed(0)
    ours, reference = float64_transformer(), float64_transformer()
    latents, sigma = torch.randn(2, 4, 2, 4, 6, dtype=torch.float64), torch.tensor([0.75, 0.25])
    prompts, empty, cotangent = [prompt(7), prompt(3)], prompt(1), torch.randn_like(latents)
    conditional = stock(reference, latents, sigma.double(), prompts)
    unconditional = stock(reference, latents, sigma.double(), [empty, empty])
    expected = unconditional + 5 * (conditional - unconditional)
    expected.backward(cotangent)
    policy = GuidedPolicy(ours, empty, 5.0)
    velocity = policy.velocity_and_gradient(latents, sigma, prompts, [cotangent], split=split)
    torch.testing.assert_close(velocity, expected.detach(), rtol=1e-10, atol=1e-10)
    for (name, given), wanted in zip(ours.named_parameters(), reference.parameters(), strict=True):
        assert given.grad is not None and wanted.grad is not None and wanted.grad.any(), name
        assert (given.grad - wanted.grad).abs().max() <= 1e-10 * wanted.grad.abs().max(), name


def test_the_zeros_behind_a_prompt_act() -> None:
    """Nothing may pack them away."""
    torch.manual_seed(0)
    transformer, latents, text = float64_transformer(), torch.randn(1, 4, 2, 4, 6).double(), prompt(3)
    sigma = torch.tensor([0.5])
    whole = WanTransformer.velocity(transformer, latents, sigma, [text])
    bare = transformer(latents, 1000 * sigma.double(), text.text[None], return_dict=False)[0]
    assert (whole - bare).abs().max() > 0.01 * whole.abs().max()


@pytest.mark.parametrize("read", [True, False])
def test_a_bfloat16_model_keeps_in_float32_what_the_stock_one_keeps(read: bool, tmp_path: Path) -> None:
    transformer = tiny_transformer()
    transformer.save_pretrained(tmp_path)
    expected = WanTransformer3DModel.from_pretrained(tmp_path, torch_dtype=torch.bfloat16)
    if read:
        transformer, weights = open_transformer(WanTransformer3DModel, tmp_path, torch.bfloat16, buffers=("rope",))
        weights.read_into(transformer)
    else:
        family_of(transformer).cast(transformer, torch.bfloat16)
    given = dict(transformer.named_parameters())
    assert {p.dtype for p in given.values()} == {torch.float32, torch.bfloat16}
    for name, parameter in expected.named_parameters():
        assert given[name].dtype == parameter.dtype and torch.equal(given[name], parameter), name
    latents, sigma = torch.randn(1, 4, 2, 4, 6), torch.tensor([0.7777777])
    text = PromptEmbeds(text=torch.randn(3, TEXT_WIDTH), glyph=torch.zeros(0, 1))
    with torch.no_grad():
        given_velocity, exact = (WanTransformer.velocity(t, latents, sigma, [text]) for t in (transformer, expected))
        rounded = WanTransformer.velocity(transformer, latents, sigma.bfloat16().float(), [text])
    assert torch.equal(given_velocity, exact) and given_velocity.dtype == torch.float32
    assert not torch.equal(given_velocity, rounded), "the timestep is not rounded to bfloat16"


def test_the_closed_form_is_what_torch_counts() -> None:
    config = load_config("configs/wan_480p_lora_1gpu.yaml", ["--model.path=null", "--model.checkpointing=none"])
    call = velocity_call(config, describe_model(config.model), on_gpu=True)
    assert call.latent == (16, 21, 60, 104) and call.forward == "fused"
    cost, work = trace(call), forward_work(WAN_1_3B, 32_760, TEXT_TOKENS)
    guided = work.times(2, 2)
    assert cost.attention == guided.attention
    # Layers of one input (q k v; k v of the text) share a product with all of their low-rank columns.
    video = (3 * 1536 + 3 * 3 * 1536) + 3 * (2 * 1536) + 2 * (1536 + 8960)
    text = 2 * 1536 + 2 * 2 * 1536
    each = 2 * 30 * 2 * 32 * (32_760 * video + TEXT_TOKENS * text)
    assert abs(cost.linear / (guided.linear + each) - 1) < 1e-6
    assert abs(work.linear / 82.1e12 - 1) < 1e-3 and abs(work.attention / 200.9e12 - 1) < 5e-3
    assert sum(p.numel() for p in meta_transformer(WAN_1_3B, torch.bfloat16).parameters()) == 1_418_996_800
    once = trace(replace(call, guidance_scale=1.0))
    assert 2 * once.linear == cost.linear


ADAPTED = ["attn1.to_q", "attn2.to_out.0", "ffn.net.0.proj", "ffn.net.2"]


@pytest.mark.parametrize("layout", get_args(Layout))
def test_the_stock_pipeline_loads_an_adapter_by_every_name(layout: Layout, tmp_path: Path) -> None:
    torch.manual_seed(0)
    modules = dict(tiny_transformer().named_modules())
    values: dict[str, Tensor] = {}
    for name in (f"blocks.{block}.{layer}" for block in range(2) for layer in NAMES):
        layer: Any = modules[name]
        values[f"{name}.lora_A.weight"] = torch.randn(2, layer.in_features)
        values[f"{name}.lora_B.weight"] = torch.randn(layer.out_features, 2)
    if layout not in WanTransformer.clients:
        assert layout == "official"
        return
    named = WanTransformer.named_adapter(values, layout)
    save_file(named, tmp_path / "pytorch_lora_weights.safetensors", {"alpha": "2", "rank": "2"})
    pairs = read_adapter(tmp_path, WanTransformer.layers_named)
    assert pairs.keys() == {name.rpartition(".lora_")[0] for name in values}
    for name, pair in pairs.items():
        assert pair.scale == 1.0 and torch.equal(pair.a, values[f"{name}.lora_A.weight"])
        assert torch.equal(pair.b, values[f"{name}.lora_B.weight"])
    if layout == "peft":
        return
    pipeline = build_wan()
    pipeline.load_lora_weights(str(tmp_path))
    merged = dict(pipeline.transformer.named_parameters())
    for name, value in values.items():
        assert torch.equal(merged[name.replace(".weight", ".default_0.weight")], value), name
