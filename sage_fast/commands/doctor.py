"""`sage-fast doctor`: what is installed, what a configuration needs, what to do."""

import argparse
import json
from collections.abc import Sequence

from sage_fast.commands.common import add_config_argument, load_run_config

EPILOG = """\
examples:
  sage-fast doctor                                            the machine alone
  sage-fast doctor configs/hv15_352x624_lora_1gpu.yaml        files, memory and disk for this configuration

Nothing is downloaded or changed. Exit status: 0 if the configuration could run, 1 if something is missing.
"""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "doctor",
        usage="sage-fast doctor [CONFIG [MORE.yaml ...]] [--json] [--section.key=value ...]",
        help="check the machine, and whether a configuration could run on it",
        description="Check versions, GPU, attention backends, weights, memory and disk, and say what to do.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_config_argument(parser, nargs="*")
    parser.add_argument("--json", action="store_true", help="print the checks as JSON")


def run(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Print the checks; 1 when something is missing."""
    from sage_fast.tools.diagnosis import can_run, examine, to_json, to_text

    config = load_run_config(options, overrides) if options.config or overrides else None
    checks = examine(config)
    print(json.dumps(to_json(checks), indent=1) if options.json else to_text(checks, config is not None))
    return 0 if can_run(checks) else 1
