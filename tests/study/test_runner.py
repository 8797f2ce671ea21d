"""Jobs side by side, trainings that are not repeated, and results of a folder as findings and a page."""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from sage_fast.commands.cli import main
from sage_fast.config.errors import ConfigError
from sage_fast.config.load import dump_config
from sage_fast.config.schema import RunConfig
from sage_fast.run.plots import to_png, to_svg
from sage_fast.study.document import render
from sage_fast.study.drawings import draw_experiment
from sage_fast.study.experiments import EXPERIMENTS, Experiment, Training
from sage_fast.study.findings import COST, Finding, Findings, read_findings
from sage_fast.study.runner import Job, Study, run_jobs
from sage_fast.study.trainings import Trainings
from tests.made_runs import make_run

MakeRun = Callable[..., RunConfig]
ROOT = Path(__file__).resolve().parents[2]


def job(tmp_path: Path, name: str, code: str, *, saves: bool = False) -> Job:
    return Job(
        name=name,
        command=[sys.executable, "-c", code],
        log=tmp_path / "logs" / f"{name}.log",
        saves=saves,
    )


def test_jobs_run_side_by_side_and_a_failed_one_leaves_the_others(tmp_path: Path) -> None:
    meet = (
        "import pathlib, time\nhere = pathlib.Path({0!r})\n(here / {1!r}).touch()\n"
        "while not (here / {2!r}).exists():\n    time.sleep(0.01)\n"
    )
    said: list[str] = []
    jobs = [
        job(tmp_path, "broken", "print('why it broke'); raise SystemExit(3)"),
        job(tmp_path, "a", meet.format(str(tmp_path), "a", "b")),
        job(tmp_path, "b", meet.format(str(tmp_path), "b", "a")),
    ]
    assert run_jobs(jobs, 2, said.append) == ["broken"]
    assert "broken failed (status 3)" in said[0] and "why it broke" in said[0]


@pytest.mark.signals
def test_ctrl_c_reaches_every_job_once_and_starts_no_more(tmp_path: Path) -> None:
    saves = (
        "import pathlib, signal, sys, time\nhere = pathlib.Path({0!r})\n"
        "def stop(*_):\n    (here / ('saved-' + {1!r})).touch()\n    sys.exit(0)\n"
        "signal.signal(signal.SIGINT, stop)\n(here / {1!r}).touch()\ntime.sleep(60)\n"
    )
    jobs = [job(tmp_path, name, saves.format(str(tmp_path), name), saves=True) for name in ("a", "b", "never")]

    def press() -> None:
        while not ((tmp_path / "a").exists() and (tmp_path / "b").exists()):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=press)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        run_jobs(jobs, 2, lambda text: None)
    thread.join()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "b", "logs", "saved-a", "saved-b"]


# ------------------------------------------------------------------------------------------ trainings

SAGE, CPS = (Training(arm=name, overrides=(f"--rollout.sde_type={name}",), seed=0) for name in ("sage_grpo", "cps"))


@pytest.fixture
def trainings(tmp_path: Path) -> Trainings:
    return Trainings(folder=tmp_path / "t", files=["configs/toy_cpu.yaml"], overrides=["--training.num_updates=4"])


