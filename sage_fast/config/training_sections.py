"""The sections `reward`, `advantage`, `optimizer`, `training`, `checkpoint` and `logging` of a configuration.

Each field has its meaning below it. Checks of one section live in its `__post_init__`.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

from sage_fast.config.errors import ConfigError
from sage_fast.config.limits import require
from sage_fast.config.resumable import FIXED, MACHINE, PACE, PAIRS, REMEDY, SHAPES, fixed, free


@dataclass(kw_only=True)
class RewardConfig:
    """What is maximised."""

    rewards: list[str] = field(default_factory=lambda: ["toy"], metadata={FIXED: PAIRS})
    """Short names, or `package.module:Class` or `package.module:function` of your own; each yields named scores."""
    options: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Arguments per entry of `rewards`."""
    weights: dict[str, float] = field(
        default_factory=lambda: {"VQ": 1.0, "MQ": 1.0, "TA": 1.0}, metadata={FIXED: PAIRS}
    )
    """Score name -> weight. Scores without a weight are logged, not trained on."""
    on_failure: Literal["stop", "drop_group"] = free("stop", REMEDY)
    """When a reward raises or returns a non-finite score: `stop` ends the run; `drop_group` leaves that prompt's group
    out of the update, and the prompt out of the paired evaluation, which then compares the prompts scored in both."""
    device: str | None = free(None, MACHINE)
    """Device of the rewards that have an option `device` and are not given it in `options`, such as `cuda:1` next to
    a policy on cuda:0; null is the policy's."""

    def __post_init__(self) -> None:
        require(bool(self.rewards), "reward.rewards", self.rewards, "a non-empty list")
        require(len(set(self.rewards)) == len(self.rewards), "reward.rewards", self.rewards, "a list without repeats")
        require(any(self.weights.values()), "reward.weights", self.weights, "at least one non-zero weight")
        unknown = set(self.options) - set(self.rewards)
        if unknown:
            raise ConfigError(
                f"reward.options has an entry for {sorted(unknown)}, which reward.rewards = {self.rewards} lacks. "
                "Add it there or remove its options."
            )


@dataclass(kw_only=True)
class AdvantageConfig:
    """How rewards become advantages."""

    normalization: Literal["sum", "per_reward"] = "sum"
    """`sum`: weighted sum of the rewards, then one normalisation. `per_reward`: normalise each, then sum."""
    std: Literal["group", "global"] = "group"
    """Divide by the population std of the prompt's group, or of the whole batch."""
    clip: float = 5.0
    """Advantages are clamped to +-clip."""
    eps: float = 1e-6
    """Added to the std. A group with no spread gives zero advantages whatever eps is."""

    def __post_init__(self) -> None:
        require(self.clip > 0, "advantage.clip", self.clip, "positive")
        require(self.eps >= 0, "advantage.eps", self.eps, "at least 0")


@dataclass(kw_only=True)
class OptimizerConfig:
    """Optimizer and learning rate."""

    name: Literal["muon", "adamw"] = fixed("muon", SHAPES)
    """`muon` (torch.optim.Muon for matrices, AdamW for everything else) or `adamw`."""
    learning_rate: float = 1e-5
    """Learning rate after warm-up."""
    warmup_updates: int = 0
    """Updates over which the learning rate rises linearly from 0."""
    weight_decay: float = 0.01
    """Decoupled weight decay."""
    betas: tuple[float, float] = (0.9, 0.999)
    """AdamW's running averages."""
    eps: float = 1e-8
    """AdamW's epsilon."""
    momentum: float = 0.95
    """Muon's momentum."""
    max_grad_norm: float = 1.0
    """Global gradient norm above which gradients are scaled down."""

    def __post_init__(self) -> None:
        require(self.eps > 0, "optimizer.eps", self.eps, "positive")
        require(self.learning_rate > 0, "optimizer.learning_rate", self.learning_rate, "positive")
        require(self.warmup_updates >= 0, "optimizer.warmup_updates", self.warmup_updates, "at least 0")
        require(self.weight_decay >= 0, "optimizer.weight_decay", self.weight_decay, "at least 0")
        require(all(0 <= b < 1 for b in self.betas), "optimizer.betas", self.betas, "two numbers in [0, 1)")
        require(0 <= self.momentum < 1, "optimizer.momentum", self.momentum, "in [0, 1)")
        require(self.max_grad_norm > 0, "optimizer.max_grad_norm", self.max_grad_norm, "positive")


@dataclass(kw_only=True)
class TrainOnConfig:
    """Which videos of a group are trained: the best and the worst by advantage, or with both at 0 all of them.

    Biased: advantages are still those of the whole group, but loss and gradient are the mean over the trained videos
    alone.
    """

    best: int = 0
    """Videos of each group with the highest advantage; of equal ones the first."""
    worst: int = 0
    """Videos of each group with the lowest advantage; of equal ones the last."""

    def __post_init__(self) -> None:
        for key in ("best", "worst"):
            require(getattr(self, key) >= 0, f"training.train_on.{key}", getattr(self, key), "at least 0")

    @property
    def count(self) -> int:
        """Videos of each group that are trained; 0 is all."""
        return self.best + self.worst


