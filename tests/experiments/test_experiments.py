"""Verdicts on measured numbers, the table of experiments, and what the documents say of
the committed results.
"""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from experiments import claims
from experiments.claims import EXPERIMENTS, Claim, Evidence, chosen_experiments, judge
from experiments.findings import Finding, Findings, read_findings, write_findings
from experiments.measures import SAMPLERS, TABLES, noise_of_steps
from sage_fast.config.errors import ConfigError
from sage_fast.tools.effects import seed_effect

ROOT = Path(__file__).resolve().parents[2]


def values(
    arm: str, numbers: list[float], quantity: str = "q", width: float = 0.0
) -> list[Finding]:
    """One finding per seed; its value is the mean of its parts."""
    return [
        Finding(
            experiment="e",
            quantity=quantity,
            arm=arm,
            seed=seed,
            value=x,
            parts=(x - width, x, x + width),
        )
        for seed, x in enumerate(numbers)
    ]


FINDINGS = Findings(
    [
        *values("low", [0.0, 0.1, 0.2]),
        *values("high", [1.0, 1.1, 1.3]),
        *values("same", [0.1, 0.0, 0.2]),
        *values("low", [0.0, 0.1, 0.2], "area"),
        *values("one", [0.5]),
        *values("near", [0.0051, 0.1049, 0.205], "area"),
        *values("low", [0.0, 0.1, 0.2], "final_reward", 0.1),
        *values("high", [1.0, 1.1, 1.3], "final_reward", 0.1),
    ]
)


def claim(*evidence: Any) -> Claim:
    return Claim(experiment="e", key="k", text="t", evidence=evidence)


@pytest.mark.parametrize(
    ("evidence", "verdict"),
    [
        (("larger", "q", "high", "low"), "confirmed"),
        (("smaller", "q", "low", "high"), "confirmed"),
        (("larger", "q", "low", "high"), "refuted"),
        (("larger", "q", "same", "low"), "undetectable"),
        (("larger", "q", "absent", "low"), "not run"),
        (("larger", "q", "one", "low"), "not run"),
        (("larger", "area", "near", "low"), "negligible"),
        (("about", "q", "high", 1.2), "confirmed"),
        (("about", "q", "high", 1.6), "refuted"),
        (("within", "q", "high", 0.5, 2.0), "confirmed"),
        (("within", "q", "high", 0.0, 0.6), "refuted"),
        (("within", "q", "low", 0.05, 1.0), "undetectable"),
        (("within", "q", "absent", 0.0, 1.0), "not run"),
    ],
)
def test_a_verdict(evidence: tuple[Any, ...], verdict: str) -> None:
    assert judge([claim(*evidence)], FINDINGS)[0].verdict == verdict


def test_what_cannot_be_run_here_says_why() -> None:
    for experiment in EXPERIMENTS:
        for each in experiment.claims:
            assert bool(each.cannot) != bool(each.evidence), (experiment.key, each.key)
    judges = next(e for e in EXPERIMENTS if e.key == "judges")
    judged = judge(judges.claims, FINDINGS)
    assert {j.verdict for j in judged} == {"cannot be run here"}


def test_claims_of_one_table_are_adjusted_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    evidence = Evidence(ours="", effect=seed_effect([1.0, 1.7, 0.5, 1.2]))
    assert evidence.effect is not None and 0.0125 < evidence.effect.p < 0.05
    monkeypatch.setattr(
        claims, "EVIDENCE", {"given": lambda findings, experiment: evidence}
    )
    assert judge([claim("given")], FINDINGS)[0].verdict == "confirmed"
    assert {j.verdict for j in judge([claim("given")] * 4, FINDINGS)} == {
        "undetectable"
    }


def test_findings_are_read_as_they_were_written(tmp_path: Path) -> None:
    file = tmp_path / "r" / "results.jsonl"
    row = Finding(
        experiment="e",
        quantity="q",
        arm="a",
        value=1 / 3,
        seed=0,
        n=4,
        parts=(0.123456789,),
        commit="c",
    )
    seeds = [replace(row, seed=seed, value=seed / 2, parts=()) for seed in range(3)]
    other = replace(row, quantity="p", seed=None, parts=())
    write_findings(file, [row, seeds[0], other, *seeds[1:]])
    assert len(file.read_text().splitlines()) == 3
    rounded = replace(row, value=0.333333, parts=(0.123457,))
    assert list(read_findings(file).rows) == [
        rounded,
        *seeds,
        replace(other, value=0.333333),
    ]


