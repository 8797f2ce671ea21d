r"""Measure the paper's tables and figures, and judge each claim.

examples:
  sage-fast reproduce                                  table 1, figures 1a, 2, 4 and 9, the samplers on the base model:
                                                       no training, minutes on two cores
  sage-fast reproduce --tier standard                  adds 32 seeds of the exact testbed: within 40 minutes
  sage-fast reproduce --tier full                      adds trainings of the network: days; Ctrl-C, then the same again
  sage-fast reproduce --only fig4
  sage-fast reproduce --tier quick --publish docs      and write the page, its figures and results into docs/
  sage-fast reproduce --tier full --commands --config hv15_480p_lora_1gpu
  sage-fast reproduce --tier full --config hv15_480p_lora_8gpu \
      --launcher 'configs/launch/torchrun.sh hosts.txt'

Nothing that is finished is done again; a training that was stopped goes on from its checkpoint. --output gets
results.jsonl (one line per number), reproduction.md, images/ (PNG and SVG), and the trainings.
"""

import argparse
import shlex
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sage_fast.commands.common import command_line

if TYPE_CHECKING:
    from sage_fast.study.experiments import Experiment
    from sage_fast.study.findings import Findings

RESULTS, PAGE = "results.jsonl", "reproduction.md"

DEFAULT_CONFIG = ["toy_cpu", "study_cpu"]
USAGE = "[--tier quick|standard|full] [--only KEY,KEY] [options] [--section.key=value ...]"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument(
        "--tier",
        choices=("quick", "standard", "full"),
        default="quick",
        help="quick trains nothing, standard the exact testbed, full networks; default quick",
    )
    parser.add_argument("--only", default="", metavar="KEY,KEY", help="these experiments, whatever their tier")
    parser.add_argument(
        "--config",
        nargs="+",
        default=[],
        metavar="CONFIG",
        help=f"configuration that all trainings share; default {' '.join(DEFAULT_CONFIG)}",
    )
    parser.add_argument(
        "--output", type=Path, default=Path("runs/reproduction"), help="folder; default runs/reproduction"
    )
    parser.add_argument("--processes", type=int, default=2, help="processes at a time, of one thread each; default 2")
    parser.add_argument(
        "--launcher", help="command that takes the words of `sage-fast train`; trainings then run one by one"
    )
    parser.add_argument("--commands", action="store_true", help="print the commands of what is missing; run nothing")
    parser.add_argument("--publish", type=Path, metavar="DOCS", help="also write page, figures and results into DOCS")


def run(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Run what is missing, and write what is there."""
    from sage_fast.config.errors import ConfigError
    from sage_fast.study.document import PUBLISHED_RESULTS
    from sage_fast.study.experiments import chosen_experiments
    from sage_fast.study.runner import Study

    if options.processes < 1:
        raise ConfigError(f"--processes is {options.processes}; it must be at least 1.")
    experiments = chosen_experiments(options.tier, [key for key in options.only.split(",") if key])
    launcher = shlex.split(options.launcher or "")
    study = Study(options.output, options.config or DEFAULT_CONFIG, overrides, launcher)
    if options.commands:
        for training in study.missing_trainings(experiments):
            print(shlex.join(study.trainings.command(training, ("sage-fast", "train"))))
        return 0
    study.begin()
    # A batch system's SIGTERM stops the processes as Ctrl-C does; they are in separate sessions.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    processes = 1 if launcher else options.processes
    stopped, failed = False, []
    try:
        failed = study.run_missing(experiments, processes, lambda text: print(text, file=sys.stderr, flush=True))
    except KeyboardInterrupt:
        stopped = True
    findings = study.findings()
    _write(study.folder, RESULTS, findings)
    if options.publish is not None:
        _write(options.publish, PUBLISHED_RESULTS, findings)
    _print_verdicts(experiments, findings)
    print(f"Wrote reproduction.md, results.jsonl and images/ to {options.output}/")
    if failed or stopped:
        print(f"Not finished. Go on with:\n  {command_line(*sys.argv[1:])}")
    return 1 if failed else 0


def _write(folder: Path, results: str, findings: "Findings") -> None:
    """Page, figures and results into a folder. results: name of the file of these."""
    from sage_fast.config.files import write_text
    from sage_fast.run.plots import save_figure
    from sage_fast.study.document import IMAGES, render
    from sage_fast.study.drawings import draw_experiment
    from sage_fast.study.experiments import EXPERIMENTS
    from sage_fast.study.findings import read_findings, write_findings

    write_findings(folder / results, findings.rows)
    kept = read_findings(folder / results)  # rounded: the page is made of what is in the file
    write_text(folder / PAGE, render(kept))
    for experiment in EXPERIMENTS:
        figure = draw_experiment(experiment, kept)
        if figure is not None:
            save_figure(folder / IMAGES, experiment.key, figure)


def _print_verdicts(experiments: "Sequence[Experiment]", findings: "Findings") -> None:
    from sage_fast.study.claims import judge

    for experiment in experiments:
        print(experiment.title)
        for judgement in judge(experiment.claims, findings):
            ours = judgement.evidence.ours if judgement.evidence else ""
            print(f"  {judgement.verdict:<13} {judgement.claim.text}" + (f" [{ours}]" if ours else ""))
