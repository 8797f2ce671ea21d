"""The page of a run: what is on it, how large it gets, and that a browser shows it as
it should.
"""

import html
import json
import logging
import math
import os
import re
import shlex
import shutil
import subprocess
from dataclasses import asdict
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

from sage_fast.config.load import load_config, save_config
from sage_fast.evaluation import Evaluation
from sage_fast.models.media_files import read_video, write_video
from sage_fast.run.directory import read_metrics
from sage_fast.run.page import run_page, write_run_page
from sage_fast.run.plots import Line, line_chart
from sage_fast.run.run_status import Status
from tests.browser import CHROMIUM, Browser, Page, wide_elements

PROMPTS = [
    "一只红色的圆圈向左移动",
    "a cat & a <b>dog</b> 🐱",
    *(f"prompt number {i}" for i in range(58)),
]


def write_rows(run: Path, rows: list[dict[str, Any]]) -> None:
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def long_run(finished_run: Path, tmp_path: Path) -> Path:
    """A run of 200 updates, made up from the metrics and the videos of one of two."""
    run = tmp_path / "long run"
    shutil.copytree(finished_run, run)
    rows = read_metrics(run / "metrics.jsonl")
    last = rows[-1] | {
        "kl/grad_share": 0.1,
        "time/evaluation": 3.0,
        "time/iteration": 36.0,
    }
    varied = [
        {"update": u, "grad_norm": 0.1 + u / 1000, "ratio/mean": 1 + u / 1e6}
        for u in range(1, 201)
    ]
    write_rows(run, [rows[0], *(last | row for row in varied)])
    for update, gain in ((0, 0.0), (200, 0.5)):
        scores = [gain * (i % 7 - 2) for i in range(len(PROMPTS))]
        evaluation = Evaluation(
            prompts=PROMPTS,
            scores={"VQ": scores},
            reward=scores,
            lower_is_better=["VQ"],
        )
        evaluation.save(run / "evaluation" / f"update-{update:06d}.json")
    source = next((run / "samples" / "update-000000").glob("*.mp4"))
    video = read_video(source).repeat(4, 1, 1, 1)
    shutil.rmtree(run / "samples")
    write_video(run / "samples/update-000000/00-一只红色的圆圈.mp4", video, 8)
    for number in range(1, 12):
        shutil.copy(
            run / "samples/update-000000/00-一只红色的圆圈.mp4",
            run / f"samples/update-000000/{number:02d}-🐱.mp4",
        )
    for update in (100, 200):
        shutil.copytree(
            run / "samples/update-000000", run / f"samples/update-{update:06d}"
        )
    status = Status(update=200, num_updates=400, phase="rollout", videos_per_rollout=96)
    (run / "status.json").write_text(json.dumps(asdict(status)))
    write_run_page(run)
    return run


def test_a_run_writes_its_page(finished_run: Path) -> None:
    text = (finished_run / "index.html").read_text("utf-8")
    assert (
        "Finished after 2 updates" in text
        and "data-refresh" not in text.partition("<script>")[0]
    )
    found = Page(text)
    assert sum(source.endswith(".mp4") for source in found.fetched) == 4
    assert all((finished_run / unquote(source)).exists() for source in found.fetched)


