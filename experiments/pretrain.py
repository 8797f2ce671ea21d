"""Make the base model of the toy world: a model that draws well, and often not what was asked for.

    python -m experiments.pretrain --output_dir DIR

Real base models are like this because their captions are. Here too: of the videos of a caption, a stated share shows
another colour, shape or motion. The prediction of a perfect model, the velocity E[z - x0 | x, caption], has
a closed form (`ExactPolicy`), and the network is fitted to it. That needs a tenth of the steps of fitting it to single
draws of z - x0, and allows latents of two kinds: noised data, as in flow matching, and latents on the sampling paths
of the network itself, where it learns to come back to the legal videos.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from diffusers import HunyuanVideo15Transformer3DModel
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.optim import AdamW, Muon, Optimizer
from torch.optim.lr_scheduler import LambdaLR
from tqdm import tqdm

from experiments.exact_policy import ExactPolicy
from sage_fast.models.family import family_of
from sage_fast.models.toy.codec import PatchCodec
from sage_fast.models.toy.components import (
    CONFIG_NAME,
    TRANSFORMER_CONFIG,
    WEIGHTS_NAME,
    WordEncoder,
    build_transformer,
    is_unused,
    stored_parameters,
)
from sage_fast.models.toy.renderer import (
    COLOURS,
    HEIGHT,
    MOTIONS,
    NUM_FRAMES,
    SHAPES,
    WIDTH,
    all_captions,
    manifold_for,
)

MODULE_COMMAND = "python -m experiments.pretrain"


@dataclass(frozen=True, kw_only=True)
class Phase:
    """A part of the pretraining, with a separate optimizer and draws. It goes on from the weights before it."""

    steps: int
    """Optimizer steps."""
    rate: float = 1.0
    """Peak of the learning rates, as a share of the configuration's."""
    noised_up_to: float = 1.0
    """Largest sigma of noised videos. Those on the network's own paths have every sigma."""
    wrong_colour: float
    """Share of a caption's videos that differ from it in their colour alone."""
    wrong_shape: float
    """Likewise in their shape."""
    wrong_motion: float
    """Likewise in their motion."""


PHASES = (
    Phase(steps=8000, wrong_colour=0.35 / 3, wrong_shape=0.35 / 3, wrong_motion=0.35 / 3),
    # The last steps of a path decide how far a sample lies from the legal videos.
    Phase(steps=5500, rate=0.5, noised_up_to=0.6, wrong_colour=0.35 / 3, wrong_shape=0.35 / 3, wrong_motion=0.35 / 3),
    # So far the same caption always gets the same scene, often a wrong one: with nothing to choose from, post-training
    # cannot mend it. A network of this size tells colours apart in the noise where a scene is decided, shapes hardly.
    Phase(steps=4000, rate=0.5, wrong_colour=0.45, wrong_shape=0.0, wrong_motion=0.15),
)


@dataclass(frozen=True, kw_only=True)
class PretrainConfig:
    """Settings of a pretraining. Example: `PretrainConfig(seed=1)`."""

    phases: tuple[Phase, ...] = PHASES
    """Parts of the pretraining, in order."""
    seed: int = 0
    """Seed of the initial weights and of the first phase's draws; each later phase has one more."""
    batch_size: int = 32
    """Latents per step."""
    path_share: float = 0.5
    """Share of the batch that lies on the network's own sampling paths; the rest are noised videos."""
    path_steps: tuple[int, int] = (8, 20)
    """Fewest and most steps of a sampling path."""
    caption_dropout: float = 0.1
    """Share of latents whose caption is replaced by the unconditional prompt."""
    shift: float = 3.0
    """Timestep shift of the paths, as in the rollout's schedule: sigma = shift u / (1 + (shift - 1) u) from u = 1
    to 0. Noised videos have a uniform sigma: at small ones samples get their details."""
    learning_rate: float = 2e-2
    """Peak rate of Muon, for the matrices of the blocks."""
    other_learning_rate: float = 4e-3
    """Peak rate of AdamW, for every other parameter."""
    warmup_steps: int = 100
    """Steps of the warm-up of each phase."""
    averaging: float = 0.999
    """Decay of the running average of the weights, which is what is kept."""
    knee: float = 0.3
    """Root mean square error of a sample from which on it counts linearly instead of quadratically."""
    num_threads: int = 1
    """CPU threads. Part of the recipe: the order of summation, hence the last bits, depend on it."""

    def rate_at(self, step: int, steps: int) -> float:
        """Learning rate of a step counted from 0 of a phase, as a share of the phase's peak: linear, to zero."""
        return min(1.0, (step + 1) / self.warmup_steps) * (1 - step / steps)


