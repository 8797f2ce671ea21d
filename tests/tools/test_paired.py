"""The paired evaluation: its numbers by hand, its page complete in itself, and what a
second call keeps.
"""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from sage_fast.commands.cli import main
from sage_fast.config.errors import ConfigError
from sage_fast.config.load import load_config
from sage_fast.config.registry import REWARDS
from sage_fast.config.schema import RunConfig
from sage_fast.evaluation import (
    OVERALL,
    REWARD,
    Evaluation,
    format_comparison,
    headline,
    paired_tests,
)
from sage_fast.models import media_files
from sage_fast.policy.adapters import weights_digest
from sage_fast.policy.lora import ADAPTER_FILE
from sage_fast.rewards.base import reward_scales
from sage_fast.run.prompt_files import load_eval_prompts
from sage_fast.run.run import Run
from sage_fast.tools.acceptance import examine_deeply
from sage_fast.tools.api import evaluate, generate
from sage_fast.tools.paired import (
    PairedEvaluation,
    Report,
    spread_over_ranks,
    to_html,
    to_json,
    write_report,
)
from tests.browser import CHROMIUM, Browser, Page, wide_elements

MakeRun = Callable[..., RunConfig]

ROOT = Path(__file__).resolve().parents[2]


def scores(seed: int, shift: float, count: int = 40) -> Evaluation:
    generator = torch.Generator().manual_seed(0)
    common = torch.randn(count, generator=generator, dtype=torch.float64)
    own = 0.3 * torch.randn(
        count, 2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )
    vq = common + own[:, 0] + shift
    clip = 25 + own[:, 1] - own[:, 1].mean()
    prompts = [f"prompt <{i}> & more" for i in range(count)]
    return Evaluation(
        prompts=prompts,
        scores={"CLIPScore": clip.tolist(), "VQ": vq.tolist()},
        reward=(2 * vq).tolist(),
    )


# --------------------------------------------------------------------------------------
# numbers


def test_the_overall_of_papers_stands_beside_the_trained_reward() -> None:
    """Table 2's row of the paper: -0.4765 - 0.2384 + 1.5216 = 0.8067, also where
    Setting B was trained.
    """
    row = {"TA": 1.5216, "VQ": -0.4765, "MQ": -0.2384}
    weights = {"VQ": 0.5, "MQ": 0.5, "TA": 1.0}
    reward = sum(weights[name] * value for name, value in row.items())
    trained = Evaluation(
        prompts=["a", "b"],
        scores={n: [v, v] for n, v in row.items()},
        reward=[reward] * 2,
    )
    tests = paired_tests(trained, trained, weights=weights)
    assert (
        list(tests) == ["Reward", OVERALL, "VQ", "MQ", "TA"]
        and OVERALL == "Overall (VQ + MQ + TA)"
    )
    assert tests[OVERALL].after == pytest.approx(0.8067) and tests[
        REWARD
    ].after == pytest.approx(1.16415)


def test_videos_shown_reach_from_the_largest_gain_to_the_largest_loss() -> None:
    assert [spread_over_ranks([0.0, 3.0, 1.0], count) for count in (0, 2, 9)] == [
        [],
        [1, 0],
        [1, 2, 0],
    ]


# --------------------------------------------------------------------------------------
# files


@pytest.fixture
def report() -> Report:
    base = scores(1, 0.0)
    trained = scores(2, 0.5)
    return Report(
        scores=paired_tests(base, trained, weights={"VQ": 2.0}),
        base=base,
        trained=trained,
        weights={"VQ": 2.0},
        resamples=10_000,
        settings={"path": "a <b>"},
        videos={0: "0.mp4", 1: "1.mp4"},
        scales=reward_scales(list(REWARDS)),
    )


def test_the_page_needs_nothing_but_its_videos_and_has_every_prompt(
    report: Report,
) -> None:
    page = Page(to_html(report))
    assert page.fetched == [
        "base/0.mp4",
        "trained/0.mp4",
        "base/1.mp4",
        "trained/1.mp4",
    ]
    assert headline(report.scores) in page.text and page.text.count("prompt <") >= 40


