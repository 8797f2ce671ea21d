"""The prompts of a run, and the files that hold them, in UTF-8 with or without a byte
order mark.

    prompts.csv                             prompts.jsonl                              prompts.txt
    prompt,index,seed                       {"prompt": "a red circle", "seed": 7}      a red circle
    "a red circle, moving left",0,7         "a blue square"                            a blue square

    prompts.json
    [{"prompt": "a red circle", "seed": 7}, "a blue square"]

``index`` (default: the row's number, from 0) tells prompts apart in the random state
and in file names; where not all are whole numbers it is left alone. ``seed`` is mixed
with the run's for a prompt's noise. ``image`` is the file of the picture that an
image-to-video model animates, relative to the prompt file. Other columns are left
alone, so a data set's own file can be used as it is; `data.prompt_key` names the column
of prompts that is not ``prompt``.
"""

import csv
import io
import logging
import os
import re
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path

from sage_fast.config.errors import ConfigError, shown
from sage_fast.config.files import content_digest, read_json, read_text
from sage_fast.config.schema import RunConfig
from sage_fast.config.sections import digest
from sage_fast.distributed.start import rank
from sage_fast.records import Prompt

logger = logging.getLogger(__name__)

MAX_BYTES = 2**30
"""Of a prompt file; a million prompts of a hundred words take 0.6 GB."""

# Seeds and indices are mixed into 64-bit generator states.
MAX_INTEGER = 2**63 - 1

_UNSEEN = re.compile("[\u200b\u2060\ufeff]")
"""Zero-width space, word joiner, byte order mark: what shows nothing and joins nothing.
Joiners of emoji and of scripts are not among them.
"""

_NO_TEXT = re.compile("[\ud800-\udfff\0]")

Row = str | Mapping[str, object]
"""A prompt in a list: its text, or its row of a prompt file."""

_TITLES = {"prompt", "prompts", "caption", "captions"}


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


def prompts_digest(prompts: Sequence[Prompt], eval_prompts: Sequence[Prompt]) -> str:
    """Digest of the training and evaluation prompts with their indices, seeds and the
    content of their pictures.
    """

    def values(prompt: Prompt) -> tuple[object, ...]:
        picture = () if prompt.image is None else (content_digest(prompt.image),)
        return prompt.text, prompt.index, prompt.seed, *picture

    return digest(
        [[values(prompt) for prompt in group] for group in (prompts, eval_prompts)]
    )


def read_prompts(
    path: str | os.PathLike[str] | Sequence[Row], key: str = "prompt"
) -> list[Prompt]:
    """Read a prompt file. Blank lines are skipped, and the white space around a prompt
    is dropped.

    What else is skipped, removed or left alone is logged, once for each version of a
    file.

    Args:
        path: a ``.csv``, ``.json``, ``.jsonl`` or ``.txt`` file as above, or the texts
            or rows themselves. key: column or JSON key of the prompts.

    Returns:
        At least one prompt, in the file's order, with distinct indices.

    Raises:
        OSError: there is no such file (FileNotFoundError), or it cannot be read.
        ValueError: the file cannot be used; the message starts with ``path:line`` and
            says what to change.
    """
    if not isinstance(path, str | os.PathLike):
        if not path:
            raise ValueError("the list of prompts is empty; write at least one")
        return listed_prompts(path)
    path = Path(path)
    if path.suffix.lower() not in _READERS:
        raise ValueError(
            f"{path}: a prompt file ends in {', '.join(_READERS)}, not in "
            f"{path.suffix or 'no extension'!r}; "
            "rename or convert it"
        )
    try:
        status = path.stat()
        return list(
            _read_file(path, key, status.st_mtime_ns, status.st_size, status.st_ino)
        )
    except OSError as error:
        raise type(error)(
            f"{path}: cannot be read as a prompt file: {error.strerror}; check the "
            "path, which is relative to the YAML "
            "that names it, or to the working directory"
        ) from error


