"""The prompts of a run, and the files that hold them, in UTF-8 with or without a byte order mark.

    prompts.csv                             prompts.jsonl                              prompts.txt
    prompt,index,seed                       {"prompt": "a red circle", "seed": 7}      a red circle
    "a red circle, moving left",0,7         "a blue square"                            a blue square

``index`` (default: the row's number, from 0) tells prompts apart in the random state and in file names;
``seed`` fixes a prompt's noise. Other columns are left alone, so a data set's own file can be used as it is.
"""

import csv
import io
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from sage_fast.config.errors import ConfigError
from sage_fast.config.files import read_json, read_text
from sage_fast.config.schema import RunConfig
from sage_fast.config.sections import digest
from sage_fast.records import Prompt

MAX_BYTES = 2**30
"""Of a prompt file; a million prompts of a hundred words take 0.6 GB."""

# Seeds and indices are mixed into 64-bit generator states.
MAX_INTEGER = 2**63 - 1


def load_prompts(config: RunConfig) -> tuple[list[Prompt], list[Prompt]]:
    """Training and evaluation prompts of a run. ConfigError names the config key of a file that cannot be used."""
    return _read_prompts("data.prompts", config.data.prompts), load_eval_prompts(config)


def load_eval_prompts(config: RunConfig) -> list[Prompt]:
    """Evaluation prompts of a run: the training prompts where it names none. ConfigError as `load_prompts`."""
    key, given, count = "evaluation.prompts", config.evaluation.prompts, config.evaluation.num_prompts
    if given is None:
        key, given = "data.prompts", config.data.prompts
    prompts = _read_prompts(key, given)
    if count is not None and count > len(prompts):
        raise ConfigError(f"evaluation.num_prompts is {count}, but there are {len(prompts)} prompts.")
    return prompts[:count]


def _read_prompts(key: str, given: str | list[str]) -> list[Prompt]:
    try:
        return read_prompts(given)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{key}: {error}") from error


def prompts_digest(prompts: Sequence[Prompt], eval_prompts: Sequence[Prompt]) -> str:
    """Digest of the training and evaluation prompts with their indices and seeds."""
    return digest([[(p.text, p.index, p.seed) for p in group] for group in (prompts, eval_prompts)])


def read_prompts(path: str | os.PathLike[str] | Sequence[str]) -> list[Prompt]:
    """Read a prompt file. Blank lines are skipped, and the white space around a prompt is dropped.

    Args:
        path: a ``.csv``, ``.jsonl`` or ``.txt`` file as above, or the texts themselves.

    Returns:
        At least one prompt, in the file's order, with distinct indices.

    Raises:
        OSError: there is no such file (FileNotFoundError), or it cannot be read.
        ValueError: the file cannot be used; the message starts with ``path:line`` and says what to change.
    """
    if not isinstance(path, str | os.PathLike):
        if not path:
            raise ValueError("the list of prompts is empty; write at least one")
        return text_prompts(path)
    path = Path(path)
    if path.suffix.lower() not in _READERS:
        raise ValueError(
            f"{path}: a prompt file ends in {', '.join(_READERS)}, not in {path.suffix or 'no extension'!r}; "
            "rename or convert it"
        )
    try:
        content = read_text(path, MAX_BYTES)
    except OSError as error:
        raise type(error)(
            f"{path}: cannot be read as a prompt file: {error.strerror}; check the path, which is relative to the YAML "
            "that names it, or to the working directory"
        ) from error

    prompts: list[Prompt] = []
    line_of_index: dict[int, int] = {}
    for line, text, index, seed in _READERS[path.suffix.lower()](path, content):
        where = f"{path}:{line}"
        if not text.strip():
            raise ValueError(f"{where}: the prompt is empty; write one or delete the line")
        if not _is_unicode(text):
            raise ValueError(f"{where}: the prompt has an escape of half a character (\\ud800 to \\udfff) or of none")
        number = _integer(index, "index", where)
        if number is None:
            number = len(prompts)
        if number in line_of_index:
            raise ValueError(
                f"{where}: index {number} is taken by line {line_of_index[number]}; give each prompt its own "
                "index, or none of them any (they are then numbered from 0)"
            )
        line_of_index[number] = line
        prompts.append(Prompt(text=text.strip(), index=number, seed=_integer(seed, "seed", where)))
    if not prompts:
        raise ValueError(f"{path}: holds no prompts; write at least one")
    return prompts


