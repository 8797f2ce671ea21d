"""Memory of a configuration in a few lines, for `doctor`: the planner's figures (`sage_fast.planning`), grouped."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from sage_fast.config.errors import ConfigError
from sage_fast.config.schema import RunConfig
from sage_fast.models.family import ModelDescription
from sage_fast.planning.estimate import checkpoint_bytes as bytes_of_checkpoint
from sage_fast.planning.estimate import resident_bytes
from sage_fast.planning.layout import least_gpus, plan_layout
from sage_fast.planning.memory import CUDA_RUNTIME, model_calls, plan_memory
from sage_fast.planning.weights import count_weights, gathered_weights

GB = 1e9

GROUPS = {
    "weights": ("transformer", "gathered weights", "weights in flight"),
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

    processes: GPUs that share the work, each of which needs that much.

    Example: `Footprint(parts={"weights": 16.7, "activations": 29.7, ...}, total=62.7, phase="update", tokens=32760)`
    """

    parts: dict[str, float]
    total: float
    phase: str
    tokens: int
    processes: int = 1


def estimate(
    config: RunConfig,
    description: ModelDescription,
    sizes: Mapping[str, float] | None = None,
    *,
    on_gpu: bool = True,
    memory_gb: float = 80.0,
) -> Footprint:
    """Peak memory of training with a configuration, on each of the fewest GPUs that its degrees fit.

    Args:
        description: of the model.
        sizes: gigabytes of the weights that are here, by reward.
        memory_gb: of a GPU; it decides whether gathered weights stay.

    Raises:
        ConfigError: the video's size, the degrees or the options do not fit the model.
    """
    video = config.video
    try:
        latent = description.latent_shape(video.num_frames, video.height, video.width)
        tokens, heads = prod(latent[1:]), description.transformer["num_attention_heads"]
        layout = plan_layout(config, least_gpus(config), heads, tokens)
        weights = count_weights(config, description.transformer)
        memory = plan_memory(
            config,
            description,
            on_gpu=on_gpu,
            calls=model_calls(config, description, on_gpu, layout.sp),
            weights=weights,
            sizes=sizes or {},
            runtime=CUDA_RUNTIME if on_gpu else resident_bytes(),
            layout=layout,
            gathered=gathered_weights(config, weights, description.num_layers, layout, memory_gb * GB),
        )
    except ValueError as error:
        raise ConfigError(str(error)) from error
    parts = {
        group: max(sum(phase.get(name, 0.0) for name in names) for phase in memory.phases.values()) / GB
        for group, names in GROUPS.items()
    }
    return Footprint(parts=parts, total=memory.peak / GB, phase=memory.peak_phase, tokens=tokens, processes=layout.gpus)


def checkpoint_bytes(config: RunConfig, description: ModelDescription) -> int:
    """Bytes of one checkpoint, all ranks together."""
    return int(bytes_of_checkpoint(config, count_weights(config, description.transformer)))