@lru_cache(maxsize=8)
def _read_file(path: Path, key: str, *version: int) -> tuple[Prompt, ...]:
    """The prompts of a file; a plan asks for the same ones many times."""
    # `version` is for the cache alone: a file that has changed since is read again.
    rows: list[tuple[str, str, object, object, object]] = []
    empty = []
    marked = []
    for where, text, row in _READERS[path.suffix.lower()](
        path, read_text(path, MAX_BYTES), key
    ):
        if _NO_TEXT.search(text):
            raise ValueError(
                f"{where}: the prompt has an escape of half a character (\\ud800 to "
                "\\udfff) or of none"
            )
        if seen := _visible(text):
            rows.append(
                (
                    where,
                    seen,
                    _cell(row, "index"),
                    _cell(row, "seed"),
                    _cell(row, "image"),
                )
            )
            marked += [where] if _UNSEEN.search(text) else []
        else:
            empty.append(where)
    if not rows:
        raise ValueError(f"{path}: holds no prompts; write at least one")
    if empty:
        _note(path, f"{len(empty)} empty prompts were skipped, the first at {empty[0]}")
    if marked:
        _note(
            path,
            (
                f"marks of no width were removed from {len(marked)} prompts, the "
                f"first at {marked[0]}"
            ),
        )
    # All or none: a column that also holds other values is taken for something else
    # than our index.
    odd = [
        (where, index)
        for where, _, index, *_ in rows
        if index is not None and _whole(index) is None
    ]
    if odd:
        _note(
            path,
            "the column 'index' is left alone and prompts are numbered from 0, "
            f"because {len(odd)} of its values are "
            f"not whole numbers from 0 to 2^63 - 1, such as {shown(odd[0][1])} at "
            f"{odd[0][0]}",
        )
    prompts: list[Prompt] = []
    taken: dict[int, str] = {}
    for where, text, index, seed, image in rows:
        number = None if odd else _whole(index)
        if number is None:
            number = len(prompts)
        if number in taken:
            raise ValueError(
                f"{where}: index {number} is taken by line "
                f"{taken[number].removeprefix(f'{path}:')}; give each prompt "
                "its own index, or none of them any (they are then numbered from 0)"
            )
        taken[number] = where
        prompts.append(_prompt(where, text, number, seed, image, path.parent))
    _note_texts(str(path), tuple(prompt.text for prompt in prompts))
    return tuple(prompts)


def listed_prompts(given: Sequence[Row]) -> list[Prompt]:
    """Prompts that are in no file, in any script, numbered from 0; the white space
    around each is dropped.

    Args:
        given: texts, or rows with `prompt` and, where there is one, `seed` and `image`,
            relative to the working directory.

    ValueError for one that is not a text, or empty, or whose bytes are not UTF-8, and
    for a picture that is not there.
    """
    prompts = []
    texts = []
    for number, row in enumerate(given):
        row = {"prompt": row} if isinstance(row, str) else row
        text = row.get("prompt") if isinstance(row, Mapping) else row
        if not isinstance(text, str):
            raise ValueError(
                f"a prompt is {row!r}; write it as a text, or as a row with 'prompt' "
                "and 'image'"
            )
        if not _visible(text):
            raise ValueError("a prompt is empty; write one or leave it out")
        if _NO_TEXT.search(text):
            raise ValueError(
                f"the prompt {text!r} is not UTF-8; check the encoding of the "
                "terminal or script"
            )
        if unknown := row.keys() - {"prompt", "seed", "image"}:
            raise ValueError(
                f"a prompt has {', '.join(sorted(unknown))}; a row of a list has "
                "prompt, seed and image"
            )
        seed = _cell(row, "seed")
        image = _cell(row, "image")
        prompts.append(
            _prompt(f"prompt {number}", _visible(text), number, seed, image, Path())
        )
        texts.append(text)
    _note_texts("the list of prompts", tuple(texts))
    return prompts


def _visible(text: str) -> str:
    """A prompt without marks of no width and the white space around it; empty where
    nothing of it shows.
    """
    text = _UNSEEN.sub("", text).strip()
    return (
        ""
        if all(c.isspace() or unicodedata.category(c) == "Cf" for c in text)
        else text
    )


@lru_cache(maxsize=8)
def _note_texts(source: str, texts: tuple[str, ...]) -> None:
    if repeats := len(texts) - len(set(texts)):
        _note(source, f"{repeats:,} of {len(texts):,} prompts repeat an earlier one")
    if marked := sum(map(bool, map(_UNSEEN.search, texts))):
        _note(source, f"marks of no width were removed from {marked} prompts")


def _note(source: object, text: str) -> None:
    # Every rank reads the files; one of them tells.
    if rank() == 0:
        logger.warning("%s: %s.", source, text)


# A reader yields (path:line, prompt, what stands beside it by name).
_Row = tuple[str, str, Mapping[str, object]]


def _read_csv(path: Path, text: str, key: str) -> Iterator[_Row]:
    csv.field_size_limit(MAX_BYTES)  # other columns may hold whole pictures
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    header: list[str] = []
    while True:
        # A quoted cell may span lines, so a row is named by the line it starts on.
        start = reader.line_num + 1
        try:
            cells = next(reader, None)
        except csv.Error as error:
            raise ValueError(
                f"{path}:{start}: not valid CSV ({error}); a quote inside quotes is "
                'written ""'
            ) from error
        if cells is None:
            return
        if not any(cell.strip() for cell in cells):
            continue
        if not header:
            header = _header(cells, f"{path}:{start}", key.strip().lower())
            continue
        if len(cells) > len(header):
            raise ValueError(
                f"{path}:{start}: {len(cells)} cells, but {len(header)} columns "
                f"({', '.join(header)}); "
                'put a prompt with commas in double quotes: "a cat, running"'
            )
        # A row may have fewer cells than the header; what it lacks counts as blank.
        row = dict(zip(header, cells, strict=False))
        yield f"{path}:{start}", row.get(key.strip().lower(), ""), row


