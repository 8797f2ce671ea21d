"""`sage-fast train`: train, or go on with a run."""

import argparse
from collections.abc import Sequence

from sage_fast.commands.common import add_config_argument, command_line, load_run_config
from sage_fast.distributed.launch import rank, world_size

EPILOG = """\
examples:
  sage-fast train configs/toy_cpu.yaml
  sage-fast train configs/toy_cpu.yaml --output_dir runs/dance --rollout.sde_type=dance_grpo --resume auto
  sage-fast train runs/dance --resume auto --optimizer.learning_rate=5e-6 --allow-changes optimizer.learning_rate
  sage-fast train configs/hv15_352x624_lora_1gpu.yaml configs/ablations/setting_b.yaml --output_dir runs/setting_b
  sage-fast train configs/toy_cpu.yaml --print_config        the resolved configuration, as YAML
  sage-fast train --keys                                     every key with its meaning and default
"""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "train",
        usage="sage-fast train CONFIG [MORE.yaml ...] [--section.key=value ...]",
        help="train, or go on with a run",
        description="Train a model as YAML files say. Any key can be overridden: --section.key=value.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_config_argument(parser, nargs="*")
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
    from sage_fast.config.load import build_parser, dump_config

    if options.keys:
        if rank() == 0:
            print(build_parser(prog="sage-fast train CONFIG", usage="%(prog)s [--section.key=value ...]").format_help())
        return 0
    if not options.config and not overrides:
        raise ConfigError("which run? Give a YAML file: sage-fast train configs/toy_cpu.yaml")
    config = load_run_config(options, overrides)
    if options.print_config:
        if rank() == 0:
            print(dump_config(config), end="")
        return 0

    from sage_fast.planning.estimate import planned_iteration_seconds, settle_decoding
    from sage_fast.run.resume import split_keys
    from sage_fast.run.run import train

    config = settle_decoding(config)
    planned = planned_iteration_seconds(config) if rank() == 0 else None
    result = train(config, allow_changes=split_keys(options.allow_changes), planned_seconds=planned)
    if rank() != 0:
        return 0
    if not result.finished and world_size() > 1:
        print(f"Stopped after update {result.update}. The same launch with --resume auto goes on.")
        return 0
    if not result.finished:
        allowed = [word for keys in options.allow_changes for word in ("--allow-changes", keys)]
        words = ["train", *options.config, *_without_resume(overrides), *allowed, "--resume", "auto"]
        print(f"Stopped after update {result.update}. Go on with:\n  {command_line(*words)}")
        return 0
    pictures = [
        name for name in ("index.html", "reward.png", "before_after.png") if (result.output_dir / name).exists()
    ]
    print(f"Done: {result.output_dir}/ (look at {', '.join(pictures)})")
    return 0


def _without_resume(overrides: Sequence[str]) -> list[str]:
    words = list(overrides)
    while "--resume" in words:
        i = words.index("--resume")
        del words[i : i + 2]
    return [w for w in words if not w.startswith("--resume=")]
