"""The measure of levers: estimators on gradients of known mean and variance, costs, resume, and the page."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from sage_fast.commands.cli import main
from sage_fast.commands.efficiency import DEFAULT_CONFIG, PRICED
from sage_fast.config.load import dump_config, load_config
from sage_fast.config.schema import RunConfig
from sage_fast.planning import signal as planned
from sage_fast.planning.devices import DEVICES
from sage_fast.planning.estimate import make_plan
from sage_fast.study import lever_study, measures
from sage_fast.study.combinations import COMBINATIONS, REFERENCE, pflop_per_estimate
from sage_fast.study.efficiency_page import PAGE, RESULTS, draw_curves, draw_table, render, summary
from sage_fast.study.estimators import (
    Grams,
    bias,
    cosine,
    flat,
    jackknife,
    kept,
    kept_at_the_same_mean,
    mean_product,
    quantities,
    signal,
)
from sage_fast.study.findings import Finding, Findings, read_findings
from sage_fast.study.lever_study import CURVES, TABLE, EfficiencyStudy, gain, is_told, ranking
from sage_fast.study.runner import Job, Outcome
from sage_fast.tools.curves import to_svg

MakeRun = Callable[..., RunConfig]
ROOT = Path(__file__).resolve().parents[2]
COMMITTED = read_findings(ROOT / "docs" / RESULTS)


# ------------------------------------------------------------------------------------------ estimators

MEAN = torch.tensor([0.6, 0.0, 0.8], dtype=torch.float64).repeat(8) / 8**0.5  # |E r|^2 = 1
SHIFTED = MEAN + torch.tensor([0.0, 0.5, 0.0], dtype=torch.float64).repeat(8) / 8**0.5  # |E a - E r|^2 = 0.25
TRUTH = {
    "signal": 1.25 / (24 * 0.5**2),
    "bias": 0.25,
    "cosine": 1.25**-0.5,
    "kept": 0.3**2 / 0.5**2,
    "noise": 0.5**2 / 0.3**2,
}


def paired_estimates(seed: int, n: int = 24) -> Grams:
    """Reference: noise 0.3 per number. Lever: another mean, and twice the variance and more, a part of it in common
    with the first of the reference's."""
    generator = torch.Generator().manual_seed(seed)
    common, own, more = (torch.randn(n, 24, generator=generator, dtype=torch.float64) for _ in range(3))
    return Grams.of(SHIFTED + 0.3 * common + 0.4 * own, MEAN + 0.3 * torch.cat([common, more[:12]]))


@pytest.fixture(scope="module")
def tables() -> list[dict[str, tuple[float, float]]]:
    return [quantities(paired_estimates(seed), same_mean=False) for seed in range(100)]


@pytest.mark.parametrize("name", TRUTH)
def test_estimators_hit_the_truth_and_their_intervals_cover_it(
    tables: list[dict[str, tuple[float, float]]], name: str
) -> None:
    values, errors = (torch.tensor([table[name][i] for table in tables]) for i in range(2))
    standard_error = float(values.std()) / len(values) ** 0.5
    assert abs(float(values.mean()) - TRUTH[name]) < 4 * standard_error
    assert float(errors.mean()) == pytest.approx(float(values.std()), rel=0.25)
    covered = ((values - TRUTH[name]).abs() < 2 * errors).double().mean()
    assert 0.88 <= covered <= 1.0


def test_noise_alone_is_no_signal() -> None:
    """|mean|^2 would be tr Var / n, here 16 / 3."""
    generator = torch.Generator().manual_seed(0)
    samples = [torch.randn(3, 16, generator=generator, dtype=torch.float64) for _ in range(200)]
    found = torch.tensor([mean_product(a @ a.T) for a in samples])
    assert abs(found.mean()) < 4 * found.std() / 200**0.5 < 2


def test_a_lever_that_changes_nothing_keeps_everything() -> None:
    generator = torch.Generator().manual_seed(1)
    r = MEAN + torch.randn(8, 24, generator=generator, dtype=torch.float64)
    same, louder = Grams.of(r, r), Grams.of(2 * r, r)
    assert jackknife(bias, same) == pytest.approx((0, 0), abs=1e-12)
    assert jackknife(kept, same) == pytest.approx((1, 0), abs=1e-12)
    # Signal does not depend on the scale, and neither does the part of it that is kept; a bias does.
    assert kept(louder) == pytest.approx(1) and cosine(louder) == pytest.approx(cosine(same))
    assert signal(louder) == pytest.approx(signal(same)) and bias(louder) == pytest.approx(1)
    assert kept_at_the_same_mean(louder) == pytest.approx(0.25)


def test_long_gradients_keep_their_products() -> None:
    generator = torch.Generator().manual_seed(2)
    a, b = ({"x": torch.randn(400, 50, generator=generator), "y": torch.ones(7)} for _ in range(2))
    assert torch.equal(flat(a), torch.cat([a["x"].flatten(), a["y"]]))
    short, whole = (torch.stack([flat(gradient, size) for gradient in (a, b)]) for size in (4096, 2**20))
    assert short.shape == (2, 4096)
    torch.testing.assert_close(short @ short.T, whole @ whole.T, rtol=0.06, atol=1200)


