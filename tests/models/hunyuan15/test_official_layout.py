"""The official ckpts/ folder becomes the same model as diffusers' layout, whatever interrupts its conversion."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from diffusers import AutoencoderKLHunyuanVideo15, HunyuanVideo15Pipeline, HunyuanVideo15Transformer3DModel
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import ByT5Tokenizer, T5EncoderModel

from sage_fast.models.hunyuan15 import official_layout
from sage_fast.models.hunyuan15.official_layout import (
    MARKER,
    convert_glyph_encoder,
    convert_transformer,
    convert_vae,
    transformer_config,
    transformer_recipes,
    vae_recipes,
)
from tests.tiny.checkpoints import copy_tree, official_transformer, official_vae

SMALL = 5_000_000
"""Bytes of a file that split the tiny transformer over several."""


@pytest.fixture
def transformer(official_checkpoint: Path) -> Path:
    return official_checkpoint / "transformer" / "480p_t2v"


@pytest.fixture
def saved(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files of weights that conversions write (their temporary names, cut to the part that stays)."""
    names: list[str] = []

    def spy(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str]) -> None:
        names.append(path.name.split(".")[1])
        save_file(tensors, path, metadata=metadata)

    monkeypatch.setattr(official_layout, "save_file", spy)
    return names


def assert_equal_weights(one: torch.nn.Module, other: torch.nn.Module) -> None:
    expected, actual = one.state_dict(), other.state_dict()
    assert expected.keys() == actual.keys()
    for name in expected:
        assert torch.equal(expected[name], actual[name]), name


def test_transformer(transformer: Path, pipeline: HunyuanVideo15Pipeline, tmp_path: Path) -> None:
    folder = convert_transformer(transformer, tmp_path / "converted", shard_bytes=SMALL)
    assert len(list(folder.glob("*.safetensors"))) == 3
    converted = HunyuanVideo15Transformer3DModel.from_pretrained(folder)
    assert_equal_weights(pipeline.transformer, converted)
    ours, stock = ({k: v for k, v in c.items() if k[0] != "_"} for c in (converted.config, pipeline.transformer.config))
    assert ours == stock


def test_vae(official_checkpoint: Path, pipeline: HunyuanVideo15Pipeline, tmp_path: Path) -> None:
    converted = AutoencoderKLHunyuanVideo15.from_pretrained(convert_vae(official_checkpoint / "vae", tmp_path / "vae"))
    assert_equal_weights(pipeline.vae, converted)
    ours, stock = (
        {k: list(v) if isinstance(v, tuple) else v for k, v in c.items() if k[0] != "_"}
        for c in (converted.config, pipeline.vae.config)
    )
    assert ours == stock


def test_glyph_encoder(official_checkpoint: Path, pipeline: HunyuanVideo15Pipeline, tmp_path: Path) -> None:
    folder = convert_glyph_encoder(official_checkpoint / "text_encoder", tmp_path / "glyph")
    assert_equal_weights(pipeline.text_encoder_2, T5EncoderModel.from_pretrained(folder))
    tokenizer = ByT5Tokenizer.from_pretrained(folder)
    for text in ("Text é", "<color-2><cn-font-1>"):
        assert tokenizer(text).input_ids == pipeline.tokenizer_2(text).input_ids
    before = (folder / MARKER).stat().st_mtime_ns
    assert convert_glyph_encoder(official_checkpoint / "text_encoder", folder) == folder
    assert (folder / MARKER).stat().st_mtime_ns == before, "converted once"


def test_published_size(official_checkpoint: Path) -> None:
    """Names, shapes and configuration of the published models; diffusers' defaults are those of its conversions."""
    with torch.device("meta"):
        transformer, vae = HunyuanVideo15Transformer3DModel(task_type="t2v"), AutoencoderKLHunyuanVideo15()
    tiny = json.loads((official_checkpoint / "transformer" / "480p_t2v" / "config.json").read_text())
    published = tiny | {
        "heads_num": 16,
        "hidden_size": 2048,
        "in_channels": 32,
        "out_channels": 32,
        "mlp_width_ratio": 4,
        "mm_double_blocks_depth": 54,
        "rope_dim_list": [16, 56, 56],
        "text_states_dim": 3584,
        "vision_states_dim": 1152,
    }
    official = official_transformer(transformer)
    config = transformer_config(published, {name: list(weight.shape) for name, weight in official.items()})
    assert config == {k: list(v) if isinstance(v, tuple) else v for k, v in transformer.config.items() if k[0] != "_"}
    assert transformer_recipes(list(official)).keys() == transformer.state_dict().keys()
    assert vae_recipes(list(official_vae(vae))).keys() == vae.state_dict().keys()


