"""The page of a run, `index.html` in its directory: how it goes, in curves, videos and prompts.

It is made of the files of the directory alone, so it can be written again at any time, and holds everything but the
videos, which it links beside it. While the run goes on, a browser loads it anew every minute.
"""

import json
import logging
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path, PurePath
from typing import Any

from sage_fast.config.files import write_text
from sage_fast.evaluation import Evaluation, PairedTest, paired_test, scored_in_both
from sage_fast.run.media import Curve
from sage_fast.run.metrics import FILE_NAME as METRICS
from sage_fast.run.metrics import read_metrics
from sage_fast.run.pages import (
    Cell,
    Html,
    Series,
    charts,
    details,
    gain_class,
    gain_text,
    line_chart,
    number,
    page,
    prompt_text,
    table,
    video_pair,
)
from sage_fast.run.progress import format_seconds
from sage_fast.run.run_status import Status, read_status

FILE_NAME = "index.html"
REFRESH_SECONDS = 60
SHOWN_PROMPTS = 5
"""Prompts in each of the tables of gains and losses."""

MEASURED, TRAINED = 0, 1
"""Colours of what is evaluated and of the training batch."""

logger = logging.getLogger(__name__)

Rows = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Compared:
    """The last evaluation beside that of update 0, of the prompts that both have scored. test: of their rewards.

    Example: `Compared(update=40, before=Evaluation(...), after=Evaluation(...), test=PairedTest(...))`
    """

    update: int
    before: Evaluation
    after: Evaluation
    test: PairedTest

    def gains(self) -> list[tuple[float, int]]:
        """(gain in reward, row) of every prompt, the largest first."""
        pairs = enumerate(zip(self.before.reward, self.after.reward, strict=True))
        return sorted(((after - before, row) for row, (before, after) in pairs), reverse=True)


def write_run_page(directory: Path) -> None:
    """Write the page of the run in a directory. What keeps it from that is a warning: a run does not end for it."""
    try:
        text = run_page(directory)
        write_text(directory / FILE_NAME, text, lasting=False)
    except Exception as error:  # noqa: BLE001  it reads files that anybody may have changed
        logger.warning("%s is not up to date: %s", directory / FILE_NAME, error)


def run_page(directory: Path) -> str:
    """The page as HTML. ValueError, OSError where a file of the run cannot be read."""
    file = directory / METRICS
    rows = sorted(read_metrics(file), key=lambda row: row["update"]) if file.exists() else []
    status, _ = read_status(directory)
    compared = _compare(directory, rows)
    running = status is not None and status.state == "running"
    name = directory.resolve().name
    sections = [
        f"<h1>{escape(name)}</h1>",
        _state(status),
        _facts(rows, status, compared),
        _reward_charts(rows, set(compared.after.lower_is_better) if compared is not None else set()),
        _training_charts(rows),
        _speed_charts(rows, status),
        _samples(directory, compared),
        _prompts(compared),
        _how_to_go_on(directory, status),
        _made_with(directory),
    ]
    return page(f"{name}: a run of SAGE-Fast", sections, refresh_seconds=REFRESH_SECONDS if running else None)


def _compare(directory: Path, rows: Rows) -> Compared | None:
    """The last evaluation that can be read, with that of update 0; None where there are no two."""
    files = [directory / "evaluation" / f"update-{row['update']:06d}.json" for row in rows if "eval/reward_mean" in row]
    if not files or files[0].stem != "update-000000" or files[-1] == files[0]:
        return None
    try:
        before, after = scored_in_both(Evaluation.load(files[0]), Evaluation.load(files[-1]))
    except (OSError, ValueError) as error:
        logger.warning("The page of the run has no prompts: %s", error)
        return None
    update = int(files[-1].stem.removeprefix("update-"))
    return Compared(update=update, before=before, after=after, test=paired_test(before.reward, after.reward))


# ------------------------------------------------------------------------------------------------ at the top


def _state(status: Status | None) -> str:
    if status is None:
        return ""
    what = {
        "running": f"Running: update {status.update} of {status.num_updates}",
        "finished": f"Finished after {status.update} updates",
        "stopped": f"Stopped on request after update {status.update} of {status.num_updates}",
        "failed": f"Failed after update {status.update} of {status.num_updates}",
    }[status.state]
    left = f", {format_seconds(status.seconds_left)} left" if status.seconds_left else ""
    when = f'<time datetime="{escape(status.written)}">{escape(status.written)}</time>'
    error = f'<p class="loss">{escape(status.error)}</p>' if status.error else ""
    return f'<p>{escape(what + left)}. <span class="faint">Last sign {when}.</span></p>{error}'


