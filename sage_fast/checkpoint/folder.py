"""The folder of a checkpoint: its name, its manifest, and whether every byte in it is what was written."""

import errno
import hashlib
import json
import os
import re
import stat
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, TypedDict

from sage_fast import __version__
from sage_fast.config.errors import CheckpointError, DamagedCheckpointError, UnreadableCheckpointError
from sage_fast.config.files import sync
from sage_fast.distributed.world import SINGLE_PROCESS, World

MANIFEST = "manifest.json"
STATE = "state.json"
SHARDS = "shards"
METADATA = f"{SHARDS}/.metadata"
FORMAT_VERSION = 2

CHECKPOINT_NAME = re.compile(r"update-(\d{6,})")
ABSENT = frozenset({errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG})
"""What the system says of a file that is not there; any other error leaves open what the file holds."""


class FileEntry(TypedDict):
    """What the manifest says of a file."""

    bytes: int
    sha256: str


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
        with os.scandir(root) as entries:
            names = [entry.name for entry in entries if CHECKPOINT_NAME.fullmatch(entry.name) and entry.is_dir()]
    except OSError as error:
        if error.errno in ABSENT:
            return []
        raise UnreadableCheckpointError.of(root, error) from error
    return sorted((root / name for name in names), key=update_of)


def verify_checkpoint(folder: Path, world: World = SINGLE_PROCESS) -> None:
    """Check that every file has the size and the SHA-256 that the manifest states.

    Collective: each rank reads a share of the files, and all come to the same verdict.

    Raises:
        DamagedCheckpointError: a file is missing or different. UnreadableCheckpointError: the system refuses to read
        one, or a rank does not see the folder. CheckpointError: there is no such folder, or it has another format.
    """
    failure: CheckpointError | None = None
    files: dict[str, FileEntry] = {}
    if world.is_main:
        try:
            files = _read_manifest(folder)["files"]
        except CheckpointError as error:
            failure = error
    raise_together(world, failure)
    files = world.broadcast(files)
    where = f" as rank {world.rank} sees it" if world.size > 1 else ""
    for name in sorted(files)[world.rank :: world.size]:
        failure = _examine(folder, name, files[name], where)
        if failure is not None:
            break
    raise_together(world, failure)


def raise_together(world: World, failure: CheckpointError | None) -> None:
    """Raise on all ranks what has failed on any of them. Collective.

    An unreadable file goes before a damaged one: a damaged checkpoint is passed over, which must not happen as long as
    a rank cannot tell.
    """
    failures = [found for found in world.gather(failure) if found is not None]
    if failures:
        raise next((found for found in failures if isinstance(found, UnreadableCheckpointError)), failures[0])


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
    manifest["sha256"] = _manifest_digest(manifest)
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1, ensure_ascii=False), encoding="utf-8")
    sync(folder / MANIFEST)
    for path in (*(p for p in folder.rglob("*") if p.is_dir()), folder):
        sync(path)


def one_process_is_meant() -> None:
    """Silence torch's remark that a process reads or writes without the others.

    Called each time, since what a test or a library does with warnings may undo it; it is the same filter each time.
    """
    warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized", UserWarning)


def _read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a checkpoint, checked. Raises as `verify_checkpoint`."""
    if not _is_folder(folder):
        raise CheckpointError(
            f"There is no checkpoint folder {folder}. Give a folder such as runs/NAME/checkpoints/update-000040."
        )
    incomplete = DamagedCheckpointError(f"{folder} has no intact {MANIFEST}: it was not written completely or altered.")
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
    except OSError as error:
        if error.errno in ABSENT:
            raise incomplete from error
        raise UnreadableCheckpointError.of(folder / MANIFEST, error) from error
    except (ValueError, RecursionError) as error:
        raise incomplete from error
    # The checksum first: a flipped bit of the version must not pass for another format. Early manifests have none.
    if not isinstance(manifest, dict) or ("sha256" in manifest and manifest["sha256"] != _manifest_digest(manifest)):
        raise incomplete
    version = manifest.get("format_version")
    if type(version) is int and version != FORMAT_VERSION:
        writer = manifest.get("sage_fast")
        wrote = f"SAGE-Fast {writer}" if writer else "an earlier version of SAGE-Fast"
        raise CheckpointError(
            f"{folder} has checkpoint format {version}, which {wrote} wrote; version {__version__} reads format "
            f"{FORMAT_VERSION} alone. Finish that run with the version that started it, or start a new run in another "
            "output_dir."
        )
    if not _is_manifest(manifest):
        raise incomplete
    return manifest


def _manifest_digest(manifest: Mapping[str, Any]) -> str:
    """SHA-256 of a manifest without its own digest, whatever its line breaks."""
    others = {key: value for key, value in manifest.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(others, sort_keys=True).encode()).hexdigest()


def _is_manifest(manifest: Mapping[str, Any]) -> bool:
    """Whether a manifest of this format has the keys and types that `write_manifest` gives it."""
    files = manifest.get("files")
    return (
        manifest.keys() - {"sha256"} == {"format_version", "sage_fast", "update", "files"}
        and type(manifest["format_version"]) is int
        and isinstance(manifest["sage_fast"], str)
        and _is_count(manifest["update"])
        and isinstance(files, dict)
        and {STATE, METADATA} <= files.keys()
        and all(_is_inside(name) and _is_entry(entry) for name, entry in files.items())
    )


def _is_entry(entry: Any) -> bool:
    return (
        isinstance(entry, dict)
        and entry.keys() == FileEntry.__annotations__.keys()
        and _is_count(entry["bytes"])
        and isinstance(entry["sha256"], str)
        and re.fullmatch("[0-9a-f]{64}", entry["sha256"]) is not None
    )


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _is_inside(name: str) -> bool:
    """Whether a name is of a file in the folder, and none that leads out of it."""
    path = PurePosixPath(name)
    return name.isprintable() and path.parts != () and not path.is_absolute() and ".." not in path.parts


def _is_folder(path: Path) -> bool:
    """Whether there is such a folder. UnreadableCheckpointError when the system does not say."""
    try:
        return stat.S_ISDIR(path.stat().st_mode)
    except OSError as error:
        if error.errno in ABSENT:
            return False
        raise UnreadableCheckpointError.of(path, error) from error


def _examine(folder: Path, name: str, entry: FileEntry, where: str) -> CheckpointError | None:
    """What is wrong with a file of a checkpoint whose manifest rank 0 has read."""
    path = folder / name
    try:
        matches = path.stat().st_size == entry["bytes"] and _sha256(path) == entry["sha256"]
    except OSError as error:
        if error.errno not in ABSENT:
            return UnreadableCheckpointError.of(path, error)
        if not os.path.isdir(folder):  # rank 0 has read its manifest: this machine has not mounted it
            return UnreadableCheckpointError(folder, f"ENOENT: no such folder{where}")
        matches = False
    return None if matches else DamagedCheckpointError(f"{path} is missing, truncated or altered{where}.")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
