"""A wrong setting is refused before anything is written: status 2 and one line with key, value and fix."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from sage_fast.commands.cli import main
from sage_fast.config.load import dump_config
from sage_fast.config.schema import RunConfig

MakeRun = Callable[..., RunConfig]

WORDS = {
    "unknown-key": ("--rollout.ettaa=0.5", ["unknown key 'rollout.ettaa'", "Did you mean rollout.eta"]),
    "bare-word": ("rollout.et=0.3", ["unknown key 'rollout.et'"]),
    "other-section": ("--training.learning_rate=1e-4", ["training.learning_rate", "optimizer.learning_rate"]),
    "one-hyphen": ("-rollout.eta=0.3", ["write two hyphens before it: --rollout.eta=0.3"]),
    "long-dash": ("\u2014rollout.eta=0.3", ["write two hyphens before it: --rollout.eta=0.3"]),
    "no-value": ("--seed", ["--seed has no value", "Write --seed=VALUE"]),
    "number": ("--rollout.eta=high", ["rollout.eta is 'high'", "a valid number"]),
    "integer": ("--rollout.num_steps=2.5", ["rollout.num_steps is 2.5", "a valid integer"]),
    "truth": ("--logging.tensorboard=1", ["logging.tensorboard is 1", "true or false"]),
    "list": ("--reward.rewards=toy", ["reward.rewards is 'toy'", "a list"]),
    "mapping": ("--reward.weights=VQ:1", ["reward.weights is 'VQ:1'", "{NAME: VALUE}"]),
    "append": ("--seed+=1", ["seed is not a list", "--seed=VALUE"]),
    "choice": ("--rollout.sde_type=ddim", ["rollout.sde_type is 'ddim'", "sage_grpo"]),
    "octal": ("--seed=010", ["seed", "read 010 differently"]),
    "section": ("--rollout=other.yaml", ["rollout is 'other.yaml'", "keys such as rollout."]),
    "infinite": ("--optimizer.learning_rate=.inf", ["optimizer.learning_rate is inf", "finite"]),
    "huge": (f"--video.num_frames={10**31}", ["video.num_frames", "at most"]),
    "seed": ("--seed=-1", ["seed is -1", "0 .. 2^63 - 1"]),
    "clip-range": ("--objective.clip_range=2", ["objective.clip_range", "2.0"]),
    "kl-bounds": ("--kl_weight.minimum=1 --kl_weight.maximum=0.1", ["minimum", "maximum"]),
    "no-noise": ("--rollout.eta=0", ["eta = 0.0 draws no noise", "0.5"]),
    "no-sde": ("--rollout.sde_type=ode", ["'ode'", "draws no noise", "sage_grpo"]),
    "group": (
        "--rollout.num_generations=3",
        ["rollout.batch_size 4", "rollout.num_generations = 3", "Set rollout.batch_size to 6"],
    ),
    "micro-batch": ("--rollout.micro_batch_size=3", ["rollout.micro_batch_size is 3", "a divisor"]),
    "window": ("--rollout.sde_window.size=9", ["rollout.sde_window.size is 9", "at most rollout.num_steps = 4"]),
    "window-that-moves": ("--rollout.sde_window.stride=2", ["rollout.sde_window.stride is 2", "size is null"]),
    "window-and-updates": (
        "--rollout.sde_window.size=1 --training.updates_per_rollout=2",
        ["too few for training.updates_per_rollout = 2"],
    ),
    "updates": (
        "--training.num_updates=3 --training.updates_per_rollout=2",
        ["training.num_updates is 3", "a multiple of training.updates_per_rollout"],
    ),
    "single-pass": (
        "--training.update=single_pass --training.updates_per_rollout=2",
        ["training.updates_per_rollout is 2", "Set it to 1"],
    ),
    "equalizer": ("--objective.ratio=ratio_norm", ["ratio is 'ratio_norm'", "set equalizer to false"]),
    "kl-share": ("--training.kl_share_every=5 --objective.kl_mode=none", ["kl_share_every is 5", "choose a KL mode"]),
    "no-reward-weight": ("--reward.weights={VQ:0}", ["reward.weights", "VQ:0"]),
    "reward": ("--reward.rewards=[videoalign9]", ["reward.rewards is 'videoalign9'", "toy"]),
    "reward-module": ("--reward.rewards=[no.such.module:Reward]", ["reward.rewards", "no.such.module"]),
    "reward-options": ("--reward.options.clip.path=x", ["reward.options", "clip"]),
    "reward-option": ("--reward.options.toy.size=3", ["reward.options.toy", "size"]),
    "reward-twice": ("--reward.rewards=[toy,toy]", ["reward.rewards", "without repeats"]),
    "family": ("--model.family=hunyuan99", ["model.family is 'hunyuan99'", "toy"]),
    "family-of-another-kind": ("--model.family=os:system", ["model.family is 'os:system'", "TypeError"]),
    "model-folder": ("--model.path=/nowhere/model", ["/nowhere/model", "config.json"]),
    "device": ("--model.device=tpu7", ["model.device", "tpu7", "auto or cpu"]),
    "full-bfloat16": ("--training.mode=full --model.dtype=bfloat16", ["training.mode full", "Set model.dtype"]),
    "lora-target": ("--lora.target_modules=[attn.to_z]", ["lora.target_modules", "attn.to_z", "attn.to_q"]),
    "video-size": ("--video.height=18", ["height", "18", "multiple of 4"]),
    "prompts": ("--evaluation.num_prompts=999", ["evaluation.num_prompts", "999", "60"]),
    "preset": ("ablations/kl_nine", ["ablations/kl_nine", "ablations/kl_none"]),
    "missing-file": ("mine.yaml", ["'mine.yaml'", "`sage-fast configs` lists the presets"]),
}
FILES = {
    "key-in-a-file": ("rollout: {etaa: 1}\n", ["late.yaml: unknown key 'rollout.etaa'", "Did you mean rollout.eta"]),
    "key-twice": ("rollout:\n  eta: 1\n  eta: 2\n", ["late.yaml:3", "eta is given twice, first in line 2", "keep one"]),
    "word-for-a-truth": ("logging:\n  tensorboard: yes\n", ["late.yaml:2", "read yes differently", "true or false"]),
    "number-for-a-text": ("model: {path: 1e3}\n", ["model.path is 1000.0", "a valid string"]),
    "section-without-keys": ("logging:\n", ["logging is None", "keys such as logging.tensorboard"]),
    "not-yaml": ("rollout: [", ["late.yaml", "not valid YAML"]),
    "list": ("- a\n", ["late.yaml must hold sections"]),
    "extends-itself": ("extends: late.yaml\n", ["late.yaml", "which extends this file"]),
    "code": ("seed: !!python/object/apply:os.getpid []\n", ["late.yaml", "tag", "os.getpid"]),
    "alias": ("seed: &a 1\ncheckpoint: {every: *a}\n", ["late.yaml:2", "aliases are not read"]),
    "not-text": ("seed: 1 # \0\n", ["late.yaml", "not valid YAML"]),
}


def refused(words: list[str], expected: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert main(["train", *words]) == 2
    errors = capsys.readouterr().err.strip()
    text = errors[errors.index("error:") :]
    assert all(part in text for part in expected), text
    assert "Traceback" not in errors and "\n" not in text and len(text) < 700, text


@pytest.fixture
def good(tiny_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = tmp_path / "good.yaml"
    file.write_text(dump_config(tiny_run()))
    monkeypatch.chdir(tmp_path)
    return file


@pytest.mark.parametrize("name", WORDS)
def test_words(good: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    words, expected = WORDS[name]
    refused([str(good), *words.split(" ")], expected, capsys)
    assert not (good.parent / "run").exists()


@pytest.mark.parametrize("name", FILES)
def test_files(good: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    content, expected = FILES[name]
    (good.parent / "late.yaml").write_text(content)
    refused([str(good), "late.yaml"], expected, capsys)


def test_a_reward_or_a_logger_that_is_wrong_in_use(good: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Found after the directory was made; the corrected command starts all the same."""
    refused([str(good), "--reward.weights={beauty: 1}"], ["reward.weights", "beauty", "VQ"], capsys)
    left = {path.name for path in (good.parent / "run").rglob("*")}
    assert not {"checkpoints", "evaluation"} & left
    assert main(["train", str(good)]) == 0


@pytest.mark.parametrize("name", ["unknown-key", "number", "group", "reward", "reward-option"])
def test_a_wrong_resume_leaves_a_finished_run_as_it_was(
    finished_run: Path, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = shutil.copytree(finished_run, tmp_path / "run")
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    refused(
        [str(run), "--resume=auto", WORDS[name][0]], ["reward." if name.startswith("reward") else "rollout."], capsys
    )
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("kind", ["directory", "pipe", "device", "huge"])
def test_a_file_that_is_not_one(good: Path, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    """As a configuration and as prompts: none of them may wait for a writer."""
    path = good.parent / "odd.txt"
    if kind == "directory":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        with path.open("wb") as file:
            file.truncate(2**41)
    refused([str(good), str(path)], ["odd.txt"], capsys)
    refused([str(good), f"--data.prompts={path}"], ["odd.txt"], capsys)
