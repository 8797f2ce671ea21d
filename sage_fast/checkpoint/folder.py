"""The folder of a checkpoint: its name, its manifest, and whether every byte in it is what was written."""

import hashlib
import json
import os
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypedDict

from sage_fast import __version__
from sage_fast.config.errors import CheckpointError, DamagedCheckpointError
from sage_fast.distributed.world import ALONE, World

MANIFEST = "manifest.json"
STATE = "state.json"
SHARDS = "shards"
FORMAT_VERSION = 2
PARTIAL_PATTERN = ".update-*.partial"


class FileEntry(TypedDict):
    """What the manifest says of a file."""

    bytes: int
    sha256: str


def checkpoint_name(update: int) -> str:
    """Folder name of the checkpoint after `update` optimizer updates; names sort by age."""
    return f"update-{update:06d}"


def partial_name(update: int, attempt: str) -> str:
    """Folder name of a checkpoint that is being written by one attempt at a run, of any others that still write."""
    return f".{checkpoint_name(update)}.{attempt}.partial"


def list_checkpoints(root: Path) -> list[Path]:
    """Folders named like checkpoints, oldest first; partial ones are not among them."""
    return sorted(p for p in root.glob("update-*") if p.is_dir())


def verify_checkpoint(folder: Path, world: World = ALONE) -> None:
    """Check that every file has the size and the SHA-256 that the manifest states.

    Collective: each rank reads a share of the files, and all come to the same verdict.

    Raises:
        DamagedCheckpointError: a file is missing or different. CheckpointError: there is no such folder, or it has
        another format.
    """
    failure: CheckpointError | None = None
    files: dict[str, FileEntry] = {}
    if world.is_main:
        try:
            files = _read_manifest(folder)["files"]
        except CheckpointError as error:
            failure = error
    files, failure = world.broadcast((files, failure))
    if failure is not None:
        raise failure
    mine = sorted(files)[world.rank :: world.size]
    found = world.gather([name for name in mine if not _matches(folder / name, files[name])])
    damaged = [(name, rank) for rank, names in enumerate(found) for name in names]
    if damaged:
        name, rank = damaged[0]
        where = f" as rank {rank} sees it" if world.size > 1 else ""
        others = f", and {len(damaged) - 1} more" if len(damaged) > 1 else ""
        raise DamagedCheckpointError(f"{folder / name} is missing, truncated or altered{where}{others}.")


def describe_files(paths: Iterable[Path], folder: Path) -> dict[str, FileEntry]:
    """Force files to disk and describe what is there: {path within the folder: size and SHA-256}."""
    entries: dict[str, FileEntry] = {}
    for path in sorted(paths):
        sync(path)
        entries[path.relative_to(folder).as_posix()] = {"bytes": path.stat().st_size, "sha256": _sha256(path)}
    return entries


def write_manifest(folder: Path, update: int, files: Mapping[str, FileEntry]) -> None:
    """Write the manifest and force it and the folders to disk.

    Args:
        files: every other file of the folder, as `describe_files` describes it.

    Raises:
        OSError: it cannot be written, or a file is not there.
    """
    for name, entry in files.items():
        # A rank on another machine has written it, and this one would not miss it until the checkpoint is needed.
        if (folder / name).stat().st_size != entry["bytes"]:
            raise OSError(f"{folder / name} is not what its writer has left; is the folder on a shared file system?")
    manifest = {"format_version": FORMAT_VERSION, "sage_fast": __version__, "update": update, "files": dict(files)}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
    sync(folder / MANIFEST)
    for path in (*(p for p in folder.rglob("*") if p.is_dir()), folder):
        sync(path)


def one_process_is_meant() -> None:
    """Silence torch's remark that a process reads or writes without the others.

    Called each time, since what a test or a library does with warnings may undo it; it is the same filter each time.
    """
    warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized", UserWarning)


def sync(path: Path) -> None:
    """Force a file or folder to disk, so that the rename is not seen before its contents."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _read_manifest(folder: Path) -> dict[str, Any]:
    if not folder.is_dir():
        raise CheckpointError(
            f"There is no checkpoint folder {folder}. Give a folder such as runs/NAME/checkpoints/update-000040."
        )
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        version = manifest["format_version"]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise DamagedCheckpointError(f"{folder} has no readable {MANIFEST}: it was not written completely.") from error
    if version != FORMAT_VERSION:
        writer = manifest.get("sage_fast")
        wrote = f"SAGE-Fast {writer}" if writer else "an earlier version of SAGE-Fast"
        raise CheckpointError(
            f"{folder} has checkpoint format {version}, which {wrote} wrote; version {__version__} reads format "
            f"{FORMAT_VERSION} alone. Finish that run with the version that started it, or start a new run in another "
            "output_dir."
        )
    return dict(manifest)


def _matches(path: Path, entry: FileEntry) -> bool:
    try:
        return path.stat().st_size == entry["bytes"] and _sha256(path) == entry["sha256"]
    except OSError:  # a disk that cannot read it has lost it
        return False


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
