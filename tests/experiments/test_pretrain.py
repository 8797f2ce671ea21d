"""The shipped checkpoint loads and says how it was made; pretraining reproduces."""

import json
from collections import Counter
from dataclasses import asdict, replace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from experiments.pretrain import MODULE_COMMAND, PretrainConfig, main, pretrain
from experiments.shapes import PHASES, shown_by_caption
from sage_fast.config.sections import ModelConfig
from sage_fast.models.hunyuan15.backbone import velocity
from sage_fast.models.toy.components import (
    ASSETS,
    CONFIG_NAME,
    TRANSFORMER_CONFIG,
    WEIGHTS_NAME,
    Toy,
    build_transformer,
    is_unused,
    stored_parameters,
)
from sage_fast.models.toy.renderer import all_captions

TINY = PretrainConfig(
    phases=(replace(PHASES[0], steps=2), replace(PHASES[1], steps=1)),
    seed=1,
    batch_size=4,
)


def test_the_shipped_checkpoint_loads():
    components = Toy().load(ModelConfig())
    transformer = components.transformer
    assert not transformer.training and transformer.dtype == torch.float32
    assert all(
        torch.isfinite(value).all() for value in transformer.state_dict().values()
    )
    unused = [
        value for name, value in transformer.named_parameters() if is_unused(name)
    ]
    assert unused and all((value == 0).all() for value in unused)
    shape = components.video_decoder.latent_shape(8, 16, 16)
    prompts = components.prompt_encoder.encode(["a red circle moving left", ""])
    latents = torch.randn(2, *shape, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        predicted = velocity(transformer, latents, torch.tensor([1.0, 0.5]), prompts)
        alone = velocity(transformer, latents[1:], torch.tensor([0.5]), prompts[1:])
    assert predicted.shape == latents.shape
    assert torch.allclose(predicted[1:], alone, atol=1e-4)
    assert components.video_decoder.decode(predicted).shape == (2, 8, 3, 16, 16)


def test_the_shipped_checkpoint_says_how_it_was_made():
    with safe_open(ASSETS / WEIGHTS_NAME, framework="pt") as file:
        metadata = file.metadata()
    program, _, command = (
        metadata["command"].removesuffix(" --output DIR").partition(" --")
    )
    assert program == "python -m sage_fast.models.toy.pretrain", (
        "the names when they were made"
    )
    assert f"{MODULE_COMMAND} --{command}" in (ASSETS / "MADE_BY.md").read_text(
        encoding="utf-8"
    )
    for name, value in asdict(PretrainConfig()).items():
        assert metadata[name] == str(value), name
    assert {"torch_version", "num_threads", "loss_last_50_steps"} <= metadata.keys()
    assert (
        json.loads((ASSETS / CONFIG_NAME).read_text(encoding="utf-8"))
        == TRANSFORMER_CONFIG
    )
    assert (ASSETS / WEIGHTS_NAME).stat().st_size < 20e6


def test_pretraining_reproduces_bit_for_bit_and_leaves_no_trace(tmp_path, monkeypatch):
    for entry, value in (("num_layers", 1), ("num_attention_heads", 1)):
        monkeypatch.setitem(TRANSFORMER_CONFIG, entry, value)
    torch.manual_seed(123)
    state = torch.get_rng_state()
    threads = torch.get_num_threads()
    losses = [
        pretrain(TINY, tmp_path / name, progress=False) for name in ("one", "two")
    ]
    assert losses[0] == losses[1]
    one, two = (load_file(tmp_path / name / WEIGHTS_NAME) for name in ("one", "two"))
    assert one.keys() == two.keys() and all(
        torch.equal(one[name], two[name]) for name in one
    )
    assert (
        torch.equal(torch.get_rng_state(), state) and torch.get_num_threads() == threads
    )
    components = Toy().load(ModelConfig(path=str(tmp_path / "one")))
    stored = stored_parameters(components.transformer)
    assert all(torch.equal(stored[name], one[name].float()) for name in stored)


def test_the_command_line(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(
        "experiments.pretrain.pretrain",
        lambda config, output: calls.append((config, output)) or [2.0, 1.0],
    )
    main(["--steps", "7,3,2", "--seed", "5", "--output_dir", str(tmp_path)])
    phases = tuple(
        replace(phase, steps=steps)
        for phase, steps in zip(PHASES, (7, 3, 2), strict=True)
    )
    assert calls == [(PretrainConfig(phases=phases, seed=5), str(tmp_path))]


def test_wrong_captions_differ_in_one_attribute():
    words = all_captions()
    shares = shown_by_caption(PHASES[-1])[0].tolist()
    found = Counter()
    for shown, share in zip(words, shares, strict=True):
        differing = [
            name
            for name, value in words[0]._asdict().items()
            if getattr(shown, name) != value
        ]
        found[" and ".join(differing)] += share
    assert +found == pytest.approx({"": 0.4, "colour": 0.45, "motion": 0.15})


def test_load_errors_name_the_file_and_the_way_out(tmp_path):
    with pytest.raises(ValueError, match=r"has no config.json.*experiments.pretrain"):
        Toy().load(ModelConfig(path=str(tmp_path)))
    weights = stored_parameters(build_transformer(TRANSFORMER_CONFIG))
    weights.pop("proj_out.weight")
    save_file(weights, tmp_path / WEIGHTS_NAME)
    (tmp_path / CONFIG_NAME).write_text(json.dumps(TRANSFORMER_CONFIG))
    with pytest.raises(ValueError, match=r"1 missing keys, among them proj_out.weight"):
        Toy().load(ModelConfig(path=str(tmp_path)))
