"""The sections `data`, `video`, `rollout` and `evaluation` of a configuration: which videos are sampled, and how.

Each field has its meaning below it. Checks of one section live in its `__post_init__`.
"""

import math
from dataclasses import dataclass, field
from typing import Literal

from sage_fast.config.errors import ConfigError
from sage_fast.config.limits import require
from sage_fast.config.resumable import FIXED, FREE, MACHINE, PACE, PAIRS, PLACE, fixed, free
from sage_fast.sde import SAGE_SIGMA_MARGIN

SDEType = Literal["sage_grpo", "sage_exact", "dance_grpo", "flow_grpo", "cps", "ode"]


@dataclass(kw_only=True)
class DataConfig:
    """Training prompts."""

    prompts: str = field(metadata={FREE: PLACE})
    """CSV (columns prompt, optional index and seed), JSONL or text file of prompts. A relative path is looked for in
    the folder of the YAML that names it, then in the working directory, then among the files that ship."""
    shuffle: bool = True
    """Visit the prompts in a new order every epoch (a function of the run's seed and the epoch)."""


@dataclass(kw_only=True)
class VideoConfig:
    """Size of the generated videos, in pixels."""

    num_frames: int = 81
    """Frames per video."""
    height: int = 352
    """Rows."""
    width: int = 624
    """Columns."""
    fps: float = 24.0
    """Frames per second of the files that are written, and what rewards with an option `fps` are told."""

    def __post_init__(self) -> None:
        for key in ("num_frames", "height", "width"):
            require(getattr(self, key) >= 1, f"video.{key}", getattr(self, key), "at least 1")
        # A frame every ten minutes: with less, lengths in seconds overflow.
        require(1 / 600 <= self.fps < math.inf, "video.fps", self.fps, "at least 1 / 600, and finite")


@dataclass(kw_only=True)
class SDEWindowConfig:
    """Draw noise, and train, only in some of the rollout steps; the others are ODE steps."""

    steps: list[int] | None = None
    """A fixed set of step indices. Cannot be combined with `size`."""
    size: int | None = None
    """Width of a sliding window of steps; null leaves every step stochastic."""
    start: int = 0
    """First step of the sliding window at the first update."""
    stride: int = 1
    """Steps by which the window moves (0 keeps it in place); it wraps around at the last step."""
    interval: int = 1
    """Rollouts between two moves."""

    def __post_init__(self) -> None:
        if self.steps is not None and self.size is not None:
            raise ConfigError(
                "rollout.sde_window has both steps and size: set steps for a fixed set of steps, "
                "or size for a sliding window, and leave the other null."
            )
        moves = (self.start, self.stride, self.interval) != (0, 1, 1)
        if self.size is None and moves:
            raise ConfigError(
                f"rollout.sde_window.start {self.start}, stride {self.stride} and interval {self.interval} move a "
                "sliding window, but rollout.sde_window.size is null. Set size, or leave the three at 0, 1 and 1."
            )
        require(self.steps is None or len(self.steps) > 0, "rollout.sde_window.steps", self.steps, "null or non-empty")
        require(self.size is None or self.size >= 1, "rollout.sde_window.size", self.size, "null or at least 1")
        require(self.start >= 0, "rollout.sde_window.start", self.start, "at least 0")
        require(self.stride >= 0, "rollout.sde_window.stride", self.stride, "at least 0")
        require(self.interval >= 1, "rollout.sde_window.interval", self.interval, "at least 1")


