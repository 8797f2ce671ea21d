"""Writing a checkpoint on all ranks at once, if wanted while training goes on.

`save` copies what has to be saved into CPU memory and returns; a thread writes the copies. What the ranks tell each
other about it goes over a process group of its own, because the training's collectives run at the same time.
"""

import json
import logging
import secrets
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner, create_default_local_save_plan
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor

from sage_fast.checkpoint.folder import (
    PARTIAL_PATTERN,
    SHARDS,
    STATE,
    FileEntry,
    checkpoint_name,
    describe_files,
    list_checkpoints,
    one_process_is_meant,
    partial_name,
    sync,
    write_manifest,
)
from sage_fast.config.errors import CheckpointError
from sage_fast.distributed.world import ALONE, OWN_TIMEOUT, World

T = TypeVar("T")

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class CheckpointData:
    """Contents of a checkpoint.

    tensors: group -> {name: tensor}; `weights` always, `anchor`, `ema` and `optimizer` when the run has them. A tensor
    is the same on every rank, a DTensor, or on one rank alone; numbers such as AdamW's step are tensors too.
    state: JSON-able counters and configuration, the same on every rank.

    Example: `CheckpointData(tensors={"weights": {"proj_out.weight": weight}}, state={"update": 40})`
    """

    tensors: Mapping[str, Mapping[str, Tensor]]
    state: Mapping[str, Any]

    def __post_init__(self) -> None:
        if wrong := [group for group in self.tensors if "." in group]:
            raise ValueError(f"CheckpointData.tensors has the group {wrong[0]!r}; a group's name has no dot.")


Extra = Callable[[Path], Callable[[], object] | None]
"""What adds files to a checkpoint: see `CheckpointWriter.save`."""


@dataclass(frozen=True, kw_only=True)
class _Job:
    """A checkpoint to write. local: this rank's part of every tensor, by key. plan: which part that is."""

    update: int
    state: str
    plan: SavePlan
    local: Mapping[str, Tensor]
    more: Callable[[], object] | None


