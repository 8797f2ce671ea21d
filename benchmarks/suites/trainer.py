"""What surrounds the model: an iteration of the toy run, the stall of a checkpoint, the host's share of a forward.

    python -m benchmarks trainer            all three, anywhere; about five minutes on a CPU
    python -m benchmarks trainer --smoke    the same code, small; the numbers mean nothing

* `toy`: `configs/toy_cpu.yaml` with model.forward stock and fused, two trainers in one process that take turns, so that
  what else the machine does hits both. Parity comes first: both start from the same weights and noise, so the metrics
  of the first iteration agree, or there is no ratio. On a CPU seconds are the processor's: time that other processes
  take away does not count.
* `checkpoint`: that run, and a LoRA run of HunyuanVideo-1.5 with the default adapters and optimizer and an anchor,
  saved in the foreground, where training waits for disk and checksums, and in the background, where it waits for a
  copy; in turn, so that what else the disk does hits both. The first save of each, which makes the copies' memory, is
  not counted.
* `host`: a forward of all 54 blocks so narrow that the arithmetic vanishes. On a GPU it is the time until the call
  returns, with the queue still running; on a CPU it is processor time and holds the tiny arithmetic.
"""

import gc
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from benchmarks import harness, peers
from benchmarks.counts.traced import meta_transformer
from benchmarks.errors import relative_error, verdict
from benchmarks.harness import Quantiles
from benchmarks.results import Record
from benchmarks.session import Cell, Session, Suite, timing
from benchmarks.workload import HUNYUAN_VIDEO_15, SMOKE, attention_backend, random_inputs, random_transformer
from sage_fast.checkpoint import CheckpointData, CheckpointWriter
from sage_fast.config.training_sections import OptimizerConfig
from sage_fast.optim import OptimizerSet
from sage_fast.policy.lora import trainable_parameters

ON_CPU = True
ROOT = Path(__file__).resolve().parents[2]
TOY_CONFIG = ROOT / "configs" / "toy_cpu.yaml"
TOY_PATHS = {"data.prompts": "toy_train.csv", "evaluation.prompts": "toy_eval.csv"}
SMALL_TOY = ["--rollout.num_generations=2", "--rollout.batch_size=4", "--rollout.micro_batch_size=4"]
"""Overrides of a smoke run."""
SAME_METRICS = ("reward/mean", "grad_norm")
TOLERANCE = 1e-3
"""Relative difference of a metric of the first iteration; that of the convergence tests."""
NARROW: dict[str, Any] = {"num_attention_heads": 1, "text_embed_dim": 48, "text_embed_2_dim": 32, "image_embed_dim": 24}
"""The published transformer with one head, all its 54 blocks."""
NARROW_PARITY = {torch.float32: 1e-4, torch.bfloat16: 0.5}
"""Relative difference of a velocity from P2's: rounding, through 54 blocks."""


# ------------------------------------------------------------------------------------------ toy run


def peak_resident_gib() -> float | None:
    """Most memory this process had since `forget_peak`, in GiB; None where the system does not say."""
    status = Path("/proc/self/status")
    found = re.search(r"VmHWM:\s+(\d+) kB", status.read_text("utf-8")) if status.exists() else None
    return int(found[1]) / 2**20 if found else None


def forget_peak() -> bool:
    """Reset the peak of this process; False where the system cannot."""
    try:
        Path("/proc/self/clear_refs").write_text("5", "utf-8")
    except OSError:
        return False
    return True


def processor_clock(device: torch.device) -> Callable[[], float]:
    """Seconds of this process on a CPU, of all its threads; the clock on the wall where a GPU does the work."""
    return time.process_time if device.type == "cpu" else time.perf_counter