# ------------------------------------------------------------------------------------------ costs


def test_steps_are_shares_of_the_configuration(tiny_run: MakeRun) -> None:
    config = tiny_run()
    by_name = {combination.name: combination for combination in COMBINATIONS}
    assert by_name["SDE window"].overrides(config) == ["--rollout.sde_window.size=1"]
    assert by_name["fewer steps"].overrides(config) == ["--rollout.num_steps=2"]
    assert by_name["no KL, single pass"].overrides(config, two_phase=True) == ["--objective.kl_mode=none"]


@pytest.mark.parametrize("preset", [DEFAULT_CONFIG, [PRICED]], ids=" ".join)
def test_every_combination_is_a_configuration(preset: list[str]) -> None:
    assert len(COMBINATIONS) >= 12 and COMBINATIONS[0].name == REFERENCE
    config = load_config(preset)
    for combination in COMBINATIONS:
        load_config(preset, combination.overrides(config))


@pytest.mark.slow
def test_costs_are_those_of_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    name = "KL at a quarter of the steps"
    plan = make_plan(
        load_config("hv15_480p_lora_8gpu", ["--objective.kl_position_fraction=0.25"]), DEVICES["h100"], gpus=8
    )
    flops = 16 * sum(phase.cost.flops for phase in plan.phases)
    (combination,) = [c for c in COMBINATIONS if c.name == name]
    assert pflop_per_estimate(combination, priced=["hv15_480p_lora_8gpu"], videos=16) == pytest.approx(flops / 1e15)
    # A forward per visit at least: 20 of the rollout, 4.5 of the anchor, and 3 times 20 of the update, guided.
    assert flops > 16 * 2 * (20 + 4.5 + 60) * plan.forward.total
    assert COMMITTED.mean(TABLE, "pflop", name) == pytest.approx(flops / 1e15, rel=0.05)


# ------------------------------------------------------------------------------------------ the study


def made_up(arms: dict[str, tuple[float, float]], signal: float = 0.3) -> list[Finding]:
    """kept and pflop by arm."""
    rows = []
    for arm, (share, pflop) in arms.items():
        values = {"noise": 2.0, "signal": signal, "bias": 0.1, "cosine": 0.9, "kept": share}
        rows += [Finding(experiment=TABLE, quantity=q, arm=arm, value=v, stderr=0.1, n=24) for q, v in values.items()]
        rows.append(Finding(experiment=TABLE, quantity="pflop", arm=arm, value=pflop))
    return rows


def test_levers_are_ranked_by_signal_per_flop(tiny_run: MakeRun, tmp_path: Path) -> None:
    arms = {REFERENCE: (1.0, 200.0), "uniform pairs": (0.5, 120.0), "fast": (0.8, 80.0), "SDE window": (0.4, 50.0)}
    findings = Findings(made_up(arms))
    assert "| fast | unbiased | 80 | 3 ± 1 | 2.00 ± 0.10 | 0.10 ± 0.10 |" in render(findings)
    assert ranking(findings) == ["fast", "SDE window", "uniform pairs"]
    assert gain(findings, "fast") == pytest.approx((2.0, 0.25))
    file = tmp_path / "new.yaml"
    file.write_text(dump_config(tiny_run("--training.num_updates=20")))
    study = EfficiencyStudy(tmp_path / "s", [str(file)], [], count=3, updates=1, priced=[])
    curves = study.curves(findings)
    assert [t.arm for t in curves[:4]] == ["reference-recipe", "fast", "SDE-window", "uniform-pairs"]
    assert len(curves) == 4 * len(lever_study.SEEDS)
    # As many FLOPs each.
    assert [study.trainings.config(t).training.num_updates for t in curves[:4]] == [20, 48, 80, 32]


def test_a_figure_that_is_not_resolved_is_a_dash() -> None:
    rows = made_up({REFERENCE: (1.0, 200.0), "uniform pairs": (0.5, 120.0), "SDE window": (0.1, 50.0)})
    findings = Findings([replace(row, stderr=1.1) if row.quantity == "cosine" else row for row in rows])
    page = render(findings)
    assert "| 0.10 ± 0.10 | – | 2.500 ± 0.833 | 0.50 ± 0.10 | 0.83 ± 0.17x |" in page
    assert "| 0.10 ± 0.10 | – | 6.000 ± 2.000 | – | – |" in page
    assert "| 0.10 ± 0.10 | 0.90 ± 0.10 |" in render(Findings(rows))
    assert [line.split()[-1] for line in summary(findings).splitlines()[2:-1]] == ["0.17x", "–"]
    (labels,) = [axes.get_yticklabels() for axes in draw_table(findings).axes]
    assert [label.get_text() for label in labels] == ["uniform pairs"]
    # However much is kept: along a mean that is lost in the noise it says nothing.
    high = {REFERENCE: (1.0, 200.0), "uniform pairs": (0.5, 120.0), "SDE window": (9.0, 50.0)}
    seen, lost = (Findings(made_up(high, whole)) for whole in (0.3, 0.1))
    assert is_told(seen, "SDE window") and ranking(seen) == ["SDE window", "uniform pairs"]
    assert not is_told(lost, "SDE window") and ranking(lost) == ["uniform pairs", "SDE window"]
    assert "| > 3 | 2.00 ± 0.10 |" in render(lost)


