"""The processes of a run: which rank does what, and the small exchanges between them.

Rank r works on the videos of data-parallel rank r // sp, and on share r % sp of their
tokens. Ranks of one video are neighbours, so their exchange stays inside a node. Every
method that communicates is called by all ranks.

On GPUs each process group has two backends: NCCL for tensors on the GPU, and gloo for
Python objects and tensors in CPU memory, so that small messages neither wait for the
GPU nor stall it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from torch import Tensor
    from torch import distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

# torch is imported where ranks talk: `sage-fast status`, which asks who a run's only
# process is, need not wait for it.

T = TypeVar("T")

OWN_TIMEOUT = "own timeout"
"""Description of a process group that keeps its own timeout after the first update."""


@dataclass(frozen=True, kw_only=True)
class World:
    """This process among all of a run.

    Attributes:
        mesh: ("dp_replicate", "dp_shard", "sp").
        fsdp_mesh: ("replicate", "shard"), in which sp ranks shard weights like any
            others.

    Both are None without a process group; then every method is a no-op on one rank.

    Example: rank 5 of 8 with sp 2 is `World(rank=5, size=8, dp_shard=4, sp=2, ...)`:
    data-parallel rank 2 of 4, second share of the tokens.
    """

    rank: int = 0
    size: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    sp: int = 1
    mesh: "DeviceMesh | None" = None
    fsdp_mesh: "DeviceMesh | None" = None

    @property
    def dp_degree(self) -> int:
        """Ranks, or groups of sp ranks, with separate videos."""
        return self.dp_replicate * self.dp_shard

    @property
    def dp_rank(self) -> int:
        return self.rank // self.sp

    @property
    def is_main(self) -> bool:
        """True on the rank that writes the files and talks to the user."""
        return self.rank == 0

    @property
    def sp_group(self) -> "dist.ProcessGroup | None":
        """The ranks that share a video's tokens; None without a process group."""
        return None if self.mesh is None else self.mesh.get_group("sp")

    def gather(self, value: T, group: "dist.ProcessGroup | None" = None) -> list[T]:
        """Every rank's value, by rank; any picklable object. Through CPU memory, so for
        small things.

        group: another process group of all ranks, for a thread.
        """
        if self.mesh is None:
            return [value]
        from torch import distributed as dist

        values: list[T | None] = [None] * self.size
        dist.all_gather_object(values, value, group=group)
        return values  # type: ignore[return-value]  # every rank has filled in its own

    def broadcast(self, value: T) -> T:
        """Rank 0's value."""
        if self.mesh is None:
            return value
        import torch
        from torch import distributed as dist

        values = [value]
        # In CPU memory, so over gloo: it does not wait for the GPU.
        dist.broadcast_object_list(values, src=0, device=torch.device("cpu"))
        return values[0]

    def any(self, flag: bool) -> bool:
        """True when the flag is set on any rank."""
        if self.mesh is None:
            return flag
        import torch
        from torch import distributed as dist

        # On the CPU, so over gloo as well.
        value = torch.tensor(int(flag))
        dist.all_reduce(value, dist.ReduceOp.MAX)
        return bool(value)

    def sum_(self, tensors: "Sequence[Tensor]") -> None:
        """Replace tensors of one dtype and device by their sums over all ranks, in one
        all-reduce.
        """
        if self.mesh is None or not tensors:
            return
        import torch
        from torch import distributed as dist

        with torch.no_grad():
            flat = torch.cat([t.flatten() for t in tensors])
            dist.all_reduce(flat)
            parts = flat.split([t.numel() for t in tensors])
            for tensor, part in zip(tensors, parts, strict=True):
                tensor.copy_(part.view(tensor.shape))

    def exchange(
        self, rows: "Tensor", sent: Sequence[int], received: Sequence[int]
    ) -> "Tensor":
        """Rows (sum(received), ...) that data-parallel ranks have for this one, by
        sender; an all-to-all.

        Args:
            rows: (sum(sent), ...), by receiver. Ranks that share a video have the same
                ones.
            sent, received: numbers of rows by data-parallel rank.
        """
        if self.mesh is None:
            return rows
        from torch import distributed as dist

        def by_rank(counts: Sequence[int]) -> list[int]:
            # A share of a video's ranks exchanges with the same share of another's.
            of_ranks = [0] * self.size
            of_ranks[self.rank % self.sp :: self.sp] = counts
            return of_ranks

        found = rows.new_empty((sum(received), *rows.shape[1:]))
        dist.all_to_all_single(found, rows, by_rank(received), by_rank(sent))
        return found


SINGLE_PROCESS = World()
"""The one process of a run that was not launched."""


def set_group_timeouts(seconds: float) -> None:
    """Set how long a collective of any group may wait. A group that waits for something
    other than training, such as a disk, keeps its own timeout (`OWN_TIMEOUT`).
    """
    from torch import distributed as dist

    # Public since torch 2.15.
    set_timeout = getattr(dist, "set_timeout", dist.distributed_c10d._set_pg_timeout)
    for group in list(dist.distributed_c10d._world.pg_map):
        if group.group_desc != OWN_TIMEOUT:
            set_timeout(timedelta(seconds=seconds), group)
