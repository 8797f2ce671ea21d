"""Checkpoints of several ranks: what is written sharded is read by any number of ranks,
and all agree on failures.
"""

import errno
import math
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from sage_fast.checkpoint import folder as folder_module
from sage_fast.checkpoint.folder import list_checkpoints, verify_checkpoint
from sage_fast.checkpoint.reader import find_checkpoint, open_checkpoint
from sage_fast.checkpoint.writer import CheckpointData, CheckpointWriter
from sage_fast.config.errors import CheckpointError, UnreadableCheckpointError
from sage_fast.config.sections import DistributedConfig
from sage_fast.distributed.failure import HangGuard
from sage_fast.distributed.start import start_world
from sage_fast.distributed.world import World
from tests.distributed.ranks import run_ranks

pytestmark = pytest.mark.slow


def join(**degrees: int) -> World:
    return start_world(DistributedConfig(**degrees), "full", torch.device("cpu"), {})


def model(value: int | None = None) -> nn.Module:
    """Rows that no number of ranks divides, fewer rows than ranks, a vector; the same
    on every rank.
    """
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(6, 7), nn.Linear(7, 2), nn.LayerNorm(2))
    if value is not None:
        for parameter in layers.parameters():
            nn.init.constant_(parameter, value)
    return layers


def sharded(world: World, layers: nn.Module) -> dict[str, Tensor]:
    for layer in layers:
        fully_shard(layer, mesh=world.fsdp_mesh)
    return dict(fully_shard(layers, mesh=world.fsdp_mesh).named_parameters())


def contents(world: World, parameters: dict[str, Tensor]) -> CheckpointData:
    own = torch.full((3,), float(world.rank))
    optimizer = {f"{name}.exp_avg": p.detach() * 3 for name, p in parameters.items()}
    optimizer |= {f"{name}.step": torch.tensor(40.0) for name in parameters}
    return CheckpointData(
        tensors={
            "weights": parameters,
            "optimizer": optimizer,
            "replicated": {
                "adapter": torch.arange(12.0).view(3, 4),
                "half": torch.ones(2, dtype=torch.bfloat16),
            },
            "single": {f"of.rank.{world.rank}": own},
        },
        state={"update": 40, "ranks": world.size},
    )


def save(root: str, degrees: dict[str, int], asynchronous: bool) -> list[bool]:
    world = join(**degrees)
    parameters = sharded(world, model())
    with CheckpointWriter(
        Path(root), keep_last=2, asynchronous=asynchronous, world=world
    ) as saver:
        saver.save(40, contents(world, parameters))
        with torch.no_grad():
            for parameter in parameters.values():
                parameter.mul_(-1)  # training goes on
    return [isinstance(p, DTensor) for p in parameters.values()]


def load(root: str, degrees: dict[str, int]) -> dict[str, Tensor]:
    """Every tensor whole, on this rank after reading its part."""
    world = join(**degrees)
    checkpoint = find_checkpoint("auto", Path(root), world)
    assert checkpoint is not None and checkpoint.state == {"update": 40, "ranks": 4}
    parameters = sharded(world, model(value=9))
    momenta = {f"{name}.exp_avg": torch.zeros_like(p) for name, p in parameters.items()}
    step = torch.tensor(0.0)
    adapter = torch.zeros(3, 4)
    checkpoint.load_into(
        {
            "weights": parameters,
            "optimizer": momenta | {"0.bias.step": step},
            "replicated": {"adapter": adapter},
        }
    )
    whole = {
        name: t.detach().full_tensor() for name, t in (parameters | momenta).items()
    }
    return {name: t.clone() for name, t in whole.items()} | {
        "step": step,
        "adapter": adapter,
    }


def expected() -> dict[str, Any]:
    found = {"step": 40.0, "adapter": torch.arange(12.0).view(3, 4).tolist()}
    for name, parameter in model().named_parameters():
        found |= {name: parameter.tolist(), f"{name}.exp_avg": (parameter * 3).tolist()}
    return found


