"""Run directories as a training leaves them, with numbers that a test chooses."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from sage_fast.config.files import replacing
from sage_fast.config.load import load_config, save_config
from sage_fast.evaluation import Evaluation
from sage_fast.rollout import VideoScoring
from sage_fast.run import metrics, page, run
from sage_fast.run.directory import read_metrics

PROMPTS = [f"prompt {i}" for i in range(6)]


def untimed(row: Mapping[str, Any]) -> dict[str, Any]:
    """Metrics without times and memory, which no two runs share."""
    return {
        key: value
        for key, value in row.items()
        if not key.startswith(("time/", "memory/"))
    }


def numbers(run: Path) -> list[dict[str, Any]]:
    """The metrics of a run, `untimed`."""
    return [untimed(row) for row in read_metrics(run / "metrics.jsonl")]


def draw_nothing(patch: pytest.MonkeyPatch) -> None:
    """Make plots and contact sheets a few bytes: drawing takes most of the time of a
    run as small as these.
    """

    def sheet(path: Path, cells: list[Any], title: str = "", **options: bool) -> None:
        with replacing(path) as partial:
            partial.write_text(f"{len(cells)} cells")

    patch.setattr(metrics, "contact_sheet", sheet)
    patch.setattr(page, "line_chart", lambda lines, **options: "")
    patch.setattr(run, "reward_figure", lambda rows: None)
    patch.setattr(run, "figure_file", lambda figure, kind: b"a picture")


def make_run(
    folder: Path,
    *overrides: str,
    seed: int = 0,
    final: Sequence[float] = (0.0,) * 6,
    updates: int = 4,
    prompts: Sequence[str] = PROMPTS,
    files: Sequence[str] = ("configs/toy_cpu.yaml",),
) -> Path:
    """A finished run whose final rewards are given; its training rewards rise by 0.1 an
    update.
    """
    words = [
        f"--output_dir={folder}",
        f"--seed={seed}",
        f"--training.num_updates={updates}",
        *overrides,
    ]
    config = load_config(list(files), words)
    folder.mkdir(parents=True)
    save_config(config, folder / "config.yaml")
    rows = [{"update": 0, "eval/reward_mean": 0.0}]
    rows += [
        {
            "update": update,
            "reward/mean": 0.1 * update + 0.01 * seed,
            "grad_norm": 1.0 / update,
            "kl/position": 1e-3 * update,
            "kl/grad_share": 0.2,
            "time/iteration": 2.0,
        }
        for update in range(1, updates + 1)
    ]
    rows[-1]["eval/reward_mean"] = sum(final) / len(final)
    (folder / "metrics.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in rows)
    )
    for update, values in ((0, [0.0] * len(prompts)), (updates, list(final))):
        scores = {name: [value / 3 for value in values] for name in ("VQ", "MQ", "TA")}
        Evaluation(prompts=list(prompts), scores=scores, reward=values).save(
            folder / "evaluation" / f"update-{update:06d}.json"
        )
    (folder / "evaluation" / "result.json").write_text(
        json.dumps({"before": 0, "after": updates})
    )
    (folder / "environment.json").write_text(
        json.dumps(
            {"sage_fast": "1.2", "commit": "c" * 40, "packages": {"torch": "2.x"}}
        )
    )
    return folder


def lose_scores(patch: pytest.MonkeyPatch, videos: Sequence[int]) -> None:
    """Have the rewards fail for these videos of every rollout and evaluation."""
    gather = VideoScoring.gather

    def failing(self: VideoScoring, count: int) -> tuple[dict[str, Tensor], Tensor]:
        scores, failed = gather(self, count)
        failed[list(videos)] = True
        return scores, failed

    patch.setattr(VideoScoring, "gather", failing)
