"""Files: written so that a reader, or a run killed half way, never meets half of one.
What people write is read so that a mistake is one clear message.
"""

import errno
import hashlib
import json
import os
import re
import secrets
import stat
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import yaml

from sage_fast.config.errors import ConfigError

_WHOLE = 4 * 2**20
_BLOCK = 4 * 2**10

LEFT_AFTER = 3600.0
"""Seconds without a write after which a temporary file belongs to nobody any more."""

MAX_DOCUMENT_BYTES = 2**20
"""Of a YAML or JSON document; the presets take 3 KB."""


@contextmanager
def replacing(path: str | os.PathLike[str], *, lasting: bool = True) -> Iterator[Path]:
    """Yield a temporary path beside ``path``, which replaces ``path`` when the block
    has succeeded.

    Missing parent folders are created. After an error the old
    file, if any, is untouched and the temporary one is gone. The file has the
    permissions that the umask allows, whatever library has written it.

    Args:
        lasting: wait until file and name are on disk. Without it a loss of power may
            leave the old file, or none of the new one's content: for what is written
            every few seconds and says nothing after that.

    Raises:
        OSError: the folder cannot be created or written to; the message names it and
            says what to change.
    """
    path = Path(path)
    _remove_leftovers(path.parent)
    # Processes of two nodes that share the folder may have the same number.
    temporary = path.with_name(
        f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.partial"
    )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.touch()
        # A new file shows what the umask allows; only a call that changes the umask
        # returns it.
        mode = stat.S_IMODE(temporary.stat().st_mode)
    except OSError as error:
        raise type(error)(
            error.errno,
            (
                f"cannot write {path.name} ({error.strerror}); choose another output "
                "directory than"
            ),
            str(path.parent),
        ) from error
    try:
        yield temporary
        # safetensors renames a file of its own over it, which nobody else may read
        temporary.chmod(mode)
        if lasting:
            # The content before the name: after a loss of power the name must not lead
            # to an empty file.
            sync(temporary)
        os.replace(temporary, path)
        if lasting:
            # The rename is an entry of the folder, and lasts once that is on disk.
            sync(path.parent)
    except OSError as error:
        # as of a write, which knows its descriptor alone
        if error.filename is None and error.errno is not None:
            raise type(error)(error.errno, error.strerror, str(path)) from error
        raise
    finally:
        temporary.unlink(missing_ok=True)


@cache
def _remove_leftovers(folder: Path) -> None:
    """Remove what killed processes have left half written in a folder; once, because it
    may hold many files.
    """
    with suppress(OSError):
        for file in folder.glob(".*.partial"):
            if file.stat().st_mtime < time.time() - LEFT_AFTER:
                file.unlink()


def write_text(
    path: str | os.PathLike[str], text: str, *, lasting: bool = True
) -> None:
    """Write a file of text in UTF-8, as `replacing` does."""
    with replacing(path, lasting=lasting) as partial:
        partial.write_text(text, encoding="utf-8")


def sync(path: Path) -> None:
    """Force a file's content, or the names in a folder, to disk. OSError when the disk
    reports a failure.

    Some file systems (FUSE, some network mounts) have no fsync for folders and say so:
    there a rename is as lasting as the server makes it, and nothing more can be done
    from here.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP) or not path.is_dir():
            raise
    finally:
        os.close(descriptor)


def fingerprint(paths: Iterable[Path]) -> str:
    """Identity of the content of files, cheap for large ones: 32 hex digits.

    Names, sizes and content are hashed. Beyond 4 MiB that is the head of the file and 4
    KiB at each of many places: at the start of every tensor of a .safetensors file, at
    256 even distances in another. Weights that were trained further differ there, while
    a copy, which has another date, does not.
    """
    digest = hashlib.blake2b(digest_size=16)
    # By name, because the order in which a folder lists its files depends on the file
    # system.
    for path in sorted(paths, key=lambda p: p.name):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            head = file.read(_WHOLE)
            digest.update(head)
            if size > _WHOLE:
                places = list(range(0, size, size // 256))
                if path.suffix == ".safetensors":
                    # The beginning of every tensor: 8 bytes of length and a JSON header
                    # stand before them.
                    length = int.from_bytes(head[:8], "little")
                    header = loads(head[8 : 8 + length])
                    header.pop("__metadata__", None)
                    places = sorted(
                        8 + length + entry["data_offsets"][0]
                        for entry in header.values()
                    )
                for place in places:
                    file.seek(place)
                    digest.update(file.read(_BLOCK))
    return digest.hexdigest()


def content_digest(path: str | Path) -> str:
    """Identity of a whole file's content, 32 hex digits; it is read again only once its
    date or size has changed.
    """
    status = os.stat(path)
    return _content_digest(str(path), status.st_mtime_ns, status.st_size)


@lru_cache(maxsize=2**20)
def _content_digest(path: str, *version: int) -> str:
    return hashlib.blake2b(Path(path).read_bytes(), digest_size=16).hexdigest()


# ------------------------------------------------------------------------------------------
# text


def read_text(path: Path, max_bytes: int = MAX_DOCUMENT_BYTES) -> str:
    """The text of a regular file in UTF-8, without a byte order mark. Line ends are
    left as they are.

    Raises:
        OSError: there is no such file, it may not be read, or it is a directory, a pipe
            or a device; `strerror` says which.
        ConfigError: it is too large or not text; the message starts with the path.
    """
    # Opening a pipe would wait for a writer.
    with open(
        path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)
    ) as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "Is a pipe or a device, not a file", str(path))
        # The size says 0 for a file in /proc, and 2 TB for one that must not be read to
        # find that out.
        data = file.read(_BLOCK) if status.st_size <= max_bytes else b""
        if b"\0" in data:
            raise ConfigError(
                f"{path}: not text, it begins with bytes of 0; save it with the "
                "encoding UTF-8"
            )
        data += file.read(max_bytes + 1 - len(data)) if data else b""
    if max(len(data), status.st_size) > max_bytes:
        raise ConfigError(
            f"{path}: larger than {max_bytes:,} bytes; is it the file that was meant?"
        )
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ConfigError(
            f"{path}:{line}: not UTF-8 (byte 0x{data[error.start]:02x}); save it with "
            "the encoding UTF-8"
        ) from error


def loads(text: str | bytes) -> Any:
    """The value of a JSON text, as `json.loads`. ValueError for anything that is wrong
    with it, its depth included.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def read_json(text: str, where: str, hint: str = "") -> Any:
    """The value of a JSON document.

    Args:
        text: the document.
        where: start of a message, such as `path:line`.
        hint: end of a message about the syntax.

    Raises:
        ConfigError: the text is not JSON, gives a key twice, nests too deep or has an
            integer of too many digits.
    """
    try:
        return json.loads(text, object_pairs_hook=_without_duplicates)
    except json.JSONDecodeError as error:
        line = f"line {error.lineno}, " if error.lineno > 1 else ""
        raise ConfigError(
            f"{where}: not valid JSON ({error.msg}, {line}column {error.colno}){hint}"
        ) from error
    except RecursionError:
        raise ConfigError(f"{where}: nested too deep") from None
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from error


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(
            f"the key {next(n for n in names if names.count(n) > 1)!r} is given "
            "twice; keep one"
        )
    return result


