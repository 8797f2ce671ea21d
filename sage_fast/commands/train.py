"""Train, or go on with a run.

examples:
  sage-fast train toy_cpu
  sage-fast train toy_cpu --output_dir runs/dance --rollout.sde_type=dance_grpo --resume auto
  sage-fast train runs/dance --resume auto --optimizer.learning_rate=5e-6 --allow-changes optimizer.learning_rate
  sage-fast train hv15_352x624_lora_1gpu ablations/setting_b --output_dir runs/setting_b
  sage-fast train toy_cpu --print_config         the resolved configuration, as YAML
  sage-fast train --keys                         every key with its meaning and default
"""

import argparse
import sys
from collections.abc import Sequence

from sage_fast.commands.common import add_config_argument, add_cpu_argument, command_line, load_run_config
from sage_fast.distributed.start import rank, world_size


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_config_argument(parser, nargs="*")
    add_cpu_argument(parser)
    parser.add_argument("--print_config", action="store_true", help="print the resolved configuration and exit")
    parser.add_argument(
        "--allow-changes",
        action="append",
        default=[],
        metavar="KEY,KEY",
        help="configuration keys that may differ from those of the checkpoint which --resume goes on from; what has "
        "changed is recorded in metrics.jsonl and history.jsonl",
    )
    parser.add_argument("--keys", action="store_true", help="list every configuration key and exit")


def run(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Train; 0 when finished or stopped on request."""
    from sage_fast.config.errors import ConfigError
    from sage_fast.config.load import describe_keys, dump_config

    if not options.keys and not options.config and not overrides:
        raise ConfigError("which run? Give a preset or a YAML file: sage-fast train toy_cpu")
    config = None if options.keys else load_run_config(options, overrides)
    if config is None or options.print_config:
        if rank() == 0:
            print(dump_config(config) if config else describe_keys(), end="")
        return 0

    from sage_fast.planning.estimate import settle_memory
    from sage_fast.run.resume import split_keys
    from sage_fast.run.run import train
    from sage_fast.tools.api import refuse_cpu

    refuse_cpu(config, options.allow_cpu)
    result = train(settle_memory(config), allow_changes=split_keys(options.allow_changes))
    if rank() != 0:
        return 0
    if result.finished:
        pictures = ("index.html", "reward.png", "before_after.png")
        found = [name for name in pictures if (result.output_dir / name).exists()]
        print(f"Done: {result.output_dir}/ (look at {', '.join(found)})")
    elif world_size() > 1:
        print(f"Stopped after update {result.update}. The same launch with --resume auto goes on.")
    else:
        words = [*sys.argv[1:], *(["--resume", "auto"] if config.resume != "auto" else [])]
        print(f"Stopped after update {result.update}. Go on with:\n  {command_line(*words)}")
    return 0
