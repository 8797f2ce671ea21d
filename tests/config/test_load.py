"""Configurations from files, presets and words, and back: what is read, what goes over
what, what is trusted.
"""

import json
import re
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sage_fast.config.documents import dump_yaml, read_yaml
from sage_fast.config.errors import ConfigError
from sage_fast.config.load import describe_keys, dump_config, load_config, save_config
from sage_fast.config.registry import REWARDS, resolve
from sage_fast.config.schema import by_dotted_key, to_dict
from sage_fast.run.prompt_files import read_prompts

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Presets work from any working directory."""
    monkeypatch.chdir(tmp_path)


def test_files_are_merged_left_to_right_and_the_command_line_goes_last() -> None:
    Path("late.yaml").write_text("rollout: {eta: 0.9}\nreward: {weights: {TA: 1.0}}\n")
    preset = "hv15_352x624_lora_1gpu"
    first = "ablations/setting_b"
    assert load_config([preset, first, "late.yaml"]).reward.weights == {"TA": 1.0}, (
        "a mapping is replaced whole"
    )
    assert load_config([preset, "late.yaml", first]).reward.weights == {
        "VQ": 0.5,
        "MQ": 0.5,
        "TA": 1.0,
    }
    config = load_config(
        [preset, "late.yaml"], ["--rollout.eta=0.3", "--config=late.yaml"]
    )
    assert config.rollout.eta == 0.3 and config.rollout.shift == 5.0
    assert config == load_config([preset, "late.yaml"], {"rollout.eta": 0.3})


def test_a_file_extends_a_preset_or_a_file_beside_it(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "base.yaml").write_text(
        "extends: toy_cpu\noutput_dir: base\nrollout: {eta: 0.3}\n"
    )
    (folder / "top.yaml").write_text(
        "extends: base.yaml\noutput_dir: top\nlogging: {report_to: []}\n"
    )
    words = {"rollout.eta": 0.3, "output_dir": "top", "logging.report_to": []}
    assert load_config(folder / "top.yaml") == load_config("toy_cpu", words)


def test_parts_of_lists_mappings_and_sections_are_set_one_by_one() -> None:
    words = ["--reward.rewards+=clip_score", "--reward.options.clip_score.path=/clip", "--reward.weights.VQ=3",
             "--reward.options.videoalign.path=/v", "--rollout={eta: 0.3}",
             "--optimizer.betas=[0.8, 0.9]"]  # fmt: skip
    config = load_config("hv15_352x624_lora_1gpu", words)
    assert config.reward.rewards == ["videoalign", "clip_score"]
    assert config.reward.options == {
        "videoalign": {"path": "/v", "fps": 24},
        "clip_score": {"path": "/clip"},
    }
    assert config.reward.weights == {"VQ": 3.0, "MQ": 1.0, "TA": 1.0}
    assert (config.rollout.eta, config.rollout.shift, config.optimizer.betas) == (
        0.3,
        5.0,
        (0.8, 0.9),
    )


def test_a_word_adds_to_what_a_file_has_or_leaves_empty() -> None:
    Path("empty.yaml").write_text(
        "reward: {options: , weights: , rewards: }\nlora: {target_modules: "
        "[attn.to_q]}\n"
    )
    words = [
        "--reward.options.toy.x=1",
        "--reward.weights.VQ=3",
        "--reward.rewards+=a:b",
        "--lora.target_modules+=k",
    ]
    config = load_config(["toy_cpu", "empty.yaml"], words)
    assert config.reward.options == {"toy": {"x": 1}} and config.reward.weights == {
        "VQ": 3.0,
        "MQ": 1.0,
        "TA": 1.0,
    }
    assert config.reward.rewards == ["toy", "a:b"] and config.lora.target_modules == [
        "attn.to_q",
        "k",
    ]
    Path("half.yaml").write_text("reward: {options: {toy: }}\n")
    assert load_config(["toy_cpu", "half.yaml"], words[:1]).reward.options == {
        "toy": {"x": 1}
    }
    Path("odd.yaml").write_text(
        "reward: {options: {toy: 3}, weights: [1], rewards: toy}\n"
    )
    for word, key in zip(
        words, ("reward.options.toy", "reward.weights", "reward.rewards"), strict=False
    ):
        with pytest.raises(
            ConfigError,
            match=rf"{key} is not a (list|mapping), so nothing can be added",
        ):
            load_config(["toy_cpu", "odd.yaml"], [word])


def test_a_path_may_begin_at_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "mine.txt").write_text("a")
    words = {
        "data.prompts": "~/mine.txt",
        "evaluation.prompts": "~/gone.txt",
        "output_dir": "~/r",
        "model.adapter": "~/a",
    }
    config = load_config("toy_cpu", words)
    assert (config.data.prompts, config.evaluation.prompts) == (
        f"{tmp_path}/mine.txt",
        f"{tmp_path}/gone.txt",
    )
    assert (config.output_dir, config.model.adapter) == (
        f"{tmp_path}/r",
        f"{tmp_path}/a",
    )


def test_a_path_is_relative_to_the_file_that_names_it(tmp_path: Path) -> None:
    """Then to the working directory, then to what ships; on the command line only to
    these two.
    """
    folder = tmp_path / "mine"
    folder.mkdir()
    file = folder / "run.yaml"

    def prompts(given: str, *words: str) -> str:
        file.write_text(f"output_dir: x\ndata: {{prompts: {given}}}\n")
        return load_config(file, words).data.prompts

    shipped = ROOT / "configs/prompts/toy_train.csv"
    assert (
        prompts("prompts/toy_train.csv")
        == prompts("configs/prompts/toy_train.csv")
        == str(shipped)
    )
    assert prompts("nowhere.csv") == "nowhere.csv"
    (tmp_path / "both.csv").touch()
    assert prompts("both.csv") == str(tmp_path / "both.csv")
    (folder / "both.csv").touch()
    assert prompts("both.csv") == str(folder / "both.csv")
    assert prompts("x.csv", "--data.prompts=both.csv") == str(tmp_path / "both.csv")
    # A file of the same name in the working directory does not replace a preset's.
    (tmp_path / "prompts").mkdir()
    (tmp_path / "prompts/toy_train.csv").touch()
    assert load_config("toy_cpu").data.prompts == str(shipped)


def test_a_saved_configuration_means_the_same_files_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.csv").write_text("prompt\na red circle moving left\n")
    config = load_config(
        "toy_cpu", {"data.prompts": "mine.csv", "output_dir": "runs/é😀"}
    )
    saved = tmp_path / "deep/run/config.yaml"
    save_config(config, saved)
    monkeypatch.chdir("/")
    assert load_config(saved) == config and config.data.prompts == str(
        tmp_path / "mine.csv"
    )
    assert "prompts: prompts/toy_eval.csv" in saved.read_text(), (
        "no path of this machine for what ships"
    )
    # Checkpoints keep theirs as JSON, which is YAML.
    saved.write_text(json.dumps(to_dict(config), ensure_ascii=False), encoding="utf-8")
    assert load_config(saved) == config


def test_values_are_what_they_look_like() -> None:
    Path("run.yaml").write_text(
        "output_dir: 2024-01-01\ndata: {prompts: '010', prompt_key: 'no'}\nvideo: "
        "{fps: 1e1, height: 0x10}\n"
        "model: {path: '1e3', device: cpu}\nlora: {alpha: .5}\n"
    )
    config = load_config(
        "run.yaml", ["--model.cache_dir=null", "--data.prompt_key=007"]
    )
    assert (config.output_dir, config.data.prompts, config.video.fps) == (
        "2024-01-01",
        "010",
        10.0,
    )
    assert (config.video.height, config.data.prompt_key) == (16, "007")
    assert (config.model.path, config.lora.alpha, config.model.cache_dir) == (
        "1e3",
        0.5,
        None,
    )


TEXTS = ("010", "1e3", "-.5", "no", "On", "1:30", "null", "", "true", ".inf", "é😀", "a: b", "{a}", "0x10",
         "2024-01-01", "=", "<<", "*a", "a\u2028b", "~", "1_0")  # fmt: skip


@pytest.mark.parametrize("text", TEXTS)
def test_what_is_written_is_read_back(text: str) -> None:
    tree = {"a": [text], text or "x": 1}
    document = dump_yaml(tree)
    # A tree that was changed is not the one that is read next.
    read_yaml(document, "here").clear()
    assert read_yaml(document, "here") == tree
    config = load_config(
        "toy_cpu", {"output_dir": text or "x", "data.prompt_key": f"{text}."}
    )
    Path("run.yaml").write_text(dump_config(config), encoding="utf-8")
    assert load_config("run.yaml") == config


def test_every_number_has_an_upper_bound_and_every_key_a_meaning() -> None:
    config = load_config(
        "toy_cpu",
        {"lora.alpha": 1.0, "evaluation.num_prompts": 2, "rollout.sde_window.size": 1},
    )
    values = by_dotted_key(to_dict(config), ("reward.weights", "reward.options"))
    numbers = [
        key
        for key, value in values.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    ]
    assert len(numbers) > 40
    for key in numbers:
        with pytest.raises(ConfigError, match=key.rpartition(".")[2]):
            load_config("toy_cpu", {key: 10**31})
    listed = describe_keys()
    assert (
        not [key for key in values if f"  --{key}  (" not in listed]
        and ")\n\n" not in listed
    )


def test_keys_are_found_by_other_names_and_in_any_case() -> None:
    assert describe_keys("lr") == describe_keys(
        "optimizer.learning_rate"
    ) and "--optimizer.lea" in describe_keys("lr")
    assert describe_keys("KL") == describe_keys("kl")
    with pytest.raises(
        ConfigError, match="unknown key 'kl_mod9'. Did you mean objective.kl_mode"
    ):
        describe_keys("kl_mod9")


def test_a_module_that_fails_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "failing_module.py").write_text("\n1 / 0")
    with pytest.raises(
        ConfigError,
        match=r"ZeroDivisionError: division by zero \(failing_module.py:2\)",
    ):
        resolve("failing_module:x", REWARDS, "reward.rewards")


def test_a_configuration_is_made_in_python_too(tmp_path: Path) -> None:
    config = load_config(
        overrides={
            "output_dir": tmp_path,
            "data.prompts": "p",
            "optimizer.betas": (0.8, 0.9),
        }
    )
    assert (config.output_dir, config.optimizer.betas) == (str(tmp_path), (0.8, 0.9))
    arrays = {
        "seed": np.int64(3),
        "optimizer.betas": np.array([0.5, 0.25]),
        "lora.alpha": np.float32(2),
    }
    config = load_config("toy_cpu", arrays)
    assert (config.seed, config.optimizer.betas, config.lora.alpha) == (
        3,
        (0.5, 0.25),
        2.0,
    )
    for more in ({"data.shuffle": False}, {}):
        with pytest.raises(
            ConfigError, match=r"data\.prompts is missing. .* by --data\.prompts=VALUE"
        ):
            load_config(overrides={"output_dir": "x", **more})
    with pytest.raises(
        ConfigError,
        match=r"'sde_window\.size' has a dot in it. Write it nested: sde_window: {size: \.\.\.}",
    ):
        load_config("toy_cpu", {"rollout": {"sde_window.size": 2}})
    with pytest.raises(ConfigError, match=r"unknown key 'rollout\.et'"):
        load_config("toy_cpu", {"rollout.et": 1})


# --------------------------------------------------------------------------------------
# rewards of one's own


MINE = "mine:sharp"
PRESET = "hv15_352x624_lora_1gpu"


@pytest.mark.parametrize("way", ["words", "reversed words", "file", "section", "dict"])
def test_who_replaces_the_rewards_drops_what_belonged_to_others(
    way: str, tmp_path: Path
) -> None:
    words = [
        f"--reward.rewards=[{MINE}]",
        "--reward.weights={sharp: 2.0}",
        f"--reward.options.{MINE}.radius=3",
    ]
    files: list[str | Path] = [PRESET]
    overrides: Any = words
    section = {
        "rewards": [MINE],
        "weights": {"sharp": 2.0},
        "options": {MINE: {"radius": 3}},
    }
    if way == "reversed words":
        overrides = words[::-1]
    elif way == "file":
        (tmp_path / "mine.yaml").write_text(json.dumps({"reward": section}))
        files = [PRESET, tmp_path / "mine.yaml"]
        overrides = []
    elif way == "section":
        overrides = [f"--reward={json.dumps(section)}"]
    elif way == "dict":
        overrides = {f"reward.{key}": value for key, value in section.items()}
    config = load_config(files, overrides)
    assert config.reward.options == {MINE: {"radius": 3}} and config.reward.weights == {
        "sharp": 2.0
    }
    assert config.reward.on_failure == "drop_group", (
        "the other keys belong to no reward"
    )


def test_options_of_rewards_that_stay_are_kept() -> None:
    before = load_config(PRESET).reward
    more = load_config(PRESET, ["--reward.rewards=[videoalign, clip_score]"]).reward
    assert more.options == before.options and more.weights == before.weights
    added = load_config(
        PRESET, [f"--reward.rewards+={MINE}", "--reward.weights.sharp=1"]
    ).reward
    assert added.options == before.options and added.weights == {
        **before.weights,
        "sharp": 1.0,
    }
    swapped = load_config(
        PRESET, [f"--reward.rewards=[videoalign, {MINE}]", "--reward.weights.sharp=1"]
    ).reward
    assert swapped.options == before.options and swapped.weights == {
        **before.weights,
        "sharp": 1.0,
    }


@pytest.mark.parametrize(
    ("rewards", "advice"),
    [
        (f"[{MINE}]", "--reward.weights={sharp: 1.0}"),
        ("[ocr]", "--reward.weights={OCR: 1.0}"),
        (f"[clip_score, {MINE}]", "--reward.weights={CLIPScore: 1.0, sharp: 1.0}"),
    ],
)
def test_rewards_without_weights_are_refused_before_anything_is_loaded(
    rewards: str, advice: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(advice)):
        load_config(PRESET, [f"--reward.rewards={rewards}"])


@pytest.mark.parametrize(
    "words",
    [
        ["--reward.weights.VG=1"],
        ["--reward.weights={VQ: 1.0, OCR: 1.0}"],
        ["--reward.rewards=[ocr]", "--reward.weights={ocr: 1.0}"],
    ],
)
def test_a_weight_that_fits_no_score_of_the_rewards_that_ship_is_refused(
    words: list[str],
) -> None:
    with pytest.raises(ConfigError, match="reward.weights names .* but .* give "):
        load_config(PRESET, words)
    load_config(PRESET, ["--reward.rewards+=mine:Judge", "--reward.weights.VG=1"])


def test_a_swap_of_rewards_with_the_same_scores_needs_no_weights() -> None:
    config = load_config("toy_cpu", ["--reward.rewards=[videoalign]"])
    assert config.reward.weights == {"VQ": 1.0, "MQ": 1.0, "TA": 1.0}, (
        "the default, not the weights of the toy's"
    )


@pytest.mark.parametrize(
    ("key", "value"), [("output_dir", "runs/${USER}"), ("model.adapter", "$HOME/runs")]
)
def test_variables_in_paths_are_no_names_of_folders(key: str, value: str) -> None:
    with pytest.raises(
        ConfigError, match=re.escape(key) + ".*where variables are not filled in"
    ):
        load_config("toy_cpu", {key: value})


@pytest.mark.parametrize("name", ["run.yaml", "prompts.csv", "prompts.txt"])
def test_a_file_of_nothing_but_zeros_is_no_text(name: str) -> None:
    """A gigabyte that takes no room on the disk; none of it is kept."""
    with open(name, "wb") as file:
        file.truncate(2**29 if name != "run.yaml" else 1000)
    tracemalloc.start()
    with pytest.raises(ConfigError, match="not text, it begins with bytes of 0"):
        if name == "run.yaml":
            load_config(name)
        else:
            read_prompts(name)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2**24
