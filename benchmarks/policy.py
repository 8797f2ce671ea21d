"""The full-size transformer, fused, against diffusers: forward, training step, rollout step, attention backends.

    python -m benchmarks policy                 8.3 B random weights in bfloat16 on one GPU, shapes A and B
    python -m benchmarks policy --budget 1500   more rounds of each measurement
    python -m benchmarks policy --smoke         the same code anywhere on a tiny model; the numbers mean nothing

Parity comes first: on two layers of full width the fused forward may be no further from float64 than `ALLOWED` times
diffusers in the same type (P2 of `peers.py`), in velocities and in LoRA gradients. What fails is not timed and has no
ratio in the table, and the exit status is 1. Measurements are made one after the other on a single model, most valuable
first, each within its share of the budget; the JSON file is written again after each.
"""

import argparse
import copy
import gc
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from diffusers import HunyuanVideo15Transformer3DModel
from torch import Tensor

import benchmarks  # noqa: F401  first, because it decides where kernels run
from benchmarks import attention, harness, peers, policy_report
from benchmarks.attention import WORST, relative_error
from benchmarks.peers import Velocity
from benchmarks.steps import STEPS
from benchmarks.workload import (
    HUNYUAN_VIDEO_15,
    PARITY,
    SHAPES,
    SMOKE,
    STEP_WORK,
    TINY,
    Inputs,
    forward_work,
    random_inputs,
    random_transformer,
)
from sage_fast.config.schema import LoraConfig
from sage_fast.kernels import Kernels, select_kernels
from sage_fast.models.attention.attention import resolve_backend
from sage_fast.models.hunyuan15.velocity import velocity as diffusers_velocity
from sage_fast.models.transformer import Checkpointing
from sage_fast.policy.lora import add_lora, trainable_parameters
from sage_fast.records import PromptEmbeds

ALLOWED = 1.25
"""Error of a contender over P2's error, both against float64."""
FULL_DEPTH = 0.5
"""Relative difference from P2 at full size, where float64 does not fit: bfloat16 through 54 blocks is well below, and
what has nothing to do with P2 is above 1."""
SANE = 0.05
"""Error that P2 itself may have."""
ROUNDS, FEWEST_ROUNDS, CELL_SHARE = 12, 3, 1 / 24
"""Most timed rounds of a measurement, the least where the budget allows, and the share of the budget for the rest."""
COMPILATION_SECONDS = {"forward": 60.0, "train": 180.0}
"""Blocks share one compilation; with adapters and gradients the first and the last block need their own."""
ASSUMED_MFU = 0.35
"""For the guess whether a measurement still fits."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One measurement: a step of a contender at a shape.

    Example:
        >>> Cell(step="train", shape="B", contender="P2", checkpointing="full").name
        'train B P2'
    """

    step: str
    """A key of `STEP_WORK`."""
    shape: str
    contender: str
    """ours, P1, P2 or P2c."""
    checkpointing: Checkpointing = "none"

    @property
    def name(self) -> str:
        return f"{self.step} {self.shape} {self.contender}"

    @property
    def trains(self) -> bool:
        return self.step not in ("forward", "rollout")


def _cells() -> list[Cell]:
    both = ("B", "A")
    cells = [Cell(step="forward", shape=s, contender=c) for s in both for c in ("P2", "ours")]
    for shape in both:
        cells.append(Cell(step="train", shape=shape, contender="P2", checkpointing="full"))
        cells.append(Cell(step="train", shape=shape, contender="ours", checkpointing="selective"))
    cells += [Cell(step="forward", shape="B", contender=c) for c in ("P1", "P2c")]
    cells += [Cell(step="rollout", shape=s, contender=c) for s in both for c in ("P2", "ours")]
    for step in ("train_split", "single_pass"):
        cells += [Cell(step=step, shape=s, contender="ours", checkpointing="selective") for s in both]
    cells.append(Cell(step="train", shape="B", contender="P2c", checkpointing="full"))
    cells += [Cell(step="forward", shape="A", contender=c) for c in ("P1", "P2c")]
    return cells


CELLS = _cells()
"""In the order of their value."""


