"""The prompts of a run, and the files that hold them, in UTF-8 with or without a byte
order mark.

    prompts.csv                             prompts.jsonl                              prompts.txt
    prompt,index,seed                       {"prompt": "a red circle", "seed": 7}      a red circle
    "a red circle, moving left",0,7         "a blue square"                            a blue square

    prompts.json
    [{"prompt": "a red circle", "seed": 7}, "a blue square"]

``index`` (default: the prompt's number, from 0) tells prompts apart in the random state
and in file names. ``seed`` is mixed with the run's for a prompt's noise. ``image`` is
the file of the picture that an image-to-video model animates, relative to the prompt
file. Rewards may read other columns. `data.prompt_key` names the column of prompts
where it is not ``prompt``.
"""

import csv
import io
import json
import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path

from sage_fast.config.errors import ConfigError, shown
from sage_fast.config.files import content_digest, read_json, read_text
from sage_fast.config.schema import RunConfig
from sage_fast.config.sections import digest
from sage_fast.data import PromptSchedule, used_prompts
from sage_fast.distributed.start import rank
from sage_fast.records import Prompt

logger = logging.getLogger(__name__)

MAX_BYTES = 2**30
"""Of a prompt file; a million prompts of a hundred words take 0.6 GB."""

MAX_INTEGER = 2**63 - 1
"""Of seeds and indices, which are mixed into 64-bit generator states."""

Row = str | Mapping[str, object]
"""A prompt in a list: its text, or its row of a prompt file."""


def load_prompts(config: RunConfig) -> tuple[list[Prompt], list[Prompt]]:
    """Training and evaluation prompts of a run. ConfigError names the config key of a
    file that cannot be used.
    """
    return _read_prompts(
        "data.prompts", config.data.prompts, config.data.prompt_key
    ), load_eval_prompts(config)


def load_eval_prompts(config: RunConfig) -> list[Prompt]:
    """Evaluation prompts of a run: the training prompts where it names none.
    ConfigError as `load_prompts`.
    """
    key = "evaluation.prompts"
    given = config.evaluation.prompts
    count = config.evaluation.num_prompts
    if given is None:
        key = "data.prompts"
        given = config.data.prompts
    prompts = _read_prompts(key, given, config.data.prompt_key)
    if count is not None and count > len(prompts):
        raise ConfigError(
            f"evaluation.num_prompts is {count}, but there are {len(prompts)} prompts."
        )
    return prompts[:count]


def _read_prompts(key: str, given: str | Sequence[Row], column: str) -> list[Prompt]:
    try:
        return read_prompts(given, column)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{key}: {error}") from error


def run_prompts(
    config: RunConfig,
    prompts: Sequence[Prompt],
    eval_prompts: Sequence[Prompt],
    dp_degree: int,
    done: tuple[int, int] = (0, 0),
) -> list[Prompt]:
    """Prompts that a run will sample from, see `used_prompts`."""
    videos = config.rollout.batch_size * dp_degree
    return used_prompts(
        PromptSchedule(prompts, config.seed, config.data.shuffle),
        eval_prompts if config.evaluation.every else [],
        config.training,
        videos // config.rollout.num_generations,
        done,
    )


def prompts_digest(prompts: Sequence[Prompt], eval_prompts: Sequence[Prompt]) -> str:
    """Digest of the training and evaluation prompts with their indices, seeds, other
    columns and the content of their pictures.
    """

    def values(prompt: Prompt) -> tuple[object, ...]:
        picture = () if prompt.image is None else (content_digest(prompt.image),)
        columns = (prompt.columns,) if prompt.columns else ()
        return prompt.text, prompt.index, prompt.seed, *picture, *columns

    return digest(
        [[values(prompt) for prompt in group] for group in (prompts, eval_prompts)]
    )


