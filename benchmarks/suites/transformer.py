"""The transformer at full width, fused, against diffusers: forward, training step,
rollout step.

    python -m benchmarks transformer                 9 of 54 layers in bfloat16 on one GPU, shapes A and B
    python -m benchmarks transformer --budget 1500   more rounds of each measurement
    python -m benchmarks transformer --smoke         the same code anywhere on a tiny model; the numbers mean nothing

Parity comes first: on two layers of full width the fused forward may be no further from
float64 than `ALLOWED` times diffusers in the same type (P2 of `contenders.py`), in
velocities and in LoRA gradients. At the timed size, where float64 does not fit,
velocities and gradients must resemble P2's. What fails is not timed and has no ratio.

A ratio needs no depth, because all blocks but the last are alike. `iteration` has the
whole depth.

Where a kernel is wrong on this device (its own parity is red), the fused forward is
timed with the plain twin of that op, and its rows say so.
"""

import copy
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cache, partial

import torch
from diffusers import HunyuanVideo15Transformer3DModel
from torch import Tensor

from benchmarks import contenders, harness, results, shapes, workload
from benchmarks.contenders import Velocity
from benchmarks.errors import ALLOWED, SANE, pooled_error, relative_error, verdict
from benchmarks.results import Record
from benchmarks.session import Cell, Session, failure, timing
from benchmarks.steps import STEPS
from benchmarks.suites import attention, kernels
from benchmarks.workload import Inputs
from sage_fast.kernels import select_kernels
from sage_fast.models.hunyuan15.backbone import forward_work
from sage_fast.models.hunyuan15.backbone import velocity as diffusers_velocity
from sage_fast.models.stored import Checkpointing
from sage_fast.policy.lora import trainable_parameters
from sage_fast.records import PromptEmbeds

SUITE = "transformer"
LAYERS = 9
"""Of 54."""
RESEMBLES = 0.5
"""Relative difference from P2 at the timed size: bfloat16 through all blocks is well
below, and what has nothing to do with P2 is above 1.
"""
ROUNDS = 5
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
    def compared(self) -> tuple[str, str]:
        """(shape, step) of P2 that it is compared with. Rollouts have adapters and
        forwards have none, so their velocities are two different things.
        """
        return self.shape, "train" if self.trains else self.step


def _order() -> Iterator[Timed]:
    for shape in "BA":
        for contender in ("P2", "ours"):
            yield Timed(step="forward", shape=shape, contender=contender)
        yield Timed(step="train", shape=shape, contender="P2", checkpointing="full")
        for step in ("train", "single_pass"):
            yield Timed(
                step=step, shape=shape, contender="ours", checkpointing="selective"
            )
        yield Timed(step="forward", shape=shape, contender="P1")
    for shape in "BA":
        yield Timed(
            step="train_split", shape=shape, contender="ours", checkpointing="selective"
        )
        for contender in ("P2", "ours"):
            yield Timed(step="rollout", shape=shape, contender=contender)


ORDER = tuple(_order())
"""By value."""
COMPILED_ORDER = (
    Timed(step="forward", shape="B", contender="P2c"),
    Timed(step="train", shape="B", contender="P2c", checkpointing="full"),
    Timed(step="forward", shape="A", contender="P2c"),
)
"""Cells that Inductor takes minutes for."""