@dataclass(kw_only=True)
class PolicyRun:
    """What is measured, what is known so far, how much time is left."""

    device: torch.device
    smoke: bool
    budget: float
    """Seconds from the start, after which nothing new begins."""
    save: Callable[[dict[str, Any]], None]
    """Called with the result whenever it has grown."""
    attention: str = "auto"
    cells: Sequence[Cell] = field(default_factory=lambda: CELLS)
    result: dict[str, Any] = field(default_factory=dict)
    started: float = field(default_factory=time.monotonic)
    transformer: HunyuanVideo15Transformer3DModel | None = None
    _expected: dict[tuple[str, bool], dict[str, Tensor]] = field(default_factory=dict)
    """(shape, whether it trains) -> P2's velocity, or gradient, on the CPU."""

    def __post_init__(self) -> None:
        self.config = TINY if self.smoke else HUNYUAN_VIDEO_15
        self.shapes = {shape.name: shape for shape in (SMOKE if self.smoke else SHAPES)}
        self.dtype = torch.bfloat16
        self.backend = resolve_backend(
            self.attention,
            device=self.device,
            dtype=self.dtype,
            head_dim=self.config["attention_head_dim"],
            deterministic=False,
        )
        self.result |= {"attention_backend": self.backend, "policy_failures": {}}
        self.result.setdefault("policy_cells", {})

    @property
    def left(self) -> float:
        """Seconds of the budget that are left."""
        return self.budget - (time.monotonic() - self.started)

    @property
    def red(self) -> dict[str, str]:
        """Contender -> what its parity check found."""
        failures: dict[str, str] = self.result["policy_failures"]
        return failures

    def say(self, text: str) -> None:
        print(f"[{self.budget - self.left:5.0f} s] {text}", flush=True)

    def model(self, *, adapters: bool) -> HunyuanVideo15Transformer3DModel:
        """The one transformer, with LoRA adapters or without."""
        if self.transformer is None:
            self.transformer = random_transformer(self.config, self.device, self.dtype)
        if adapters and not trainable_parameters(self.transformer):
            adapt(self.transformer)
        elif not adapters and trainable_parameters(self.transformer):
            self.transformer.unload_lora()
        return self.transformer

    def contender(self, transformer: HunyuanVideo15Transformer3DModel, cell: Cell) -> AbstractContextManager[Velocity]:
        """A contender, to be switched on by `with`."""
        if cell.contender == "ours":
            return peers.fused(transformer, backend=self.backend, checkpointing=cell.checkpointing)
        if cell.contender == "P1":
            return peers.padded(transformer, self.shapes[cell.shape])
        compiler = "aot_eager" if self.smoke else "inductor"
        return peers.packed(
            transformer,
            backend=self.backend,
            checkpointing=cell.checkpointing == "full",
            compiler=compiler if cell.contender == "P2c" else None,
        )

    def measure_cell(self, cell: Cell) -> dict[str, Any]:
        """Measure one cell: {"status": "done", "seconds", ...}, or a status that says why there is nothing."""
        work = forward_work(self.config, self.shapes[cell.shape]).times(*STEP_WORK[cell.step])
        expected = 4 * work.total / (ASSUMED_MFU * self.result["matmul"]["tflop_per_s"] * 1e12)
        expected += self._compilation(cell)
        if cell.contender in self.red:
            return {"status": "skipped: its parity failed"}
        if self.left < expected:
            return {"status": f"skipped: it takes about {expected:.0f} s and {max(self.left, 0):.0f} s are left"}
        self.say(cell.name)
        try:
            found = self._measure(cell)
        except harness.FAILURES as error:
            kind = "out of memory" if isinstance(error, torch.OutOfMemoryError) else f"failed: {type(error).__name__}"
            found = {"status": f"{kind}: {str(error).strip().splitlines()[0] if str(error) else ''}"}
        harness.reset_clock()
        release(self.transformer)
        return found | {"tflop": work.total / 1e12, "linear_tflop": work.linear / 1e12}

    def _measure(self, cell: Cell) -> dict[str, Any]:
        shape = self.shapes[cell.shape]
        transformer = self.model(adapters=cell.step != "forward")
        inputs = random_inputs(shape, self.config, self.device, self.dtype)
        limit = self.budget * CELL_SHARE
        cuda = self.device.type == "cuda"
        found: dict[str, Any] = {"checkpointing": cell.checkpointing}
        with self.contender(transformer, cell) as velocity:
            if cuda:
                torch.cuda.reset_peak_memory_stats()
            began = time.monotonic()
            found["difference_from_p2"] = difference = self._difference(cell, velocity, inputs, transformer)
            if difference is not None and not difference <= FULL_DEPTH:
                self.red[cell.contender] = f"{cell.name} differs from P2 by {difference:.2g}"
                return found | {"status": f"failed: {self.red[cell.contender]}"}
            call = partial(STEPS[cell.step], velocity, inputs, self.step_kernels())
            if time.monotonic() - began < limit / ROUNDS:
                call()
            seconds = rounds_within(call, 2 if self.smoke else ROUNDS, limit=limit, left=self.left)
            found |= {"status": "done", "seconds": asdict(seconds)}
        if cuda:
            found["peak_memory_gb"] = torch.cuda.max_memory_allocated() / 1e9
        work = forward_work(self.config, shape).times(*STEP_WORK[cell.step])
        found["tflop_per_s"] = work.total / seconds.median / 1e12
        found["mfu"] = found["tflop_per_s"] / self.result["matmul"]["tflop_per_s"]
        return found

    def _difference(
        self, cell: Cell, velocity: Velocity, inputs: Inputs, transformer: HunyuanVideo15Transformer3DModel
    ) -> float | None:
        """Run a cell for the first time and compare it with P2, which comes first in the order of the cells.

        A forward is compared by its velocity, a step that trains by its gradients; None where P2 has not run.
        """
        given: dict[str, Tensor | None]
        if cell.trains:
            STEPS[cell.step](velocity, inputs, self.step_kernels())
            given = {name: p.grad for name, p in trainable_parameters(transformer).items()}
            transformer.zero_grad(set_to_none=True)
        else:
            with torch.no_grad():
                given = {"velocity": velocity(inputs.latents, inputs.sigma, inputs.conditional)}
        # Rollouts have adapters, forwards have none, so their velocities are two different things.
        if cell.step == "rollout":
            return None
        key = cell.shape, cell.trains
        if cell.contender == "P2":
            self._expected[key] = {name: value.float().cpu() for name, value in given.items() if value is not None}
        return pooled_error(given, self._expected[key]) if key in self._expected else None

    def _compilation(self, cell: Cell) -> float:
        return COMPILATION_SECONDS[cell.step] if cell.contender == "P2c" and not self.smoke else 0.0

    def step_kernels(self) -> Kernels:
        """The sampler's step as a run computes it."""
        return select_kernels("auto", self.device)


