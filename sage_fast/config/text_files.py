"""Text that people write: files, YAML and JSON, read so that whatever they hold, a mistake is one clear message.

YAML is read by what YAML 1.1 and 1.2 agree on. A key that is given twice, and a scalar that the two read differently
(`010`, `1:30`, `yes`), is refused instead of guessed. Depth and size are limited, aliases included.
"""

import errno
import json
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import yaml

from sage_fast.config.errors import ConfigError

MAX_DOCUMENT_BYTES = 2**20
"""Of a YAML or JSON document; the presets take 3 KB."""

MAX_DEPTH = 32
MAX_NODES = 20_000
"""Values in a document, what an alias stands for counted wherever it stands."""

MAX_DIGITS = 40


def read_text(path: Path, max_bytes: int = MAX_DOCUMENT_BYTES) -> str:
    """The text of a regular file in UTF-8, without a byte order mark. Line ends are left as they are.

    Raises:
        OSError: there is no such file, it may not be read, or it is a directory, a pipe or a device; `strerror` says
            which.
        ConfigError: it is too large or no text; the message starts with the path.
    """
    if "\0" in str(path):
        raise FileNotFoundError(errno.ENOENT, "A path cannot hold a NUL character", str(path))
    # Opening a pipe waits for a writer unless it is told not to.
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "Is a pipe or a device, not a file", str(path))
        # A file of 2 TB is not read to find that out; one in /proc has no size before it is read.
        data = file.read(max_bytes + 1) if status.st_size <= max_bytes else b""
    if max(len(data), status.st_size) > max_bytes:
        raise ConfigError(f"{path}: larger than {max_bytes:,} bytes; is it the file that was meant?")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ConfigError(
            f"{path}:{line}: not UTF-8 (byte 0x{data[error.start]:02x}); save it with the encoding UTF-8"
        ) from error
    if "\0" in text:
        line = text.count("\n", 0, text.index("\0")) + 1
        raise ConfigError(f"{path}:{line}: holds a NUL byte, so it is no text; save it with the encoding UTF-8")
    return text


def read_json(text: str, where: str, hint: str = "") -> Any:
    """The value of a JSON document.

    Args:
        text: the document.
        where: what messages start with, such as `path:line`.
        hint: what messages about the syntax end with.

    Raises:
        ConfigError: the text is not JSON, gives a key twice, nests too deep or has an integer of too many digits.
    """
    try:
        value = json.loads(text, object_pairs_hook=_without_duplicates, parse_int=_integer)
    except json.JSONDecodeError as error:
        line = f"line {error.lineno}, " if error.lineno > 1 else ""
        raise ConfigError(f"{where}: not valid JSON ({error.msg}, {line}column {error.colno}){hint}") from error
    except RecursionError:
        raise ConfigError(f"{where}: nested deeper than {MAX_DEPTH} levels") from None
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from error
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [child for parent in level for child in _children(parent)]
    if level:
        raise ConfigError(f"{where}: nested deeper than {MAX_DEPTH} levels")
    return value


def _children(value: object) -> Iterator[object]:
    yield from value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {next(n for n in names if names.count(n) > 1)!r} is given twice; keep one")
    return result


def _integer(digits: str, base: int = 10) -> int:
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"an integer of {len(digits)} digits ({digits[:10]}...); it must have at most {MAX_DIGITS}")
    return int(digits, base)


def read_yaml(text: str, where: str, key: str = "") -> Any:
    """The value of a YAML document; None where it is empty.

    Args:
        text: the document.
        where: what messages start with, such as the path.
        key: dotted name of a value that is the whole document, for messages; empty for a file, whose lines they name.

    Raises:
        ConfigError: the text is not YAML, gives a key twice, has an ambiguous scalar, an alias of itself, a tag, more
            than one document, or is too deep or too large. The message names the line and the key.
    """
    return _Document(text, where, key).read()


