"""The evaluation report: its numbers by hand, its page well formed and complete in itself, and what a repeat keeps."""

import io
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image

from sage_fast.commands.cli import main
from sage_fast.config.load import dump_config
from sage_fast.config.registry import REWARDS
from sage_fast.config.schema import RunConfig
from sage_fast.evaluation import OVERALL, REWARD, Evaluation, format_comparison, paired_test, paired_tests
from sage_fast.models import video_files
from sage_fast.rewards.base import reward_scales
from sage_fast.tools.report import (
    Report,
    ShownVideo,
    headline,
    spread_over_ranks,
    to_json,
    to_text,
    write_report,
)
from tests.browser import CHROMIUM, Browser, Page, wide_elements

MakeRun = Callable[..., RunConfig]

ROOT = Path(__file__).resolve().parents[2]


def scores(seed: int, shift: float, count: int = 40) -> Evaluation:
    generator = torch.Generator().manual_seed(0)
    common = torch.randn(count, generator=generator, dtype=torch.float64)
    own = 0.3 * torch.randn(count, 2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    vq, clip = common + own[:, 0] + shift, 25 + own[:, 1] - own[:, 1].mean()
    prompts = [f"prompt <{i}> & more" for i in range(count)]
    return Evaluation(prompts=prompts, scores={"CLIPScore": clip.tolist(), "VQ": vq.tolist()}, reward=(2 * vq).tolist())


# ------------------------------------------------------------------------------------------ numbers


def test_a_comparison_by_hand() -> None:
    base = Evaluation(prompts=["a", "b", "c", "d"], scores={"VQ": [0.0, 1.0, 2.0, 3.0]}, reward=[0.0, 1.0, 2.0, 3.0])
    trained = Evaluation(prompts=base.prompts, scores={"VQ": [1.0, 3.0, 2.0, 2.0]}, reward=[1.0, 3.0, 2.0, 2.0])
    tests = paired_tests(base, trained)
    assert list(tests) == ["Reward", "VQ"] and tests["Reward"] == tests["VQ"]
    vq = tests["VQ"]
    assert (vq.before, vq.after, vq.mean, vq.count, vq.wins, vq.ties) == (1.5, 2.0, 0.5, 4, 0.5, 0.25)
    assert vq.stderr == pytest.approx(torch.tensor([1.0, 2.0, 0.0, -1.0]).std().item() / 2)
    assert vq.before_stderr == pytest.approx(torch.tensor(base.reward).std().item() / 2)
    assert -1.0 <= vq.low < 0.5 < vq.high <= 2.0 and not vq.significant


def test_the_interval_is_the_normal_one_where_that_holds() -> None:
    """With many prompts the bootstrap's interval is mean +- 1.96 standard errors of the pairs."""
    test = paired_tests(scores(1, 0.0, 400), scores(2, 0.2, 400))[REWARD]
    assert (test.high - test.low) / (2 * 1.96 * test.stderr) == pytest.approx(1.0, abs=0.04)
    assert (test.high + test.low) / 2 == pytest.approx(test.mean, abs=0.1 * test.stderr)
    assert test.stderr < 0.6 * test.before_stderr


def test_the_interval_covers_the_truth_as_often_as_it_says() -> None:
    covered = 0
    for seed in range(200):
        noise = torch.randn(60, 2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        test = paired_test(noise[:, 0].tolist(), (noise[:, 1] + 0.3).tolist(), resamples=500)
        covered += test.low <= 0.3 <= test.high
    assert 0.90 <= covered / 200 <= 0.985


def test_the_same_seed_gives_the_same_interval() -> None:
    first, again, other = (paired_tests(scores(1, 0.0), scores(2, 0.2), seed=seed) for seed in (5, 5, 6))
    assert first == again and other[REWARD].low != first[REWARD].low


def test_the_overall_of_papers_stands_beside_the_trained_reward() -> None:
    """Table 2's row of the paper: -0.4765 - 0.2384 + 1.5216 = 0.8067, also where Setting B was trained."""
    row = {"TA": 1.5216, "VQ": -0.4765, "MQ": -0.2384}
    weights = {"VQ": 0.5, "MQ": 0.5, "TA": 1.0}
    reward = sum(weights[name] * value for name, value in row.items())
    trained = Evaluation(prompts=["a", "b"], scores={n: [v, v] for n, v in row.items()}, reward=[reward] * 2)
    tests = paired_tests(trained, trained, weights=weights)
    assert list(tests) == ["Reward", OVERALL, "VQ", "MQ", "TA"] and OVERALL == "Overall (VQ + MQ + TA)"
    assert tests[OVERALL].after == pytest.approx(0.8067) and tests[REWARD].after == pytest.approx(1.16415)
    assert OVERALL in format_comparison(tests)


@pytest.mark.parametrize(
    ("differences", "count", "expected"),
    [([0.0, 3.0, 1.0], 2, [1, 0]), ([0.0, 3.0, 1.0], 9, [1, 2, 0]), ([1.0, 2.0], 1, [1]), ([1.0], 0, [])],
    ids=["ends", "all", "one", "none"],
)
def test_videos_shown_reach_from_the_largest_gain_to_the_largest_loss(
    differences: list[float], count: int, expected: list[int]
) -> None:
    assert spread_over_ranks(differences, count) == expected


# ------------------------------------------------------------------------------------------ files


@pytest.fixture
def report(tmp_path: Path) -> Report:
    base, trained = scores(1, 0.0), scores(2, 0.5)
    generator = torch.Generator().manual_seed(0)
    videos = []
    for i in range(2):
        paths = [tmp_path / f"{model}/{i}.mp4" for model in ("base", "trained")]
        for path in paths:
            video_files.write_video(path, torch.randint(256, (5, 3, 16, 24), generator=generator, dtype=torch.uint8), 4)
        videos.append(ShownVideo(prompt=base.prompts[i], base=paths[0], trained=paths[1], difference=0.5 - i))
    return Report(
        scores=paired_tests(base, trained, weights={"VQ": 2.0}),
        base=base,
        trained=trained,
        weights={"VQ": 2.0},
        resamples=10_000,
        seed=0,
        settings={"path": "a <b>"},
        videos=videos,
    )


def test_the_page_is_well_formed_and_needs_nothing_but_its_videos(report: Report) -> None:
    text = to_text("evaluation.html", report)
    page = Page(text)
    assert page.fetched == ["base/0.mp4", "trained/0.mp4", "base/1.mp4", "trained/1.mp4"]
    assert not [word for word in ("@import", "fetch(", "XMLHttpRequest", "https:") if word in text]
    assert len(page.images) == 4
    for data in page.images:
        picture = Image.open(io.BytesIO(data))
        picture.load()
        assert picture.width > 3 * picture.height
    assert "prefers-color-scheme: dark" in text
    for name in ("Reward", "VQ", "CLIPScore", "win rate", "10,000 resamples", "prompt <0> & more", "Settings"):
        assert name in page.text, name
    assert headline(report) in page.text
    assert page.text.count("prompt <") >= 40, "every prompt has its line"


@pytest.mark.parametrize("lower", [False, True], ids=["higher", "lower"])
def test_a_score_that_falls_is_a_gain_where_lower_is_better(report: Report, lower: bool) -> None:
    """CLIPScore falls on every prompt: tables, chart and win rate say what that means."""
    base = replace(scores(1, 0.0), lower_is_better=["CLIPScore"] if lower else [])
    trained = replace(base, scores=base.scores | {"CLIPScore": [value - 5 for value in base.scores["CLIPScore"]]})
    tests = paired_tests(base, trained)
    clip = tests["CLIPScore"]
    assert clip.significant and clip.mean == pytest.approx(-5)
    assert (clip.wins, clip.ties, clip.lower_is_better) == (float(lower), 0.0, lower)

    fallen = replace(report, base=base, trained=trained, scores=tests, videos=[])
    label, wins, way = ("CLIPScore ↓", "100%", "gain") if lower else ("CLIPScore", "0%", "loss")
    row = next(line for line in to_text("evaluation.md", fallen).splitlines() if line.startswith("| CLIPScore"))
    cells = [cell.strip() for cell in row.split("|")]
    assert cells[1] == label and cells[4].startswith("**-5 ") and cells[6] == wins
    page = to_text("evaluation.html", fallen)
    assert f'<td class="{way}">-5 ' in page and f"stroke: var(--{way})" in page and f">{label}</text>" in page
    assert ("arrow down" in page) is lower
    line = format_comparison(tests).splitlines()[2]
    assert line.startswith(label) and line.endswith(f" {wins}")
    assert to_json(fallen)["scores"]["CLIPScore"]["lower_is_better"] is lower


def test_the_markdown_is_a_table_with_clear_differences_in_bold(report: Report) -> None:
    lines = to_text("evaluation.md", report).splitlines()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("|")]
    assert {len(row) for row in rows} == {7}
    assert [row[0] for row in rows] == ["score", "---", "Reward", "VQ", "CLIPScore"]
    assert [row[3].startswith("**+") for row in rows[2:]] == [True, True, False]
    assert any("Reward = 2 VQ" in line for line in lines)


@pytest.mark.parametrize(("count", "enough"), [(2, False), (9, False), (10, True)])
def test_few_prompts_set_nothing_off(report: Report, count: int, enough: bool) -> None:
    """Two prompts that both improve leave out zero in every resample."""
    base, trained = scores(1, 0.0, count), scores(1, 1.0, count)
    few = replace(report, scores=paired_tests(base, trained), base=base, trained=trained, videos=[])
    assert few.scores[REWARD].low > 0
    markdown, page = to_text("evaluation.md", few), to_text("evaluation.html", few)
    assert ("**+" in markdown) is ('<td class="gain"' in page) is ("stroke: var(--gain)" in page) is enough
    assert ("fewer than 10 prompts is not to be relied on" in markdown) is not enough
    assert ("too few prompts to tell" in headline(few)) is not enough


def test_the_json_holds_every_number(report: Report) -> None:
    tree = json.loads(json.dumps(to_json(report)))
    assert tree["prompts"] == 40 == len(tree["per_prompt"])
    first = tree["per_prompt"][0]
    assert first["trained"]["Reward"] == report.trained.reward[0]
    assert set(first["base"]) == {"Reward", "VQ", "CLIPScore"} == set(tree["scores"])
    assert tree["scores"]["Reward"]["low"] == report.scores[REWARD].low


def test_the_page_and_the_document_have_the_scales_of_the_paper(report: Report) -> None:
    scales = reward_scales(list(REWARDS))
    assert {"VQ", "MQ", "TA", "CLIPScore", "PickScore"} == set(scales)
    assert scales["PickScore"].factor * 19.23 == pytest.approx(0.7397, abs=1e-3)
    scaled = replace(report, scales=scales)
    for text in (Page(to_text("evaluation.html", scaled)).text, to_text("evaluation.md", scaled)):
        assert scales["CLIPScore"].published in text
        assert f"{0.025 * report.scores['CLIPScore'].after:.4g}" in text
    assert to_json(scaled)["scales"]["CLIPScore"]["factor"] == 0.025
    document = (ROOT / "docs/rewards.md").read_text("utf-8")
    for name, scale in scales.items():
        assert f"`{name}`" in document and scale.here in document and scale.published in document, name


def test_a_score_without_spread_and_a_report_without_videos(tmp_path: Path, report: Report) -> None:
    flat = Evaluation(prompts=["a", "b"], scores={"x": [1.0, 1.0]}, reward=[1.0, 1.0])
    same = replace(report, scores=paired_tests(flat, flat), base=flat, trained=flat, weights={"x": 1.0}, videos=[])
    paths = write_report(tmp_path, same)
    assert [p.name for p in paths] == ["evaluation.json", "evaluation.md", "evaluation.html"]
    assert "nan" not in paths[2].read_text().lower() and "stays" in headline(same)
    assert "| 0% | 100% |" in paths[1].read_text()


# ------------------------------------------------------------------------------------------ the command


@pytest.fixture
def run(finished_run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished_run, tmp_path / "run"))


