"""Writing a checkpoint on all ranks at once, if wanted while training goes on.

`save` copies what has to be saved into CPU memory and returns; a thread writes the
copies. What the ranks tell each other about it goes over a separate process group,
because the training's collectives run at the same time.
"""

import contextlib
import hashlib
import json
import logging
import secrets
import shutil
import stat
from collections import Counter, deque
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
from torch.distributed.checkpoint.default_planner import (
    DefaultSavePlanner,
    create_default_local_save_plan,
)
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor

from sage_fast.checkpoint.folder import (
    BEST,
    SHARDS,
    STATE,
    Files,
    checkpoint_name,
    describe_files,
    list_checkpoints,
    one_process_is_meant,
    read_best,
    update_of,
    write_manifest,
)
from sage_fast.config.errors import CheckpointError
from sage_fast.config.files import sync, write_text
from sage_fast.distributed.failure import is_communication_error
from sage_fast.distributed.world import OWN_TIMEOUT, SINGLE_PROCESS, World

T = TypeVar("T")

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class CheckpointData:
    """Contents of a checkpoint.

    Attributes:
        tensors: group, a word without a dot -> {name: tensor}; `weights` always,
            `anchor`, `ema` and `optimizer` when the run has them. A tensor is the same
            on every rank, a DTensor, or on one rank alone; numbers such as AdamW's step
            are tensors too.
        state: JSON-able counters and configuration, the same on every rank.

    Example: `CheckpointData(tensors={"weights": {"proj_out.weight": weight}},
    state={"update": 40})`
    """

    tensors: Mapping[str, Mapping[str, Tensor]]
    state: Mapping[str, Any]


Extra = Callable[[Path], Callable[[], object] | None]
"""Adds files to a checkpoint: see `CheckpointWriter.save`."""


