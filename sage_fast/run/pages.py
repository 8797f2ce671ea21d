"""What the project's HTML pages are made of: shell and style, line charts, tables, pairs of videos.

A page is one file. Style, script and charts are inside, nothing is fetched but the videos beside it, and it opens
offline, in light and in dark, from 400 pixels up. Functions return HTML; text that they are given is escaped, unless it
is `Html`.

page("Runs", [line_chart("reward", [Series(label="mean", x=[0, 1], y=[0.2, 0.4])]), table(["run"], [["toy_cpu"]])])
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from pathlib import PurePath
from statistics import fmean
from urllib.parse import quote

from sage_fast import __version__
from sage_fast.run.lettering import legible

MAX_POINTS = 500
"""Points of a line; longer ones are averaged, so that a page stays small however long the run."""

NUM_COLOURS = 6

TICKS = 4
"""Most labels of an axis, but for one."""


class Html(str):
    """Text that is HTML already."""

    __slots__ = ()


Cell = str | tuple[str, str]
"""Text of a table's cell, or text and CSS class: gain, loss, faint, prompt."""


@dataclass(frozen=True, kw_only=True)
class Series:
    """A line of a chart.

    x, y: N numbers each, x ascending. low, high: N numbers each, the edges of its band, or none. colour: 0 to 5. dots:
    mark every point.

    Example: `Series(label="evaluation", x=[0, 10], y=[0.2, 0.3], low=[0.1, 0.2], high=[0.3, 0.4])`
    """

    label: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None
    colour: int = 0
    dots: bool = False

    def thinned(self) -> "Series":
        """The same line with at most `MAX_POINTS` points: means of its parts, and the outermost edges of its band."""
        count = len(self.x)
        if count <= MAX_POINTS:
            return self
        edges = [round(i * count / MAX_POINTS) for i in range(MAX_POINTS + 1)]
        parts = [slice(*pair) for pair in pairwise(edges)]
        return Series(
            label=self.label,
            x=[fmean(self.x[part]) for part in parts],
            y=[fmean(self.y[part]) for part in parts],
            low=None if self.low is None else [min(self.low[part]) for part in parts],
            high=None if self.high is None else [max(self.high[part]) for part in parts],
            colour=self.colour,
        )


def page(title: str, sections: Sequence[str], *, refresh_seconds: int | None = None) -> str:
    """A whole page.

    Args:
        sections: HTML, in order; empty ones are left out.
        refresh_seconds: load the page anew so often. It stays where it was scrolled to, and waits while a video plays.
    """
    refresh = "" if refresh_seconds is None else f' data-refresh="{refresh_seconds}"'
    without_script = (
        ""
        if refresh_seconds is None
        else f'<noscript><meta http-equiv="refresh" content="{refresh_seconds}"></noscript>\n'
    )
    body = "\n".join(section for section in sections if section)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"{without_script}<title>{escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n"
        f'<body{refresh}>\n{body}\n<p class="faint">Written by SAGE-Fast {escape(__version__)}.</p>\n'
        f"<script>{SCRIPT}</script>\n</body>\n</html>\n"
    )