def test_tiers_include_those_below_them() -> None:
    quick, standard, full = (
        chosen_experiments(tier) for tier in ("quick", "standard", "full")
    )  # type: ignore[arg-type]
    assert (
        {e.key for e in quick}
        < {e.key for e in standard}
        < {e.key for e in full}
        == {e.key for e in EXPERIMENTS}
    )
    assert not [training for e in quick for training in e.trainings()]
    assert [e.key for e in chosen_experiments("quick", ["fig8", "table1"])] == [
        "table1",
        "fig8",
    ]
    with pytest.raises(ConfigError, match="--only names fig5; choose among table1"):
        chosen_experiments("quick", ["fig5", "table1"])


def test_every_claim_asks_for_arms_that_its_experiment_has() -> None:
    """With every arm of an experiment measured, every one of its claims has a verdict."""
    for experiment in EXPERIMENTS:
        arms = (
            SAMPLERS
            if experiment.key == "base"
            else (experiment.arms or tuple(experiment.runs))
        )
        arms = (*arms, *(f"{arm} @ 0.04" for arm in experiment.runs))
        quantities = {
            each.evidence[1] for each in experiment.claims if len(each.evidence) > 1
        }
        rows = [
            Finding(
                experiment=experiment.key,
                quantity=quantity,
                arm=arm,
                seed=seed,
                value=seed + 0.5,
                parts=(0, 1),
            )
            for arm in arms
            for seed in (0, 1)
            for quantity in quantities
        ]
        if arms:
            judged = judge(experiment.claims, Findings(rows))
            assert {j.verdict for j in judged if not j.claim.cannot} == {
                "undetectable"
            }, experiment.key


def test_the_tables_say_what_is_known_of_the_samplers() -> None:
    rows = Findings(
        [row for experiment in TABLES for row in noise_of_steps(experiment)]
    )
    refuted = {
        f"{e.key}/{j.claim.key}"
        for e in EXPERIMENTS
        if e.key in TABLES
        for j in judge(e.claims, rows)
        if j.verdict != "confirmed"
    }
    assert refuted == {"fig1a/any_margin", "fig9/first_flow"}
    assert rows.mean("fig1a", "high_noise_variance", "sage_grpo") == pytest.approx(
        0.888, abs=5e-4
    )
    firsts = [
        rows.mean("fig9", "first", f"sage_grpo, margin={m}") ** 2
        for m in ("0.001", "0.003", "0.01")
    ]
    assert firsts == pytest.approx([0.58, 0.31, 0.008], abs=6e-3)


def test_the_committed_results_say_what_the_documents_say() -> None:
    """The figures of docs/algorithm.md (section 5)."""
    found = read_findings(ROOT / "docs/results/reproduction.jsonl")
    verdicts = {
        f"{e.key}/{j.claim.key}": j.verdict
        for e in EXPERIMENTS
        for j in judge(e.claims, found)
    }
    assert verdicts["base/exact_reward"] == verdicts["base/exact_nearer"] == "confirmed"
    assert (
        verdicts["samplers/exact"]
        == verdicts["samplers/cps"]
        == verdicts["longer/reward"]
        == "undetectable"
    )

    def by_seed(experiment: str, quantity: str, arm: str) -> list[float]:
        return [
            row.value
            for _, row in sorted(found.by_seed(experiment, quantity, arm).items())
        ]

    weak, strong = (
        by_seed("kl_share", "kl_share", f"kl-weight-{weight:g}")
        for weight in (1e-5, 0.03)
    )
    position = by_seed("samplers", "kl_position", "sage_grpo")
    assert (min(weak), max(weak)) == pytest.approx((3e-4, 4e-4), abs=5e-5)
    assert (min(strong), max(strong)) == pytest.approx((0.4, 0.6), abs=0.06)
    assert (min(position), max(position)) == pytest.approx((3e-3, 3e-2), rel=0.2)


def test_a_figure_of_the_paper_stands_with_its_place_there() -> None:
    for experiment in EXPERIMENTS:
        for each in experiment.claims:
            assert not each.reported or each.source, (experiment.key, each.key)
            assert not each.source or re.search(
                r"(Table|Figure|Section|Eq\.) \d", each.source
            ), each.source