@pytest.mark.parametrize("split", [False, True])
def test_several_source_files_and_their_dtype(transformer: Path, tmp_path: Path, split: bool) -> None:
    source = copy_tree(transformer, tmp_path / "480p_t2v")
    file = source / "diffusion_pytorch_model.safetensors"
    weights = {n: w.to(torch.bfloat16) for n, w in load_file(file).items()}
    file.unlink()
    halves = [dict(list(weights.items())[part::2]) for part in range(2)] if split else [weights]
    for index, half in enumerate(halves):
        save_file(half, source / f"diffusion_pytorch_model-{index}.safetensors")
    folder = convert_transformer(source, tmp_path / "converted")
    (written,) = folder.glob("*.safetensors")
    assert {w.dtype for w in load_file(written).values()} == {torch.bfloat16}, "no value is rounded by a conversion"


def test_a_finished_conversion_is_used_as_it_is(transformer: Path, tmp_path: Path, saved: list[str]) -> None:
    target = tmp_path / "converted"
    convert_transformer(transformer, target)
    assert len(saved) == 1
    written = {path.name: path.stat().st_mtime_ns for path in target.iterdir()}
    moved = copy_tree(transformer, tmp_path / "480p_t2v")
    for source in (transformer, moved):
        convert_transformer(source, target)
    assert written == {path.name: path.stat().st_mtime_ns for path in target.iterdir()}, "nor is a copy of the source"


class Interruption(NamedTuple):
    folder: Path
    at: int


@pytest.fixture(params=[0, 1, 2])
def interrupted(
    request: pytest.FixtureRequest, transformer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Interruption]:
    """A conversion killed while it wrote one of its three files: half of that is there, under a temporary name."""
    target = tmp_path / "converted"
    written: list[Path] = []

    def killed(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str]) -> None:
        if len(written) == request.param:
            path.write_bytes(b"half a file")
            (target / ".diffusion_pytorch_model-left.1234.partial").write_bytes(b"of a killed process")
            raise KeyboardInterrupt
        written.append(path)
        save_file(tensors, path, metadata=metadata)

    with monkeypatch.context() as context:
        context.setattr(official_layout, "save_file", killed)
        with pytest.raises(KeyboardInterrupt):
            convert_transformer(transformer, target, shard_bytes=SMALL)
    assert not (target / MARKER).exists() and not (target / "config.json").exists()
    assert len(list(target.glob("*.safetensors"))) == request.param
    yield Interruption(target, request.param)


def test_an_interrupted_conversion_goes_on(
    interrupted: Interruption, transformer: Path, pipeline: HunyuanVideo15Pipeline, saved: list[str]
) -> None:
    convert_transformer(transformer, interrupted.folder, shard_bytes=SMALL)
    assert len(saved) == 3 - interrupted.at, "what was there is kept"
    assert_equal_weights(pipeline.transformer, HunyuanVideo15Transformer3DModel.from_pretrained(interrupted.folder))
    assert not list(interrupted.folder.glob("*.partial")) and not list(interrupted.folder.glob(".*.partial"))


def test_a_damaged_file_is_made_again(
    transformer: Path, pipeline: HunyuanVideo15Pipeline, tmp_path: Path, saved: list[str]
) -> None:
    target = convert_transformer(transformer, tmp_path / "converted", shard_bytes=SMALL)
    second = sorted(target.glob("*.safetensors"))[1]
    second.write_bytes(second.read_bytes()[:-100])
    saved.clear()
    convert_transformer(transformer, target, shard_bytes=SMALL)
    assert saved == [second.name.split(".")[0]]
    assert_equal_weights(pipeline.transformer, HunyuanVideo15Transformer3DModel.from_pretrained(target))


def test_other_weights_are_converted_again(transformer: Path, pipeline: HunyuanVideo15Pipeline, tmp_path: Path) -> None:
    source = copy_tree(transformer, tmp_path / "480p_t2v")
    target = convert_transformer(source, tmp_path / "converted")
    file = source / "diffusion_pytorch_model.safetensors"
    weights = load_file(file)
    weights["img_in.proj.bias"] += 1
    save_file(weights, file)
    convert_transformer(source, target)
    converted = HunyuanVideo15Transformer3DModel.from_pretrained(target)
    assert torch.equal(converted.x_embedder.proj.bias, pipeline.transformer.x_embedder.proj.bias + 1)