def adapt(transformer: HunyuanVideo15Transformer3DModel) -> None:
    """Add the default LoRA adapters, with weights that are not zero: zero ones would hide half of the gradients."""
    defaults = LoraConfig()
    add_lora(transformer, rank=defaults.rank, alpha=defaults.alpha, target_modules=defaults.target_modules, seed=0)
    generator = torch.Generator(transformer.device).manual_seed(1)
    with torch.no_grad():
        for name, parameter in trainable_parameters(transformer).items():
            if "lora_B" in name:
                parameter.normal_(0.0, 0.02, generator=generator)


def release(transformer: torch.nn.Module | None) -> None:
    """Give memory back to the device, gradients included."""
    if transformer is not None:
        transformer.zero_grad(set_to_none=True)
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def rounds_within(call: Callable[[], object], rounds: int, *, limit: float, left: float) -> harness.Quantiles:
    """Seconds of a call that has run once already, over at most `rounds` rounds.

    There are fewer when they would take more than `limit` seconds in all, but `FEWEST_ROUNDS` as long as these end
    within `left` seconds, and one in any case.
    """
    began = time.monotonic()
    seconds: list[float] = []
    while len(seconds) < rounds:
        after = time.monotonic() - began + (seconds[-1] if seconds else 0.0)
        if seconds and after > (left if len(seconds) < FEWEST_ROUNDS else limit):
            break
        start = harness.device_clock()
        call()
        seconds.append(harness.device_clock() - start)
    return harness.Quantiles.of(seconds)


def ceiling_stage(run: PolicyRun) -> None:
    """Rate of a large matrix product, the denominator of every MFU; taken from the result where it is known."""
    if "matmul" not in run.result:
        run.result["matmul"] = harness.matmul_peak(run.device, smoke=run.smoke)


def parity_stage(run: PolicyRun) -> None:
    """Velocities and LoRA gradients on two layers of full width, all against the same in float64."""
    shape = SMOKE[1] if run.smoke else PARITY
    transformer = random_transformer(run.config | {"num_layers": 2}, run.device, run.dtype)
    adapt(transformer)
    inputs = random_inputs(shape, run.config, run.device, run.dtype)
    wide = copy.deepcopy(transformer).double()
    prompt = PromptEmbeds(text=inputs.conditional.text.double(), glyph=inputs.conditional.glyph.double())
    oracle = diffusers_velocity(wide, inputs.latents.double(), inputs.sigma, [prompt])
    oracle.backward(inputs.noise.double())
    exact_gradients = {name: p.grad for name, p in trainable_parameters(wide).items() if p.grad is not None}
    assert len(exact_gradients) == len(trainable_parameters(wide))

    candidates: dict[str, AbstractContextManager[Velocity]] = {
        "P2": peers.packed(transformer, backend=run.backend, cast_adapters=False),
        "P1": peers.padded(transformer, shape),
    }
    modes: tuple[Checkpointing, ...] = ("none", "selective")
    for checkpointing in modes:
        candidates[f"ours {checkpointing}"] = peers.fused(transformer, backend=run.backend, checkpointing=checkpointing)
    errors: dict[str, Any] = {}
    for name, candidate in candidates.items():
        contender = name.split()[0]
        # P1 is timed without gradients.
        trains = contender != "P1"
        try:
            with candidate as velocity, torch.set_grad_enabled(trains):
                out = velocity(inputs.latents, inputs.sigma, inputs.conditional)
                if trains:
                    out.backward(inputs.noise)
        except harness.FAILURES as error:
            run.red[contender] = f"{name}: {type(error).__name__}: {error}"
            errors[name] = {"status": run.red[contender]}
            continue
        finally:
            gradients = {n: p.grad for n, p in trainable_parameters(transformer).items()}
            transformer.zero_grad(set_to_none=True)
        errors[name] = {"velocity": relative_error(out.detach(), oracle.detach())}
        if trains:
            errors[name]["gradient"] = pooled_error(gradients, exact_gradients)
        bounds = {kind: SANE for kind in errors[name]}
        if name != "P2" and "velocity" in errors["P2"]:
            bounds = {kind: ALLOWED * errors["P2"][kind] for kind in errors[name]}
        errors[name]["bounds"] = bounds
        for kind, bound in bounds.items():
            if not errors[name][kind] <= bound:
                run.red[contender] = f"{name}: relative error of the {kind} {errors[name][kind]:.3g} > {bound:.3g}"
    run.result["policy_parity"] = errors


