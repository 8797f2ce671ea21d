"""Show where one training update spends its time.

examples:
  sage-fast profile toy_cpu --output_dir profile
  sage-fast profile hv15_352x624_lora_1gpu --output_dir profile --rollout.num_steps=2 --rollout.batch_size=4

--output_dir gets trace.json.gz (open it in https://ui.perfetto.dev) and top.txt.
Nothing of a run is written or changed. The first iteration of a run compiles kernels
and needs no forward for the KL's anchor: --warmup 1 shows the second one. An update of
the real model takes many minutes, and its trace gigabytes: two or three steps show the
same.
"""

import argparse
from collections.abc import Sequence

from sage_fast.commands.common import (
    add_config_argument,
    add_output_argument,
    load_run_config,
)
from sage_fast.config.errors import ConfigError

USAGE = "CONFIG [MORE.yaml ...] --output_dir FOLDER [options] [--section.key=value ...]"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_config_argument(parser)
    add_output_argument(parser)
    parser.add_argument(
        "--top",
        type=int,
        default=20,
        help="operators and phases in the table; default 20",
    )
    parser.add_argument(
        "--warmup",
        type=int,
        default=0,
        help="iterations before the profiled one; default 0",
    )
    parser.add_argument(
        "--memory", action="store_true", help="also record what operators allocate"
    )


def run(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Profile and print the table."""
    from sage_fast.planning.estimate import settle_memory
    from sage_fast.run.run import build_trainer
    from sage_fast.tools.profiling import profile_update

    for name in ("top", "warmup"):
        least = 1 if name == "top" else 0
        if getattr(options, name) < least:
            raise ConfigError(
                f"--{name} is {getattr(options, name)}; it must be at least {least}."
            )
    trainer = build_trainer(settle_memory(load_run_config(options, overrides)))
    print(
        profile_update(
            trainer,
            options.output_dir,
            warmup=options.warmup,
            memory=options.memory,
            top=options.top,
        )
    )
    print(f"Written to {options.output_dir}.")
    return 0
