"""Checkpoints that are either complete or not there.

    checkpoints/update-000040/
        weights.safetensors      the trained weights by parameter name, float32
        lora/                    the adapter that was evaluated (averaged, with EMA on), in diffusers' layout
        anchor.safetensors  ema.safetensors          when the run has them
        state.pt                 optimizer, schedule, RNG
        state.json               counters, KL controller, configuration
        manifest.json            size and SHA-256 of every other file, written last

A checkpoint is written into a hidden folder, synced, and renamed; a folder without a manifest, or with a file that
does not match it, is never resumed from.
"""

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
FORMAT_VERSION = 1


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written, found, trusted, or used by this run."""


@dataclass(frozen=True, kw_only=True)
class CheckpointData:
    """Contents of a checkpoint.

    tensors: file stem -> {name: tensor}; `weights` always, `anchor` and `ema` when the run has them.
    state: JSON-able counters and configuration. binary: what only torch can serialise (optimizer, RNG).

    Example: `CheckpointData(tensors={"weights": {...}}, state={"update": 40}, binary={"optimizer": {...}})`
    """

    tensors: Mapping[str, Mapping[str, Tensor]]
    state: Mapping[str, Any]
    binary: Mapping[str, Any]


def checkpoint_name(update: int) -> str:
    """Folder name of the checkpoint after `update` optimizer updates; names sort by age."""
    return f"update-{update:06d}"


def save_checkpoint(
    root: Path,
    update: int,
    data: CheckpointData,
    *,
    keep_last: int,
    extra: Callable[[Path], None] | None = None,
) -> Path:
    """Write one checkpoint and drop all but the newest `keep_last`.

    Args:
        root: folder of the run's checkpoints.
        extra: called with the folder being written, for files in other layouts.

    Raises:
        CheckpointError: it could not be written (disk full, no permission); older checkpoints are untouched.
    """
    final = root / checkpoint_name(update)
    partial = root / f".{checkpoint_name(update)}.partial"
    try:
        root.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        for stem, tensors in data.tensors.items():
            save_file({k: v.detach().cpu().contiguous() for k, v in tensors.items()}, partial / f"{stem}.safetensors")
        torch.save(dict(data.binary), partial / "state.pt")
        (partial / "state.json").write_text(json.dumps(data.state, indent=1), encoding="utf-8")
        if extra is not None:
            extra(partial)
        _write_manifest(partial, update)
        if final.exists():
            shutil.rmtree(final)
        partial.replace(final)
        _sync(root)
    except Exception as error:
        # safetensors and torch.save raise their own types for a full disk; all mean the same to the user.
        shutil.rmtree(partial, ignore_errors=True)
        kept = [p.name for p in list_checkpoints(root)]
        raise CheckpointError(
            f"Could not write checkpoint {final}: {error}. Free space or fix permissions, then resume with "
            f"--resume auto from {kept[-1] if kept else 'the beginning (no earlier checkpoint)'}."
        ) from error
    # A newer folder is a damaged one that this run has passed over; it must not push out what was just written.
    for old in [p for p in list_checkpoints(root) if p.name <= final.name][:-keep_last]:
        shutil.rmtree(old, ignore_errors=True)
    return final


def list_checkpoints(root: Path) -> list[Path]:
    """Folders named like checkpoints, oldest first; partial ones are not among them."""
    return sorted(p for p in root.glob("update-*") if p.is_dir())


def newest_checkpoint(root: Path) -> Path | None:
    """The newest checkpoint whose every file matches its manifest; damaged ones are skipped with a warning."""
    for folder in reversed(list_checkpoints(root)):
        try:
            verify_checkpoint(folder)
        except CheckpointError as error:
            logger.warning("Skipping a damaged checkpoint. %s", error)
            continue
        return folder
    return None


def verify_checkpoint(folder: Path) -> None:
    """CheckpointError unless the manifest is there and every file has the size and SHA-256 it states."""
    if not folder.is_dir():
        raise CheckpointError(
            f"There is no checkpoint folder {folder}. Give a folder such as runs/NAME/checkpoints/update-000040."
        )
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder} has no readable {MANIFEST}: it was not written completely.") from error
    if manifest["format_version"] != FORMAT_VERSION:
        raise CheckpointError(
            f"{folder} has checkpoint format {manifest['format_version']}, this version reads format {FORMAT_VERSION}."
        )
    for name, entry in manifest["files"].items():
        path = folder / name
        if not path.is_file() or path.stat().st_size != entry["bytes"] or _sha256(path) != entry["sha256"]:
            raise CheckpointError(f"{path} is missing, truncated or altered.")


def load_checkpoint(folder: Path, device: torch.device | str = "cpu") -> CheckpointData:
    """Read a checkpoint after verifying it. Raises CheckpointError."""
    verify_checkpoint(folder)
    tensors = {p.stem: load_file(p, device=str(device)) for p in sorted(folder.glob("*.safetensors"))}
    return CheckpointData(
        tensors=tensors,
        state=json.loads((folder / "state.json").read_text(encoding="utf-8")),
        binary=torch.load(folder / "state.pt", map_location=device, weights_only=True),
    )


def find_checkpoint(resume: str, root: Path) -> Path | None:
    """The checkpoint that `resume` (`none`, `auto` or a path) means; None for a fresh start. Raises CheckpointError."""
    if resume == "none":
        return None
    if resume == "auto":
        return newest_checkpoint(root)
    folder = Path(resume)
    verify_checkpoint(folder)
    return folder


def _write_manifest(folder: Path, update: int) -> None:
    files = {}
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        _sync(path)
        name = path.relative_to(folder).as_posix()
        files[name] = {"bytes": path.stat().st_size, "sha256": _sha256(path)}
    manifest = {"format_version": FORMAT_VERSION, "update": update, "files": files}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
    _sync(folder / MANIFEST)
    _sync(folder)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    """Force a file or folder to disk, so that the rename is not seen before its contents."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
