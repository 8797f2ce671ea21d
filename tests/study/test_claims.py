"""How measured numbers become verdicts, and what the table of experiments says."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from sage_fast.config.errors import ConfigError
from sage_fast.config.load import load_config
from sage_fast.study.claims import Claim, Evidence, judge, larger, smaller, within
from sage_fast.study.experiments import DISTANCE, EXPERIMENTS, chosen_experiments, needs_probe
from sage_fast.study.findings import Finding, Findings, read_findings, write_findings
from sage_fast.study.measures import SAMPLERS, TABLES
from sage_fast.study.training_arms import ARMS, TWICE
from sage_fast.tools.effects import seed_effect

ROOT = Path(__file__).resolve().parents[2]


def values(arm: str, numbers: list[float], quantity: str = "q", parts: bool = False) -> list[Finding]:
    """One finding per seed; with parts, its value is their mean."""
    return [
        Finding(
            experiment="e",
            quantity=quantity,
            arm=arm,
            seed=seed,
            value=number,
            parts=(number - 0.1, number, number + 0.1) if parts else (),
        )
        for seed, number in enumerate(numbers)
    ]


FINDINGS = Findings(
    [
        *values("low", [0.0, 0.1, 0.2]),
        *values("high", [1.0, 1.1, 1.3]),
        *values("same", [0.1, 0.0, 0.2]),
        *values("low", [0.0, 0.1, 0.2], "final_reward", parts=True),
        *values("high", [1.0, 1.1, 1.3], "final_reward", parts=True),
    ]
)
LOW, HIGH, SAME = ("e", "q", "low"), ("e", "q", "high"), ("e", "q", "same")


def claim(measure: object) -> Claim:
    return Claim(key="k", text="t", measure=measure)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("measure", "verdict"),
    [
        (larger(HIGH, LOW), "confirmed"),
        (smaller(LOW, HIGH), "confirmed"),
        (larger(LOW, HIGH), "refuted"),
        (larger(SAME, LOW), "undetectable"),
        (larger(("e", "q", "absent"), LOW), "not run"),
        (within(HIGH, 0.5, 2.0), "confirmed"),
        (within(HIGH, 0.0, 0.6), "refuted"),
        (within(LOW, 0.05, 1.0), "undetectable"),
        (within(("e", "q", "absent"), 0.0, 1.0), "not run"),
        (lambda findings: Evidence(ours="", holds=True), "confirmed"),
        (lambda findings: Evidence(ours="", holds=False), "refuted"),
    ],
)
def test_a_verdict(measure: object, verdict: str) -> None:
    assert judge([claim(measure)], FINDINGS)[0].verdict == verdict


def test_the_numbers_stand_in_the_order_of_the_sentence() -> None:
    assert larger(HIGH, LOW, 2)(FINDINGS).ours == "1.13 and 0.10"
    assert smaller(LOW, HIGH, 2)(FINDINGS).ours == "0.10 and 1.13"


def test_claims_of_one_table_are_adjusted_together() -> None:
    evidence = Evidence(ours="", effect=seed_effect([1.0, 1.7, 0.5, 1.2]))
    assert evidence.effect is not None and 0.0125 < evidence.effect.p < 0.05
    claims = [claim(lambda findings: evidence)] * 4
    assert judge(claims[:1], FINDINGS)[0].verdict == "confirmed"
    together = judge(claims, FINDINGS)
    assert {j.verdict for j in together} == {"undetectable"} and together[0].p == pytest.approx(4 * evidence.effect.p)


def test_scores_of_prompts_are_compared_over_prompts_too() -> None:
    over_both = larger(("e", "final_reward", "high"), ("e", "final_reward", "low"))(FINDINGS).effect
    over_seeds = larger(HIGH, LOW)(FINDINGS).effect
    assert over_both is not None and over_seeds is not None
    assert over_both.mean == pytest.approx(over_seeds.mean) and over_both.stderr >= 0.999 * over_seeds.stderr


def test_findings_are_read_as_they_were_written(tmp_path: Path) -> None:
    file = tmp_path / "r" / "results.jsonl"
    row = Finding(experiment="e", quantity="q", arm="a", value=1 / 3, seed=0, n=4, parts=(0.123456789,), commit="c")
    write_findings(file, [row, replace(row, seed=None, parts=())])
    first, second = read_findings(file).rows
    assert first == replace(row, value=0.333333, parts=(0.123457,)) and second.seed is None
    file.write_text(file.read_text() + '{"experiment": "e"}\n')
    with pytest.raises(ConfigError, match=r"results\.jsonl:3 is no finding"):
        read_findings(file)


def test_tiers_include_those_below_them() -> None:
    quick, standard, full = (chosen_experiments(tier) for tier in ("quick", "standard", "full"))  # type: ignore[arg-type]
    assert [e.key for e in quick] == ["table1", "fig1a", "fig9", "fig2", "base", "fig4"]
    assert {e.key for e in quick} < {e.key for e in standard} < {e.key for e in full} == {e.key for e in EXPERIMENTS}
    assert not needs_probe(quick) and needs_probe(standard)
    assert not [training for e in quick for training in e.trainings()]
    assert [e.key for e in chosen_experiments("quick", ["fig8", "table1"])] == ["table1", "fig8"]
    with pytest.raises(ConfigError, match="--only names fig5; choose among table1"):
        chosen_experiments("quick", ["fig5", "table1"])


def test_every_training_of_the_table_has_a_configuration_of_its_own() -> None:
    found: dict[str, str] = {}
    for arm, make in ARMS.items():
        training = make(3)
        assert (training.arm, training.seed) == (arm, 3)
        share = [] if training.kl_share is None else [f"--kl_weight.maximum={training.kl_share}"]
        files = [ROOT / "configs/toy_cpu.yaml", ROOT / "configs/study_cpu.yaml"]
        config = repr(load_config(files, [*training.overrides, *share]))
        assert config not in found, (arm, found[config])
        found[config] = arm


QUANTITIES = (
    *("final_reward", "final_overall", "final_aligned", f"final_{DISTANCE}", "area", "unsteadiness"),
    *("reward", "group_std", DISTANCE, "kl_share"),
)


def test_every_claim_asks_for_arms_that_its_experiment_has() -> None:
    """With every arm of an experiment measured, every one of its claims has a verdict."""
    for experiment in EXPERIMENTS:
        arms = SAMPLERS if experiment.key == "base" else experiment.arms
        if not arms:
            continue
        rows = [
            Finding(
                experiment=experiment.key, quantity=quantity, arm=arm, seed=seed, value=seed + 0.5, parts=(0.0, 1.0)
            )
            for arm in arms
            for seed in (0, 1)
            for quantity in QUANTITIES
        ]
        assert {j.verdict for j in judge(experiment.claims, Findings(rows))} == {"undetectable"}, experiment.key


def test_the_tables_say_what_is_known_of_the_samplers() -> None:
    rows = Findings([row for make in TABLES.values() for row in make()])
    verdicts = {
        f"{e.key}/{j.claim.key}": j.verdict for e in EXPERIMENTS if e.key in TABLES for j in judge(e.claims, rows)
    }
    assert verdicts == {
        "table1/first": "refuted",
        "table1/later": "confirmed",
        "table1/last": "confirmed",
        "table1/stable": "confirmed",
        "fig1a/high_noise": "confirmed",
        "fig1a/steady": "refuted",
        "fig9/stable": "confirmed",
        "fig9/margin": "confirmed",
    }
    # Figures of docs/algorithm.md.
    assert rows.mean("fig1a", "high_noise_variance", "sage_grpo") == pytest.approx(0.888, abs=5e-4)
    firsts = [rows.mean("fig9", "first", f"sage_grpo, margin={m}") ** 2 for m in ("0.001", "0.003", "0.01")]
    assert firsts == pytest.approx([0.58, 0.31, 0.008], abs=6e-3)


def test_the_committed_results_say_what_the_documents_say_of_trained_samplers() -> None:
    """docs/algorithm.md, section 5: better before training, not told apart after it."""
    found = read_findings(ROOT / "docs/results/reproduction.jsonl")
    before, after = (
        {judgement.claim.key: judgement.verdict for judgement in judge(experiment.claims, found)}
        for experiment in chosen_experiments("quick", ["base", "samplers"])
    )
    assert before["exact_reward"] == before["exact_nearer"] == "confirmed"
    assert after == {"exact": "undetectable", "cps": "undetectable"}
    assert found.seeds("samplers") == [0, 1, 2, 3, 4, 5]


def test_the_seeds_of_the_readme_are_those_of_the_committed_results() -> None:
    """The demo's recipe is the study's, and SAGE is its sampler."""
    found = read_findings(ROOT / "docs/results/reproduction.jsonl")
    row = re.compile(r"^\| (\d) \| .* \| (\d+ %) \| .* → ([\d.]+) \| .* → ([\d.]+) \|$", re.M)
    shown = row.findall((ROOT / "README.md").read_text("utf-8"))
    assert [seed for seed, *_ in shown] == ["0", "1", "2"]
    for seed, *figures in shown:
        aligned, reward, distance = (
            found.by_seed("samplers", f"final_{score}", "sage_grpo")[int(seed)].value
            for score in ("aligned", "reward", "manifold_distance")
        )
        assert figures == [f"{aligned:.0%}".replace("%", " %"), f"{reward:.3f}", f"{distance:.4f}"]


def test_what_is_said_of_longer_runs_and_of_the_kl_is_in_the_committed_results() -> None:
    found = read_findings(ROOT / "docs/results/reproduction.jsonl")

    def by_seed(experiment: str, quantity: str, arm: str) -> list[float]:
        return [row.value for _, row in sorted(found.by_seed(experiment, quantity, arm).items())]

    def said(file: str, text: str) -> bool:
        return text in " ".join((ROOT / file).read_text("utf-8").split())

    aligned = by_seed("longer", "final_aligned", TWICE)
    distance = by_seed("longer", f"final_{DISTANCE}", TWICE)
    shares = f"{100 * min(aligned):.0f} to {100 * max(aligned):.0f} %"
    assert said("README.md", f"six seeds show {shares}, but with seed 2 the distance is then {distance[2]:.3f}.")
    assert said("docs/tutorials/demo.md", f"six seeds showed what was asked in {shares} of the videos, but with one")
    # Against the base model's 3.024 and 0.0228 of README's table.
    grown = [each / 0.0228 for each in distance]
    assert len(grown) == 6 and grown[2] == pytest.approx(1.5, abs=0.05) and sorted(grown)[4] < 1.25
    assert by_seed("longer", "final_reward", TWICE)[2] == pytest.approx(3.024, abs=0.01)
    (experiment,) = chosen_experiments("quick", ["longer"])
    assert {j.claim.key: j.verdict for j in judge(experiment.claims, found)}["reward"] == "undetectable"

    weak, strong = (by_seed("kl_share", "kl_share", f"kl-weight-{weight:g}") for weight in (1e-5, 0.03))
    position = by_seed("samplers", "kl_position", "sage_grpo")
    one_digit = [f"{value:.0e}".replace("e-0", "e-") for value in (min(weak), max(weak), min(position), max(position))]
    assert said("docs/algorithm.md", f"has {one_digit[0]} to {one_digit[1]} of the surrogate's norm")
    assert said("docs/algorithm.md", f"0.03, at which the share is {min(strong):.1f} to {max(strong):.1f}.")
    assert said("docs/algorithm.md", f"position KL of the demo reaches {one_digit[2]} to {one_digit[3]}, by seed")


def test_no_sentence_of_the_table_breaks_the_page() -> None:
    for experiment in EXPERIMENTS:
        for text in (experiment.title, *(c.text for c in experiment.claims)):
            assert not re.search(r"[|\n<>]", text), text
        assert len({c.key for c in experiment.claims}) == len(experiment.claims)
