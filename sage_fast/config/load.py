"""Configuration files: YAML to a typed `RunConfig` and back, overrides from the command line, errors that help.

Files are read by `text_files`, which refuses what is ambiguous; jsonargparse makes typed settings of the values. A key
that does not exist is an error, never a default; the message names the key, the value, and what to change.
"""

import contextlib
import difflib
import functools
import io
import json
import re
import warnings
from argparse import SUPPRESS, ArgumentError
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from types import UnionType
from typing import Any, Literal, get_args, get_origin

from jsonargparse import ArgumentParser, set_loader, set_parsing_settings

from sage_fast.config.errors import ConfigError
from sage_fast.config.files import write_text
from sage_fast.config.presets import config_file, locate, missing_file, portable
from sage_fast.config.registry import MODEL_FAMILIES, REWARDS, outside_names
from sage_fast.config.schema import RunConfig, to_dict
from sage_fast.config.text_files import dump_yaml, read_json, read_text, read_yaml

set_parsing_settings(docstring_parse_attribute_docstrings=True)

MAX_SHOWN = 200
"""Characters of a wrong value that a message repeats."""


PATH_KEYS = (("data", "prompts"), ("evaluation", "prompts"), ("distributed", "deepspeed_config"))
"""Keys of files that belong to a configuration: a path there is relative to the YAML that names it."""


def _load_value(text: str) -> Any:
    """How jsonargparse reads a value that is not a plain word: the merged files, and values of overrides."""
    try:
        return read_json(text, "value")  # what this module itself hands over, and faster
    except ConfigError:
        value = read_yaml(text, "value")
    # `{a}` and `a:` are words to jsonargparse's own loader too, such as a folder of that name.
    return text if isinstance(value, dict) and all(part is None for part in value.values()) else value


set_loader("strict_yaml", _load_value, exceptions=(ConfigError,))


def build_parser(**kwargs: Any) -> ArgumentParser:
    """The jsonargparse parser of a run's keys: `--section.key=value`."""
    parser = ArgumentParser(
        exit_on_error=False, allow_abbrev=False, print_config=None, parser_mode="strict_yaml", **kwargs
    )
    parser.add_argument("--config", action="config", help=SUPPRESS)
    parser.add_class_arguments(RunConfig)
    return parser


_parser = functools.cache(build_parser)
"""Building one takes ten times as long as parsing with it."""


@functools.cache
def _types() -> dict[str, Any]:
    """Dotted key -> type, of sections too."""

    def walk(cls: type, prefix: str) -> Iterator[tuple[str, Any]]:
        for f in fields(cls):
            yield prefix + f.name, f.type
            if _is_section(f.type):
                yield from walk(f.type, f"{prefix}{f.name}.")  # type: ignore[arg-type]

    return dict(walk(RunConfig, ""))


def _is_section(kind: object) -> bool:
    return isinstance(kind, type) and is_dataclass(kind)


def _check_tree(tree: Mapping[str, Any], where: str, prefix: str = "") -> None:
    """ConfigError unless every key of a YAML tree is one of the configuration, and every section has keys."""
    for name, value in tree.items():
        key = f"{prefix}{name}"
        kind = _types().get(key)
        if kind is None:
            raise ConfigError(_explain_unknown(key, where))
        if _is_section(kind):
            if not isinstance(value, dict):
                example = f"{key}.{fields(kind)[0].name}"
                raise ConfigError(f"{where}: {key} is {_shown(value)}, but it must hold keys such as {example}.")
            _check_tree(value, where, f"{key}.")
        elif not _takes_text(kind):
            for text in _strings(value):
                read_yaml(text, where, key)


def _takes_text(kind: object) -> bool:
    """Whether a string that is given for a type stays a string, whatever it looks like."""
    return kind in (str, str | None, list[str], dict[str, dict[str, Any]]) or get_origin(kind) is Literal