def test_a_score_that_falls_is_a_gain_where_lower_is_better(report: Report) -> None:
    """CLIPScore falls on every prompt."""
    base = replace(scores(1, 0.0), lower_is_better=["CLIPScore"])
    trained = replace(
        base,
        scores=base.scores
        | {"CLIPScore": [value - 5 for value in base.scores["CLIPScore"]]},
    )
    tests = paired_tests(base, trained)
    page = to_html(replace(report, base=base, trained=trained, scores=tests, videos={}))
    assert '<td class="gain">-5 ' in page and "CLIPScore ↓" in page
    assert "CLIPScore ↓" in format_comparison(tests)


@pytest.mark.parametrize(("count", "enough"), [(9, False), (10, True)])
def test_few_prompts_set_nothing_off(report: Report, count: int, enough: bool) -> None:
    """Prompts that all improve leave out zero in every resample."""
    base = scores(1, 0.0, count)
    trained = scores(1, 1.0, count)
    few = replace(
        report,
        scores=paired_tests(base, trained),
        base=base,
        trained=trained,
        videos={},
    )
    assert few.scores[REWARD].low > 0
    assert ('<td class="gain"' in to_html(few)) is enough
    assert ("too few prompts to tell" in headline(few.scores)) is not enough


def test_the_numbers_are_complete_and_on_the_scales_of_the_paper(
    report: Report,
) -> None:
    tree = json.loads(json.dumps(to_json(report)))
    first = tree["per_prompt"][0]
    assert (
        len(tree["per_prompt"]) == 40
        and first["trained"]["Reward"] == report.trained.reward[0]
    )
    assert set(first["base"]) == {"Reward", "VQ", "CLIPScore"} == set(tree["scores"])
    scales = report.scales
    assert {"VQ", "MQ", "TA", "CLIPScore", "PickScore"} == set(scales)
    assert scales["PickScore"].factor * 19.23 == pytest.approx(0.7397, abs=1e-3)
    assert (
        f"{0.025 * report.scores['CLIPScore'].after:.4g}" in Page(to_html(report)).text
    )
    document = (ROOT / "docs/rewards.md").read_text("utf-8")
    for name, scale in scales.items():
        assert (
            f"`{name}`" in document
            and scale.here in document
            and scale.published in document
        ), name


# --------------------------------------------------------------------------------------
# the command


DECIDES = {
    "noises": "--evaluation.noises=2",
    "reward": "--reward.options={toy: {}}",
    "weights of the reward": "--reward.weights={VQ: 1.0}",
    "rewards": "--reward.rewards=[sharp]",
    "number of prompts": "--evaluation.num_prompts=3",
    "prompts": "--evaluation.prompts=configs/prompts/words_eval.csv",
    "noise_seed": "--evaluation.seed=3",
    "num_steps": "--evaluation.num_steps=3",
    "solver": "--evaluation.solver=unipc",
    "video": "--evaluation.height=24",
    "shift": "--rollout.shift=4",
    "guidance_scale": "--rollout.guidance_scale=1.5",
    "negative_prompt": "--rollout.negative_prompt=a red circle",
    "dtype": "--model.dtype=bfloat16",
    "vae_dtype": "--model.vae_dtype=bfloat16",
}
"""Settings that scores depend on, and a word that changes each."""


@pytest.mark.usefixtures("in_the_repository")
def test_scores_of_other_settings_are_not_used(
    finished_run: Path, tmp_path: Path
) -> None:
    adapter = finished_run / "checkpoints/update-000002/lora"

    def settings(*words: str, trained: Path = adapter) -> list[str]:
        config = load_config(finished_run / "config.yaml", words)
        prompts = load_eval_prompts(config)
        paired = PairedEvaluation(
            config=config,
            prompts=prompts,
            folder=tmp_path,
            trained=trained,
            weights={},
            overwrite=False,
        )
        return [json.dumps(paired._settings(model)) for model in ("base", "trained")]

    base, trained = settings()
    assert settings() == [base, trained] and base != trained
    found = {what: settings(word) for what, word in DECIDES.items()}
    assert {
        what for what, both in found.items() if both[0] == base or both[1] == trained
    } == set()
    assert len({one for both in found.values() for one in both}) == 2 * len(DECIDES)
    # Other weights are those of one of the models.
    others = [
        settings(trained=adapter.parents[1] / "update-000001/lora"),
        settings(f"--model.adapter={adapter}"),
    ]
    assert [[one == base, other == trained] for one, other in others] == [
        [True, False],
        [False, True],
    ]