def test_the_page_holds_what_a_run_is_watched_for(long_run: Path) -> None:
    text = (long_run / "index.html").read_text("utf-8")
    found = Page(text)
    assert all((long_run / unquote(source)).exists() for source in found.fetched)
    shown = re.findall(r"<figcaption>([^<]+)</figcaption>", text)
    for title in (
        "reward",
        "VQ \N{DOWNWARDS ARROW}",
        "KL to the anchor",
        "KL's share of the gradient",
        "gradient norm",
    ):
        assert title.replace("'", "&#39;") in shown
    for title in ("probability ratio, mean", "videos an hour"):
        assert title in shown
    # The same in every update of this run, as in most.
    assert not {
        "groups without a signal",
        "learning rate",
        "probability ratio, extremes",
    } & set(shown)
    assert re.search(r">\d\.\d h</text>", text)  # 200 updates of 39 s
    assert "a cat &amp; a &lt;b&gt;dog&lt;/b&gt; 🐱" in text and "<b>dog" not in text
    gained, lost = found.text.partition("Prompts that gained most")[2].split(
        "Prompts that lost most"
    )
    assert (
        "+2\n" in gained
        and "-1\n" not in gained
        and "-1\n" in lost
        and "+2\n" not in lost
    )
    assert (
        f"train {shlex.quote(str(long_run))} --resume auto" in lost
        and "Configuration" in lost
    )
    assert 'data-refresh="60"' in text and 'data-updates="0 100 200"' in text
    gains, losses = (
        text.partition("<h2>Largest gains")[2]
        .partition("<h2>Prompts")[0]
        .split("<h2>Largest losses")
    )
    assert (
        gains.count("<video") == 8
        and 'class="gain">+2<' in gains
        and 'class="loss"' not in gains
    )
    assert 'class="loss">-1<' in losses and 'class="gain"' not in losses


def test_the_page_says_how_the_run_differs_from_the_nearest_preset(
    tmp_path: Path,
) -> None:
    save_config(
        load_config("toy_cpu", {"rollout.eta": 0.3, "output_dir": "x"}),
        tmp_path / "config.yaml",
    )
    rows = (
        Page(run_page(tmp_path))
        .text.partition("Differences to the preset toy_cpu")[2]
        .split("\n")
    )
    assert (
        "rollout.eta0.50.3" in rows and sum("rollout." in row for row in rows[:8]) == 1
    )


def test_the_page_says_whether_the_gradient_is_noise(tmp_path: Path) -> None:
    def said(*cosines: float) -> str:
        rows = [
            {"update": update, "grad/signal": value}
            for update, value in enumerate(cosines, 1)
        ]
        write_rows(tmp_path, [{"update": 0}, *rows, {"update": len(rows) + 1}])
        found = re.search("The gradient repeats.*", Page(run_page(tmp_path)).text)
        return found[0] if found else ""

    sure = said(9.0, *[0.04, 0.08] * 10)
    assert (
        "to the other: cosine 0.0600 ± 0.0046 (mean of 20 updates)." in sure
        and "noise" not in sure
    )
    assert "noise" in said(*[0.3, -0.25] * 5) and "noise" in said(*[0.008] * 10)
    assert "noise" not in said(*[0.3, -0.25] * 4) and said(0.1) == said() == ""


def test_a_chart_that_repeats_another_or_shows_what_does_nothing_is_left_out(
    long_run: Path,
) -> None:
    """The overall, a component that is the whole reward, the weight of a KL that is not
    there, a gain of two points.
    """
    rows = [
        {
            "update": u,
            "reward/mean": u,
            "reward/std": 9.0,
            "reward/mine_mean": u,
            "reward/VQ_mean": 2 * u,
        }
        | {
            "eval/reward_mean": u,
            "eval/mine_mean": u,
            "eval/overall_mean": u,
            "kl/weight": u / 10,
        }
        for u in range(3)
    ]

    def shown(rows: list[dict[str, Any]]) -> list[str]:
        write_rows(long_run, rows)
        return re.findall(r"<figcaption>([^<]+)</figcaption>\n<svg", run_page(long_run))

    assert shown(rows) == ["reward", "VQ"]
    gains = [
        row | {"eval/paired_gain": 0.1 * row["update"], "kl/position": 0.1}
        for row in rows
    ]
    found = shown(gains)
    assert (
        found[:2] == ["paired gain over update 0", "reward"]
        and "weight of the KL" in found
    )
    assert "paired gain over update 0" not in shown(gains[1:])
    assert "KL to the anchor" in found
    assert "KL to the anchor" not in shown(
        [row | {"kl/position": 0.0, "kl/velocity": 0.0} for row in rows]
    )


