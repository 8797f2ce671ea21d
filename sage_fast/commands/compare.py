"""Compare the curves and final scores of several runs, with paired tests.

examples:
  sage-fast compare runs/sage_grpo runs/sage_exact
  sage-fast compare runs/study/sage/seed-* runs/study/cps/seed-* --output_dir runs/study/compared

The other arms are compared with that of the first run. --output_dir gets
comparison.html (everything, in one file) and comparison.json. Runs that are still
training can be compared, too.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from sage_fast.commands.common import add_output_argument

USAGE = "RUN RUN [RUN ...] [--output_dir FOLDER] [--json]"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("config", nargs="+", metavar="RUN", help="run directories")
    add_output_argument(parser, Path("comparison"))
    parser.add_argument("--json", action="store_true", help="print comparison.json")


def run(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Compare and write the page."""
    from sage_fast.tools.comparison import compare_runs, to_text, write_comparison

    comparison = compare_runs([Path(folder) for folder in options.config])
    write_comparison(options.output_dir, comparison)
    if options.json:
        print((options.output_dir / "comparison.json").read_text("utf-8"), end="")
        return 0
    print(to_text(comparison))
    print(f"Wrote comparison.html and comparison.json to {options.output_dir}/")
    return 0