def _facts(rows: Rows, status: Status | None, compared: Compared | None) -> str:
    """The few numbers that are looked at first."""
    facts: list[tuple[str, str]] = []
    if status is not None:
        facts.append(("update", f"{status.update} of {status.num_updates}"))
    if (reward := _last(rows, "eval/reward_mean")) is not None:
        facts.append(("reward, evaluation", number(reward)))
    if (reward := _last(rows, "reward/mean")) is not None:
        facts.append(("reward, training batch", number(reward)))
    if compared is not None:
        test = compared.test
        facts.append((f"gain at update {compared.update}", f"{test.mean:+.4f} ± {test.stderr:.4f}"))
        facts.append(("prompts that gained", f"{test.wins:.0%} of {test.count}"))
    if (seconds := _last(rows, "time/iteration")) and status is not None:
        facts.append(("videos an hour", number(3600 * status.videos_per_rollout / seconds)))
    if (share := _last(rows, "kl/grad_share")) is not None:
        facts.append(("KL's share of the gradient", f"{share:.1%}"))
    cells = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in facts)
    return f'<dl class="facts">{cells}</dl>' if cells else ""


def _last(rows: Rows, key: str) -> float | None:
    return next((float(row[key]) for row in reversed(rows) if row.get(key) is not None), None)


# ------------------------------------------------------------------------------------------------ curves


def _series(
    rows: Rows, key: str, label: str, *, spread: str = "", colour: int = MEASURED, dots: bool = False
) -> Series:
    """A metric over updates, with a band of plus and minus another one where that is logged."""
    curve = Curve.read(rows, key, spread)
    series = Series(label=label, x=curve.updates, y=curve.values, colour=colour, dots=dots)
    if not any(curve.spread):
        return series
    low, high = ([v + sign * w for v, w in zip(curve.values, curve.spread, strict=True)] for sign in (-1, 1))
    return replace(series, low=low, high=high)


def _score_series(rows: Rows, name: str) -> list[Series]:
    """A score in training and in evaluation, by the names that the metrics have."""
    middle, spread = ("", "") if name == "reward" else (f"{name}_mean", f"{name}_std")
    in_batch = (f"reward/{middle or 'mean'}", f"reward/{spread or 'std'}")
    return [
        _series(rows, in_batch[0], "training batch ± 1 std", spread=in_batch[1], colour=TRAINED),
        _series(
            rows,
            f"eval/{name}_mean",
            "evaluation ± 1 standard error",
            spread=f"eval/{name}_stderr",
            colour=MEASURED,
            dots=True,
        ),
    ]


def _reward_charts(rows: Rows, lower: set[str]) -> str:
    names = {key[5:-5] for row in rows for key in row if key.startswith("eval/") and key.endswith("_mean")}
    names |= {key[7:-5] for row in rows for key in row if key.startswith("reward/") and key.endswith("_mean")}
    parts = [line_chart("reward", _score_series(rows, "reward"), wide=True)]
    for name in sorted(names - {"reward"}):
        title = name.replace("_", " ") + (" (lower is better)" if name in lower else "")
        parts.append(line_chart(title, _score_series(rows, name)))
    gain = _series(rows, "eval/paired_gain", "gain ± 1 standard error", spread="eval/paired_gain_stderr", dots=True)
    parts.append(line_chart("paired gain over update 0", [gain], level=0.0))
    body = charts(parts)
    return f"<h2>Reward and its components</h2>{body}" if body else ""


def _training_charts(rows: Rows) -> str:
    def lines(*names: tuple[str, str]) -> list[Series]:
        return [_series(rows, key, label, colour=i) for i, (key, label) in enumerate(names)]

    body = charts(
        [
            line_chart("KL to the anchor", lines(("kl/position", "position"), ("kl/velocity", "velocity"))),
            line_chart("weight of the KL", lines(("kl/weight", "weight")), from_zero=True),
            line_chart(
                "KL's share of the gradient", [_series(rows, "kl/grad_share", "share", dots=True)], from_zero=True
            ),
            line_chart("probability ratio, mean", lines(("ratio/mean", "mean")), level=1.0),
            line_chart(
                "probability ratio, extremes",
                lines(("ratio/max_deviation", "largest |ratio - 1|"), ("ratio/clip_fraction", "clipped share")),
                from_zero=True,
            ),
            line_chart("gradient norm", lines(("grad_norm", "before clipping")), from_zero=True),
            line_chart(
                "groups without a signal",
                lines(
                    ("advantage/zero_spread_groups", "zero spread"),
                    ("reward/dropped_groups", "reward failed"),
                ),
                from_zero=True,
            ),
            line_chart("spread of the reward within a group", lines(("advantage/group_std", "std")), from_zero=True),
            line_chart("learning rate", lines(("learning_rate", "rate")), from_zero=True),
        ]
    )
    return f"<h2>Training</h2>{body}" if body else ""


PHASES = ("rollout", "decode", "reward", "anchor", "update", "evaluation")