def test_evaluate_writes_everything_and_does_not_repeat_itself(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    output = tmp_path / "scores"
    command = ["evaluate", str(run), "--output", str(output), "--num-videos", "2", "--resamples", "200"]
    assert main(command) == 0
    names = {p.name for p in output.iterdir()}
    assert names == {
        "after.json", "base", "before.json", "contact_sheet.png", "evaluation.html", "evaluation.json", "evaluation.md",
        "trained",
    }  # fmt: skip
    assert len(list((output / "base").glob("*.mp4"))) == len(list((output / "trained").glob("*.mp4"))) == 4
    printed = capsys.readouterr().out
    assert "4 prompts, same noise" in printed and "Overall" in printed and "in s.e." in printed
    tree = json.loads((output / "evaluation.json").read_text())
    assert tree["resamples"] == 200 and tree["settings"]["trained"].endswith("update-000002")
    reward = json.loads((output / "after.json").read_text())["reward"]
    assert tree["scores"]["Reward"]["after"] == pytest.approx(sum(reward) / 4)

    # Again, with another bootstrap: nothing is loaded, and the sheet of more videos comes from the files.
    def refuse(*_: object) -> None:
        raise AssertionError("the model was loaded again")

    settings = (output / "base/settings.json").read_text()
    with monkeypatch.context() as patch:
        patch.setattr("sage_fast.tools.paired.load_generator", refuse)
        with caplog.at_level("INFO"):
            assert main([*command, "--bootstrap-seed", "1", "--num-videos", "4"]) == 0
        assert caplog.text.count("same settings") == 2
        # What changes the scores is evaluated again.
        for other in ("--evaluation.num_steps=3", "--evaluation.height=24"):
            (output / "base/settings.json").write_text(settings)
            with pytest.raises(AssertionError, match="loaded again"):
                main([*command, other])
        adapter = ["--lora", str(run / "checkpoints/update-000002/lora")]
        (output / "base/settings.json").write_text(settings)
        with pytest.raises(AssertionError, match="loaded again"):
            main([*command, *adapter, "--model.vae_dtype=bfloat16"])
    assert not (output / "base/settings.json").exists(), "half of an evaluation must not pass for one"
    assert main(command) == 0


def test_evaluate_has_a_size_of_its_own(run: Path, tmp_path: Path) -> None:
    output = tmp_path / "scores"
    command = ["evaluate", str(run), "--output", str(output), "--num-videos", "0"]
    size = ["--evaluation.height=24", "--evaluation.width=32"]
    assert main([*command, *size]) == 0
    for video in (output / "trained").glob("*.mp4"):
        assert video_files.read_video(video).shape[-2:] == (6 * 24, 6 * 32), "small videos are enlarged"


def test_evaluate_takes_more_rewards_and_an_exported_adapter(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "scores"
    file = tmp_path / "brightness_of_report.py"
    file.write_text(
        "class Brightness:\n"
        "    def __init__(self, fps, device):\n"
        "        assert (fps, device) == (4, 'cpu'), 'those of the run, as in its training'\n"
        "    def score(self, videos, prompts):\n"
        "        return {'brightness': videos.float().mean((1, 2, 3, 4))}\n"
    )
    import sys

    sys.path.insert(0, str(tmp_path))
    try:
        adapter = run / "checkpoints/update-000002/lora"
        command = ["evaluate", str(run), "--lora", str(adapter), "--output", str(output), "--rewards",
                   "brightness_of_report:Brightness"]  # fmt: skip
        assert main(command) == 0
    finally:
        sys.path.remove(str(tmp_path))
        sys.modules.pop("brightness_of_report", None)
    tree = json.loads((output / "evaluation.json").read_text())
    assert "brightness" in tree["scores"] and "brightness" not in tree["weights"]
    # The adapter of the checkpoint is the checkpoint.
    assert main(["evaluate", str(run), "--output", str(tmp_path / "other")]) == 0
    by_checkpoint = json.loads((tmp_path / "other/after.json").read_text())["reward"]
    assert json.loads((output / "after.json").read_text())["reward"] == pytest.approx(by_checkpoint, abs=1e-6)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--checkpoint", "none"], "compares a trained model with the base model"),
        (["--num-videos", "-1"], "--num-videos is -1"),
        (["--resamples", "3"], "--resamples is 3"),
        (["--rewards", "beauty"], "beauty"),
        (["--lora", "/nowhere"], "/nowhere"),
        (["--prompts", "ONE"], "at least 2 prompts"),
    ],
    ids=["base", "videos", "resamples", "reward", "adapter", "one-prompt"],
)
def test_a_wrong_request_is_told(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], expected: str
) -> None:
    (tmp_path / "one.txt").write_text("a red circle moving left\n")
    arguments = [a.replace("ONE", str(tmp_path / "one.txt")) for a in arguments]
    assert main(["evaluate", str(run), "--output", str(tmp_path / "s"), *arguments]) == 2
    errors = capsys.readouterr().err
    assert expected in errors and "Traceback" not in errors


def test_a_config_without_a_run_says_what_to_give(
    tiny_run: MakeRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "new.yaml"
    file.write_text(dump_config(tiny_run()))
    assert main(["evaluate", str(file), "--output", str(tmp_path / "s")]) == 2
    assert "no complete checkpoint" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
def test_a_browser_shows_the_page_with_its_videos_or_without(report: Report, tmp_path: Path) -> None:
    write_report(tmp_path, report)
    alone = tmp_path / "passed on" / "evaluation.html"
    alone.parent.mkdir()
    shutil.copy(tmp_path / "evaluation.html", alone)
    with Browser(tmp_path / "profile") as browser:
        for width in (1280, 400):
            browser.open(tmp_path / "evaluation.html", width=width)
            browser.wait_for("[...document.querySelectorAll('video')].every(video => video.readyState >= 2)")
            assert not wide_elements(browser) and not browser.complaints
        browser.open(alone, width=400)
        browser.wait_for("[...document.querySelectorAll('.videos')].every(part => !part.offsetParent)")
        assert browser.evaluate("[...document.querySelectorAll('.strip img')].every(image => image.offsetParent)")
