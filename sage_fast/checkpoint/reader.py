"""Reading a checkpoint: into tensors of any sharding on any number of ranks, or a tensor at a time.

torch describes the tensors of a distributed checkpoint in a pickle, `shards/.metadata`, and unpickling runs what is in
it. The manifest proves that it is the one that was written, not who has written it: open checkpoints that you trust.
"""

import json
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from sage_fast.checkpoint.folder import SHARDS, STATE, list_checkpoints, one_process_is_meant, verify_checkpoint
from sage_fast.config.errors import CheckpointError, DamagedCheckpointError
from sage_fast.distributed.world import ALONE, World

logger = logging.getLogger(__name__)


class Checkpoint:
    """A checkpoint that has been verified. `open_checkpoint` and `find_checkpoint` make it.

    folder: where it is. state: what was saved as JSON. tensors: group -> its tensors, read when they are asked for.

    Example: `checkpoint.tensors["ema"]["proj_out.weight"]` is a whole tensor in CPU memory.
    """

    def __init__(self, folder: Path, world: World) -> None:
        self.folder = folder
        self.state: dict[str, Any] = json.loads((folder / STATE).read_text(encoding="utf-8"))
        self._world = world
        self._shards = _Shards(folder / SHARDS)
        self.tensors: dict[str, SavedTensors] = {
            group: SavedTensors(self._shards, group, described) for group, described in self._shards.described.items()
        }

    @property
    def shapes(self) -> dict[str, dict[str, torch.Size]]:
        """group -> name -> whole shape; no tensor is read."""
        return {group: {n: t.shape for n, t in saved.meta.items()} for group, saved in self.tensors.items()}

    def read(self, group: str, name: str) -> Tensor:
        """One whole tensor, in CPU memory. KeyError when there is none, CheckpointError when it cannot be read."""
        return self.tensors[group][name]

    @torch.no_grad()
    def load_into(self, targets: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Read tensors in place, by group and name. Collective.

        Args:
            targets: plain tensors, which become whole, and DTensors, of which each rank reads its part, on any mesh
                and on any device. What the checkpoint holds besides is left unread. A target of another data type
                takes the rounded values.

        Raises:
            CheckpointError: the checkpoint lacks one, has it in another shape, or cannot be read; on all ranks.
        """
        failure = None
        try:
            self._check(targets)
            self._shards.read({f"{group}.{name}": t for group, named in targets.items() for name, t in named.items()})
        except CheckpointError as error:
            failure = str(error)
        if failures := [text for text in self._world.gather(failure) if text is not None]:
            raise CheckpointError(failures[0])

    def _check(self, targets: Mapping[str, Mapping[str, Tensor]]) -> None:
        for group, named in targets.items():
            saved = self.tensors[group].meta if group in self.tensors else {}
            for name, target in named.items():
                if name not in saved:
                    raise CheckpointError(f"{self.folder} has no tensor {name!r} in its group {group!r}.")
                if saved[name].shape != target.shape:
                    raise CheckpointError(
                        f"{self.folder} has {group} {name!r} of shape {tuple(saved[name].shape)}, this run's is "
                        f"{tuple(target.shape)}."
                    )


class SavedTensors(Mapping[str, Tensor]):
    """The tensors of one group of a checkpoint: each look-up reads a whole tensor into CPU memory and keeps nothing.

    meta: name -> a meta tensor with its shape and data type.
    """

    def __init__(self, shards: "_Shards", group: str, meta: dict[str, Tensor]) -> None:
        self.meta = meta
        self._shards = shards
        self._group = group

    def __getitem__(self, name: str) -> Tensor:
        value = torch.empty_like(self.meta[name], device="cpu")
        self._shards.read({f"{self._group}.{name}": value})
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self.meta)

    def __len__(self) -> int:
        return len(self.meta)


def open_checkpoint(folder: Path, world: World = ALONE) -> Checkpoint:
    """Verify a checkpoint and open it. Collective. Raises CheckpointError."""
    verify_checkpoint(folder, world)
    return Checkpoint(folder, world)


def newest_checkpoint(root: Path, world: World = ALONE) -> Checkpoint | None:
    """The newest checkpoint whose every file matches its manifest; damaged ones are skipped with a warning.

    Collective: rank 0 says what there is. CheckpointError for one of another format, which was never damaged.
    """
    for folder in reversed(world.broadcast(list_checkpoints(root) if world.is_main else [])):
        try:
            return open_checkpoint(folder, world)
        except DamagedCheckpointError as error:
            if world.is_main:
                logger.warning("Skipping a damaged checkpoint. %s", error)
    return None


def find_checkpoint(resume: str, root: Path, world: World = ALONE) -> Checkpoint | None:
    """The checkpoint that `resume` (`none`, `auto` or a path) means; None for a fresh start.

    Collective: all ranks open the same one. Raises CheckpointError.
    """
    if resume == "none":
        return None
    if resume == "auto":
        return newest_checkpoint(root, world)
    return open_checkpoint(Path(resume), world)


class _Shards(FileSystemReader):
    """Files of torch's distributed checkpoint format; their description is read once and not at every look-up.

    described: group -> name -> meta tensor.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._metadata = super().read_metadata()
        self.described: dict[str, dict[str, Tensor]] = {}
        for key, stored in self._metadata.state_dict_metadata.items():
            assert isinstance(stored, TensorStorageMetadata), key
            group, name = key.split(".", 1)
            meta = torch.empty(stored.size, dtype=stored.properties.dtype, device="meta")
            self.described.setdefault(group, {})[name] = meta

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._metadata

    def read(self, targets: dict[str, Tensor]) -> None:
        """Fill tensors in place by "group.name"; of a DTensor, this rank's part. CheckpointError when that fails."""
        # Each rank finds what it needs by itself; there is nothing to agree on.
        one_process_is_meant()
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        try:
            load(dict(targets), storage_reader=self, planner=planner, no_dist=True)
        except (CheckpointException, OSError) as error:  # the former is no Exception: nobody would catch it
            raise CheckpointError(f"{Path(self.path).parent} cannot be read: {error}") from error
