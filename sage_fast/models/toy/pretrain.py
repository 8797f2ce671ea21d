"""Make the base model of the toy world by flow matching on rendered videos.

    python -m sage_fast.models.toy.pretrain --steps 300 --seed 0 --output DIR

The model learns v = z - x0 at x_sigma = (1 - sigma) x0 + sigma z, with sigma drawn from the same shifted
distribution that the sampler visits. The base model that ships is trained too briefly on purpose, so that
post-training has something to improve.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from diffusers import HunyuanVideo15Transformer3DModel
from safetensors.torch import save_file
from tqdm import tqdm

from sage_fast.models.toy.captions import WordEncoder, caption_of
from sage_fast.models.toy.codec import PatchCodec
from sage_fast.models.toy.components import (
    CONFIG_NAME,
    TRANSFORMER_CONFIG,
    WEIGHTS_NAME,
    build_transformer,
    is_unused,
    stored_parameters,
)
from sage_fast.models.toy.manifold import manifold_for
from sage_fast.models.toy.renderer import HEIGHT, NUM_FRAMES, WIDTH
from sage_fast.models.transformer import velocity

MODULE_COMMAND = "python -m sage_fast.models.toy.pretrain"


@dataclass(frozen=True, kw_only=True)
class PretrainConfig:
    """Settings of a pretraining run. Example: `PretrainConfig(steps=300, seed=0)`."""

    steps: int = 300
    """Optimizer steps."""
    seed: int = 0
    """Seed of the initial weights and of every draw."""
    batch_size: int = 64
    """Videos per step."""
    learning_rate: float = 1e-3
    """Peak of AdamW's learning rate, after a linear warm-up and before a linear decay to zero."""
    warmup_steps: int = 30
    """Steps of the warm-up."""
    weight_decay: float = 0.01
    """AdamW's weight decay."""
    shift: float = 3.0
    """Timestep shift: sigma = shift u / (1 + (shift - 1) u) with u uniform, as in the rollout's schedule."""
    caption_dropout: float = 0.1
    """Share of videos whose caption is replaced by the unconditional prompt."""
    num_threads: int = 1
    """CPU threads. Part of the recipe: the order of summation, hence the last bits, depend on it."""

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "num_threads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}: it must be at least 1.")
        if self.shift <= 0:
            raise ValueError(f"shift is {self.shift}: use a positive number, 1 for no shift.")
        if not 0 <= self.caption_dropout <= 1:
            raise ValueError(f"caption_dropout is {self.caption_dropout}: use a share from 0 to 1.")

    def learning_rate_at(self, step: int) -> float:
        """Learning rate of a step counted from 0."""
        warmup = min(1.0, (step + 1) / self.warmup_steps) if self.warmup_steps else 1.0
        return self.learning_rate * warmup * (1 - step / self.steps)


def pretrain(config: PretrainConfig, output: str | Path, *, progress: bool = True) -> list[float]:
    """Train a model and write `config.json` and `weights.safetensors` (float16) into the folder `output`.

    The weights carry the command, the settings, the torch version and the final loss as metadata. On one
    machine the same settings give the same weights. The global random state and the number of threads are
    left as they were.

    Returns the flow-matching loss of every step.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(config.num_threads)
    try:
        transformer, losses = _train(config, progress)
    finally:
        torch.set_num_threads(threads)
    recent = losses[-50:]
    metadata = {
        "command": f"{MODULE_COMMAND} --steps {config.steps} --seed {config.seed} --output {output}",
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


def _train(config: PretrainConfig, progress: bool) -> tuple[HunyuanVideo15Transformer3DModel, list[float]]:
    manifold = manifold_for(NUM_FRAMES, HEIGHT, WIDTH)
    latents = PatchCodec().encode(manifold.videos)
    encoder = WordEncoder()
    captions = encoder.encode([caption_of(scene).text for scene in manifold.scenes])
    unconditional = encoder.encode([""])[0]

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        transformer = build_transformer(TRANSFORMER_CONFIG)
    trained = [parameter for name, parameter in transformer.named_parameters() if not is_unused(name)]
    optimizer = torch.optim.AdamW(trained, lr=config.learning_rate, weight_decay=config.weight_decay)
    generator = torch.Generator().manual_seed(config.seed)

    losses: list[float] = []
    bar = tqdm(range(config.steps), desc="pretrain", disable=not progress)
    for step in bar:
        rows = torch.randint(len(captions), (config.batch_size,), generator=generator)
        dropped = torch.rand(config.batch_size, generator=generator) < config.caption_dropout
        uniform = torch.rand(config.batch_size, generator=generator)
        sigma = config.shift * uniform / (1 + (config.shift - 1) * uniform)
        clean = latents[rows]
        noise = torch.randn(clean.shape, generator=generator)
        level = sigma.view(-1, 1, 1, 1, 1)
        prompts = [
            unconditional if drop else captions[row] for row, drop in zip(rows.tolist(), dropped.tolist(), strict=True)
        ]
        predicted = velocity(transformer, (1 - level) * clean + level * noise, sigma, prompts)
        loss = torch.nn.functional.mse_loss(predicted, noise - clean)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        for group in optimizer.param_groups:
            group["lr"] = config.learning_rate_at(step)
        optimizer.step()
        losses.append(loss.item())
        bar.set_postfix(loss=f"{losses[-1]:.4f}")
    return transformer, losses


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line of the module."""
    parser = argparse.ArgumentParser(
        prog=MODULE_COMMAND,
        description="Pretrain the toy model by flow matching on rendered videos.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--steps", type=int, default=PretrainConfig.steps, help="optimizer steps")
    parser.add_argument("--seed", type=int, default=PretrainConfig.seed, help="seed of the weights and every draw")
    parser.add_argument("--output", required=True, help="folder to write config.json and weights.safetensors into")
    given = parser.parse_args(arguments)
    try:
        config = PretrainConfig(steps=given.steps, seed=given.seed)
    except ValueError as error:
        parser.error(str(error))
    losses = pretrain(config, given.output)
    print(f"Wrote {given.output}: loss {losses[0]:.3f} -> {losses[-1]:.3f} in {config.steps} steps.")


if __name__ == "__main__":
    main()
