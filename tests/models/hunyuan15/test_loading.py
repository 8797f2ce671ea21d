"""The model family hunyuan15: which files make a model, and what is said when they do
not.
"""

import json
import re
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from sage_fast.config.errors import ConfigError
from sage_fast.config.sections import ModelConfig
from sage_fast.models.family import describe_model, load_components, model_family
from sage_fast.models.hub import require_parts
from sage_fast.models.hunyuan15.hunyuan15 import HUNYUAN_VIDEO_15, cache_folder
from tests.tiny import true_size
from tests.tiny.checkpoints import copy_tree


def load(path: Path | str | None, **options: Any):
    path = None if path is None else str(path)
    return load_components(
        ModelConfig(family="hunyuan15", path=path, **{"device": "cpu"} | options)
    )


def edit_json(path: Path, **entries: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | entries))


@pytest.fixture
def copied(diffusers_checkpoint: Path, tmp_path: Path) -> Path:
    """A checkpoint in diffusers' layout that a test may change."""
    return copy_tree(diffusers_checkpoint, tmp_path / "model")


def test_vae_dtype(copied: Path) -> None:
    assert load(copied).video_decoder.vae.dtype == torch.float32, "auto, on a CPU"
    assert load(copied, device="cuda").video_decoder.vae.dtype == torch.float16, (
        "auto, on a GPU"
    )
    assert load(copied, vae_dtype="bfloat16").video_decoder.vae.dtype == torch.bfloat16


def test_a_limit_for_tiles_is_said_to_change_nothing(
    copied: Path, caplog: pytest.LogCaptureFixture
) -> None:
    load(copied)
    assert "decode_memory_gib" not in caplog.text
    load(copied, decode_memory_gib=2.0)
    assert "model.decode_memory_gib changes nothing" in caplog.text


# --------------------------------------------------------------------------------------
# refused variants


def test_other_models_are_refused(copied: Path) -> None:
    """Models of other pipelines, and distilled ones, are refused by loader and `doctor`
    alike: see the latter's tests.

    Published text-to-video repositories were converted with task_type i2v, which counts
    only without a pipeline.
    """
    config = copied / "transformer" / "config.json"
    edit_json(config, task_type="i2v")
    load(copied)
    (copied / "model_index.json").unlink()
    with pytest.raises(ValueError, match=r"transformer/config.json says task_type i2v"):
        load(copied)
    edit_json(config, _class_name="HunyuanVideoTransformer3DModel")
    with pytest.raises(
        ValueError,
        match=r"HunyuanVideoTransformer3D.*Use 480p_t2v.*hf download hunyuanvideo-comm",
    ):
        load(copied)


# --------------------------------------------------------------------------------------
# facts


def test_distilled_weights_are_not_guided_once_more(copied: Path) -> None:
    load(copied).check_guidance(6.0)
    edit_json(copied / "guider" / "guider_config.json", guidance_scale=1.0)
    components = load(copied)
    components.check_guidance(1.0)
    with pytest.raises(
        ValueError,
        match=r"rollout.guidance_scale is 6.0.*guider_config.json says so.*to 1",
    ):
        components.check_guidance(6.0)
    with pytest.raises(
        ValueError, match=r"^forward_process.sampling_guidance is 5.0, but"
    ):
        components.check_guidance(5.0, "forward_process.sampling_guidance")


def test_distilled_weights_are_warned_of_with_fewer_steps_than_they_must_have(
    copied: Path, caplog: pytest.LogCaptureFixture
) -> None:
    load(copied).warn(5.0, {"rollout.num_steps": 4})
    edit_json(copied / "guider" / "guider_config.json", guidance_scale=1.0)
    assert not caplog.text
    load(copied).warn(5.0, {"rollout.num_steps": 49, "evaluation.num_steps": 50})
    (record,) = caplog.records
    assert (
        "rollout.num_steps is 49, but the owners of these weights say that they "
        "must have 50"
    ) in record.message


