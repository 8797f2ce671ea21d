"""Shared parts of the commands: words of the command line and the configuration."""

import argparse
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sage_fast.config.errors import ConfigError

if TYPE_CHECKING:
    from sage_fast.config.schema import RunConfig

KEY = re.compile(r"--(\w+\.[^=]+|seed|resume|config|output[-_]dir)")
"""A key of the configuration whose value is the next word; no option of a command has a
dot in it.
"""

BARE_OVERRIDE = re.compile(
    "[-\N{HYPHEN}\N{NON-BREAKING HYPHEN}\N{EN DASH}\N{EM DASH}\N{MINUS SIGN}]*"
    r"([A-Za-z_][\w.]*\+?=.*)",
    re.DOTALL,
)
"""An override as Hydra writes it, such as rollout.eta=0.3, or behind the dash that word
processors make of two hyphens.
"""


def join_values(words: Sequence[str]) -> list[str]:
    """The words for argparse, which would take the VALUE of `--key VALUE` for a file:
    `--key=VALUE`. Options without a dot have hyphens, as they are declared.
    """
    joined: list[str] = []
    for word in words:
        if joined and KEY.fullmatch(joined[-1]) and not word.startswith("--"):
            joined[-1] += f"={word}"
        else:
            joined.append(_spelled(word, "_", "-"))
    return joined


def _spelled(word: str, old: str, new: str) -> str:
    """A word whose name before the `=`, if it is an option without a section, has other
    marks between its words.
    """
    name = re.match(r"--[\w-]+(?=$|=)", word)
    if name is None:
        return word
    return "--" + name[0][2:].replace(old, new) + word[name.end() :]