def text_prompts(texts: Sequence[str]) -> list[Prompt]:
    """Prompts that are in no file, in any script, numbered from 0; the white space around each is dropped.

    ValueError for one that is not a text, or empty, or whose bytes are not UTF-8.
    """
    for text in texts:
        if not isinstance(text, str):
            raise ValueError(f"a prompt is {text!r}; write it as a text")
        if not text.strip():
            raise ValueError("a prompt is empty; write one or leave it out")
        if not _is_unicode(text):
            raise ValueError(f"the prompt {text!r} is no UTF-8; check the encoding of the terminal or script")
    return [Prompt(text=text.strip(), index=number) for number, text in enumerate(texts)]


def _is_unicode(text: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" or character == "\0" for character in text)


# A reader yields (line number from 1, prompt, raw index or None, raw seed or None).
_Row = tuple[int, str, object, object]


def _read_csv(path: Path, text: str) -> Iterator[_Row]:
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    header: list[str] = []
    while True:
        # A quoted cell may span lines, so a row is named by the line it starts on.
        start = reader.line_num + 1
        try:
            cells = next(reader, None)
        except csv.Error as error:
            raise ValueError(f'{path}:{start}: not valid CSV ({error}); a quote inside quotes is written ""') from error
        if cells is None:
            return
        if not any(cell.strip() for cell in cells):
            continue
        if not header:
            header = _header(cells, f"{path}:{start}")
            continue
        if len(cells) > len(header):
            raise ValueError(
                f"{path}:{start}: {len(cells)} cells, but {len(header)} columns ({', '.join(header)}); "
                'put a prompt with commas in double quotes: "a cat, running"'
            )
        row = dict(zip(header, cells, strict=False))
        yield start, row.get("prompt", ""), row.get("index"), row.get("seed")


def _header(cells: list[str], where: str) -> list[str]:
    header = [cell.strip().lower() for cell in cells]
    if header.count("prompt") != 1:
        raise ValueError(f"{where}: expected one column named 'prompt', found {', '.join(map(repr, header))}")
    return header


def _read_jsonl(path: Path, text: str) -> Iterator[_Row]:
    hint = '; each line is one object with "prompt", or one string in double quotes'
    for line, content in _lines(text):
        where = f"{path}:{line}"
        row = read_json(content, where, hint)
        if isinstance(row, str):
            row = {"prompt": row}
        if not isinstance(row, dict):
            raise ValueError(f'{where}: expected an object with "prompt" or a string, found {_shown(row)}')
        if "prompt" not in row:
            raise ValueError(f"{where}: no key named 'prompt'; found {', '.join(map(repr, row)) or 'no keys at all'}")
        if not isinstance(row["prompt"], str):
            raise ValueError(f"{where}: 'prompt' must be a string, not {_shown(row['prompt'])}")
        yield line, row["prompt"], row.get("index"), row.get("seed")


def _read_txt(path: Path, text: str) -> Iterator[_Row]:
    for line, content in _lines(text):
        yield line, content, None, None


_READERS = {".csv": _read_csv, ".jsonl": _read_jsonl, ".txt": _read_txt}


def _lines(text: str) -> Iterator[tuple[int, str]]:
    # Not str.splitlines: that also splits at characters such as U+2028, which a prompt may hold.
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            yield number, line.strip()


def _integer(value: object, name: str, where: str) -> int | None:
    """An index or seed from a cell (text) or a JSON value; None where it was left out."""
    text = "" if value is None else str(value).strip()
    if not text:
        return None
    if not re.fullmatch("[0-9]{1,19}", text) or int(text) > MAX_INTEGER:
        raise ValueError(
            f"{where}: {name} must be a whole number from 0 to 2^63 - 1, not {_shown(value)}; mend it or leave it out"
        )
    return int(text)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."