class ToyContest:
    """Two trainers of the toy run, stock and fused, after their first iteration."""

    def __init__(self, overrides: Sequence[str] = ()) -> None:
        from sage_fast.config.load import load_config
        from sage_fast.run.run import build_trainer

        paths = [f"--{key}={ROOT / 'configs' / 'prompts' / name}" for key, name in TOY_PATHS.items()]
        words = [*paths, *overrides]
        self.trainers = {
            contender: build_trainer(load_config(TOY_CONFIG, [*words, f"--model.forward={forward}"]))
            for contender, forward in (("stock", "stock"), ("ours", "fused"))
        }
        self.first = {contender: trainer.iterate() for contender, trainer in self.trainers.items()}

    def check(self) -> Record:
        """Relative differences of the metrics of the first iteration."""
        ours, stock = self.first["ours"], self.first["stock"]
        errors = {name: abs(ours[name] - stock[name]) / max(abs(stock[name]), 1e-12) for name in SAME_METRICS}
        return verdict(errors, TOLERANCE)

    def measure(self, iterations: int) -> Record:
        """A row per trainer."""
        clock = processor_clock(self.trainers["ours"].device)
        seconds: dict[str, list[float]] = {contender: [] for contender in self.trainers}
        wall: dict[str, list[float]] = {contender: [] for contender in self.trainers}
        peaks: dict[str, list[float]] = {contender: [] for contender in self.trainers}
        for turn in range(iterations):
            # Who goes first alternates too.
            for contender, trainer in sorted(self.trainers.items(), reverse=bool(turn % 2)):
                gc.collect()
                restarted = forget_peak()
                start, began = clock(), time.perf_counter()
                trainer.iterate()
                seconds[contender].append(clock() - start)
                wall[contender].append(time.perf_counter() - began)
                peak = peak_resident_gib()
                if restarted and peak is not None:
                    peaks[contender].append(peak)
        rows = []
        for contender, values in seconds.items():
            peak = max(peaks[contender], default=None)
            note = None if peak is None else f"peak {peak:.2f} GiB of the process"
            row = timing("iteration", "", contender, Quantiles.of(values), note=note)
            rows.append(row | {"wall_seconds": vars(Quantiles.of(wall[contender])), "peak_resident_gib": peak})
        return {"rows": rows}

    def checkpoint(self) -> CheckpointData:
        """What a checkpoint of this run holds."""
        trainer = self.trainers["ours"]
        return CheckpointData(tensors=trainer.tensors(), state=trainer.state())


# ------------------------------------------------------------------------------------------ checkpoint


def lora_state(num_layers: int = 54) -> CheckpointData:
    """A LoRA run of HunyuanVideo-1.5 as it is saved: adapters, anchor, optimizer."""
    shapes = {name: p.shape for name, p in trainable_parameters(meta_transformer(num_layers, "lora")).items()}
    generator = torch.Generator().manual_seed(0)
    weights = {name: nn.Parameter(torch.randn(shape, generator=generator)) for name, shape in shapes.items()}
    for parameter in weights.values():
        parameter.grad = torch.ones_like(parameter)
    optimizer = OptimizerSet(weights, OptimizerConfig())
    optimizer.step()
    named: dict[Tensor, str] = {parameter: name for name, parameter in weights.items()}
    state = {
        f"{named[parameter]}.{key}": value
        for each in optimizer.optimizers
        for parameter, values in each.state.items()
        for key, value in values.items()
    }
    tensors: dict[str, Mapping[str, Tensor]] = {
        "weights": {name: p.detach() for name, p in weights.items()},
        "anchor": {name: p.detach().clone() for name, p in weights.items()},
        "optimizer": state,
    }
    return CheckpointData(tensors=tensors, state={})


def checkpoint_stall(name: str, data: CheckpointData, folder: Path, *, rounds: int) -> Record:
    """Time that a save takes, with the adapter once more for diffusers as a run has it: a row until training goes on in
    the background (ours) and in the foreground. `until_saved` is until the background's save is on disk.

    The folder decides which disk is measured.
    """

    def add_adapter(partial: Path) -> Callable[[], None]:
        copies = {name: tensor.cpu().clone() for name, tensor in data.tensors["weights"].items()}
        return lambda: save_file(copies, partial / "lora.safetensors")

    stalls: dict[str, list[float]] = {"foreground": [], "ours": []}
    until_saved: list[float] = []
    with tempfile.TemporaryDirectory(dir=folder) as root:
        writers = {way: CheckpointWriter(Path(root) / way, keep_last=1, asynchronous=way == "ours") for way in stalls}
        for number in range(rounds + 1):
            for way, writer in writers.items():
                start = time.perf_counter()
                saved = writer.save(number, data, extra=add_adapter)
                stall = time.perf_counter() - start
                writer.wait()
                if number:
                    stalls[way].append(stall)
                if number and way == "ours":
                    until_saved.append(time.perf_counter() - start)
        size = sum(path.stat().st_size for path in saved.rglob("*") if path.is_file())
        for writer in writers.values():
            writer.close()
    note = f"{size / 1e6:.0f} MB"
    rows = [timing("save", name, way, Quantiles.of(seconds), note=note) for way, seconds in stalls.items()]
    rows[1]["until_saved"] = vars(Quantiles.of(until_saved))
    return {"rows": rows, "file_bytes": size}


