r"""Measure the paper's tables and figures, and judge each claim.

examples:
  python -m experiments                                table 1, figures 1a, 2, 4 and 9, the samplers on the base model:
                                                       no training, minutes on two cores
  python -m experiments --tier standard                  adds the exact testbed, every arm at its best
                                                       learning rate: about half an hour of one core
  python -m experiments --tier full                      adds trainings of the network: days; Ctrl-C, and go on
  python -m experiments --only fig4
  python -m experiments --tier quick --publish docs      and write them into the page, figures and results of docs/
  python -m experiments --tier full --commands --config hv15_480p_lora_1gpu

Nothing that is finished is done again; a training that was stopped goes on from its
checkpoint. --output_dir gets results.jsonl (one line per number), reproduction.md,
images/ (PNG and SVG), and the trainings.
"""

import argparse
import shlex
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from experiments.claims import EXPERIMENTS, chosen_experiments, judge
from experiments.document import IMAGES, PUBLISHED_RESULTS, fill_tables, render
from experiments.drawings import draw_experiment
from experiments.findings import Findings, read_findings, write_findings
from experiments.runner import Study
from sage_fast.commands.common import add_output_argument, join_values, split_words
from sage_fast.config.errors import ConfigError, SageError
from sage_fast.config.files import replacing, write_text
from sage_fast.run.plots import figure_file

RESULTS = "results.jsonl"
PAGE = "reproduction.md"

DEFAULT_CONFIG = ["toy_cpu", "study_cpu"]
USAGE = (
    "python -m experiments [--tier quick|standard|full] [--only KEY,KEY] [options] "
    "[--section.key=value ...]"
)


def parse(words: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """The options, and the `--section.key=value` overrides."""
    summary, _, more = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        prog="python -m experiments",
        usage=USAGE,
        description=summary,
        epilog=more,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--tier",
        choices=("quick", "standard", "full"),
        default="quick",
        help=(
            "quick trains nothing, standard the exact testbed, full networks; default "
            "quick"
        ),
    )
    parser.add_argument(
        "--only",
        default="",
        metavar="KEY,KEY",
        help="these experiments, whatever their tier",
    )
    parser.add_argument(
        "--config",
        nargs="+",
        default=[],
        metavar="CONFIG",
        help=(
            "configuration that all trainings share; default "
            f"{' '.join(DEFAULT_CONFIG)}"
        ),
    )
    add_output_argument(parser, Path("runs/reproduction"))
    parser.add_argument(
        "--processes",
        type=int,
        default=2,
        help="processes at a time, of one thread each; default 2",
    )
    parser.add_argument(
        "--commands",
        action="store_true",
        help="print the commands of what is missing; run nothing",
    )
    parser.add_argument(
        "--publish",
        type=Path,
        metavar="DOCS",
        help="also put the results into the page and figures of DOCS",
    )
    given = sys.argv[1:] if words is None else words
    options, rest = parser.parse_known_args(join_values(given))
    options.config, overrides = split_words([*options.config, *rest])
    return options, overrides


def main(words: Sequence[str] | None = None) -> int:
    """Run what is missing, and write what is there; returns the exit status."""
    try:
        return run(*parse(words))
    except (SageError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1


def run(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Run what is missing, and write what is there. ConfigError."""
    if options.processes < 1:
        raise ConfigError(f"--processes is {options.processes}; it must be at least 1.")
    experiments = chosen_experiments(
        options.tier, [key for key in options.only.split(",") if key]
    )
    study = Study(options.output_dir, options.config or DEFAULT_CONFIG, overrides)
    if options.commands:
        for training in study.missing_trainings(experiments):
            print(shlex.join(["sage-fast", "train", *study.words(training)]))
        return 0
    study.begin()
    # A batch system's SIGTERM stops the processes as Ctrl-C does; they are in separate
    # sessions.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    stopped = False
    failed = []
    try:
        failed = study.run_missing(
            experiments,
            options.processes,
            lambda text: print(text, file=sys.stderr, flush=True),
        )
    except KeyboardInterrupt:
        stopped = True
    findings = study.findings()
    _write(study.folder, study.folder / RESULTS, findings)
    if options.publish is not None:
        asked = {experiment.key for experiment in experiments}
        publish(
            options.publish,
            Findings([row for row in findings.rows if row.experiment in asked]),
        )
    for experiment in experiments:
        print(experiment.title)
        for judgement in judge(experiment.claims, findings):
            ours = judgement.evidence.ours if judgement.evidence else ""
            print(
                f"  {judgement.verdict:<13} {judgement.claim.text}"
                + (f" [{ours}]" if ours else "")
            )
    print(f"Wrote reproduction.md, results.jsonl and images/ to {options.output_dir}/")
    if failed or stopped:
        print(
            "Not finished. Go on with:\n  "
            f"{shlex.join(['python', '-m', 'experiments', *sys.argv[1:]])}"
        )
    return 1 if failed else 0


def _write(folder: Path, results: Path, findings: Findings) -> None:
    """Write results, page and figures, and fill the tables of the other pages of a
    folder.
    """
    write_findings(results, findings.rows)
    kept = read_findings(results)  # rounded: the page is made of what is in the file
    write_text(folder / PAGE, render(kept))
    for page in folder.glob("*.md"):
        text = page.read_text("utf-8")
        if (filled := fill_tables(text, kept)) != text:
            write_text(page, filled)
    measured = {row.experiment for row in kept.rows}
    for experiment in EXPERIMENTS:
        if experiment.key in measured:
            figure = draw_experiment(experiment, kept)
            for kind in ("png", "svg"):
                with replacing(folder / IMAGES / f"{experiment.key}.{kind}") as partial:
                    partial.write_bytes(figure_file(figure, kind))


def publish(docs: Path, findings: Findings) -> None:
    """Put the arms and seeds of a study in the place of what DOCS has of them, and
    leave the others there.
    """
    results = docs / PUBLISHED_RESULTS
    measured = {(row.experiment, row.arm, row.seed) for row in findings.rows}
    before = read_findings(results).rows if results.is_file() else []
    kept = [
        row for row in before if (row.experiment, row.arm, row.seed) not in measured
    ]
    _write(docs, results, Findings([*kept, *findings.rows]))


if __name__ == "__main__":
    raise SystemExit(main())
