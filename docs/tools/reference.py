"""Reference pages, made from what the program itself uses: its argument parsers and its
configuration classes.
"""

import argparse
from collections.abc import Iterator
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Any

import yaml

from sage_fast.commands.cli import add_commands
from sage_fast.config.load import meanings, type_of
from sage_fast.config.schema import RunConfig
from sage_fast.config.sections import FIXED, FREE

GENERATED = "*Generated from the source by `make docs`.*\n"


def commands() -> str:
    """Markdown of every command: usage, options and examples, from the parsers of the
    command line.
    """
    parsers = argparse.ArgumentParser(prog="sage-fast").add_subparsers(prog="sage-fast")
    add_commands(parsers)
    parts = ["# Commands\n", GENERATED, "| command | what it does |\n|---|---|"]
    parts += [
        f"| [`sage-fast {name}`](#sage-fast-{name}) | {parser.description} |"
        for name, parser in parsers.choices.items()
    ]
    for parser in parsers.choices.values():
        parts += _command(parser)
    return "\n".join(parts) + "\n"


def _command(parser: argparse.ArgumentParser) -> Iterator[str]:
    yield f"\n## {parser.prog}\n"
    yield f"{parser.description or ''}\n"
    yield f"```text\n{parser.format_usage().removeprefix('usage: ').rstrip()}\n```\n"
    hidden = (None, argparse.SUPPRESS)
    rows = [
        _option(action)
        for action in parser._actions
        if action.dest != "help" and action.help not in hidden
    ]
    if rows:
        yield "| option | meaning |\n|---|---|"
        yield from rows
    if parser.epilog:
        yield f"\n```text\n{parser.epilog.rstrip()}\n```\n"


def _option(action: argparse.Action) -> str:
    value = action.metavar or (
        action.dest.upper() if action.nargs != 0 and action.option_strings else ""
    )
    if action.choices:
        value = ", ".join(map(str, action.choices))
    names = action.option_strings or [str(action.metavar or action.dest)]
    shown = ", ".join(f"`{name}`" for name in names) + (
        f" `{value}`" if value and action.option_strings else ""
    )
    return f"| {shown} | {_cell(action.help or '')} |"


def configuration() -> str:
    """Markdown of every configuration key: type, default, meaning, and whether a
    resumed run may change it.
    """
    intro = (
        "A YAML file sets these keys, and `--section.key=value` overrides one on the "
        "command line. The last column "
        "says what a\nresumed run may do with a key: change it freely, change it if "
        "`--allow-changes` names it, or not "
        "at all\n([why](../reliability.md#continue-a-run)).\n"
    )
    parts = ["# Configuration keys\n", GENERATED, intro, *_section(RunConfig, "", "")]
    return "\n".join(parts) + "\n"


def _section(config: type, prefix: str, inherited: str) -> Iterator[str]:
    """The keys of a class as a table, then its sections, each under a heading."""
    if prefix:
        yield f"\n## {prefix.rstrip('.')}\n"
        yield f"{(config.__doc__ or '').partition(chr(10) * 2)[0].strip()}\n"
    yield "| key | type | default | meaning | on resume |\n|---|---|---|---|---|"
    sections = []
    for f in fields(config):
        resume = (
            "free"
            if FREE in f.metadata
            else "fixed"
            if FIXED in f.metadata
            else inherited
        )
        if isinstance(f.type, type) and is_dataclass(f.type):
            sections.append((f, resume))
            continue
        key = f"`{prefix}{f.name}`"
        kind = _cell(f"`{type_of(prefix + f.name)}`")
        meaning = _cell(meanings()[f"{prefix}{f.name}"])
        yield (
            f"| {key} | {kind} | {_default(f)} | {meaning} | {resume or 'if allowed'} |"
        )
    for f, resume in sections:
        yield from _section(f.type, f"{prefix}{f.name}.", resume)


def _default(f: "Field[Any]") -> str:
    if f.default is MISSING and f.default_factory is MISSING:
        return "required"
    value = f.default if f.default_factory is MISSING else f.default_factory()
    text = yaml.safe_dump(
        list(value) if isinstance(value, tuple) else value,
        default_flow_style=True,
        width=10**6,
    )
    return _cell(f"`{text.removesuffix('...' + chr(10)).strip()}`")


def _cell(text: str) -> str:
    """Text as a cell of a table."""
    return " ".join(text.split()).replace("|", "\\|")