@pytest.fixture(scope="module")
def of_four(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of four ranks, two replicas of two shards, written while the weights
    changed.
    """
    root = tmp_path_factory.mktemp("four") / "checkpoints"
    assert all(
        all(kinds)
        for kinds in run_ranks(
            save, 4, str(root), {"dp_replicate": 2, "dp_shard": 2}, True
        )
    )
    return root


def test_other_ranks_and_one_process_read_it_bit_for_bit(of_four: Path) -> None:
    for found in run_ranks(load, 2, str(of_four), {"dp_shard": 2}):
        assert {name: value.tolist() for name, value in found.items()} == expected()
    checkpoint = open_checkpoint(of_four / "update-000040")
    for name, parameter in model().named_parameters():
        assert torch.equal(checkpoint.read("weights", name), parameter)
    # What one rank alone has is written by it.
    assert [
        float(checkpoint.read("single", f"of.rank.{rank}")[0]) for rank in range(4)
    ] == [0, 1, 2, 3]
    assert checkpoint.tensors["replicated"]["half"].dtype == torch.bfloat16
    assert checkpoint.shapes["weights"]["0.weight"] == (7, 6)


def test_nothing_is_written_twice_and_every_rank_writes(of_four: Path) -> None:
    """Half of the ranks hold what the other half does, and all hold the adapter."""
    shards = of_four / "update-000040/shards"
    metadata = FileSystemReader(shards).read_metadata()
    for key, stored in metadata.state_dict_metadata.items():
        assert sum(math.prod(chunk.sizes) for chunk in stored.chunks) == math.prod(
            stored.size
        ), key
    assert {place.relative_path for place in metadata.storage_data.values()} == {
        f"__{n}_0.distcp" for n in range(4)
    }


def save_thrice(root: str) -> tuple[list[int], int]:
    """Bytes that this rank copies at each of three saves, the last of one tensor more;
    how often it plans for all.
    """
    world = join(dp_replicate=2, dp_shard=2)
    parameters = sharded(world, model())
    tensors = {
        "weights": parameters,
        "adapter": {str(n): torch.full((8,), float(n)) for n in range(8)},
    }
    copied = []
    planned = []
    plan = DefaultSavePlanner.create_global_plan
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            DefaultSavePlanner,
            "create_global_plan",
            lambda *a: planned.append(1) or plan(*a),
        )
        with CheckpointWriter(
            Path(root), keep_last=3, asynchronous=True, world=world
        ) as saver:
            for update in (1, 2, 3):
                if update == 3:
                    tensors["optimizer"] = {"8": torch.full((8,), 8.0)}
                saver.save(update, CheckpointData(tensors=tensors, state={}))
                copied.append(sum(copy.nbytes for copy in saver._copies.values()))
    return copied, len(planned)


def test_what_several_ranks_hold_is_copied_by_one_and_planned_once(
    tmp_path: Path,
) -> None:
    ranks = run_ranks(save_thrice, 4, str(tmp_path))
    opened = [open_checkpoint(folder) for folder in list_checkpoints(tmp_path)]
    for save, checkpoint in enumerate(opened):
        written = sum(
            t.nbytes
            for saved in checkpoint.tensors.values()
            for t in saved.meta.values()
        )
        assert sum(copied[save] for copied, _ in ranks) == written
        assert all(float(checkpoint.read("adapter", str(n))[7]) == n for n in range(8))
    assert float(opened[2].read("optimizer", "8")[0]) == 8.0
    assert [planned for _, planned in ranks] == [2, 0, 0, 0], (
        "the second save needs no plan"
    )


# --------------------------------------------------------------------------------------
# what can go wrong


def choose(root: str) -> str | None:
    """The checkpoint that this rank goes on from."""
    found = find_checkpoint("auto", Path(root), join())
    return found and found.folder.name


def test_all_ranks_see_the_damage_and_take_the_same_checkpoint(
    of_four: Path, tmp_path: Path
) -> None:
    """Each rank verifies a part of the files."""
    for update, shard in enumerate(("", "__3_0", "__2_0", "__1_0", "__0_0")):
        folder = shutil.copytree(
            of_four / "update-000040", tmp_path / f"update-00004{update}"
        )
        if shard:
            data = bytearray((folder / f"shards/{shard}.distcp").read_bytes())
            data[len(data) // 2] ^= 1
            (folder / f"shards/{shard}.distcp").write_bytes(data)
    assert run_ranks(choose, 2, str(tmp_path)) == ["update-000040"] * 2


def refused(root: str) -> list[str]:
    """The answer to each way of asking when rank 1 alone has not mounted the folder."""
    world = join()
    answers = []
    with pytest.MonkeyPatch.context() as patch:
        if world.rank == 1:
            patch.setattr(folder_module, "_sha256", _missing)
            patch.setattr(os.path, "isdir", lambda path: False)
        for resume in ("auto", f"{root}/update-000040"):
            try:
                answers.append(str(find_checkpoint(resume, Path(root), world)))
            except UnreadableCheckpointError as error:
                answers.append(f"unreadable: {error}")
    return answers


def _missing(path: Path) -> str:
    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))


def test_what_one_rank_cannot_read_stops_all(of_four: Path) -> None:
    """A rank that does not see a checkpoint must not make the others begin again
    without it.
    """
    ranks = run_ranks(refused, 2, str(of_four))
    assert ranks[0] == ranks[1]
    assert all(
        answer.startswith("unreadable: ") and "rank 1" in answer for answer in ranks[0]
    )


def adapter(folder: Path) -> None:
    """Other files of a checkpoint."""


def full(*_: Any, **__: Any) -> None:
    raise OSError(28, "No space left on device")


FAILURES = {
    # call that fails: rank, and whether it writes in the background
    f"{__name__}.adapter": (0, False),
    "sage_fast.checkpoint.writer.CheckpointWriter._copy": (1, True),
    "sage_fast.checkpoint.writer.FileSystemWriter.write_data": (1, True),
    "sage_fast.checkpoint.writer.describe_files": (1, False),
    "sage_fast.checkpoint.writer.write_manifest": (0, True),
}


def fail(folder: str) -> list[tuple[str, list[str], list[str]]]:
    """Of each failure `fail_in`, in one start of the ranks."""
    world = join()
    data = contents(world, sharded(world, model()))
    return [fail_in(Path(folder) / call, call, data, world) for call in FAILURES]


def fail_in(
    root: Path, call: str, data: CheckpointData, world: World
) -> tuple[str, list[str], list[str]]:
    """A checkpoint, one in which a call of one rank fails, and another: the error, and
    what is there after it and at the end.
    """
    culprit, asynchronous = FAILURES[call]
    with CheckpointWriter(
        root, keep_last=2, asynchronous=asynchronous, world=world
    ) as saver:
        saver.save(1, data)
        saver.wait()
        with (
            pytest.MonkeyPatch.context() as patch,
            pytest.raises(CheckpointError) as error,
        ):
            if world.rank == culprit:
                patch.setattr(call, full)
            saver.save(2, data, extra=adapter)
            saver.wait()
        dist.barrier()
        after = sorted(path.name for path in root.iterdir())
        dist.barrier()
        saver.save(3, data)
    dist.barrier()
    verify_checkpoint(root / "update-000001", world)
    verify_checkpoint(root / "update-000003", world)
    return str(error.value), after, sorted(path.name for path in root.iterdir())


def test_the_failure_of_one_rank_is_raised_by_all_and_loses_nothing(
    tmp_path: Path,
) -> None:
    ranks = run_ranks(fail, 2, str(tmp_path))
    assert ranks[0] == ranks[1]
    for found, call in zip(ranks[0], FAILURES, strict=True):
        message, after, last = found
        assert f"update-000002 on rank {FAILURES[call][0]}: " in message, call
        assert "resume with --resume auto" in message
        assert after == ["update-000001"], call
        assert last == ["update-000001", "update-000003"], call


def not_shared(root: str) -> str:
    world = join()
    own = Path(root) / f"machine{world.rank}"
    with (
        pytest.raises(CheckpointError) as error,
        CheckpointWriter(own, keep_last=1, world=world) as saver,
    ):
        saver.save(1, contents(world, sharded(world, model())))
    assert not list_checkpoints(own)
    return str(error.value)


def test_a_folder_that_the_ranks_do_not_share_is_refused(tmp_path: Path) -> None:
    assert all(
        "on rank 0" in text and "__1_0.distcp" in text
        for text in run_ranks(not_shared, 2, str(tmp_path))
    )


def save_slowly(root: str) -> None:
    world = join()
    with (
        HangGuard(world, 60.0) as guard,
        CheckpointWriter(Path(root), keep_last=2, world=world) as saver,
    ):
        guard.use_steady_timeout(0.5)
        time.sleep(1.5 * world.rank)
        saver.save(40, contents(world, {}))
        guard.use_steady_timeout(60.0)


def test_a_slow_disk_may_take_longer_than_an_update(tmp_path: Path) -> None:
    """Lowering the timeouts of training leaves alone how long ranks wait for each
    other's files.
    """
    run_ranks(save_slowly, 2, str(tmp_path))
    verify_checkpoint(list_checkpoints(tmp_path)[0])
