"""The Python API: ten lines that train, look and generate, on which the command line stands."""

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import sage_fast
from sage_fast import Callback, StopRun, UpdateRecord, load_config, open_run, train
from sage_fast.commands.cli import main
from sage_fast.config.errors import ConfigError, RewardError
from sage_fast.config.load import dump_config
from sage_fast.config.schema import RunConfig
from sage_fast.models import video_files

MakeRun = Callable[..., RunConfig]


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


def test_an_object_is_a_reward_with_the_weights_of_the_configuration(tiny_run: MakeRun) -> None:
    reward, words = Contrast(), ("--evaluation.every=0", "--training.num_updates=1")
    run = train(tiny_run(*words, "--reward.weights={VQ: 2}"), reward=reward)
    assert reward.calls == 1 and run.config.reward.weights == {"VQ": 2.0}
    assert run.metrics[-1]["reward/mean"] == pytest.approx(2 * run.metrics[-1]["reward/VQ_mean"])


def test_several_scores_of_a_function_are_weighed(tiny_run: MakeRun) -> None:
    config = tiny_run("--evaluation.every=0", "--training.num_updates=1")
    with pytest.raises(ConfigError, match=r"names \['two_scores'\], but .* return \['bright', 'dark'\]"):
        train(config, reward=two_scores)
    run = train(config, reward=two_scores, reward_weights={"dark": 1})
    assert run.metrics[-1]["reward/mean"] == pytest.approx(1 - run.metrics[-1]["reward/bright_mean"])


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


def failing(videos: Tensor, prompts: Sequence[str]) -> Tensor:
    raise ValueError("out of film")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"reward": lambda videos, prompts: torch.zeros(len(prompts))}, "lambda has no name"),
        ({"reward": 3}, "reward is 3"),
        ({"reward_weights": {"VQ": 1}}, "reward_weights belongs to reward="),
        ({"callbacks": [print]}, "sage_fast.Callback"),
        ({"allow_changes": ["lora.rank"]}, "lora.rank cannot change"),
    ],
    ids=["lambda", "number", "weights", "callback", "changes"],
)
def test_what_cannot_be_is_a_config_error(tiny_run: MakeRun, options: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError) as error:
        train(tiny_run(*options.pop("words", [])), **options)
    assert expected in str(error.value) and isinstance(error.value, ValueError)


def test_a_failure_is_an_exception(tiny_run: MakeRun) -> None:
    with pytest.raises(RewardError, match="'test_api.*failing' raised ValueError: out of film|out of film"):
        train(tiny_run("--evaluation.every=0"), reward=failing)


def test_overrides_are_values_by_key(tiny_run: MakeRun, tmp_path: Path) -> None:
    config = load_config(
        "toy_cpu",
        {
            "rollout.eta": 0.3,
            "training.ema_decay": None,
            "reward.weights": {"VQ": 1},
            "lora.target_modules": ["attn.to_q"],
            "optimizer.learning_rate": 5e-6,
            "optimizer.betas": (0.8, 0.9),
            "output_dir": tmp_path,
            "logging.tensorboard": False,
            "reward.options.toy.size": 3,
        },
    )
    assert (config.rollout.eta, config.training.ema_decay, config.reward.weights) == (0.3, None, {"VQ": 1.0})
    assert config.lora.target_modules == ["attn.to_q"] and config.optimizer.betas == (0.8, 0.9)
    assert (config.optimizer.learning_rate, config.output_dir) == (5e-6, str(tmp_path))
    assert config.logging.tensorboard is False and config.reward.options == {"toy": {"size": 3}}
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


def test_a_small_model_of_any_family_may(tiny_run: MakeRun, tmp_path: Path) -> None:
    file = tmp_path / "small.yaml"
    file.write_text(dump_config(tiny_run("--training.num_updates=1", "--evaluation.every=0")))
    assert main(["train", str(file)]) == 0
    assert json.loads((tmp_path / "run/metrics.jsonl").read_text())["update"] == 1
