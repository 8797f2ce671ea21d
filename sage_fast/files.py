"""Writing files so that a reader, or a run killed half way, never meets half a file."""

import contextlib
import fcntl
import hashlib
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

_WHOLE = 4 * 2**20
_BLOCK = 64 * 2**10


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a temporary path beside ``path``, which takes the place of ``path`` when the block has succeeded.

    Missing parent folders are created. After an error the old file, if any, is untouched and the temporary
    one is gone.

    Raises:
        OSError: the folder cannot be created or written to; the message names it and says what to change.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.touch()
    except OSError as error:
        raise type(error)(
            error.errno,
            f"cannot write {path.name} ({error.strerror}); choose another output directory than",
            str(path.parent),
        ) from error
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def fingerprint(paths: Iterable[Path]) -> str:
    """Identity of the content of files, cheap for large ones: 32 hex digits.

    Names, sizes and content are hashed; of a file beyond 4 MiB the first 4 MiB and 64 blocks of 64 KiB spread over the
    rest. Other weights of the same shapes differ there, and no date is part of it, so a copy is recognised.
    """
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(paths, key=lambda p: p.name):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            digest.update(file.read(_WHOLE))
            if size > _WHOLE:
                for i in range(1, 65):
                    file.seek(_WHOLE + (size - _WHOLE) * i // 64 - min(_BLOCK, (size - _WHOLE) // 64))
                    digest.update(file.read(_BLOCK))
    return digest.hexdigest()


@contextmanager
def exclusive(folder: Path) -> Iterator[None]:
    """Let one process at a time into the block, so that the ranks of a run do not repeat one another's work.

    The folder is created when missing. On a file system without locks nobody waits; the files must therefore be written
    by `replacing` all the same.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as file:
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
