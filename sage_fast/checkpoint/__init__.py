"""Checkpoints that are either complete or not there, in one format for one process and
many.

    checkpoints/update-000040/
        shards/          every tensor, in torch's distributed checkpoint format (DCP), by "group.name": weights.*,
                         anchor.*, ema.* and optimizer.*; each rank has written a part
        lora/            the adapter that was evaluated (averaged, with EMA on), in diffusers' layout
        state.json       counters, KL controller, schedule, configuration
        manifest.json    size and SHA-256 of every other file and of itself, written last
    checkpoints/best.json  update and score of the best evaluation, whose checkpoint is kept

A checkpoint is written into a hidden folder, synced, and renamed; a folder without a
manifest, or with a file that does not match it, is never resumed from. One that cannot
be read is another matter: it may be whole, and stops the run. Any number of processes
can read it, whatever number has written it, and reading it runs no code.

    folder.py       names, the manifest, the check of every byte
    writer.py       `CheckpointWriter`: copies the tensors and writes them, if wanted while training goes on
    reader.py       `Checkpoint`: what is in one, read into tensors of any sharding, or a tensor at a time
"""

from typing import TYPE_CHECKING, Any

from sage_fast.checkpoint.folder import (
    MANIFEST,
    checkpoint_name,
    list_checkpoints,
    verify_checkpoint,
)

if TYPE_CHECKING:
    from sage_fast.checkpoint.reader import (
        Checkpoint,
        SavedTensors,
        find_checkpoint,
        newest_checkpoint,
        open_checkpoint,
    )
    from sage_fast.checkpoint.writer import CheckpointData, CheckpointWriter

__all__ = [
    "MANIFEST",
    "Checkpoint",
    "CheckpointData",
    "CheckpointWriter",
    "SavedTensors",
    "checkpoint_name",
    "find_checkpoint",
    "list_checkpoints",
    "newest_checkpoint",
    "open_checkpoint",
    "verify_checkpoint",
]


def __getattr__(name: str) -> Any:
    # The format's package takes seconds to import, and a look at a run's folders needs
    # only their names.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from sage_fast.checkpoint import reader, writer

    return getattr(
        writer if name in ("CheckpointData", "CheckpointWriter") else reader, name
    )