class CheckpointWriter:
    """Writes the checkpoints of a run. Every method is collective.

    Args:
        root: folder of the run's checkpoints, on a file system that all ranks share.
        keep_last: how many are kept.
        asynchronous: return from `save` when the tensors are copied, and write them from a thread.
        world: the ranks that save together.
        timeout_seconds: longest that a rank waits for the others to have written their part.
    """

    def __init__(
        self,
        root: Path,
        *,
        keep_last: int,
        asynchronous: bool = False,
        world: World = ALONE,
        timeout_seconds: float = 1800.0,
    ) -> None:
        self.root = root
        self.keep_last = keep_last
        self.world = world
        self._group = (
            None
            if world.mesh is None
            else dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_seconds), group_desc=OWN_TIMEOUT)
        )
        # Processes of an earlier attempt at the run, which may not have ended yet, must not write into the same folder.
        self._attempt = self._gather(secrets.token_hex(4))[0]
        # Python waits for its thread before it exits, so a rename is never cut short by the end of the program.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint") if asynchronous else None
        self._pending: Future[None] | None = None
        self._copies: dict[str, Tensor] = {}

    def save(self, update: int, data: CheckpointData, extra: Extra | None = None) -> Path:
        """Write a checkpoint, and drop all but the newest `keep_last` when it is there.

        The tensors may be changed in place as soon as this returns. An earlier checkpoint that is still being written
        is waited for.

        Args:
            update: optimizer updates done.
            extra: called on every rank before this returns, with the folder being written; for files in other layouts,
                which rank 0 alone may write. It may communicate. A function that it returns is called when the tensors
                are written; it must not communicate, nor need what training changes.

        Returns:
            The folder as it will be named; when the call is asynchronous it is there after `wait`.

        Raises:
            CheckpointError: this or the earlier checkpoint could not be written (disk full, no permission) by some
                rank. All ranks raise it, and older checkpoints are untouched.
        """
        self.wait()
        state = json.dumps(data.state, indent=1)
        tensors = {f"{group}.{name}": t.detach() for group, named in data.tensors.items() for name, t in named.items()}
        # The parts as the mesh has them; torch alone knows where a DTensor's part belongs.
        plan = create_default_local_save_plan(tensors, self.world.is_main)
        self._agree(update, lambda: self._make_folder(update))
        more = None if extra is None else self._agree(update, lambda: extra(self._partial(update)))
        local = self._agree(update, lambda: self._copy({key: _local(tensor) for key, tensor in tensors.items()}))
        job = _Job(update=update, state=state, plan=plan, local=local, more=more)
        if self._thread is None:
            self._write(job)
        else:
            self._pending = self._thread.submit(self._write, job)
        return self._final(update)

    def wait(self) -> None:
        """Wait until what was saved is on disk. CheckpointError when some rank could not write it, on all ranks."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def close(self) -> None:
        """Wait, and let go of the thread, the memory and the process group. Raises as `wait`."""
        try:
            self.wait()
        finally:
            if self._thread is not None:
                self._thread.shutdown()
            self._copies.clear()
            if self._group is not None and dist.is_initialized():
                dist.destroy_process_group(self._group)
                self._group = None

    def __enter__(self) -> "CheckpointWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except RuntimeError as failure:  # a CheckpointError, or what a rank that is gone leaves the others with
            if error is None:
                raise
            # What has ended the run is what its user must see.
            if isinstance(failure, CheckpointError):
                logger.error("%s", failure)
            elif self.world.is_main:
                logger.warning("The checkpoint that was being written is not complete; earlier ones are intact.")

    # ------------------------------------------------------------------------------------------ steps

    def _final(self, update: int) -> Path:
        return self.root / checkpoint_name(update)

    def _partial(self, update: int) -> Path:
        return self.root / partial_name(update, self._attempt)

    def _make_folder(self, update: int) -> None:
        """An empty folder to write in, in place of what a run that was killed has left behind."""
        if not self.world.is_main:
            return
        self.root.mkdir(parents=True, exist_ok=True)
        for old in self.root.glob(PARTIAL_PATTERN):
            shutil.rmtree(old)
        (self._partial(update) / SHARDS).mkdir(parents=True)

    def _copy(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors as they are now, in CPU memory that is kept for the next save; pinned for those of a GPU."""
        if self._thread is None:
            # They are written before anybody can change them.
            return {key: tensor.contiguous() for key, tensor in tensors.items()}
        copies: dict[str, Tensor] = {}
        for key, tensor in tensors.items():
            copy = self._copies.get(key)
            if copy is None or copy.shape != tensor.shape or copy.dtype != tensor.dtype:
                copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            copies[key] = copy.copy_(tensor, non_blocking=True)
        if any(tensor.is_cuda for tensor in tensors.values()):
            torch.cuda.synchronize()
        self._copies = copies
        return copies

    def _write(self, job: _Job) -> None:
        """Write, sum and publish."""
        mine = self._agree(job.update, lambda: self._write_files(job))
        files = {name: entry for part in self._gather(mine) for name, entry in part.items()}
        self._agree(job.update, lambda: self._publish(job.update, files))

    def _write_files(self, job: _Job) -> dict[str, FileEntry]:
        """Write this rank's part, and describe the files that it answers for."""
        partial = self._partial(job.update)
        # Not ahead of time from the GPU: everything is in CPU memory, or goes there tensor by tensor.
        storage = FileSystemWriter(partial / SHARDS, sync_files=True, per_thread_copy_ahead=0)
        planner = _CopiesPlanner(job.plan)
        if self._group is None:
            one_process_is_meant()
        save(
            job.local,
            storage_writer=storage,
            planner=planner,
            process_group=self._group,
            no_dist=self._group is None,
        )
        if job.more is not None:
            job.more()
        mine = list((partial / SHARDS).glob(f"__{self.world.rank}_*"))
        if self.world.is_main:
            (partial / STATE).write_text(job.state, encoding="utf-8")
            mine += [p for p in partial.rglob("*") if p.is_file() and not p.match(f"{SHARDS}/__*")]
        return describe_files(mine, partial)

    def _publish(self, update: int, files: Mapping[str, FileEntry]) -> None:
        """Give a folder that is complete its name."""
        if not self.world.is_main:
            return
        partial, final = self._partial(update), self._final(update)
        write_manifest(partial, update, files)
        if final.exists():
            shutil.rmtree(final)
        partial.replace(final)
        sync(self.root)
        # A newer folder is a damaged one that this run has passed over; it must not push out what was just written.
        for old in [p for p in list_checkpoints(self.root) if p.name <= final.name][: -self.keep_last]:
            shutil.rmtree(old, ignore_errors=True)

    # ------------------------------------------------------------------------------------------ ranks

    def _gather(self, value: T) -> list[T]:
        """Every rank's value, by rank."""
        if self._group is None:
            return [value]
        values: list[T | None] = [None] * self.world.size
        dist.all_gather_object(values, value, group=self._group)
        return values  # type: ignore[return-value]  # every rank has filled its own in

    def _agree(self, update: int, step: Callable[[], T]) -> T:
        """What `step` returns on this rank. CheckpointError on all ranks when it fails on one."""
        outcome: T | None = None
        failure: BaseException | None = None
        try:
            outcome = step()
        except CheckpointException as error:  # no Exception; it holds what went wrong on which rank
            failure = error.failures.get(self.world.rank, (None, None))[0]
        except Exception as error:  # noqa: BLE001  the other ranks wait to hear of it, whatever it is
            # torch.save and safetensors raise their own types for a full disk; all mean the same to the user.
            failure = error
        reasons = self._gather(None if failure is None else self._reason(failure))
        failures = [(rank, reason) for rank, reason in enumerate(reasons) if reason is not None]
        if not failures:
            return outcome  # type: ignore[return-value]
        if self.world.is_main:
            shutil.rmtree(self._partial(update), ignore_errors=True)
        if isinstance(failure, KeyboardInterrupt):  # DCP takes it for a failure
            raise failure
        rank, reason = failures[0]
        where = f" on rank {rank}" if self.world.size > 1 else ""
        kept = [p.name for p in list_checkpoints(self.root)]
        raise CheckpointError(
            f"Could not write checkpoint {self._final(update)}{where}: {reason}. Free space, raise the quota or fix "
            "permissions, then resume with --resume auto from "
            f"{kept[-1] if kept else 'the beginning (no earlier checkpoint)'}."
        ) from failure

    def _reason(self, failure: BaseException) -> str:
        """What went wrong, with the space that is left: torch says of a full disk that a position was unexpected."""
        text = f"{type(failure).__name__}: {failure}".removesuffix(".")
        if self.root.is_dir():
            text += f" ({shutil.disk_usage(self.root).free / 1e9:.1f} GB free)"
        return text


class _CopiesPlanner(DefaultSavePlanner):
    """Saves local copies of tensors by the plan that was made of the tensors themselves."""

    def __init__(self, plan: SavePlan) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._local_plan = plan

    def create_local_plan(self) -> SavePlan:
        self.plan = self._local_plan
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self.state_dict[index.fqn]


def _local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
