"""Make the base models of the toy worlds: models that draw well, and often not what was
asked for.

    python -m experiments.pretrain --world shapes --output_dir DIR
    python -m experiments.pretrain --world words --output_dir DIR

Real base models are like this because their captions are. Here too: of the videos of a
caption, a stated share shows something else. The prediction of a perfect model, the
velocity E[z - x0 | x, caption], has a closed form, and the network is fitted to it.
That needs a tenth of the steps of fitting it to single draws of z - x0, and allows
latents of two kinds: noised data, as in flow matching, and latents on the sampling
paths of the network itself, where it learns to come back to the legal videos.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from diffusers import HunyuanVideo15Transformer3DModel
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.optim import AdamW, Muon, Optimizer
from torch.optim.lr_scheduler import LambdaLR
from tqdm import tqdm

from experiments import shapes, words
from experiments.captioned import Phase, World
from sage_fast.models.family import family_of
from sage_fast.models.toy.components import (
    CONFIG_NAME,
    WEIGHTS_NAME,
    build_transformer,
    is_unused,
    stored_parameters,
)

MODULE_COMMAND = "python -m experiments.pretrain"

WORLDS: dict[str, tuple[Phase, ...]] = {"shapes": shapes.PHASES, "words": words.PHASES}


@dataclass(frozen=True, kw_only=True)
class PretrainConfig:
    """Settings of a pretraining. Example: `PretrainConfig(seed=1)`."""

    phases: tuple[Phase, ...] = shapes.PHASES
    """Parts of the pretraining, in order."""
    seed: int = 0
    """Seed of the initial weights and of the first phase's draws; each later phase has
    one more.
    """
    batch_size: int = 32
    """Latents per step."""
    path_share: float = 0.5
    """Share of the batch that lies on the network's own sampling paths; the rest are
    noised videos.
    """
    path_steps: tuple[int, int] = (8, 20)
    """Fewest and most steps of a sampling path."""
    caption_dropout: float = 0.1
    """Share of latents whose caption is replaced by the unconditional prompt."""
    shift: float = 3.0
    """Timestep shift of the paths, as in the rollout's schedule: sigma = shift u / (1 +
    (shift - 1) u) from u = 1 to 0. Noised videos have a uniform sigma: at small ones
    samples get their details.
    """
    learning_rate: float = 2e-2
    """Peak rate of Muon, for the matrices of the blocks."""
    other_learning_rate: float = 4e-3
    """Peak rate of AdamW, for every other parameter."""
    warmup_steps: int = 100
    """Steps of the warm-up of each phase."""
    averaging: float = 0.999
    """Decay of the running average of the weights, which is what is kept."""
    knee: float = 0.3
    """Root mean square error of a sample from which on it counts linearly instead of
    quadratically.
    """
    num_threads: int = 1
    """CPU threads. Part of the recipe: the order of summation, hence the last bits,
    depend on it.
    """


def pretrain(
    config: PretrainConfig, output: str | Path, *, progress: bool = True
) -> list[float]:
    """Train a model and write `config.json` and `weights.safetensors` (float16) into
    the folder `output`.

    The weights carry the command, the settings, the torch version and the final loss as
    metadata. On one machine the same settings give the same weights. The global random
    state and the number of threads are left as they were.

    Returns the loss of every step.
    """
    directory = Path(output)
    directory.mkdir(parents=True, exist_ok=True)
    threads = torch.get_num_threads()
    torch.set_num_threads(config.num_threads)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed)
            transformer = build_transformer(config.phases[0].transformer)
        losses = []
        for number, phase in enumerate(config.phases):
            name = f"phase {number + 1} of {len(config.phases)}"
            losses += _train(
                transformer,
                config,
                phase,
                config.seed + number,
                name if progress else None,
            )
    finally:
        torch.set_num_threads(threads)
    first = config.phases[0]
    recent = losses[-50:]
    metadata = {
        "command": (
            f"{MODULE_COMMAND} --world {first.name} --steps {_steps(config.phases)} "
            f"--seed {config.seed}"
        ),
        **{name: str(value) for name, value in asdict(config).items()},
        "torch_version": torch.__version__,
        "loss_last_50_steps": f"{sum(recent) / len(recent):.5f}",
    }
    weights = {
        name: value.half().contiguous()
        for name, value in stored_parameters(transformer).items()
    }
    save_file(weights, directory / WEIGHTS_NAME, metadata=metadata)
    # safetensors may create its file readable by the owner alone.
    (directory / WEIGHTS_NAME).chmod(0o644)
    (directory / CONFIG_NAME).write_text(
        json.dumps(first.transformer, indent=2) + "\n", encoding="utf-8"
    )
    return losses


def _steps(phases: Sequence[Phase]) -> str:
    """Steps of the phases, as the command line has them."""
    return ",".join(str(phase.steps) for phase in phases)


class _Draws:
    """Noised videos, and latents on sampling paths of the network: a fixed number, each
    restarted when it ends.
    """

    def __init__(
        self,
        world: World,
        config: PretrainConfig,
        phase: Phase,
        generator: torch.Generator,
    ) -> None:
        self.world = world
        self.config = config
        self.phase = phase
        self.generator = generator
        self.latents, self.captions, self.num_steps = self._begin(
            int(config.batch_size * config.path_share)
        )
        self.step = torch.zeros_like(self.num_steps)

    def batch(self) -> tuple[Tensor, Tensor, Tensor]:
        """Latents (B, C, F, H, W), noise levels (B,) and captions of a step, those on
        paths first.
        """
        noised = self.world.draw_captions(
            self.config.batch_size - len(self.captions), self.config.caption_dropout
        )
        clean = self.world.draw_latents(noised)
        sigma = (
            self.phase.noised_up_to * torch.rand(len(noised), generator=self.generator)
        ).clamp_min(1e-3)
        level = sigma.view(-1, 1, 1, 1, 1)
        latents = (1 - level) * clean + level * torch.randn(
            clean.shape, generator=self.generator
        )
        pairs = (self.latents, latents), (self._sigma(), sigma), (self.captions, noised)
        together, levels, captions = (torch.cat(pair) for pair in pairs)
        return together, levels, captions

    def advance(self, predicted: Tensor) -> None:
        """One step of the probability-flow ODE along the velocity (B, C, F, H, W) that
        the network predicted.
        """
        predicted = predicted[: len(self.latents)]
        self.latents = (
            self.latents
            + (self._sigma(1) - self._sigma()).view(-1, 1, 1, 1, 1) * predicted
        )
        self.step = self.step + 1
        ended = self.step == self.num_steps
        self.latents[ended], self.captions[ended], self.num_steps[ended] = self._begin(
            int(ended.sum())
        )
        self.step[ended] = 0

    def _begin(self, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """Noise, captions and numbers of steps of new paths."""
        noise = torch.randn(count, *self.world.shape, generator=self.generator)
        captions = self.world.draw_captions(count, self.config.caption_dropout)
        fewest, most = self.config.path_steps
        return (
            noise,
            captions,
            torch.randint(fewest, most + 1, (count,), generator=self.generator),
        )

    def _sigma(self, ahead: int = 0) -> Tensor:
        """Noise level (B,) of each path now, or `ahead` steps later."""
        time = 1 - (self.step + ahead) / self.num_steps
        shift = self.config.shift
        return shift * time / (1 + (shift - 1) * time)


def _train(
    transformer: HunyuanVideo15Transformer3DModel,
    config: PretrainConfig,
    phase: Phase,
    seed: int,
    bar: str | None,
) -> list[float]:
    """One phase: the weights become their running average, in the precision of the
    file. Returns the losses.
    """
    trained = {
        name: value
        for name, value in transformer.named_parameters()
        if not is_unused(name)
    }
    average = {name: value.detach().clone() for name, value in trained.items()}
    # Muon for the matrices of the blocks, AdamW for everything else.
    blocks = [
        name for name in trained if "transformer_blocks" in name and "norm" not in name
    ]
    matrices = {name: trained[name] for name in blocks if trained[name].ndim == 2}
    others = [value for name, value in trained.items() if name not in matrices]
    options: dict[str, Any] = {
        "lr": phase.rate * config.learning_rate,
        "weight_decay": 0.01,
    }
    muon: Optimizer
    if phase.dtype == torch.float32:
        muon = Float32Muon([*matrices.values()], **options)
    else:
        muon = Muon([*matrices.values()], **options, adjust_lr_fn="match_rms_adamw")
    adamw = AdamW(
        others,
        lr=phase.rate * config.other_learning_rate,
        betas=(0.9, 0.95),
        weight_decay=0.0,
    )
    optimizers = [muon, adamw]

    def rate(step: int) -> float:
        """Of the peak, at a step counted from 0: linear, to zero."""
        return min(1.0, (step + 1) / config.warmup_steps) * (1 - step / phase.steps)

    schedulers = [LambdaLR(optimizer, rate) for optimizer in optimizers]
    generator = torch.Generator().manual_seed(seed)
    world = phase.world(generator)
    draws = _Draws(world, config, phase, generator)
    losses: list[float] = []
    steps = tqdm(range(phase.steps), desc=bar, disable=bar is None)
    for step in steps:
        latents, sigma, captions = draws.batch()
        with torch.autocast(
            "cpu", torch.bfloat16, enabled=phase.dtype == torch.bfloat16
        ):
            predicted = family_of(transformer).velocity(
                transformer, latents, sigma, world.prompts(captions)
            )
        predicted = predicted.float()
        exact = world.velocity(latents, sigma, captions)
        error = (predicted - exact).square().flatten(1).mean(1)
        # Far from the data the exact velocity is steep: a few latents there would
        # outweigh all others.
        loss = ((error + config.knee**2).sqrt() - config.knee).mean()
        loss.backward()
        nn.utils.clip_grad_norm_(trained.values(), 1.0)
        for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        draws.advance(predicted.detach())
        decay = min(config.averaging, (step + 1) / (step + 10))
        with torch.no_grad():
            for name, value in trained.items():
                average[name].lerp_(value, 1 - decay)
        losses.append(loss.item())
        steps.set_postfix(loss=f"{losses[-1]:.4f}")
    transformer.load_state_dict(
        {name: value.half() for name, value in average.items()}, strict=False
    )
    return losses


class Float32Muon(Optimizer):
    """torch's Muon with rates matched to AdamW's (`match_rms_adamw`), in float32, all
    matrices of a shape at once.

    torch orthogonalises in bfloat16: on a processor without it that takes half of a
    step.
    """

    def __init__(
        self, matrices: Sequence[nn.Parameter], lr: float, weight_decay: float
    ) -> None:
        super().__init__(matrices, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for shape in {value.shape for value in group["params"]}:
                values = [
                    v
                    for v in group["params"]
                    if v.shape == shape and v.grad is not None
                ]
                if not values:
                    continue
                for value in values:
                    momentum = self.state[value].setdefault(
                        "momentum", torch.zeros_like(value)
                    )
                    momentum.lerp_(value.grad, 0.05)
                    value.grad.lerp_(momentum, 0.95)  # Nesterov's
                update = _orthogonal(torch.stack([value.grad for value in values]))
                for value, change in zip(values, update, strict=True):
                    value.mul_(1 - group["lr"] * group["weight_decay"])
                    value.sub_(change, alpha=group["lr"] * 0.2 * max(shape) ** 0.5)


def _orthogonal(matrices: Tensor) -> Tensor:
    """Five steps of the Newton-Schulz iteration: (N, R, C) with all singular values
    near 1.
    """
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if tall else matrices
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp_min(1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.775 * gram + 2.0315 * gram @ gram) @ x
    return x.mT if tall else x


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line of the module."""
    parser = argparse.ArgumentParser(
        prog=MODULE_COMMAND,
        description=(
            "Pretrain the toy model on rendered videos, some of which have a wrong "
            "caption."
        ),
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--world", choices=list(WORLDS), default="shapes", help="the videos"
    )
    parser.add_argument(
        "--steps",
        help=(
            "optimizer steps of each phase, such as 8000,5500,4000; default those of "
            "the world"
        ),
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=PretrainConfig.seed,
        help="seed of the weights and every draw",
    )
    parser.add_argument(
        "--output_dir",
        required=True,
        help="folder to write config.json and weights.safetensors into",
    )
    given = parser.parse_args(arguments)
    phases = WORLDS[given.world]
    try:
        counts = (given.steps or _steps(phases)).split(",")
        if len(counts) != len(phases) or not all(count.isdecimal() for count in counts):
            raise ValueError(
                f"--steps is {given.steps}: use {len(phases)} numbers, such as "
                f"{_steps(phases)}."
            )
        phases = tuple(
            replace(phase, steps=int(count))
            for phase, count in zip(phases, counts, strict=True)
        )
        losses = pretrain(
            PretrainConfig(phases=phases, seed=given.seed), given.output_dir
        )
    except ValueError as error:
        parser.error(str(error))
    print(
        f"Wrote {given.output_dir}: loss {losses[0]:.3f} -> {losses[-1]:.3f} in "
        f"{len(losses)} steps."
    )


if __name__ == "__main__":
    main()