class CheckpointWriter:
    """Writes the checkpoints of a run. Every method is collective.

    Args:
        root: folder of the run's checkpoints, on a file system that all ranks share.
        keep_last: how many of the newest are kept.
        asynchronous: return from `save` when the tensors are copied, and write them
            from a thread.
        world: the ranks that save together.
        timeout_seconds: longest that a rank waits for the others to have written their
            part.
    """

    def __init__(
        self,
        root: Path,
        *,
        keep_last: int,
        asynchronous: bool = False,
        world: World = SINGLE_PROCESS,
        timeout_seconds: float = 1800.0,
    ) -> None:
        self.root = root
        self.keep_last = keep_last
        self.world = world
        self._group: dist.ProcessGroup | None = None
        if world.mesh is not None:
            self._group = dist.new_group(
                backend="gloo",
                timeout=timedelta(seconds=timeout_seconds),
                group_desc=OWN_TIMEOUT,
            )
        # Ranks of an earlier attempt at the run, which may not have ended yet, must not
        # write into the same folder.
        self._attempt = world.gather(secrets.token_hex(4))[0]
        # Python waits for its thread before it exits, so a rename is never cut short by
        # the end of the program.
        self._thread: ThreadPoolExecutor | None = None
        if asynchronous:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None
        self.published: deque[Path] = deque()
        """Checkpoints that have become complete, oldest first, on rank 0; who reads
        them takes them out.
        """
        self._copies: dict[str, Tensor] = {}
        self._planner: _CopiesPlanner | None = None

    def save(
        self, update: int, data: CheckpointData, extra: Extra | None = None
    ) -> Path:
        """Write a checkpoint, and delete those that are no longer kept when it is
        there.

        The tensors may be changed in place as soon as this returns. An earlier
        checkpoint that is still being written is waited for.

        Args:
            update: optimizer updates done.
            extra: called on every rank before this returns, with the folder being
                written; for files in other layouts, which rank 0 alone may write. It
                may communicate. A function that it returns is called when the tensors
                are written; it must not communicate, nor need what training changes.

        Returns:
            The folder as it will be named; when the call is asynchronous it is there
            after `wait`.

        Raises:
            CheckpointError: this or the earlier checkpoint could not be written (disk
                full, no permission) by some rank. All ranks raise it, and older
                checkpoints are untouched.
        """
        # Until it is on disk, the last save needs its copies and its plan.
        self.wait()
        # Text now: the thread must not see what training changes meanwhile.
        state = json.dumps(data.state, indent=1)
        tensors = {
            f"{group}.{name}": t.detach()
            for group, named in data.tensors.items()
            for name, t in named.items()
        }
        planner = self._plan(tensors)
        self._agree(update, lambda: self._make_folder(update))
        more: Callable[[], object] | None = None
        if extra is not None:
            more = self._agree(update, lambda: extra(self._partial(update)))
        parts: dict[str, Tensor] = {}
        for key in planner.own_keys:
            tensor = tensors[key]
            parts[key] = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        local = self._agree(update, lambda: self._copy(parts))
        arguments = (update, state, planner, local, more)
        if self._thread is None:
            self._write(*arguments)
        else:
            self._pending = self._thread.submit(self._write, *arguments)
        return self._final(update)

    def pin_best(self, update: int, score: float) -> None:
        """Keep the checkpoint of an update whose evaluation has the highest score so
        far. Collective.

        To be called again after a kill: the same update and score change nothing. It
        waits for earlier saves. The score is rank 0's. An update without a checkpoint
        is not pinned.

        Raises:
            CheckpointError: that checkpoint could not be written, or the pin could not;
                on all ranks.
        """
        self.wait()

        def pin() -> None:
            if not self.world.is_main or not self._final(update).is_dir():
                return
            best = read_best(self.root, newest=update)
            if best is None or best[0] == update or best[1] < score:
                write_text(
                    self.root / BEST, json.dumps({"update": update, "score": score})
                )

        self._agree(update, pin)

    def wait(self) -> None:
        """Wait until what was saved is on disk. CheckpointError when some rank could
        not write it, on all ranks.
        """
        pending = self._pending
        self._pending = None
        if pending is not None:
            pending.result()

    def close(self) -> None:
        """Wait, and let go of the thread, the memory and the process group. Raises as
        `wait`.
        """
        try:
            self.wait()
        finally:
            if self._thread is not None:
                self._thread.shutdown()
            self._copies.clear()
            self._planner = None
            if self._group is not None and dist.is_initialized():
                dist.destroy_process_group(self._group)
                self._group = None

    def __enter__(self) -> "CheckpointWriter":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None and is_communication_error(error):
            # The others cannot complete a checkpoint either; to wait for them here
            # would hide why the run ends.
            logger.warning(
                "A checkpoint that was being written is not complete; earlier ones "
                "are intact."
            )
            return
        try:
            self.close()
        # a CheckpointError, or what a rank that is gone leaves the others with
        except RuntimeError as failure:
            if error is None:
                raise
            # The user must see the error that has ended the run.
            if isinstance(failure, CheckpointError):
                logger.error("%s", failure)
            elif self.world.is_main:
                logger.warning(
                    "The checkpoint that was being written is not complete; earlier "
                    "ones are intact."
                )

    # ----------------------------------------------------------------------------------
    # steps

    def _final(self, update: int) -> Path:
        return self.root / checkpoint_name(update)

    def _partial(self, update: int) -> Path:
        return self.root / f".{checkpoint_name(update)}.{self._attempt}.partial"

    def _plan(self, tensors: Mapping[str, Tensor]) -> "_CopiesPlanner":
        """Settle who writes what: as at the save before, unless a rank has other
        tensors than it had then.

        Tensors that several ranks hold are dealt to them in turn, the largest first.
        All holders come to the same answer by themselves, so nothing is copied or
        planned twice.
        """
        held = {key: (tensor.shape, tensor.dtype) for key, tensor in tensors.items()}
        whole = sorted(
            key for key, tensor in tensors.items() if not isinstance(tensor, DTensor)
        )
        digest = hashlib.sha256("\n".join(whole).encode()).hexdigest()
        same = self._planner is not None and self._planner.held == held
        answers = self.world.gather((same, digest), self._group)
        if self._planner is not None and all(same for same, _ in answers):
            return self._planner
        # DeepSpeed has each of them on one rank alone.
        everywhere = len({digest for _, digest in answers}) == 1
        dealt: Counter[object] = Counter()
        own: dict[str, Tensor] = {}
        for key in sorted(tensors, key=lambda key: (-tensors[key].nbytes, key)):
            tensor = tensors[key]
            place = self.world.rank
            holders = self.world.size
            if isinstance(tensor, DTensor):
                # Its part is on the ranks along the mesh dimensions that replicate it;
                # `place` numbers them.
                mesh = tensor.device_mesh
                place = 0
                holders = 1
                for dim, placement in enumerate(tensor.placements):
                    if placement.is_replicate():
                        place = place * mesh.size(dim) + mesh.get_local_rank(dim)
                        holders *= mesh.size(dim)
            elif not everywhere:
                place = 0
                holders = 1
            # Each kind has its own holders, so it is dealt by itself.
            kind = getattr(tensor, "placements", None)
            if dealt[kind] % holders == place:
                own[key] = tensor
            dealt[kind] += 1
        # The parts as the mesh has them; torch alone knows where a DTensor's part
        # belongs.
        self._planner = _CopiesPlanner(
            create_default_local_save_plan(own, self.world.is_main), held
        )
        return self._planner

    def _make_folder(self, update: int) -> None:
        """An empty folder to write in; what runs that were killed have left behind
        makes room.
        """
        if not self.world.is_main:
            return
        for abandoned in self.root.glob(".update-*.partial"):
            # One writer per run: nobody else's is needed. A rank that is just being
            # ended may still write into one.
            shutil.rmtree(abandoned, ignore_errors=True)
        (self._partial(update) / SHARDS).mkdir(parents=True)

    def _copy(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors as they are now, in CPU memory that is kept for the next save;
        pinned for those of a GPU.
        """
        if self._thread is None:
            # They are written before anybody can change them.
            return {key: tensor.contiguous() for key, tensor in tensors.items()}
        copies: dict[str, Tensor] = {}
        for key, tensor in tensors.items():
            copy = self._copies.get(key)
            if copy is None or copy.shape != tensor.shape or copy.dtype != tensor.dtype:
                copy = torch.empty(
                    tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda
                )
            copies[key] = copy.copy_(tensor, non_blocking=True)
        if any(tensor.is_cuda for tensor in tensors.values()):
            # The copies are under way, and the caller may change the tensors as soon as
            # this returns.
            torch.cuda.synchronize()
        self._copies = copies
        return copies

    def _write(
        self,
        update: int,
        state: str,
        planner: "_CopiesPlanner",
        local: dict[str, Tensor],
        more: Callable[[], object] | None,
    ) -> None:
        """Write, sum and publish.

        Args:
            planner: which parts are this rank's.
            local: these, by key.
            more: writes the files of `extra`.
        """

        def write() -> Files:
            # Not ahead of time from the GPU: everything is in CPU memory, or goes there
            # tensor by tensor.
            storage = FileSystemWriter(
                self._partial(update) / SHARDS, sync_files=True, per_thread_copy_ahead=0
            )
            alone = self._group is None
            if alone:
                one_process_is_meant()
            save(
                local,
                storage_writer=storage,
                planner=planner,
                process_group=self._group,
                no_dist=alone,
            )
            # The planner outlives this save, and would keep its tensors alive.
            planner.state_dict = {}
            if more is not None:
                more()
            return self._describe_own(update, state)

        # Each rank has described its own files; all come into one manifest.
        parts = self.world.gather(self._agree(update, write), self._group)
        files: Files = {}
        for part in parts:
            files |= part
        self._agree(update, lambda: self._publish(update, files))

    def _describe_own(self, update: int, text: str) -> Files:
        """Describe the files that this rank answers for; rank 0 for all but the shards
        of others.
        """
        partial = self._partial(update)
        mine = list((partial / SHARDS).glob(f"__{self.world.rank}_*"))
        if self.world.is_main:
            state = partial / STATE
            state.write_text(text, encoding="utf-8")
            for path in partial.rglob("*"):
                if path.is_file() and not path.match(f"{SHARDS}/__*"):
                    # safetensors makes files that nobody else may read, whatever the
                    # umask says
                    path.chmod(stat.S_IMODE(state.stat().st_mode))
                    mine.append(path)
        return describe_files(mine, partial)

    def _publish(self, update: int, files: Files) -> None:
        """Give a folder that is complete its name."""
        if not self.world.is_main:
            return
        partial = self._partial(update)
        final = self._final(update)
        write_manifest(partial, update, files)
        # damaged, or of an attempt that this run has gone back behind
        if final.exists():
            self._discard(final)
        # From here on the checkpoint is there.
        partial.replace(final)
        sync(self.root)
        self.published.append(final)
        try:
            best = read_best(self.root, newest=update)
            folders = list_checkpoints(self.root)
            # A newer folder is a damaged one that this run has passed over; it must not
            # push out what was just written.
            folders = [folder for folder in folders if update_of(folder) <= update]
            for old in folders[: -self.keep_last]:
                if best is None or update_of(old) != best[0]:
                    self._discard(old)
        # the checkpoint is complete, and room is asked for another time
        except (OSError, CheckpointError) as error:
            logger.warning(
                "Checkpoints that are no longer kept could not be deleted: %s", error
            )

    def _discard(self, folder: Path) -> None:
        """Delete a checkpoint so that nobody meets half of one."""
        doomed = self._partial(update_of(folder)).with_suffix(".deleted.partial")
        folder.replace(doomed)
        shutil.rmtree(doomed)

    # ----------------------------------------------------------------------------------
    # ranks

    def _agree(self, update: int, step: Callable[[], T]) -> T:
        """Return the result of `step` on this rank. CheckpointError on all ranks when
        it fails on one.
        """
        outcome: T | None = None
        failure: BaseException | None = None
        try:
            outcome = step()
        # no Exception; it holds what went wrong on which rank
        except CheckpointException as error:
            failure = error.failures.get(self.world.rank, (None, None))[0]
        except Exception as error:  # noqa: BLE001  the other ranks wait for word of it
            # torch.save and safetensors raise their own types for a full disk; all mean
            # the same to the user.
            failure = error
        reason = None
        if failure is not None:
            reason = f"{type(failure).__name__}: {failure}".removesuffix(".")
            # torch says of a full disk that a position was unexpected
            with contextlib.suppress(OSError):
                reason += f" ({shutil.disk_usage(self.root).free / 1e9:.1f} GB free)"
        reasons = self.world.gather(reason, self._group)
        culprits = [rank for rank, found in enumerate(reasons) if found is not None]
        if not culprits:
            return outcome  # type: ignore[return-value]
        self._planner = None  # it may know the plan of some ranks alone
        if self.world.is_main:
            shutil.rmtree(self._partial(update), ignore_errors=True)
        if isinstance(failure, KeyboardInterrupt):  # DCP takes it for a failure
            raise failure
        rank = culprits[0]
        where = f" on rank {rank}" if self.world.size > 1 else ""
        raise CheckpointError(
            f"Could not write checkpoint {self._final(update)}{where}: "
            f"{reasons[rank]}. Free space, raise the quota or fix permissions, then "
            "resume with --resume auto: earlier checkpoints are intact."
        ) from failure


class _CopiesPlanner(DefaultSavePlanner):
    """Saves local copies of tensors by the plan that was made of the tensors
    themselves.

    Rank 0 plans for all at the first save, which takes seconds for thousands of
    tensors; from the second one on nobody tells it anything, and it repeats its answer.

    Args:
        plan: of this rank.
        held: shapes and data types of all tensors of this rank, by key.
    """

    def __init__(self, plan: SavePlan, held: Mapping[str, object]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.held = held
        self.own_keys = [item.index.fqn for item in plan.items]
        self.plan = plan
        self._finished = False
        self._of_all: Metadata | None = None

    def create_local_plan(self) -> SavePlan:
        return SavePlan([]) if self._finished else self.plan

    def create_global_plan(
        self, all_plans: list[SavePlan]
    ) -> tuple[list[SavePlan], Metadata]:
        if self._of_all is None:
            all_plans, self._of_all = super().create_global_plan(all_plans)
        return all_plans, self._of_all

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        if not self._finished:
            self.plan = new_plan
            self._finished = True
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self.state_dict[index.fqn]
