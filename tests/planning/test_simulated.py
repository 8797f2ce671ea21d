"""One process plays a rank of many: the exchanges of tokens and heads of its iteration,
against the plan of the run.

torch's fake process group answers at once with what this rank has itself, so only
shapes and order are those of a run.
"""

import json
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from sage_fast import rollout
from sage_fast.config.load import load_config
from sage_fast.distributed import failure
from sage_fast.distributed.world import World
from sage_fast.planning.devices import DEVICES
from sage_fast.planning.estimate import make_plan
from sage_fast.planning.work import anchor_share
from tests.conftest import TINY_RUN
from tests.distributed.ranks import build, run_ranks

pytestmark = pytest.mark.slow

FULL = ["--training.mode=full", "--distributed.param_dtype=bfloat16"]
CASES: dict[str, tuple[int, int, list[str]]] = {
    "full-64": (
        64,
        45,
        [
            *FULL,
            "--distributed.dp_replicate=8",
            "--distributed.dp_shard=4",
            "--distributed.sp=2",
        ],
    ),
    "lora-512": (512, 301, ["--distributed.sp=2"]),
}
"""Ranks, the one that is played, and settings: the degrees of the presets for 64 GPUs,
there and at other sizes.
"""


class Recorder(TorchDispatchMode):
    """Counts the bytes that all-to-alls send to other ranks, by phase."""

    def __init__(self) -> None:
        super().__init__()
        self.phase = ""
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its own collectives are seen then
        if func.overloadpacket.__name__ == "alltoall_base_":
            size = dist.ProcessGroup.unbox(args[2]).size()
            self.bytes[self.phase] += (size - 1) / size * args[1].nbytes
            # the fake group copies by shape
            args = (args[0].view(-1), args[1].view(-1), *args[2:])
        return func(*args, **(kwargs or {}))


def simulate(file: str, words: list[str], rank: int, size: int) -> dict[str, float]:
    """Bytes of the second iteration."""
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "8",
    }
    start = dist.init_process_group
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            dist,
            "init_process_group",
            lambda *_, **__: start(
                "fake", store=FakeStore(), rank=rank, world_size=size
            ),
        )
        patch.setattr(failure, "check_same_everywhere", lambda *_: None)
        # What others would say: the same. The scores are made up, and differ.
        patch.setattr(
            World, "gather", lambda self, value, group=None: [value] * self.size
        )
        patch.setattr(World, "broadcast", lambda self, value: value)
        patch.setattr(World, "any", lambda self, flag: flag)
        scores = torch.arange(4.0 * size).double()
        patch.setattr(rollout, "gather_scores", lambda scored, error, count, world: (
            {name: scores[:count].cos() for name in ("VQ", "MQ", "TA")}, torch.zeros(count, dtype=torch.bool)
        ))  # fmt: skip
        trainer = build(file, words)
        recorder = Recorder()
        own = trainer.engine.phase

        @contextmanager
        def named(name: str, context: Any) -> Iterator[None]:
            before = recorder.phase
            recorder.phase = name
            with context:
                yield
            recorder.phase = before

        trainer.engine.phase = lambda name: named(name, own(name))
        with recorder:
            trainer.iterate()
            recorder.bytes.clear()
            trainer.iterate()
    return dict(recorder.bytes)


@pytest.mark.parametrize("case", CASES)
def test_a_rank_of_many_exchanges_what_the_plan_counts(
    case: str, tiny_model_4_heads: Path, tmp_path: Path
) -> None:
    size, rank, words = CASES[case]
    tree: dict[str, Any] = json.loads(json.dumps(TINY_RUN)) | {
        "output_dir": str(tmp_path / "run")
    }
    tree["rollout"] |= {
        "num_generations": 2,
        "batch_size": 2,
        "micro_batch_size": 1,
        "num_steps": 2,
    }
    model = {
        "path": str(tiny_model_4_heads),
        "device": "cpu",
        "adaln": "weights",
        "kernels": "reference",
    }
    tree |= {
        "model": model,
        "objective": {"kl_mode": "fixed"},
        "evaluation": {"every": 0},
    }
    # With the empty prompt's one token they are 5 on average, which the plan counts.
    tree["data"] = {"prompts": ["a red circle moving left a red circle moving"] * 64}
    file = tmp_path / "run.yaml"
    file.write_text(json.dumps(tree))
    (found,) = run_ranks(simulate, 1, str(file), words, rank, size, timeout=300)
    config = load_config(file, words)
    plan = make_plan(config, DEVICES["h100"], gpus=size, runtime=0.0, sizes={})
    # The anchor is measured at every other update, as at the second.
    times = {"anchor": 1 / (anchor_share(config) or 1)}
    assert found.keys() == {"rollout", "anchor", "update"}
    for phase, sent in found.items():
        planned = times.get(phase, 1) * plan.waits[phase] * plan.device.link * 1e9
        assert sent == pytest.approx(planned, rel=0.002, abs=1024), phase
