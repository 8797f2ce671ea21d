"""A wrong setting or request is refused before anything is written: status 2 and one
line with key, value and fix.
"""

import os
import shutil
from pathlib import Path

import pytest

from sage_fast.commands.cli import main

WORDS = {
    "torch-name": (
        "--optimizer.lr=1e-4",
        ["unknown key 'optimizer.lr'", "Did you mean optimizer.learning_rate?"],
    ),
    "renamed": (
        "--logging.wandb_project=p",
        ["unknown key 'logging.wandb_project'", "Did you mean logging.report_to?"],
    ),
    "half-a-name": (
        "--forward_process.old=0.5",
        ["Did you mean forward_process.old_decay?"],
    ),
    "unknown-key": (
        "--rollout.ettaa=0.5",
        ["unknown key 'rollout.ettaa'", "Did you mean rollout.eta"],
    ),
    "other-section": (
        "training.learning_rate=1e-4",
        ["training.learning_rate", "optimizer.learning_rate"],
    ),
    "no-value": ("--seed", ["--seed has no value", "Write --seed=VALUE"]),
    "number": ("--rollout.eta=high", ["rollout.eta is 'high'", "a valid number"]),
    "mapping": ("--reward.weights=VQ:1", ["reward.weights is 'VQ:1'", "{NAME: VALUE}"]),
    "append": ("--seed+=1", ["seed is not a list", "--seed=VALUE"]),
    "append-to-null": (
        "--lora.target_modules+=x",
        ["lora.target_modules is not a list", "--lora.target_modules=VALUE"],
    ),
    "too-few": (
        "--optimizer.betas=[0.9]",
        ["optimizer.betas is [0.9], but it must be a list of 2 numbers."],
    ),
    "allow-changes": (
        "--allow-changes seed,advantage.std --allow-changes=kl_weight.targt",
        ["unknown key 'kl_weight.targt'. Did you mean kl_weight.target"],
    ),
    "no-such-key": ("--keys zzz", ["--keys: unknown key 'zzz'"]),
    "choice": ("--rollout.sde_type=ddim", ["rollout.sde_type is 'ddim'", "sage_grpo"]),
    "infinite": (
        "--optimizer.learning_rate=.inf",
        ["optimizer.learning_rate is inf", "finite"],
    ),
    "noise": (
        "--rollout.sde_type=cps --rollout.eta=1.5",
        ["rollout.eta is 1.5", "at most 1 with rollout.sde_type cps"],
    ),
    "no-noise": ("--rollout.eta=0", ["eta = 0.0 draws no noise", "0.5"]),
    "group": (
        "--rollout.num_generations=3",
        ["rollout.batch_size 4", "Set rollout.batch_size to 6"],
    ),
    "micro-batch": (
        "--rollout.micro_batch_size=3",
        ["rollout.micro_batch_size is 3", "a divisor"],
    ),
    "window": (
        "--rollout.sde_window.size=9",
        ["rollout.sde_window.size is 9", "at most rollout.num_steps = 4"],
    ),
    "window-that-moves": (
        "--rollout.sde_window.stride=2",
        ["rollout.sde_window.stride is 2", "size is null"],
    ),
    "window-within": (
        "--rollout.sde_window.within=0.5",
        ["rollout.sde_window.within is 0.5", "size is null"],
    ),
    "window-wider": (
        "--rollout.sde_window.size=3 --rollout.sde_window.within=0.5",
        [
            "rollout.sde_window.size is 3",
            "at most 2, the steps of rollout.sde_window.within = 0.5",
        ],
    ),
    "window-updates": (
        "--rollout.sde_window.size=1 --training.updates_per_rollout=2",
        ["in the SDE window", "too few for training.", "Widen rollout.sde_window or"],
    ),
    "steps-updates": (
        "--training.num_updates=8 --training.updates_per_rollout=8",
        [
            "of sage_grpo, of which",
            "too few for training.",
            "Raise training.timestep_fraction or rollout.num_steps,",
        ],
    ),
    "updates": (
        "--training.num_updates=3 --training.updates_per_rollout=2",
        ["num_updates is 3", "a multiple of"],
    ),
    "equalizer": (
        "--objective.ratio=ratio_norm",
        ["ratio is 'ratio_norm'", "set equalizer to false"],
    ),
    "kl-share": (
        "--training.kl_share_every=5 --objective.kl_mode=none",
        ["kl_share_every is 5", "choose a KL mode"],
    ),
    "reward": (
        "--reward.rewards=[videoalign9]",
        ["reward.rewards is 'videoalign9'", "toy"],
    ),
    "reward-module": (
        "--reward.rewards=[no.such.module:Reward] --reward.weights.x=1",
        ["reward.rewards", "no.such.module"],
    ),
    "reward-option": ("--reward.options.toy.size=3", ["reward.options.toy", "size"]),
    "reward-weight": ("--reward.weights={VQ:0}", ["reward.weights", "VQ:0"]),
    "family": (
        "--model.family=os:system",
        ["model.family is 'os:system'", "TypeError"],
    ),
    "model-folder": ("--model.path=/nowhere/model", ["/nowhere/model", "config.json"]),
    "device": ("--model.device=tpu7", ["model.device", "tpu7", "auto or cpu"]),
    "full-bfloat16": (
        "--training.mode=full --model.dtype=bfloat16",
        ["training.mode full", "Set model.dtype"],
    ),
    "lora-target": (
        "--lora.target_modules=[attn.to_z]",
        ["lora.target_modules", "attn.to_z", "attn.to_q"],
    ),
    "video-size": ("--video.height=18", ["height", "18", "multiple of 4"]),
    "prompts": (
        "--data.prompts=gone.csv",
        ["data.prompts", "gone.csv", "cannot be read as a prompt file"],
    ),
    "num-prompts": (
        "--evaluation.num_prompts=999",
        ["evaluation.num_prompts", "999", "60"],
    ),
    "output": (
        "--output_dir=good.yaml/run",
        ["output_dir", "good.yaml/run", "cannot be written"],
    ),
    "gpus": ("--gpus=0", ["--gpus is 0", "at least 1"]),
}
FILES = {
    "key-in-a-file": (
        "rollout: {etaa: 1}\n",
        ["late.yaml: unknown key 'rollout.etaa'", "Did you mean rollout.eta"],
    ),
    "dotted-key": (
        "rollout.eta: 0.2\n",
        ["late.yaml: 'rollout.eta' has a dot in it", "nested: rollout: {eta: ...}."],
    ),
    "key-twice": (
        "rollout:\n  eta: 1\n  eta: 2\n",
        ["late.yaml:3", 'duplicate key "eta"'],
    ),
    "word-for-a-truth": (
        "checkpoint:\n  asynchronous: yes\n",
        ["checkpoint.asynchronous is 'yes'", "true or false"],
    ),
    "section-without-keys": (
        "logging:\n",
        ["logging is None", "keys such as logging.report_to"],
    ),
    "not-yaml": ("rollout: [", ["late.yaml", "not valid YAML"]),
    "extends-itself": (
        "extends: late.yaml\n",
        ["late.yaml", "which extends this file"],
    ),
    "code": (
        "seed: !!python/object/apply:os.getpid []\n",
        ["late.yaml", "tag", "os.getpid"],
    ),
    "octal": (
        "rollout:\n  eta: 010\n",
        ["late.yaml:2", "010 is an octal number to some programs", "in quotes"],
    ),
    "too-deep": ("seed: " + "[" * 100, ["late.yaml", "nested deeper than 50"]),
    "alias": (
        "seed: &a 1\ncheckpoint: {every: *a}\n",
        ["late.yaml:2", "aliases are not read"],
    ),
}
REQUESTS = {
    "no-checkpoint": ("evaluate good.yaml --output_dir=o", "no complete checkpoint"),
    "no-run": ("evaluate empty --output_dir=o", "without config.yaml"),
    "base": (
        "evaluate RUN --output_dir=o --checkpoint none",
        "compares a trained model with the base model",
    ),
    "resamples": ("evaluate RUN --output_dir=o --resamples 3", "--resamples is 3"),
    "one-prompt": (
        "evaluate RUN --output_dir=o --prompts one.txt",
        "at least 2 prompts",
    ),
    "no-prompts": (
        "generate RUN --output_dir=o --prompts=",
        "evaluation.prompts: .: a prompt file ends in .csv",
    ),
    "memory": (
        "plan good.yaml --memory nan",
        "--memory is nan; it must be more than 0",
    ),
    "sampler": (
        "generate good.yaml --output_dir=o --checkpoint none --sampler ddim",
        "--sampler is 'ddim'",
    ),
    "adapter": (
        "generate good.yaml --output_dir=o --lora /nowhere",
        "There is no adapter /nowhere",
    ),
    "both-prompts": (
        "generate good.yaml --output_dir=o --prompt x --prompts one.txt",
        "were both given",
    ),
    "picture-alone": (
        "generate good.yaml --output_dir=o --prompts one.txt --image x.png",
        "1 --image and 0 --prompt",
    ),
    "empty-prompt": (
        "generate good.yaml --output_dir=o --checkpoint none --prompt=",
        "a prompt is empty",
    ),
    "unknown-word": (
        "generate good.yaml --output_dir=o --checkpoint none --prompt cat",
        "Unknown word 'cat'",
    ),
    "same-run": ("compare RUN RUN", "same configuration and seed"),
    "key-for-no-key": ("compare RUN RUN --seed=1", "takes no keys"),
    "nothing-to-go-deep": ("doctor --deep", "--deep needs a configuration"),
    "missing": ("export nowhere --output_dir=o", "neither a checkpoint nor a run"),
    "whole-official": (
        "export RUN --output_dir=o --format full --layout official",
        "--layout official is for adapters",
    ),
    "preset-name": ("configs show kl_none", "Did you mean ablations/kl_none?"),
    "no-config": ("train", "which run?"),
}


