"""Files that people write: what is ambiguous, endless or out of range is refused in one message with the place."""

import json
import os
from pathlib import Path

import pytest

from sage_fast.commands.cli import main
from sage_fast.config.distributed import DistributedConfig
from sage_fast.config.errors import ConfigError
from sage_fast.config.load import dump_config, load_config
from sage_fast.config.model_sections import ModelConfig
from sage_fast.config.registry import MODEL_FAMILIES, REWARDS, resolve
from sage_fast.config.rollout_sections import DataConfig
from sage_fast.config.schema import RunConfig, by_dotted_key, to_dict
from sage_fast.config.text_files import MAX_DEPTH, dump_yaml, read_json, read_yaml
from sage_fast.models.family import load_components

ROOT = Path(__file__).resolve().parents[2]
PRESET = ROOT / "configs/toy_cpu.yaml"
LINES = len(PRESET.read_text().splitlines())


def refusal(tmp_path: Path, extra: str | bytes, *words: str) -> str:
    """The message for the toy preset with something after its end, and words."""
    file = tmp_path / "run.yaml"
    file.write_bytes(PRESET.read_bytes() + (extra.encode() if isinstance(extra, str) else extra))
    with pytest.raises(ConfigError) as error:
        load_config(file, words)
    return str(error.value)


BOMB = "a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 30)
)