def test_a_reward_draws_by_the_seed_of_the_evaluation(
    finished_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seeds = []

    def stop(**options: Any) -> None:
        seeds.append(options["seed"])
        raise KeyboardInterrupt

    monkeypatch.setattr("sage_fast.tools.paired.VideoScoring", stop)
    for seed in (3, 4):
        words = [f"--evaluation.seed={seed}", "--output_dir", str(tmp_path / str(seed))]
        assert main(["evaluate", str(finished_run), *words]) == 130
    assert seeds == [(3, -1), (4, -1)]


def test_evaluate_writes_everything_and_does_not_repeat_itself(
    finished_run: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    output = tmp_path / "scores"
    command = [
        "evaluate",
        str(finished_run),
        "--output_dir",
        str(output),
        "--num-videos",
        "2",
        "--resamples",
        "200",
    ]
    assert main(command) == 0
    names = {
        "after.json",
        "base",
        "before.json",
        "contact_sheet.png",
        "evaluation.html",
        "evaluation.json",
        "trained",
    }
    assert {p.name for p in output.iterdir()} == names
    assert (
        len(list((output / "base").glob("*.mp4")))
        == len(list((output / "trained").glob("*.mp4")))
        == 4
    )
    printed = capsys.readouterr().out
    assert (
        "4 prompts, same noise" in printed
        and "Overall" in printed
        and "in s.e." in printed
    )
    tree = json.loads((output / "evaluation.json").read_text())
    assert tree["resamples"] == 200 and tree["settings"]["trained"].endswith(
        "update-000002"
    )
    reward = json.loads((output / "after.json").read_text())["reward"]
    assert tree["scores"]["Reward"]["after"] == pytest.approx(sum(reward) / 4)

    # Again: nothing is loaded, and the sheet of more videos comes from the files.
    def refuse(*_: object) -> None:
        raise AssertionError("the model was loaded again")

    settings = (output / "base/settings.json").read_text()
    adapter = [
        "--lora",
        str(finished_run / "checkpoints/update-000002/lora"),
        "--model.vae_dtype=bfloat16",
    ]
    with monkeypatch.context() as patch:
        patch.setattr("sage_fast.tools.paired.load_generator", refuse)
        assert main([*command, "--num-videos", "4"]) == 0
        # What changes the scores is evaluated again.
        for other in (
            ["--evaluation.num_steps=3"],
            ["--evaluation.height=24"],
            adapter,
        ):
            (output / "base/settings.json").write_text(settings)
            with pytest.raises(AssertionError, match="loaded again"):
                main([*command, *other])
    assert not (output / "base/settings.json").exists(), (
        "half of an evaluation must not pass for one"
    )
    assert main(command) == 0


@pytest.mark.usefixtures("nothing_drawn")
def test_evaluate_takes_more_rewards_an_exported_adapter_and_a_size_of_its_own(
    finished_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "scores"
    adapter = finished_run / "checkpoints/update-000002/lora"
    (tmp_path / "brightness_of_report.py").write_text(
        "class Brightness:\n"
        "    def __init__(self, fps, device):\n"
        "        assert (fps, device) == (4, 'cpu'), 'those of the run, as in its "
        "training'\n"
        "    def score(self, videos, prompts):\n"
        "        return {'brightness': videos.float().mean((1, 2, 3, 4))}\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    size = ["--evaluation.height=24", "--evaluation.width=32"]
    more = ["--lora", str(adapter), "--rewards", "brightness_of_report:Brightness"]
    assert (
        main(["evaluate", str(finished_run), "--output_dir", str(output), *size, *more])
        == 0
    )
    tree = json.loads((output / "evaluation.json").read_text())
    assert "brightness" in tree["scores"] and "brightness" not in tree["weights"]
    video = next((output / "trained").glob("*.mp4"))
    assert media_files.read_video(video).shape[-2:] == (6 * 24, 6 * 32), (
        "small videos are enlarged"
    )


@pytest.mark.usefixtures("nothing_drawn")
def test_before_is_the_model_that_the_run_started_from(
    finished_run: Path,
    tiny_run: Callable[..., RunConfig],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """To every digit; with `model.adapter`, whose scale is not the run's, it is not the
    model of `model.path`. After is the average that the run has kept.
    """
    adapter = shutil.copytree(
        finished_run / "checkpoints/update-000002/lora", tmp_path / "adapter"
    )
    file = adapter / ADAPTER_FILE
    save_file(
        {k: 50 * v + 0.03 * ("_B" in k) for k, v in load_file(file).items()},
        file,
        metadata=read_metadata(file),
    )
    config = tiny_run(
        f"--model.adapter={adapter}",
        "--lora.alpha=3",
        "--optimizer.learning_rate=0.05",
        "--training.ema_decay=0.5",
    )
    Run(config).train()
    before, after = (
        Evaluation.load(tmp_path / f"run/evaluation/update-00000{n}.json")
        for n in (0, 2)
    )
    report = evaluate(config, tmp_path / "scores", resamples=100, num_videos=0)
    assert (report.base, report.trained) == (before, after) and before != after
    alone = replace(config, model=replace(config.model, adapter=None))
    assert (
        evaluate(alone, tmp_path / "alone", resamples=100, num_videos=0).base.reward
        != before.reward
    )
    # `--lora` replaces the run's adapter, and `none` leaves it.
    lora = tmp_path / "run/checkpoints/update-000002/lora"
    again = evaluate(
        config, tmp_path / "scores", lora=lora, resamples=100, num_videos=0
    )
    assert again.base == before and again.trained.reward == pytest.approx(
        after.reward, abs=1e-5
    )
    generate(config, "a red circle", tmp_path / "videos", checkpoint="none")
    digest = weights_digest(adapter)[:12]
    assert f"adapter ({digest})" in (tmp_path / "videos/generation.json").read_text()
    (tmp_path / "a.pt").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"--lora: .*'\.pt'"):
        evaluate(config, tmp_path / "unread", lora=tmp_path / "a.pt")
    assert not (tmp_path / "unread").exists()
    # Another adapter at the same path is another model.
    save_file(load_file(lora / ADAPTER_FILE), file, metadata=read_metadata(file))
    caplog.clear()
    assert (
        evaluate(config, tmp_path / "scores", resamples=100, num_videos=0).base.reward
        != before.reward
    )
    with pytest.raises(ConfigError, match=r"is in the way.*weights"):
        generate(config, "a red circle", tmp_path / "videos", checkpoint="none")
    shutil.rmtree(adapter)
    with pytest.raises(ConfigError, match=r"model\.adapter: There is no adapter"):
        evaluate(config, tmp_path / "scores")
    # which holds what became of it
    generate(config, "a red circle", tmp_path / "by_checkpoint")
    (check,) = [check for check in examine_deeply(config) if check.status == "failed"]
    assert check.name == "model" and "There is no adapter" in check.detail


def read_metadata(file: Path) -> dict[str, str]:
    with safe_open(file, "pt") as opened:
        return dict(opened.metadata())


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
def test_a_browser_shows_the_page_with_its_videos(
    report: Report, tmp_path: Path
) -> None:
    for path in (
        tmp_path / model / name
        for model in ("base", "trained")
        for name in report.videos.values()
    ):
        media_files.write_video(
            path, torch.randint(256, (5, 3, 16, 24), dtype=torch.uint8), 4
        )
    write_report(tmp_path, report)
    with Browser(tmp_path / "profile") as browser:
        for width in (1280, 400):
            browser.open(tmp_path / "evaluation.html", width=width)
            browser.wait_for(
                "[...document.querySelectorAll('video')].every(video => "
                "video.readyState >= 2)"
            )
            assert not wide_elements(browser) and not browser.complaints
