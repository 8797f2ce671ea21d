"""Work of one iteration of the trainer, counted on a toy model: forwards, optimizer
updates, waits, collectives.

The loop is the same for every model, so counts on the smallest one are those of the
largest. Forwards and updates are counted on the CPU. Waits for the GPU are counted on
the meta device, which plays the GPU (`traced.answer_of`).
"""

import contextlib
import json
import tempfile
from collections import Counter
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from safetensors.torch import save_file
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.counts.traced import answer_of
from sage_fast.config.load import load_config
from sage_fast.models.toy.components import (
    CONFIG_NAME,
    TRANSFORMER_CONFIG,
    WEIGHTS_NAME,
    build_transformer,
    stored_parameters,
)
from sage_fast.run.run import build_trainer

Update = Literal["two_phase", "single_pass"]

ROOT = Path(__file__).resolve().parents[2]
TOY = ROOT / "configs" / "toy_cpu.yaml"
NUM_VIDEOS = 2
NUM_STEPS = 2
PHASES = ("rollout", "anchor", "update")
"""Of an iteration, where the transformer may run."""
MODEL = TRANSFORMER_CONFIG | {"num_layers": 1}
"""The toy model with one block: no count is of blocks."""
COLLECTIVES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")
"""Namespaces of operators that talk to other processes."""


class Watch(TorchDispatchMode):
    """Work of one iteration of a trainer: forwards and waits for the meta device by
    phase, updates, collectives.
    """

    def __init__(self) -> None:
        super().__init__()
        self.phases = ["between"]
        self.forwards = Counter[str]()
        self.waits = Counter[str]()
        self.updates = self.collectives = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run the operator, or answer for it."""
        kwargs = kwargs or {}
        self.collectives += func.namespace in COLLECTIVES
        for result in answer_of(func, args, kwargs):
            self.waits[self.phases[-1]] += 1
            return result
        return func(*args, **kwargs)

    def iterate(self, trainer: Any) -> "Watch":
        """Count an iteration."""
        enter = trainer._phase

        @contextlib.contextmanager
        def phase(name: str) -> Iterator[None]:
            self.phases.append(name)
            with enter(name):
                yield
            self.phases.pop()

        def forward(*_: object) -> None:
            self.forwards[self.phases[-1]] += 1

        def update(*_: object) -> None:
            self.updates += 1

        hooks = [
            trainer.policy.transformer.register_forward_pre_hook(forward),
            register_optimizer_step_post_hook(update),
        ]
        trainer._phase = phase
        try:
            # Nothing waits for a CPU.
            waits = trainer.device.type != "cpu"
            with self if waits else contextlib.nullcontext():
                trainer.iterate()
        finally:
            trainer._phase = enter
            for hook in hooks:
                hook.remove()
        return self


def toy_trainer(update: Update, guidance_scale: float, device: str) -> Any:
    """A trainer of two videos of two steps each, whose anchor is refreshed before every
    second update; the reward is a number of the video.
    """
    values = {
        "model.device": device,
        # Reference kernels are hundreds of operators on the meta device; a fused one is
        # one, as on a GPU.
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
    words = [f"--{key}={value}" for key, value in values.items()]
    with tempfile.TemporaryDirectory() as folder:
        weights = stored_parameters(build_transformer(MODEL))
        save_file(weights, Path(folder, WEIGHTS_NAME))
        Path(folder, CONFIG_NAME).write_text(json.dumps(MODEL), encoding="utf-8")
        trainer: Any = build_trainer(
            load_config(TOY, [*words, f"--model.path={folder}"])
        )
    # Pixels and rewards are outside the loop, and a reward needs pixels that exist.
    trainer.decoder.decode = lambda latents: torch.zeros(
        len(latents), 4, 3, 16, 16, dtype=torch.uint8
    )
    trainer.reward.score = lambda videos, samples, **_: {
        name: torch.tensor([sample.member for sample in samples], dtype=torch.float64)
        for name in trainer.reward.weights
    }
    return trainer


def measure_iteration() -> dict[str, float]:
    """Forwards per video and step, and optimizer updates, of an iteration right after
    the anchor was refreshed and of the one after it: by the way of computing the
    gradient, the guidance scale (1 for none) and the anchor.
    """
    found: dict[str, float] = {}
    for update, scale in product(get_args(Update), (1, 6)):
        trainer = toy_trainer(update, scale, "cpu")
        for anchor in ("fresh", "behind"):
            case = f"{update}/{scale}/{anchor}"
            watch = Watch().iterate(trainer)
            each = {
                phase: watch.forwards.pop(phase, 0) / (NUM_VIDEOS * NUM_STEPS)
                for phase in PHASES
            }
            found |= {
                f"iteration.forwards/{case}/{phase}": number
                for phase, number in each.items()
            }
            found[f"iteration.forwards_elsewhere/{case}"] = watch.forwards.total()
            found[f"iteration.optimizer_updates/{case}"] = watch.updates
    return found


def measure_loop() -> dict[str, float]:
    """Waits and exchanges of the step loops of an iteration, with guidance and an
    anchor that lies behind.
    """
    found: dict[str, float] = {}
    for update in get_args(Update):
        trainer = toy_trainer(update, 6, "meta")
        trainer.update = 1
        watch = Watch().iterate(trainer)
        found |= {
            f"loop.host_syncs/{update}/{phase}": watch.waits.pop(phase, 0)
            for phase in PHASES
        }
        # Whether latents are finite is asked where the pixels are waited for.
        watch.waits.pop("decode", 0)
        found[f"loop.host_syncs/{update}/elsewhere"] = watch.waits.total()
        found[f"loop.collectives/{update}"] = watch.collectives
    return found
