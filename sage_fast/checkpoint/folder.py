"""The folder of a checkpoint: its name, its manifest, and the check of every byte in
it.
"""

import errno
import hashlib
import json
import logging
import math
import os
import re
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from sage_fast import __version__
from sage_fast.config.errors import (
    CheckpointError,
    DamagedCheckpointError,
    UnreadableCheckpointError,
)
from sage_fast.config.files import loads, sync
from sage_fast.distributed.world import SINGLE_PROCESS, World

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
STATE = "state.json"
SHARDS = "shards"
METADATA = f"{SHARDS}/.metadata"
BEST = "best.json"
FORMAT_VERSION = 2

CHECKPOINT_NAME = re.compile(r"update-(\d{6,})")

ABSENT = frozenset(
    {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG}
)
"""Errors of a file that is not there; any other error leaves open what the file holds.
"""


T = TypeVar("T")
Files = dict[str, Mapping[str, Any]]
"""Path within the folder -> `bytes` (its size) and `sha256`."""


def checkpoint_name(update: int) -> str:
    """Folder name of the checkpoint after `update` optimizer updates."""
    return f"update-{update:06d}"


def update_of(folder: Path) -> int:
    """Optimizer updates of a folder that `list_checkpoints` returned."""
    return int(folder.name.removeprefix("update-"))


def list_checkpoints(root: Path) -> list[Path]:
    """Folders named like checkpoints, oldest first; partial ones are not among them.

    Raises:
        UnreadableCheckpointError: `root` exists and cannot be listed.
    """
    try:
        named = [
            path for path in root.iterdir() if CHECKPOINT_NAME.fullmatch(path.name)
        ]
        return sorted(filter(Path.is_dir, named), key=update_of)
    except OSError as error:
        if error.errno in ABSENT:
            return []
        raise UnreadableCheckpointError.of(root, error) from error


def read_best(root: Path, newest: float = math.inf) -> tuple[int, float] | None:
    """The pinned update and its score, unless its checkpoint is gone or is of a part of
    the run that was gone back behind. A file that is cut or altered is ignored with a
    warning.
    """
    path = root / BEST
    try:
        found = loads(path.read_bytes())
        update = int(found["update"])
        score = float(found["score"])
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, KeyError) as error:
        logger.warning(
            "%s is damaged (%s) and ignored; the next best evaluation replaces it.",
            path,
            error,
        )
        return None
    if update <= newest and (root / checkpoint_name(update)).is_dir():
        return update, score
    return None


def verify_checkpoint(folder: Path, world: World = SINGLE_PROCESS) -> None:
    """Check that every file has the size and the SHA-256 that the manifest states.

    Collective: each rank reads a share of the files, and all come to the same verdict.

    Raises:
        DamagedCheckpointError: a file is missing or different.
            UnreadableCheckpointError: the system refuses to read one, or a rank does
            not see the folder. CheckpointError: there is no such folder, or it has
            another format.
    """
    # Rank 0's list, so that the ranks deal out the same files.
    files = world.broadcast(
        agree(world, lambda: _read_manifest(folder) if world.is_main else {})
    )
    where = f" as rank {world.rank} sees it" if world.size > 1 else ""

    def examine() -> None:
        for name in sorted(files)[world.rank :: world.size]:
            path = folder / name
            entry = files[name]
            try:
                same = (
                    path.stat().st_size == entry["bytes"]
                    and _sha256(path) == entry["sha256"]
                )
            except OSError as error:
                if error.errno not in ABSENT:
                    raise UnreadableCheckpointError.of(path, error) from error
                # rank 0 has read its manifest: this machine has not mounted it
                if not os.path.isdir(folder):
                    raise UnreadableCheckpointError(
                        folder, f"ENOENT: no such folder{where}"
                    ) from error
                same = False
            if not same:
                raise DamagedCheckpointError(
                    f"{path} is missing, truncated or altered{where}."
                )

    agree(world, examine)