def refused(
    words: list[str], expected: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert main(words) == 2
    errors = capsys.readouterr().err.strip()
    text = errors[errors.index("error:") :]
    assert all(part in text for part in expected), text
    assert "Traceback" not in errors and "\n" not in text and len(text) < 700, text


@pytest.fixture
def good(config_file: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(config_file.parent)
    return config_file.rename("good.yaml").absolute()


@pytest.mark.parametrize("name", WORDS)
def test_words(good: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    words, expected = WORDS[name]
    refused(["train", str(good), *words.split(" ")], expected, capsys)
    assert not (good.parent / "run").exists()


@pytest.mark.parametrize("name", FILES)
def test_files(good: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    content, expected = FILES[name]
    (good.parent / "late.yaml").write_text(content)
    refused(["train", str(good), "late.yaml"], expected, capsys)


@pytest.mark.parametrize("name", REQUESTS)
def test_requests(
    good: Path, finished_run: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (good.parent / "empty").mkdir()
    (good.parent / "one.txt").write_text("a red circle moving left\n")
    words, expected = REQUESTS[name]
    refused(words.replace("RUN", str(finished_run)).split(" "), [expected], capsys)
    assert not {"o", "run", "comparison"} & {
        path.name for path in good.parent.iterdir()
    }


@pytest.mark.usefixtures("nothing_drawn")
def test_a_reward_that_is_wrong_in_use(
    good: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Found after the directory was made; the corrected command starts all the same."""
    refused(
        ["train", str(good), "--reward.weights={beauty: 1}"],
        ["reward.weights", "beauty", "VQ"],
        capsys,
    )
    left = {path.name for path in (good.parent / "run").rglob("*")}
    assert not {"checkpoints", "evaluation"} & left
    assert main(["train", str(good)]) == 0


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--rollout.eta=0.7", "rollout.eta: 0.5 in the checkpoint, 0.7 now"),
        ("--seed=5 --resume=none", "already holds a run"),
    ],
)
def test_a_wrong_resume_leaves_a_finished_run_as_it_was(
    finished_run: Path,
    tmp_path: Path,
    words: str,
    expected: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = shutil.copytree(finished_run, tmp_path / "run")
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    refused(["train", str(run), "--resume=auto", *words.split(" ")], [expected], capsys)
    assert {
        path: path.read_bytes() for path in run.rglob("*") if path.is_file()
    } == before


KINDS = {
    "directory": Path.mkdir,
    "pipe": os.mkfifo,
    "device": lambda path: path.symlink_to("/dev/zero"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_of_another_kind(
    good: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a configuration and as prompts: none of them may wait for a writer, or be read
    to an end that never comes.
    """
    path = good.parent / "odd.txt"
    KINDS[kind](path)
    refused(["train", str(good), str(path)], ["odd.txt"], capsys)
    refused(["train", str(good), f"--data.prompts={path}"], ["odd.txt"], capsys)
