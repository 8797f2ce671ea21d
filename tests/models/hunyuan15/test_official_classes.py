"""The official transformer and VAE beside ours: tiny random instances of your own copy of the repository.

    SAGE_OFFICIAL_REPOSITORY=/path/to/HunyuanVideo-1.5 pytest tests/models/hunyuan15/test_official_classes.py

Skipped without it, or where its requirements (loguru, einops, omegaconf) are not installed.
"""

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKLHunyuanVideo15, HunyuanVideo15Transformer3DModel
from safetensors.torch import save_file
from torch import Tensor

from sage_fast.config.model_sections import LoraConfig, ModelConfig
from sage_fast.models.hunyuan15.fused import choose_forward
from sage_fast.models.hunyuan15.layouts import stored_adapter, stored_config
from sage_fast.models.hunyuan15.official_layout import convert_transformer, convert_vae
from sage_fast.models.hunyuan15.velocity import velocity
from sage_fast.models.streamed import save_transformer
from sage_fast.policy.lora import ADAPTER_FILE, copy_lora, make_trainable, trainable_parameters
from sage_fast.policy.trained import read_adapter, use_adapter
from sage_fast.records import PromptEmbeds
from tests.tiny.checkpoints import LATENT_CHANNELS, TRANSFORMER, VAE

REPOSITORY = os.environ.get("SAGE_OFFICIAL_REPOSITORY")
GLYPH_DIM = 1472
"""Fixed by the official class."""
TEXT_TOKENS, GLYPH_TOKENS = (7, 4), (0, 3)
"""Of two prompts: ragged, and only one has quoted text."""

pytestmark = pytest.mark.skipif(REPOSITORY is None, reason="SAGE_OFFICIAL_REPOSITORY names no copy of the repository")


@pytest.fixture(scope="module")
def official() -> Iterator[SimpleNamespace]:
    """The official modules, told that they run in one process (their own default asks for a GPU)."""
    sys.path.insert(0, str(REPOSITORY))
    try:
        attention = pytest.importorskip("hyvideo.models.transformers.modules.attention")
        transformer = pytest.importorskip("hyvideo.models.transformers.hunyuanvideo_1_5_transformer")
        vae = pytest.importorskip("hyvideo.models.autoencoders.hunyuanvideo_15_vae")
        one_process = SimpleNamespace(sp_enabled=False, sp=1, sp_rank=0)
        with pytest.MonkeyPatch.context() as patch:
            for module in (attention, transformer, vae):
                assert isinstance(module, ModuleType)
                patch.setattr(module, "get_parallel_state", lambda: one_process)
            yield SimpleNamespace(
                transformer=transformer.HunyuanVideo_1_5_DiffusionTransformer, vae=vae.AutoencoderKLConv3D
            )
    finally:
        sys.path.remove(str(REPOSITORY))


def randomize(model: torch.nn.Module) -> None:
    """No weight is zero or one: every one of them shows in the output."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim < 2:
                parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
            else:
                fan_in = parameter[0].numel()
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / fan_in**0.5)


@pytest.fixture(scope="module")
def theirs(official: SimpleNamespace) -> Any:
    """The official transformer, of the configuration that an export for it writes."""
    config = stored_config(TRANSFORMER | {"text_embed_2_dim": GLYPH_DIM}, "official")
    assert config is not None
    model = official.transformer.from_config(config | {"attn_mode": "torch"}).eval()
    randomize(model)
    return model


@pytest.fixture(scope="module")
def folder(theirs: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its transformer in diffusers' form."""
    source = tmp_path_factory.mktemp("official")
    theirs.save_pretrained(source)
    return convert_transformer(source, source / "converted")


def ours(folder: Path) -> HunyuanVideo15Transformer3DModel:
    return HunyuanVideo15Transformer3DModel.from_pretrained(folder).eval()


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


LATENTS, SIGMA = draw(2, LATENT_CHANNELS, 3, 4, 5, seed=1), torch.tensor([0.7, 0.31])
TEXT, GLYPHS = draw(2, max(TEXT_TOKENS), TRANSFORMER["text_embed_dim"], seed=2), draw(2, 3, GLYPH_DIM, seed=3)