def agree(world: World, step: Callable[[], T]) -> T:
    """Do a step on this rank, and raise on all ranks what has failed on any of them.
    Collective.

    An unreadable file goes before a damaged one: a damaged checkpoint is passed over,
    which must not happen as long as a rank cannot tell.
    """
    outcome: T | None = None
    failure: CheckpointError | None = None
    try:
        outcome = step()
    except CheckpointError as error:
        failure = error
    failures = [found for found in world.gather(failure) if found is not None]
    if failures:
        failures.sort(key=lambda f: not isinstance(f, UnreadableCheckpointError))
        raise failures[0]
    return outcome  # type: ignore[return-value]


def describe_files(paths: Iterable[Path], folder: Path) -> Files:
    """Force files to disk and describe what is there: {path within the folder: size and
    SHA-256}.
    """
    entries: Files = {}
    for path in sorted(paths):
        sync(path)
        entries[path.relative_to(folder).as_posix()] = {
            "bytes": path.stat().st_size,
            "sha256": _sha256(path),
        }
    return entries


def write_manifest(folder: Path, update: int, files: Files) -> None:
    """Write the manifest and force it and the folders to disk.

    Args:
        files: every other file of the folder, as `describe_files` describes it.

    Raises:
        OSError: it cannot be written, or a file is not there.
    """
    for name, entry in files.items():
        # A rank on another machine has written it, and this one would not miss it until
        # the checkpoint is needed.
        if (folder / name).stat().st_size != entry["bytes"]:
            raise OSError(
                f"{folder / name} is not what its writer has left; is the folder on a "
                "shared file system?"
            )
    manifest = {
        "format_version": FORMAT_VERSION,
        "sage_fast": __version__,
        "update": update,
        "files": files,
    }
    manifest["sha256"] = _manifest_digest(manifest)
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
    sync(folder / MANIFEST)
    # A file outlasts a crash of the machine only if the entry in its folder does.
    for path in (*(p for p in folder.rglob("*") if p.is_dir()), folder):
        sync(path)


def one_process_is_meant() -> None:
    """Silence torch's remark that a process reads or writes without the others.

    Called each time, since what a test or a library does with warnings may undo it; it
    is the same filter each time.
    """
    warnings.filterwarnings(
        "ignore",
        "torch.distributed is disabled, unavailable or uninitialized",
        UserWarning,
    )


def _read_manifest(folder: Path) -> Files:
    """The files that the manifest of a checkpoint describes. Raises as
    `verify_checkpoint`.
    """
    incomplete = DamagedCheckpointError(
        f"{folder} has no intact {MANIFEST}: it was not written completely or altered."
    )
    try:
        manifest = loads((folder / MANIFEST).read_bytes())
    except OSError as error:
        if error.errno not in ABSENT:
            raise UnreadableCheckpointError.of(folder / MANIFEST, error) from error
        if folder.is_dir():
            raise incomplete from error
        raise CheckpointError(
            f"There is no checkpoint folder {folder}. Give a folder such as "
            "runs/NAME/checkpoints/update-000040."
        ) from error
    except ValueError as error:
        raise incomplete from error
    if not isinstance(manifest, dict):
        raise incomplete
    version = manifest.get("format_version")
    # The checksum first: a flipped bit of the version must not pass for another format.
    # Format 1 had none.
    intact = manifest.get("sha256") == _manifest_digest(manifest)
    if (
        type(version) is int
        and version != FORMAT_VERSION
        and (intact or "sha256" not in manifest)
    ):
        raise CheckpointError(
            f"{folder} has checkpoint format {version} of SAGE-Fast "
            f"{manifest.get('sage_fast')}; version {__version__} reads format "
            f"{FORMAT_VERSION} alone. Finish that run with the version that started "
            "it, or start a new run in another output_dir."
        )
    if not intact:
        raise incomplete
    files = manifest.get("files")
    if not isinstance(files, dict) or not {STATE, METADATA} <= files.keys():
        raise incomplete
    for name in files:
        path = PurePosixPath(name)
        # it may not be the folder, nor lead out of it
        outside = not path.parts or path.is_absolute() or ".." in path.parts
        if not name.isprintable() or outside:
            raise incomplete
    return files


def _manifest_digest(manifest: Mapping[str, Any]) -> str:
    """SHA-256 of a manifest without its own digest, whatever its line breaks."""
    others = {key: value for key, value in manifest.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(others, sort_keys=True).encode()).hexdigest()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
