"""Two GPUs of a node: the exchange of sequence parallelism, what FSDP2 hides behind computation, and their spread.

    python -m benchmarks two_ranks            two GPUs, 480x832x81
    python -m benchmarks two_ranks --smoke    two processes on a CPU, tiny; the numbers mean nothing

torchrun starts two ranks of this file, which write the rows that the cell then holds:

* `all-to-all`, the q, k and v of one layer on their way from tokens to heads;
* `forward`, with weights gathered block by block against weights that stay whole: the part of the gathers that does not
  hide behind the blocks;
* `slower rank`, its forward against the faster one's: every collective waits for it.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import distributed as dist

import benchmarks  # noqa: F401  first, because it decides where kernels run
from benchmarks import harness, workload
from benchmarks.errors import relative_error
from benchmarks.harness import Quantiles
from benchmarks.results import Record
from benchmarks.session import Cell, Session, Suite, timing
from sage_fast.config.sections import DistributedConfig, ModelConfig, TrainingConfig
from sage_fast.distributed.start import rank_device, start_world
from sage_fast.models.hunyuan15.backbone import choose_forward, velocity
from sage_fast.sharding.parallelize import shard_weights

SUITE = "two_ranks"
ROUNDS = 8
TOLERANCE = 0.02
"""Of the velocity with weights gathered block by block; a library may choose another kernel for other addresses."""
SECONDS = 60.0
"""Guess for starting two processes that draw the weights."""


def rank(path: str, smoke: bool) -> None:
    """One of the two processes; rank 0 writes the record."""
    device = rank_device("auto")
    world = start_world(DistributedConfig(dp_shard=2), TrainingConfig().mode, device, {})
    config = workload.TINY if smoke else workload.HUNYUAN_VIDEO_15
    shape = workload.SMOKE[1] if smoke else workload.B
    rounds = 2 if smoke else ROUNDS
    transformer = workload.random_transformer(config, device, torch.bfloat16)
    inputs = workload.random_inputs(shape, config, device, torch.bfloat16)
    model = ModelConfig(dtype="bfloat16", adaln="weights")
    acceleration = choose_forward(transformer, model)
    assert acceleration is not None

    @torch.no_grad()
    def forward() -> torch.Tensor:
        return velocity(transformer, inputs.latents, inputs.sigma, [inputs.conditional])

    expected = forward()
    dist.barrier()
    whole = harness.measure(forward, rounds=rounds)
    acceleration.undo()
    choose_forward(transformer, model)
    shard_weights(transformer, DistributedConfig(), model, world, device, mode="lora")
    difference = relative_error(forward(), expected)
    dist.barrier()
    gathered = harness.measure(forward, rounds=rounds)
    width = config["num_attention_heads"] * config["attention_head_dim"]
    sent = torch.zeros(2, 3 * shape.video_tokens * width // 4, dtype=torch.bfloat16, device=device)
    received = torch.empty_like(sent)
    exchange = harness.measure(lambda: dist.all_to_all_single(received, sent), rounds=rounds, calls=1 if smoke else 10)
    found: list[tuple[Quantiles, Quantiles, Quantiles]] = world.gather((whole, gathered, exchange))
    if world.is_main:
        fast, slow = sorted((one for one, _, _ in found), key=lambda seconds: seconds.median)
        rows = [
            timing("all-to-all", shape.name, "ours", exchange, nbytes=sent.nbytes // 2, note="bytes that a rank sends"),
            timing("forward", shape.name, "ours", gathered),
            timing("forward", shape.name, "whole", whole),
            timing("slower rank", shape.name, "ours", slow),
            timing("slower rank", shape.name, "faster", fast),
        ]
        record = {"rows": rows} if difference <= TOLERANCE else {"status": f"failed: velocity differs by {difference}"}
        Path(path).write_text(json.dumps(record), "utf-8")
    dist.barrier()
    dist.destroy_process_group()


def measure(session: Session) -> Record:
    """The record that two ranks write."""
    if not session.smoke and torch.cuda.device_count() < 2:
        return {"status": "absent: it takes two GPUs"}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.json"
        program = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "-m", __name__, str(path)]
        command = [sys.executable, *program, *(["--smoke"] if session.smoke else [])]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if not path.is_file():
            return {"status": f"failed: exit status {done.returncode}: {' '.join(done.stderr.split()[-40:])}"}
        found: Record = json.loads(path.read_text("utf-8"))
        return found


def cells(session: Session) -> Iterator[Cell]:
    """One cell: the rows are compared with each other."""
    needed = 0.0 if session.smoke else SECONDS
    yield Cell(suite=SUITE, name="two GPUs", work=lambda: measure(session), seconds=needed)


SUITES = (Suite(name=SUITE, cells=cells, limit=120.0),)

if __name__ == "__main__":
    rank(sys.argv[1], "--smoke" in sys.argv)
