"""Jobs side by side, trainings that are not repeated, and results of a folder as
findings and a page.
"""

import inspect
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from experiments import claims, measures
from experiments.__main__ import main, publish
from experiments.claims import EXPERIMENTS, Experiment, Training
from experiments.document import fill_tables, render
from experiments.drawings import draw_experiment
from experiments.findings import COST, Finding, Findings, read_findings, write_findings
from experiments.runner import Study, run_jobs
from sage_fast.config.errors import ConfigError
from sage_fast.config.load import dump_config
from sage_fast.config.schema import RunConfig
from sage_fast.run.plots import figure_file
from tests.commands.programs import run_module
from tests.made_runs import make_run

MakeRun = Callable[..., RunConfig]
ROOT = Path(__file__).resolve().parents[2]


def test_jobs_run_side_by_side_and_a_failed_one_leaves_the_others(
    tmp_path: Path,
) -> None:
    scripts = {"broken": "echo why it broke; exit 3"}
    for name, other in (("a", "b"), ("b", "a")):
        scripts[name] = (
            f"cd {tmp_path}; touch {name}; until [ -e {other} ]; do sleep 0.01; done"
        )
    said: list[str] = []
    jobs = {name: ["bash", "-c", script] for name, script in scripts.items()}
    assert run_jobs(jobs, tmp_path / "logs", 2, said.append) == ["broken"]
    (failure,) = [text for text in said if "broken" in text]
    assert "status 3" in failure and "why it broke" in failure


