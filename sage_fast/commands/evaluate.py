"""`sage-fast evaluate`: score a trained model against its base model, in pairs, and write a report."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from sage_fast.commands.common import (
    adapter,
    add_config_argument,
    add_prompt_arguments,
    load_run_config,
    trained_weights,
    with_prompt_options,
)

EPILOG = """\
examples:
  sage-fast evaluate runs/mine --output runs/mine/scores
  sage-fast evaluate runs/mine --output scores --prompts held_out.csv --rewards clip_score,pick_score \\
      --reward.options.clip_score.path=models/clip-vit-large-patch14
  sage-fast evaluate configs/hv15_480p_lora_1gpu.yaml --lora exported --output scores
  sage-fast evaluate runs/mine --output larger --evaluation.height=480 --evaluation.width=864 --sampler cps

--output gets evaluation.{json,md,html}, contact_sheet.png, every video (base/, trained/) and the scores per prompt
(before.json, after.json). A model that has been evaluated there with the same settings is not evaluated again.
"""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "evaluate",
        usage="sage-fast evaluate CONFIG [MORE.yaml ...] --output FOLDER [options] [--section.key=value ...]",
        help="score a checkpoint against the base model, in pairs",
        description="Score a trained model and its base model on the same prompts and noise, and write a report.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_config_argument(parser)
    parser.add_argument("--output", type=Path, required=True, help="folder to write to")
    weights = parser.add_mutually_exclusive_group()
    weights.add_argument(
        "--checkpoint", default="auto", help="auto (newest of the run) or a checkpoint folder; default auto"
    )
    weights.add_argument("--lora", type=Path, help="adapter in diffusers' or the official layout")
    add_prompt_arguments(parser)
    parser.add_argument(
        "--rewards",
        metavar="NAME,NAME",
        help="rewards to measure besides those of the configuration; they have no part in the reward",
    )
    parser.add_argument("--sampler", help="ode, or an SDE type; default evaluation.sampler of the configuration")
    parser.add_argument(
        "--num-videos",
        "--num_videos",
        type=int,
        default=8,
        metavar="N",
        help="prompts whose videos the report shows; default 8",
    )
    parser.add_argument("--resamples", type=int, default=10_000, help="bootstrap samples; default 10000")
    parser.add_argument("--bootstrap_seed", type=int, default=0, help="seed of the bootstrap; default 0")
    parser.add_argument("--overwrite", action="store_true", help="evaluate again what has been evaluated there")


def run(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Evaluate both models and write the report."""
    from sage_fast.config.errors import ConfigError
    from sage_fast.planning.estimate import settle_decoding
    from sage_fast.run.run import load_eval_prompts
    from sage_fast.tools.generation import Generator
    from sage_fast.tools.paired import PairedEvaluation
    from sage_fast.tools.report import headline, to_text, write_report

    if options.num_videos < 0:
        raise ConfigError(f"--num_videos is {options.num_videos}; it must be at least 0.")
    if options.resamples < 100:
        raise ConfigError(f"--resamples is {options.resamples}; percentiles need at least 100, and 10000 are usual.")
    more = [f"--reward.rewards+={name}" for name in (options.rewards or "").split(",") if name]
    if options.sampler:
        more.append(f"--evaluation.sampler={options.sampler}")
    config = with_prompt_options(options, settle_decoding(load_run_config(options, [*more, *overrides])))
    prompts = load_eval_prompts(config)
    if len(prompts) < 2:
        file = config.evaluation.prompts or config.data.prompts
        raise ConfigError(f"A paired evaluation needs at least 2 prompts, and {file} holds one.")

    if options.lora:
        path, weights = adapter(options.lora), None
    else:
        found = trained_weights(options.checkpoint, config)
        if found is None:
            raise ConfigError(
                "evaluate compares a trained model with the base model: give --checkpoint auto or a folder, or --lora."
            )
        path, weights = found

    def use_trained(generator: Generator) -> None:
        if weights is None:
            generator.use_adapter(path)
        else:
            generator.use_weights(weights)

    evaluation = PairedEvaluation(config, prompts, options.output, path, use_trained, overwrite=options.overwrite)
    report = evaluation.report(num_videos=options.num_videos, resamples=options.resamples, seed=options.bootstrap_seed)
    paths = write_report(options.output, report)
    print(f"{len(prompts)} prompts, same noise, sampler {config.evaluation.sampler}")
    print(f"{to_text(report)}\n{headline(report)}")
    print(f"Wrote {', '.join(file.name for file in paths)} to {options.output}/")
    return 0
