"""The Python API: ten lines that train, look and generate, on which the command line stands."""

import dataclasses
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

import sage_fast
from sage_fast import Callback, StopRun, UpdateRecord, load_config, open_run, train
from sage_fast.commands.cli import main
from sage_fast.config.errors import ConfigError, RewardError
from sage_fast.config.schema import RunConfig
from sage_fast.models import video_files

MakeRun = Callable[..., RunConfig]
ROOT = Path(__file__).resolve().parents[2]


def brightness(videos: Tensor, prompts: Sequence[str]) -> Tensor:
    return videos.float().mean((1, 2, 3, 4)) / 255


def two_scores(videos: Tensor, prompts: Sequence[str]) -> Mapping[str, Tensor]:
    bright = brightness(videos, prompts)
    return {"bright": bright, "dark": 1 - bright}


class Contrast:
    def __init__(self) -> None:
        self.calls = 0

    def score(self, videos: Tensor, prompts: Sequence[str]) -> Mapping[str, Tensor]:
        self.calls += 1
        return {"VQ": videos.float().std((1, 2, 3, 4))}


class StopAtOne(Callback):
    def on_update(self, record: UpdateRecord) -> None:
        raise StopRun("one is enough")


def test_the_package_offers_what_it_names() -> None:
    assert set(sage_fast.__all__) <= set(dir(sage_fast))
    for name in sage_fast.__all__:
        assert getattr(sage_fast, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'trane'"):
        sage_fast.trane  # noqa: B018


def test_ten_lines(tiny_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a reward and a callback of one's own; the run can be opened again, wherever it lies."""
    run = train(tiny_run("--evaluation.every=1"), reward=brightness, callbacks=[StopAtOne()])
    assert not run.finished and run.update == 1 and run.stop_reason == "one is enough"
    row = run.metrics[-1]
    assert row["reward/mean"] == pytest.approx(row["reward/brightness_mean"])
    report = run.evaluate(num_videos=1, resamples=100)
    assert list(report.scores) == ["Reward", "brightness"] and "brightness" in str(report)
    paths = run.generate(["a red circle moving left", "a blue square moving up"], seed=3)
    assert [path.parent for path in paths] == [run.output_dir / "generated"] * 2
    assert video_files.read_video(paths[0]).shape[1] == 3
    moved = open_run(shutil.move(run.output_dir, tmp_path / "moved"))
    assert (moved.update, moved.finished, moved.metrics[-1]) == (1, False, row)
    with pytest.raises(ConfigError, match="made with other settings"):  # another checkpoint folder is other weights
        moved.generate("a red circle moving left", seed=3)


def test_an_object_or_a_function_with_several_scores_is_a_reward(tiny_run: MakeRun) -> None:
    reward, words = Contrast(), ("--evaluation.every=0", "--training.num_updates=1")
    run = train(tiny_run(*words, "--reward.weights={VQ: 2}"), reward=reward)
    assert reward.calls == 1 and run.config.reward.weights == {"VQ": 2.0}
    assert run.metrics[-1]["reward/mean"] == pytest.approx(2 * run.metrics[-1]["reward/VQ_mean"])
    config = tiny_run(*words, f"--output_dir={run.output_dir}-2")
    with pytest.raises(ConfigError, match=r"names \['two_scores'\], but .* return \['bright', 'dark'\]"):
        train(config, reward=two_scores)
    run = train(config, reward=two_scores, reward_weights={"dark": 1})
    assert run.metrics[-1]["reward/mean"] == pytest.approx(1 - run.metrics[-1]["reward/bright_mean"])


def test_texts_and_several_rewards(tiny_run: MakeRun, tmp_path: Path) -> None:
    """The texts are in the configuration of the run, so the run is complete wherever it lies."""
    texts = ["a red circle moving left", "a blue square moving up"]
    words = ("--evaluation.prompts=null", "--evaluation.num_prompts=null", "--reward.weights={VQ: 2}")
    run = train(tiny_run(*words), prompts=texts, reward=[lambda videos, prompts: brightness(videos, prompts), "toy"])
    row = run.metrics[-1]
    assert row["reward/mean"] == pytest.approx(row["reward/lambda_mean"] + 2 * row["reward/VQ_mean"])
    assert load_config(run.output_dir / "config.yaml").data.prompts == texts
    moved = shutil.move(run.output_dir, tmp_path / "moved")
    assert list(sage_fast.evaluate(moved, num_videos=1, resamples=100).base.prompts) == texts
    assert sage_fast.export(moved).folder == moved / "exported" and (moved / "exported/README.md").is_file()
    (video,) = sage_fast.generate(moved, texts[0], lora=moved / "exported")
    assert video.parent == moved / "generated"


def test_a_run_shows_itself_in_three_lines(finished_run: Path) -> None:
    run = open_run(finished_run)
    first, second, third = repr(run).splitlines()
    assert first == f"TrainedRun in {finished_run}: update {run.update} of {run.update}, finished"
    assert run.test is not None and run.test.change in second and third == f"look at {finished_run}/index.html"
    assert "not compared" in repr(dataclasses.replace(run, test=None, finished=False, stop_reason="enough"))


SCRIPT = """
from sage_fast import TrainedRun, evaluate, export, generate, load_config, train

run: TrainedRun = train(
    load_config("toy_cpu", {"training.num_updates": 1, "rollout.batch_size": 32, "evaluation.num_prompts": 2}),
    prompts=["a red circle moving left"],
    reward=[lambda videos, prompts: videos.float().mean((1, 2, 3, 4)), "toy"],
)
generate("runs/toy_cpu", "a red circle moving left", "videos", num_videos=2)
print(run, export(run).folder, evaluate(run, resamples=100, num_videos=0).scores["Reward"].mean)
"""


MYPY = """
[mypy]
strict = true
follow_imports = silent
[mypy-torch.*,numpy.*,diffusers.*,transformers.*,peft.*,safetensors.*,triton.*]
follow_imports = skip
"""
"""The types of SAGE-Fast; reading those of torch takes minutes."""


@pytest.mark.slow
def test_a_script_of_ten_lines_is_typed_and_runs_in_an_empty_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "mypy.ini").write_text(MYPY)
    environment = os.environ | {"MYPYPATH": os.pathsep.join(str(ROOT / folder) for folder in (".", "kernels"))}
    subprocess.run([sys.executable, "-m", "mypy", "script.py"], cwd=tmp_path, env=environment, check=True)
    monkeypatch.chdir(tmp_path)
    exec(SCRIPT, {"__name__": "script"})
    assert len(list((tmp_path / "videos").glob("*.mp4"))) == 2


def test_a_reward_that_this_process_has_not_given_is_not_imported_unasked(
    tiny_run: MakeRun, tmp_path: Path, finished_run: Path
) -> None:
    run = shutil.copytree(finished_run, tmp_path / "run")
    text = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(text.replace("- toy\n", "- evil:reward\n"))
    with pytest.raises(ConfigError, match="evil:reward"):
        open_run(run)
    assert open_run(run, trust_config=True).config.reward.rewards == ["evil:reward"]
    with pytest.raises(ConfigError, match=r"no config\.yaml"):
        open_run(tmp_path)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"reward": 3}, "reward is 3"),
        ({"reward": ["toy", brightness, brightness]}, "a list without repeats"),
        ({"prompts": ["a red circle moving left", " "]}, "data.prompts: a prompt is empty"),
        ({"prompts": ["a red circle moving left", 3]}, "data.prompts: a prompt is 3; write it as a text"),
        ({"reward_weights": {"VQ": 1}}, "reward_weights belongs to reward="),
        ({"callbacks": [print]}, "sage_fast.Callback"),
        ({"allow_changes": ["lora.rank"]}, "lora.rank cannot change"),
    ],
    ids=["number", "twice", "empty-prompt", "number-for-a-prompt", "weights", "callback", "changes"],
)
def test_what_cannot_be_is_a_config_error(tiny_run: MakeRun, options: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError) as error:
        train(tiny_run(), **options)
    assert expected in str(error.value) and isinstance(error.value, ValueError)