FILES = {
    "section-twice": ("rollout: {num_steps: 2}\n", [f"rollout is given twice, in line 13 and in line {LINES + 1}"]),
    "key-twice": ("logging:\n  tensorboard: true\n  tensorboard: false\n",
                  [f"logging.tensorboard is given twice, in line {LINES + 2} and in line {LINES + 3}"]),
    "octal": ("num_threads: 010\n", [f":{LINES + 1}: num_threads is 010", "leading 0"]),
    "base-60": ("num_threads: 1:30\n", ["num_threads is 1:30"]),
    "base-60-in-quotes": ("num_threads: '1:30'\n", ["num_threads is 1:30"]),
    "word-for-a-bool": ("logging: {tensorboard: yes}\n", ["logging.tensorboard is yes", "true or false"]),
    "word-for-a-string": ("logging: {wandb_project: no}\n", ["logging.wandb_project is no", "quotes"]),
    "key-that-is-no-word": ("kl_weight: {1: 2}\n", ["kl_weight.1", "quotes"]),
    "recursive-anchor": ("logging: &a {wandb_project: *a}\n", ["*a", "inside the value"]),
    "nesting": ("logging: " + "[" * 3000, [f"deeper than {MAX_DEPTH} levels"]),
    "alias-bomb": (BOMB, ["more than 20,000 values"]),
    "digits": ("num_threads: " + "9" * 5000 + "\n", ["num_threads", "5000 digits"]),
    "tag": ("num_threads: !!python/object/apply:os.getpid []\n", ["num_threads", "tag"]),
    "two-documents": ("---\nseed: 1\n", ["second document"]),
    "nul": (b"\0", [f":{LINES + 1}: holds a NUL byte"]),
    "no-utf-8": (b"# \xe9\n", [f":{LINES + 1}: not UTF-8"]),
    "section-without-keys": ("logging:\n", ["logging is None", "logging.tensorboard"]),
    "section-from-a-file": ("logging: other.yaml\n", ["logging is 'other.yaml'"]),
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_a_file_is_refused_with_the_place(tmp_path: Path, name: str) -> None:
    extra, expected = FILES[name]
    message = refusal(tmp_path, extra)
    assert all(part in message for part in expected) and len(message) < 1000, message


WORDS = {
    "frames": (["--video.num_frames=1000000000000000000000000000000"], ["video.num_frames", "at most 10,000"]),
    "weight": (["--reward.weights={VQ: 1.0e308}"], ["reward.weights.VQ", "at most"]),
    "threads": (["--num_threads=100000"], ["num_threads is 100000", "at most 1,024"]),
    "timeout": (["--distributed.timeout_seconds=1e300"], ["distributed.timeout_seconds", "at most"]),
    "fps": (["--video.fps=1e-300"], ["video.fps", "1 / 600"]),
    "reward-twice": (["--reward.rewards=[toy, toy]"], ["reward.rewards", "without repeats"]),
    "key-twice": (["--reward.weights={VQ: 1, VQ: 2}"], ["reward.weights.VQ is given twice"]),
    "option-twice": (["--reward.options.toy.size={a: 1, a: 2}"], ["reward.options.toy.size.a is given twice"]),
    "octal": (["--seed=010"], ["seed is 010"]),
    "base-60": (["--seed=1:30"], ["seed is 1:30"]),
    "bool": (["--logging.tensorboard=off"], ["logging.tensorboard is off", "true or false"]),
    "abbreviation": (["--rollout.guid=1"], ["unknown key 'rollout.guid'"]),
    "no-value": (["--seed", "--resume=auto"], ["--seed has no value"]),
    "nul": (["--output_dir=a\0b"], ["output_dir", "NUL"]),
    "half-a-character": (["--output_dir=\ud800"], ["output_dir", "surrogates"]),
    "section-file": (["--rollout=rollout.yaml"], ["rollout is 'rollout.yaml'"]),
    "print": (["--print_config=x"], ["unknown key 'print_config'"]),
}


@pytest.mark.parametrize("name", WORDS)
def test_a_word_is_refused_with_the_key(tmp_path: Path, name: str) -> None:
    words, expected = WORDS[name]
    message = refusal(tmp_path, "", *words)
    assert all(part in message for part in expected), message


def test_every_number_has_an_upper_bound() -> None:
    config = load_config(PRESET, ["--lora.alpha=1", "--evaluation.num_prompts=2", "--rollout.sde_window.size=1"])
    tree = to_dict(config)
    numbers = [k for k, v in by_dotted_key(tree).items() if isinstance(v, int | float) and not isinstance(v, bool)]
    assert len(numbers) > 40
    for key in numbers:
        with pytest.raises(ConfigError) as error:
            load_config(
                PRESET, [f"--{key}={10**31}"] if ".weights." not in key else [f"--reward.weights={{VQ: {10**31}}}"]
            )
        assert key.rpartition(".")[2] in str(error.value) or "weights" in key, error.value


def test_what_is_written_is_what_it_looks_like(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        "output_dir: 2024-01-01\ndata: {prompts: '010'}\nseed: 1_000\nvideo: {fps: 1e1, height: 0x10}\n"
        "logging: {wandb_project: 'no'}\nmodel: &m {path: '1e3', device: cpu}\nlora: {alpha: .5}\n"
    )
    config = load_config(file)
    assert (config.output_dir, config.data.prompts, config.seed) == ("2024-01-01", "010", 1000)
    assert (config.video.fps, config.video.height, config.logging.wandb_project) == (10.0, 16, "no")
    assert (config.model.path, config.lora.alpha) == ("1e3", 0.5)
    file.write_text("output_dir: x\ndata: {prompts: p}\nmodel: {path: 1e3}\n")
    with pytest.raises(ConfigError, match=r"model.path is 1000.0, but it must be of type str or null"):
        load_config(file)


@pytest.mark.parametrize("text", ["010", "1e3", "-.5", "no", "On", "1:30", "null", "", "true", ".inf", "é😀",
                                  "a: b", "{a}", "0x10", "2024-01-01", "=", "<<", "*a", "a\u2028b", "~"])  # fmt: skip
def test_a_saved_configuration_is_read_back(tmp_path: Path, text: str) -> None:
    assert read_yaml(dump_yaml({"a": [text], text or "x": 1}), "here") == {"a": [text], text or "x": 1}
    config = RunConfig(output_dir=text or "x", data=DataConfig(prompts=text or "x"))
    file = tmp_path / "run.yaml"
    file.write_text(dump_config(config), encoding="utf-8")
    assert load_config(file) == config


def test_anchors_and_merge_keys_still_work(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        "output_dir: x\ndata: {prompts: p.csv}\nreward:\n  weights: &w {VQ: 1.0}\n  options: {toy: {<<: *w}}\n"
    )
    config = load_config(file)
    assert config.reward.options == {"toy": {"VQ": 1.0}} and config.reward.weights == {"VQ": 1.0}


@pytest.mark.parametrize("kind", ["directory", "pipe", "missing", "huge", "device"])
def test_a_file_that_is_none(tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    """As a later configuration, as prompts, and as a section's value, none of which may wait for a writer."""
    path = tmp_path / "odd.txt"
    if kind == "directory":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "huge":
        with path.open("wb") as file:
            file.truncate(2**41)
    assert main(["train", str(PRESET), str(path), "--print_config"]) == 2
    assert "odd.txt" in capsys.readouterr().err
    assert main(["train", str(PRESET), f"--data.prompts={path}", f"--output_dir={tmp_path / 'run'}"]) == 2
    assert "odd.txt" in capsys.readouterr().err and not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("text", "expected"),
    [("[" * 100_000, "deeper"), ('{"a": 1, "a": 2}', "'a' is given twice"), ("9" * 5000, "5000 digits"),
     ("[" * 40 + "]" * 40, "deeper"), ('{"a": 1}\n{', "line 2"), ("", "not valid JSON")],
)  # fmt: skip
def test_json_is_read_as_strictly(text: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected) as error:
        read_json(text, "zero.json")
    assert str(error.value).startswith("zero.json: ")


# ------------------------------------------------------------------------------------------ names of code


@pytest.mark.parametrize("name", ["..:x", ":x", "os:", "os.path", "a b:c", "os:a:b", "-:x"])
def test_a_name_that_is_none_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="reward.rewards is"):
        resolve(name, REWARDS, "reward.rewards")


