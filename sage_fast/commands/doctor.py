"""Check this machine, and whether it can run a configuration.

examples:
  sage-fast doctor                               the machine alone
  sage-fast doctor hv15_352x624_lora_1gpu        files, memory and disk for this configuration
  sage-fast doctor hv15_480p_lora_8gpu --gpus 8   for a run of eight processes
  sage-fast doctor hv15_352x624_lora_1gpu --deep --scores scores.json
                                                 once on the real weights: load and compare all

Nothing is downloaded or changed; --deep fills model.cache_dir as a run does. Exit
status: 0 if the configuration could run, 1 if something is missing or, with --deep,
does not do what it should.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from sage_fast import __version__
from sage_fast.commands.common import (
    add_config_argument,
    add_gpus_argument,
    load_run_config,
)
from sage_fast.config.errors import ConfigError

USAGE = (
    "[CONFIG [MORE.yaml ...]] [--gpus N] [--deep] [--scores FILE] [--json] "
    "[--section.key=value ...]"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_config_argument(parser, nargs="*")
    add_gpus_argument(parser)
    parser.add_argument(
        "--deep",
        action="store_true",
        help=(
            "load everything and compute each part in two ways; ends with one small "
            "update"
        ),
    )
    parser.add_argument(
        "--scores",
        type=Path,
        metavar="FILE",
        help="with --deep: scores by the rewards' public code (docs/real_model.md)",
    )
    parser.add_argument("--json", action="store_true", help="print the checks as JSON")


def run(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Print the checks; 1 when something is missing or has failed."""
    from sage_fast.config.load import preset_names
    from sage_fast.tools.diagnosis import can_run, examine, to_text

    config = (
        load_run_config(options, overrides) if options.config or overrides else None
    )
    presets = [name for name in options.config if name in preset_names()]
    checks = examine(config, options.gpus, presets)
    if options.deep or options.scores:
        if config is None or not options.deep:
            raise ConfigError(
                "--deep needs a configuration, and --scores belongs to --deep."
            )
        # To load everything would only end at what is missing, which is on the list
        # already.
        if can_run(checks):
            from sage_fast.tools.acceptance import examine_deeply

            checks += examine_deeply(config, options.scores)
    runs = can_run(checks)
    if options.json:
        tree = {
            "sage_fast": __version__,
            "can_run": runs,
            "checks": [asdict(check) for check in checks],
        }
        print(json.dumps(tree, indent=1))
    else:
        print(to_text(checks, config is not None))
    return 0 if runs else 1
