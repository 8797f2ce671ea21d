"""Writing files so that a reader, or a run killed half way, never meets half a file."""

import errno
import fcntl
import hashlib
import json
import os
import secrets
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

_WHOLE = 4 * 2**20
_BLOCK = 4 * 2**10


@contextmanager
def replacing(path: str | os.PathLike[str], *, lasting: bool = True) -> Iterator[Path]:
    """Yield a temporary path beside ``path``, which takes the place of ``path`` when the block has succeeded.

    Missing parent folders are created. After an error the old
    file, if any, is untouched and the temporary one is gone. The file has the permissions that the umask allows,
    whatever library has written it.

    Args:
        lasting: wait until file and name are on disk. Without it a loss of power may leave the old file, or none of
            the new one's content: for what is written every few seconds and says nothing after that.

    Raises:
        OSError: the folder cannot be created or written to; the message names it and says what to change.
    """
    path = Path(path)
    # Processes of two nodes that share the folder may have the same number.
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.touch()
        mode = stat.S_IMODE(temporary.stat().st_mode)
    except OSError as error:
        raise type(error)(
            error.errno,
            f"cannot write {path.name} ({error.strerror}); choose another output directory than",
            str(path.parent),
        ) from error
    try:
        yield temporary
        temporary.chmod(mode)  # safetensors renames a file of its own over it, which nobody else may read
        if lasting:
            sync(temporary)
        os.replace(temporary, path)
        if lasting:
            sync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: str | os.PathLike[str], text: str, *, lasting: bool = True) -> None:
    """Write a file of text in UTF-8, as `replacing` does."""
    with replacing(path, lasting=lasting) as partial:
        partial.write_text(text, encoding="utf-8")


def sync(path: Path) -> None:
    """Force a file's content, or the names in a folder, to disk. OSError when the disk reports a failure.

    Some file systems (FUSE, some network mounts) have no fsync for folders and say so: there a rename is as lasting as
    the server makes it, and nothing more can be done from here.
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

    Names, sizes and content are hashed. Beyond 4 MiB that is the head of the file and 4 KiB at each of many places: at
    the start of every tensor of a .safetensors file, at 256 even distances in another. Weights that were trained
    further differ there, while a copy, which has another date, does not.
    """
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(paths, key=lambda p: p.name):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            head = file.read(_WHOLE)
            digest.update(head)
            if size > _WHOLE:
                places = _tensor_starts(head) if path.suffix == ".safetensors" else range(0, size, size // 256)
                for place in places:
                    file.seek(place)
                    digest.update(file.read(_BLOCK))
    return digest.hexdigest()


def _tensor_starts(head: bytes) -> list[int]:
    """Where the tensors of a .safetensors file begin: 8 bytes of length and a JSON header stand before them."""
    length = int.from_bytes(head[:8], "little")
    header = json.loads(head[8 : 8 + length])
    return sorted(8 + length + entry["data_offsets"][0] for name, entry in header.items() if name != "__metadata__")


@contextmanager
def exclusive(folder: Path) -> Iterator[bool]:
    """Let one process at a time into the block, so that the ranks of a run do not repeat one another's work.

    The folder is created when missing. On a file system without locks nobody waits, and False is yielded: others may be
    at the same work, so files must be written by `replacing`, and temporary ones of others left alone.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            locked = True
        except OSError:
            locked = False
        yield locked