def test_a_module_that_fails_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    for name, code, reason in (
        ("exits", "import sys\nsys.exit(0)", "SystemExit: 0 (exits_module.py:2)"),
        ("raises", "\n1 / 0", "ZeroDivisionError: division by zero (raises_module.py:2)"),
        ("looks_up", "import os\nos.nothing", "has no attribute 'nothing' (looks_up_module.py:2)"),
    ):
        (tmp_path / f"{name}_module.py").write_text(code)
        with pytest.raises(ConfigError) as error:
            resolve(f"{name}_module:x", REWARDS, "reward.rewards")
        assert reason in str(error.value)


@pytest.mark.parametrize(("family", "reason"), [("os:system", "TypeError"), ("builtins:repr", "gave a str"),
                                                ("sys:exit", "SystemExit")])  # fmt: skip
def test_a_model_family_that_is_none(family: str, reason: str) -> None:
    assert family not in MODEL_FAMILIES
    with pytest.raises(ConfigError, match=f"model.family is '{family}'.*{reason}"):
        load_components(ModelConfig(family=family))


def test_numbers_of_processes_are_bounded() -> None:
    with pytest.raises(ConfigError, match="distributed.sp is .*at most"):
        RunConfig(output_dir="x", data=DataConfig(prompts="p"), distributed=DistributedConfig(sp=10**9))


def test_a_configuration_of_an_earlier_run_is_read(tmp_path: Path) -> None:
    """Checkpoints keep theirs as JSON, which is YAML."""
    file = tmp_path / "state.yaml"
    config = load_config(PRESET, ["--output_dir=runs/é😀"])
    file.write_text(json.dumps(to_dict(config), ensure_ascii=False), encoding="utf-8")
    assert load_config(file) == config


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--rollout.sage_sigma_margin=0"], "between 0 and 1"),
        (["--rollout.sage_sigma_margin=0.01", "--rollout.sde_type=sage_exact"], "belongs to sage_grpo"),
        (["--objective.ratio=ratio_norm"], "set equalizer to false"),
        (["--training.kl_share_every=5", "--objective.kl_mode=none"], "choose a KL mode"),
        (
            ["--training.kl_share_every=5", "--training.update=single_pass", "--rollout.micro_batch_size=1"],
            "training.update to two_phase",
        ),
    ],
)
def test_a_setting_that_would_do_nothing_is_refused(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(PRESET, words)