class _Loader(yaml.SafeLoader):
    """YAML without tags and aliases. A key given twice, and a word that YAML 1.1 and
    1.2 read differently, is refused.

    1e-5, a string in YAML 1.1, is the number that it looks like.
    """

    yaml_implicit_resolvers = {}  # noqa: RUF012
    _KINDS = (
        None,
        *(
            f"tag:yaml.org,2002:{kind}"
            for kind in ("null", "bool", "int", "float", "str", "seq", "map")
        ),
    )
    yaml_constructors = {  # noqa: RUF012
        kind: yaml.SafeLoader.yaml_constructors[kind] for kind in _KINDS
    }

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            # A few lines of nested aliases stand for gigabytes.
            mark = self.peek_event().start_mark
            raise yaml.MarkedYAMLError(
                problem="aliases are not read; repeat the value", problem_mark=mark
            )
        return super().compose_node(parent, index)

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        lines: dict[str, int] = {}
        for key, _ in node.value:
            problem = ""
            if key.tag != "tag:yaml.org,2002:str":
                problem = (
                    f"the key {getattr(key, 'value', '')!r} is not a word; write it "
                    "in quotes"
                )
            elif key.value in lines:
                problem = (
                    f"{key.value} is given twice, first in line {lines[key.value]}; "
                    "keep one"
                )
            if problem:
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
            lines[key.value] = key.start_mark.line + 1
        return node

    def refuse(self, node: yaml.ScalarNode) -> None:
        advice = (
            "write true or false, or a plain number; or quotes around it if it is text"
        )
        problem = f"YAML 1.1 and 1.2 read {node.value[:40]} differently; {advice}"
        raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)


class _Dumper(yaml.SafeDumper):
    """Quotes every string that `_Loader` would not read as a string."""

    yaml_implicit_resolvers = {}  # noqa: RUF012


for _tag, _pattern in {
    "tag:yaml.org,2002:null": "~|null|Null|NULL|",
    "tag:yaml.org,2002:bool": "true|True|TRUE|false|False|FALSE",
    # Words for a truth, octal, binary, grouped and sexagesimal numbers.
    "!ambiguous": r"(?i:yes|no|on|off)|[-+]?(0[0-9_]+|0[bo][0-7_]+|[0-9]+_[0-9_.]*|[0-9]+(:[0-5]?[0-9])+(\.[0-9]*)?)",
    "tag:yaml.org,2002:int": "[-+]?([0-9]+|0x[0-9a-fA-F]+)",
    "tag:yaml.org,2002:float": r"[-+]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][-+]?[0-9]+)?|[-+]?\.(?i:inf)|\.(?i:nan)",
}.items():
    # The first pattern that fits decides, so the ambiguous ones stand before the
    # numbers. None: of any first letter.
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(_tag, re.compile(f"({_pattern})$"), None)
_Loader.add_constructor("!ambiguous", _Loader.refuse)


def read_yaml(text: str, where: str) -> Any:
    """The value of a YAML document; None where it is empty. Values are plain: nothing
    in a document is ever run.

    Args:
        text: the document.
        where: start of a message, such as the path.

    Raises:
        ConfigError: the text is not YAML, or holds something that `_Loader` refuses;
            the message names the line.
    """
    try:
        return _Loader(text).get_single_data()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f":{mark.line + 1}" if mark and "\n" in text else ""
        reason = ", ".join(part for part in (error.context, error.problem) if part)
        raise ConfigError(f"{where}{line}: not valid YAML ({reason})") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"{where}: not valid YAML ({' '.join(str(error).split())})"
        ) from error


def dump_yaml(value: Any) -> str:
    """A YAML document that `read_yaml` reads back to an equal value; only ASCII."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False)