def test_the_page_has_trainings_where_there_are_some() -> None:
    arms = {REFERENCE: (1.0, 200.0), "fast": (0.8, 80.0)}
    rows = made_up(arms)
    assert "Reward at equal compute" not in render(Findings(rows))
    for seed in range(3):
        for arm, lead in (("reference-recipe", 0.0), ("fast", 0.5)):
            parts = (1.0 + lead + 0.01 * seed, 2.0 + lead)
            common = {"experiment": CURVES, "arm": arm, "seed": seed, "parts": parts}
            rows.append(Finding(quantity="final_reward", value=sum(parts) / 2, **common))  # type: ignore[arg-type]
            for quantity in ("area", "learning"):
                rows.append(Finding(quantity=quantity, value=1.0, **common))  # type: ignore[arg-type]
    findings = Findings(rows)
    assert "| fast | 2 | 2.005 | +0.5 (+0.5 .. +0.5) | 3 |" in render(findings)
    for draw in (draw_table, draw_curves):
        assert to_svg(draw(findings)) == to_svg(draw(findings))


def test_the_committed_page_and_factors_are_made_of_the_committed_results() -> None:
    """`sage-fast efficiency --publish docs` mends the page; the factors of planning/signal.py are typed."""
    assert render(COMMITTED) == (ROOT / "docs" / PAGE).read_text("utf-8")
    noise = {row.arm: row.value for row in COMMITTED.select(TABLE, "noise")}
    assert len(noise) >= 12
    assert {name: round(1 / noise[name], 2) for name in planned.KEPT} == planned.KEPT
    pictures = {path.name for path in (ROOT / "docs/images/efficiency").iterdir()}
    assert pictures >= {"table.png", "table.svg"}


def run_here(jobs: Sequence[Job], processes: int, tell: Callable[[str], None]) -> Outcome:
    """`run_jobs` without the processes, whose start takes longer than what they do here."""
    programs: dict[str, Callable[[Sequence[str]], int]] = {"sage_fast": main, "sage_fast.study.measures": measures.main}
    assert all(programs[job.command[2]](job.command[3:]) == 0 for job in jobs)
    return Outcome(failed=(), stopped=False)


@pytest.mark.slow
def test_a_half_run_table_goes_on_and_trains(
    tiny_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kept_names = (REFERENCE, "uniform pairs", "SDE window")
    monkeypatch.setattr(lever_study, "COMBINATIONS", [c for c in COMBINATIONS if c.name in kept_names])
    monkeypatch.setattr(lever_study, "SEEDS", (0, 1))
    monkeypatch.setattr(lever_study, "run_jobs", run_here)
    file = tmp_path / "new.yaml"
    file.write_text(dump_config(tiny_run("--evaluation.num_samples=0")))
    output = tmp_path / "study"
    words = ["efficiency", str(file), "--estimates", "4", "--updates", "2", "--output", str(output)]
    assert main(words) == 0
    measures = {path.name: path.stat().st_mtime_ns for path in (output / "measures").glob("*.json")}
    assert len(measures) == 3 and "SDE window" in capsys.readouterr().out
    rows = read_findings(output / "results.jsonl")
    assert rows.mean(TABLE, "bias", REFERENCE) == 0 and rows.mean(TABLE, "kept", REFERENCE) == 1
    assert rows.mean(TABLE, "kept", "uniform pairs") < 1 < rows.mean(TABLE, "noise", "uniform pairs")
    whole, share = rows.mean(TABLE, "signal", REFERENCE), rows.mean(TABLE, "kept", "uniform pairs")
    assert rows.mean(TABLE, "signal", "uniform pairs") == pytest.approx(whole * share, rel=1e-4)
    # What is missing is measured again, with the same numbers, and nothing else is.
    gone = output / "measures" / "uniform-pairs.json"
    before = json.loads(gone.read_text())["findings"]
    gone.unlink()
    assert main([*words, "--train"]) == 0
    assert json.loads(gone.read_text())["findings"] == before
    assert all((output / "measures" / n).stat().st_mtime_ns == t for n, t in measures.items() if n != gone.name)
    page = (output / PAGE).read_text("utf-8")
    assert "## Reward at equal compute" in page and page == render(read_findings(output / "results.jsonl"))
    assert main([*words[:2], "--estimates", "5", "--output", str(output)]) == 2
    assert "holds results of another configuration" in capsys.readouterr().err
