"""Configuration files: YAML to a typed `RunConfig` and back, overrides from the command line, errors that help.

Parsing is jsonargparse's (YAML into dataclasses, `--section.key=value`). A key that does not exist is an error, never
a default; the message names the key, the value, and what to change.
"""

import contextlib
import difflib
import io
import re
import warnings
from argparse import ArgumentError
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import ArgumentParser, set_parsing_settings

from sage_fast.config.errors import ConfigError
from sage_fast.config.files import replacing
from sage_fast.config.schema import RunConfig, to_dict

set_parsing_settings(docstring_parse_attribute_docstrings=True)


def build_parser(**kwargs: Any) -> ArgumentParser:
    """The jsonargparse parser of a run: `--config FILE`, `--section.key=value`, `--print_config`."""
    parser = ArgumentParser(exit_on_error=False, **kwargs)
    parser.add_argument("--config", action="config", help="YAML file of the run.")
    parser.add_class_arguments(RunConfig)
    return parser


def _known_keys(cls: type = RunConfig, prefix: str = "") -> list[str]:
    keys = []
    for f in fields(cls):
        keys.append(prefix + f.name)
        if isinstance(f.type, type) and is_dataclass(f.type):
            keys += _known_keys(f.type, f"{prefix}{f.name}.")
    return keys


def _unknown_keys(tree: object, cls: type, prefix: str = "") -> list[str]:
    """Dotted names in a YAML tree that no section has."""
    if not isinstance(tree, dict):
        return []
    known = {f.name: f.type for f in fields(cls)}
    unknown = []
    for key, value in tree.items():
        kind = known.get(key)
        if kind is None:
            unknown.append(f"{prefix}{key}")
        elif isinstance(kind, type) and is_dataclass(kind):
            unknown += _unknown_keys(value, kind, f"{prefix}{key}.")
    return unknown


def _explain_unknown(key: str, where: str) -> str:
    known = _known_keys()
    # The last word alone is compared too, so that `num_step` in the wrong section is still found.
    close = difflib.get_close_matches(key, known, n=2, cutoff=0.6) or [
        k for k in known if difflib.SequenceMatcher(None, k.split(".")[-1], key.split(".")[-1]).ratio() > 0.8
    ]
    hint = f" Did you mean {' or '.join(close[:2])}?" if close else " `--help` lists every key."
    return f"{where}: unknown key {key!r}.{hint}"


def load_config(paths: str | Path | Sequence[str | Path] | None, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a run's YAML files and apply command-line overrides.

    Files are merged from left to right: what a later file names replaces what an earlier one says, key by key inside
    sections; a list or a mapping of the user's own names (`reward.weights`, `reward.options`) is replaced as a whole.

    Args:
        paths: a YAML file, or several; null when everything comes from `overrides`.
        overrides: `--section.key=value` words. `--reward.options.NAME.KEY=value` sets one option of one reward, and
            `--list.key+=value` appends to a list.

    Raises:
        ConfigError: file missing or not YAML, unknown key, wrong type, impossible value or combination.
    """
    files = [] if paths is None else [Path(paths)] if isinstance(paths, str | Path) else [Path(p) for p in paths]
    words, reward_options = _split_reward_options(overrides)
    for path in reversed(files):
        _check_file(path)
        words = ["--config", str(path), *words]
    parser = build_parser()
    try:
        # jsonargparse prints usage on some errors before raising; the message alone is what helps.
        with contextlib.redirect_stderr(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            namespace = parser.parse_args(words)
            for (name, key), value in reward_options.items():
                namespace["reward.options"].setdefault(name, {})[key] = value
            values = vars(parser.instantiate(namespace))
    except ConfigError:
        raise
    except (ArgumentError, ValueError, TypeError) as error:
        message = str(error)
        if match := re.search(r"unrecognized arguments: --([\w.]+)", message, re.IGNORECASE):
            raise ConfigError(_explain_unknown(match.group(1), "command line")) from error
        raise ConfigError(_tidy(message)) from error
    values.pop("config", None)
    return RunConfig(**values)


def _split_reward_options(overrides: Sequence[str]) -> tuple[list[str], dict[tuple[str, str], Any]]:
    """Takes `--reward.options.NAME.KEY=value` out of the words: (reward, option) -> value.

    jsonargparse would replace all options of that reward.
    """
    words: list[str] = []
    options: dict[tuple[str, str], Any] = {}
    rest = iter(overrides)
    for word in rest:
        match = re.fullmatch(r"--reward\.options\.([^=]+)\.(\w+)(?:=(.*))?", word, re.DOTALL)
        if match is None:
            words.append(word)
            continue
        name, key, value = match.groups()
        value = next(rest, "") if value is None else value
        try:
            options[name, key] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise ConfigError(
                f"reward.options.{name}.{key} is {value!r}, which is not a YAML value: {error}"
            ) from error
    return words, options


def _check_file(path: Path) -> None:
    """ConfigError unless the file is YAML with sections and keys that exist; the message names the file."""
    if not path.is_file():
        raise ConfigError(
            f"Config file {str(path)!r} does not exist. Give the path of a YAML file such as configs/toy_cpu.yaml."
        )
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8-sig"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid YAML: {error}") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} must hold sections such as `rollout:` and `training:`, found {type(tree).__name__}.")
    unknown = _unknown_keys(tree, RunConfig)
    if unknown:
        raise ConfigError(_explain_unknown(unknown[0], str(path)))


def _tidy(message: str) -> str:
    """One line of prose from the report of a value that could not be taken."""
    message = re.sub(r'Parser key "([\w.]+)":?\s*', r"\1: ", message)
    message = message.replace("the following arguments are required:", "missing required keys:")
    message = re.sub(r"\s+", " ", message).strip()
    if match := re.fullmatch(r"([\w.]+): Expected a (.+?)\. Got value: (.*)", message):
        key, kind, value = match.groups()
        if literal := re.fullmatch(r"typing\.Literal\[(.*)\]", kind):
            return f"{key} is {value!r}, but it must be one of {literal[1]}."
        kind = re.sub(r"<class '(.+?)'>", r"\1", kind).replace("typing.", "")
        return f"{key} is {value!r}, but it must be of type {kind}."
    # Settings of other modules name their own field; say in which section of the file it stands.
    if match := re.match(r"(\w+) is ", message):
        keys = [k for k in _known_keys() if k.endswith(f".{match[1]}")]
        if len(keys) == 1:
            return keys[0] + message[match.end(1) :]
    return message


def dump_config(config: RunConfig) -> str:
    """The resolved configuration as YAML that `load_config` reads back to an equal object."""
    tree = to_dict(config)
    tree["optimizer"]["betas"] = list(tree["optimizer"]["betas"])
    return yaml.safe_dump(tree, sort_keys=False)


def save_config(config: RunConfig, path: str | Path) -> None:
    """Write `dump_config` to a file."""
    with replacing(path) as partial:
        partial.write_text(dump_config(config), encoding="utf-8")
