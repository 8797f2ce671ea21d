"""The full-size transformer, fused, against diffusers: forward, training step, rollout step.

    python -m benchmarks transformer                 8.3 B random weights in bfloat16 on one GPU, shapes A and B
    python -m benchmarks transformer --budget 1500   more rounds of each measurement
    python -m benchmarks transformer --smoke         the same code anywhere on a tiny model; the numbers mean nothing

Parity comes first: on two layers of full width the fused forward may be no further from float64 than `ALLOWED` times
diffusers in the same type (P2 of `peers.py`), in velocities and in LoRA gradients. At full size, where float64 does not
fit, velocities and gradients must resemble P2's. What fails is not timed and has no ratio.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cache, partial

import torch
from diffusers import HunyuanVideo15Transformer3DModel
from torch import Tensor

from benchmarks import harness, peers, workload
from benchmarks.errors import against_p2, pooled_error, relative_error
from benchmarks.peers import Velocity
from benchmarks.results import Record
from benchmarks.session import Cell, Session, Suite, peer_parity, timing
from benchmarks.steps import STEPS
from benchmarks.suites import attention
from benchmarks.workload import Inputs
from sage_fast.kernels import select_kernels
from sage_fast.models.hunyuan15.velocity import velocity as diffusers_velocity
from sage_fast.models.transformer import Checkpointing
from sage_fast.policy.lora import trainable_parameters

SUITE = "transformer"
FULL_DEPTH = 0.5
"""Relative difference from P2 at full size: bfloat16 through 54 blocks is well below, and what has nothing to do with
P2 is above 1."""
ROUNDS = 12
COMPILATION_SECONDS = {"forward": 60.0, "train": 180.0}
"""Blocks share one compilation; with adapters and gradients the first and the last block need their own."""
DTYPE = torch.bfloat16


@dataclass(frozen=True, kw_only=True)
class Timed:
    """A step of a contender at a shape.

    Example:
        >>> Timed(step="train", shape="B", contender="P2", checkpointing="full").name
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

    @property
    def needs(self) -> tuple[str, ...]:
        """The parity check of what runs; P2c computes what P2 does, by a compiler."""
        return (f"{SUITE} parity {self.contender.removesuffix('c')}",)


def _order() -> Iterator[Timed]:
    for shape in "BA":
        for contender in ("P2", "ours"):
            yield Timed(step="forward", shape=shape, contender=contender)
    for shape in "BA":
        yield Timed(step="train", shape=shape, contender="P2", checkpointing="full")
        yield Timed(step="train", shape=shape, contender="ours", checkpointing="selective")
    for contender in ("P1", "P2c"):
        yield Timed(step="forward", shape="B", contender=contender)
    for shape in "BA":
        for contender in ("P2", "ours"):
            yield Timed(step="rollout", shape=shape, contender=contender)
    for step in ("train_split", "single_pass"):
        for shape in "BA":
            yield Timed(step=step, shape=shape, contender="ours", checkpointing="selective")
    yield Timed(step="train", shape="B", contender="P2c", checkpointing="full")
    for contender in ("P1", "P2c"):
        yield Timed(step="forward", shape="A", contender=contender)


ORDER = tuple(_order())
"""By value."""


