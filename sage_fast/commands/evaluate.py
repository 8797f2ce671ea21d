r"""Score a trained model against its base model on the same prompts and noise.

examples:
  sage-fast evaluate runs/mine --output_dir runs/mine/scores
  sage-fast evaluate runs/mine --output_dir scores --prompts held_out.csv --rewards clip_score,pick_score \
      --reward.options.clip_score.path=models/clip-vit-large-patch14
  sage-fast evaluate hv15_480p_lora_1gpu --lora exported --output_dir scores
  sage-fast evaluate runs/mine --output_dir larger --evaluation.height=480 --evaluation.width=864

--output_dir gets evaluation.{json,html}, contact_sheet.png, every video (base/,
trained/) and the scores per prompt (before.json, after.json). A model that has been
evaluated there with the same settings is not evaluated again.
"""

import argparse
from collections.abc import Sequence

from sage_fast.commands.common import (
    add_sampling_arguments,
    load_run_config,
    prompt_words,
)

USAGE = "CONFIG [MORE.yaml ...] --output_dir FOLDER [options] [--section.key=value ...]"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_sampling_arguments(
        parser, base="", num_videos=8, counted="prompts whose videos the report shows"
    )
    parser.add_argument(
        "--rewards",
        metavar="NAME,NAME",
        help="more rewards to measure; they do not count in the reward",
    )
    parser.add_argument(
        "--resamples", type=int, default=10_000, help="bootstrap samples; default 10000"
    )


def run(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Evaluate both models and write the report."""
    from sage_fast.tools.api import evaluate

    more = [
        f"--reward.rewards+={name}"
        for name in (options.rewards or "").split(",")
        if name
    ]
    config = load_run_config(options, [*more, *prompt_words(options), *overrides])
    report = evaluate(
        config,
        options.output_dir,
        checkpoint=options.checkpoint,
        lora=options.lora,
        num_videos=options.num_videos,
        resamples=options.resamples,
        overwrite=options.overwrite,
        allow_cpu=options.allow_cpu,
    )
    print(f"{len(report.base.prompts)} prompts, {report.base.noise}\n{report}")
    print(
        "Wrote evaluation.html and .json, a contact sheet, scores and videos to "
        f"{options.output_dir}/"
    )
    return 0
