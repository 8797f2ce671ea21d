"""HTML pages from the templates of this folder, and the page of a run: `index.html` in
its directory.

A page is one file: style, script and charts are inside, and nothing is fetched but the
videos beside it. The page of a run is made of the files of its directory alone, so it
can be written again at any time; while the run goes on, a browser loads it again every
minute.
"""

import json
import logging
import math
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined, select_autoescape

from sage_fast import __version__
from sage_fast.config.errors import ConfigError
from sage_fast.config.files import loads, write_text
from sage_fast.config.load import load_config, preset_names
from sage_fast.config.schema import by_dotted_key, to_dict
from sage_fast.evaluation import (
    Evaluation,
    direction_label,
    paired_test,
    plus_minus,
    scored_in_both,
    to_error,
)
from sage_fast.run.directory import RunDirectory, read_metrics
from sage_fast.run.plots import Line, Rows, line_chart, metric_line, score_lines
from sage_fast.run.run_status import Status, command_for, format_seconds, read_status

REFRESH_SECONDS = 60
SHOWN_VIDEOS = 4
"""Prompts whose videos show the largest gains, and the largest losses."""
SHOWN_PROMPTS = 5
"""Prompts in each of the tables of gains and losses."""
SIGNAL_UPDATES = 20
SURE_UPDATES = 10
"""Updates over which `grad/signal` is averaged, and the fewest that may call it noise.
"""
LITTLE_SIGNAL = 0.01
"""Mean of `grad/signal` below which it is called noise."""

T = TypeVar("T")

logger = logging.getLogger(__name__)


def number(value: float) -> str:
    """A number with the digits that tell it from its neighbours on a page.

    Example: `number(0.41234)` is `0.4123`, `number(1234.5)` is `1,234`,
    `number(2.34e-7)` is `2.34e-07`.
    """
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    if 1000 <= abs(value) < 1e7:
        return f"{value:,.0f}"
    return f"{value:.4g}" if 1e-4 <= abs(value) < 1000 else f"{value:.3g}"


TEMPLATES = Environment(
    loader=FileSystemLoader(Path(__file__).with_name("templates")),
    autoescape=select_autoescape(["html"]),
    trim_blocks=True,
    undefined=StrictUndefined,
)
TEMPLATES.filters |= {
    "number": number,
    "plus_minus": plus_minus,
    "to_error": to_error,
    "seconds": format_seconds,
    "way": lambda gain: "gain" if gain > 0 else "loss" if gain < 0 else "faint",
    "json": lambda tree: json.dumps(tree, indent=1, ensure_ascii=False),
}