def table(head: Sequence[str], rows: Sequence[Sequence[Cell]], *, row_headers: bool = False) -> str:
    """A table that scrolls sideways where it is wider than the page.

    Args:
        row_headers: whether the first cell of a row names it.
    """
    top = "".join(f'<th scope="col">{_text(name)}</th>' for name in head)
    body = "".join(f"<tr>{''.join(_cell(c, row_headers and not i) for i, c in enumerate(row))}</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


def _cell(cell: Cell, is_header: bool) -> str:
    text, mark = cell if isinstance(cell, tuple) else (cell, "")
    css = f' class="{mark}"' if mark else ""
    return f'<th scope="row"{css}>{_text(text)}</th>' if is_header else f"<td{css}>{_text(text)}</td>"


def _text(text: str) -> str:
    return text if isinstance(text, Html) else escape(text)


def details(summary: str, content: str) -> str:
    """A section that is folded until somebody opens it."""
    return f"<details><summary>{_text(summary)}</summary>{content}</details>"


# ------------------------------------------------------------------------------------------------ charts


def line_chart(
    title: str,
    series: Sequence[Series],
    *,
    level: float | None = None,
    from_zero: bool = False,
    wide: bool = False,
) -> str:
    """A chart of lines with bands. Empty lines are left out; without any there is no chart, but an empty text.

    Args:
        level: a dashed line at this height, such as 1 for a ratio or what the plan predicts.
        from_zero: whether the axis begins at 0.
        wide: over the whole width of the page, and higher.
    """
    lines = [line.thinned() for line in series if line.x]
    if not lines:
        return ""
    heights = [v for line in lines for part in (line.y, line.low, line.high) if part is not None for v in part]
    bottom, top = _range([*heights, *([0.0] if from_zero else []), *([] if level is None else [level])])
    left, right = min(line.x[0] for line in lines), max(line.x[-1] for line in lines)
    if left == right:
        left, right = left - 0.5, right + 0.5

    def place(x: float, y: float) -> str:
        """In thousandths of the chart: the picture is stretched to its box, its labels are not."""
        return f"{1000 * (x - left) / (right - left):.1f} {1000 * (top - y) / (top - bottom):.1f}"

    x_ticks = [x for x in _ticks(left, right) if x == int(x) or right - left < TICKS]
    y_ticks = _ticks(bottom, top)
    shapes = [f'<path class="grid" d="M{place(left, y)}H1000"/>' for y in y_ticks]
    if level is not None:
        shapes.append(f'<path class="level" d="M{place(left, level)}H1000"/>')
    for line in lines:
        colour = f"c{line.colour % NUM_COLOURS}"
        if line.low is not None and line.high is not None:
            edge = [*zip(line.x, line.high, strict=True), *reversed([*zip(line.x, line.low, strict=True)])]
            shapes.append(f'<path class="band {colour}" d="M{"L".join(place(*p) for p in edge)}Z"/>')
        points = [place(*p) for p in zip(line.x, line.y, strict=True)]
        shapes.append(f'<path class="line {colour}" d="M{"L".join(points)}"/>')
        if line.dots or len(points) == 1:
            # A line of no length with round ends: a circle would be stretched with the picture.
            shapes.append(f'<path class="point {colour}" d="{"".join(f"M{p}h0" for p in points)}"/>')
    labels = [
        *(
            f'<span class="y" style="top:{100 * (top - y) / (top - bottom):.1f}%">{text}</span>'
            for y, text in zip(y_ticks, _tick_labels(y_ticks), strict=True)
        ),
        *(f'<span class="x" style="left:{100 * (x - left) / (right - left):.1f}%">{x:g}</span>' for x in x_ticks),
    ]
    legend = "".join(
        f'<span class="key c{line.colour % NUM_COLOURS}">{_text(line.label)} <b>{number(line.y[-1])}</b></span>'
        for line in lines
    )
    spoken = "; ".join(f"{line.label}: {number(line.y[0])} to {number(line.y[-1])}" for line in lines)
    data = {"x": "optimizer update", "lines": [[line.label, _rounded(line.x), _rounded(line.y)] for line in lines]}
    return (
        f'<figure class="chart{" wide" if wide else ""}"><figcaption>{_text(title)}</figcaption>'
        f'<div class="plot" data-lines="{escape(json.dumps(data, separators=(",", ":")))}">'
        f'<svg viewBox="0 0 1000 1000" preserveAspectRatio="none" role="img" aria-label="{escape(title)}. '
        f'{escape(spoken)}">{"".join(shapes)}</svg>{"".join(labels)}</div>'
        f'<div class="legend">{legend}<span class="readout"></span></div></figure>'
    )


def gain_class(gain: float) -> str:
    """CSS class of a gain, a loss, or neither."""
    return "gain" if gain > 0 else "loss" if gain < 0 else "faint"


def gain_text(gain: float) -> Html:
    """A gain with its sign, in the colour of what it is."""
    return Html(f'<span class="{gain_class(gain)}">{gain:+.4f}</span>')


def charts(parts: Sequence[str]) -> str:
    """Charts beside and below one another, as many in a row as there is room for."""
    found = [part for part in parts if part]
    return f'<div class="charts">{"".join(found)}</div>' if found else ""


def number(value: float) -> str:
    """A number with as many digits as tell it from its neighbours on a page.

    Example: `number(0.41234)` is `0.4123`, `number(1234.5)` is `1,234`, `number(2.34e-7)` is `2.34e-07`.
    """
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    if abs(value) >= 1000:
        return f"{value:,.0f}" if abs(value) < 1e7 else f"{value:.3g}"
    return f"{value:.4g}" if abs(value) >= 1e-4 else f"{value:.3g}"


def _rounded(values: Sequence[float]) -> list[float]:
    return [float(f"{value:.5g}") for value in values]


def _range(values: Sequence[float]) -> tuple[float, float]:
    """Bottom and top of an axis that shows all values, with some room."""
    low, high = min(values), max(values)
    room = 0.06 * (high - low) or 0.05 * abs(low) or 1.0
    return (low if low == 0 else low - room), high + room


def _ticks(low: float, high: float) -> list[float]:
    """Round numbers within an axis."""
    rough = (high - low) / TICKS
    unit = 10 ** math.floor(math.log10(rough))
    step = next(factor * unit for factor in (1, 2, 5, 10) if factor * unit >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [float(f"{k * step:.10g}") for k in range(first, math.floor(high / step + 1e-9) + 1)]


def _tick_labels(ticks: Sequence[float]) -> list[str]:
    """Labels with as many digits as tell neighbours apart."""
    step = min((b - a for a, b in pairwise(ticks)), default=0.0) or abs(ticks[0]) or 1.0
    if max(map(abs, ticks)) >= 1e6 or step < 1e-4:
        return [f"{tick:.3g}" for tick in ticks]
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    return [f"{tick:,.{decimals}f}" for tick in ticks]


# ------------------------------------------------------------------------------------------------ videos


def video_pair(
    caption: str,
    before: PurePath,
    after: PurePath,
    labels: tuple[str, str] = ("before", "after"),
    *,
    pictures: str = "",
) -> str:
    """Two videos of the same prompt that play, stop and are scrubbed together.

    Args:
        caption: what is above them.
        before, after: the files, relative to the page. Where one cannot be loaded, neither is shown.
        pictures: HTML below the videos, which stays where they are not to be had.
    """
    videos = "".join(
        f'<div class="video"><video src="{video_url(path)}" muted loop playsinline preload="metadata"></video>'
        f"<span>{escape(label)}</span></div>"
        for label, path in zip(labels, (before, after), strict=True)
    )
    return (
        f'<figure class="pair"><figcaption>{_text(caption)}</figcaption><div class="videos">{videos}</div>'
        '<div class="player"><button type="button" aria-label="play both videos">&#9654;</button>'
        '<input type="range" min="0" max="1" step="0.001" value="0" aria-label="position in both videos"></div>'
        f"{pictures}</figure>"
    )


def prompt_text(prompt: str) -> Html:
    """A prompt in its own direction of writing, so that it leaves the order of what follows alone.

    Characters that this machine has no font for, and the reader's may not have either, are named when pointed at.
    """
    named = legible(prompt)
    title = f' title="{escape(named)}"' if named != prompt else ""
    return Html(f"<bdi{title}>{escape(prompt)}</bdi>")


def video_url(path: PurePath) -> str:
    """A relative path as a page links it; names may hold any script."""
    return quote(path.as_posix())


# Colours are named once, so that dark is the same page with other values.
STYLE = """
:root { color-scheme: light dark; --page: #ffffff; --ink: #1d232b; --faint: #5f6a77; --rule: #dfe4ea; --panel: #f5f7f9;
  --gain: #0a7a4b; --loss: #b3362b; --link: #0b6bcb;
  --c0: #0b6bcb; --c1: #77828f; --c2: #c2571a; --c3: #0a7a4b; --c4: #8a4fc0; --c5: #b3362b; }
@media (prefers-color-scheme: dark) { :root { --page: #14181d; --ink: #e6eaee; --faint: #97a2ae; --rule: #303841;
  --panel: #1c2229; --gain: #4cc38a; --loss: #f08a80; --link: #6db3f8;
  --c0: #5aa9f5; --c1: #8e99a6; --c2: #f0a160; --c3: #4cc38a; --c4: #c29af0; --c5: #f08a80; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 80rem; padding: 2rem 1.25rem 4rem; background: var(--page); color: var(--ink);
  font: 16px/1.5 system-ui, sans-serif; overflow-wrap: break-word; }
h1 { font-size: 1.6rem; margin: 0 0 .5rem; } h2 { font-size: 1.15rem; margin: 2.5rem 0 .75rem; }
p { max-width: 46rem; } a { color: var(--link); } .faint { color: var(--faint); font-size: .9rem; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .35rem .8rem; text-align: right; border-bottom: 1px solid var(--rule); white-space: nowrap; }
th:first-child, td:first-child { text-align: left; padding-left: 0; } thead th { border-bottom: 2px solid var(--rule); }
td.prompt { white-space: normal; min-width: 12rem; }
.gain { color: var(--gain); font-weight: 600; } .loss { color: var(--loss); font-weight: 600; }
figure { margin: 0 0 1.5rem; padding: 1rem; background: var(--panel); border-radius: .5rem; overflow-x: auto; }
figcaption { margin-bottom: .6rem; } .strip { display: flex; align-items: center; gap: .8rem; margin-top: .4rem; }
.strip span { flex: 0 0 4rem; color: var(--faint); font-size: .85rem; } .strip img { max-width: 100%; height: auto;
  border-radius: .2rem; min-width: 0; }
svg text { fill: var(--ink); font: 13px system-ui, sans-serif; } svg .axis { stroke: var(--faint); }
svg .bar { stroke: var(--faint); stroke-width: 3; } svg .dot { fill: var(--faint); }
svg .bar.gain { stroke: var(--gain); } svg .dot.gain { fill: var(--gain); }
svg .bar.loss { stroke: var(--loss); } svg .dot.loss { fill: var(--loss); }
.c0 { --line: var(--c0); } .c1 { --line: var(--c1); } .c2 { --line: var(--c2); } .c3 { --line: var(--c3); }
.c4 { --line: var(--c4); } .c5 { --line: var(--c5); }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 20rem), 1fr)); gap: 1rem; }
.charts figure { margin: 0; } .chart { overflow: visible; } .chart figcaption { font-weight: 600; font-size: .9rem; }
.charts .wide { grid-column: 1 / -1; } .plot { position: relative; height: 9rem; margin: 0 .6rem 1.6rem 3.2rem; }
.wide .plot { height: 15rem; } .plot svg { width: 100%; height: 100%; overflow: visible; display: block; }
.plot path { vector-effect: non-scaling-stroke; fill: none; } .plot .grid { stroke: var(--rule); }
.plot .level { stroke: var(--faint); stroke-dasharray: 4 4; } .plot .line { stroke: var(--line); stroke-width: 2;
  stroke-linejoin: round; } .plot .band { fill: var(--line); opacity: .16; }
.plot .point { stroke: var(--line); stroke-width: 6; stroke-linecap: round; }
.plot span { position: absolute; font-size: .75rem; color: var(--faint); font-variant-numeric: tabular-nums;
  line-height: 1; white-space: nowrap; }
.plot .y { right: calc(100% + .5rem); transform: translateY(-50%); }
.plot .x { top: calc(100% + .45rem); transform: translateX(-50%); }
.plot .hair { top: 0; width: 1px; height: 100%; background: var(--faint); }
.legend { display: flex; flex-wrap: wrap; gap: .1rem .9rem; font-size: .8rem; color: var(--faint);
  font-variant-numeric: tabular-nums; } .key::before { content: ""; display: inline-block; width: .9rem; height: .2rem;
  margin-right: .35rem; vertical-align: middle; background: var(--line); } .key b { color: var(--ink); }
.readout { flex-basis: 100%; min-height: 1.2em; }
.pairs { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 26rem), 1fr)); gap: 1rem; }
.pairs figure { margin: 0; } .videos { display: grid; grid-template-columns: 1fr 1fr; gap: .6rem; }
.video { min-width: 0; } .video video { display: block; width: 100%; border-radius: .3rem; background: var(--rule); }
.video span { color: var(--faint); font-size: .85rem; } .player { display: flex; gap: .6rem; align-items: center;
  margin-top: .4rem; } .player input { flex: 1; min-width: 0; accent-color: var(--link); } .player button {
  width: 2.2rem; height: 2rem; border: 1px solid var(--rule); border-radius: .3rem; background: var(--page);
  color: var(--ink); font: inherit; font-size: .8rem; cursor: pointer; } .lost { display: none; }
.facts { display: grid; grid-template-columns: repeat(auto-fit, minmax(9.5rem, 1fr)); gap: .8rem; margin: 1.2rem 0; }
.facts div { background: var(--panel); border-radius: .5rem; padding: .6rem .8rem; } .facts dt { color: var(--faint);
  font-size: .8rem; } .facts dd { margin: 0; font-weight: 600; font-variant-numeric: tabular-nums; }
details { margin-top: 1rem; } summary { cursor: pointer; }
pre { overflow-x: auto; background: var(--panel); padding: 1rem; border-radius: .5rem; font-size: .85rem; }
"""

SCRIPT = """
"use strict";
for (const plot of document.querySelectorAll(".plot")) {
  const data = JSON.parse(plot.dataset.lines), all = data.lines.flatMap(line => line[1]);
  const left = Math.min(...all), right = Math.max(...all);
  const readout = plot.parentNode.querySelector(".readout"), hair = document.createElement("span");
  hair.className = "hair"; hair.hidden = true; plot.append(hair);
  plot.addEventListener("pointermove", event => {
    const box = plot.getBoundingClientRect(), x = left + (right - left) * (event.clientX - box.left) / box.width;
    const nearest = all.reduce((a, b) => Math.abs(b - x) < Math.abs(a - x) ? b : a);
    const found = data.lines.filter(line => line[1].includes(nearest));
    readout.textContent = `${data.x} ${nearest}: ` +
      found.map(line => `${line[0]} ${line[2][line[1].indexOf(nearest)]}`).join(", ");
    hair.hidden = false; hair.style.left = `${100 * (right > left ? (nearest - left) / (right - left) : .5)}%`;
  });
  plot.addEventListener("pointerleave", () => { readout.textContent = ""; hair.hidden = true; });
}
for (const pair of document.querySelectorAll(".pair")) {
  const videos = [...pair.querySelectorAll("video")], [first] = videos;
  const button = pair.querySelector("button"), range = pair.querySelector("input");
  const stop = () => { for (const video of videos) video.pause(); button.textContent = "\\u25b6"; };
  const follow = () => {
    if (first.paused) return;
    for (const video of videos.slice(1))
      if (Math.abs(video.currentTime - first.currentTime) > .1) video.currentTime = first.currentTime;
    if (first.duration) range.value = first.currentTime / first.duration;
    requestAnimationFrame(follow);
  };
  button.addEventListener("click", async () => {
    if (!first.paused) { stop(); return; }
    button.textContent = "\\u23f8";
    await Promise.allSettled(videos.map(video => video.play()));
    follow();
  });
  range.addEventListener("input", () => {
    stop();
    for (const video of videos) if (video.duration) video.currentTime = range.value * video.duration;
  });
  for (const video of videos) {
    const hide = () => pair.querySelectorAll(".videos, .player").forEach(part => part.classList.add("lost"));
    video.addEventListener("error", hide);
    if (video.error) hide();
  }
}
for (const time of document.querySelectorAll("time")) {
  const date = new Date(time.dateTime), say = () => {
    const minutes = Math.round((Date.now() - date) / 60000);
    const ago = minutes < 100 ? `${minutes} min` : `${Math.round(minutes / 60)} h`;
    time.textContent = `${date.toLocaleString()} (${ago} ago)`;
  };
  say(); setInterval(say, 30000);
}
const refresh = Number(document.body.dataset.refresh), key = `sage-fast ${location.pathname}`;
if (refresh) {
  const saved = JSON.parse(sessionStorage.getItem(key) || "null"), folds = [...document.querySelectorAll("details")];
  if (saved) { folds.forEach((fold, i) => { fold.open = Boolean(saved.open[i]); }); scrollTo(0, saved.scroll); }
  setInterval(() => {
    const busy = [...document.querySelectorAll("video")].some(video => !video.paused) || getSelection().toString();
    if (document.hidden || busy) return;
    sessionStorage.setItem(key, JSON.stringify({scroll: scrollY, open: folds.map(fold => fold.open)}));
    location.reload();
  }, 1000 * refresh);
}
"""