class Model:
    """The one transformer, which serves all contenders in turn, and what P2 computes
    with it.
    """

    def __init__(self, session: Session) -> None:
        self.session = session
        self.transformer: HunyuanVideo15Transformer3DModel | None = None
        self.expected: dict[tuple[str, str], dict[str, Tensor] | str] = {}
        """(shape, step) -> P2's velocity, or gradients, on the CPU; or why P2 has none.
        """
        self.config = workload.HUNYUAN_VIDEO_15 | {"num_layers": LAYERS}
        timed = shapes.SHAPES
        if session.smoke:
            self.config = workload.TINY
            timed = shapes.SMOKE
        self.shapes = {shape.name: shape for shape in timed}
        self.backend = attention.choose(session)
        self.reference_ops = kernels.red_ops(session.result)
        """Ops whose kernel is wrong on this device."""
        # P2c computes what P2 does, by a compiler.
        self.parity = {
            "P1": f"{SUITE} parity P1",
            "P2": f"{SUITE} parity P2",
            "P2c": f"{SUITE} parity P2",
            "ours": f"{SUITE} parity ours",
        }
        """Contender -> the check of what it runs."""

    def get(self, *, adapters: bool) -> HunyuanVideo15Transformer3DModel:
        """The transformer with LoRA adapters or without."""
        if self.transformer is None:
            self.transformer = workload.random_transformer(
                self.config, self.session.device, DTYPE
            )
        if adapters and not trainable_parameters(self.transformer):
            workload.adapt(self.transformer)
        elif not adapters and trainable_parameters(self.transformer):
            self.transformer.unload_lora()
        return self.transformer

    def switch(self, timed: Timed) -> AbstractContextManager[Velocity]:
        """The contender of a cell, to be switched on by `with`."""
        return contenders.contender(
            timed.contender,
            self.get(adapters=timed.step != "forward"),
            self.shapes[timed.shape],
            self.backend,
            checkpointing=timed.checkpointing,
            compiler="aot_eager" if self.session.smoke else "inductor",
            reference_ops=self.reference_ops,
        )

    def outcome(
        self, timed: Timed, velocity: Velocity, inputs: Inputs
    ) -> dict[str, Tensor]:
        """Computation of a cell: a velocity, or the gradients of a step that trains;
        kept where it is P2's.
        """
        if timed.trains:
            transformer = self.get(adapters=True)
            STEPS[timed.step](
                velocity, inputs, select_kernels("auto", self.session.device)
            )
            found = workload.take_gradients(transformer)
        else:
            with torch.no_grad():
                found = {
                    "velocity": velocity(
                        inputs.latents, inputs.sigma, inputs.conditional
                    )
                }
        if timed.contender == "P2":
            self.expected[timed.compared] = {
                name: value.float().cpu() for name, value in found.items()
            }
        return found

    def expect(self, timed: Timed, inputs: Inputs) -> None:
        """Have P2 compute what a cell is compared with, once per shape."""
        if timed.compared in self.expected:
            return
        kept: Checkpointing = "full" if timed.trains else "none"
        p2 = replace(timed, step=timed.compared[1], contender="P2", checkpointing=kept)
        try:
            with self.switch(p2) as velocity:
                self.outcome(p2, velocity, inputs)
        except Exception as error:  # noqa: BLE001  a peer fails alone; two layers have been compared with float64
            self.expected[timed.compared] = failure(error)
            harness.release(self.transformer)

    def measure(self, timed: Timed) -> Record:
        """The row of a cell."""
        shape = self.shapes[timed.shape]
        session = self.session
        inputs = workload.random_inputs(shape, self.config, session.device, DTYPE)
        try:
            if timed.contender != "P2":
                self.expect(timed, inputs)
            with self.switch(timed) as velocity:
                harness.forget_peak(session.device)
                found = self.outcome(timed, velocity, inputs)
                expected = self.expected[timed.compared]
                difference = (
                    None if isinstance(expected, str) else pooled_error(found, expected)
                )
                if difference is not None and not difference <= RESEMBLES:
                    # Whatever else this contender was timed with is worth nothing
                    # either.
                    reason = f"{timed.name} differs from P2 by {difference:.2g}"
                    session.cells[self.parity[timed.contender]] |= {
                        "passed": False,
                        "reason": reason,
                    }
                    return {"status": f"failed: {reason}"}
                step = partial(
                    STEPS[timed.step],
                    velocity,
                    inputs,
                    select_kernels("auto", session.device),
                )
                # The comparison has warmed up and compiled.
                seconds = session.time(step, rounds=ROUNDS, warmup=0)
                peak = harness.peak_memory_gb(session.device)
        finally:
            harness.release(self.transformer)
        work = forward_work(self.config, shape.video_tokens, shape.text_tokens)
        work = work.times(*workload.STEP_WORK[timed.step])
        notes = [f"keeps {timed.checkpointing}"] if timed.trains else []
        if timed.contender == "ours" and self.reference_ops:
            notes.append(f"without the kernels of {', '.join(self.reference_ops)}")
        if isinstance(expected, str):
            notes.append("not compared with P2 at this size")
        row = timing(
            timed.step,
            shape.name,
            timed.contender,
            seconds,
            peak_memory_gb=peak,
            note="; ".join(notes) or None,
            difference_from_p2=difference,
            attention=self.backend,
            layers=self.config["num_layers"],
            flop=work.total,
            linear_flop=work.linear,
            attention_flop=work.attention,
        )
        return {"rows": [row]}


