"""Checkpoints of VideoAlign: complete, incomplete, damaged, and of another model."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from tests.rewards.videoalign.golden import GOLDEN, PROMPTS, VIDEOS, assert_scores, make
from tests.tiny.videoalign import build_tiny_videoalign


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    return build_tiny_videoalign(tmp_path_factory.mktemp("videoalign"))


@pytest.fixture
def own_paths(built, tmp_path):
    """Files of this test alone, to be damaged."""
    return [shutil.copytree(path, tmp_path / path.name) for path in built]


@pytest.mark.parametrize(
    ("file", "message"),
    [
        (
            "model_config.json",
            "model_config.json is missing.*hf download KwaiVGI/VideoReward --local-dir",
        ),
        (
            "checkpoint-1200/model.pth",
            "checkpoint-1200 lacks model.pth.*hf download KwaiVGI/VideoReward",
        ),
        ("checkpoint-*", "no checkpoint-.*hf download KwaiVGI/VideoReward"),
    ],
)
def test_a_missing_file_is_named_with_the_command_that_fetches_it(
    own_paths, file, message
):
    for path in list(own_paths[0].glob(file)):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    with pytest.raises(FileNotFoundError, match=message):
        make(own_paths)


def test_quantised_weights_are_refused(own_paths):
    quantised = {"rm_head.weight": torch.ones(3, 4, dtype=torch.int8)}
    edit_state(own_paths[0], lambda state: state.update(quantised))
    message = r"model.pth is quantised: rm_head.weight is stored as torch.int8"
    with pytest.raises(ValueError, match=message):
        make(own_paths)


def test_a_base_model_is_a_folder_or_in_the_local_cache_of_the_hub(
    own_paths, tmp_path, monkeypatch
):
    """A run starts no download, even on a machine with a network."""
    checkpoint, base = own_paths
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(
        "huggingface_hub.file_download.get_hf_file_metadata",
        lambda *_, **__: pytest.fail("asked"),
    )
    for name, message in (
        (tmp_path / "nowhere", "nowhere' does not exist. Set .*videoalign.base_model"),
        ("owner/name", "owner/name.*nor in the hub's local cache.*hf download owner/n"),
    ):
        with pytest.raises(OSError, match=message):
            make((checkpoint, name))
    entry = tmp_path / "hub/models--owner--name"
    (entry / "refs").mkdir(parents=True)
    (entry / "refs/main").write_text("0" * 40)
    shutil.copytree(base, entry / "snapshots" / ("0" * 40))
    assert_scores(make((checkpoint, "owner/name")).score(VIDEOS, PROMPTS), GOLDEN[3])


def edit_settings(checkpoint: Path, section, **values):
    path = checkpoint / "model_config.json"
    tree = json.loads(path.read_text())
    tree[section] |= values
    path.write_text(json.dumps(tree))


def edit_state(checkpoint: Path, edit):
    path = checkpoint / "checkpoint-1200/model.pth"
    state = torch.load(path)
    edit(state)
    torch.save(state, path)


NAME = "base_model.model."
LORA = f"{NAME}model.layers.1.mlp.up_proj.lora_"


@pytest.mark.parametrize(
    ("lost", "added", "message"),
    [
        (f"{NAME}model.norm.weight", {}, 'Missing key.*"language_model.norm.weight"'),
        (
            f"{LORA}B.default.weight",
            {},
            "no 'language_model.layers.1.mlp.up_proj.lora_B.weight'",
        ),
        (None, {f"{LORA}A.default.weight": (3, 64)}, "rank 3.*lora_r = 4"),
        (None, {f"{NAME}surprise": (1,)}, 'Unexpected key.*"surprise"'),
        (None, {f"{NAME}rm_head.weight": (2, 64)}, r"rm_head.*\(2, 64\)"),
        (
            None,
            {f"{NAME}model.embed_tokens.weight": (628, 64)},
            r"do not fit Qwen2-VL.*\[628, 64\].*\[610, 64\]",
        ),
    ],
    ids=["norm", "half-a-pair", "rank", "surprise", "head-shape", "vocab"],
)
def test_weights_that_do_not_fit_are_refused(own_paths, lost, added, message):
    def edit(state):
        state.pop(lost, None)
        state.update({name: torch.ones(shape) for name, shape in added.items()})

    edit_state(own_paths[0], edit)
    with pytest.raises(ValueError, match=message):
        make(own_paths)


@pytest.mark.parametrize(
    "content", [b"version https://git-lfs.github.com/spec/v1\n", b"PK\x03\x04 cut off"]
)
def test_a_damaged_file_is_named(own_paths, content):
    (own_paths[0] / "checkpoint-1200/model.pth").write_bytes(content)
    with pytest.raises(
        ValueError, match="model.pth.*cannot be read.*Git LFS.*hf download"
    ):
        make(own_paths)


@pytest.mark.parametrize(
    ("section", "key", "value", "message"),
    [
        (
            "data_config",
            "prompt_template_type",
            "simple",
            "prompt_template_type is 'simple'.*'detailed_special'",
        ),
        ("data_config", "fps", None, "model_config.json cannot be used"),
        ("inference_config", "MQ_std", 0, "MQ_std is 0.0; it must be positive"),
        ("peft_lora_config", "use_rslora", True, "use_rslora is True.*False"),
        (
            "peft_lora_config",
            "lora_enable",
            False,
            "do not fit Qwen2-VL.*Unexpected.*lora_A.weight",
        ),
    ],
)
def test_settings_of_another_model_are_refused(own_paths, section, key, value, message):
    edit_settings(own_paths[0], section, **{key: value})
    with pytest.raises(ValueError, match=message):
        make(own_paths)


@pytest.mark.parametrize("text", ["{}", "not JSON"])
def test_a_file_that_holds_no_settings_is_named(own_paths, text):
    (own_paths[0] / "model_config.json").write_text(text)
    with pytest.raises(ValueError, match="model_config.json"):
        make(own_paths)