def render(
    template: str, title: str, *, refresh_seconds: int | None = None, **values: Any
) -> str:
    """A page.

    Args:
        refresh_seconds: load the page again so often. It stays where it was scrolled
            to, and waits while a video plays.
    """
    page = TEMPLATES.get_template(template)
    return page.render(
        title=title, version=__version__, refresh_seconds=refresh_seconds, **values
    )


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A chart of a page: inline SVG, and the lines of its legend."""

    title: str
    svg: str
    lines: Sequence[Line]


def charts(*parts: tuple[str, Sequence[Line], dict[str, Any]]) -> list[Chart]:
    """Charts of (title, lines, options of `line_chart`), without those that have no
    point.

    An option `varies` leaves out a chart of what most runs never change, until it does.
    """
    found = []
    for title, lines, given in parts:
        options = dict(given)
        shown = [line for line in lines if line.x]
        if options.pop("varies", False) and all(
            len(set(line.y)) == 1 for line in shown
        ):
            continue
        if svg := line_chart(shown, **options):
            found.append(Chart(title=title, svg=svg, lines=shown))
    return found


# --------------------------------------------------------------------------------------
# page of a run


Compared = tuple[int, Evaluation, Evaluation]
"""Update of the last evaluation, and the scores of update 0 and of that one, of the
prompts that both have scored.
"""


def write_run_page(directory: str | os.PathLike[str]) -> None:
    """Write the page of the run in a directory. A failure is a warning: a run does not
    end for its page.
    """
    page = RunDirectory(directory).page
    try:
        write_text(page, run_page(directory), lasting=False)
    except Exception as error:  # noqa: BLE001  it reads files that anybody may have changed
        logger.warning("%s is not up to date: %s", page, error)


def run_page(run: str | os.PathLike[str]) -> str:
    """The page as HTML. ValueError, OSError where a file of the run cannot be read."""
    directory = RunDirectory(run)
    # By update: a run that was resumed may log its baseline, of update 0, after later
    # ones.
    if directory.metrics.exists():
        rows = sorted(read_metrics(directory.metrics), key=lambda row: row["update"])
    else:
        rows = []
    status, _ = read_status(directory)
    compared = _compare(directory, rows)
    evaluated = 0
    lower = set[str]()
    scored = list[tuple[str, float, float]]()
    if compared is not None:
        evaluated, before, after = compared
        lower = set(after.lower_is_better)
        scored = list(zip(after.prompts, before.reward, after.reward, strict=True))
    gained, lost = _extremes(scored, lambda row: row[2] - row[1], SHOWN_PROMPTS)
    name = directory.path.resolve().name
    config = directory.config
    environment = directory.environment
    files = [
        directory.metrics,
        config,
        directory.reward_plot,
        directory.before_after,
        directory.result,
    ]
    return render(
        "run.html",
        f"{name}: a run of SAGE-Fast",
        refresh_seconds=REFRESH_SECONDS
        if status is not None and status.state == "running"
        else None,
        name=name,
        commands=_next_commands(directory, status),
        status=status,
        facts=_facts(rows, status, compared),
        signal=_signal(rows),
        rewards=_reward_charts(rows, lower),
        sections=[
            ("Training", _training_charts(rows)),
            ("Speed", _speed_charts(rows, status)),
        ],
        grid=directory.before_after.name if directory.before_after.exists() else None,
        samples=_samples(directory, compared),
        evaluated=evaluated,
        prompts=[
            ("Prompts that gained most", gained),
            ("Prompts that lost most", lost),
        ],
        files=[
            file.relative_to(directory).as_posix() for file in files if file.exists()
        ],
        config=config.read_text("utf-8") if config.exists() else "",
        differences=_differences(config),
        environment=loads(environment.read_text("utf-8"))
        if environment.exists()
        else None,
    )


def _next_commands(run: RunDirectory, status: Status | None) -> list[str]:
    """Commands that go on with a run, or use one that is finished."""
    if status is None or status.state != "finished":
        return [command_for(run.path, status, "train", "--resume", "auto")]
    made = {"evaluate": run.scores, "generate": run.generated, "export": run.exported}
    return [
        command_for(run.path, status, command, "--output_dir", str(folder.absolute()))
        for command, folder in made.items()
    ]


def _compare(directory: RunDirectory, rows: Rows) -> Compared | None:
    """The last evaluation that can be read, with that of update 0; None where there are
    no two.
    """
    updates = [row["update"] for row in rows if "eval/reward_mean" in row]
    if not updates or updates[0] != 0 or updates[-1] == 0:
        return None
    try:
        before, after = scored_in_both(
            *(Evaluation.load(directory.evaluation(at)) for at in (0, updates[-1]))
        )
    except (OSError, ValueError) as error:
        logger.warning("The page of the run has no prompts: %s", error)
        return None
    return updates[-1], before, after


def _facts(
    rows: Rows, status: Status | None, compared: Compared | None
) -> list[tuple[str, str]]:
    """The few numbers that are looked at first."""
    # The last value of every metric, since no row has all of them.
    last = {
        key: value for row in rows for key, value in row.items() if value is not None
    }
    facts = []
    if status is not None:
        facts.append(("update", f"{status.update} of {status.num_updates}"))
    for key, label in (
        ("eval/reward_mean", "reward, evaluation"),
        ("reward/mean", "reward, training batch"),
    ):
        if key in last:
            facts.append((label, number(last[key])))
    if compared is not None:
        update, before, after = compared
        test = paired_test(before.reward, after.reward)
        facts.append((f"gain at update {update}", test.change))
        facts.append(("prompts that gained", f"{test.wins:.0%} of {test.count}"))
    if last.get("time/iteration") and status is not None:
        facts.append(
            (
                "videos an hour",
                number(3600 * status.videos_per_rollout / last["time/iteration"]),
            )
        )
    if "time/slowest" in last:
        facts.append(("slowest rank", last["time/slowest"]))
    return facts


def _signal(rows: Rows) -> str:
    """Say whether the gradient of an update is signal or noise; nothing where that is
    unknown.
    """
    known = [row["grad/signal"] for row in rows if row.get("grad/signal") is not None]
    cosines = known[-SIGNAL_UPDATES:]
    if len(cosines) < 2:
        return ""
    mean = float(np.mean(cosines))
    error = float(np.std(cosines, ddof=1)) / math.sqrt(len(cosines))
    found = (
        "The gradient repeats from one half of the videos to the other: cosine "
        f"{plus_minus(mean, error, sign='')} (mean of {len(cosines)} updates)."
    )
    if len(cosines) < SURE_UPDATES or mean >= max(LITTLE_SIGNAL, 2 * error):
        return found
    return (
        f"{found} It is nearly all noise: more videos per update, or the forward "
        "process (training.update), at noised "
        "videos or at the sampler's states (forward_process.states: path), help."
    )


def _reward_charts(rows: Rows, lower: set[str]) -> list[Chart]:
    """The gain, the reward and its components, without what another one of them shows
    already.
    """
    # The name of a score may have a slash too.
    means = [
        key.removesuffix("_mean").split("/", 1)
        for row in rows
        for key in row
        if key.endswith("_mean")
    ]
    # The overall is the sum of three components.
    names = sorted(
        {path[1] for path in means if path[0] in ("eval", "reward")}
        - {"reward", "overall"}
    )
    gain = metric_line(
        rows,
        "eval/paired_gain",
        "gain ± 1 standard error",
        spread="eval/paired_gain_stderr",
        dots=True,
    )
    reward = score_lines(rows, "reward", "reward/mean")
    parts: list[tuple[str, list[Line], dict[str, Any]]] = []
    if len(gain.x) > 2:  # two evaluations are one gain, which stands above
        parts.append(("paired gain over update 0", [gain], {"level": 0.0}))
    parts.append(("reward", reward, {"second_axis": _hours(rows)}))
    for name in names:
        lines = score_lines(rows, name, f"reward/{name}_mean")
        if [line.y for line in lines] != [line.y for line in reward]:
            title = direction_label(name.replace("_", " "), name in lower)
            parts.append((title, lines, {}))
    return charts(*parts)


def _hours(rows: Rows) -> Callable[[float], str]:
    """Time that the run had taken by an update, as a text."""
    updates = []
    seconds = [0.0]
    for row in rows:
        updates.append(row["update"])
        spent = (
            row.get(f"time/{phase}")
            for phase in ("iteration", "evaluation", "checkpoint")
        )
        seconds.append(seconds[-1] + sum(part for part in spent if part))
    # Ticks also stand between the updates that were logged, and below 0, where no run
    # has been.
    return lambda update: (
        format_seconds(float(np.interp(update, updates, seconds[1:])))
        if update >= 0
        else ""
    )


def _training_charts(rows: Rows) -> list[Chart]:
    def lines(**labels: str) -> list[Line]:
        return [
            metric_line(rows, key, label, colour=i)
            for i, (key, label) in enumerate(labels.items())
        ]

    zero = {"from_zero": True}
    rare = {"varies": True, **zero}
    ratios = {
        "ratio/max_deviation": "largest |ratio - 1|",
        "ratio/clip_fraction": "clipped share",
    }
    groups = {
        "advantage/zero_spread_groups": "zero spread",
        "reward/dropped_groups": "reward failed",
    }
    kl = lines(**{"kl/position": "position", "kl/velocity": "velocity"})
    return charts(
        # one is 0 until its anchor moves
        ("KL to the anchor", [line for line in kl if any(line.y)], {}),
        *(
            [("weight of the KL", lines(**{"kl/weight": "weight"}), rare)]
            if any(line.x for line in kl)
            else []
        ),
        (
            "KL's share of the gradient",
            [metric_line(rows, "kl/grad_share", "share", dots=True)],
            zero,
        ),
        (
            "probability ratio, mean",
            lines(**{"ratio/mean": "mean"}),
            {"level": 1.0, "varies": True},
        ),
        ("probability ratio, extremes", lines(**ratios), rare),
        ("gradient norm", lines(grad_norm="before clipping"), zero),
        ("groups without a signal", lines(**groups), rare),
        (
            "spread of the reward within a group",
            lines(**{"advantage/group_std": "std"}),
            zero,
        ),
        ("learning rate", lines(learning_rate="rate"), rare),
    )


def _speed_charts(rows: Rows, status: Status | None) -> list[Chart]:
    speed = metric_line(rows, "time/iteration", "measured")
    title = "seconds of an iteration"
    if status is not None and status.videos_per_rollout:
        hourly = 3600.0 * status.videos_per_rollout
        speed = replace(speed, y=[hourly / seconds for seconds in speed.y])
        title = "videos an hour"
    names = ("rollout", "decode", "reward", "waiting", "anchor", "update", "evaluation")
    phases = [
        metric_line(rows, f"time/{n}", n, colour=i, dots=n == "evaluation")
        for i, n in enumerate(names)
    ]
    memory = [metric_line(rows, "memory/peak_gib", "of the fullest rank")]
    zero = {"from_zero": True}
    return charts(
        (title, [speed], zero),
        ("seconds by phase", phases, zero),
        ("peak memory, GiB", memory, zero),
    )


def _samples(
    directory: RunDirectory, compared: Compared | None
) -> dict[str, Any] | None:
    """Pairs of videos from update 0 and the last evaluation that has left some, and the
    updates that have videos.
    """
    folders = sorted(
        folder for folder in directory.samples.glob("update-*") if folder.is_dir()
    )
    if len(folders) < 2 or folders[0].name != "update-000000":
        return None
    last = folders[-1]
    noises = 1
    known = dict[int, tuple[str, float | None]]()
    if compared is not None:
        _, start, end = compared
        noises = end.noises
        changes = [b - a for a, b in zip(start.reward, end.reward, strict=True)]
        known = dict(
            zip(end.numbers(), zip(end.prompts, changes, strict=True), strict=True)
        )
    pairs: list[tuple[str, float | None, str, str]] = []
    for file in sorted(last.glob("*.mp4")):
        if (folders[0] / file.name).exists():
            # The file's name begins with the number of its prompt.
            prompt, gain = known.get(
                int(file.name.partition("-")[0]), (file.stem, None)
            )
            before, after = (
                (folder / file.name).relative_to(directory).as_posix()
                for folder in (folders[0], last)
            )
            pairs.append((prompt, gain, before, after))
    if not pairs:
        return None
    groups = [("Samples", pairs)]
    # Of many pairs those that changed most are shown; where no gain is known, the first
    # ones.
    if len(pairs) > 2 * SHOWN_VIDEOS:
        gains, losses = _extremes(pairs, lambda pair: pair[1] or 0.0, SHOWN_VIDEOS)
        shown = [("Largest gains", gains), ("Largest losses", losses)]
        groups = [group for group in shown if group[1]] or [
            ("Samples", pairs[:SHOWN_VIDEOS])
        ]
    updates = [int(folder.name.removeprefix("update-")) for folder in folders]
    return {"noises": noises, "updates": updates, "groups": groups}


def _extremes(
    items: Sequence[T], gain: Callable[[T], float], most: int
) -> tuple[list[T], list[T]]:
    """The items that gained most and those that lost most, the largest change first."""
    ranked = sorted(items, key=gain, reverse=True)
    gained = [item for item in ranked[:most] if gain(item) > 0]
    lost = [item for item in reversed(ranked[-most:]) if gain(item) < 0]
    return gained, lost


def _differences(config: Path) -> tuple[str, list[tuple[str, str, str]]] | None:
    """The preset that a run's configuration is nearest to, and (key, value there, value
    here) where they differ.
    """
    try:
        here = by_dotted_key(to_dict(load_config(config)))
    except (OSError, ValueError):
        return None
    # Every run has its own directory, and may be resumed.
    differing = {
        name: [
            key
            for key in here | there
            if here.get(key) != there.get(key) and key not in ("output_dir", "resume")
        ]
        for name, there in _presets().items()
    }
    name = min(differing, key=lambda name: len(differing[name]))
    rows = []
    for key in differing[name]:
        texts = [
            json.dumps(values.get(key), ensure_ascii=False)
            for values in (_presets()[name], here)
        ]
        there_text, here_text = (
            text if len(text) <= 60 else f"{text[:60]}..." for text in texts
        )
        rows.append((key, there_text, here_text))
    return name, rows


@cache
def _presets() -> dict[str, dict[str, Any]]:
    """Keys and values of the presets that are whole runs."""
    found = {}
    for name in preset_names():
        with suppress(ConfigError):  # others are laid over one
            found[name] = by_dotted_key(to_dict(load_config(name)))
    return found
