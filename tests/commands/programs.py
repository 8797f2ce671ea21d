"""Parses a command as the program that it calls would, without running it."""

import argparse
import importlib.util
import re
import runpy
import shlex
import sys
import warnings
from collections.abc import Iterable
from pathlib import Path
from unittest import mock

from huggingface_hub.cli.hf import app
from torch.distributed.run import get_args_parser

import experiments.__main__ as experiments
from experiments.claims import chosen_experiments
from sage_fast.commands.cli import parse
from sage_fast.config.load import load_config, preset_names

ROOT = Path(__file__).resolve().parents[2]
SETUP = (ROOT / "setup.py").read_text("utf-8")
TARGETS = set(
    re.findall(r"^([a-z-]+):.*## ", (ROOT / "Makefile").read_text("utf-8"), re.M)
)


def check_command(command: str) -> None:
    """Raises, or ends the process as the program would, unless the command is one: its
    program takes the words.
    """
    words = shlex.split(command)
    while re.match(r"[A-Z_]+=", words[0]):
        words = words[1:]
    program, *arguments = words
    match program.removeprefix(".venv/bin/"):
        case "hf":
            _check_download(arguments)
        case "torchrun":
            options = get_args_parser().parse_args(arguments)
            assert options.module and options.training_script == "sage_fast"
            _check_own(options.training_script_args)
        case "sage-fast":
            _check_own(arguments)
        case "make":
            assert {word for word in arguments if "=" not in word} <= TARGETS
        case "python":
            _check_module(arguments)
        case "pytest":
            _check_files(word for word in arguments if "/" in word)
        case "pip":
            check_extras(command)
        case "sbatch":
            export, script = arguments
            _check_files([script, re.sub(r".*\bCONFIG=([^,]+).*", r"\1", export)])
        case "configs/launch/torchrun.sh" | ".ci/run":
            _check_files([program, *arguments[1:]])
        case "modelscope":  # from here on, programs that this project does not install
            assert re.fullmatch(
                r"download --model [\w-]+/[\w.-]+ --local_dir \S+",
                shlex.join(arguments),
            )
        case "tensorboard" | "git" | "source" | "ulimit" | "touch":
            pass
        case _:
            raise AssertionError(f"{program} is not a program of this project")


def check_extras(text: str) -> None:
    """AssertionError unless every extra of the package that a text names (`.[gpu]`,
    `sage-fast[gpu]`) exists.
    """
    for extras in re.findall(r"(?:sage-fast|\.)\[([\w, -]+)\]", text):
        for extra in re.split(r", *", extras):
            assert f'    "{extra}": [' in SETUP, extra


def _check_files(names: Iterable[str]) -> None:
    missing = [
        name
        for name in names
        if not (ROOT / name).exists() and name not in preset_names()
    ]
    assert not missing, missing


class _Parsed(Exception):
    """The program has parsed its arguments, which is all that was wanted of it."""


def run_module(module: str, arguments: Iterable[str]) -> None:
    """Do what `python -m MODULE ARGUMENTS` does, in this process; SystemExit where the
    program ends by one.
    """
    with (
        mock.patch.object(sys, "argv", [module, *arguments]),
        warnings.catch_warnings(),
    ):
        # that the module is imported already
        warnings.simplefilter("ignore", RuntimeWarning)
        runpy.run_module(module, run_name="__main__")


def own_programs() -> list[str]:
    """Modules of this project that `python -m` starts."""
    files = [
        file.relative_to(
            ROOT / "kernels" if folder == "kernels/sage_kernels" else ROOT
        ).with_suffix("")
        for folder in (
            "sage_fast",
            "kernels/sage_kernels",
            "benchmarks",
            "experiments",
            "examples",
            "docs/tools",
        )
        for file in sorted((ROOT / folder).rglob("*.py"))
        if 'if __name__ == "__main__":' in file.read_text("utf-8")
    ]
    return [".".join(file.parts).removesuffix(".__main__") for file in files]


def _check_module(arguments: list[str]) -> None:
    """`python -m MODULE ...`: the module exists, and parses the arguments; it does
    nothing more.
    """
    assert arguments[0] == "-m"
    _, module, *rest = arguments
    if module == "pytest":
        return check_command(shlex.join(arguments[1:]))
    if module == "sage_fast":
        return _check_own(rest)
    if module in ("pip", "mkdocs"):  # which have other parsers
        assert importlib.util.find_spec(module) is not None, module
        return None
    if module == "experiments":
        options, overrides = experiments.parse(rest)
        load_config(options.config or experiments.DEFAULT_CONFIG, overrides)
        chosen_experiments(
            options.tier, [key for key in options.only.split(",") if key]
        )
        return None
    parse = argparse.ArgumentParser.parse_known_args

    def stop(parser: argparse.ArgumentParser, *given: object) -> None:
        unknown = parse(parser, *given)[1]  # type: ignore[call-overload]
        assert module == "sage_fast.rewards.server" or not unknown, unknown
        raise _Parsed

    with mock.patch.object(argparse.ArgumentParser, "parse_known_args", stop):
        try:
            run_module(
                module, ["kernels" if word == "<command>" else word for word in rest]
            )
        except _Parsed:
            return None
    raise AssertionError(
        f"{shlex.join(arguments)} ended before it parsed its arguments"
    )


def _check_download(arguments: list[str]) -> None:
    with app.make_context("hf", arguments) as context:
        name, command, rest = app.resolve_command(
            context, [*context._protected_args, *context.args]
        )
        assert name == "download" and command is not None
        with command.make_context(name, rest, parent=context) as parsed:
            assert re.fullmatch(r"[\w.-]+/[\w.-]+", parsed.params["repo_id"])
            # A pattern that is not a value of --include would be taken for the name of
            # a file.
            assert not parsed.params["filenames"], parsed.params


def _check_own(arguments: list[str]) -> None:
    """The options exist, the configurations that are named load, and the keys that are
    set are keys.
    """
    options, overrides = parse(arguments)
    # A file without a folder is the reader's own.
    files = [
        file
        for file in options.config
        if "/" in file or not file.endswith((".yaml", ".csv", ".txt"))
    ]
    more = (getattr(options, "rewards", None) or "").split(",")
    overrides = [*(f"--reward.rewards+={name}" for name in more if name), *overrides]
    if options.command in ("configs", "status") or (
        options.command == "train" and options.keys is not None
    ):
        return
    assert options.config or options.command == "doctor"
    if not files or f"{files[0]}/".startswith("runs/"):
        files = ["toy_cpu"]
    load_config(files, overrides)