def pooled_error(given: Mapping[str, Tensor | None], exact: Mapping[str, Tensor]) -> float:
    """Root mean square of the relative errors of all tensors; `WORST` where one is missing."""
    squares = []
    for name, oracle in exact.items():
        value = given.get(name)
        if value is None:
            return WORST
        squares.append(relative_error(value, oracle.to(value.device).double()) ** 2)
    return float((sum(squares) / len(squares)) ** 0.5)


def attention_stage(run: PolicyRun) -> None:
    """Every backend that runs here, compared and timed."""
    head_dim = run.config["attention_head_dim"]
    checked = attention.check(run.device, run.dtype, head_dim)
    rows: list[dict[str, Any]] = []
    run.result |= {"attention": checked, "attention_rows": rows}
    for shape in reversed(run.shapes.values()):
        for backend, found in checked.items():
            if not found.get("passed") or (backend == attention.PLAIN and not run.smoke):
                continue
            try:
                rows += attention.time_backend(
                    backend, shape, run.config, run.device, run.dtype, rounds=2 if run.smoke else 10
                )
            except harness.FAILURES as error:
                found["status"] = f"failed at shape {shape.name}: {type(error).__name__}: {error}"
            harness.reset_clock()
            release(None)


def cells_stage(run: PolicyRun) -> None:
    """The measurements at full size, in the order of their value, less those that an earlier run has made."""
    for cell in run.cells:
        if run.result["policy_cells"].get(cell.name, {}).get("status") == "done":
            continue
        run.result["policy_cells"][cell.name] = run.measure_cell(cell)
        run.save(run.result)


STAGES: dict[str, Callable[[PolicyRun], None]] = {
    "ceiling": ceiling_stage,
    "policy parity": parity_stage,
    "attention": attention_stage,
    "policy": cells_stage,
}


def run_stages(run: PolicyRun) -> dict[str, Any]:
    """All stages; the result is saved after each and returned."""
    for name, work in STAGES.items():
        if run.left <= 0:
            run.result.setdefault("policy_skipped", []).append(name)
        else:
            run.say(name)
            work(run)
            release(run.transformer)
        run.save(run.result)
    run.transformer = None
    release(None)
    run.result["policy_goals"] = policy_report.goal_records(run.result)
    run.save(run.result)
    return run.result


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns 1 when a parity check or a measurement failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks policy", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--smoke", action="store_true", help="a tiny model and few rounds; runs without a GPU")
    parser.add_argument("--budget", type=float, default=540.0, help="seconds after which no measurement starts")
    parser.add_argument("--attention", default="auto", help="backend of the fused forward and of its peers")
    parser.add_argument(
        "--output", type=Path, help="JSON file; default benchmarks/results/<gpu>/<date>-<commit>-policy.json"
    )
    options = parser.parse_args(argv)
    if not torch.cuda.is_available() and not options.smoke:
        sys.exit("There is no CUDA device here: run with --smoke, or on a machine with a GPU.")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    environment = harness.environment()
    path = options.output
    if path is None and not options.smoke:
        path = harness.result_file(environment)
        path = path.with_name(f"{path.stem}-policy.json")

    def save(result: dict[str, Any]) -> None:
        if path is not None:
            harness.write_result(path, result)

    run = PolicyRun(device=device, smoke=options.smoke, budget=options.budget, save=save, attention=options.attention)
    run.result |= {"environment": environment, "smoke": run.smoke}
    result = run_stages(run)
    print(policy_report.table(result, smoke=run.smoke))
    if path is not None:
        print(f"written to {path}")
    return 0 if policy_report.succeeded(result) else 1


if __name__ == "__main__":
    sys.exit(main())
