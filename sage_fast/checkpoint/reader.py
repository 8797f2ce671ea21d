"""Reading a checkpoint: into tensors of any sharding on any number of ranks, or a
tensor at a time.

Opening one runs no code, whoever has written it. torch describes the tensors of a
distributed checkpoint in a pickle, `shards/.metadata`; it is read by an unpickler that
knows the records of that description and nothing else.
"""

import logging
import pickle
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    Metadata,
    StorageMeta,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.state_dict_loader import load

from sage_fast.checkpoint.folder import (
    METADATA,
    SHARDS,
    STATE,
    agree,
    list_checkpoints,
    one_process_is_meant,
    verify_checkpoint,
)
from sage_fast.config.errors import (
    CheckpointError,
    DamagedCheckpointError,
    UnreadableCheckpointError,
)
from sage_fast.config.files import loads
from sage_fast.distributed.world import SINGLE_PROCESS, World

logger = logging.getLogger(__name__)


class Checkpoint:
    """A checkpoint that has been verified. `open_checkpoint`, `newest_checkpoint` and
    `find_checkpoint` return it.

    folder: where it is. state: what was saved as JSON. tensors: group -> its tensors,
    read when they are asked for.

    Example: `checkpoint.tensors["ema"]["proj_out.weight"]` is a whole tensor in CPU
    memory.
    """

    def __init__(self, folder: Path, world: World) -> None:
        self.folder = folder
        self.state = _read_state(folder / STATE)
        self._world = world
        self._shards = _Shards(folder)
        self.tensors: dict[str, SavedTensors] = {
            group: SavedTensors(self._shards, group, described)
            for group, described in self._shards.described.items()
        }

    @property
    def shapes(self) -> dict[str, dict[str, torch.Size]]:
        """group -> name -> whole shape; no tensor is read."""
        return {
            group: {n: t.shape for n, t in saved.meta.items()}
            for group, saved in self.tensors.items()
        }

    def read(self, group: str, name: str) -> Tensor:
        """One whole tensor, in CPU memory. KeyError when there is none, CheckpointError
        when it cannot be read.
        """
        return self.tensors[group][name]

    @torch.no_grad()
    def load_into(self, targets: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Read tensors in place, by group and name. Collective.

        Args:
            targets: plain tensors, which become whole, and DTensors, of which each rank
                reads its part, on any mesh and on any device. The rest of the
                checkpoint is left unread. A target of another data type takes the
                rounded values.

        Raises:
            CheckpointError: the checkpoint lacks one, has it in another shape, or
                cannot be read; on all ranks.
        """
        agree(self._world, lambda: self._fill(targets))

    def _fill(self, targets: Mapping[str, Mapping[str, Tensor]]) -> None:
        shapes = self.shapes
        wanted: dict[str, Tensor] = {}
        # All are checked before one is filled.
        for group, tensors in targets.items():
            for name, target in tensors.items():
                saved = shapes.get(group, {}).get(name)
                if saved is None:
                    raise CheckpointError(
                        f"{self.folder} has no tensor {name!r} in its group {group!r}."
                    )
                if saved != target.shape:
                    raise CheckpointError(
                        f"{self.folder} has {group} {name!r} of shape {tuple(saved)}, "
                        f"this run's is {tuple(target.shape)}."
                    )
                wanted[f"{group}.{name}"] = target
        self._shards.read(wanted)


@dataclass(eq=False)
class SavedTensors(Mapping[str, Tensor]):
    """The tensors of one group of a checkpoint: each look-up reads a whole tensor into
    CPU memory and keeps nothing.

    meta: name -> a meta tensor with its shape and data type.
    """

    shards: "_Shards"
    group: str
    meta: dict[str, Tensor]

    def __getitem__(self, name: str) -> Tensor:
        value = torch.empty_like(self.meta[name], device="cpu")
        self.shards.read({f"{self.group}.{name}": value})
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self.meta)

    def __len__(self) -> int:
        return len(self.meta)


def open_checkpoint(folder: Path, world: World = SINGLE_PROCESS) -> Checkpoint:
    """Verify a checkpoint and open it. Collective. Raises as `verify_checkpoint`, the
    same on all ranks.
    """
    verify_checkpoint(folder, world)
    return agree(world, lambda: Checkpoint(folder, world))


def newest_checkpoint(root: Path, world: World = SINGLE_PROCESS) -> Checkpoint | None:
    """The newest checkpoint whose every file matches its manifest; damaged ones are
    skipped with a warning.

    Collective: rank 0 says what there is.

    Raises:
        UnreadableCheckpointError: the folder cannot be listed, or a newer checkpoint
            than the one that would be taken cannot be read: going on from an older one
            would lose work that may be there. CheckpointError: it has another format.
    """
    folders = agree(world, lambda: list_checkpoints(root) if world.is_main else [])
    for folder in reversed(world.broadcast(folders)):
        try:
            return open_checkpoint(folder, world)
        except DamagedCheckpointError as error:
            if world.is_main:
                logger.warning("Skipping a damaged checkpoint. %s", error)
    return None


def find_checkpoint(
    resume: str, root: Path, world: World = SINGLE_PROCESS
) -> Checkpoint | None:
    """The checkpoint that `resume` (`none`, `auto` or a path) means; None for a fresh
    start.

    Collective: all ranks open the same one. Raises CheckpointError.
    """
    if resume == "none":
        return None
    if resume == "auto":
        return newest_checkpoint(root, world)
    return open_checkpoint(Path(resume), world)


class _Shards(FileSystemReader):
    """The shards of a checkpoint; their description is read once and not at every
    look-up.

    described: group -> name -> meta tensor.
    """

    def __init__(self, checkpoint: Path) -> None:
        super().__init__(checkpoint / SHARDS)
        self._checkpoint = checkpoint
        self._metadata, self.described = _read_metadata(checkpoint / METADATA)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._metadata

    def read(self, targets: dict[str, Tensor]) -> None:
        """Fill tensors in place by "group.name"; of a DTensor, this rank's part.
        CheckpointError when that fails.
        """
        # Each rank finds what it needs by itself; there is nothing to agree on.
        one_process_is_meant()
        planner = DefaultLoadPlanner(
            flatten_state_dict=False, flatten_sharded_tensors=False
        )
        try:
            load(targets, storage_reader=self, planner=planner, no_dist=True)
        except OSError as error:
            raise UnreadableCheckpointError.of(self._checkpoint, error) from error
        except CheckpointException as error:  # no Exception: nobody else would catch it
            for reason, _ in error.failures.values():
                if isinstance(reason, OSError) and reason.errno:
                    raise UnreadableCheckpointError.of(
                        self._checkpoint, reason
                    ) from error
            raise CheckpointError(
                f"{self._checkpoint} cannot be read: {error}"
            ) from error


_RECORDS = {
    ("pathlib", "PosixPath"),
    ("torch", "Size"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.distributed.checkpoint.metadata", "ChunkStorageMetadata"),
    ("torch.distributed.checkpoint.metadata", "Metadata"),
    ("torch.distributed.checkpoint.metadata", "MetadataIndex"),
    ("torch.distributed.checkpoint.metadata", "StorageMeta"),
    ("torch.distributed.checkpoint.metadata", "TensorProperties"),
    ("torch.distributed.checkpoint.metadata", "TensorStorageMetadata"),
    ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"),
    # looks a name such as torch.strided up in a table
    ("torch.serialization", "_get_layout"),
}
"""Records that FileSystemWriter puts into `.metadata`, apart from torch's data types.
Calling them runs nothing.
"""


class _MetadataUnpickler(pickle.Unpickler):
    """Reads the description of the shards. A pickle that names anything else ends with
    an UnpicklingError.
    """

    def find_class(self, module: str, name: str) -> Any:
        if module == "pathlib._local":  # the name in Python 3.13, which others lack
            module = "pathlib"
        if (module, name) in _RECORDS:
            return super().find_class(module, name)
        dtype = getattr(torch, name, None) if module == "torch" else None
        if isinstance(dtype, torch.dtype):
            return dtype
        raise pickle.UnpicklingError(
            f"it calls for {module}.{name}, which no checkpoint contains"
        )


def _read_metadata(path: Path) -> tuple[Metadata, dict[str, dict[str, Tensor]]]:
    """torch's description of the shards, checked, and the tensors it describes: group
    -> name -> meta tensor.

    Raises:
        CheckpointError: it is not what `CheckpointWriter` writes, although it matches
            the manifest, so it is not passed over as damage. UnreadableCheckpointError.
    """
    try:
        with path.open("rb") as file:
            metadata = _MetadataUnpickler(file).load()
        return metadata, _describe(metadata)
    except OSError as error:
        raise UnreadableCheckpointError.of(path, error) from error
    except Exception as error:  # a prepared pickle can raise anything
        raise CheckpointError(
            f"{path} does not describe a checkpoint's tensors: {error}. Nothing in it "
            "was run. Use another checkpoint, unless a newer version of SAGE-Fast or "
            "PyTorch has written this one: then use that version."
        ) from error


def _describe(metadata: Metadata) -> dict[str, dict[str, Tensor]]:
    """group -> name -> meta tensor. ValueError unless there is nothing but tensors
    (torch would unpickle other objects), and every one of them lies in a shard of this
    checkpoint.
    """
    for place in metadata.storage_data.values():
        # It must not lead out of the folder, whose own files alone the manifest covers.
        if (
            not re.fullmatch(r"__\d+_\d+\.distcp", place.relative_path)
            or place.transform_descriptors
        ):
            raise ValueError(f"{place.relative_path!r} is not a shard")
    described: dict[str, dict[str, Tensor]] = {}
    for key, stored in metadata.state_dict_metadata.items():
        if not isinstance(stored, TensorStorageMetadata):
            raise ValueError(f"{key!r} is not a tensor")
        # A group has no dot, a name may have several.
        group, name = key.split(".", 1)
        described.setdefault(group, {})[name] = torch.empty(
            stored.size, dtype=stored.properties.dtype, device="meta"
        )
    metadata.storage_meta = StorageMeta()  # folder and run in which it was written
    return described


def _read_state(path: Path) -> dict[str, Any]:
    """The JSON object in a checkpoint. Raises as `_read_metadata`."""
    try:
        state = loads(path.read_bytes())
    except OSError as error:
        raise UnreadableCheckpointError.of(path, error) from error
    except ValueError as error:
        raise CheckpointError(
            f"{path} is not valid JSON: {error}. Use another checkpoint."
        ) from error
    if not isinstance(state, dict):
        raise CheckpointError(
            f"{path} does not hold a JSON object. Use another checkpoint."
        )
    return state