class _Document:
    """One YAML document on its way from events to values. PyYAML's own constructor recurses, guesses and overwrites."""

    def __init__(self, text: str, where: str, key: str) -> None:
        self.events: Iterator[yaml.Event] = iter(yaml.parse(text, Loader=yaml.SafeLoader))
        self.where = where
        self.key = key
        self.nodes = 0
        self.anchors: dict[str, tuple[Any, int] | None] = {}
        """Anchor -> its value and number of nodes; None while the value is being read."""

    def fail(self, event: yaml.Event, message: str) -> NoReturn:
        line = "" if self.key else f":{_line(event)}"
        raise ConfigError(f"{self.where}{line}: {message}")

    def read(self) -> Any:
        try:
            next(self.events)  # the start of the stream
            if isinstance(next(self.events), yaml.StreamEndEvent):
                return None
            value = self.node(next(self.events), self.key, 1)
            next(self.events)  # the end of the document
            event = next(self.events)
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            place = f":{mark.line + 1}" if mark and not self.key else f": {self.key}"
            reason = ", ".join(part for part in (error.context, error.problem) if part)
            raise ConfigError(f"{self.where}{place}: not valid YAML ({reason})") from error
        except yaml.reader.ReaderError as error:
            reason = f"the character U+{error.character:04X} at position {error.position} is not allowed"
            raise ConfigError(f"{self.where}: not valid YAML ({reason})") from error
        except ConfigError:
            raise
        except (ValueError, OverflowError) as error:
            raise ConfigError(f"{self.where}: not valid YAML (an escape of no character: {error})") from error
        if not isinstance(event, yaml.StreamEndEvent):
            self.fail(event, "a second document starts here; a file holds one (remove the line ---)")
        return value

    def count(self, event: yaml.Event, nodes: int) -> None:
        self.nodes += nodes
        if self.nodes > MAX_NODES:
            self.fail(event, f"more than {MAX_NODES:,} values, those of aliases included; is it a configuration?")

    def node(self, event: Any, key: str, depth: int) -> Any:
        if isinstance(event, yaml.AliasEvent):
            return self.alias(event)
        if depth > MAX_DEPTH:
            self.fail(event, f"nested deeper than {MAX_DEPTH} levels")
        before = self.nodes
        self.count(event, 1)
        if event.anchor is not None:
            self.anchors[event.anchor] = None
        kind = {yaml.ScalarEvent: "str", yaml.SequenceStartEvent: "seq", yaml.MappingStartEvent: "map"}[type(event)]
        if event.tag not in (None, "!", f"tag:yaml.org,2002:{kind}"):
            self.fail(event, f"{key or 'the document'} has the tag {event.tag!r}; remove it, tags are not read")
        value: Any
        if isinstance(event, yaml.ScalarEvent):
            value = self.scalar(event, key)
        elif isinstance(event, yaml.SequenceStartEvent):
            value = self.sequence(key, depth)
        else:
            value = self.mapping(key, depth)
        if event.anchor is not None:
            self.anchors[event.anchor] = value, self.nodes - before
        return value

    def sequence(self, key: str, depth: int) -> list[Any]:
        result: list[Any] = []
        while not isinstance(event := next(self.events), yaml.SequenceEndEvent):
            result.append(self.node(event, f"{key}[{len(result)}]", depth + 1))
        return result

    def alias(self, event: yaml.AliasEvent) -> Any:
        if event.anchor not in self.anchors:
            self.fail(event, f"not valid YAML (no anchor &{event.anchor} stands before the alias *{event.anchor})")
        known = self.anchors[event.anchor]
        if known is None:
            self.fail(event, f"the alias *{event.anchor} stands inside the value that it is an alias of")
        value, nodes = known
        self.count(event, nodes)
        return value

    def mapping(self, prefix: str, depth: int) -> dict[str, Any]:
        lines: dict[str, int] = {}
        result: dict[str, Any] = {}
        merged: dict[str, Any] = {}
        while not isinstance(event := next(self.events), yaml.MappingEndEvent):
            if not isinstance(event, yaml.ScalarEvent):
                self.fail(event, f"a key of {prefix or 'the document'} is not a word")
            name = event.value
            key = f"{prefix}.{name}" if prefix else name
            if name in lines:
                first, second = lines[name], _line(event)
                places = f", in line {first} and in line {second}" if second > first else ""
                self.fail(event, f"{key} is given twice{places}; merge the two, or remove one")
            lines[name] = _line(event)
            if not isinstance(self.scalar(event, f"the key {key}"), str):
                self.fail(event, f"the key {key} is no word; write it in quotes")
            value = self.node(next(self.events), key, depth + 1)
            if name == "<<" and event.style is None:
                merged = self.merge(event, value)
            else:
                result[name] = value
        return merged | result

    def merge(self, event: yaml.Event, value: Any) -> dict[str, Any]:
        """What `<<: *anchor` or `<<: [*first, *second]` stands for; the first goes before the second."""
        merged: dict[str, Any] = {}
        for part in reversed(value if isinstance(value, list) else [value]):
            if not isinstance(part, dict):
                self.fail(event, "<< merges mappings, and this is none")
            merged |= part
        return merged

    def scalar(self, event: yaml.ScalarEvent, key: str) -> Any:
        """A string, or what an unquoted word stands for."""
        text = event.value
        if event.tag is not None or event.style is not None:
            return text
        if _NULL.fullmatch(text):
            return None
        if _BOOLEAN.fullmatch(text):
            return text.lower() == "true"
        for pattern, advice in _AMBIGUOUS:
            if pattern.fullmatch(text):
                shown = text if len(text) <= MAX_DIGITS else f"{text[:10]}..."
                self.fail(event, f"{key} is {shown}, which YAML readers disagree about; write {advice}, or put it in "
                          "quotes if it is text")  # fmt: skip
        plain = text.replace("_", "")
        for pattern, base in _INTEGERS:
            if pattern.fullmatch(text):
                try:
                    return _integer(plain, base)
                except ValueError as error:
                    self.fail(event, f"{key} is {error}")
        if _FLOAT.fullmatch(text):
            return float(plain)
        if special := _NOT_FINITE.fullmatch(text):
            return float(f"{special[1]}{special[2]}")
        return text


