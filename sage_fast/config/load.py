"""Presets, YAML files and words of a command line to a typed `RunConfig`, and back.

`documents` reads YAML and refuses the ambiguous; pydantic checks types and ranges. A key
that does not exist is an error, never a default; the message names the key, the value,
and the fix.

Presets are written in `configs/` of the repository, and a wheel has that folder as
`sage_fast/configs`. A preset is named by its path there, without extension: `toy_cpu`,
`ablations/kl_none`.
"""

import difflib
import functools
import importlib.resources
import json
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from pathlib import Path
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

from pydantic import TypeAdapter, ValidationError

from sage_fast.config.documents import dump_yaml, read_yaml
from sage_fast.config.errors import ConfigError, shown
from sage_fast.config.files import read_text, write_text
from sage_fast.config.registry import PARTS, SCORES, outside_names
from sage_fast.config.schema import RunConfig, by_dotted_key, settings_of, to_dict

T = TypeVar("T")


@functools.cache
def presets_folder() -> Path:
    """`configs/` of the installed package, or of the repository where it is installed
    to be edited.
    """
    package = Path(str(importlib.resources.files("sage_fast")))
    installed = package / "configs"
    return installed if installed.is_dir() else package.parent / "configs"


def preset_names() -> list[str]:
    """All presets: whole runs first, then what is laid over one."""
    root = presets_folder()
    names = (
        path.relative_to(root).with_suffix("").as_posix()
        for path in root.rglob("*.yaml")
    )
    return sorted(names, key=lambda name: ("/" in name, name))


def preset_summary(name: str) -> str:
    """The first comment line of a preset."""
    return find_shipped(name).read_text("utf-8").partition("\n")[0].removeprefix("# ")


EVIDENCE = {
    "weights": "trained on the published weights",
    "GPU": "one or more updates on a GPU; a large model had random weights",
    "CPU": "trained whole on a CPU, with a small model of this project",
    "plan": "planned alone",
}
"""How far a preset has been tried, the most first."""

_TRIED = {
    "toy_cpu": "GPU",
    "toy_nft": "GPU",
    "hv15_480p_lora_1gpu": "GPU",
    "study_cpu": "CPU",
    "words_cpu": "CPU",
}


def preset_evidence(name: str) -> str:
    """The key of `EVIDENCE` of a preset. A test holds it to the committed results."""
    return _TRIED.get(name, "plan")


def find_shipped(name: str) -> Path:
    """The file of a preset, or another file that ships, such as
    `prompts/toy_train.csv`.

    ConfigError where there is none of that name.
    """
    root = presets_folder()
    for file in (root / f"{name}.yaml", root / name):
        # A name with .. in it could lead out of the folder, to a file that does not
        # ship.
        if os.path.isfile(file) and file.resolve().is_relative_to(root.resolve()):
            return file
    raise ConfigError(f"There is no preset {name!r}.{similar_preset(name)}")


def config_file(name: str | Path) -> Path:
    """The file that a word means: a file of that path, else a preset of that name, else
    the path as it is.
    """
    path = Path(name)
    # os.path's tests are False for a word that no file can be called, where Path's
    # raise: too long, or with a NUL.
    if not os.path.isfile(path) and str(name) in preset_names():
        return presets_folder() / f"{name}.yaml"
    return path


def similar_preset(name: str) -> str:
    """End of a message about a name that nothing has: the presets that may be meant,
    and where all are listed.
    """
    word = name.removeprefix("configs/").removesuffix(".yaml")
    names = preset_names()
    close = [known for known in names if word in (known, known.rpartition("/")[2])]
    close = close or difflib.get_close_matches(word, names, n=2, cutoff=0.6)
    hint = f" Did you mean {' or '.join(close)}?" if close else ""
    return (
        f"{hint} `sage-fast configs` lists the presets; your own file goes by its path."
    )


