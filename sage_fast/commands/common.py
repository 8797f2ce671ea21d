"""What the commands share: words of the command line, the configuration, the chosen weights."""

import argparse
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from sage_fast.config.schema import RunConfig

DASHES = "-\N{HYPHEN}\N{NON-BREAKING HYPHEN}\N{EN DASH}\N{EM DASH}\N{MINUS SIGN}"

TRAINED_MODEL = r"model\.(family|path|variant)|lora\..*|training\.mode"
"""Keys that say which model a checkpoint's weights belong to."""


def split_words(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Configuration files and `--key=value` overrides among the words that argparse left over.

    The value of `--key value` is no file. Example: `["more.yaml", "--resume", "auto", "--seed=1"]` gives
    `(["more.yaml"], ["--resume", "auto", "--seed=1"])`.
    """
    files: list[str] = []
    overrides: list[str] = []
    takes_value = False
    for word in words:
        if word.startswith("--"):
            overrides.append(word)
            takes_value = "=" not in word
        else:
            (overrides if takes_value else files).append(word)
            takes_value = False
    return files, overrides


def load_run_config(
    options: argparse.Namespace, overrides: Sequence[str], *, builds_rewards: bool = True
) -> "RunConfig":
    """The configuration that files (the first may be a run directory) and overrides make together.

    Args:
        options: with `config`, the files, and `trust_config`.
        overrides: `--section.key=value` words.
        builds_rewards: whether the command calls the rewards of the configuration.

    Raises:
        ConfigError: it cannot run, or a run directory names code that the user has neither named nor trusted.
    """
    from sage_fast.config.errors import ConfigError
    from sage_fast.config.load import check_trust, load_config, named_code

    if not options.config:
        return load_config(None, overrides)
    for word in options.config:
        _check_file_word(word)
    first, *more = (Path(name) for name in options.config)
    if not first.is_dir():
        return load_config([first, *more], overrides)
    if not (first / "config.yaml").is_file():
        raise ConfigError(f"{first} is a directory without config.yaml, so it is no run. Give a run or a YAML file.")
    # The directory may have been moved since: its checkpoints are where it is now.
    config = load_config([first / "config.yaml", *more], [f"--output_dir={first}", *overrides])
    if not options.trust_config:
        check_trust(config, first, named_code(more, overrides), rewards=builds_rewards)
    return config


def _check_file_word(word: str) -> None:
    """ConfigError for an override that lacks its dashes and so was taken for a file."""
    from sage_fast.config.errors import ConfigError

    if ("=" in word or word.startswith(tuple(DASHES))) and not os.path.lexists(word):
        # Word processors and chat windows make other dashes of two hyphens.
        raise ConfigError(
            f"There is no file {word!r}. If it sets a key, write two hyphens before it: --{word.lstrip(DASHES)}"
        )


def add_config_argument(parser: argparse.ArgumentParser, nargs: str = "+") -> None:
    """The positional CONFIG [MORE.yaml ...]."""
    parser.add_argument(
        "config",
        nargs=nargs,
        metavar="CONFIG",
        help="YAML file or run directory; further YAML files are laid over it, left to right, then --section.key=value",
    )
    add_trust_argument(parser)


def add_trust_argument(parser: argparse.ArgumentParser) -> None:
    """The option --trust-config."""
    parser.add_argument(
        "--trust-config",
        action="store_true",
        help="import and call code of other packages (package.module:name) that a run directory's configuration names",
    )


def add_prompt_arguments(parser: argparse.ArgumentParser) -> None:
    """Which prompts, from which noise."""
    parser.add_argument("--prompts", help="prompt file (.csv, .jsonl, .txt); default: the run's evaluation prompts")
    parser.add_argument(
        "--seed",
        "--noise_seed",
        dest="noise_seed",
        type=int,
        metavar="N",
        help="seed of the noise (a prompt's own seed goes before it); default: evaluation.seed",
    )


def with_prompt_options(options: argparse.Namespace, config: "RunConfig") -> "RunConfig":
    """The config with --prompts and --seed in it."""
    evaluation = config.evaluation
    if options.prompts:
        evaluation = replace(evaluation, prompts=options.prompts, num_prompts=None)
    if options.noise_seed is not None:
        evaluation = replace(evaluation, seed=options.noise_seed)
    return replace(config, evaluation=evaluation)


def trained_weights(checkpoint: str, config: "RunConfig") -> "tuple[Path, Mapping[str, Tensor]] | None":
    """Folder and weights of the chosen checkpoint: the averaged weights where the run kept an average.

    The weights are read from disk one at a time, as they are looked up.

    Args:
        checkpoint: `auto` (newest of the run), `none` (the base model), or a folder.

    Returns:
        None where the base model is meant.

    Raises:
        ConfigError: nothing to choose from, or a checkpoint of another model. CheckpointError: a damaged one.
    """
    from sage_fast.checkpoint import find_checkpoint
    from sage_fast.config.errors import ConfigError
    from sage_fast.config.schema import to_dict
    from sage_fast.run.resume import check_same_run

    root = Path(config.output_dir) / "checkpoints"
    found = find_checkpoint(checkpoint, root)
    if found is None:
        if checkpoint == "auto":
            raise ConfigError(
                f"{root} holds no complete checkpoint. Give --checkpoint FOLDER, or --checkpoint none for the base "
                "model."
            )
        return None
    check_same_run(found.state["config"], to_dict(config), found.folder, only=TRAINED_MODEL)
    return found.folder, found.tensors.get("ema", found.tensors["weights"])


def adapter(path: Path) -> Path:
    """The file of the adapter that --lora names. ConfigError when there is none."""
    from sage_fast.config.errors import ConfigError
    from sage_fast.policy.trained import adapter_file

    try:
        return adapter_file(path)
    except ValueError as error:
        raise ConfigError(f"--lora: {error}") from error


def program() -> str:
    """How this program was called, for a command that can be pasted."""
    name = Path(sys.argv[0]).name
    return "python -m sage_fast" if name == "__main__.py" else sys.argv[0] if name == "sage-fast" else "sage-fast"


def command_line(*words: str) -> str:
    """A command that can be pasted, called as this program was."""
    return f"{program()} {shlex.join(words)}"
