"""The command line: `sage-fast {train,generate,evaluate}`.

Heavy imports happen inside the commands, so that `--help` and a wrong option answer at once. Exit status: 0 done or
stopped on request, 1 the run failed, 2 the command or the configuration is wrong, 130 interrupted twice.
"""

import argparse
import logging
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sage_fast import __version__

if TYPE_CHECKING:
    from torch import Tensor

    from sage_fast.config import RunConfig
    from sage_fast.trainer import Trainer

TRAIN_EPILOG = """\
examples:
  sage-fast train configs/toy_cpu.yaml
  sage-fast train configs/toy_cpu.yaml --output_dir runs/dance --rollout.sde_type=dance_grpo --resume auto
  sage-fast train configs/toy_cpu.yaml --print_config        the resolved configuration, as YAML
  sage-fast train --keys                                     every key with its meaning and default
"""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="sage-fast", description="GRPO post-training of text-to-video flow models (HunyuanVideo-1.5)."
    )
    parser.add_argument("--version", action="version", version=f"sage-fast {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    train = commands.add_parser(
        "train",
        usage="sage-fast train CONFIG [--section.key=value ...]",
        help="train, or go on with a run",
        description="Train a model as a YAML file says. Any key can be overridden: --section.key=value.",
        epilog=TRAIN_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    train.add_argument("config", nargs="?", help="YAML file of the run")
    train.add_argument("--print_config", action="store_true", help="print the resolved configuration and exit")
    train.add_argument("--keys", action="store_true", help="list every configuration key and exit")

    generate = commands.add_parser(
        "generate",
        help="write videos for a file of prompts",
        description="Generate one video (or several) per prompt with the base model or a checkpoint of a run.",
    )
    evaluate = commands.add_parser(
        "evaluate",
        help="score a checkpoint against the base model, in pairs",
        description="Score a checkpoint and the base model on the same prompts and noise and print the paired test.",
    )
    for command in (generate, evaluate):
        command.usage = f"sage-fast {command.prog.split()[-1]} CONFIG [options] [--section.key=value ...]"
        command.add_argument("config", help="run directory, or YAML file of a run; keys can be overridden as in train")
        command.add_argument(
            "--checkpoint",
            default="auto",
            help="auto (newest of the run), none (the base model), or a checkpoint folder; default auto",
        )
        command.add_argument("--output", type=Path, required=True, help="folder to write to")
        command.add_argument("--prompts", help="prompt file; default: the evaluation prompts of the run")
        command.add_argument(
            "--noise_seed",
            type=int,
            help="seed of the noise (a prompt's own seed goes before it); default: evaluation.seed",
        )
    generate.add_argument("--num_videos", type=int, default=1, help="videos per prompt; default 1")
    generate.add_argument(
        "--sampler",
        default="ode",
        help="ode, or an SDE type to look at its exploration (with rollout.eta); default ode",
    )
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status."""
    options, overrides = _parser().parse_known_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s", stream=sys.stderr)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    try:
        return _run(options, overrides)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def _run(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    from sage_fast.config import ConfigError

    try:
        return {"train": _train, "generate": _generate, "evaluate": _evaluate}[options.command](options, overrides)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except (RuntimeError, OSError, MemoryError) as error:
        if not _is_expected(error):
            raise
        print(f"error: {_describe(error)}", file=sys.stderr)
        return 1


def _is_expected(error: Exception) -> bool:
    """Whether the message alone tells the user what happened; anything else keeps its traceback."""
    from sage_fast.checkpoint import CheckpointError
    from sage_fast.rewards.base import RewardError
    from sage_fast.trainer import TrainingError

    return isinstance(error, TrainingError | RewardError | CheckpointError | OSError) or _is_out_of_memory(error)


def _is_out_of_memory(error: Exception) -> bool:
    import torch

    return isinstance(
        error, torch.OutOfMemoryError | MemoryError
    ) or "DefaultCPUAllocator: can't allocate memory" in str(error)


def _describe(error: Exception) -> str:
    from sage_fast.rewards.base import RewardError

    if _is_out_of_memory(error):
        return (
            f"out of memory: {str(error).splitlines()[0]}\nLower rollout.micro_batch_size or evaluation.batch_size, or "
            "set model.checkpointing to selective; --resume auto goes on from the last checkpoint."
        )
    if isinstance(error, OSError | RewardError):
        return f"{error}\nWhat was saved before is intact; when the cause is mended, --resume auto goes on."
    return str(error)


def _config(options: argparse.Namespace, overrides: Sequence[str]) -> "RunConfig":
    from sage_fast.config import ConfigError
    from sage_fast.config_file import load_config

    if options.config is not None and options.config.startswith("-"):
        raise ConfigError(f"expected a YAML file before {options.config!r}")
    if options.config is None:
        return load_config(None, overrides)
    path = Path(options.config)
    if not path.is_dir():
        return load_config(path, overrides)
    # The directory may have been moved since: its checkpoints are where it is now.
    return load_config(path / "config.yaml", [f"--output_dir={path}", *overrides])


def _train(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    from sage_fast.config import ConfigError
    from sage_fast.config_file import build_parser, dump_config

    if options.keys:
        print(build_parser(prog="sage-fast train CONFIG", usage="%(prog)s [--section.key=value ...]").format_help())
        return 0
    if options.config is None and not overrides:
        raise ConfigError("which run? Give a YAML file: sage-fast train configs/toy_cpu.yaml")
    config = _config(options, overrides)
    if options.print_config:
        print(dump_config(config), end="")
        return 0

    from sage_fast.run import Run

    result = Run(config).train()
    if not result.finished:
        words = ["train", *filter(None, [options.config]), *_without_resume(overrides), "--resume", "auto"]
        print(f"Stopped after update {result.update}. Go on with:\n  {_program()} {shlex.join(words)}")
        return 0
    pictures = [name for name in ("reward.png", "before_after.png") if (result.output_dir / name).exists()]
    print(f"Done: {result.output_dir}/ (look at {' and '.join(pictures)})")
    return 0


def _program() -> str:
    """How this program was called, for a command that can be pasted."""
    name = Path(sys.argv[0]).name
    return "python -m sage_fast" if name == "__main__.py" else sys.argv[0] if name == "sage-fast" else "sage-fast"


def _without_resume(overrides: Sequence[str]) -> list[str]:
    words = list(overrides)
    while "--resume" in words:
        i = words.index("--resume")
        del words[i : i + 2]
    return [w for w in words if not w.startswith("--resume=")]


def _load_trained(options: argparse.Namespace, config: "RunConfig") -> "tuple[Trainer, Mapping[str, Tensor] | None]":
    """A trainer with the base weights, and those of the chosen checkpoint that are meant to be used: the averaged ones
    where the run kept an average. None: the base model is meant.
    """
    from sage_fast.checkpoint import find_checkpoint, load_checkpoint
    from sage_fast.config import ConfigError, to_dict
    from sage_fast.run import build_trainer, check_same_run

    root = Path(config.output_dir) / "checkpoints"
    folder = find_checkpoint(options.checkpoint, root)
    if options.checkpoint == "auto" and folder is None:
        raise ConfigError(
            f"{root} holds no complete checkpoint. Give --checkpoint FOLDER, or --checkpoint none for the base model."
        )
    if folder is None:
        return build_trainer(config), None
    data = load_checkpoint(folder)
    check_same_run(data.state["config"], to_dict(config), folder, only=r"model\.(family|path)|lora\..*|training\.mode")
    return build_trainer(config), data.tensors.get("ema", data.tensors["weights"])


def _with_options(options: argparse.Namespace, config: "RunConfig") -> "RunConfig":
    from dataclasses import replace

    evaluation = config.evaluation
    if options.prompts:
        evaluation = replace(evaluation, prompts=options.prompts, num_prompts=None)
    if options.noise_seed is not None:
        evaluation = replace(evaluation, seed=options.noise_seed)
    return replace(config, evaluation=evaluation)


def _generate(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    from sage_fast.generate import generate

    config = _with_options(options, _config(options, overrides))
    trainer, weights = _load_trained(options, config)
    if weights is not None:
        trainer.load_weights(weights)
    paths = generate(trainer, options.output, sampler=options.sampler, num_videos=options.num_videos)
    print(f"Wrote {len(paths)} videos and contact_sheet.png to {options.output}/")
    return 0


def _evaluate(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    from sage_fast.config import ConfigError
    from sage_fast.evaluation import format_comparison

    config = _with_options(options, _config(options, overrides))
    trainer, weights = _load_trained(options, config)
    if weights is None:
        raise ConfigError("evaluate compares a checkpoint with the base model: give --checkpoint auto or a folder.")
    if len(trainer.eval_samples) < 2:
        raise ConfigError(f"A paired evaluation needs at least 2 prompts, and {options.prompts} holds one.")
    before, _ = trainer.evaluate()
    trainer.load_weights(weights)
    after, _ = trainer.evaluate()
    before.save(options.output / "before.json")
    after.save(options.output / "after.json")
    print(f"{len(before.prompts)} prompts, same noise, ODE sampler\n{format_comparison(before, after)}")
    return 0
