"""The `distributed` section of a configuration."""

from dataclasses import dataclass
from typing import Literal

from sage_fast.config.errors import ConfigError


@dataclass(kw_only=True)
class DistributedConfig:
    """How a run is spread over processes, one per GPU, that torchrun or SLURM has started.

    ranks = dp_replicate * dp_shard * sp. Every `sp` consecutive ranks share the tokens of the same videos.

    Raises:
        ValueError: a degree or a time out of range, or settings that exclude each other.

    Example: 64 GPUs as 4 replicas of weights that 16 ranks share, every pair on one video, are
    `DistributedConfig(dp_replicate=4, dp_shard=8, sp=2)`.
    """

    zero_stage: Literal[2, 3] | None = None
    """null: torch's FSDP2. 2 or 3: DeepSpeed ZeRO, which shards gradients and optimizer state over all ranks, with 3
    the weights too."""
    dp_replicate: int | None = None
    """Data-parallel replicas of the weights. null: with training.mode lora what the other degrees leave, else 1."""
    dp_shard: int | None = None
    """Data-parallel ranks over which the weights are sharded; the `sp` ranks of a video share them too. null: 1 with
    training.mode lora, what the other degrees leave with full."""
    sp: int = 1
    """Ulysses sequence parallelism: ranks that share the tokens of a video. It divides the model's heads."""
    keep_gathered: Literal["auto", "never", "rollout", "always"] = "auto"
    """How long sharded weights stay gathered: `never` past the layer that needs them, through a `rollout` with its
    anchor pass, or `always` until they change. Frozen weights (training.mode lora) never change: with `always` every
    rank simply holds them whole. `auto` is always with lora where they take up to a third of the GPU, else rollout."""
    param_dtype: Literal["float32", "bfloat16"] = "float32"
    """Data type in which weights of training.mode full are gathered and computed with. Masters, gradient sums and
    optimizer state are float32."""
    cpu_offload: bool = False
    """Keep sharded weights, gradients and optimizer state in CPU memory."""
    startup_timeout_seconds: float = 1800.0
    """Longest that a rank may take to load the model, and from then until the first update is done, that it may make no
    progress and a collective may wait. Encoding prompts is progress."""
    timeout_seconds: float = 600.0
    """Longest that a rank may make no progress, and that a collective may wait, from then on."""

    def __post_init__(self) -> None:
        for key in ("dp_replicate", "dp_shard", "sp"):
            degree = getattr(self, key)
            if degree is not None and degree < 1:
                raise ValueError(f"{key} is {degree}, but it must be at least 1.")
        for key in ("startup_timeout_seconds", "timeout_seconds"):
            if getattr(self, key) <= 0:
                raise ValueError(f"{key} is {getattr(self, key)}, but it must be positive.")
        if self.zero_stage is not None:
            for key, default in (
                ("keep_gathered", "auto"),
                ("cpu_offload", False),
                ("dp_replicate", None),
                ("dp_shard", None),
            ):
                if getattr(self, key) != default:
                    raise ValueError(
                        f"{key} is {getattr(self, key)!r}, but it belongs to FSDP2, and with distributed.zero_stage "
                        f"{self.zero_stage} DeepSpeed shards over all ranks. Set it to "
                        f"{'null' if default is None else str(default).lower()}, or zero_stage to null."
                    )

    def degrees(self, world_size: int, mode: Literal["lora", "full"]) -> tuple[int, int, int]:
        """(dp_replicate, dp_shard, sp) on `world_size` ranks. ValueError unless their product is that number."""
        replicate, shard, sp = self.dp_replicate, self.dp_shard, self.sp
        if replicate is None and shard is None:
            if mode == "lora":
                shard = 1
            else:
                replicate = 1
        known = (replicate or 1) * (shard or 1) * sp
        rest = world_size // known if world_size % known == 0 else 0
        replicate, shard = (rest if degree is None else degree for degree in (replicate, shard))
        if replicate * shard * sp != world_size:
            shown = ["null" if degree is None else degree for degree in (self.dp_replicate, self.dp_shard)]
            given = f"distributed.dp_replicate {shown[0]}, dp_shard {shown[1]} and sp {sp}"
            raise ValueError(
                f"{given} do not fit {world_size} process(es): their product must be that number (null takes what the "
                f"others leave). Start {known} or a multiple, as by torchrun --nproc_per_node={known}, or change them."
            )
        return replicate, shard, sp


def check_heads(sp: int, heads: int) -> None:
    """ConfigError unless the `sp` ranks of a video can share the attention heads of a model evenly."""
    if heads % sp:
        allowed = ", ".join(str(degree) for degree in range(1, heads + 1) if heads % degree == 0)
        raise ConfigError(
            f"distributed.sp is {sp}, which does not divide the model's {heads} attention heads. Set it to one of "
            f"{allowed}."
        )
