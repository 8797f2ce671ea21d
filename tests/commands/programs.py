"""Parses a command as the program that it calls would, without running it."""

import re
import shlex

from huggingface_hub.cli.hf import app
from torch.distributed.run import get_args_parser

from sage_fast.commands.cli import parse
from sage_fast.config.load import load_config


def check_command(command: str) -> None:
    """Raises, or ends the process as the program would, unless the command is one: its program takes the words."""
    words = shlex.split(command)
    while re.match(r"[A-Z_]+=", words[0]):
        words = words[1:]
    program, *arguments = words
    match program:
        case "hf":
            _check_download(arguments)
        case "torchrun":
            options = get_args_parser().parse_args(arguments)
            assert options.module and options.training_script == "sage_fast"
            _check_own(options.training_script_args)
        case "sage-fast":
            _check_own(arguments)
        case "modelscope":  # the only one that this project does not install
            assert re.fullmatch(r"download --model [\w-]+/[\w.-]+ --local_dir \S+", shlex.join(arguments))
        case _:
            raise AssertionError(f"{program} is no program of this project")


def _check_download(arguments: list[str]) -> None:
    with app.make_context("hf", arguments) as context:
        name, command, rest = app.resolve_command(context, [*context._protected_args, *context.args])
        assert name == "download" and command is not None
        with command.make_context(name, rest, parent=context) as parsed:
            assert re.fullmatch(r"[\w.-]+/[\w.-]+", parsed.params["repo_id"])
            # A pattern that is no value of --include would be taken for the name of a file.
            assert not parsed.params["filenames"], parsed.params


def _check_own(arguments: list[str]) -> None:
    """The options exist, the configurations that are named load, and the keys that are set are keys."""
    options, overrides = parse(arguments)
    files = options.config
    more = (getattr(options, "rewards", None) or "").split(",")
    overrides = [*(f"--reward.rewards+={name}" for name in more if name), *overrides]
    if options.command == "prompts" or (options.command == "train" and options.keys):
        return
    if files and files[0].startswith("configs/"):
        load_config(files, overrides)
    else:
        assert files or options.command == "doctor"
        assert all(name.startswith("runs/") for name in files)
        load_config("configs/toy_cpu.yaml", overrides)
