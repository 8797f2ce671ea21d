"""Train a model, or resume a run.

examples:
  sage-fast train toy_cpu
  sage-fast train toy_cpu --output_dir runs/dance --rollout.sde_type=dance_grpo --resume auto
  sage-fast train runs/dance --resume auto --optimizer.learning_rate=5e-6 --allow-changes optimizer.learning_rate
  sage-fast train hv15_352x624_lora_1gpu ablations/setting_b --output_dir runs/setting_b
  sage-fast train hv15_352x624_lora_8gpu --gpus 8      one process per GPU of this node, by torchrun
  sage-fast train toy_cpu --dry-run                    check files, memory and disk, as doctor does; train nothing
  sage-fast train toy_cpu --print-config               the resolved configuration, as YAML
  sage-fast train --keys kl                            keys with `kl` in them; without a word, every key

keys that most people set:
  --output_dir FOLDER                 where the run goes
  --resume auto                       continue the run that is there
  --data.prompts FILE                 training prompts: .csv, .jsonl or .txt
  --reward.rewards=[NAME, ...]        rewards, also package.module:function of your own
  --rollout.sde_type NAME             sage_grpo, sage_exact, dance_grpo, flow_grpo, flow_grpo_wan or cps
  --rollout.num_generations N         videos of a prompt that compete
  --rollout.batch_size N              videos of a rollout on each rank
  --optimizer.learning_rate X
  --training.num_updates N
  --evaluation.every N                updates between evaluations
"""

import argparse
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from sage_fast.commands.common import (
    add_config_argument,
    add_cpu_argument,
    load_run_config,
)
from sage_fast.config.errors import ConfigError
from sage_fast.distributed.start import rank, world_size


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_config_argument(parser, nargs="*")
    add_cpu_argument(parser)
    parser.add_argument(
        "--print-config",
        action="store_true",
        help="print the resolved configuration and exit",
    )
    parser.add_argument(
        "--allow-changes",
        action="append",
        default=[],
        metavar="KEY,KEY",
        help="configuration keys that may differ from those of the checkpoint from which "
        "--resume continues; what has "
        "changed is recorded in metrics.jsonl",
    )
    parser.add_argument(
        "--keys",
        nargs="?",
        const="",
        metavar="WORD",
        help="list configuration keys and exit",
    )
    parser.add_argument(
        "--gpus",
        type=int,
        metavar="N",
        help="start N processes on this node by torchrun",
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="check the configuration as doctor does, and exit",
    )


def _start_processes(count: int, words: Sequence[str]) -> NoReturn:
    """Become a torchrun that starts this command once per GPU."""
    # `--gpus N` are two words and `--gpus=N` is one. With either, every rank would
    # start more processes.
    at = next(i for i, word in enumerate(words) if word.startswith("--gpus"))
    rest = [*words[:at], *words[at + (1 if "=" in words[at] else 2) :]]
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={count}",
    ]
    # In the place of this process, so that signals reach the launcher itself.
    os.execv(sys.executable, [*launcher, "-m", "sage_fast", *rest])


def run(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Train; 0 when finished or stopped on request."""
    from sage_fast.config.load import describe_keys, dump_config

    if options.keys is not None:
        if rank() == 0:
            print(describe_keys(options.keys), end="")
        return 0
    if not options.config and not overrides:
        raise ConfigError(
            "which run? Give a preset or a YAML file: sage-fast train toy_cpu"
        )
    config = load_run_config(options, overrides)
    if options.print_config:
        if rank() == 0:
            print(dump_config(config), end="")
        return 0
    if options.dry_run:
        from sage_fast.tools.diagnosis import can_run, examine, to_text

        checks = examine(config, options.gpus)
        print(to_text(checks, config_given=True))
        return 0 if can_run(checks) else 1

    from sage_fast.tools.api import refuse_cpu

    if options.gpus is not None and world_size() == 1:
        import torch

        if not torch.cuda.is_available():
            # before the ranks, whose launcher would print the traceback of each
            refuse_cpu(config, options.allow_cpu)
        _start_processes(options.gpus, options.words)

    from sage_fast.planning.estimate import settle_memory
    from sage_fast.run.directory import RunDirectory
    from sage_fast.run.run import train
    from sage_fast.run.run_status import command_for, read_status

    refuse_cpu(config, options.allow_cpu)
    result = train(settle_memory(config), allow_changes=options.allow_changes)
    if rank() != 0:
        return 0
    directory = RunDirectory(config.output_dir)  # as it was given
    if result.worse is not None:
        print(f"The model is {result.worse}.")
    if result.finished:
        print(
            f"{'Done' if result.worse is None else 'Finished, but it got worse'}: "
            f"look at {directory.page}"
        )
    elif result.stop_reason is not None:
        print(
            f"Stopped after update {result.update}, as evaluation.stop_when_worse "
            "says. Go on with it false, or from "
            f"an earlier checkpoint by --resume {directory.checkpoints / 'update-N'}. "
            f"Look at {directory.page}"
        )
    elif world_size() > 1:
        print(
            f"Stopped after update {result.update}. The same launch with --resume "
            "auto goes on."
        )
    else:
        status, _ = read_status(directory)
        go_on = command_for(directory.path, status, "train", "--resume", "auto")
        print(f"Stopped after update {result.update}. Go on with:\n  {go_on}")
    return 0
