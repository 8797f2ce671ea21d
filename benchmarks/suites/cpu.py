"""The fused forward against diffusers' packed one on a CPU, in turns: what the guard times on every change.

    python -m benchmarks cpu            any machine, some twenty seconds on one core
    python -m benchmarks cpu --smoke    two rounds

Seconds of a CPU say nothing about a GPU. But a pass, a copy or a graph that an edit adds to our side moves the ratio of
the two contenders. Both compute on one thread and are timed by the clock of the process, so that other work of the
machine does not count: by the wall's clock and on every core a step took 24 ms, and 370 on a busy machine.
"""

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict
from functools import cache

import torch
from torch import Tensor

from benchmarks import peers, workload
from benchmarks.errors import pooled_error, verdict
from benchmarks.harness import Quantiles
from benchmarks.peers import Velocity
from benchmarks.results import Record
from benchmarks.session import Cell, Session, Suite, timing
from benchmarks.steps import forward, train
from sage_fast.kernels import REFERENCE
from sage_fast.policy.lora import trainable_parameters

SUITE = "cpu"
CONTENDERS = ("ours", "P2")
CONFIG = workload.TINY | {"num_attention_heads": 4, "attention_head_dim": 32, "rope_axes_dim": (8, 12, 12)}
SHAPE = workload.Shape(name="small", latent=(32, 3, 8, 8), text_tokens=32, padding=(32, 0, 0))
STEPS = {"forward": (forward, 120), "train": (train, 100)}
"""Step -> what it runs, and its rounds."""
TOLERANCE = 1e-4
"""Relative difference in float32."""


class Contest:
    """Both contenders over one small transformer in float32, with adapters."""

    def __init__(self) -> None:
        self.transformer = workload.random_transformer(CONFIG, torch.device("cpu"), torch.float32)
        workload.adapt(self.transformer)
        self.inputs = workload.random_inputs(SHAPE, CONFIG, torch.device("cpu"), torch.float32)

    def switch(self, contender: str) -> AbstractContextManager[Velocity]:
        """A contender, to be switched on by `with`."""
        return peers.contender(contender, self.transformer, SHAPE, "sdpa")

    def gradients(self, contender: str) -> dict[str, Tensor]:
        """Of the adapters, and the velocity."""
        with self.switch(contender) as velocity:
            found = velocity(self.inputs.latents, self.inputs.sigma, self.inputs.conditional)
            found.backward(self.inputs.noise)
        gradients = {name: p.grad for name, p in trainable_parameters(self.transformer).items() if p.grad is not None}
        self.transformer.zero_grad(set_to_none=True)
        return gradients | {"velocity": found.detach()}

    def check(self) -> Record:
        """Ours against P2's."""
        return verdict({"difference": pooled_error(self.gradients("ours"), self.gradients("P2"))}, TOLERANCE)

    def measure(self, step: str, smoke: bool) -> Record:
        """The rows of a step, its contenders in turns."""
        run, rounds = STEPS[step]
        seconds: dict[str, list[float]] = {contender: [] for contender in CONTENDERS}
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        for _ in range(2 if smoke else rounds):
            for contender, found in seconds.items():
                with self.switch(contender) as velocity:
                    run(velocity, self.inputs, REFERENCE)
                    start = time.process_time()
                    run(velocity, self.inputs, REFERENCE)
                    found.append(time.process_time() - start)
                self.transformer.zero_grad(set_to_none=True)
        torch.set_num_threads(threads)
        ours, peer = (seconds[contender] for contender in CONTENDERS)
        turns = Quantiles.of([mine / theirs for mine, theirs in zip(ours, peer, strict=True)])
        rows = [timing(step, SHAPE.name, who, Quantiles.of(found)) for who, found in seconds.items()]
        rows[0]["over"] = {CONTENDERS[1]: asdict(turns)}
        return {"rows": rows}


def cells(session: Session) -> Iterator[Cell]:
    """Parity, then forward and training step."""
    contest = cache(Contest)
    yield Cell(suite=SUITE, name="parity", work=lambda: contest().check())
    for step in STEPS:
        work = lambda step=step: contest().measure(step, session.smoke)  # noqa: E731
        yield Cell(suite=SUITE, name=f"{step} {SHAPE.name}", work=work, needs=(f"{SUITE} parity",))


SUITES = (Suite(name=SUITE, cells=cells),)
ON_CPU = True