@pytest.mark.parametrize("part", ["transformer", "glyph"])
def test_two_nodes_may_convert_at_once(
    official_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    """Where files cannot be locked: one node makes all of it while another has half a file there."""
    target = tmp_path / "cache" / part
    source = official_checkpoint / ("transformer/480p_t2v" if part == "transformer" else "text_encoder")
    convert = convert_transformer if part == "transformer" else convert_glyph_encoder
    nodes: list[Path] = []

    def no_locks(*_: Any) -> None:
        raise OSError(37, "No locks available")

    def overtaken(save: Callable[..., None]) -> Callable[..., None]:
        def saving(*arguments: Any, **options: Any) -> None:
            save(*arguments, **options)
            if not nodes:
                nodes.append(target)
                convert(source, target)

        return saving

    monkeypatch.setattr("sage_fast.config.files.fcntl.flock", no_locks)
    monkeypatch.setattr(official_layout, "save_file", overtaken(save_file))
    monkeypatch.setattr(T5EncoderModel, "save_pretrained", overtaken(T5EncoderModel.save_pretrained))
    convert(source, target)
    if part == "transformer":
        HunyuanVideo15Transformer3DModel.from_pretrained(target)
    else:
        T5EncoderModel.from_pretrained(target)
        ByT5Tokenizer.from_pretrained(target)
    assert nodes and not list(target.parent.rglob("*.partial"))
    marker = (target / MARKER).stat().st_mtime_ns
    convert(source, target)
    assert (target / MARKER).stat().st_mtime_ns == marker, "it is finished"


def test_what_a_killed_glyph_conversion_left_is_removed(official_checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / ".glyph.killed.partial").mkdir()
    convert_glyph_encoder(official_checkpoint / "text_encoder", tmp_path / "glyph")
    assert sorted(p.name for p in tmp_path.iterdir()) == [".lock", "glyph"]


def add_tensor(weights: dict[str, Tensor], config: dict[str, Any]) -> None:
    weights["double_blocks.0.extra.weight"] = torch.zeros(1)


def drop_tensor(weights: dict[str, Tensor], config: dict[str, Any]) -> None:
    del weights["double_blocks.1.img_attn_q.weight"]


def no_depth(weights: dict[str, Tensor], config: dict[str, Any]) -> None:
    del config["mm_double_blocks_depth"]


def more_layers(weights: dict[str, Tensor], config: dict[str, Any]) -> None:
    config["mm_double_blocks_depth"] = 3


def wider_text(weights: dict[str, Tensor], config: dict[str, Any]) -> None:
    config["text_states_dim"] = 40


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (add_tensor, ["double_blocks.0.extra is no module of HunyuanVideo-1.5"]),
        (drop_tensor, ["do not fit", "missing ['transformer_blocks.1.attn.to_q.weight']"]),
        (no_depth, ["config.json has no entry 'mm_double_blocks_depth'"]),
        (more_layers, ["do not fit", "transformer_blocks.2."]),
        (wider_text, ["txt_in.", "has shape", "needs"]),
    ],
    ids=lambda v: getattr(v, "__name__", ""),
)
def test_weights_that_do_not_fit_are_refused(
    transformer: Path, tmp_path: Path, change: Callable[[dict[str, Tensor], dict[str, Any]], None], words: list[str]
) -> None:
    source = copy_tree(transformer, tmp_path / "480p_t2v")
    file, config_file = source / "diffusion_pytorch_model.safetensors", source / "config.json"
    weights, config = load_file(file), json.loads(config_file.read_text())
    change(weights, config)
    save_file(weights, file)
    config_file.write_text(json.dumps(config))
    with pytest.raises(ValueError) as error:
        convert_transformer(source, tmp_path / "converted")
    assert all(word in str(error.value) for word in [str(source), *words]), error.value
    assert not (tmp_path / "converted" / MARKER).exists()


def test_a_glyph_checkpoint_of_other_annotations_is_refused(official_checkpoint: Path, tmp_path: Path) -> None:
    source = copy_tree(official_checkpoint / "text_encoder", tmp_path / "text_encoder")
    (source / "Glyph-SDXL-v2" / "assets" / "color_idx.json").write_text('{"white": 0}')
    with pytest.raises(ValueError, match=r"byt5_model.pt does not fit .*color_idx.json"):
        convert_glyph_encoder(source, tmp_path / "glyph")
    assert not (tmp_path / "glyph").exists()


def test_a_full_disk_is_found_before_anything_is_written(
    transformer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saved: list[str]
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(ValueError, match=r"needs 0.0 GiB.*set model.cache_dir"):
        convert_transformer(transformer, tmp_path / "converted")
    assert saved == []