def locate(path: str, folder: Path | None = None) -> str:
    """The absolute path of a file that a configuration names; the path as it is where
    there is no such file.

    Args:
        path: looked for in the YAML's folder, then in the working directory, then among
            the files that ship, so that a copy of a preset works wherever it lies. A
            preset's own files are those that ship.
        folder: of the YAML that names it; None for the command line.
    """
    shipped = presets_folder()
    path = os.path.expanduser(path)
    if folder is not None and folder.absolute().is_relative_to(shipped):
        bases = [folder, shipped]
    # runs of earlier versions have saved configs/prompts/..., relative to the
    # repository
    else:
        bases = [folder or Path(), Path(), shipped, shipped.parent]
    found = (base / path for base in bases)
    return next(
        (os.path.abspath(file) for file in found if path and os.path.exists(file)), path
    )


def portable(path: T) -> T | str:
    """The inverse of `locate` for a file that ships: its name there, which means the
    same on every machine.
    """
    shipped = presets_folder()
    if not isinstance(path, str):
        return path
    if Path(path).is_relative_to(shipped):
        return Path(path).relative_to(shipped).as_posix()
    return path


PATH_KEYS = (("data", "prompts"), ("evaluation", "prompts"))
"""Keys of files that belong to a configuration: a path there is relative to the YAML
that names it.
"""

PATHS = (
    "output_dir",
    "model.path",
    "model.adapter",
    "model.cache_dir",
    "data.prompts",
    "evaluation.prompts",
)
"""Keys that hold paths."""

MAX_SHOWN = 200
"""Characters of a wrong value that a message repeats."""

Tree = dict[str, Any]


def load_config(
    paths: str | Path | Sequence[str | Path] | None = None,
    overrides: Sequence[str] | Mapping[str, Any] = (),
) -> RunConfig:
    """Read a run's YAML files and apply overrides.

    Files are merged from left to right: what a later file names replaces what an
    earlier one says, key by key inside sections; a list or a mapping of the user's own
    names (`reward.weights`, `reward.options`) is replaced as a whole. Other
    `reward.rewards` leave the options and the weights behind that belonged to those
    before.
    A file may start from another one: `extends: NAME`. Prompt files are looked for as
    `locate` says, and are absolute in the result.

    Args:
        paths: a preset (`"toy_cpu"`) or a YAML file, or several; None when everything
            comes from `overrides`.
        overrides: values by dotted key, such as `{"rollout.eta": 0.3}`, or the words of
            a command line, `--section.key=value`. `reward.options.NAME.KEY` sets one
            option of one reward, and `list.key+` appends to a list.

    Raises:
        ConfigError: file missing or not YAML, unknown key, wrong type, impossible value
            or combination.
    """
    files = [] if paths is None else [paths] if isinstance(paths, str | Path) else paths
    return _checked(read_tree(files, overrides))


def with_overrides(config: RunConfig, overrides: Mapping[str, Any]) -> RunConfig:
    """A configuration with other values by dotted key, as `load_config` takes them.
    ConfigError as there.
    """
    tree = to_dict(config)
    for key, value in overrides.items():
        tree = _overridden(tree, key, value)
    return _checked(_located(tree))


def _checked(tree: Tree) -> RunConfig:
    _check_weights(tree)
    values = by_dotted_key(tree)
    for key in PATHS:
        value = values.get(key)
        if isinstance(value, str) and re.search(r"\$\{|^\$\w+", value):
            raise ConfigError(
                f"{key} is {value!r}, where variables are not filled in. Write the "
                "path; ~ is your home."
            )
    return check_values(tree)


def check_values(tree: Tree) -> RunConfig:
    """The configuration of a tree. ConfigError for a key that does not exist, and for a
    value of another type or out of its range.
    """
    try:
        # As JSON, in which pydantic's strict mode takes an array for a tuple; a list of
        # Python it would refuse. Numbers and arrays of numpy become Python's.
        text = json.dumps(
            tree,
            default=lambda value: (
                value.tolist() if hasattr(value, "tolist") else str(value)
            ),
        )
        return _adapter().validate_json(text)
    except ValidationError as error:
        raise ConfigError(_explain(error)) from error


def read_tree(
    files: Sequence[str | Path], overrides: Sequence[str] | Mapping[str, Any]
) -> Tree:
    """Sections and keys of files and overrides, laid over one another; their values may
    still be wrong.
    """
    given = (
        overrides.items() if isinstance(overrides, Mapping) else _split_words(overrides)
    )
    # --config among the words is one more file, and so below every override.
    values = [(key, value) for key, value in given if key != "config"]
    # First, because the options and weights among the words are those of these rewards.
    values.sort(key=lambda pair: pair[0] not in ("reward.evaluation", "reward.rewards"))
    tree: Tree = {}
    for file in (*files, *(value for key, value in given if key == "config")):
        tree = _merged(tree, read_config_file(file))
    for key, value in values:
        tree = _overridden(tree, key, value)
    return _located(tree)


