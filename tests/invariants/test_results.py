"""Tables and figures of the documents are those of the committed results."""

import json
from itertools import groupby
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pytest
from PIL import Image

from benchmarks import report
from docs.tools import rows as picture_rows
from sage_fast.config.sections import ObjectiveConfig
from sage_kernels.registry import OPS
from tests.test_sde import dispersion_rows, leftover_rows

ROOT = Path(__file__).resolve().parents[2]


def committed(name: str) -> list[dict[str, Any]]:
    """Rows of a file of docs/results."""
    text = (ROOT / f"docs/results/{name}.jsonl").read_text("utf-8")
    return [json.loads(line) for line in text.splitlines()]


def page(name: str) -> str:
    """A document, in which a line break is a space."""
    return " ".join((ROOT / name).read_text("utf-8").split())


def demo_cells(name: str, row: dict[str, Any]) -> str:
    """A row of the demo's tables."""
    reward = row["reward"]
    aligned = row["aligned"]
    distance = row["manifold_distance"]
    return (
        f"| {name} | {100 * aligned['before']:.0f} → {100 * aligned['after']:.0f} % "
        f"| {reward['before']:.3f} → {reward['after']:.3f} "
        f"| {reward['mean']:+.3f} ± {reward['stderr']:.3f} "
        f"| {distance['before']:.4f} → {distance['after']:.4f} |"
    )


def gains_nothing(gains: list[float]) -> bool:
    """Two standard errors over seeds: a training by noise moves at random too, which
    the standard error of a run, over captions and noises, does not count.
    """
    return abs(fmean(gains)) < 2 * stdev(gains) / len(gains) ** 0.5


def test_the_readme_shows_the_demos_results() -> None:
    shown = page("README.md")
    assert "20 updates of 128 videos: 60 held-out captions, 16 noises each" in shown
    for row in committed("demo"):
        assert (row["updates"], row["prompts"], row["noises"]) == (20, 60, 16)
        assert demo_cells(row["seed"], row) in shown
        # A large gain that is not bought with the pictures.
        distance = row["manifold_distance"]
        assert row["aligned"]["mean"] > 0.25
        assert distance["after"] < 1.1 * distance["before"]


