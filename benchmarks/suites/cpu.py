"""On a CPU and in turns, what the guard times on every change: the fused forward
against diffusers' packed one, and an iteration of the single pass against one of two
phases.

    python -m benchmarks cpu            any machine, some forty seconds on one core
    python -m benchmarks cpu --smoke    two rounds

Seconds of a CPU say nothing about a GPU. But a pass, a copy or a graph that an edit
adds to our side moves the ratio of the two contenders. Both compute on one thread and
are timed by the clock of the process, so that other work of the machine does not count:
by the wall's clock and on every core a step took 24 ms, and 370 on a busy machine.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from benchmarks import contenders, workload
from benchmarks.contenders import Velocity
from benchmarks.errors import pooled_error, verdict
from benchmarks.harness import quantiles
from benchmarks.results import Record
from benchmarks.session import Cell, Session, timing
from benchmarks.shapes import Shape
from benchmarks.steps import forward, train
from sage_fast.kernels import REFERENCE
from sage_fast.models.family import Components
from sage_fast.models.toy.components import TRANSFORMER_CONFIG, PatchCodec, WordEncoder
from sage_fast.rewards.composite import CompositeReward
from sage_fast.run.prompt_files import read_prompts
from sage_fast.trainer import Trainer

SUITE = "cpu"
CONTENDERS = ("ours", "P2")
CONFIG = workload.TINY | {
    "num_attention_heads": 4,
    "attention_head_dim": 32,
    "rope_axes_dim": (8, 12, 12),
}
SHAPE = Shape(name="small", latent=(32, 3, 8, 8), text_tokens=32, padding=(32, 0, 0))
STEPS = {"forward": (forward, 120), "train": (train, 100)}
"""Step -> what it runs, and its rounds."""
UPDATES = {"toy": (6, 3, 8, 10), "wide": (18, 9, 2, 4)}
"""Network -> heads of 32, layers, videos at once, rounds: the demo's, and one of three
times its width.
"""
TOLERANCE = 1e-4
"""Relative difference in float32."""


class Contest:
    """Both contenders over one small transformer in float32, with adapters."""

    def __init__(self) -> None:
        self.transformer = workload.random_transformer(
            CONFIG, torch.device("cpu"), torch.float32
        )
        workload.adapt(self.transformer)
        self.inputs = workload.random_inputs(
            SHAPE, CONFIG, torch.device("cpu"), torch.float32
        )

    def switch(self, contender: str) -> AbstractContextManager[Velocity]:
        """A contender, to be switched on by `with`."""
        return contenders.contender(contender, self.transformer, SHAPE, "sdpa")

    def gradients(self, contender: str) -> dict[str, Tensor]:
        """Of the adapters, and the velocity."""
        with self.switch(contender) as velocity:
            found = velocity(
                self.inputs.latents, self.inputs.sigma, self.inputs.conditional
            )
            found.backward(self.inputs.noise)
            # a peer that is switched off takes its adapters with it
            gradients = workload.take_gradients(self.transformer)
        return gradients | {"velocity": found.detach()}

    def measure(self, step: str, smoke: bool) -> Record:
        """The rows of a step, its contenders in turns."""
        run, rounds = STEPS[step]

        def turn(contender: str) -> float:
            with self.switch(contender) as velocity:
                run(velocity, self.inputs, REFERENCE)
                start = time.process_time()
                run(velocity, self.inputs, REFERENCE)
                taken = time.process_time() - start
            self.transformer.zero_grad(set_to_none=True)
            return taken

        return in_turns(step, SHAPE.name, CONTENDERS, turn, 2 if smoke else rounds)


def in_turns(
    step: str,
    shape: str,
    contenders: Sequence[str],
    turn: Callable[[str], float],
    rounds: int,
) -> Record:
    """The rows of contenders, ours first, by their names in the rows; `turn` has one's
    seconds, on one thread.
    """
    seconds: dict[str, list[float]] = {contender: [] for contender in contenders}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for _ in range(rounds):
        for contender, found in seconds.items():
            found.append(turn(contender))
    torch.set_num_threads(threads)
    rows = [
        timing(step, shape, who, quantiles(found)) for who, found in seconds.items()
    ]
    ours, *others = contenders
    rows[0]["over"] = {}
    for who in others:
        turns = zip(seconds[ours], seconds[who], strict=True)
        rows[0]["over"][who] = quantiles([mine / theirs for mine, theirs in turns])
    return {"rows": rows}


def toy_trainer(
    update: str, heads: int, layers: int, videos: int, **more: Any
) -> Trainer:
    """Videos of the toy world at once, over random weights of a width; without a KL
    both gradients are one.

    more: settings of the run.
    """
    # its library may not be on a bare machine
    from sage_fast.config.load import load_config

    changes = {
        "model.device": "cpu",
        "rollout.num_steps": 3,
        "rollout.num_generations": 2,
        "rollout.batch_size": videos,
        "rollout.micro_batch_size": videos,
        "lora.target_modules": None,
        "objective.kl_mode": "none",
        "training.update": update,
        "training.ema_decay": None,
        **more,
    }
    config = load_config("toy_cpu", changes)
    model = TRANSFORMER_CONFIG | {"num_attention_heads": heads, "num_layers": layers}
    components = Components(
        transformer=workload.random_transformer(
            model, torch.device("cpu"), torch.float32
        ),
        prompt_encoder=WordEncoder(),
        video_decoder=PatchCodec(),
    )
    prompts = read_prompts(config.data.prompts)
    reward = CompositeReward.from_config(
        config.reward, [prompt.text for prompt in prompts]
    )
    return Trainer(config, components, reward, prompts, prompts)


def measure_updates(shape: str, smoke: bool) -> Record:
    """The rows of an iteration, by single pass and by two phases, after one to warm up."""
    *size, rounds = UPDATES[shape]
    trainers = {
        "ours": toy_trainer("single_pass", *size),
        "two_phase": toy_trainer("two_phase", *size),
    }

    def turn(contender: str) -> float:
        start = time.process_time()
        trainers[contender].iterate()
        return time.process_time() - start

    for contender in trainers:
        turn(contender)
    return in_turns("single_pass", shape, list(trainers), turn, 1 if smoke else rounds)


def cells(session: Session) -> Iterator[Cell]:
    """Parity, forward and training step; then the updates."""
    contest = cache(Contest)

    def check() -> Record:
        ours, p2 = (contest().gradients(contender) for contender in CONTENDERS)
        return verdict({"difference": pooled_error(ours, p2)}, TOLERANCE)

    def measure(step: str) -> Record:
        return contest().measure(step, session.smoke)

    yield Cell(suite=SUITE, name="parity", work=check)
    for step in STEPS:
        yield Cell(
            suite=SUITE,
            name=f"{step} {SHAPE.name}",
            work=partial(measure, step),
            needs=(f"{SUITE} parity",),
        )
    for shape in UPDATES:
        work = partial(measure_updates, shape, session.smoke)
        yield Cell(suite=SUITE, name=f"single_pass {shape}", work=work)