def test_the_shift_that_a_model_was_published_with(
    copied: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert load(copied).shift == 5.0
    edit_json(copied / "scheduler" / "scheduler_config.json", shift=7.0)
    components = load(copied)
    components.warn(7.0, {})
    assert not caplog.text
    components.warn(5.0, {})
    assert (
        "rollout.shift is 5, but these weights were published with a shift of 7"
        in caplog.text
    )
    shutil.rmtree(copied / "scheduler")
    assert load(copied).shift_difference(5.0) is None


# --------------------------------------------------------------------------------------
# missing files


@pytest.mark.parametrize(
    "lost", ["transformer", "tokenizer", "text_encoder/model.safetensors"]
)
def test_a_missing_part_is_named_with_its_command(copied: Path, lost: str) -> None:
    path = copied / lost
    part = lost.partition("/")[0]
    path.rename(copied / "elsewhere")
    repository = "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_t2v"
    command = f"hf download {repository} --include '{part}/*' --local-dir {copied}"
    with pytest.raises(
        ValueError, match=f"{path}.* is missing. Get it with: {re.escape(command)}"
    ):
        load(copied)


def test_a_tokenizer_without_words_is_missing_its_file(copied: Path) -> None:
    """transformers would advise to install sentencepiece; ByT5 has no such file."""
    (copied / "tokenizer" / "tokenizer.json").unlink()
    with pytest.raises(
        ValueError, match=r"tokenizer/tokenizer.json is missing. Get it with: hf "
    ):
        load(copied)
    (needed,) = model_family("hunyuan15").requirements(
        ModelConfig(family="hunyuan15", path=str(copied))
    )
    assert needed.missing == ["tokenizer/tokenizer.json"], "doctor says the same"
    # of other kinds, which some repositories have alone
    for name in ("vocab.json", "vocab.txt", "spiece.model"):
        (copied / "tokenizer" / name).touch()
        require_parts(copied, ["tokenizer", "tokenizer_2"], str(copied), "owner/name")
        (copied / "tokenizer" / name).unlink()


UNREAD = {
    "transformer/diffusion_pytorch_model.fp16.safetensors": "of a variant",
    "transformer/model-Q8_0.gguf": "quantised",
    "text_encoder/pytorch_model.bin": "pickled",
}


@pytest.mark.parametrize("name", UNREAD)
def test_weights_of_a_kind_that_is_not_read_are_named(copied: Path, name: str) -> None:
    next((copied / name).parent.glob("*.safetensors")).rename(copied / name)
    what = rf"model.safetensors \({Path(name).name} is {UNREAD[name]}.*not read\)"
    with pytest.raises(ValueError, match=rf"{what} is missing. Get it with: hf "):
        load(copied)
    (needed,) = model_family("hunyuan15").requirements(
        ModelConfig(family="hunyuan15", path=str(copied))
    )
    assert len(needed.missing) == 1 and re.search(what, needed.missing[0]), (
        "doctor says the same"
    )


def test_one_file_is_no_folder(tmp_path: Path) -> None:
    file = tmp_path / "hunyuan-720p-Q4_K.gguf"
    file.touch()
    where = (
        f"model.path is '{file}', which is one file.*quantised.*set model.path to "
        ".*/HunyuanVideo-1.5-Diffusers-720p"
    )
    section = ModelConfig(family="hunyuan15", path=str(file))
    family = model_family("hunyuan15")
    for ask in (load_components, describe_model, family.requirements, family.inspect):
        with pytest.raises(ConfigError, match=where) as error:
            ask(section)  # type: ignore[operator]
        assert "--local-dir" not in str(error.value)


def test_a_folder_is_completed_from_where_it_came(copied: Path, tmp_path: Path) -> None:
    (copied / "vae/config.json").unlink()
    edit_json(copied / "transformer/config.json", target_size=960)
    with pytest.raises(
        ValueError,
        match=rf"Diffusers-720p_t2v --include 'vae/\*' --local-dir {copied}$",
    ):
        load(copied)
    family = model_family("hunyuan15")
    for path, kind in ((copied, "720p_t2v"), (tmp_path / "hv15-480p_i2v", "480p_i2v")):
        (needed,) = family.requirements(ModelConfig(family="hunyuan15", path=str(path)))
        assert f"-Diffusers-{kind} " in needed.fetch and needed.fetch.endswith(
            f"--local-dir {path}"
        )
    (needed,) = family.requirements(ModelConfig(family="hunyuan15", path="~/hv15"))
    assert needed.fetch.endswith(f"--local-dir {Path.home()}/hv15"), (
        "a shell leaves '~/hv15' in quotes alone"
    )


@pytest.mark.parametrize(
    ("part", "kind"),
    [
        ("transformer", "missing"),
        ("transformer", "unexpected"),
        ("transformer", "mismatched"),
        ("vae", "missing"),
    ],
)
def test_weights_that_do_not_fit_are_refused(
    copied: Path, part: str, kind: str
) -> None:
    file = copied / part / "diffusion_pytorch_model.safetensors"
    weights = load_file(file)
    name = next(iter(weights))
    if kind == "missing":
        del weights[name]
    else:
        name += "x" * (kind == "unexpected")
        weights[name] = torch.zeros(3, 5)
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(
        ValueError,
        match=rf"do not fit its config.json: 1 {kind} keys, among them .*{name}",
    ):
        load(copied)


def test_a_folder_without_a_model_and_broken_json(copied: Path, tmp_path: Path) -> None:
    with pytest.raises(
        ValueError,
        match=r"nor transformer/config.json.*convert_hunyuan_video1_5_to_diffusers",
    ):
        load(tmp_path)
    with pytest.raises(ValueError, match="no folder here and no repository"):
        load("/nowhere/at/all")
    (copied / "model_index.json").write_text("{")
    with pytest.raises(ValueError, match=r"model_index.json is not JSON"):
        load(copied)


# --------------------------------------------------------------------------------------
# the hub, offline


@pytest.fixture
def offline_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty hub cache on a machine without a network."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "hub"


def test_a_repository_in_the_hub_cache_is_used_offline(
    offline_hub: Path, diffusers_checkpoint: Path
) -> None:
    entry = offline_hub / "models--owner--name"
    (entry / "refs").mkdir(parents=True)
    (entry / "refs" / "main").write_text("0" * 40)
    snapshot = copy_tree(diffusers_checkpoint, entry / "snapshots" / ("0" * 40))
    components = load("owner/name")
    assert (
        components.prompt_encoder.cache
        == offline_hub.parent / "cache" / "sage_fast" / "prompts"
    )
    assert components.prompt_encoder.encode(["a cat"])[0].text.shape[1] == 32
    (snapshot / "vae" / "config.json").unlink()
    command = r"hf download owner/name --include 'vae/\*'$"
    with pytest.raises(
        ValueError, match=rf"vae/config.json is missing. Get it with: {command}"
    ):
        load("owner/name")
    # Another repository does not belong into the cache's folder of this one.
    shutil.rmtree(snapshot)
    snapshot.mkdir()
    (snapshot / "README.md").touch()
    with pytest.raises(
        ValueError,
        match=r"neither model_index.json.*layout\. Set model.path to a repository that is",
    ) as error:
        load("owner/name")
    assert str(offline_hub) not in str(error.value)


@pytest.mark.parametrize("path", ["owner/name", None])
def test_a_repository_that_cannot_be_reached_is_named_with_its_command(
    offline_hub: Path, path: str | None
) -> None:
    name = path or "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_t2v"
    with pytest.raises(
        ValueError, match=f"model.path is '{name}'.*hf download {name} "
    ):
        load(path)


# --------------------------------------------------------------------------------------
# where things are kept


def test_caches_lie_beside_the_weights_or_where_the_config_says(
    diffusers_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def folder(**options: Any) -> Path:
        return cache_folder(
            ModelConfig(family="hunyuan15", path=str(diffusers_checkpoint), **options)
        )

    assert folder() == diffusers_checkpoint / ".sage_fast"
    assert folder(cache_dir=str(tmp_path / "new")) == tmp_path / "new"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("os.access", lambda path, mode: False)
    assert folder() == tmp_path / "sage_fast", (
        "weights on a disk that cannot be written to"
    )
    (tmp_path / "file").touch()
    for refused in ("/proc", str(tmp_path / "file" / "below")):
        with pytest.raises(
            ValueError,
            match=f"model.cache_dir is '{refused}', which cannot be written to",
        ):
            folder(cache_dir=refused)


@pytest.mark.slow
def test_random_weights_of_the_true_width(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The layout that tries a machine before anything is downloaded; here with one of
    54 layers and a tiny decoder.
    """
    tiny: dict[str, Any] = {
        "block_out_channels": [8, 8, 16, 16, 16],
        "layers_per_block": 1,
    }
    small = partial(
        true_size.write, transformer=HUNYUAN_VIDEO_15 | {"num_layers": 1}, **tiny
    )
    monkeypatch.setattr(true_size, "write", small)
    true_size.main([str(tmp_path / "model")])
    components = load(tmp_path / "model")
    (embeds,) = components.prompt_encoder.encode(["a red fox"])
    assert embeds.text.shape[1] == HUNYUAN_VIDEO_15["text_embed_dim"] and bool(
        embeds.text.isfinite().all()
    )
    weight = components.transformer.transformer_blocks[0].attn.to_q.weight
    assert components.weights is not None and weight.shape == (2048, 2048)