@torch.no_grad()
def their_velocity(model: Any) -> Tensor:
    condition = torch.zeros(2, LATENT_CHANNELS + 1, *LATENTS.shape[2:])
    text_mask, glyph_mask = (
        (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long() for lengths in (TEXT_TOKENS, GLYPH_TOKENS)
    )
    return model(
        torch.cat([LATENTS, condition], dim=1),
        SIGMA * 1000,
        TEXT,
        None,
        text_mask,
        vision_states=torch.zeros(2, 6, TRANSFORMER["image_embed_dim"]),
        mask_type="t2v",
        extra_kwargs={"byt5_text_states": GLYPHS, "byt5_text_mask": glyph_mask},
    )[0]


@torch.no_grad()
def our_velocity(model: HunyuanVideo15Transformer3DModel) -> Tensor:
    prompts = [
        PromptEmbeds(text=TEXT[i, :words], glyph=GLYPHS[i, :glyphs])
        for i, (words, glyphs) in enumerate(zip(TEXT_TOKENS, GLYPH_TOKENS, strict=True))
    ]
    return velocity(model, LATENTS, SIGMA, prompts)


def assert_close(actual: Tensor, expected: Tensor) -> None:
    error = float((actual - expected).abs().max() / expected.abs().max())
    print(f"largest difference, of the largest value: {error:.1e}")
    assert expected.std() > 0.05 and error < 1e-6


@pytest.mark.parametrize("forward", ["stock", "fused"])
def test_the_transformer_converts(theirs: Any, folder: Path, forward: str) -> None:
    model = ours(folder)
    if forward == "fused":
        assert choose_forward(model, ModelConfig(attention="reference")) is not None
    assert_close(our_velocity(model), their_velocity(theirs))


def test_the_vae_converts(official: SimpleNamespace, tmp_path: Path) -> None:
    """In float64: in float32 the two differ by 1e-6, more or less by how their weights lie in memory."""
    config = {"in_channels": 3, "out_channels": 3, "ffactor_spatial": 16, "ffactor_temporal": 4, **VAE}
    model = official.vae.from_config(
        config | {"sample_size": 256, "sample_tsize": 64, "scaling_factor": 1.03682}
    ).eval()
    randomize(model)
    model.save_pretrained(tmp_path)
    converted = AutoencoderKLHunyuanVideo15.from_pretrained(convert_vae(tmp_path, tmp_path / "converted")).eval()
    latents = draw(1, LATENT_CHANNELS, 3, 4, 5, seed=4).double()
    with torch.no_grad():
        assert_close(converted.double().decode(latents).sample, model.double().decode(latents).sample)


def test_an_exported_transformer_loads(official: SimpleNamespace, theirs: Any, folder: Path, tmp_path: Path) -> None:
    model = ours(folder)
    save_transformer(model, model.state_dict().__getitem__, tmp_path, torch.float32, layout="official")
    loaded, info = official.transformer.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    loaded.set_attn_mode("torch")
    assert torch.equal(their_velocity(loaded.eval()), their_velocity(theirs))


def test_an_exported_adapter_loads_as_by_generate_py(
    official: SimpleNamespace, theirs: Any, folder: Path, tmp_path: Path
) -> None:
    trained, targets = ours(folder), ["attn.to_q", "attn.add_v_proj", "attn.to_out.0", "ff.net.2", "norm1.linear"]
    make_trainable(trained, "lora", LoraConfig(rank=2, alpha=3, target_modules=targets), seed=0)
    for number, parameter in enumerate(trainable_parameters(trained).values()):
        parameter.data = draw(*parameter.shape, seed=number) / 4
    copy_lora(trained, tmp_path / "ours")()
    adapter = stored_adapter(read_adapter(tmp_path / "ours" / ADAPTER_FILE), "official")
    (tmp_path / "theirs").mkdir()
    save_file(adapter, tmp_path / "theirs" / ADAPTER_FILE)
    model = official.transformer.from_config(theirs.config).eval()
    model.load_state_dict(theirs.state_dict())
    model.load_lora_adapter(
        pretrained_model_name_or_path_or_dict=str(tmp_path / "theirs"), prefix=None, adapter_name="default",
        use_safetensors=True, hotswap=False,
    )  # fmt: skip
    assert_close(our_velocity(trained), their_velocity(model))
    assert (their_velocity(model) - their_velocity(theirs)).abs().max() > 1e-2, "the adapter does nothing"
    again = ours(folder)
    use_adapter(again, tmp_path / "theirs")
    assert_close(our_velocity(again), their_velocity(model))