def _header(cells: list[str], where: str, key: str) -> list[str]:
    header = [_visible(cell).lower() for cell in cells]
    if header.count(key) != 1:
        advice = (
            _OTHER_KEY if key not in header else "; rename all but one of that name"
        )
        if len(header) == 1 and re.search(r"[;\t]", header[0]):
            advice = "; cells are separated by commas"
        raise ValueError(
            f"{where}: expected one column named {key!r}, found "
            f"{', '.join(map(repr, header))}{advice}"
        )
    return header


def _read_json(path: Path, text: str, key: str) -> Iterator[_Row]:
    """One array, or a value on each line."""
    hint = (
        f'; write one array, or on each line an object with "{key}" or a string in '
        "double quotes"
    )
    rows: Iterator[tuple[str, object]]
    # By the content and not by the name: either ending is found on either form.
    if text.lstrip().startswith("["):
        rows = (
            (f"{path}:entry {n}", row)
            for n, row in enumerate(read_json(text, f"{path}:1", hint), start=1)
        )
    else:
        rows = (
            (f"{path}:{line}", read_json(content, f"{path}:{line}", hint))
            for line, content in _lines(text)
        )
    for where, row in rows:
        if isinstance(row, str):
            row = {key: row}
        if not isinstance(row, dict):
            raise ValueError(
                f'{where}: expected an object with "{key}" or a string, found '
                f"{shown(row)}"
            )
        if key not in row:
            found = ", ".join(map(repr, row)) or "no keys at all"
            arrays = [name for name, value in row.items() if isinstance(value, list)]
            # An object with an array and without any text is the whole data set rather
            # than a row of it.
            alone = arrays and not any(isinstance(value, str) for value in row.values())
            advice = (
                f"; if {arrays[0]!r} holds the prompts, save that array alone"
                if alone
                else _OTHER_KEY
            )
            raise ValueError(f"{where}: no key named {key!r}; found {found}{advice}")
        if not isinstance(row[key], str | None):
            raise ValueError(
                f"{where}: {key!r} must be a string, not {shown(row[key])}"
            )
        yield where, row[key] or "", row


def _read_txt(path: Path, text: str, key: str) -> Iterator[_Row]:
    for number, (line, content) in enumerate(_lines(text)):
        if number == 0 and _visible(content).strip("\"'").lower() in {
            *_TITLES,
            key.lower(),
        }:
            _note(
                path,
                (
                    f"the first line, {content!r}, is taken for the title of a column "
                    "and is not a prompt"
                ),
            )
        else:
            yield f"{path}:{line}", content, {}


_OTHER_KEY = "; data.prompt_key names the one with the prompts"

_READERS: dict[str, Callable[[Path, str, str], Iterator[_Row]]] = {
    ".csv": _read_csv,
    ".json": _read_json,
    ".jsonl": _read_json,
    ".txt": _read_txt,
}


def _lines(text: str) -> Iterator[tuple[int, str]]:
    # Not str.splitlines: that also splits at characters such as U+2028, which a prompt
    # may hold.
    for number, line in enumerate(re.split("\r\n?|\n", text), start=1):
        if line.strip():
            yield number, line.strip()


def _cell(row: Mapping[str, object], name: str) -> object:
    """The value of a row by its name; None where it has none or a blank."""
    value = row.get(name)
    return None if value is None or not str(value).strip() else value


def _whole(value: object) -> int | None:
    """A whole number from a cell (text) or a JSON value; None for anything else."""
    text = str(value).strip()
    return (
        int(text)
        if re.fullmatch("[0-9]{1,19}", text) and int(text) <= MAX_INTEGER
        else None
    )


def _prompt(
    where: str, text: str, index: int, seed: object, image: object, folder: Path
) -> Prompt:
    """The prompt of a row. ValueError for a seed that is not a whole number, and for a
    picture that is not there.
    """
    number = _whole(seed)
    if seed is not None and number is None:
        raise ValueError(
            f"{where}: seed must be a whole number from 0 to 2^63 - 1, not "
            f"{shown(seed)}; fix it or leave it out"
        )
    file = None if image is None else folder / str(image).strip()
    # of a name that is too long Path.is_file raises
    if file is not None and not os.path.isfile(file):
        raise ValueError(
            f"{where}: there is no picture {shown(image)} in {folder}; write its path "
            "relative to the prompt "
            "file, of a list to the working directory, or rename the column 'image' "
            "if it holds something else"
        )
    return Prompt(
        text=text,
        index=index,
        seed=number,
        image=None if file is None else str(file.absolute()),
    )