def read_prompts(
    path: str | os.PathLike[str] | Sequence[Row], key: str = "prompt"
) -> list[Prompt]:
    """Read a prompt file. Blank lines and empty prompts are skipped, and the white
    space around a prompt is dropped.

    Args:
        path: a ``.csv``, ``.json``, ``.jsonl`` or ``.txt`` file as above,
            ``hf:NAME:SPLIT`` for a dataset of the Hugging Face hub, or the texts or
            rows themselves.
        key: column or JSON key of the prompts.

    Returns:
        At least one prompt, in the file's order, with distinct indices.

    Raises:
        OSError: there is no such file (FileNotFoundError), or it cannot be read.
        ValueError: the file cannot be used; the message starts with ``path:line`` and
            says what to change.
    """
    if not isinstance(path, str | os.PathLike):
        return _listed_prompts(path)
    if isinstance(path, str) and path.startswith("hf:"):
        return list(_read_dataset(path, key))
    path = Path(path)
    if path.suffix.lower() not in _READERS:
        raise ValueError(
            f"{path}: a prompt file ends in {', '.join(_READERS)}, not in "
            f"{path.suffix or 'no extension'!r}; rename or convert it"
        )
    try:
        status = path.stat()
        return list(
            _read_file(path, key, status.st_mtime_ns, status.st_size, status.st_ino)
        )
    except OSError as error:
        raise type(error)(
            f"{path}: cannot be read as a prompt file: {error.strerror}; check the "
            "path, which is relative to the YAML that names it, or to the working "
            "directory"
        ) from error


@lru_cache(maxsize=8)
def _read_file(path: Path, key: str, *version: int) -> tuple[Prompt, ...]:
    """The prompts of a file; a plan asks for the same ones many times."""
    # `version` is for the cache alone: a file that has changed since is read again.
    read = _READERS[path.suffix.lower()]
    return _numbered(read(path, read_text(path, MAX_BYTES), key), path, path.parent)


@lru_cache(maxsize=8)
def _read_dataset(name: str, key: str) -> tuple[Prompt, ...]:
    """The prompts of ``hf:NAME:SPLIT``; without a split it is ``train``. Columns that
    are neither text nor number, such as pictures, are left out.
    """
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise ValueError(
            f"{name}: datasets of the hub are read by the package datasets; run pip "
            "install datasets, or fetch a file"
        ) from error
    repository, _, split = name.removeprefix("hf:").partition(":")
    rows = []
    for number, row in enumerate(load_dataset(repository, split=split or "train")):
        kept = {k: v for k, v in row.items() if isinstance(v, str | int | float | None)}
        rows.append((f"{name}:row {number}", kept))
    return _numbered(_of_objects(rows, key), name, Path())


def _numbered(rows: "_Rows", source: object, folder: Path) -> tuple[Prompt, ...]:
    """The prompts of rows; `folder` is that of their pictures. ValueError."""
    prompts: list[Prompt] = []
    empty: list[str] = []
    places: dict[int, str] = {}
    for where, text, row in rows:
        if not text.strip():
            empty.append(where)
            continue
        prompt = _prompt(where, text, row, len(prompts), folder)
        if prompt.index in places:
            raise ValueError(
                f"{where}: index {prompt.index} is taken by {places[prompt.index]}; "
                "give each prompt its own index, or none of them any (they are then "
                "numbered from 0)"
            )
        places[prompt.index] = where
        prompts.append(prompt)
    if not prompts:
        raise ValueError(f"{source}: holds no prompts; write at least one")
    # Every rank reads the file; one of them tells.
    if empty and rank() == 0:
        logger.warning(
            "%s: %d empty prompts were skipped, the first at %s.",
            *(source, len(empty), empty[0]),
        )
    return tuple(prompts)


def _listed_prompts(given: Sequence[Row]) -> list[Prompt]:
    """Prompts that are in no file, numbered from 0: texts, or rows with `prompt` and,
    where there is one, `seed` and `image`, relative to the working directory.
    """
    if not given:
        raise ValueError("the list of prompts is empty; write at least one")
    prompts = []
    for number, row in enumerate(given):
        row = {"prompt": row} if isinstance(row, str) else row
        text = row.get("prompt") if isinstance(row, Mapping) else row
        if not isinstance(text, str):
            raise ValueError(
                f"a prompt is {row!r}; write it as a text, or as a row with 'prompt' "
                "and 'image'"
            )
        if not text.strip():
            raise ValueError("a prompt is empty; write one or leave it out")
        if unknown := row.keys() - {"prompt", "seed", "image"}:
            raise ValueError(
                f"a prompt has {', '.join(sorted(unknown))}; a row of a list has "
                "prompt, seed and image"
            )
        rest = {name: value for name, value in row.items() if name != "prompt"}
        prompts.append(_prompt(f"prompt {number}", text, rest, number, Path()))
    return prompts


# A reader yields (path:line, prompt, the rest of its row by column).
_Rows = Iterator[tuple[str, str, Mapping[str, object]]]