def test_the_readmes_picture_is_two_rows_of_the_whole_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`python -m docs.tools.rows` mends this one."""
    name = "demo_before_after.png"
    (tmp_path / name).symlink_to(picture_rows.IMAGES / name)
    shown = Image.open(picture_rows.IMAGES / "demo_rows.png").tobytes()
    with Image.open(tmp_path / name) as whole:
        assert len(picture_rows.rows_of(whole)) == 10
    monkeypatch.setattr(picture_rows, "IMAGES", tmp_path)
    assert picture_rows.main([]) == 0
    assert Image.open(tmp_path / "demo_rows.png").tobytes() == shown


def test_the_demo_page_shows_its_controls() -> None:
    """Guidance alone is worth less than the training."""
    shown = page("docs/tutorials/demo.md")
    least = min(row["reward"]["mean"] for row in committed("demo"))
    rows = committed("demo_controls")
    for row in rows:
        assert (row["prompts"], row["noises"]) == (60, 16)
        assert demo_cells(row["control"], row) in shown
        assert 3 * abs(row["reward"]["mean"]) < least
    shuffled = [r["reward"]["mean"] for r in rows if "shuffled" in r["control"]]
    assert gains_nothing(shuffled)


def mean_and_error(tests: list[dict[str, float]]) -> tuple[float, float]:
    """Of the gains of several seeds. Words and noises are those of every seed, so their
    error does not shrink.
    """
    gains = [test["mean"] for test in tests]
    variance = fmean(test["stderr"] ** 2 for test in tests)
    if len(gains) > 1:
        variance += stdev(gains) ** 2 / len(gains)
    return fmean(gains), variance**0.5


def test_the_page_of_words_shows_its_results() -> None:
    shown = page("docs/words.md")
    judged: dict[tuple[str, float, int], list[float]] = {}
    for key, group in groupby(
        committed("words"), key=lambda r: (r["arm"], r["rate"], r["updates"])
    ):
        _, rate, updates = key
        seeds = list(group)
        assert {(r["prompts"], r["noises"]) for r in seeds} == {(48, 16)}
        read = 100 * fmean(r["OCR_right"]["after"] for r in seeds)
        right = 100 * fmean(r["judge_right"]["after"] for r in seeds)
        gain, error = mean_and_error([r["judge_right"] for r in seeds])
        reward, of_reward = mean_and_error([r["OCR"] for r in seeds])
        judged[key] = [100 * r["judge_right"]["mean"] for r in seeds]
        each = ", ".join(f"{points:+.0f}" for points in judged[key])
        each = f"{each}: " if len(seeds) > 1 else ""
        start = f"| {updates} | {rate:g} |" if updates else "| 0 | |"
        cells = (
            f"{start} {read:.0f} % | {right:.0f} % "
            f"| {each}{100 * gain:+.0f} ± {100 * error:.0f} "
            f"| {reward:+.3f} ± {of_reward:.3f} |"
        )
        assert cells in shown, cells
    best = judged["forward_process", 0.03, 20]
    path = judged["path_two_levels", 0.03, 31]
    tuned = judged["best_of_group", 0.01, 42]
    control = judged["shuffled", 0.03, 20]
    assert {len(best), len(path), len(tuned), len(control)} == {3}
    readme = page("README.md")
    assert f"reads {fmean(best):.0f} points more" in readme
    assert f"at the same cost {fmean(tuned):.0f}." in readme
    own = f"and {fmean(path):.0f} more after SAGE-GRPO at its sampler's own states"
    assert own in readme
    assert gains_nothing(control)


def test_the_page_of_a_faster_update_has_its_results() -> None:
    shown = page("docs/how_to/faster.md")
    toy = committed("reproduction")
    for label, words, rate, updates, arm in (
        (
            "forward process, 8 Euler steps",
            "forward_process",
            0.03,
            20,
            "forward_process",
        ),
        ("6 Euler steps", "six_steps", 0.03, 21, "forward-6-steps"),
        ("6 of second order", "six_of_order_2", 0.03, 21, "forward-6-of-order-2"),
        ("SAGE-GRPO, noise in all 8 steps", "single_pass", 0.01, 20, "two_phase"),
        ("noise in the first 4", "window", 0.01, 28, "window"),
        (
            "noise in 2 of the first 3 of 6, second order",
            *("window_of_order_2", 0.01, 39, "window-6-of-order-2"),
        ),
    ):
        gains = [
            100 * r["judge_right"]["mean"]
            for r in committed("words")
            if (r["arm"], r["rate"], r["updates"]) == (words, rate, updates)
        ]
        assert len(gains) == 3
        after = {
            quantity: [
                r["value"]
                for r in toy
                if (r["experiment"], r["quantity"]) == ("updates", quantity)
                and r["arm"] in (arm, f"updates-{arm}")
            ]
            for quantity in ("final_reward", "final_aligned")
        }
        rewards, aligned = after.values()
        seeds = {3: "", 6: " (six seeds)"}[len(rewards)]
        cells = (
            f"| {label} | {fmean(gains):+.0f} | {fmean(rewards):.3f}{seeds} "
            f"| {fmean(aligned):.3f} |"
        )
        assert cells in shown, cells


def test_the_page_of_words_has_the_signal_of_each_gradient() -> None:
    shown = page("docs/words.md")
    for row in committed("signal"):
        signals = row["signals"]
        error = stdev(signals) / len(signals) ** 0.5
        assert f"{fmean(signals):.3f} ± {error:.3f}" in shown


def test_the_page_of_wan_has_the_toys_reward_by_solver() -> None:
    rows = [row for row in committed("solvers") if row["solver"] == "unipc"]
    assert [row["num_steps"] for row in rows] == [4, 8, 16]
    assert {(row["prompts"], row["noises"]) for row in rows} == {(60, 4)}
    gains = [f"{row['gain']:+.3f} ± {row['stderr']:.3f}" for row in rows]
    shown = page("docs/wan.md")
    assert all(gain in shown for gain in gains)


def test_the_page_of_objectives_says_what_the_path_loses() -> None:
    *path, noised = committed("path_toy")
    shown = page("docs/objectives.md")

    def between(name: str, digits: int) -> str:
        values = [row[name]["after"] for row in path]
        return f"{min(values):.{digits}f} to {max(values):.{digits}f}"

    gained = f"aligned {between('aligned', 2)}, but a reward of {between('reward', 2)}"
    assert gained in shown
    assert f"a distance of {between('manifold_distance', 3)}" in shown
    reward = noised["reward"]["after"]
    aligned = noised["aligned"]["after"]
    distance = noised["manifold_distance"]["after"]
    assert f"have {reward:.2f}, {aligned:.2f} and {distance:.3f}" in shown


def of_seeds(values: list[float], digits: int = 3) -> str:
    """Mean and standard error."""
    error = stdev(values) / len(values) ** 0.5
    return f"{fmean(values):.{digits}f} ± {error:.{digits}f}"


def test_the_page_of_inexact_rollouts_shows_its_results() -> None:
    shown = page("docs/inexact_rollouts.md")
    found: dict[str, list[dict[str, Any]]] = {}
    for row in committed("inexact"):
        found.setdefault(row["sampler"], []).append(row)
    *others, control = found
    ways = ("correction", "unclipped", "straight_through")
    for name in others:
        rows = found[name]
        assert (len(rows), {r["videos"] for r in rows}) == (8, {32})
        mean = {
            key: [fmean(values) for values in zip(*(r[key] for r in rows), strict=True)]
            for key in rows[0]
            if isinstance(rows[0][key], list)
        }
        error = [100 * share for share in mean["velocity_error"]]
        square = mean["mean_square"][-1]
        stopped = [mean[f"clipped_{sign}"][-1] for sign in ("negative", "positive")]
        cells = [
            name,
            f"{min(error):.1f} to {max(error):.1f} %",
            f"{mean['log_ratio'][-1]:.2g} ({-square / 2:.2g})",
            " and ".join(f"{100 * share:.0f} %" for share in stopped),
            *(of_seeds([r["cosine"][way] for r in rows]) for way in ways),
        ]
        assert f"| {' | '.join(cells)} |" in shown, cells
    other = of_seeds([row["cosine"]["correction"] for row in found[control]])
    assert f"by different noise have a cosine of {other}" in shown
    clip = ObjectiveConfig.clip_range
    assert f"at ratios below {1 - clip:.4f}" in shown
    assert f"one above {1 + clip:.4f}" in shown
    # where mean(s^2) / 2 is the clip, and where it is two standard deviations
    bound = f"{(2 * clip) ** 0.5:.3f}"
    assert f"on average from rms(s) = {bound} on" in shown
    assert f"it must stay below {bound}" in shown
    lost = 1 - fmean(row["cosine"]["correction"] for row in found["bfloat16"])
    assert f"costs a clipped correction {lost:.2f} of the cosine" in shown


def test_the_tables_of_benchmarks_are_what_the_report_writes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`python -m benchmarks report --write` mends this one."""
    texts = {name: (ROOT / name).read_text("utf-8") for name in report.DOCUMENTS}
    # Two are planned, by tests/config/test_presets.py.
    for name, place in (
        ("presets", "docs/how_to/which_card.md"),
        ("cards", "README.md"),
    ):
        begin = f"<!-- benchmark {name}: begin -->\n"
        there = (ROOT / place).read_text("utf-8").split(begin)[1].split("<!--")[0]
        monkeypatch.setitem(report.BLOCKS, name, lambda found, there=there: there)
    found = report.read_results(report.committed_files())
    for name, text in texts.items():
        assert report.document(text, found) == text, name
    for name in report.BLOCKS:
        assert f"<!-- benchmark {name}: begin -->" in "".join(texts.values())


def test_the_page_of_the_kernels_names_the_one_without_a_time() -> None:
    table = (ROOT / "benchmarks/README.md").read_text("utf-8")
    table = table.split("<!-- benchmark kernels: begin -->")[1].split("<!--")[0]
    untimed = [f"`{name}`" for name in OPS if f"| {name} " not in table]
    assert f"timed all but {', '.join(untimed)} (bench" in page("kernels/README.md")


def test_the_tables_of_the_algorithm_are_what_the_code_gives() -> None:
    document = (ROOT / "docs/algorithm.md").read_text("utf-8")
    for rows in (leftover_rows(), dispersion_rows(0.1)):
        assert "\n".join(rows) in document
