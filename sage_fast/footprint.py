"""How much GPU memory a configuration takes on one process: a closed-form estimate, before anything is loaded.

One unit is S = tokens x width x bytes per number, the size of one activation of one sample. Per transformer block,
a forward keeps for its backward (counted, see the constants): everything but elementwise results, attention's output
besides the block's input, or the input alone. The estimate leaves out fragmentation, and holds for a single process:
what several GPUs share is not divided.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sage_fast.config import RunConfig

GB = 1e9

KEPT_PER_BLOCK = {
    ("fused", "none"): 11.0,
    ("fused", "selective"): 2.02,
    ("fused", "full"): 1.0,
    ("stock", "none"): 28.3,
    ("stock", "full"): 1.0,
}
"""Activations that a block keeps, in S: model.forward, model.checkpointing -> number."""

WORKING_SET = (16.0, 18.0)
"""What the block at work holds beside them, in S: a part of its own, and a part per guidance branch."""

RUNTIME_GB = 1.5
"""CUDA context and libraries."""

PUBLISHED_GB = {"vae": 2.5, "videoalign": 4.5, "clip_score": 1.7, "pick_score": 4.0}
"""Weights beside the transformer: the video autoencoder in float16, VideoAlign in bfloat16, both CLIP in float32."""

DECODER_CHANNELS = 128
"""Width of the video decoder at full resolution, where its activations are largest."""


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """What the estimate needs to know of a transformer. The defaults are HunyuanVideo-1.5's.

    parameters: of the whole transformer. layers: blocks. width: hidden size. adaln_parameters: of the modulation
    layers, which may leave the GPU. latent_channels, spatial, temporal: of its video autoencoder.

    Example: `ModelShape()` is the 8.3 B model.
    """

    parameters: int = 8_326_608_160
    layers: int = 54
    width: int = 2048
    adaln_parameters: int = 2_719_236_096
    latent_channels: int = 32
    spatial: int = 16
    temporal: int = 4

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "ModelShape":
        """Shape of the transformer of a diffusers `config.json`; embedders and refiner are counted as two blocks."""
        width = config["num_attention_heads"] * config["attention_head_dim"]
        layers = config["num_layers"]
        published = cls()
        if (width, layers) == (published.width, published.layers):
            return published
        # 12 width^2 of attention and MLP (ratio 4) in each of two streams, 6 width^2 of modulation in each.
        block = 2 * (4 + 2 * int(config.get("mlp_ratio", 4))) * width**2 + 12 * width**2
        return cls(
            parameters=(layers + 2) * block,
            layers=layers,
            width=width,
            adaln_parameters=layers * 12 * width**2,
            latent_channels=config["out_channels"],
        )


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """Gigabytes (1e9 bytes) by what they are for; `total` is the peak of the phase that needs most.

    Example: `Footprint(parts={"weights": 16.7, "activations": 29.4, ...}, total=55.1, tokens=32760)`
    """

    parts: dict[str, float]
    total: float
    tokens: int


def estimate(
    config: RunConfig, shape: ModelShape, sizes: Mapping[str, float] = PUBLISHED_GB, text_tokens: int = 250
) -> Footprint:
    """Peak memory of training with a configuration, on its one process.

    Args:
        shape: of the transformer.
        sizes: gigabytes of the weights beside it, by the names in `PUBLISHED_GB`.
        text_tokens: tokens of a prompt; those of a long sentence or two are 250.
    """
    model, rollout, training = config.model, config.rollout, config.training
    frames = (config.video.num_frames - 1) // shape.temporal + 1
    rows, columns = config.video.height // shape.spatial, config.video.width // shape.spatial
    tokens = frames * rows * columns
    bytes_per_number = 2 if model.dtype == "bfloat16" else 4
    unit = (tokens + text_tokens) * shape.width * bytes_per_number
    branches = 2 if training.guidance == "paired" and rollout.guidance_scale != 1.0 else 1

    resident = shape.parameters
    if training.mode == "lora" and model.adaln == "offload":
        resident -= shape.adaln_parameters
    trained = shape.parameters if training.mode == "full" else _adapter_parameters(config, shape)
    # Gradient, optimizer state, anchor and average, each a float32 number per trained weight; with LoRA the weight too.
    copies = 1 + (1 if config.optimizer.name == "muon" else 2) + (training.mode == "lora")
    copies += (config.objective.kl_mode in ("fixed", "moving", "dual")) + (training.ema_decay is not None)
    if training.update == "single_pass":
        copies += rollout.batch_size  # an accumulator per video

    kept = 0.0 if model.offload_activations else KEPT_PER_BLOCK[model.forward, model.checkpointing]
    own, per_branch = WORKING_SET
    activations = rollout.micro_batch_size * branches * shape.layers * kept * unit
    working = rollout.micro_batch_size * (own + per_branch * branches) * unit
    latent = 4 * shape.latent_channels * frames * rows * columns
    # States and velocities of every step, and the anchor's velocities.
    stored = rollout.batch_size * rollout.num_steps * latent * (3 if config.objective.kl_mode != "none" else 2)
    # Four copies in half precision and two in float32 at the widest place, in tiles if that is over the limit.
    pixels = config.video.num_frames * config.video.height * config.video.width
    decoding = 16.0 * DECODER_CHANNELS * pixels
    if model.decode_memory_gib is not None:
        decoding = min(decoding, model.decode_memory_gib * 2**30)

    parts = {
        "weights": resident * bytes_per_number,
        "gradients, optimizer, anchor": trained * 4 * copies,
        "trajectories": stored,
        "VAE": sizes["vae"] * GB,
        "rewards": sum(sizes.get(name, 0.0) for name in _rewards_here(config)) * GB,
        "CUDA context": RUNTIME_GB * GB,
        "activations": activations,
        "working set": working,
    }
    always = sum(v for k, v in parts.items() if k not in ("activations", "working set"))
    total = always + max(activations + working, decoding)
    return Footprint(parts={k: v / GB for k, v in parts.items()}, total=total / GB, tokens=tokens)


def checkpoint_bytes(config: RunConfig, shape: ModelShape) -> int:
    """Bytes of one checkpoint: float32 weights, optimizer state, anchor and average, and the adapter once more."""
    trained = shape.parameters if config.training.mode == "full" else _adapter_parameters(config, shape)
    copies = 1 + (1 if config.optimizer.name == "muon" else 2) + (config.training.mode == "lora")
    copies += (config.objective.kl_mode in ("fixed", "moving", "dual")) + (config.training.ema_decay is not None)
    return 4 * trained * copies


def _adapter_parameters(config: RunConfig, shape: ModelShape) -> int:
    """Numbers in the adapters: rank x (inputs + outputs) of every adapted layer; the MLP's are width and 4 width."""
    per_block = sum((5 if name.startswith("ff") else 2) * shape.width for name in config.lora.target_modules)
    return math.floor(config.lora.rank * per_block * shape.layers)


def _rewards_here(config: RunConfig) -> list[str]:
    """Rewards on the device of the policy."""
    here = []
    for name in config.reward.rewards:
        device = config.reward.options.get(name, {}).get("device", config.reward.device)
        if device in (None, "auto", config.model.device):
            here.append(name)
    return here