def split_words(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Configuration files and `--key=value` overrides among the words that argparse
    left over. `key=value` is an override unless there is such a file.

    Example: `["more.yaml", "--output-dir=a", "seed=1"]` gives `(["more.yaml"],
    ["--output_dir=a", "--seed=1"])`.
    """
    files: list[str] = []
    overrides: list[str] = []
    for word in words:
        if word.startswith("--"):
            overrides.append(_spelled(word, "-", "_"))
        elif os.path.lexists(word):
            files.append(word)
        elif bare := BARE_OVERRIDE.fullmatch(word):
            overrides.append(f"--{bare[1]}")
        else:
            files.append(word)
    return files, overrides


def load_run_config(
    options: argparse.Namespace,
    overrides: Sequence[str],
    *,
    builds_rewards: bool = True,
) -> "RunConfig":
    """The configuration that files (the first may be a run directory) and overrides
    make together.

    Args:
        options: with `config`, the files, and `trust_config`.
        overrides: `--section.key=value` words.
        builds_rewards: whether the command calls the rewards of the configuration.

    Raises:
        ConfigError: it cannot run, or a run directory names code that the user has
            neither named nor trusted.
    """
    from sage_fast.config.load import check_trust, config_file, load_config, named_code
    from sage_fast.run.directory import RunDirectory

    if not options.config:
        return load_config(None, overrides)
    first = Path(options.config[0])
    more = options.config[1:]
    if not RunDirectory(first).is_run:
        if os.path.isdir(first) and not os.path.isfile(config_file(first)):
            raise ConfigError(
                f"{first} is a directory without config.yaml, so it is not a run. "
                "Give a run, a YAML file or a preset."
            )
        return load_config(options.config, overrides)
    # The directory may have been moved since: its checkpoints are where it is now.
    config = load_config(
        [RunDirectory(first).config, *more], [f"--output_dir={first}", *overrides]
    )
    if not options.trust_config:
        check_trust(config, first, named_code(more, overrides), rewards=builds_rewards)
    return config


def add_config_argument(parser: argparse.ArgumentParser, nargs: str = "+") -> None:
    """The positional CONFIG [MORE.yaml ...]."""
    argument: Any = parser.add_argument(
        "config",
        nargs=nargs,
        metavar="CONFIG",
        help="preset (`sage-fast configs` lists them), YAML file or run directory; further "
        "presets or files are laid "
        "over it, left to right, then --section.key=value",
    )
    argument.completer = _presets
    add_trust_argument(parser)


def _presets(**_: object) -> list[str]:
    """Names that a shell completes."""
    from sage_fast.config.load import preset_names

    return preset_names()


def add_trust_argument(parser: argparse.ArgumentParser) -> None:
    """The option --trust-config."""
    parser.add_argument(
        "--trust-config",
        action="store_true",
        help=(
            "import and call code of other packages (package.module:name) that a run "
            "directory's configuration names"
        ),
    )


def home_path(word: str) -> Path:
    """The path of a word, which a shell has not expanded in --output_dir=~/videos."""
    return Path(os.path.expanduser(word))


def add_output_argument(
    parser: argparse.ArgumentParser, default: Path | None = None
) -> None:
    """The option --output_dir; without a default it is required."""
    named = f"; default {default}" if default else ""
    words = ("--output_dir", "--output-dir")
    meaning = f"folder to write to{named}"
    parser.add_argument(
        *words,
        type=home_path,
        required=not default,
        default=default,
        metavar="FOLDER",
        help=meaning,
    )


def add_gpus_argument(parser: argparse.ArgumentParser) -> None:
    """The option --gpus of commands that look ahead; `train --gpus` starts the
    processes.
    """
    meaning = (
        "processes, one per GPU; default: the fewest that the `distributed` section "
        "fits"
    )
    parser.add_argument("--gpus", type=int, metavar="N", help=meaning)


def add_cpu_argument(parser: argparse.ArgumentParser) -> None:
    """The option --allow-cpu."""
    parser.add_argument(
        "--allow-cpu",
        action="store_true",
        help="run a model of more than 1e9 parameters on a CPU, at hours per video",
    )


def add_sampling_arguments(
    parser: argparse.ArgumentParser, *, base: str, num_videos: int, counted: str
) -> None:
    """Configuration, weights, prompts and noise of the videos that `generate` and
    `evaluate` make.

    base: how the base model can be asked for, where it can. num_videos: default of
    --num-videos. counted: what that number counts.
    """
    add_config_argument(parser)
    add_output_argument(parser)
    weights = parser.add_mutually_exclusive_group()
    weights.add_argument(
        "--checkpoint",
        default="auto",
        help=(
            f"auto (newest of the run), best (by its evaluations){base} or a "
            "checkpoint folder; default auto"
        ),
    )
    weights.add_argument(
        "--lora",
        type=Path,
        help=(
            "adapter: .safetensors of diffusers, peft, ComfyUI, musubi-tuner or the "
            "official code"
        ),
    )
    add_cpu_argument(parser)
    parser.add_argument(
        "--prompts",
        help="prompt file (.csv, .jsonl, .txt); default: the run's evaluation prompts",
    )
    parser.add_argument(
        "--seed",
        dest="noise_seed",
        type=int,
        metavar="N",
        help=(
            "seed of the noise, mixed with the seeds that prompts have; default: "
            "evaluation.seed"
        ),
    )
    parser.add_argument(
        "--num-videos",
        type=int,
        default=num_videos,
        metavar="N",
        help=f"{counted}; default {num_videos}",
    )
    parser.add_argument(
        "--overwrite",
        action="store_true",
        help="replace results that are there already",
    )


def prompt_words(options: argparse.Namespace) -> list[str]:
    """--prompts and --seed as overrides. Those that the user has written come after
    them, and so have the last say.
    """
    words = []
    if options.prompts is not None:
        words += [
            f"--evaluation.prompts={options.prompts}",
            "--evaluation.num_prompts=null",
        ]
    if options.noise_seed is not None:
        words.append(f"--evaluation.seed={options.noise_seed}")
    return words