# ------------------------------------------------------------------------------------------ host


class HostContest:
    """A narrow transformer with all its blocks, and every contender's velocity of the same latents."""

    def __init__(self, device: torch.device, num_layers: int = 54) -> None:
        self.device, self.num_layers = device, num_layers
        self.config = HUNYUAN_VIDEO_15 | NARROW | {"num_layers": num_layers}
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.shape = SMOKE[1]
        self.transformer = random_transformer(self.config, device, self.dtype)
        self.inputs = random_inputs(self.shape, self.config, device, self.dtype)
        self.backend = attention_backend("auto", self.config, device, self.dtype)

    def run(self, contender: str, rounds: int) -> tuple[Tensor, Quantiles]:
        """A contender's velocity, and the seconds of a call."""
        inputs = self.inputs
        switch = peers.contender(contender, self.transformer, self.shape, self.backend, cast_adapters=False)
        with switch as velocity, torch.no_grad():
            found = velocity(inputs.latents, inputs.sigma, inputs.conditional)
            call = partial(velocity, inputs.latents, inputs.sigma, inputs.conditional)
            clock, empty_queue = processor_clock(self.device), partial(harness.wait, self.device)
            seconds = harness.measure(call, rounds=rounds, warmup=0, clock=clock, before=empty_queue)
        return found, seconds

    def check(self) -> Record:
        """Difference of every velocity from P2's."""
        expected = self.run("P2", 1)[0]
        errors = {name: relative_error(self.run(name, 1)[0], expected) for name in ("ours", "P1")}
        return verdict(errors, NARROW_PARITY[self.dtype])

    def measure(self, contender: str, rounds: int) -> Record:
        """The row of a contender."""
        seconds = self.run(contender, rounds)[1]
        what = "until the call returns" if self.device.type == "cuda" else "with its tiny arithmetic"
        return {"rows": [timing(f"forward of {self.num_layers} narrow blocks", "", contender, seconds, note=what)]}


# ------------------------------------------------------------------------------------------ cells


def toy_cells(session: Session) -> Iterator[Cell]:
    """The toy run and its checkpoint; it needs what reads configurations and videos."""
    contest = cache(lambda: ToyContest(SMALL_TOY if session.smoke else ()))
    yield Cell(suite="toy", name="parity", work=lambda: contest().check())
    rounds = 1 if session.smoke else 4
    yield Cell(suite="toy", name="iteration", work=lambda: contest().measure(rounds), needs=("toy parity",))

    def save() -> Record:
        rounds = 2 if session.smoke else 5
        return checkpoint_stall("toy run", contest().checkpoint(), _folder(session), rounds=rounds)

    yield Cell(suite="checkpoint", name="toy", work=save)


def checkpoint_cells(session: Session) -> Iterator[Cell]:
    """The checkpoint of a LoRA run."""

    def save() -> Record:
        layers, rounds = (1, 2) if session.smoke else (54, 3)
        return checkpoint_stall("LoRA run", lora_state(layers), _folder(session), rounds=rounds)

    yield Cell(suite="checkpoint", name="lora", work=save)


def host_cells(session: Session) -> Iterator[Cell]:
    """The host's share, behind a comparison of the velocities."""
    contest = cache(lambda: HostContest(session.device, 2 if session.smoke else 54))
    yield Cell(suite="host", name="parity", work=lambda: contest().check())
    for contender in ("P2", "ours", "P1"):

        def work(contender: str = contender) -> Record:
            return contest().measure(contender, 2 if session.smoke else 10)

        yield Cell(suite="host", name=contender, work=work, needs=("host parity",))


def _folder(session: Session) -> Path:
    return session.options.get("folder") or Path(tempfile.gettempdir())


BARE = (
    Suite(name="checkpoint", cells=checkpoint_cells, limit=25.0),
    Suite(name="host", cells=host_cells, limit=20.0),
)
"""What needs no more libraries than a bare machine has."""
SUITES = (Suite(name="toy", cells=toy_cells), *BARE)
