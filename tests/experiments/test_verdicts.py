"""The verdicts on the page, computed again from the committed numbers by other code:
NumPy, SciPy and JSON alone.
"""

import json
import re
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

ROOT = Path(__file__).resolve().parents[2]
NEGLIGIBLE = dict.fromkeys(("final_overall", "area", "group_spread"), 0.01)
NEGLIGIBLE |= {
    "final_drift": 0.02,
    "final_reward": 0.02,
    "unsteadiness": 0.003,
    "final_manifold_distance": 0.002,
}
TABLES = (
    "testbed_updates",
    "testbed_forward",
    "testbed8",
    "testbed2",
    "testbed2a",
    "updates",
    "samplers",
    "table2",
    "table2a",
    "fig3",
    "fig7",
    "fig8",
)


@cache
def numbers() -> dict[tuple[str, str, str], dict[int, Any]]:
    """Values by experiment, quantity and arm, and there by seed; of networks, those of
    every prompt.
    """
    found: dict[tuple[str, str, str], dict[int, Any]] = {}
    for line in (
        (ROOT / "docs/results/reproduction.jsonl").read_text("utf-8").splitlines()
    ):
        row = json.loads(line)
        of = found.setdefault((row["experiment"], row["quantity"], row["arm"]), {})
        if isinstance(row["value"], list):
            of.update(zip(row["seed"], row["value"], strict=True))
        else:
            by_prompt = row["quantity"].startswith("final_")
            of[row.get("seed", 0)] = (
                row.get("parts") if by_prompt and "parts" in row else row["value"]
            )
    return found


def p_and_mean(difference: np.ndarray) -> tuple[float, float]:
    """Of differences by seed (S,), or by seed and prompt (S, P), both of which are a
    sample of more.
    """
    if difference.ndim == 1:
        return float(stats.ttest_1samp(difference, 0).pvalue), float(difference.mean())
    seeds, prompts = difference.shape
    grand, rows, columns = difference.mean(), difference.mean(1), difference.mean(0)
    residual = difference - rows[:, None] - columns[None, :] + grand
    squares = np.array([prompts * rows.var(ddof=1), seeds * columns.var(ddof=1), 0.0])
    freedom = np.array([seeds - 1, prompts - 1, (seeds - 1) * (prompts - 1)])
    squares[2] = -(residual**2).sum() / freedom[2]
    choices = [np.array(used, dtype=bool) for used in ([1, 1, 1], [1, 0, 0], [0, 1, 0])]
    used = max(choices, key=lambda chosen: squares[chosen].sum())
    total = squares[used].sum()
    df = max(1.0, total**2 / (squares[used] ** 2 / freedom[used]).sum())
    return float(
        2 * stats.t.sf(abs(grand) / np.sqrt(total / seeds / prompts), df)
    ), float(grand)


def verdicts(experiment: str) -> list[tuple[str, str]]:
    """Text and verdict of every claim, in the order of the table: two claims may have
    one text.
    """
    claims = tomllib.loads((ROOT / "experiments/experiments.toml").read_text("utf-8"))[
        experiment
    ]["claims"]
    found, outcomes = ["not run"] * len(claims), []
    for number, claim in enumerate(claims):
        if "cannot" in claim:
            found[number] = "cannot be run here"
            continue
        sense, quantity, one, other = claim["evidence"][:4]
        a, b = (numbers().get((experiment, quantity, arm), {}) for arm in (one, other))
        difference = np.array(
            [np.subtract(a[seed], b[seed]) for seed in sorted(a) if seed in b]
        )
        if len(difference) > 1:
            p, mean = p_and_mean(difference)
            outcomes.append(
                (
                    p,
                    mean if sense == "larger" else -mean,
                    NEGLIGIBLE.get(quantity, 0),
                    number,
                )
            )
    tested = True
    for place, (p, mean, least, number) in enumerate(sorted(outcomes)):
        # Holm: the first that fails closes the rest
        tested = tested and p * (len(outcomes) - place) < 0.05
        certain = (
            "negligible"
            if abs(mean) < least
            else "confirmed"
            if mean > 0
            else "refuted"
        )
        found[number] = certain if tested else "undetectable"
    return [
        (claim["text"], verdict) for claim, verdict in zip(claims, found, strict=True)
    ]


@pytest.mark.parametrize("experiment", TABLES)
def test_the_page_has_the_verdicts_that_other_code_finds(experiment: str) -> None:
    title = tomllib.loads((ROOT / "experiments/experiments.toml").read_text("utf-8"))[
        experiment
    ]["title"]
    section = (
        (ROOT / "docs/reproduction.md")
        .read_text("utf-8")
        .partition(f"\n## {title}\n")[2]
        .partition("\n## ")[0]
    )
    page = re.findall(r"^\| (.+?) \| .*\*\*(.+?)\*\*", section, re.MULTILINE)
    assert page == verdicts(experiment)  # 78 of them, in all