@pytest.mark.signals
def test_ctrl_c_reaches_every_job_once_and_starts_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also a job that is being started."""
    # No child in the foreground: a signal that met bash while `touch` ended was lost on
    # a busy machine.
    script = (
        "cd {0}; trap 'echo x >> saved-{1}; kill $!; exit' INT; sleep 60 & : > {1}; "
        "wait"
    )
    jobs = {
        name: ["bash", "-c", script.format(tmp_path, name)]
        for name in ("a", "b", "never")
    }
    begin = subprocess.Popen.__init__

    def start(job: Any, command: list[str], **options: Any) -> None:
        begin(job, command, **options)
        if command == jobs["b"]:
            while not ((tmp_path / "a").exists() and (tmp_path / "b").exists()):
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(subprocess.Popen, "__init__", start)
    with pytest.raises(KeyboardInterrupt):
        run_jobs(jobs, tmp_path / "logs", 2, lambda text: None)
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "a",
        "b",
        "logs",
        "saved-a",
        "saved-b",
    ]
    assert (
        (tmp_path / "saved-a").read_text()
        == (tmp_path / "saved-b").read_text()
        == "x\n"
    )


# --------------------------------------------------------------------------------------
# measurements


def test_every_measurement_takes_the_words_that_start_it_and_writes_where_the_study_looks(
    study: Study, monkeypatch: pytest.MonkeyPatch
) -> None:
    def found(
        measure: Callable[..., object],
        config: RunConfig,
        *,
        seed: int,
        **arguments: Any,
    ) -> Iterator[Finding]:
        inspect.signature(measure).bind(config, seed=seed, **arguments)
        yield Finding(
            experiment="e",
            quantity="q",
            arm="a",
            seed=seed,
            value=float(config.training.num_updates),
        )

    stubs = {
        name: partial(found, measure) for name, measure in measures.MEASURES.items()
    }
    monkeypatch.setattr(measures, "MEASURES", stubs)
    wanted = {
        name: seeds for e in EXPERIMENTS for name, seeds in e.measurements().items()
    }
    jobs = study.missing_measurements(EXPERIMENTS)
    assert jobs.keys() == wanted.keys() and len(jobs) > 20
    for name, (program, option, module, *words) in jobs.items():
        assert (program, option, module) == (sys.executable, "-m", measures.__name__)
        measures.main(words)
        *rows, cost = study.measured(name)
        assert [(row.seed, row.value) for row in rows] == [
            (seed, 4) for seed in wanted[name]
        ] and cost.quantity == COST
    assert not study.missing_measurements(EXPERIMENTS)


# --------------------------------------------------------------------------------------
# trainings

SAGE, CPS = (
    Training(arm=name, overrides=(f"--rollout.sde_type={name}",), seed=0)
    for name in ("sage_grpo", "cps")
)


@pytest.fixture
def study(tmp_path: Path) -> Study:
    return Study(tmp_path, ["configs/toy_cpu.yaml"], ["--training.num_updates=4"])


def test_a_training_is_finished_once_its_last_update_is_evaluated(study: Study) -> None:
    assert not study.is_finished(SAGE)
    folder = make_run(study.folder / "trainings" / SAGE.name)
    assert study.is_finished(SAGE)
    (folder / "evaluation" / "result.json").unlink()
    assert not study.is_finished(SAGE)


def test_results_of_another_configuration_or_base_model_are_refused(
    study: Study,
) -> None:
    make_run(study.folder / "trainings" / CPS.name)  # sage_grpo, where cps should be
    with pytest.raises(
        ConfigError,
        match=r"trained with rollout\.sde_type 'sage_grpo', and the study now has 'cps'",
    ):
        study.is_finished(CPS)
    row = Finding(
        experiment="base",
        quantity="reward",
        arm="cps",
        value=1.0,
        settings="of another",
    )
    write_findings(study.folder / "measures" / "base-seed-0.jsonl", [row])
    with pytest.raises(ConfigError, match="is of another configuration"):
        study.findings()
    (study.folder / "study.json").write_text('{"base": "another"}')
    with pytest.raises(ConfigError, match="results of another base model"):
        study.begin()


def test_an_adapter_is_part_of_the_base_model(
    tiny_run: MakeRun, finished_run: Path, tmp_path: Path
) -> None:
    def begin(update: int) -> None:
        lora = finished_run / f"checkpoints/update-{update:06d}/lora"
        file = tmp_path / f"{update}.yaml"
        file.write_text(dump_config(tiny_run(f"--model.adapter={lora}")))
        Study(tmp_path / "study", [str(file)]).begin()

    begin(1)
    begin(1)
    (tmp_path / "study/trainings").mkdir()
    with pytest.raises(ConfigError, match="results of another base model"):
        begin(2)


def test_findings_of_a_training(study: Study) -> None:
    make_run(
        study.folder / "trainings" / SAGE.name, final=[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    )
    rows = {row.quantity: row for row in study.trained(SAGE, "e")}
    reward = rows["final_reward"]
    assert (reward.value, reward.n, reward.parts) == (
        3.5,
        6,
        (1.0, 2.0, 3.0, 4.0, 5.0, 6.0),
    )
    assert reward.stderr == pytest.approx((3.5 / 6) ** 0.5)
    assert rows["area"].value == pytest.approx(0.25) and rows[
        "area"
    ].parts == pytest.approx((0.1, 0.2, 0.3, 0.4))
    assert (
        rows["unsteadiness"].value == pytest.approx(0, abs=1e-12)
        and rows[COST].value == 8.0
    )
    assert (reward.version, reward.torch, reward.commit) == (
        "1.2",
        "2.x",
        "c" * 40,
    ) and len(reward.settings) == 8


def test_commands_for_a_cluster(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        "--commands",
        "--output_dir",
        str(tmp_path / "s"),
        "--config",
        "hv15_480p_lora_8gpu",
    ]
    assert main([*words, "--only", "samplers", "--data.shuffle=false"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 18 and not (tmp_path / "s").exists()
    assert lines[0].startswith("sage-fast train hv15_480p_lora_8gpu --output_dir=")
    assert "--seed=0 --data.shuffle=false --rollout.sde_type=sage_grpo" in lines[0]
    assert main([*words, "--only", "longer"]) == 0
    assert not capsys.readouterr().out, "its manifold is not known"


# --------------------------------------------------------------------------------------
# a study


def test_the_command_writes_and_publishes_page_results_and_figures(
    tiny_run: MakeRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "new.yaml"
    file.write_text(dump_config(tiny_run()))
    output = tmp_path / "study"
    docs = tmp_path / "docs"
    before = made_up("updates")
    write_findings(docs / "results/reproduction.jsonl", before)
    (docs / "objectives.md").write_text(
        "<!-- study updates: begin -->\nold\n<!-- study updates: end -->\n"
    )
    words = [
        "--only",
        "table1,fig1a,fig9",
        "--output_dir",
        str(output),
        "--publish",
        str(docs),
    ]
    assert main([*words, "--config", str(file)]) == 0
    assert (
        "refuted       So it does at a margin of 0.001. [1.163 and 0.990]"
        in capsys.readouterr().out
    )
    found = read_findings(docs / "results/reproduction.jsonl")
    assert {row.experiment for row in found.rows} == {
        "table1",
        "fig1a",
        "fig9",
        "updates",
    }
    assert found.by_seed("updates", "area", "updates-two_phase")[
        1
    ].value == pytest.approx(0.1)
    page = (docs / "reproduction.md").read_text("utf-8")
    assert render(found) == page != (output / "reproduction.md").read_text("utf-8")
    assert "| 2 of 6 |" in page and "## Not run yet" in page
    assert "| updates-two_phase | 0.050 ± 0.050 |" in (
        docs / "objectives.md"
    ).read_text("utf-8")
    pictures = sorted(path.name for path in (docs / "images/reproduction").iterdir())
    assert pictures == [
        f"{key}.{kind}"
        for key in ("fig1a", "fig9", "table1", "updates")
        for kind in ("png", "svg")
    ]


def test_publishing_an_arm_leaves_other_arms_and_seeds(tmp_path: Path) -> None:
    before = made_up("updates")
    write_findings(tmp_path / "results/reproduction.jsonl", before)
    arm = "updates-two_phase"
    again = [
        replace(row, value=-1.0) for row in before if row.arm == arm and row.seed == 0
    ]
    publish(tmp_path, Findings(again))
    found = read_findings(tmp_path / "results/reproduction.jsonl")
    assert len(found.rows) == len(before)
    changed = {(row.arm, row.seed) for row in found.rows if row.value == -1.0}
    assert changed == {(arm, 0)}


def made_up(key: str) -> list[Finding]:
    experiment = next(e for e in EXPERIMENTS if e.key == key)
    return [
        Finding(
            experiment=key,
            quantity=quantity,
            arm=arm,
            seed=seed,
            value=number + 0.1 * seed,
            parts=tuple(number + 0.1 * seed + 0.01 * step for step in range(5)),
        )
        for number, arm in enumerate(experiment.arms or experiment.runs)
        for seed in (0, 1)
        for quantity in (
            "final_reward",
            "final_overall",
            "final_aligned",
            "final_drift",
            "area",
        )
    ]


def test_figures_are_the_same_bytes_every_time() -> None:
    experiment = next(e for e in EXPERIMENTS if e.key == "fig8")
    findings = Findings(made_up("fig8"))
    one, other = (draw_experiment(experiment, findings) for _ in range(2))
    assert figure_file(one, "svg") == figure_file(
        other, "svg"
    ) and b"<dc:date>" not in figure_file(one, "svg")
    assert figure_file(one, "png") == figure_file(other, "png")


def test_the_committed_page_is_made_of_the_committed_results() -> None:
    """`python -m experiments --publish docs` mends this one."""
    found = read_findings(ROOT / "docs/results/reproduction.jsonl")
    assert render(found) == (ROOT / "docs/reproduction.md").read_text("utf-8")
    objectives = (ROOT / "docs/objectives.md").read_text("utf-8")
    assert (
        fill_tables(objectives, found) == objectives
        and "| single_pass, sage_exact | 0.976" in objectives
    )
    measured = {row.experiment for row in found.rows}
    pictures = {path.name for path in (ROOT / "docs/images/reproduction").iterdir()}
    assert pictures == {f"{key}.{kind}" for key in measured for kind in ("png", "svg")}


@pytest.mark.slow
def test_the_command_measures_what_is_missing(
    tiny_run: MakeRun,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """By another process, at one seed."""
    (base,) = (e for e in EXPERIMENTS if e.key == "base")
    monkeypatch.setattr(claims, "EXPERIMENTS", (replace(base, seeds=(0,)),))
    file = tmp_path / "new.yaml"
    file.write_text(dump_config(tiny_run()))
    for said in ("1 of 1 done: base-seed-0\n", ""):
        with pytest.raises(SystemExit, match="^0$"):
            run_module(
                "experiments",
                [
                    "--only",
                    "base",
                    "--config",
                    str(file),
                    "--output_dir",
                    str(tmp_path / "study"),
                ],
            )
        printed = capsys.readouterr()
        assert printed.err.endswith(said) and "Not finished" not in printed.out
    assert read_findings(tmp_path / "study/results.jsonl").by_seed(
        "base", "reward", "cps"
    ).keys() == {0}


@pytest.mark.slow
def test_trainings_are_made_once(tiny_run: MakeRun, tmp_path: Path) -> None:
    file = tmp_path / "new.yaml"
    file.write_text(dump_config(tiny_run()))
    mini = Experiment(
        key="samplers", title="", tier="quick", caption="", seeds=(0,), arms=("cps",)
    )
    study = Study(tmp_path / "study", [str(file)])
    study.begin()
    said: list[str] = []
    assert not study.run_missing([mini], 2, said.append), said
    assert len(study.findings().by_seed("samplers", "final_reward", "cps")) == 1
    again: list[str] = []
    assert not study.run_missing([mini], 2, again.append) and not again