def read_config_file(name: str | Path, above: tuple[Path, ...] = ()) -> Tree:
    """The sections of a preset or a YAML file, over those of the file that it extends.

    Args:
        name: the preset or the file.
        above: files that extend this one.

    Raises:
        ConfigError: it cannot be read, or has a key that does not exist.
    """
    path = config_file(name)
    try:
        text = read_text(path)
    except FileNotFoundError as error:
        raise ConfigError(
            f"There is no file, run or preset {str(path)!r}.{similar_preset(str(path))}"
        ) from error
    except OSError as error:
        raise ConfigError(
            f"Config file {str(path)!r} cannot be read: {error.strerror}."
        ) from error
    tree = read_yaml(text, str(path))
    if not isinstance(tree, dict):
        raise ConfigError(
            f"{path} must hold sections such as `rollout:` and `training:`, found "
            f"{type(tree).__name__}."
        )
    base = tree.pop("extends", None)
    _check_keys(tree, str(path))
    # Before the merge: a path is relative to the file that names it.
    tree = _located(tree, path.parent)
    if base is None:
        return tree
    if path in above:
        raise ConfigError(
            f"{path}: extends is {base!r}, which extends this file. Name another one."
        )
    beside = path.parent / str(base)
    return _merged(
        read_config_file(beside if beside.is_file() else str(base), (*above, path)),
        tree,
    )


def _split_words(words: Sequence[str]) -> list[tuple[str, str]]:
    """(key, text) of words such as `--section.key=value`."""
    pairs = []
    for word in words:
        name, separator, text = word.partition("=")
        key = name.removeprefix("--")
        if key == name:
            raise ConfigError(
                f"command line: {word!r} is not an override. Write --section.key=value."
            )
        if key != "config":
            _kind(key)
        if not separator:
            raise ConfigError(f"command line: {name} has no value. Write {name}=VALUE.")
        pairs.append((key, text))
    return pairs


def _overridden(tree: Tree, key: str, value: Any) -> Tree:
    """A tree with an override laid over it."""
    kind = _kind(key)
    if isinstance(value, str) and kind is not str:
        is_text = isinstance(kind, UnionType) and str in get_args(kind)
        if value == "null" or not is_text:
            value = read_yaml(value, f"overrides: {key}")
    reward = tree.get("reward", {})
    if key.startswith("reward.options."):
        # The name of a reward may have dots in it: its option is after the last one.
        name, _, option = key.removeprefix("reward.options.").rpartition(".")
        options = _grown(reward.get("options"), "reward.options", dict)
        own = _grown(options.get(name) or {}, f"reward.options.{name}", dict)
        value = {**options, name: {**own, option: value}}
        key = "reward.options"
    elif key.startswith("reward.weights."):
        weights = _grown(reward.get("weights"), "reward.weights", dict)
        value = {**weights, key.removeprefix("reward.weights."): value}
        key = "reward.weights"
    elif key.endswith("+"):
        key = key.removesuffix("+")
        more = value if isinstance(value, list) else [value]
        value = [*_grown(by_dotted_key(tree, (key,)).get(key), key, list), *more]
    for name in reversed(key.split(".")):
        value = {name: value}
    _check_keys(value, "overrides")
    return _merged(tree, value)


def _grown(value: Any, key: str, kind: type) -> Any:
    """The list or mapping that a word adds to. Where no file has it, or has left it
    empty, it is the default.
    """
    value = _default(key) if value is None else value
    if not isinstance(value, kind):
        word = "list" if kind is list else "mapping"
        raise ConfigError(
            f"command line: {key} is not a {word}, so nothing can be added to it. "
            f"Write --{key}=VALUE."
        )
    return value


