"""Files: written so that a reader, or a run killed half way, never meets half of one.
What people write is read so that a mistake is one clear message.
"""

import errno
import hashlib
import json
import os
import secrets
import stat
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

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


# --------------------------------------------------------------------------------------
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
