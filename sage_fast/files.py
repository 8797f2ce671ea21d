"""Writing files so that a reader, or a run killed half way, never meets half a file."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


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