def _check_keys(tree: Tree, where: str, prefix: str = "") -> None:
    """ConfigError unless every key of a tree is one of the configuration, and every
    section has keys.
    """
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if key not in _fields():
            raise ConfigError(_explain_unknown(key, where))
        if "." in name:
            nested = f"{name.replace('.', ': {')}: ...{'}' * name.count('.')}"
            raise ConfigError(
                f"{where}: {name!r} has a dot in it. Write it nested: {nested}."
            )
        kind: Any = _fields()[key].type
        if is_dataclass(kind):
            if not isinstance(value, dict):
                example = f"{key}.{fields(kind)[0].name}"
                raise ConfigError(
                    f"{where}: {key} is {shown(value, MAX_SHOWN)}, but it must hold "
                    f"keys such as {example}."
                )
            _check_keys(value, where, f"{key}.")


def _merged(base: Tree, top: Tree, prefix: str = "") -> Tree:
    """`top` laid over `base`, key by key inside sections; other values are replaced as
    a whole.
    """
    result = dict(base)
    if prefix == "reward." and {"rewards", "evaluation"} & top.keys():
        _leave_behind(result, {**result, **top})
    for name, value in top.items():
        inside = is_dataclass(_fields()[f"{prefix}{name}"].type) and name in base
        result[name] = (
            _merged(base[name], value, f"{prefix}{name}.") if inside else value
        )
    return result


def _leave_behind(reward: Tree, after: Tree) -> None:
    """Take out of the section `reward`, in place, what belongs to rewards that others
    replace in the section `after`.

    Which scores are whose is not known before they are called: the weights go as soon
    as one reward goes.
    """
    rewards = after.get("rewards", _default("reward.rewards"))
    judges = after.get("evaluation", [])
    if not (isinstance(rewards, list) and isinstance(judges, list)):
        return  # refused later
    if isinstance(options := reward.get("options"), dict):
        named = [*rewards, *judges]
        reward["options"] = {
            name: given for name, given in options.items() if name in named
        }
    if any(
        name not in rewards
        for name in reward.get("rewards") or _default("reward.rewards")
    ):
        reward.pop("weights", None)


def _check_weights(tree: Tree) -> None:
    """ConfigError for weights that fit no score: a run would find it once it has a
    video.
    """
    reward = tree.get("reward")
    rewards = reward.get("rewards") if isinstance(reward, dict) else None
    if not isinstance(reward, dict) or not isinstance(rewards, list):
        return
    if any(":" not in str(name) and name not in SCORES for name in rewards):
        return  # a name of nothing, which is refused as such
    scores = {score for name in rewards for score in SCORES.get(str(name), ())}
    if "weights" in reward:
        weights = reward["weights"]
        unknown = sorted(set(weights) - scores) if isinstance(weights, dict) else []
        if unknown and all(name in SCORES for name in rewards):
            raise ConfigError(
                f"reward.weights names {unknown}, but {shown(rewards, MAX_SHOWN)} "
                f"give {sorted(scores)}."
            )
    elif not scores.issuperset(_default("reward.weights")):
        named = [
            SCORES.get(str(name), (str(name).rpartition(":")[2],))[0]
            for name in rewards
        ]
        raise ConfigError(
            "reward.weights is missing: nothing says what the scores of "
            f"{shown(rewards, MAX_SHOWN)} count. Name them, "
            "for instance "
            f"--reward.weights={{{', '.join(f'{score}: 1.0' for score in named)}}}; a "
            "function's numbers "
            "are the score of its name."
        )


def _located(tree: Tree, folder: Path | None = None) -> Tree:
    for section, key in PATH_KEYS:
        if isinstance(path := tree.get(section, {}).get(key), str):
            tree[section][key] = locate(path, folder)
    return tree


# --------------------------------------------------------------------------------------
# keys


@functools.cache
def _adapter() -> "TypeAdapter[RunConfig]":
    return TypeAdapter(RunConfig)


@functools.cache
def _fields() -> "dict[str, Field[Any]]":
    """Dotted key -> field, of sections too."""

    def walk(cls: Any, prefix: str) -> "Iterator[tuple[str, Field[Any]]]":
        for f in fields(cls):
            yield prefix + f.name, f
            if is_dataclass(f.type):
                yield from walk(f.type, f"{prefix}{f.name}.")

    return dict(walk(RunConfig, ""))


