"""`sage-fast efficiency`: what levers keep of the gradient's signal, and what they cost."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from sage_fast.commands.common import command_line

DEFAULT_CONFIG = ["toy_cpu", "efficiency_cpu"]
PRICED = "hv15_480p_lora_8gpu"

EPILOG = f"""\
examples:
  sage-fast efficiency                                 the built-in world on a CPU, priced as {PRICED}
  sage-fast efficiency --publish docs                  and write the page, its figure and results into docs/
  sage-fast efficiency --train                         then whole trainings with the best five, of equal FLOPs
  sage-fast efficiency hv15_352x624_lora_1gpu --processes 1 --rollout.batch_size=16
                                                       a model on a GPU, with its own costs; groups of 16 need 16 videos

Nothing that is finished is done again. --output gets results.jsonl (one line per number), efficiency.md and images/.
"""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "efficiency",
        usage="sage-fast efficiency [CONFIG ...] [options] [--section.key=value ...]",
        help="signal and noise of the gradient with each lever, and what they cost",
        description="At fixed weights, estimate the gradient many times with every combination of levers, and report "
        "variance, bias, counted FLOPs and signal per PFLOP.",
        epilog=EPILOG,
    )
    parser.add_argument(
        "config", nargs="*", metavar="CONFIG", help=f"presets or YAML files; default {' '.join(DEFAULT_CONFIG)}"
    )
    parser.add_argument(
        "--estimates",
        type=int,
        default=64,
        metavar="N",
        help="estimates of each combination, and four times as many of the reference; default 64",
    )
    parser.add_argument(
        "--updates",
        type=int,
        default=8,
        metavar="N",
        help="updates of the training whose weights are measured; default 8",
    )
    parser.add_argument(
        "--priced",
        nargs="+",
        default=[],
        metavar="CONFIG",
        help=f"whose model the FLOPs are counted of; default: CONFIG, and {PRICED} for the built-in world",
    )
    parser.add_argument(
        "--train", action="store_true", help="also train with the best five and the reference, on six seeds"
    )
    parser.add_argument("--output", type=Path, default=Path("runs/efficiency"), help="folder; default runs/efficiency")
    parser.add_argument("--processes", type=int, default=2, help="processes at a time, of one thread each; default 2")
    parser.add_argument("--publish", type=Path, metavar="DOCS", help="also write page, figure and results into DOCS")


def run(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Run what is missing, and write what is there."""
    from sage_fast.config.errors import ConfigError
    from sage_fast.study.efficiency_page import IMAGES, PAGE, RESULTS, summary, write_page
    from sage_fast.study.lever_study import EfficiencyStudy

    for name, least in (("processes", 1), ("updates", 1), ("estimates", 3)):
        if getattr(options, name) < least:
            raise ConfigError(f"--{name} is {getattr(options, name)}; it must be at least {least}.")
    study = EfficiencyStudy(
        options.output,
        options.config or DEFAULT_CONFIG,
        overrides,
        count=options.estimates,
        updates=options.updates,
        priced=options.priced or options.config or [PRICED],
    )
    study.begin()

    def tell(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    outcome = study.measure(options.processes, tell)
    if options.train and outcome.complete:
        outcome = study.train(options.processes, tell)
    findings = study.findings()
    for folder, results in ((study.folder, "results.jsonl"), (options.publish, RESULTS)):
        if folder is not None:
            write_page(folder, results, findings)
    print(summary(findings))
    print(f"Wrote {PAGE}, results.jsonl and {IMAGES}/ to {options.output}/")
    if not outcome.complete:
        print(f"Not finished. Go on with:\n  {command_line(*sys.argv[1:])}")
    return 1 if outcome.failed else 0