def _strings(value: object) -> Iterator[str]:
    """Strings given where numbers are expected. jsonargparse would read them by its own YAML loader."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _strings(part)


def _merged(base: Mapping[str, Any], top: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """`top` laid over `base`, key by key inside sections; other values are replaced as a whole."""
    result = dict(base)
    for name, value in top.items():
        key = f"{prefix}{name}"
        inside = _is_section(_types()[key]) and name in base
        result[name] = _merged(base[name], value, f"{key}.") if inside else value
    return result


HABITS = {
    "config-name": "Name a preset or a file by a plain word, as in `sage-fast train toy_cpu`.",
    "config-path": "Name a preset or a file by a plain word, as in `sage-fast train mine/run.yaml`.",
    "multirun": "A call is one run; start one for each value.",
    "cfg": "--print_config prints the resolved configuration.",
    "lr": "It is optimizer.learning_rate.",
    "max_steps": "It is training.num_updates.",
    "num_train_epochs": "Length is counted in updates: training.num_updates.",
    "per_device_train_batch_size": "It is rollout.batch_size, the videos of a rollout on each rank.",
    "gradient_accumulation_steps": "rollout.micro_batch_size says how many videos go through the model at once.",
    "report_to": "Set logging.tensorboard or logging.wandb_project.",
}
"""What other programs call things, and what to write here."""


def _explain_unknown(key: str, where: str) -> str:
    known = list(_types())
    if key in HABITS:
        return f"{where}: unknown key {key!r}. {HABITS[key]}"
    if (positive := re.sub("^no[-_]", "", key)) in known and positive != key:
        return f"{where}: unknown key {key!r}. Write --{positive}=false."
    # The last word alone is compared too, so that `num_step` in the wrong section is still found.
    close = difflib.get_close_matches(key, known, n=2, cutoff=0.6) or [
        k for k in known if difflib.SequenceMatcher(None, k.split(".")[-1], key.split(".")[-1]).ratio() > 0.8
    ]
    hint = f" Did you mean {' or '.join(close[:2])}?" if close else " `sage-fast train --keys` lists every key."
    return f"{where}: unknown key {key!r}.{hint}"


def load_config(
    paths: str | Path | Sequence[str | Path] | None = None, overrides: Sequence[str] | Mapping[str, Any] = ()
) -> RunConfig:
    """Read a run's YAML files and apply overrides.

    Files are merged from left to right: what a later file names replaces what an earlier one says, key by key inside
    sections; a list or a mapping of the user's own names (`reward.weights`, `reward.options`) is replaced as a whole.
    Prompt files are looked for as `locate` says, and are absolute in the result.

    Args:
        paths: a preset (`"toy_cpu"`) or a YAML file, or several; None when everything comes from `overrides`.
        overrides: values by dotted key, such as `{"rollout.eta": 0.3}`, or the words of a command line,
            `--section.key=value`. `reward.options.NAME.KEY` sets one option of one reward, and `list.key+` appends to a
            list.

    Raises:
        ConfigError: file missing or not YAML, unknown key, wrong type, impossible value or combination.
    """
    files = [] if paths is None else [paths] if isinstance(paths, str | Path) else paths
    words = _Words.read([_word(*pair) for pair in overrides.items()] if isinstance(overrides, Mapping) else overrides)
    tree: dict[str, Any] = {}
    for path in (*files, *words.files):
        tree = _merged(tree, read_config_file(path))
    arguments = [f"--config={json.dumps(tree)}"] if tree else []
    arguments += [f"--{key}={value}" for key, value in words.values]
    parser = _parser()
    try:
        # jsonargparse prints usage on some errors before raising; the message alone is what helps.
        with contextlib.redirect_stderr(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            namespace = parser.parse_args(arguments)
            for (name, key), value in words.reward_options.items():
                namespace["reward.options"].setdefault(name, {})[key] = value
            values = vars(parser.instantiate(namespace))
    except ConfigError:
        raise
    except (ArgumentError, ValueError, TypeError, OverflowError) as error:
        raise ConfigError(_tidy(str(error))) from error
    values.pop("config", None)
    config = RunConfig(**values)
    for section, key in PATH_KEYS:
        part = getattr(config, section)
        setattr(part, key, _located(getattr(part, key)))
    return config


def _word(key: str, value: Any) -> str:
    """An override of Python values as a word of a command line."""
    return f"--{key}={value if isinstance(value, str | Path) else json.dumps(value, default=str)}"


def _located(path: Any, folder: Path | None = None) -> Any:
    return locate(path, folder) if isinstance(path, str) else path


@dataclass(frozen=True)
class _Words:
    """The overrides of a command line, taken apart."""

    values: list[tuple[str, str]]
    """Key (with a + at its end where it appends) and value, in their order."""
    reward_options: dict[tuple[str, str], Any]
    """(reward, option) -> value. jsonargparse would replace all options of that reward."""
    files: list[Path]
    """Further configuration files, given by `--config`."""

    @classmethod
    def read(cls, overrides: Sequence[str]) -> "_Words":
        """ConfigError for a word that is no override, an unknown key, and a mapping or a list that cannot be read."""
        words = cls([], {}, [])
        rest = iter(overrides)
        for word in rest:
            name, separator, value = word.partition("=")
            if not name.startswith("--"):
                raise ConfigError(f"command line: {word!r} is no override. Write --section.key=value.")
            key = name[2:]
            if not cls._is_key(key):
                raise ConfigError(_explain_unknown(key, "command line"))
            if not separator:
                value = next(rest, "--")
                if value.startswith("--"):
                    raise ConfigError(
                        f"command line: {name} has no value. {_how_to_write(key) or f'Write {name}=VALUE.'}"
                    )
            words._add(key, value)
        return words

    @staticmethod
    def _is_key(key: str) -> bool:
        key = key.removesuffix("+")
        # A mapping's own names follow its key, as in reward.weights.VQ and reward.options.toy.size.
        return key in _types() or key == "config" or key.startswith(("reward.options.", "reward.weights."))

    def _add(self, key: str, value: str) -> None:
        kind = _types().get(key.removesuffix("+"), Any)
        if key == "config":
            self.files.append(Path(value))
        elif option := re.fullmatch(r"reward\.options\.(.+)\.(\w+)", key):
            self.reward_options[option[1], option[2]] = read_yaml(value, "command line", key)
        else:
            if _is_section(kind):
                tree = read_yaml(value, "command line", key)
                for part in reversed(key.split(".")):
                    tree = {part: tree}
                _check_tree(tree, "command line")
            elif not _takes_text(kind):
                for text in _strings(read_yaml(value, "command line", key)):
                    read_yaml(text, "command line", key)
            elif kind not in (str, str | None) and value.lstrip().startswith(("{", "[")):
                read_yaml(value, "command line", key)
            self.values.append((key, value))


def read_config_file(name: str | Path) -> dict[str, Any]:
    """The sections of a preset or a YAML file. ConfigError where it cannot be read or has a key that does not exist."""
    path = config_file(name)
    try:
        text = read_text(path)
    except FileNotFoundError as error:
        raise missing_file(path) from error
    except OSError as error:
        raise ConfigError(f"Config file {str(path)!r} cannot be read: {error.strerror}.") from error
    tree = read_yaml(text, str(path))
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} must hold sections such as `rollout:` and `training:`, found {type(tree).__name__}.")
    _check_tree(tree, str(path))
    for section, key in PATH_KEYS:
        if key in tree.get(section, ()):
            tree[section][key] = _located(tree[section][key], path.parent)
    return tree


def named_code(files: Sequence[str | Path], overrides: Sequence[str]) -> set[str]:
    """What files and overrides name under model.family and reward.rewards, and other strings beside them."""
    words = _Words.read(overrides)
    found = set()
    for key, value in words.values:
        if key.removesuffix("+") in ("model", "model.family", "reward", "reward.rewards"):
            found |= set(_strings(read_yaml(value, "command line", key)))
    for path in (*files, *words.files):
        tree = read_config_file(path)
        found |= set(_strings([tree.get("model", {}).get("family"), tree.get("reward", {}).get("rewards")]))
    return found


def check_trust(config: RunConfig, source: Path, named: Collection[str], rewards: bool = True) -> None:
    """ConfigError where a run directory or a checkpoint names code that is no part of SAGE-Fast.

    Args:
        config: as it was read from there.
        source: the directory, for the message.
        named: what the user has named, and so trusts.
        rewards: whether the command builds the rewards, or the model alone.
    """
    outside = {
        "model.family": outside_names([config.model.family], MODEL_FAMILIES),
        "reward.rewards": outside_names(config.reward.rewards if rewards else [], REWARDS),
    }
    for key, names in outside.items():
        if unknown := [name for name in names if name not in named]:
            raise ConfigError(
                f"{source} names {', '.join(map(repr, unknown))} under {key}: code that is no part of SAGE-Fast, and "
                "that this command would import and call. If you trust whoever wrote it, add --trust-config; or name "
                f"it on the command line yourself, by --{key}. docs/trust.md says more."
            )


def _how_to_write(key: str) -> str:
    """How a value that is more than a word is written on the command line; nothing for a number or a string."""
    kind = _types().get(key)
    for part in get_args(kind) if get_origin(kind) is UnionType else (kind,):
        if part is bool:
            return f"Write --{key}=true or --{key}=false."
        if get_origin(part) is Literal:
            return f"Write --{key}= and one of {', '.join(map(str, get_args(part)))}."
        if get_origin(part) is list:
            a, b = (1, 2) if get_args(part) == (int,) else ("first", "second")
            return f"Write --{key}='[{a}, {b}]', or --{key}+={a} to append to it."
        if get_origin(part) is tuple:
            return f"Write --{key}='[{', '.join(['0.9'] * len(get_args(part)))}]'."
        if get_origin(part) is dict:
            return f"Write --{key}='{{NAME: VALUE}}', or --{key}.NAME=VALUE for one of them."
    return ""


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


def _tidy(message: str) -> str:
    """One line of prose from the report of a value that could not be taken."""
    message = re.sub(r'Parser key "([\w.]+)":?\s*', r"\1: ", message)
    message = message.replace("the following arguments are required:", "missing required keys:")
    message = re.sub(r"\s+", " ", message).strip()
    if match := re.fullmatch(r"([\w.]+): Expected a (.+?)\. Got value: (.*)", message):
        key, kind, value = match.groups()
        value = value if len(value) <= MAX_SHOWN else f"{value[:MAX_SHOWN]}..."
        if literal := re.fullmatch(r"typing\.Literal\[(.*)\]", kind):
            return f"{key} is {value!r}, but it must be one of {literal[1]}."
        kind = re.sub(r"<class '(.+?)'>", r"\1", kind).replace("typing.", "")
        if kind == "bool":
            return f"{key} is {value!r}, but it must be true or false."
        return f"{key} is {value!r}, but it must be of type {kind}. {_how_to_write(key)}".rstrip()
    if match := re.match(r"([\w.]+): Does not validate .* Subtypes: \[(.*?)\] Errors: .* Given value: (.*)", message):
        key, kinds, value = match.groups()
        kinds = re.sub(r"<class '(.+?)'>", r"\1", kinds).replace("NoneType", "null").replace(", ", " or ")
        return f"{key} is {value[:MAX_SHOWN]}, but it must be of type {kinds}. {_how_to_write(key)}".rstrip()
    # Settings of other modules name their own field; say in which section of the file it stands.
    if match := re.match(r"(\w+) is ", message):
        keys = [k for k in _types() if k.endswith(f".{match[1]}")]
        if len(keys) == 1:
            return keys[0] + message[match.end(1) :]
    return message


def dump_config(config: RunConfig) -> str:
    """The resolved configuration as YAML that `load_config` reads back to an equal object."""
    tree = to_dict(config)
    tree["optimizer"]["betas"] = list(tree["optimizer"]["betas"])
    for section, key in PATH_KEYS:
        if tree[section][key] is not None:
            tree[section][key] = portable(tree[section][key])
    return dump_yaml(tree)


def save_config(config: RunConfig, path: str | Path) -> None:
    """Write `dump_config` to a file."""
    write_text(path, dump_config(config))