def _kind(key: str) -> Any:
    """Type of an override's key. ConfigError where there is no such key."""
    if (name := key.removesuffix("+")) in _fields():
        return _fields()[name].type
    if re.fullmatch(r"reward\.(options\..+\.\w+|weights\..+)", key):
        return Any
    raise ConfigError(_explain_unknown(key, "overrides"))


def _default(key: str) -> Any:
    f = _fields()[key]
    return f.default if f.default_factory is MISSING else f.default_factory()


def meanings() -> dict[str, str]:
    """Dotted key -> the text below its field."""
    # pydantic reads the texts below the fields out of the source; Python itself drops
    # them.
    schema = _adapter().json_schema()
    texts = {}
    for key in _fields():
        section, _, name = key.rpartition(".")
        owner = (
            schema["$defs"][type_name(_fields()[section].type)] if section else schema
        )
        texts[key] = owner["properties"][name].get("description", "")
    return texts


def type_name(kind: Any) -> str:
    """A type as a reader of YAML would write it: the words that are allowed, null for
    None.
    """
    if get_origin(kind) is Literal:
        return " or ".join(map(str, get_args(kind)))
    if get_origin(kind) in (Union, UnionType):
        return " or ".join(map(type_name, get_args(kind)))
    if hasattr(kind, "__metadata__"):
        return type_name(get_args(kind)[0])
    if get_origin(kind) is not None:
        return (
            f"{get_origin(kind).__name__}[{', '.join(map(type_name, get_args(kind)))}]"
        )
    return "null" if kind is type(None) else str(getattr(kind, "__name__", kind))


def type_of(key: str) -> str:
    """The type of a dotted key; instead of a text the names of parts."""
    name = type_name(_fields()[key].type)
    if key in PARTS:
        return name.replace("str", " or ".join((*PARTS[key], "package.module:name")))
    return name


def describe_keys(word: str = "") -> str:
    """Keys that have `word` in their name, with type, default and meaning, for a
    terminal. ConfigError for none.
    """
    parts = []
    word = _OTHER_NAMES.get(word, word).lower()
    for key, meaning in meanings().items():
        f = _fields()[key]
        if word not in key:
            continue
        if is_dataclass(f.type):
            parts.append(f"\n{key}: {meaning}\n")
            continue
        required = f.default is MISSING and f.default_factory is MISSING
        default = "required" if required else f"default {json.dumps(_default(key))}"
        text = "\n".join(f"      {line.strip()}" for line in meaning.splitlines())
        parts.append(f"  --{key}  ({type_of(key)}; {default})\n{text}\n")
    if not parts:
        raise ConfigError(_explain_unknown(word, "--keys"))
    return "".join(parts)


# --------------------------------------------------------------------------------------
# messages


_OTHER_NAMES = {
    "lr": "optimizer.learning_rate",
    "logprob": "objective.ratio",
    "tensorboard": "logging.report_to",
    "wandb_project": "logging.report_to",
}
"""Last words of keys of torch and of earlier releases -> the key."""


def _explain_unknown(key: str, where: str) -> str:
    known = list(_fields())
    last = key.split(".")[-1]
    # The last word alone is compared too, so that `num_step` in the wrong section is
    # still found.
    close = (
        [k for k in known if k.startswith(f"{key}_")]
        or difflib.get_close_matches(key, known, n=2, cutoff=0.6)
        or [
            k
            for k in known
            if difflib.SequenceMatcher(None, k.split(".")[-1], last).ratio() > 0.8
        ]
    )
    if last in _OTHER_NAMES:
        close = [_OTHER_NAMES[last]]
    if close:
        hint = f" Did you mean {' or '.join(close[:2])}?"
    else:
        hint = " `sage-fast train --keys` lists every key."
    return f"{where}: unknown key {key!r}.{hint}"


_EXAMPLES = {
    "a valid boolean": "true or false",
    "a valid array": "a list, such as [A, B]",
    "an object": "a mapping, such as {NAME: VALUE}",
}