@dataclass(kw_only=True)
class Model:
    """The one transformer of full size, which serves all contenders in turn, and what P2 computes with it."""

    session: Session
    transformer: HunyuanVideo15Transformer3DModel | None = None
    expected: dict[tuple[str, str], dict[str, Tensor]] = field(default_factory=dict)
    """(shape, step) -> P2's velocity, or gradients, on the CPU."""

    def __post_init__(self) -> None:
        smoke, device = self.session.smoke, self.session.device
        self.config = workload.TINY if smoke else workload.HUNYUAN_VIDEO_15
        self.shapes = {shape.name: shape for shape in (workload.SMOKE if smoke else workload.SHAPES)}
        self.backend = workload.attention_backend(
            self.session.options.get("attention", "auto"), self.config, device, DTYPE
        )

    def get(self, *, adapters: bool) -> HunyuanVideo15Transformer3DModel:
        """The transformer with LoRA adapters or without."""
        if self.transformer is None:
            self.transformer = workload.random_transformer(self.config, self.session.device, DTYPE)
        if adapters and not trainable_parameters(self.transformer):
            workload.adapt(self.transformer)
        elif not adapters and trainable_parameters(self.transformer):
            self.transformer.unload_lora()
        return self.transformer

    def seconds(self, timed: Timed) -> float:
        """A guess of what a cell takes."""
        work = workload.forward_work(self.config, self.shapes[timed.shape]).times(*workload.STEP_WORK[timed.step])
        compiling = COMPILATION_SECONDS[timed.step] if timed.contender == "P2c" and not self.session.smoke else 0.0
        return self.session.guess(work.total) + compiling

    def switch(self, timed: Timed) -> AbstractContextManager[Velocity]:
        """The contender of a cell, to be switched on by `with`."""
        return peers.contender(
            timed.contender,
            self.get(adapters=timed.step != "forward"),
            self.shapes[timed.shape],
            self.backend,
            checkpointing=timed.checkpointing,
            compiler="aot_eager" if self.session.smoke else "inductor",
        )

    def outcome(self, timed: Timed, velocity: Velocity, inputs: Inputs) -> dict[str, Tensor | None]:
        """What a cell computes: a velocity, or the gradients of a step that trains."""
        if not timed.trains:
            with torch.no_grad():
                return {"velocity": velocity(inputs.latents, inputs.sigma, inputs.conditional)}
        transformer = self.get(adapters=True)
        STEPS[timed.step](velocity, inputs, select_kernels("auto", self.session.device))
        gradients = {name: p.grad for name, p in trainable_parameters(transformer).items()}
        transformer.zero_grad(set_to_none=True)
        return gradients

    def expect(self, timed: Timed, inputs: Inputs) -> dict[str, Tensor]:
        """What P2 computes for a cell, on the CPU; computed once per shape."""
        # Rollouts have adapters and forwards have none, so their velocities are two different things.
        key = timed.shape, "train" if timed.trains else timed.step
        if key not in self.expected:
            kept: Checkpointing = "full" if timed.trains else "none"
            p2 = replace(timed, step=key[1], contender="P2", checkpointing=kept)
            with self.switch(p2) as velocity:
                found = self.outcome(p2, velocity, inputs)
            self.expected[key] = {name: value.float().cpu() for name, value in found.items() if value is not None}
        return self.expected[key]

    def measure(self, timed: Timed) -> Record:
        """The row of a cell."""
        shape, session = self.shapes[timed.shape], self.session
        inputs = workload.random_inputs(shape, self.config, session.device, DTYPE)
        try:
            expected = self.expect(timed, inputs)
            with self.switch(timed) as velocity:
                harness.forget_peak(session.device)
                difference = pooled_error(self.outcome(timed, velocity, inputs), expected)
                if not difference <= FULL_DEPTH:
                    # Whatever else this contender was timed with is worth nothing either.
                    reason = f"{timed.name} differs from P2 by {difference:.2g}"
                    session.cells[timed.needs[0]] |= {"passed": False, "reason": reason}
                    return {"status": f"failed: {reason}"}
                step = partial(STEPS[timed.step], velocity, inputs, select_kernels("auto", session.device))
                seconds = session.time(step, rounds=ROUNDS)
                peak = harness.peak_memory_gb(session.device)
        finally:
            harness.release(self.transformer)
        work = workload.forward_work(self.config, shape).times(*workload.STEP_WORK[timed.step])
        keeps = f"keeps {timed.checkpointing}" if timed.trains else None
        row = timing(timed.step, shape.name, timed.contender, seconds, flop=work.total, peak_memory_gb=peak, note=keeps)
        return {"rows": [row | {"difference_from_p2": difference, "attention": self.backend}]}


class TwoLayers:
    """Two layers of full width with adapters, and their velocity and gradients in float64."""

    def __init__(self, model: Model) -> None:
        session = model.session
        self.backend, self.shape = model.backend, workload.SMOKE[1] if session.smoke else workload.PARITY
        self.transformer = workload.random_transformer(model.config | {"num_layers": 2}, session.device, DTYPE)
        workload.adapt(self.transformer)
        self.inputs = workload.random_inputs(self.shape, model.config, session.device, DTYPE)
        wide, inputs = workload.oracle_of(self.transformer, self.inputs)
        velocity = diffusers_velocity(wide, inputs.latents, inputs.sigma, [inputs.conditional])
        velocity.backward(inputs.noise)
        self.velocity = velocity.detach()
        self.gradients = {name: p.grad for name, p in trainable_parameters(wide).items() if p.grad is not None}
        assert len(self.gradients) == len(trainable_parameters(wide))

    def errors(self, contender: str, checkpointing: Checkpointing) -> dict[str, float]:
        """Relative errors of a contender's velocity and gradient; P1 is timed without gradients."""
        trains = contender != "P1"
        switch = peers.contender(
            contender, self.transformer, self.shape, self.backend, checkpointing=checkpointing, cast_adapters=False
        )
        with switch as velocity, torch.set_grad_enabled(trains):
            out = velocity(self.inputs.latents, self.inputs.sigma, self.inputs.conditional)
            if trains:
                out.backward(self.inputs.noise)
        gradients = {name: p.grad for name, p in trainable_parameters(self.transformer).items()}
        self.transformer.zero_grad(set_to_none=True)
        found = {"velocity": relative_error(out.detach(), self.velocity)}
        return found | ({"gradient": pooled_error(gradients, self.gradients)} if trains else {})

    def check(self, contender: str, p2: dict[str, float] | None) -> Record:
        """The verdict on a contender. Ours is compared in both ways of keeping activations that are timed, and the
        worse one counts.
        """
        errors = self.errors(contender, "none")
        if contender == "ours":
            kept = self.errors(contender, "selective")
            errors = {kind: max(error, kept[kind]) for kind, error in errors.items()}
        return against_p2(errors, p2)


def cells(session: Session) -> Iterator[Cell]:
    """Parity of every contender, then the measurements at full size."""
    model = Model(session=session)
    layers = cache(lambda: TwoLayers(model))
    yield from peer_parity(session, SUITE, lambda contender, p2: layers().check(contender, p2))
    layers.cache_clear()
    harness.release()
    for timed in ORDER:
        yield Cell(
            suite=SUITE,
            name=timed.name,
            work=partial(model.measure, timed),
            needs=timed.needs,
            seconds=model.seconds(timed),
        )


SUITES: tuple[Suite, ...] = (Suite(name=SUITE, cells=cells, limit=230.0), *attention.SUITES)