@dataclass(kw_only=True)
class RolloutConfig:
    """How the videos of an update are sampled."""

    sde_type: SDEType = "sage_grpo"
    """Sampler of the exploration. `ode` draws no noise, so it cannot be trained with."""
    num_steps: int = fixed(20, PAIRS)
    """Denoising steps T."""
    shift: float = fixed(5.0, PAIRS)
    """Timestep shift of the sigma schedule."""
    eta: float = 0.5
    """Noise scale of the sampler; 0 is the ODE."""
    sage_sigma_margin: float = SAGE_SIGMA_MARGIN
    """`sage_grpo` takes the variance of its first step as if that began at 1 - sage_sigma_margin, because the exact one
    is infinite. The first step's variance depends on it: at 20 steps with shift 5 and eta 0.5 it is 0.58, 0.31 and
    0.008 for 1e-3, 3e-3 and 1e-2."""
    guidance_scale: float = fixed(6.0, PAIRS)
    """Classifier-free guidance; 1 evaluates the conditional branch only."""
    negative_prompt: str = fixed("", PAIRS)
    """Prompt of the unconditional branch, which guidance leads away from; empty as in the reference."""
    num_generations: int = 4
    """Group size G: videos per prompt that compete."""
    batch_size: int = free(4, MACHINE)
    """Videos per rollout on each data-parallel rank; batch_size * ranks must be a multiple of num_generations."""
    micro_batch_size: int = free(1, MACHINE)
    """Videos that go through the model at once. Rollout and update share it, so that their velocities agree bit for
    bit and the ratio starts at exactly 1."""
    shared_initial_noise: bool = False
    """Start all videos of a group from the same noise, so that only the sampler's noise tells them apart."""
    sde_window: SDEWindowConfig = field(default_factory=SDEWindowConfig)
    """Steps that draw noise."""

    def __post_init__(self) -> None:
        require(self.num_steps >= 2, "rollout.num_steps", self.num_steps, "at least 2")
        require(self.shift > 0, "rollout.shift", self.shift, "positive")
        require(self.eta >= 0, "rollout.eta", self.eta, "at least 0")
        require(0 < self.sage_sigma_margin < 1, "rollout.sage_sigma_margin", self.sage_sigma_margin, "between 0 and 1")
        if self.sde_type != "sage_grpo" and self.sage_sigma_margin != SAGE_SIGMA_MARGIN:
            raise ConfigError(
                f"rollout.sage_sigma_margin {self.sage_sigma_margin} does nothing with rollout.sde_type "
                f"{self.sde_type}: it belongs to sage_grpo. Leave it at {SAGE_SIGMA_MARGIN}."
            )
        require(self.guidance_scale >= 0, "rollout.guidance_scale", self.guidance_scale, "at least 0")
        require(
            not self.negative_prompt or self.guidance_scale != 1,
            "rollout.negative_prompt",
            self.negative_prompt,
            "empty with rollout.guidance_scale 1, where there is no unconditional branch",
        )
        require(
            self.num_generations >= 2,
            "rollout.num_generations",
            self.num_generations,
            "at least 2: an advantage compares the videos of one prompt",
        )
        require(self.batch_size >= 1, "rollout.batch_size", self.batch_size, "at least 1")
        require(
            self.micro_batch_size >= 1 and self.batch_size % self.micro_batch_size == 0,
            "rollout.micro_batch_size",
            self.micro_batch_size,
            f"a divisor of rollout.batch_size = {self.batch_size}",
        )
        window = self.sde_window
        require(
            window.steps is None or all(0 <= i < self.num_steps for i in window.steps),
            "rollout.sde_window.steps",
            window.steps,
            f"a list of indices in 0..{self.num_steps - 1} (rollout.num_steps = {self.num_steps})",
        )
        require(
            window.size is None or window.size <= self.num_steps,
            "rollout.sde_window.size",
            window.size,
            f"at most rollout.num_steps = {self.num_steps}",
        )
        require(window.start < self.num_steps, "rollout.sde_window.start", window.start, f"less than {self.num_steps}")

    @property
    def ode_steps(self) -> int:
        """Steps outside the SDE window."""
        window = self.sde_window
        noisy = window.size if window.steps is None else len(set(window.steps))
        return 0 if noisy is None else self.num_steps - noisy


@dataclass(kw_only=True)
class EvaluationConfig:
    """The paired evaluation: the same prompts and the same noise before and after."""

    prompts: str | None = free(None, PLACE)
    """Prompt file, found like `data.prompts`; null evaluates on the training prompts."""
    num_prompts: int | None = fixed(None, PAIRS)
    """Use only the first so many prompts."""
    every: int = free(20, PACE)
    """Updates between evaluations; 0 turns evaluation off."""
    num_steps: int | None = fixed(None, PAIRS)
    """Denoising steps; null takes the rollout's."""
    sampler: SDEType = field(default="ode", metadata={FIXED: PAIRS})
    """Sampler: `ode`, or an SDE type, whose noise is the same before and after too."""
    eta: float | None = fixed(None, PAIRS)
    """Noise scale of an SDE sampler; null takes the rollout's."""
    num_frames: int | None = fixed(None, PAIRS)
    """Frames per video; null takes those of the training."""
    height: int | None = fixed(None, PAIRS)
    """Rows; null takes those of the training."""
    width: int | None = fixed(None, PAIRS)
    """Columns; null takes those of the training."""
    batch_size: int = free(1, MACHINE)
    """Videos that go through the model at once."""
    seed: int = fixed(1_000_003, PAIRS)
    """Seed of the evaluation noise, apart from the training noise."""
    num_samples: int = free(4, PACE)
    """Videos written to samples/ at every evaluation (mp4 and a contact sheet)."""

    def __post_init__(self) -> None:
        require(self.every >= 0, "evaluation.every", self.every, "at least 0")
        require(
            self.num_prompts is None or self.num_prompts >= 2, "evaluation.num_prompts", self.num_prompts, "at least 2"
        )
        require(self.num_steps is None or self.num_steps >= 2, "evaluation.num_steps", self.num_steps, "at least 2")
        for key in ("num_frames", "height", "width"):
            value = getattr(self, key)
            require(value is None or value >= 1, f"evaluation.{key}", value, "null or at least 1")
        require(self.eta is None or self.eta >= 0, "evaluation.eta", self.eta, "null or at least 0")
        require(self.eta is None or self.sampler != "ode", "evaluation.eta", self.eta, "null with the sampler ode")
        require(self.batch_size >= 1, "evaluation.batch_size", self.batch_size, "at least 1")
        require(self.num_samples >= 0, "evaluation.num_samples", self.num_samples, "at least 0")