def pretrain(config: PretrainConfig, output: str | Path, *, progress: bool = True) -> list[float]:
    """Train a model and write `config.json` and `weights.safetensors` (float16) into the folder `output`.

    The weights carry the command, the settings, the torch version and the final loss as metadata. On one
    machine the same settings give the same weights. The global random state and the number of threads are
    left as they were.

    Returns the loss of every step.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(config.num_threads)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed)
            transformer = build_transformer(TRANSFORMER_CONFIG)
        losses = []
        for number, phase in enumerate(config.phases):
            name = f"phase {number + 1} of {len(config.phases)}"
            losses += _train(transformer, config, phase, config.seed + number, name if progress else None)
    finally:
        torch.set_num_threads(threads)
    recent = losses[-50:]
    metadata = {
        "command": f"{MODULE_COMMAND} --steps {_steps(config.phases)} --seed {config.seed} --output_dir DIR",
        **{name: str(value) for name, value in asdict(config).items()},
        "torch_version": torch.__version__,
        "loss_last_50_steps": f"{sum(recent) / len(recent):.5f}",
    }
    weights = {name: value.half().contiguous() for name, value in stored_parameters(transformer).items()}
    directory = Path(output)
    directory.mkdir(parents=True, exist_ok=True)
    save_file(weights, directory / WEIGHTS_NAME, metadata=metadata)
    # safetensors may create its file readable by the owner alone.
    (directory / WEIGHTS_NAME).chmod(0o644)
    (directory / CONFIG_NAME).write_text(json.dumps(TRANSFORMER_CONFIG, indent=2) + "\n", encoding="utf-8")
    return losses


def _steps(phases: Sequence[Phase]) -> str:
    """Steps of the phases, as the command line has them."""
    return ",".join(str(phase.steps) for phase in phases)


def shown_by_caption(phase: Phase) -> Tensor:
    """Shares of the shown captions: float32 (120, 120), row = caption, column = shown caption, rows sum to 1."""
    captions = all_captions()
    table = torch.zeros(len(captions), len(captions))
    wrong = {
        "colour": (phase.wrong_colour, COLOURS),
        "shape": (phase.wrong_shape, SHAPES),
        "motion": (phase.wrong_motion, MOTIONS),
    }
    for row, caption in enumerate(captions):
        table[row, row] = 1 - sum(share for share, _ in wrong.values())
        for name, (share, values) in wrong.items():
            for value in values:
                if value != getattr(caption, name):
                    shown = caption._replace(**{name: value})
                    table[row, captions.index(shown)] = share / (len(values) - 1)
    return table


class _Data:
    """The badly captioned videos: noised latents, and the exact velocity of any latents.

    A caption is its row in `all_captions()`; the row after the last is the unconditional prompt.
    """

    def __init__(self, config: PretrainConfig, phase: Phase, generator: torch.Generator) -> None:
        self.config, self.phase, self.generator = config, phase, generator
        manifold = manifold_for(NUM_FRAMES, HEIGHT, WIDTH)
        self.latents = PatchCodec().encode(manifold.videos)
        self.policy = ExactPolicy(self.latents)
        self.table = shown_by_caption(phase)
        self.unconditional = len(self.table)
        self.positions = len(self.latents) // len(self.table)
        anything = torch.full((1, len(self.table)), 1 / len(self.table))
        # The scenes are ordered by what a caption names; the positions vary fastest.
        self.log_prior = torch.cat([self.table, anything]).log().repeat_interleave(self.positions, dim=1)
        self.prompts = WordEncoder().encode([*(caption.text for caption in all_captions()), ""])

    def draw_captions(self, count: int) -> Tensor:
        """Rows of captions, int64 (count,), some of them unconditional."""
        rows = torch.randint(self.unconditional, (count,), generator=self.generator)
        dropped = torch.rand(count, generator=self.generator) < self.config.caption_dropout
        return torch.where(dropped, self.unconditional, rows)

    def noise(self, count: int) -> Tensor:
        return torch.randn(count, *self.latents.shape[1:], generator=self.generator)

    def noised(self, captions: Tensor) -> tuple[Tensor, Tensor]:
        """Latents (B, C, F, H, W) of videos that have these captions (B,), and their noise levels (B,)."""
        shares = torch.cat([self.table, self.table.mean(0, keepdim=True)])[captions]
        shown = torch.multinomial(shares, 1, generator=self.generator)[:, 0]
        rows = shown * self.positions + torch.randint(self.positions, shown.shape, generator=self.generator)
        sigma = (self.phase.noised_up_to * torch.rand(len(captions), generator=self.generator)).clamp_min(1e-3)
        level = sigma.view(-1, 1, 1, 1, 1)
        return (1 - level) * self.latents[rows] + level * self.noise(len(captions)), sigma


class _Paths:
    """Latents on sampling paths of the network: a fixed number of paths, each restarted when it ends."""

    def __init__(self, data: _Data, count: int) -> None:
        self.data = data
        self.latents, self.captions = data.noise(count), data.draw_captions(count)
        self.step = torch.zeros(count, dtype=torch.int64)
        self.num_steps = self._draw_lengths(count)

    def _draw_lengths(self, count: int) -> Tensor:
        fewest, most = self.data.config.path_steps
        return torch.randint(fewest, most + 1, (count,), generator=self.data.generator)

    def sigma(self, ahead: int = 0) -> Tensor:
        """Noise level (B,) of each path now, or `ahead` steps later."""
        time, shift = 1 - (self.step + ahead) / self.num_steps, self.data.config.shift
        return shift * time / (1 + (shift - 1) * time)

    def advance(self, predicted: Tensor) -> None:
        """One step of the probability-flow ODE along the velocity (B, C, F, H, W) that the network predicted."""
        self.latents = self.latents + (self.sigma(1) - self.sigma()).view(-1, 1, 1, 1, 1) * predicted
        self.step = self.step + 1
        ended = self.step == self.num_steps
        count = int(ended.sum())
        self.latents[ended], self.captions[ended] = self.data.noise(count), self.data.draw_captions(count)
        self.step[ended], self.num_steps[ended] = 0, self._draw_lengths(count)


def _train(
    transformer: HunyuanVideo15Transformer3DModel, config: PretrainConfig, phase: Phase, seed: int, bar: str | None
) -> list[float]:
    """One phase: the weights become their running average, in the precision of the file. Returns the losses."""
    trained = {name: value for name, value in transformer.named_parameters() if not is_unused(name)}
    average = {name: value.detach().clone() for name, value in trained.items()}
    optimizers = _optimizers(trained, config, phase.rate)
    schedulers = [LambdaLR(optimizer, lambda step: config.rate_at(step, phase.steps)) for optimizer in optimizers]
    data = _Data(config, phase, torch.Generator().manual_seed(seed))
    paths = _Paths(data, int(config.batch_size * config.path_share))
    on_paths = len(paths.captions)

    losses: list[float] = []
    steps = tqdm(range(phase.steps), desc=bar, disable=bar is None)
    for step in steps:
        captions = data.draw_captions(config.batch_size - on_paths)
        noised, noised_sigma = data.noised(captions)
        latents, sigma = torch.cat([paths.latents, noised]), torch.cat([paths.sigma(), noised_sigma])
        captions = torch.cat([paths.captions, captions])
        with torch.autocast("cpu", torch.bfloat16):
            prompts = [data.prompts[row] for row in captions.tolist()]
            predicted = family_of(transformer).velocity(transformer, latents, sigma, prompts)
        predicted = predicted.float()
        exact = data.policy.velocity(0, latents, sigma, data.log_prior[captions])
        error = (predicted - exact).square().flatten(1).mean(1)
        # Far from the data the exact velocity is steep: a few latents there would outweigh all others.
        loss = ((error + config.knee**2).sqrt() - config.knee).mean()
        loss.backward()
        nn.utils.clip_grad_norm_(trained.values(), 1.0)
        for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        paths.advance(predicted[:on_paths].detach())
        decay = min(config.averaging, (step + 1) / (step + 10))
        with torch.no_grad():
            for name, value in trained.items():
                average[name].lerp_(value, 1 - decay)
        losses.append(loss.item())
        steps.set_postfix(loss=f"{losses[-1]:.4f}")
    transformer.load_state_dict({name: value.half() for name, value in average.items()}, strict=False)
    return losses


def _optimizers(trained: dict[str, nn.Parameter], config: PretrainConfig, rate: float) -> list[Optimizer]:
    """Muon for the matrices of the blocks, AdamW for everything else."""

    def is_matrix(name: str) -> bool:
        return trained[name].ndim == 2 and "transformer_blocks" in name and "norm" not in name

    matrices = [value for name, value in trained.items() if is_matrix(name)]
    others = [value for name, value in trained.items() if not is_matrix(name)]
    return [
        Muon(matrices, lr=rate * config.learning_rate, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
        AdamW(others, lr=rate * config.other_learning_rate, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line of the module."""
    parser = argparse.ArgumentParser(
        prog=MODULE_COMMAND,
        description="Pretrain the toy model on rendered videos, some of which have a wrong caption.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--steps", default=_steps(PHASES), help="optimizer steps of each phase")
    parser.add_argument("--seed", type=int, default=PretrainConfig.seed, help="seed of the weights and every draw")
    parser.add_argument("--output_dir", required=True, help="folder to write config.json and weights.safetensors into")
    given = parser.parse_args(arguments)
    try:
        counts = given.steps.split(",")
        if len(counts) != len(PHASES) or not all(count.isdecimal() for count in counts):
            raise ValueError(f"--steps is {given.steps}: use {len(PHASES)} numbers, such as {_steps(PHASES)}.")
        phases = tuple(replace(phase, steps=int(count)) for phase, count in zip(PHASES, counts, strict=True))
        config = PretrainConfig(phases=phases, seed=given.seed)
    except ValueError as error:
        parser.error(str(error))
    losses = pretrain(config, given.output_dir)
    print(f"Wrote {given.output_dir}: loss {losses[0]:.3f} -> {losses[-1]:.3f} in {len(losses)} steps.")


if __name__ == "__main__":
    main()