def _read_csv(path: Path, text: str, key: str) -> _Rows:
    csv.field_size_limit(MAX_BYTES)  # other columns may hold whole pictures
    reader = csv.DictReader(io.StringIO(text, newline=""), strict=True)
    try:
        header = [name.strip().lower() for name in reader.fieldnames or ()]
        key = key.strip().lower()
        if header.count(key) != 1:
            raise ValueError(
                f"{path}:1: expected one column named {key!r}, found "
                f"{', '.join(map(repr, header))}; cells are separated by commas, and "
                f"{_OTHER_KEY}"
            )
        reader.fieldnames = header
        for row in reader:
            where = f"{path}:{reader.line_num}"
            if None in row:
                raise ValueError(
                    f"{where}: more cells than the {len(header)} columns "
                    f"({', '.join(header)}); put a prompt with commas in double "
                    'quotes: "a cat, running"'
                )
            # A row may have fewer cells than the header.
            yield where, row.pop(key) or "", row
    except csv.Error as error:
        raise ValueError(
            f"{path}:{reader.reader.line_num}: not valid CSV ({error}); a quote inside "
            'quotes is written ""'
        ) from error


def _read_json(path: Path, text: str, key: str) -> _Rows:
    """One array, or a value on each line."""
    hint = (
        f'; write one array, or on each line an object with "{key}" or a string in '
        "double quotes"
    )
    # By the content and not by the name: either ending is found on either form.
    if text.lstrip().startswith("["):
        values = read_json(text, f"{path}:1", hint)
        rows = [(f"{path}:entry {n}", row) for n, row in enumerate(values, start=1)]
    else:
        rows = [
            (where, read_json(line, where, hint))
            for where, line, _ in _read_lines(path, text, key)
        ]
    return _of_objects(rows, key)


def _of_objects(rows: Iterable[tuple[str, object]], key: str) -> _Rows:
    for where, row in rows:
        if isinstance(row, str):
            row = {key: row}
        if not isinstance(row, dict):
            raise ValueError(
                f'{where}: expected an object with "{key}" or a string, found '
                f"{shown(row)}"
            )
        if key not in row:
            raise ValueError(
                f"{where}: no key named {key!r}; found {', '.join(map(repr, row))}; "
                f"{_OTHER_KEY}"
            )
        if not isinstance(row[key], str | None):
            raise ValueError(
                f"{where}: {key!r} must be a string, not {shown(row[key])}"
            )
        yield where, row.pop(key) or "", row


def _read_lines(path: Path, text: str, key: str) -> _Rows:
    # Not str.splitlines: that also splits at characters such as U+2028, which a prompt
    # may hold.
    for number, line in enumerate(re.split("\r\n?|\n", text), start=1):
        if line.strip():
            yield f"{path}:{number}", line, {}


_OTHER_KEY = "data.prompt_key names the one with the prompts"

_READERS: dict[str, Callable[[Path, str, str], _Rows]] = {
    ".csv": _read_csv,
    ".json": _read_json,
    ".jsonl": _read_json,
    ".txt": _read_lines,
}


def _prompt(
    where: str, text: str, row: Mapping[str, object], number: int, folder: Path
) -> Prompt:
    """The prompt of a row; `number` is its index where the row has none. ValueError."""
    index = _whole(where, row, "index")
    image = _cell(row, "image")
    file = folder / image
    # of a name that is too long Path.is_file raises
    if image and not os.path.isfile(file):
        raise ValueError(
            f"{where}: there is no picture {shown(image)} in {folder}; write its path "
            "relative to the prompt file, of a list to the working directory, or "
            "rename the column 'image' if it holds something else"
        )
    return Prompt(
        text=text.strip(),
        index=number if index is None else index,
        seed=_whole(where, row, "seed"),
        image=str(file.absolute()) if image else None,
        columns={
            name: value if isinstance(value, str) else json.dumps(value)
            for name, value in row.items()
            if name not in ("index", "seed", "image") and value is not None
        },
    )


def _cell(row: Mapping[str, object], name: str) -> str:
    value = row.get(name)
    return "" if value is None else str(value).strip()


def _whole(where: str, row: Mapping[str, object], name: str) -> int | None:
    """The whole number in a column; None where the row has none."""
    text = _cell(row, name)
    if not text:
        return None
    if not re.fullmatch("[0-9]{1,19}", text) or int(text) > MAX_INTEGER:
        raise ValueError(
            f"{where}: {name} must be a whole number from 0 to 2^63 - 1, not "
            f"{shown(row[name])}; fix it, leave it out, or rename the column if it "
            "holds something else"
        )
    return int(text)