def test_a_training_is_finished_once_its_last_update_is_evaluated(trainings: Trainings) -> None:
    assert not trainings.is_finished(SAGE)
    folder = make_run(trainings.folder / SAGE.name, final=[1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    assert trainings.is_finished(SAGE)
    (folder / "evaluation" / "result.json").unlink()
    assert not trainings.is_finished(SAGE)


def test_a_run_of_another_configuration_is_refused(trainings: Trainings) -> None:
    make_run(trainings.folder / CPS.name)  # sage_grpo, where cps should be
    with pytest.raises(
        ConfigError, match=r"was trained with rollout\.sde_type 'sage_grpo', and the study now has 'cps'"
    ):
        trainings.is_finished(CPS)


def test_findings_of_a_training(trainings: Trainings) -> None:
    make_run(trainings.folder / SAGE.name, final=[1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    rows = {row.quantity: row for row in trainings.findings("e", SAGE)}
    reward = rows["final_reward"]
    assert (reward.value, reward.n, reward.parts) == (3.5, 6, (1.0, 2.0, 3.0, 4.0, 5.0, 6.0))
    assert reward.stderr == pytest.approx((3.5 / 6) ** 0.5)
    assert rows["area"].value == pytest.approx(0.25) and rows["area"].parts == pytest.approx((0.1, 0.2, 0.3, 0.4))
    assert rows["unsteadiness"].value == pytest.approx(0, abs=1e-12) and rows[COST].value == 8.0
    assert (reward.version, reward.torch, reward.commit) == ("1.2", "2.x", "c" * 40) and len(reward.settings) == 8


def test_commands_for_a_cluster(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["reproduce", "--only", "samplers", "--commands", "--output", str(tmp_path / "s"), "--data.shuffle=false"]
    launch = ["--launcher", "configs/launch/torchrun.sh hosts.txt"]
    assert main([*words, *launch, "--config", "configs/hv15_480p_lora_8gpu.yaml"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 18 and not (tmp_path / "s").exists()
    assert lines[0].startswith("configs/launch/torchrun.sh hosts.txt configs/hv15_480p_lora_8gpu.yaml --output_dir=")
    assert "--seed=0 --data.shuffle=false --rollout.sde_type=sage_grpo" in lines[0]
    where_known = ["reproduce", "--only", "longer", "--commands", "--output", str(tmp_path / "s")]
    assert main([*where_known, "--config", "configs/hv15_480p_lora_8gpu.yaml"]) == 0
    assert not capsys.readouterr().out


# ------------------------------------------------------------------------------------------ a study


def test_the_command_writes_page_results_and_figures(
    tiny_run: MakeRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "new.yaml"
    file.write_text(dump_config(tiny_run()))
    output, docs = tmp_path / "study", tmp_path / "docs"
    words = ["reproduce", "--only", "table1,fig1a,fig9", "--output", str(output), "--publish", str(docs)]
    assert main([*words, "--config", str(file)]) == 0
    assert "refuted       So it does at a margin of 0.001. [1.163 and 0.990]" in capsys.readouterr().out
    assert (output / "reproduction.md").read_bytes() == (docs / "reproduction.md").read_bytes()
    found = read_findings(docs / "results" / "reproduction.jsonl")
    assert render(found) == (docs / "reproduction.md").read_text("utf-8")
    pictures = sorted(path.name for path in (docs / "images/reproduction").iterdir())
    assert pictures == [f"{key}.{kind}" for key in ("fig1a", "fig9", "table1") for kind in ("png", "svg")]
    # The same folder with another configuration, and with another base model.
    assert main([*words, "--config", str(file), "--rollout.eta=0.4"]) == 2
    assert "holds results of another configuration" in capsys.readouterr().err
    (output / "study.json").write_text('{"base": "another"}')
    assert main([*words, "--config", str(file)]) == 2
    assert "holds results of another base model" in capsys.readouterr().err


def made_up(arms: Sequence[str], experiment: str) -> list[Finding]:
    return [
        Finding(
            experiment=experiment,
            quantity=quantity,
            arm=arm,
            seed=seed,
            value=number + 0.1 * seed,
            parts=tuple(number + 0.1 * seed + 0.01 * step for step in range(5)),
        )
        for number, arm in enumerate(arms)
        for seed in (0, 1)
        for quantity in ("final_reward", "final_overall", "final_aligned", "final_drift", "area")
    ]


@pytest.mark.parametrize("experiment", [e for e in EXPERIMENTS if e.trained], ids=lambda e: e.key)
def test_figures_of_trainings_are_the_same_bytes_every_time(experiment: Experiment) -> None:
    findings = Findings(made_up(experiment.trained, experiment.key))
    one, other = (draw_experiment(experiment, findings) for _ in range(2))
    assert one is not None and other is not None
    assert to_svg(one) == to_svg(other) and b"<dc:date>" not in to_svg(one)
    assert to_png(one) == to_png(other)
    assert draw_experiment(experiment, Findings([])) is None


def test_a_page_of_a_part_says_what_is_missing() -> None:
    experiment = next(e for e in EXPERIMENTS if e.key == "samplers")
    page = render(Findings(made_up(experiment.arms, "samplers")))
    assert "Seeds: 0, 1 (4 of 6 not run yet)." in page and "## Not run yet" in page
    assert "| Figure 8 on the network: what the KL holds on to | `full` | 52 |" in page


def test_the_committed_page_is_made_of_the_committed_results() -> None:
    """`sage-fast reproduce --publish docs` mends this one."""
    found = read_findings(ROOT / "docs/results/reproduction.jsonl")
    assert render(found) == (ROOT / "docs/reproduction.md").read_text("utf-8")
    measured = {row.experiment for row in found.rows}
    pictures = {path.name for path in (ROOT / "docs/images/reproduction").iterdir()}
    assert pictures == {f"{key}.{kind}" for key in measured for kind in ("png", "svg")}


@pytest.mark.slow
def test_trainings_are_made_once(tiny_run: MakeRun, tmp_path: Path) -> None:
    file = tmp_path / "new.yaml"
    file.write_text(dump_config(tiny_run()))
    arms = ("sage_grpo", "cps")
    mini = Experiment(key="samplers", title="", tier="quick", caption="", seeds=(0, 1), arms=arms)
    study = Study(tmp_path / "study", [str(file)])
    study.begin()
    said: list[str] = []
    assert not study.run_missing([mini], 2, said.append), said
    assert len(study.findings().by_seed("samplers", "final_reward", "cps")) == 2
    again: list[str] = []
    assert not study.run_missing([mini], 2, again.append) and not again