def test_overrides_are_values_by_key(tmp_path: Path) -> None:
    config = load_config(
        "toy_cpu",
        {
            "reward.weights": {"VQ": 1},
            "lora.target_modules": ["attn.to_q"],
            "optimizer.betas": (0.8, 0.9),
            "output_dir": tmp_path,
            "reward.options.toy.size": 3,
        },
    )
    assert (config.reward.weights, config.reward.options) == ({"VQ": 1.0}, {"toy": {"size": 3}})
    assert config.lora.target_modules == ["attn.to_q"] and config.optimizer.betas == (0.8, 0.9)
    assert config.output_dir == str(tmp_path)
    with pytest.raises(ConfigError, match=r"unknown key 'rollout\.et'"):
        load_config("toy_cpu", {"rollout.et": 1})


# ------------------------------------------------------------------------------------------ CPU by accident


@pytest.fixture
def large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The 8.3 B model on a CPU; loading it is another error."""

    def loaded(*_: object, **__: object) -> None:
        raise RewardError("it is being loaded")

    for name in ("run.run", "tools.generation"):
        monkeypatch.setattr(f"sage_fast.{name}.open_components", loaded)
    monkeypatch.chdir(tmp_path)
    return ["hv15_352x624_lora_1gpu", "--model.device=cpu", "--output_dir=run"]


@pytest.mark.parametrize(
    "command", [["train"], ["generate", "--checkpoint=none", "--output=v"]], ids=["train", "generate"]
)
def test_a_large_model_does_not_start_on_a_cpu_by_accident(
    large: list[str], command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    words = [command[0], *large, *command[1:]]
    assert main(words) == 2
    errors = capsys.readouterr().err
    assert "8.3 billion parameters" in errors and "--allow-cpu" in errors and "toy_cpu" in errors
    assert main([*words, "--allow-cpu"]) == 1
    assert "it is being loaded" in capsys.readouterr().err
