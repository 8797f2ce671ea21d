"""`sage-fast compare`: several trainings beside each other, those that differ in their seed alone as one arm."""

import argparse
from collections.abc import Sequence
from pathlib import Path

EPILOG = """\
examples:
  sage-fast compare runs/sage_grpo runs/sage_exact
  sage-fast compare runs/study/sage/seed-* runs/study/cps/seed-* --output runs/study/compared

The first run's arm is what the others are compared with. --output gets comparison.html (everything, in one file),
comparison.json, and the pictures as PNG and SVG. Runs that are still training can be compared, too.
"""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "compare",
        usage="sage-fast compare RUN RUN [RUN ...] [--output FOLDER]",
        help="curves and final scores of several runs, with seed bands and a paired test",
        description="Compare runs: reward, its components, KL and gradient norms, and a paired test of their scores.",
        epilog=EPILOG,
    )
    parser.add_argument("config", nargs="+", metavar="RUN", help="run directories")
    parser.add_argument(
        "--output", type=Path, default=Path("comparison"), help="folder to write to; default comparison"
    )


def run(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Compare and write the page."""
    from sage_fast.config.errors import ConfigError
    from sage_fast.tools.comparison import check_several, compare_runs, to_text, write_comparison

    if overrides:
        raise ConfigError(f"compare reads runs and takes no configuration keys, got {overrides[0]}.")
    folders = [Path(folder) for folder in options.config]
    check_several(folders)
    comparison = compare_runs(folders)
    paths = write_comparison(options.output, comparison)
    print(to_text(comparison))
    print(f"Wrote {', '.join(path.name for path in paths if path.suffix != '.svg')} to {options.output}/")
    return 0
