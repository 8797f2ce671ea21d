"""Memory of a configuration in a few lines, for `doctor`: the planner's figures (`sage_fast.planning`), grouped."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from sage_fast.config import ConfigError, RunConfig
from sage_fast.objective import anchor_kind
from sage_fast.planning.memory import CUDA_RUNTIME, count_weights, model_calls, plan_memory
from sage_fast.planning.plan import resident_bytes
from sage_fast.policy.description import ModelDescription

GB = 1e9

GROUPS = {
    "weights": ("transformer",),
    "gradients, optimizer, anchor": (
        "adapters",
        "gradients",
        "optimizer state",
        "anchor",
        "average (EMA)",
        "gradient accumulators",
    ),
    "trajectories": ("trajectories", "anchor velocities", "videos"),
    "prompt encoder": ("prompt encoder",),
    "VAE": ("video decoder",),
    "rewards": ("reward models", "rewards' tables"),
    "runtime": ("runtime",),
    "activations": ("kept activations",),
    "working set": ("working set", "tables", "optimizer step", "fragmentation"),
    "decoding": ("decoding",),
    "scoring": ("scoring",),
}
"""What is shown -> the planner's components."""


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """Gigabytes (1e9 bytes): `total` at the peak, in `phase`; each part at its own peak, so they add up to more.

    Example: `Footprint(parts={"weights": 16.7, "activations": 29.7, ...}, total=62.7, phase="update", tokens=32760)`
    """

    parts: dict[str, float]
    total: float
    phase: str
    tokens: int


def estimate(
    config: RunConfig, description: ModelDescription, sizes: Mapping[str, float] | None = None, *, on_gpu: bool = True
) -> Footprint:
    """Peak memory of training with a configuration, on its one process.

    Args:
        description: of the model.
        sizes: gigabytes of the weights beside it that are known: `vae`, and rewards by name.

    Raises:
        ConfigError: the video's size or the options do not fit the model.
    """
    video = config.video
    try:
        latent = description.latent_shape(video.num_frames, video.height, video.width)
        memory = plan_memory(
            config,
            description,
            on_gpu=on_gpu,
            calls=model_calls(config, description, on_gpu),
            weights=count_weights(config, description.transformer),
            sizes=sizes or {},
            runtime=CUDA_RUNTIME if on_gpu else resident_bytes(),
        )
    except ValueError as error:
        raise ConfigError(str(error)) from error
    parts = {
        group: max(sum(phase.get(name, 0.0) for name in names) for phase in memory.phases.values()) / GB
        for group, names in GROUPS.items()
    }
    return Footprint(parts=parts, total=memory.peak / GB, phase=memory.peak_phase, tokens=prod(latent[1:]))


def checkpoint_bytes(config: RunConfig, description: ModelDescription) -> int:
    """Bytes of one checkpoint: float32 weights, optimizer state, anchor and average, and the adapter once more."""
    weights = count_weights(config, description.transformer)
    copies = 1 + (config.training.mode == "lora") + (config.training.ema_decay is not None)
    copies += anchor_kind(config.objective.kl_mode) != "none"
    return 4 * (weights.trained * copies + weights.moments)