def _line(event: yaml.Event) -> int:
    assert event.start_mark is not None  # the parser sets it
    return event.start_mark.line + 1


_NULL = re.compile("~|null|Null|NULL|")
_BOOLEAN = re.compile("true|True|TRUE|false|False|FALSE")
_AMBIGUOUS = (
    (re.compile("(yes|no|on|off)", re.IGNORECASE), "true or false"),
    (re.compile(r"[-+]?0[0-9_]+"), "a number without a leading 0"),
    (re.compile(r"[-+]?[0-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?"), "a plain number"),
)
_INTEGERS = (
    (re.compile("[-+]?[0-9][0-9_]*"), 10),
    (re.compile("[-+]?0x[0-9a-fA-F_]*[0-9a-fA-F]_*"), 16),
    (re.compile("[-+]?0b[01_]*[01]_*"), 2),
)
_FLOAT = re.compile(r"[-+]?([0-9][0-9_]*(\.[0-9_]*)?|\.[0-9][0-9_]*)([eE][-+]?[0-9]+)?")
_NOT_FINITE = re.compile(r"([-+]?)\.(inf|nan)", re.IGNORECASE)


class _Dumper(yaml.SafeDumper):
    """Quotes every string that `read_yaml` would not read back as the same string."""


def _represent_string(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    patterns = (_NULL, _BOOLEAN, _FLOAT, _NOT_FINITE, *(p for p, _ in _AMBIGUOUS), *(p for p, _ in _INTEGERS))
    quoted = any(pattern.fullmatch(text) for pattern in patterns)
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="'" if quoted else None)


_Dumper.add_representer(str, _represent_string)


def dump_yaml(value: Any) -> str:
    """A YAML document that `read_yaml` reads back to an equal value; only ASCII."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False)
