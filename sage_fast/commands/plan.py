"""Predict the memory and time of a configuration, and suggest changes that make it fit.

examples:
  sage-fast plan hv15_480p_lora_1gpu
  sage-fast plan hv15_480p_lora_1gpu --memory 48
  sage-fast plan hv15_480p_lora_1gpu --device b200 --gpus 8 --json
  sage-fast plan hv15_480p_full_64gpu
  sage-fast plan toy_cpu

Nothing is loaded or downloaded: shapes run on torch's meta device. Exit status: 0 if
the configuration fits, 1 if not. How to read the output: docs/planning.md.
"""

import argparse
import json
from collections.abc import Sequence

from sage_fast.commands.common import (
    add_config_argument,
    add_gpus_argument,
    load_run_config,
)
from sage_fast.config.errors import ConfigError

DEVICES = ("h100", "h200", "a100", "b200", "rtx4090", "rtx5090", "l40s", "cpu")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_config_argument(parser)
    parser.add_argument(
        "--device",
        choices=DEVICES,
        help=(
            "default: rtx4090 for a preset of 24 GB, cpu for a small model or "
            "model.device cpu, else h100"
        ),
    )
    parser.add_argument(
        "--memory",
        type=float,
        metavar="GB",
        help="1e9 bytes that may be used; default: the device's",
    )
    add_gpus_argument(parser)
    parser.add_argument("--json", action="store_true", help="print the plan as JSON")


def run(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Print the plan; 1 when the configuration does not fit."""
    from sage_fast.models.family import describe_model
    from sage_fast.planning.devices import choose_device
    from sage_fast.planning.estimate import find_options, make_plan
    from sage_fast.planning.text import to_json, to_text
    from sage_fast.planning.work import least_gpus

    if options.memory is not None and not 0 < options.memory < 1e9:
        raise ConfigError(
            f"--memory is {options.memory:g}; it must be more than 0 and less than 1e9."
        )
    config = load_run_config(options, overrides)
    description = describe_model(config.model)
    device = choose_device(
        options.device, config.model.device, description.width, options.config
    )
    if options.gpus is None:
        gpus = least_gpus(config.distributed, config.rollout)
    else:
        gpus = options.gpus
    if not device.is_gpu and gpus > 1:
        raise ConfigError(
            f"The plan is for {gpus} processes and a CPU. Give --device h100, or "
            "--gpus 1."
        )
    plan = make_plan(
        config, device, gpus=gpus, memory_gb=options.memory, description=description
    )
    found = find_options(plan)
    print(
        json.dumps(to_json(plan, found), indent=1)
        if options.json
        else to_text(plan, found)
    )
    return 0 if plan.fits else 1