def _explain(error: ValidationError) -> str:
    """One line on the first key whose value cannot be taken."""
    first, *rest = error.errors(include_url=False)
    key = _key_of(first["loc"])
    if (cause := first.get("ctx", {}).get("error")) is not None:
        # A section outside of this folder names its own field.
        own = f"{key}.{str(cause).partition(' ')[0]}"
        return f"{key}.{cause}" if own in _fields() else str(cause)
    kind = _fields()[key].type if key in _fields() else None
    if get_origin(kind) is tuple and first["type"] in ("missing", "too_long"):
        return (
            f"{key} is {shown(first['input'], MAX_SHOWN)}, but it must be a list of "
            f"{len(get_args(kind))} numbers."
        )
    if first["type"] == "missing":
        key += f".{fields(kind)[0].name}" if is_dataclass(kind) else ""
        return f"{key} is missing. Set it in a file, or by --{key}=VALUE."
    # A union has one error for each of its types.
    problems = [
        first["msg"],
        *(other["msg"] for other in rest if _key_of(other["loc"]) == key),
    ]
    allowed = " or ".join(
        dict.fromkeys(text.removeprefix("Input should be ") for text in problems)
    )
    for words, example in _EXAMPLES.items():
        allowed = allowed.replace(words, example)
    if type(None) in get_args(kind):
        allowed += " or null"
    return f"{key} is {shown(first['input'], MAX_SHOWN)}, but it must be {allowed}."


def _key_of(location: Sequence[int | str]) -> str:
    """The longest key of the configuration that a location starts with; a union's
    location ends in its types.
    """
    words = [str(part) for part in location]
    keys = (".".join(words[:end]) for end in range(len(words), 0, -1))
    key = next((key for key in keys if key in _fields()), "")
    return (
        key if key and get_origin(_fields()[key].type) is not dict else ".".join(words)
    )


# --------------------------------------------------------------------------------------
# trust


def named_code(files: Sequence[str | Path], overrides: Sequence[str]) -> set[str]:
    """Names under the keys of `PARTS` and reward.{url,python} in files and overrides."""
    values = by_dotted_key(read_tree(files, overrides))
    return {
        str(name)
        for key in (*PARTS, *PLACES_OF_CODE)
        for name in _listed(values.get(key))
    }


PLACES_OF_CODE = ("reward.python", "reward.url")
"""Keys whose every value is code outside SAGE-Fast."""


def _listed(value: Any) -> list[Any]:
    """A list as it is, None as none, and another value as a list of it."""
    if value is None:
        return []
    return value if isinstance(value, list) else [value]


def outside_code(config: RunConfig, rewards: bool = True) -> dict[str, list[str]]:
    """Keys that name code outside SAGE-Fast -> the names.

    Args:
        rewards: whether the rewards are built and a step may be made, or the model is
            used alone.
    """
    values = settings_of(to_dict(config))
    outside = {
        key: outside_names(_listed(values[key]), table) for key, table in PARTS.items()
    }
    outside |= {key: _listed(values[key]) for key in PLACES_OF_CODE}
    return {
        key: names
        for key, names in outside.items()
        if names and (rewards or key == "model.family")
    }


def check_trust(
    config: RunConfig, source: Path, named: Collection[str], rewards: bool = True
) -> None:
    """ConfigError where a run directory or a checkpoint names code outside SAGE-Fast.

    Args:
        config: as it was read from there.
        source: the directory, for the message.
        named: what the user has named, and so trusts.
        rewards: as in `outside_code`.
    """
    for key, names in outside_code(config, rewards).items():
        if unknown := [name for name in names if name not in named]:
            raise ConfigError(
                f"{source} names {', '.join(map(repr, unknown))} under {key}: code "
                "that is not part of SAGE-Fast, and "
                "that this command would import and call. If you trust whoever wrote "
                "it, add --trust-config; or name "
                f"it on the command line yourself, by --{key}. docs/trust.md says more."
            )


# --------------------------------------------------------------------------------------
# writing


def dump_config(config: RunConfig) -> str:
    """The resolved configuration as YAML that `load_config` reads back to an equal
    object.
    """
    return dump_tree(to_dict(config))


def dump_tree(tree: Tree) -> str:
    """Sections as YAML, with the files that ship by their names."""
    for section, key in PATH_KEYS:
        if isinstance(path := tree.get(section, {}).get(key), str):
            tree[section][key] = portable(path)
    return dump_yaml(tree)


def save_config(config: RunConfig, path: str | Path) -> None:
    """Write `dump_config` to a file."""
    write_text(path, dump_config(config))
