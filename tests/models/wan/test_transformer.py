"""The transformer of Wan 2.1 behind `ModelFamily`: types, closed forms, and names
elsewhere.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import WanTransformer3DModel
from safetensors.torch import load_file, save_file
from torch import Tensor

from sage_fast.config.load import load_config
from sage_fast.config.sections import ModelConfig
from sage_fast.models.family import describe_model, family_of
from sage_fast.models.stored import open_transformer
from sage_fast.models.wan.fused import (
    NAMES,
    OUTER_NAMES,
    TEXT_TOKENS,
    WanTransformer,
    forward_work,
)
from sage_fast.models.wan.wan import WAN_1_3B
from sage_fast.planning.trace import meta_transformer, trace
from sage_fast.planning.work import velocity_call
from sage_fast.policy.adapters import load_adapter, use_adapter
from sage_fast.policy.layouts import Layout, Pair, read_adapter, renamed
from sage_fast.policy.lora import add_lora
from sage_fast.records import PromptEmbeds
from tests.tiny.wan import TEXT_WIDTH, build_wan, tiny_transformer


@pytest.mark.parametrize("read", [True, False])
def test_a_bfloat16_model_keeps_in_float32_what_the_stock_one_keeps(
    read: bool, tmp_path: Path
) -> None:
    transformer = tiny_transformer()
    transformer.save_pretrained(tmp_path)
    expected = WanTransformer3DModel.from_pretrained(
        tmp_path, torch_dtype=torch.bfloat16
    )
    if read:
        transformer, weights = open_transformer(
            WanTransformer3DModel, tmp_path, torch.bfloat16, buffers=("rope",)
        )
        weights.read_into(transformer)
    else:
        family_of(transformer).cast(transformer, torch.bfloat16)
    given = dict(transformer.named_parameters())
    assert {p.dtype for p in given.values()} == {torch.float32, torch.bfloat16}
    for name, parameter in expected.named_parameters():
        assert given[name].dtype == parameter.dtype and torch.equal(
            given[name], parameter
        ), name
    latents = torch.randn(1, 4, 2, 4, 6)
    sigma = torch.tensor([0.7777777])
    text = PromptEmbeds(text=torch.randn(3, TEXT_WIDTH), glyph=torch.zeros(0, 1))
    with torch.no_grad():
        given_velocity, exact = (
            WanTransformer.velocity(t, latents, sigma, [text])
            for t in (transformer, expected)
        )
        rounded = WanTransformer.velocity(
            transformer, latents, sigma.bfloat16().float(), [text]
        )
    assert torch.equal(given_velocity, exact) and given_velocity.dtype == torch.float32
    assert not torch.equal(given_velocity, rounded), (
        "the timestep is not rounded to bfloat16"
    )


def test_the_closed_form_is_what_torch_counts() -> None:
    config = load_config(
        "configs/wan_480p_lora_1gpu.yaml",
        [
            "--model.path=null",
            "--model.checkpointing=none",
            "--rollout.guidance_scale=5",
            "--lora={rank: 32, target_modules: null}",
        ],
    )
    call = velocity_call(config, describe_model(config.model), on_gpu=True)
    assert call.latent == (16, 21, 60, 104) and call.forward == "fused"
    cost = trace(call)
    work = forward_work(WAN_1_3B, 32_760, TEXT_TOKENS)
    guided = work.times(2, 2)
    assert cost.attention == guided.attention
    # Layers of one input (q k v; k v of the text) share a product with all of their
    # low-rank columns.
    video = (3 * 1536 + 3 * 3 * 1536) + 3 * (2 * 1536) + 2 * (1536 + 8960)
    text = 2 * 1536 + 2 * 2 * 1536
    each = 2 * 30 * 2 * 32 * (32_760 * video + TEXT_TOKENS * text)
    assert abs(cost.linear / (guided.linear + each) - 1) < 1e-6
    assert (
        abs(work.linear / 82.1e12 - 1) < 1e-3
        and abs(work.attention / 200.9e12 - 1) < 5e-3
    )
    assert (
        sum(p.numel() for p in meta_transformer(WAN_1_3B, torch.bfloat16).parameters())
        == 1_418_996_800
    )
    once = trace(replace(call, guidance_scale=1.0))
    assert 2 * once.linear == cost.linear


def adapted() -> dict[str, tuple[Tensor, Tensor]]:
    """lora_A and lora_B of rank 2 for every linear layer, by the names of the official
    class.
    """
    torch.manual_seed(0)
    modules = dict(tiny_transformer().named_modules())
    names = {
        f"blocks.{block}.{own}": f"blocks.{block}.{theirs}"
        for block in range(2)
        for own, theirs in NAMES.items()
    }
    pairs = {}
    for own, official in (names | OUTER_NAMES).items():
        layer: Any = modules[own]
        pairs[official] = (
            torch.randn(2, layer.in_features) / 4,
            torch.randn(layer.out_features, 2) / 4,
        )
    assert len(pairs) == sum(isinstance(m, torch.nn.Linear) for m in modules.values())
    return pairs


def save_for_fewer_steps(layout: str, file: Path) -> None:
    """A file as lightx2v, CausVid, VideoX-Fun or DiffSynth name its keys."""
    tensors: dict[str, Tensor] = {}
    for name, (a, b) in adapted().items():
        if layout == "lightx2v":
            tensors |= {
                f"diffusion_model.{name}.lora_down.weight": a,
                f"diffusion_model.{name}.lora_up.weight": b,
            }
        elif layout == "videox-fun":
            stem = f"lora_unet__{name.replace('.', '_')}"
            tensors |= {
                f"{stem}.lora_down.weight": a,
                f"{stem}.lora_up.weight": b / 2,
                f"{stem}.alpha": torch.tensor(4.0),
            }
        else:
            tensors |= {
                f"pipe.dit.{name}.lora_{h}.default.weight": v
                for h, v in zip("AB", (a, b), strict=True)
            }
    if layout == "lightx2v":
        # Of every matrix, of which the pipeline makes a bias, and of norms.
        lengths = {f"{name}.diff_b": len(b) for name, (_, b) in adapted().items()}
        lengths |= {
            f"blocks.{block}.{norm}": 24
            for block in range(2)
            for norm in ("self_attn.norm_q.diff", "norm3.diff_b")
        }
        tensors |= {
            f"diffusion_model.{name}": torch.zeros(length)
            for name, length in lengths.items()
        }
    save_file(tensors, file)


def moved(transformer: WanTransformer3DModel) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    latents = torch.randn(2, 4, 2, 4, 6, generator=generator)
    text = [
        PromptEmbeds(
            text=torch.randn(n, TEXT_WIDTH, generator=generator),
            glyph=torch.zeros(0, 1),
        )
        for n in (5, 2)
    ]
    with torch.no_grad():
        return WanTransformer.velocity(
            transformer, latents, torch.tensor([0.75, 0.25]), text
        )


@pytest.mark.parametrize("layout", ["lightx2v", "videox-fun", "diffsynth"])
def test_adapters_for_fewer_steps_are_the_model_that_the_stock_pipeline_makes_of_them(
    layout: str, tmp_path: Path
) -> None:
    save_for_fewer_steps("lightx2v", tmp_path / "pytorch_lora_weights.safetensors")
    pipeline = build_wan()
    used = tiny_transformer()
    before = moved(used)
    pipeline.load_lora_weights(str(tmp_path))
    expected = moved(pipeline.transformer)
    file = tmp_path / "other.safetensors"
    save_for_fewer_steps(layout, file)
    use_adapter(used, file)
    torch.testing.assert_close(moved(used), expected, rtol=1e-5, atol=1e-5)
    with WanTransformer.choose_forward(
        used, ModelConfig(family="wan", forward="fused")
    ):  # type: ignore[union-attr]
        torch.testing.assert_close(moved(used), expected, rtol=1e-4, atol=1e-4)
    assert (expected - before).abs().max() > 0.1, "the adapter does something"
    add_lora(
        started := tiny_transformer(),
        rank=2,
        alpha=None,
        target_modules=list(NAMES),
        seed=0,
    )
    with pytest.raises(
        ValueError,
        match=r"adapts '\S+', which is outside the trained blocks\. Merge it",
    ):
        load_adapter(started, file)


@pytest.mark.parametrize(
    ("key", "shape"),
    [
        ("blocks.0.cross_attn.k.diff_b", (24,)),
        ("blocks.1.diff_m", (1, 6, 24)),
        ("patch_embedding.diff", (24, 4, 1, 2, 2)),
    ],
)
def test_what_is_added_beside_the_matrices_is_refused(
    key: str, shape: tuple[int, ...], tmp_path: Path
) -> None:
    file = tmp_path / "a.safetensors"
    tensors = {
        f"diffusion_model.{n}.lora_{h}.weight": v
        for n, pair in adapted().items()
        for h, v in zip("AB", pair, strict=True)
    }
    save_file(tensors | {f"diffusion_model.{key}": torch.ones(shape)}, file)
    with pytest.raises(ValueError, match=f"{key}' is not a part of .* Merge it"):
        use_adapter(tiny_transformer(), file)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("blocks.0.cross_attn.k_img", "blocks.0.attn2.add_k_proj"),
        ("patch_embedding", "patch_embedding"),
        ("img_emb.proj.1", "img_emb.proj.1"),
    ],
)
def test_layers_that_are_not_there_are_refused_by_a_true_word(
    name: str, said: str, tmp_path: Path
) -> None:
    pair = {
        f"diffusion_model.{name}.lora_A.weight": torch.ones(2, 16),
        f"diffusion_model.{name}.lora_B.weight": torch.ones(24, 2),
    }
    save_file(pair, tmp_path / "a.safetensors")
    with pytest.raises(
        ValueError,
        match=rf"adapts '{said}', and this model has no linear layer of that name",
    ):
        use_adapter(tiny_transformer(), tmp_path)


@pytest.mark.parametrize(
    ("name", "refused"),
    [
        *(
            (name, False)
            for name in (
                "wan",
                "wan2.1/lora",
                "wan_2.1",
                "wan21",
                "Wan2.1-T2V-14B",
                "WanVideo 2.1 1.3B",
                "wan21_i2v",
                "wan22_5b",
                "Wan2.2-TI2V-5B",
            )
        ),
        *(
            (name, True)
            for name in (
                "wan2.2",
                "wan22_14b",
                "WanVideo-2.2",
                "Wan-AI/Wan2.5",
            )
        ),
        *((name, True) for name in ("hunyuan_video_1_5", "flux-1-dev/lora", "ltxv")),
    ],
)
def test_the_model_that_an_adapters_metadata_names(
    name: str, refused: bool, tmp_path: Path
) -> None:
    save_for_fewer_steps("diffsynth", file := tmp_path / "a.safetensors")
    for key in ("modelspec.architecture", "ss_base_model_version"):
        save_file(load_file(file), file, {key: name})
        if refused:
            with pytest.raises(
                ValueError,
                match=rf"its metadata has {key} = '{name}', which is another model",
            ):
                read_adapter(file, WanTransformer)
        else:
            read_adapter(file, WanTransformer)


ADAPTED = ["attn1.to_q", "attn2.to_out.0", "ffn.net.0.proj", "ffn.net.2"]


@pytest.mark.parametrize("layout", WanTransformer.clients)
def test_the_stock_pipeline_loads_an_adapter_by_every_name(
    layout: Layout, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    modules = dict(tiny_transformer().named_modules())
    values: dict[str, Tensor] = {}
    for name in (f"blocks.{block}.{layer}" for block in range(2) for layer in NAMES):
        layer: Any = modules[name]
        values[f"{name}.lora_A.weight"] = torch.randn(2, layer.in_features)
        values[f"{name}.lora_B.weight"] = torch.randn(layer.out_features, 2)
    given = {
        name: Pair(values[f"{name}.lora_A.weight"], values[f"{name}.lora_B.weight"], 1)
        for name in dict.fromkeys(name.rpartition(".lora_")[0] for name in values)
    }
    save_file(
        renamed(WanTransformer, given, layout),
        tmp_path / "pytorch_lora_weights.safetensors",
        {"alpha": "2", "rank": "2"},
    )
    pairs = read_adapter(tmp_path, WanTransformer)
    assert pairs.keys() == {name.rpartition(".lora_")[0] for name in values}
    for name, pair in pairs.items():
        assert pair.scale == 1.0 and torch.equal(
            pair.a, values[f"{name}.lora_A.weight"]
        )
        assert torch.equal(pair.b, values[f"{name}.lora_B.weight"])
    if layout == "peft":
        return
    pipeline = build_wan()
    pipeline.load_lora_weights(str(tmp_path))
    merged = dict(pipeline.transformer.named_parameters())
    for name, value in values.items():
        assert torch.equal(
            merged[name.replace(".weight", ".default_0.weight")], value
        ), name