def test_the_page_begins_with_the_picture_and_ends_with_commands_that_work(
    finished_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (finished_run / "index.html").read_text("utf-8")
    headings = re.findall(r"<h2>([^<]+)</h2>", text)
    assert (
        headings[:2] == ["Before and after", "Gain and reward"]
        and headings[-1] == "What next"
    )
    monkeypatch.setattr(shutil, "which", lambda name: None)
    commands = html.unescape(
        re.search(r"<pre>(cd [^<]*)</pre>", run_page(finished_run))[1]
    ).splitlines()  # type: ignore
    assert [shlex.split(line)[6] for line in commands] == [
        "evaluate",
        "generate",
        "export",
    ]
    for line in commands:
        assert shlex.split(line)[7] == str(finished_run)
        assert (
            subprocess.run(
                f"{line} --help", shell=True, check=False, capture_output=True
            ).returncode
            == 0
        )


def test_the_page_of_a_long_run_is_small(long_run: Path) -> None:
    assert (long_run / "index.html").stat().st_size < 3e6 / 4
    line = Line(
        label="a",
        x=range(20_000),
        y=[math.sin(i) for i in range(20_000)],
        spread=[1.0] * 20_000,
    )
    assert len(line_chart([line])) < 60_000


def test_what_a_page_is_given_is_escaped(long_run: Path) -> None:
    status = Status(update=1, num_updates=2, state="failed", error="<t> & more")
    (long_run / "status.json").write_text(json.dumps(asdict(status)))
    (long_run / "config.yaml").write_text("<h>: 1\n")
    write_rows(long_run, [{"update": 0, "eval/<c>_mean": 0.5}])
    text = run_page(long_run)
    assert (
        Page(text).text.count("<c>") == 1
        and "&lt;t&gt; &amp; more" in text
        and "&lt;h&gt;" in text
    )
    assert not {"<t>", "<h>", "<c>"} & set(re.findall(r"<\w>", text))


def test_a_page_that_cannot_be_written_is_a_warning(
    long_run: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    before = (long_run / "index.html").read_bytes()
    monkeypatch.setattr(os, "replace", full)
    with caplog.at_level(logging.WARNING):
        write_run_page(long_run)
    assert "No space left on device" in caplog.text
    assert (long_run / "index.html").read_bytes() == before


SLIDE = """(() => {
    const range = document.querySelector('%s input');
    range.value = %s;
    range.dispatchEvent(new Event('input'));
})()"""


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
def test_a_browser_shows_the_page_and_plays_its_videos(
    long_run: Path, tmp_path: Path
) -> None:
    colours = set()
    with Browser(tmp_path / "profile") as browser:
        for width, dark in ((1280, False), (400, False), (400, True)):
            browser.open(long_run / "index.html", width=width, dark=dark)
            browser.wait_for(
                "[...document.querySelectorAll('video')].every(video => "
                "video.readyState >= 2)"
            )
            assert not wide_elements(browser)
            colours.add(
                browser.evaluate("getComputedStyle(document.body).backgroundColor")
            )
        assert colours == {"rgb(255, 255, 255)", "rgb(20, 24, 29)"}
        browser.evaluate("document.querySelector('.pair button').click()")
        times = (
            "[...document.querySelector('.pair').querySelectorAll('video')].map(video "
            "=> video.currentTime)"
        )
        browser.wait_for(f"{times}.every(time => time > 0.3)")
        browser.evaluate(SLIDE % (".pair", 0.5))
        browser.wait_for(f"{times}.every(time => time === 1)")  # of 2 s
        browser.evaluate(SLIDE % (".updates", 1))
        sources = (
            "[...document.querySelectorAll('.pair .video:last-child "
            "video')].map(video => video.src)"
        )
        browser.wait_for(f"{sources}.every(source => source.includes('update-000100'))")
        browser.wait_for(
            "[...document.querySelectorAll('video')].every(video => video.readyState "
            ">= 2)"
        )
        assert not browser.complaints