class TwoLayers:
    """Two layers of full width with adapters, and their velocity and gradients in
    float64.
    """

    def __init__(self, model: Model) -> None:
        self.model = model
        session = model.session
        self.backend = model.backend
        self.shape = shapes.SMOKE[0] if session.smoke else shapes.PARITY
        self.transformer = workload.random_transformer(
            model.config | {"num_layers": 2}, session.device, DTYPE
        )
        workload.adapt(self.transformer)
        self.inputs = workload.random_inputs(
            self.shape, model.config, session.device, DTYPE
        )
        wide = copy.deepcopy(self.transformer).double()
        given = self.inputs.conditional
        prompt = PromptEmbeds(text=given.text.double(), glyph=given.glyph.double())
        velocity = diffusers_velocity(
            wide, self.inputs.latents.double(), self.inputs.sigma, [prompt]
        )
        velocity.backward(self.inputs.noise.double())
        self.velocity = velocity.detach()
        self.gradients = workload.take_gradients(wide)
        assert len(self.gradients) == len(trainable_parameters(wide))

    def errors(self, contender: str, checkpointing: Checkpointing) -> dict[str, float]:
        """Relative errors of a contender's velocity and gradient; P1 is timed without
        gradients.
        """
        trains = contender != "P1"
        switch = contenders.contender(
            contender,
            self.transformer,
            self.shape,
            self.backend,
            checkpointing=checkpointing,
            cast_adapters=False,
            reference_ops=self.model.reference_ops,
        )
        with switch as velocity, torch.set_grad_enabled(trains):
            out = velocity(
                self.inputs.latents, self.inputs.sigma, self.inputs.conditional
            )
            if trains:
                out.backward(self.inputs.noise)
        gradients = workload.take_gradients(self.transformer)
        found = {"velocity": relative_error(out.detach(), self.velocity)}
        if trains:
            found["gradient"] = pooled_error(gradients, self.gradients)
        return found

    def check(self, contender: str) -> Record:
        """The verdict on a contender: P2's errors are the yardstick of the others;
        where P2 has failed, they are judged by the bound that P2 is judged by. Ours is
        compared in both ways of keeping activations that are timed, and the worse one
        counts.
        """
        errors = self.errors(contender, "none")
        if contender == "ours":
            kept = self.errors(contender, "selective")
            errors = {kind: max(error, kept[kind]) for kind, error in errors.items()}
        result = self.model.session.result
        p2 = self.model.parity["P2"]
        if contender == "P2" or not results.passed(result, p2):
            return verdict(errors, SANE)
        return verdict(
            errors,
            {kind: ALLOWED * result["cells"][p2]["errors"][kind] for kind in errors},
        )


def cells(session: Session) -> Iterator[Cell]:
    """Parity of every contender, then the measurements."""
    yield from cells_of(session, ORDER)


def compiled_cells(session: Session) -> Iterator[Cell]:
    """Parity, then what Inductor takes minutes for."""
    yield from cells_of(session, COMPILED_ORDER)


def cells_of(session: Session, order: Sequence[Timed]) -> Iterator[Cell]:
    """Parity of every contender, then the measurements of an order."""
    model = Model(session)
    layers = cache(lambda: TwoLayers(model))

    def parity(contender: str) -> Record:
        return layers().check(contender)

    for contender in ("P2", "P1", "ours"):
        yield Cell(
            suite=SUITE, name=f"parity {contender}", work=partial(parity, contender)
        )
    layers.cache_clear()
    harness.release()
    for timed in order:
        yield Cell(
            suite=SUITE,
            name=timed.name,
            work=partial(model.measure, timed),
            needs=(model.parity[timed.contender],),
        )
