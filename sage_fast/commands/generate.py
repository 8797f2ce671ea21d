"""Generate videos with the base model, a checkpoint or an adapter.

examples:
  sage-fast generate runs/mine --prompt "a red fox in the snow" --prompt "a kite at sea" --seed 3 --output_dir videos
  sage-fast generate hv15_352x624_lora_1gpu --checkpoint none --prompts my.txt --output_dir videos
  sage-fast generate runs/mine --prompts my.txt --output_dir videos         newest checkpoint of a run
  sage-fast generate hv15_480p_lora_1gpu --lora exported --prompts my.txt --output_dir videos
  sage-fast generate runs/mine --prompt "the fox runs" --image fox.png --output_dir videos      from a picture
  sage-fast generate runs/mine --output_dir noisy --sampler sage_grpo --num-videos 4
                                                                        what the exploration of the training looks like

--output_dir gets an mp4 for every video, named after its prompt, and contact_sheet.png
with frames of the first 16. A video that is in --output_dir already, made with the same
settings, is kept, so the same command continues after an interruption. A video made
with other settings is an error; --overwrite makes all of them again. Steps, guidance
and size are keys of the configuration: --evaluation.num_steps=50
--rollout.guidance_scale=6 --video.num_frames=121.
"""

import argparse
from collections.abc import Sequence

from sage_fast.commands.common import (
    add_sampling_arguments,
    load_run_config,
    prompt_words,
)
from sage_fast.config.errors import ConfigError

USAGE = "CONFIG [MORE.yaml ...] --output_dir FOLDER [options] [--section.key=value ...]"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_sampling_arguments(
        parser,
        base=", none (where the run starts)",
        num_videos=1,
        counted="videos per prompt",
    )
    parser.add_argument(
        "--sampler",
        default="ode",
        metavar="{sage_grpo,sage_exact,dance_grpo,flow_grpo,flow_grpo_wan,cps,ode}",
        help="ode, or an SDE type, with rollout.eta; default ode",
    )
    parser.add_argument(
        "--solver",
        metavar="{euler,unipc}",
        help="of the ode; default: evaluation.solver",
    )
    parser.add_argument(
        "--prompt",
        action="append",
        default=[],
        metavar="TEXT",
        help=(
            "a prompt, in any language that the model reads; repeat the option for more"
        ),
    )
    parser.add_argument(
        "--image",
        action="append",
        default=[],
        metavar="FILE",
        help=(
            "image-to-video: the picture that the video begins with; one for all "
            "prompts, or one for each"
        ),
    )


def run(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Write the videos."""
    from sage_fast.records import Prompt
    from sage_fast.tools.api import generate

    if options.prompt and options.prompts is not None:
        raise ConfigError(
            "--prompt and --prompts were both given. Give texts, or one file."
        )
    if options.image and (
        not options.prompt or len(options.image) not in (1, len(options.prompt))
    ):
        raise ConfigError(
            f"{len(options.image)} --image and {len(options.prompt)} --prompt were "
            "given. Give one picture for all "
            "prompts or one for each; a prompt file names pictures in its column "
            "'image'."
        )
    pictures = options.image * (len(options.prompt) if len(options.image) == 1 else 1)
    # Without pictures this is empty, and the texts go on alone.
    texts = enumerate(zip(options.prompt, pictures, strict=False))
    pictured = [
        Prompt(text=text, index=index, image=file) for index, (text, file) in texts
    ]
    paths = generate(
        load_run_config(
            options, [*prompt_words(options), *overrides], builds_rewards=False
        ),
        pictured or options.prompt or None,
        options.output_dir,
        checkpoint=options.checkpoint,
        lora=options.lora,
        sampler=options.sampler,
        solver=options.solver,
        num_videos=options.num_videos,
        overwrite=options.overwrite,
        allow_cpu=options.allow_cpu,
    )
    print(f"{len(paths)} videos and contact_sheet.png are in {options.output_dir}/")
    return 0
