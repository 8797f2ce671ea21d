"""The Python API: ten lines that train, look and generate, on which the command line
stands.
"""

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor

import sage_fast
from sage_fast import (
    Callback,
    Prompt,
    RunConfig,
    StopRun,
    TrainedRun,
    UpdateRecord,
    evaluate,
    load_config,
    open_run,
    train,
)
from sage_fast.commands.cli import main
from sage_fast.config.errors import ConfigError, RewardError
from sage_fast.models import media_files

MakeRun = Callable[..., RunConfig]


def brightness(videos: Tensor, prompts: Sequence[str]) -> Tensor:
    return videos.float().mean((1, 2, 3, 4)) / 255


def two_scores(videos: Tensor, prompts: Sequence[str]) -> Mapping[str, Tensor]:
    bright = brightness(videos, prompts)
    return {"bright": bright, "dark": 1 - bright}


class Contrast:
    def score(self, videos: Tensor, prompts: Sequence[str]) -> Mapping[str, Tensor]:
        return {"contrast": videos.float().std((1, 2, 3, 4))}


class Near:
    def __init__(self, goal: float) -> None:
        self.goal = goal

    def score(self, videos: Tensor, prompts: Sequence[str]) -> Mapping[str, Tensor]:
        return {"near": -(brightness(videos, prompts) - self.goal).abs()}


class StopAtOne(Callback):
    def on_update(self, record: UpdateRecord) -> None:
        raise StopRun("one is enough")


