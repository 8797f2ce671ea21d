"""Work of one iteration of the trainer, counted on a toy model: forwards, optimizer updates, waits, collectives.

The loop is the same for every model, so counts on the smallest one are those of the largest. Forwards and updates are
counted on the CPU. Waits for the GPU are counted on the meta device, which plays the GPU (`traced.answer_of`).
"""

import contextlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.counts.traced import answer_of
from sage_fast.config.load import load_config
from sage_fast.run.run import build_trainer
from sage_fast.trainer import Trainer

Update = Literal["two_phase", "single_pass"]

ROOT = Path(__file__).resolve().parents[2]
TOY = ROOT / "configs" / "toy_cpu.yaml"
NUM_VIDEOS, NUM_STEPS = 2, 2
COLLECTIVES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")
"""Namespaces of operators that talk to other processes."""


@dataclass(frozen=True, kw_only=True)
class IterationCost:
    """Counts of one iteration.

    Example: `IterationCost(forwards={"rollout": 2.0, "update": 2.0}, updates=1, waits={}, collectives=0)`
    """

    forwards: dict[str, float]
    """Phase -> forwards of the transformer per video and step."""
    updates: int
    """Optimizer updates."""
    waits: dict[str, int]
    """Phase -> operators that wait for the GPU; empty where they were not counted."""
    collectives: int
    """Exchanges with other processes; 0 where they were not counted."""


class Watch(TorchDispatchMode):
    """Context manager that counts waits for the meta device, and collectives."""

    def __init__(self, phases: list[str]) -> None:
        super().__init__()
        self.phases = phases
        self.waits: Counter[str] = Counter()
        self.collectives = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator, or answer for it."""
        kwargs = kwargs or {}
        self.collectives += func.namespace in COLLECTIVES
        for result in answer_of(func, args, kwargs):
            self.waits[self.phases[-1]] += 1
            return result
        return func(*args, **kwargs)


def toy_trainer(update: Update, guidance_scale: float, device: str) -> Trainer:
    """A trainer of two videos of two steps each, whose anchor is refreshed before every second update."""
    values = {
        "model.device": device,
        # Reference kernels are hundreds of operators on the meta device; a fused one is one, as on a GPU.
        "model.kernels": "reference" if device == "cpu" else "triton",
        "video.num_frames": 4,
        "rollout.num_steps": NUM_STEPS,
        "rollout.num_generations": NUM_VIDEOS,
        "rollout.batch_size": NUM_VIDEOS,
        "rollout.micro_batch_size": 1,
        "rollout.guidance_scale": guidance_scale,
        "lora.target_modules": ["attn.to_q"],
        "objective.kl_mode": "moving",
        "training.anchor_interval": 2,
        "training.update": update,
        "training.num_updates": 2,
        "evaluation.every": 0,
        "data.prompts": ROOT / "configs" / "prompts" / "toy_train.csv",
        "evaluation.prompts": ROOT / "configs" / "prompts" / "toy_eval.csv",
    }
    return build_trainer(load_config(TOY, [f"--{key}={value}" for key, value in values.items()]))


def count_iterations(update: Update, guidance_scale: float) -> dict[str, IterationCost]:
    """Forwards and optimizer updates of an iteration right after the anchor was refreshed, and of the one after it.

    Args:
        update: `training.update`.
        guidance_scale: 1 for no guidance.

    Returns:
        "fresh" and "behind", where the anchor differs from the policy.
    """
    trainer = toy_trainer(update, guidance_scale, "cpu")
    return {anchor: _iterate(trainer, watched=False) for anchor in ("fresh", "behind")}


def watch_iteration(update: Update, guidance_scale: float) -> IterationCost:
    """Counts of an iteration whose anchor lies behind, with waits and collectives."""
    trainer: Any = toy_trainer(update, guidance_scale, "meta")
    trainer.update = 1
    # Pixels and rewards are outside the loop, and a reward needs pixels that exist.
    trainer.decoder.decode = lambda latents: torch.zeros(len(latents), 4, 3, 16, 16, dtype=torch.uint8)
    return _iterate(trainer, watched=True)


def _iterate(trainer: Any, *, watched: bool) -> IterationCost:
    phases = ["between"]
    forwards: Counter[str] = Counter()
    updates: list[object] = []
    enter = trainer._phase

    @contextlib.contextmanager
    def phase(name: str) -> Iterator[None]:
        phases.append(name)
        with enter(name):
            yield
        phases.pop()

    def forward(*_: object) -> None:
        forwards[phases[-1]] += 1

    hooks = [
        trainer.policy.transformer.register_forward_pre_hook(forward),
        register_optimizer_step_post_hook(lambda *_: updates.append(None)),
    ]
    watch = Watch(phases)
    trainer._phase = phase
    try:
        with watch if watched else contextlib.nullcontext():
            trainer.iterate()
    finally:
        trainer._phase = enter
        for hook in hooks:
            hook.remove()
    return IterationCost(
        forwards={name: number / (NUM_VIDEOS * NUM_STEPS) for name, number in forwards.items()},
        updates=len(updates),
        waits=dict(watch.waits),
        collectives=watch.collectives,
    )
