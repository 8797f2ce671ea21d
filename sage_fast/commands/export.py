"""Export trained weights for diffusers, ComfyUI, musubi-tuner, peft, official code.

examples:
  sage-fast export runs/mine --output_dir exported                           the adapter of the newest checkpoint
  sage-fast export runs/mine/checkpoints/update-000040 --output_dir exported
  sage-fast export runs/mine --output_dir merged --format full               the whole transformer, adapter merged
  sage-fast export runs/mine --output_dir official --layout official         for `generate.py --lora_path official`
  sage-fast export runs/mine --output_dir best --checkpoint best             of the run's best evaluation
  sage-fast export runs/mine --output_dir exported --push_to_hub me/mine     and upload it to the Hugging Face hub

An adapter has the layout of one program, and most programs ignore any other layout
silently:
  diffusers   diffusers                             comfyui   ComfyUI, diffusion-pipe
  official    Tencent's generate.py, LightX2V       musubi    musubi-tuner
  peft        peft, vLLM-Omni

FOLDER/README.md says how to load it; --push_to_hub publishes the folder.
With training.ema_decay set the averaged weights are exported: those that the run
evaluated.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from sage_fast.commands.common import add_output_argument, add_trust_argument
from sage_fast.config.errors import ConfigError

USAGE = "CHECKPOINT_OR_RUN --output_dir FOLDER [options] [--section.key=value ...]"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument(
        "config",
        nargs=1,
        metavar="CHECKPOINT_OR_RUN",
        help="checkpoint folder, or run directory",
    )
    add_trust_argument(parser)
    add_output_argument(parser)
    parser.add_argument(
        "--format",
        choices=["lora", "full"],
        help=(
            "lora: the adapter; full: the whole transformer; default: what the run "
            "trained"
        ),
    )
    parser.add_argument(
        "--layout",
        choices=["diffusers", "official", "comfyui", "musubi", "peft"],
        default="diffusers",
        help="program that an adapter is for; default diffusers",
    )
    parser.add_argument(
        "--checkpoint",
        default="auto",
        help="of a run: auto (the newest), best (by its evaluations) or a folder",
    )
    parser.add_argument(
        "--overwrite",
        action="store_true",
        help="replace an export of another run, format or layout in the folder",
    )
    parser.add_argument(
        "--push-to-hub",
        metavar="REPOSITORY",
        help="upload the folder there, as me/mine, by the token of `hf auth login`",
    )


def run(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Write the export."""
    from sage_fast.tools.exporting import export

    if len(options.config) != 1:
        raise ConfigError(
            f"export takes one checkpoint or run, and got {len(options.config)}: "
            f"{options.config}."
        )
    result = export(
        Path(options.config[0]),
        options.output_dir,
        checkpoint=options.checkpoint,
        format=options.format,
        layout=options.layout,
        overrides=overrides,
        trust_config=options.trust_config,
        overwrite=options.overwrite,
        push_to_hub=options.push_to_hub,
    )
    kind = "adapter" if result.format == "lora" else "transformer"
    print(
        f"Wrote the {kind} after update "
        f"{result.update}{' (averaged weights)' if result.averaged else ''} to "
        f"{result.folder}/; README.md there says how to load it."
    )
    if options.push_to_hub is not None:
        print(f"Uploaded it to https://huggingface.co/{options.push_to_hub}")
    return 0