def test_ten_lines(
    tiny_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a reward and a callback of one's own; the run can be opened again, wherever
    it lies.
    """
    run = train(
        tiny_run("--evaluation.every=0"), reward=brightness, callbacks=[StopAtOne()]
    )
    assert not run.finished and run.update == 1 and run.stop_reason == "one is enough"
    assert repr(run).splitlines()[2] == f"look at {run.output_dir}/index.html"
    row = run.metrics[-1]
    assert row["reward/mean"] == pytest.approx(row["reward/brightness_mean"])
    report = run.evaluate(num_videos=1, resamples=100)
    assert list(report.scores) == ["Reward", "brightness"] and "brightness" in str(
        report
    )
    texts = np.array(["a red circle moving left", "a blue square moving up"])
    paths = run.generate(texts, seed=np.int64(3))  # type: ignore[arg-type]
    assert [path.parent for path in paths] == [run.output_dir / "generated"] * 2
    assert media_files.read_video(paths[0]).shape[1] == 3
    moved = open_run(shutil.move(run.output_dir, tmp_path / "moved"))
    assert (moved.update, moved.finished, moved.metrics[-1]) == (1, False, row)
    # another checkpoint folder is other weights
    with pytest.raises(ConfigError, match="made with other settings"):
        moved.generate("a red circle moving left", seed=3)


def test_a_function_with_several_scores_is_a_reward(tiny_run: MakeRun) -> None:
    config = tiny_run("--evaluation.every=0", "--training.num_updates=1")
    with pytest.raises(
        ConfigError, match=r"names \['two_scores'\], but .* return \['bright', 'dark'\]"
    ):
        train(config, reward=two_scores)
    run = train(config, reward=two_scores, reward_weights={"dark": 1})
    assert run.metrics[-1]["reward/mean"] == pytest.approx(
        1 - run.metrics[-1]["reward/bright_mean"]
    )


@pytest.mark.usefixtures("nothing_drawn")
def test_texts_and_several_rewards(tiny_run: MakeRun, tmp_path: Path) -> None:
    """The prompts are in the configuration of the run, so the run is complete wherever
    it lies.
    """
    texts = ["a red circle moving left", "a blue square moving up"]
    prompts = [texts[0], Prompt(text=texts[1], index=0, seed=5)]
    words = (
        "--evaluation.prompts=null",
        "--evaluation.num_prompts=null",
        "--reward.weights={VQ: 2, contrast: 0.5}",
    )
    rewards = [lambda videos, prompts: brightness(videos, prompts), Contrast(), "toy"]
    run = train(tiny_run(*words), prompts=prompts, reward=rewards)
    means = {
        name: run.metrics[-1][f"reward/{name}_mean"]
        for name in ("lambda", "VQ", "contrast")
    }
    total = means["lambda"] + 2 * means["VQ"] + 0.5 * means["contrast"]
    assert run.metrics[-1]["reward/mean"] == pytest.approx(total)
    assert load_config(run.output_dir / "config.yaml").data.prompts == [
        texts[0],
        {"prompt": texts[1], "seed": 5},
    ]
    moved = shutil.move(run.output_dir, tmp_path / "moved")
    assert (
        list(sage_fast.evaluate(moved, num_videos=1, resamples=100).base.prompts)
        == texts
    )
    assert (
        sage_fast.export(moved).folder == moved / "exported"
        and (moved / "exported/README.md").is_file()
    )
    (video,) = sage_fast.generate(moved, texts[0], lora=moved / "exported")
    assert video.parent == moved / "generated"


@pytest.mark.usefixtures("nothing_drawn")
def test_every_run_keeps_its_own_reward(tiny_run: MakeRun, tmp_path: Path) -> None:
    """Objects of one class have one name, and so have functions of one factory."""
    words = ("--evaluation.every=1", "--training.num_updates=1")
    near: dict[str, Any] = {"reward_weights": {"near": 1.0}}
    runs = [
        train(
            tiny_run(*words), reward=Near(goal), output_dir=tmp_path / f"{goal}", **near
        )
        for goal in (0.0, 1.0)
    ]
    for run in (runs[0], open_run(runs[1].output_dir)):
        assert run.test is not None
        assert evaluate(run, num_videos=0, resamples=100).scores[
            "near"
        ].after == pytest.approx(run.test.after, abs=1e-6)
    both = train(
        tiny_run("--evaluation.every=0", words[1]),
        reward=[
            lambda videos, prompts, k=k: k * brightness(videos, prompts) for k in (1, 2)
        ],
    )
    row = both.metrics[-1]
    assert both.config.reward.weights == {"lambda": 1.0, "lambda_2": 1.0}
    assert row["reward/lambda_2_mean"] == pytest.approx(2 * row["reward/lambda_mean"])


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"reward": 3}, "reward is 3"),
        ({"reward": ["toy", brightness, brightness]}, "a list without repeats"),
        (
            {"prompts": ["a red circle moving left", 3]},
            "data.prompts: a prompt is 3; write it as a text",
        ),
        ({"reward_weights": {"VQ": 1}}, "reward_weights belongs to reward="),
        (
            {"reward": brightness, "reward_weights": {"brightness": "1"}},
            "it must be {score name: number}",
        ),
        ({"callbacks": [print]}, "sage_fast.Callback"),
        (
            {"prompts": ["a red circle moving left", "p3.TXT"]},
            "prompts is 'p3.TXT', a file",
        ),
        (
            {"reward": lambda videos: videos},
            "A function that scores is called as f(videos, prompts)",
        ),
        ({"reward": {"on_failure": "stop"}}, '**{"reward.KEY": value}'),
        (
            {"num_updates": 3},
            "unknown key 'num_updates'. Did you mean training.num_updates?",
        ),
        (
            {"allow_changes": "seed, rollout.etas"},
            "--allow-changes: unknown key 'rollout.etas'. Did you mean",
        ),
    ],
)
def test_what_cannot_be_is_a_config_error(
    tiny_run: MakeRun, options: dict[str, Any], expected: str
) -> None:
    with pytest.raises(ConfigError) as error:
        train(tiny_run(), **options)
    assert expected in str(error.value) and isinstance(error.value, ValueError)


def test_ranges_hold_for_a_configuration_that_is_put_together(
    tiny_run: MakeRun,
) -> None:
    config = tiny_run()
    wrong = replace(config, rollout=replace(config.rollout, num_steps=1))
    with pytest.raises(ConfigError, match="rollout.num_steps is 1"):
        train(wrong)


def test_one_of_a_kind_is_a_list_of_one_and_keys_are_arguments(
    tiny_run: MakeRun, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen: list[tuple[RunConfig, Any]] = []

    def end(config: RunConfig, **options: Any) -> None:
        seen.append((config, options))
        raise ConfigError("enough")

    monkeypatch.setattr("sage_fast.run.run.train", end)
    one = StopAtOne()
    many = {"training.num_updates": 6, "rollout": {"sde_window": {"size": 2}}}
    given: dict[str, Any] = {
        "prompts": "a red circle",
        "callbacks": one,
        "allow_changes": "seed, rollout.eta",
    }
    base = tiny_run("--rollout.eta=0.3")
    for config in (
        base,
        "toy_cpu",
        ["toy_cpu", "ablations/kl_none"],
        TrainedRun(config=base, update=0, finished=False),
    ):
        with pytest.raises(ConfigError, match="enough"):
            train(config, **given, **many, output_dir=tmp_path / "mine", seed=7)
    for config, options in seen:
        assert config.data.prompts == ["a red circle"]
        assert options == {"callbacks": [one], "allow_changes": ["seed, rollout.eta"]}
        assert (
            config.training.num_updates,
            config.rollout.sde_window.size,
            config.seed,
        ) == (6, 2, 7)
        assert config.output_dir == str(tmp_path / "mine")
    assert [config.rollout.eta for config, _ in seen] == [0.3, 0.5, 0.5, 0.3], (
        "what is not named stays"
    )
    assert seen[2][0].objective.kl_mode == "none" and base.seed != 7
    (tmp_path / "no_output.yaml").write_text("data: {prompts: [a]}")
    with pytest.raises(ConfigError, match="enough"):
        train(tmp_path / "no_output.yaml", output_dir="there")


@pytest.mark.parametrize(
    "command", ["train", "generate --checkpoint=none --output_dir=v"]
)
def test_a_large_model_does_not_start_on_a_cpu_by_accident(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: str,
) -> None:
    def loaded(*_: object, **__: object) -> None:
        raise RewardError("it is being loaded")

    monkeypatch.setattr("sage_fast.policy.adapters.open_components", loaded)
    monkeypatch.chdir(tmp_path)
    words = [
        *command.split(),
        "hv15_352x624_lora_1gpu",
        "--model.device=cpu",
        "--output_dir=run",
    ]
    assert main(words) == 2
    errors = capsys.readouterr().err
    assert (
        "8.3 billion parameters" in errors
        and "--allow-cpu" in errors
        and "toy_cpu" in errors
        and "80 GB" not in errors  # which the next preset may not need
    )
    assert main([*words, "--allow-cpu"]) == 1
    assert "it is being loaded" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("preset", "path"),
    [
        ("hv15_352x624_lora_1gpu", "gone/model"),
        ("hv15_352x624_lora_1gpu", "~/gone-of-sage"),
        ("wan_480p_lora_1gpu", "/gone"),
    ],
)
def test_a_folder_that_is_not_there_is_said_before_the_size_of_its_model(
    path: str,
    preset: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gone").mkdir()  # so that gone/model is not a repository
    words = ["--model.device=cpu", "--output_dir=run", f"--model.path={path}"]
    assert main(["train", preset, *words]) == 2
    errors = capsys.readouterr().err
    assert path.removeprefix("~") in errors and "billion parameters" not in errors
