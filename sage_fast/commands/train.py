"""`sage-fast train`: train, or go on with a run."""

import argparse
from collections.abc import Sequence

from sage_fast.commands.common import add_config_argument, add_cpu_argument, command_line, load_run_config
from sage_fast.distributed.start import rank, world_size

EPILOG = """\
examples:
  sage-fast train toy_cpu
  sage-fast train toy_cpu --output_dir runs/dance --rollout.sde_type=dance_grpo --resume auto
  sage-fast train runs/dance --resume auto --optimizer.learning_rate=5e-6 --allow-changes optimizer.learning_rate
  sage-fast train hv15_352x624_lora_1gpu ablations/setting_b --output_dir runs/setting_b
  sage-fast train toy_cpu --print_config         the resolved configuration, as YAML
  sage-fast train --keys                         every key with its meaning and default
"""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "train",
        usage="sage-fast train CONFIG [MORE.yaml ...] [options] [--section.key=value ...]",
        help="train, or go on with a run",
        description="Train as a preset or YAML files say. Any key can be overridden: --section.key=value.",
        epilog=EPILOG,
    )
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

    if options.keys:
        if rank() == 0:
            print(describe_keys())
        return 0
    if not options.config and not overrides:
        raise ConfigError("which run? Give a preset or a YAML file: sage-fast train toy_cpu")
    config = load_run_config(options, overrides)
    if options.print_config:
        if rank() == 0:
            print(dump_config(config), end="")
        return 0

    from sage_fast.run.resume import split_keys
    from sage_fast.tools.api import train

    result = train(config, allow_changes=split_keys(options.allow_changes), allow_cpu=options.allow_cpu)
    if rank() != 0:
        return 0
    if not result.finished and world_size() > 1:
        print(f"Stopped after update {result.update}. The same launch with --resume auto goes on.")
        return 0
    if not result.finished:
        print(
            f"Stopped after update {result.update}. Go on with:\n  {command_line(*words_to_go_on(options, overrides))}"
        )
        return 0
    pictures = [
        name for name in ("index.html", "reward.png", "before_after.png") if (result.output_dir / name).exists()
    ]
    print(f"Done: {result.output_dir}/ (look at {', '.join(pictures)})")
    return 0


def words_to_go_on(options: argparse.Namespace, overrides: Sequence[str]) -> list[str]:
    """The same call, with --resume auto in place of its own --resume."""
    words = list(overrides)
    while "--resume" in words:
        i = words.index("--resume")
        del words[i : i + 2]
    words = [word for word in words if not word.startswith("--resume=")]
    words += [word for keys in options.allow_changes for word in ("--allow-changes", keys)]
    words += ["--allow-cpu"] * options.allow_cpu + ["--trust-config"] * options.trust_config
    return ["train", *options.config, *words, "--resume", "auto"]