def _speed_charts(rows: Rows, status: Status | None) -> str:
    speed, title = _series(rows, "time/iteration", "measured"), "seconds of an iteration"
    if status is not None and status.videos_per_rollout:
        hourly = 3600.0 * status.videos_per_rollout
        speed, title = replace(speed, y=[hourly / seconds for seconds in speed.y]), "videos an hour"
    phases = [_series(rows, f"time/{name}", name, colour=i, dots=name == "evaluation") for i, name in enumerate(PHASES)]
    memory = [_series(rows, "memory/peak_gib", "of the fullest rank")]
    body = charts(
        [
            line_chart(title, [speed], from_zero=True),
            line_chart("seconds by phase", phases, from_zero=True),
            line_chart("peak memory, GiB", memory, from_zero=True),
        ]
    )
    return f"<h2>Speed</h2>{body}" if body else ""


# ------------------------------------------------------------------------------------------------ videos, prompts


def _samples(directory: Path, compared: Compared | None) -> str:
    """Pairs of videos from update 0 and the last evaluation that has left some."""
    folders = sorted(folder for folder in (directory / "samples").glob("update-*") if folder.is_dir())
    if len(folders) < 2 or folders[0].name != "update-000000":
        return ""
    first, last = folders[0], folders[-1]
    update = int(last.name.removeprefix("update-"))
    pairs = []
    for file in sorted(last.glob("*.mp4")):
        if (first / file.name).exists():
            caption = _caption(file, compared)
            before, after = (PurePath("samples", folder.name, file.name) for folder in (first, last))
            pairs.append(video_pair(caption, before, after, ("update 0", f"update {update}")))
    if not pairs:
        return ""
    return (
        f'<h2>Samples</h2><p class="faint">Same prompt, same noise: before training and after update {update}.</p>'
        f'<div class="pairs">{"".join(pairs)}</div>'
    )


def _caption(file: Path, compared: Compared | None) -> str:
    """The prompt of a sample and its gain, by the number that its file name begins with."""
    row = int(file.name.partition("-")[0])
    if compared is None or row not in compared.after.numbers():
        return file.stem
    position = compared.after.numbers().index(row)
    gain = compared.after.reward[position] - compared.before.reward[position]
    return Html(f"{prompt_text(compared.after.prompts[position])} {gain_text(gain)}")


def _prompts(compared: Compared | None) -> str:
    """The prompts that gained and lost most."""
    if compared is None:
        return ""
    ranked = compared.gains()
    gained = [pair for pair in ranked[:SHOWN_PROMPTS] if pair[0] > 0]
    lost = [pair for pair in reversed(ranked[-SHOWN_PROMPTS:]) if pair[0] < 0]
    return "".join(
        f"<h2>{title}</h2>{_prompt_table(compared, pairs)}"
        for title, pairs in (("Prompts that gained most", gained), ("Prompts that lost most", lost))
        if pairs
    )


def _prompt_table(compared: Compared, pairs: Sequence[tuple[float, int]]) -> str:
    rows: list[list[Cell]] = [
        [
            (prompt_text(compared.after.prompts[row]), "prompt"),
            (f"{gain:+.4f}", gain_class(gain)),
            number(compared.before.reward[row]),
            number(compared.after.reward[row]),
        ]
        for gain, row in pairs
    ]
    return table(["prompt", "gain", "update 0", f"update {compared.update}"], rows)


# ------------------------------------------------------------------------------------------------ at the bottom


def _how_to_go_on(directory: Path, status: Status | None) -> str:
    name = directory.as_posix()
    commands = [f"sage-fast train {shlex.quote(name)} --resume auto"]
    if status is not None and status.state == "finished":
        commands = [
            f"sage-fast train {shlex.quote(name)} --resume auto --training.num_updates={2 * status.num_updates}",
            f"sage-fast generate {shlex.quote(name)} --output videos",
            f"sage-fast evaluate {shlex.quote(name)} --output report",
        ]
    links = " · ".join(
        f'<a href="{file}">{file}</a>'
        for file in (METRICS, "config.yaml", "reward.png", "before_after.png", "evaluation/result.json")
        if (directory / file).exists()
    )
    return (
        f"<h2>{'What next' if len(commands) > 1 else 'How to go on'}</h2>"
        f"<pre>{escape(chr(10).join(commands))}</pre><p>{links}</p>"
    )


def _made_with(directory: Path) -> str:
    config, environment = directory / "config.yaml", directory / "environment.json"
    parts = []
    if config.exists():
        parts.append(details("Configuration", f"<pre>{escape(config.read_text(encoding='utf-8'))}</pre>"))
    if environment.exists():
        tree = json.loads(environment.read_text(encoding="utf-8"))
        commit = f", commit {tree['commit']}" if tree.get("commit") else ""
        text = escape(json.dumps(tree, indent=1, ensure_ascii=False))
        parts.append(details(f"Made with SAGE-Fast {tree.get('sage_fast', '')}{commit}", f"<pre>{text}</pre>"))
    return "".join(parts)