@dataclass(kw_only=True)
class TrainingConfig:
    """The training loop."""

    num_updates: int = free(200, PACE)
    """Optimizer updates in all."""
    mode: Literal["lora", "full"] = fixed("lora", SHAPES)
    """Train adapters, or every weight that influences the video. `full` keeps float32 weights; it computes in
    float32, or in distributed.param_dtype where FSDP2 gathers them."""
    update: Literal["two_phase", "single_pass"] = free("two_phase", MACHINE)
    """`two_phase` rolls out first and runs the model again for the gradient. `single_pass` takes the gradient during
    the rollout and weighs it when the rewards arrive: the same gradient, a forward less. It keeps a copy of the
    adapters per video of the rollout, and one per group where a KL acts: 225 MB each at lora.rank 32 with the default
    targets. It pays with objective.kl_mode none and stepwise; docs/policy.md has the arithmetic."""
    guidance: Literal["paired", "split", "conditional"] = free("paired", REMEDY)
    """Gradient through guidance: `paired` holds the activations of both branches at once, `split` differentiates them
    one after the other, with half the memory; it takes a forward more from the second update of a rollout on.
    `conditional` differentiates the conditional branch alone, g dv_c in place of g dv_c + (1 - g) dv_u: half the
    backward passes, half the memory, and another gradient than the objective's."""
    updates_per_rollout: int = 1
    """Optimizer updates from one rollout. 1 is on-policy; more split the trained steps into mini-batches."""
    train_on: TrainOnConfig = field(default_factory=TrainOnConfig)
    """Videos of each group that are trained."""
    timestep_fraction: float = 1.0
    """Share of the trainable steps of each video that is trained, rounded down, at least one. With permute_timesteps
    they are a random choice, so the gradient is unbiased; without it they are the first steps."""
    kl_share_every: int = free(0, REMEDY)
    """Updates between two measurements of `kl/grad_share`, the norm of the KL's part of the gradient over that of the
    surrogate's; 0 never measures. One takes two more passes of the update phase and changes no other number."""
    permute_timesteps: bool = True
    """Visit each video's steps in its own random order."""
    anchor_interval: int = 10
    """Updates between two refreshes of the moving anchor (kl_mode moving or dual)."""
    ema_decay: float | None = None
    """Keep an exponential moving average of the trained weights and evaluate with it; null is off."""
    skip_nonfinite_updates: int = free(0, REMEDY)
    """Updates that may be left out in all because their loss or gradient is not finite; one more stops the run. A
    skipped update counts as an update, but weights, optimizer and average stay as they are."""

    def __post_init__(self) -> None:
        require(self.num_updates >= 1, "training.num_updates", self.num_updates, "at least 1")
        require(self.updates_per_rollout >= 1, "training.updates_per_rollout", self.updates_per_rollout, "at least 1")
        require(
            self.num_updates % self.updates_per_rollout == 0,
            "training.num_updates",
            self.num_updates,
            f"a multiple of training.updates_per_rollout = {self.updates_per_rollout}",
        )
        require(0 < self.timestep_fraction <= 1, "training.timestep_fraction", self.timestep_fraction, "in (0, 1]")
        require(
            self.skip_nonfinite_updates >= 0,
            "training.skip_nonfinite_updates",
            self.skip_nonfinite_updates,
            "at least 0",
        )
        require(self.kl_share_every >= 0, "training.kl_share_every", self.kl_share_every, "at least 0")
        require(self.anchor_interval >= 1, "training.anchor_interval", self.anchor_interval, "at least 1")
        require(
            self.ema_decay is None or 0 < self.ema_decay < 1, "training.ema_decay", self.ema_decay, "null or in (0, 1)"
        )


@dataclass(kw_only=True)
class CheckpointConfig:
    """What is kept to resume from."""

    every: int = 10
    """Updates between checkpoints; the last update is always saved."""
    keep_last: int = 3
    """The newest checkpoints that are kept. The best one by evaluation is kept besides."""
    keep_every: int | None = None
    """Also keep for good the first checkpoint at or after every multiple of this many updates: a slow divergence
    outlasts the newest ones. null keeps none."""
    asynchronous: bool = True
    """Write in the background while training goes on; it stalls for a copy into CPU memory alone. A failure to write
    is reported at the next checkpoint or at the end."""

    def __post_init__(self) -> None:
        require(self.every >= 1, "checkpoint.every", self.every, "at least 1")
        require(self.keep_last >= 1, "checkpoint.keep_last", self.keep_last, "at least 1")
        require(self.keep_every is None or self.keep_every >= 1, "checkpoint.keep_every", self.keep_every, "at least 1")


@dataclass(kw_only=True)
class LoggingConfig:
    """Where metrics go besides metrics.jsonl."""

    tensorboard: bool = True
    """Write TensorBoard events into the run directory."""
    wandb_project: str | None = None
    """Log to this Weights & Biases project; needs `pip install wandb`."""
