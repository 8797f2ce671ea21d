"""What a run is made of: one typed section per concern, each field with its meaning below it.

Checks of one value live in its section's `__post_init__`; checks that need two sections live in
`RunConfig.__post_init__`. `load.py` reads and writes these as YAML.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from sage_fast.config.distributed import DistributedConfig
from sage_fast.config.errors import ConfigError as ConfigError
from sage_fast.config.resumable import FIXED, FREE, MACHINE, PACE, PAIRS, PLACE, REMEDY, SHAPES, fixed, free
from sage_fast.objective import KLWeightConfig, ObjectiveConfig, anchor_kind
from sage_fast.sde import SAGE_SIGMA_MARGIN

SDEType = Literal["sage_grpo", "sage_exact", "dance_grpo", "flow_grpo", "cps", "ode"]


def _require(condition: bool, key: str, value: object, allowed: str) -> None:
    if not condition:
        raise ConfigError(f"{key} is {value!r}, but it must be {allowed}.")


MOST_INTEGER = 10**6
MOST_NUMBER = 1e9
"""Magnitudes that no setting exceeds, except where `_MOST` says otherwise. Far above any use: they keep typing errors
such as 1e30 from overflowing, or from filling memory, deep inside a run."""

_MOST: dict[str, float] = {
    "seed": 2**63 - 1,
    "evaluation.seed": 2**63 - 1,
    "num_threads": 1024,
    "video.num_frames": 10_000,
    "video.height": 16_384,
    "video.width": 16_384,
    "video.fps": 1000,
    "rollout.num_steps": 10_000,
    "rollout.num_generations": 10_000,
    "rollout.batch_size": 10_000,
    "evaluation.num_steps": 10_000,
    "evaluation.num_frames": 10_000,
    "evaluation.height": 16_384,
    "evaluation.width": 16_384,
    "evaluation.batch_size": 10_000,
    "optimizer.learning_rate": 1e30,  # what a step does to the weights is checked where it is made
    "reward.timeout_seconds": 30 * 86_400,
    "distributed.startup_timeout_seconds": 30 * 86_400,
    "distributed.timeout_seconds": 30 * 86_400,
    "training.num_updates": 10**9,
    "training.anchor_interval": 10**9,
    "evaluation.every": 10**9,
    "checkpoint.every": 10**9,
}


def _check_leaves(value: object, key: str) -> None:
    """Every number is finite and of a magnitude that can be meant; every string can be a path and be printed."""
    if isinstance(value, Mapping):
        for name, part in value.items():
            _check_leaves(name, f"a name in {key}")
            _check_leaves(part, f"{key}.{name}" if key else name)
    elif isinstance(value, list | tuple):
        for part in value:
            _check_leaves(part, key)
    elif isinstance(value, str):
        _require("\0" not in value and _is_unicode(value), key, value, "text without NUL and unpaired surrogates")
    elif isinstance(value, int | float) and not isinstance(value, bool):
        _require(math.isfinite(value), key, value, "a finite number")
        if not key.startswith("reward.options."):
            most = _MOST.get(key, MOST_INTEGER if isinstance(value, int) else MOST_NUMBER)
            _require(abs(value) <= most, key, value, f"at most {most:,}")


def _is_unicode(text: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in text)


@dataclass(kw_only=True)
class ModelConfig:
    """Which text-to-video model is trained."""

    family: str = fixed("toy", SHAPES)
    """Short name of a model family, or `package.module:Class` of a `ModelFamily` or of a function that returns
    `Components`."""
    path: str | None = free(None, PLACE)
    """Folder of the weights, or the id of a repository on the Hugging Face hub; null takes the family's own default."""
    variant: str | None = fixed(None, SHAPES)
    """Which transformer of a folder that holds several, such as 480p_t2v; null takes the only one that can be used."""
    cache_dir: str | None = free(None, PLACE)
    """Where prompt embeddings and converted weights are kept; null keeps them in `.sage_fast` inside `path`, or in
    ~/.cache/sage_fast where `path` is not a folder that can be written to."""
    dtype: Literal["float32", "bfloat16"] = fixed("float32", SHAPES)
    """Data type of the frozen transformer weights. Trained weights are always float32."""
    adapter: str | None = fixed(None, SHAPES)
    """LoRA adapter to start from: the folder or .safetensors file of another run's export, the lora/ folder of a
    checkpoint, or a file of the official trainer. It is loaded before training (training.mode lora; lora.rank and
    target_modules must fit), and is part of what the run calls its initial weights: the fixed anchor, and "before" in
    the paired evaluation."""
    text_encoder_dtype: Literal["auto", "float32", "bfloat16", "float16"] = fixed("auto", PAIRS)
    """Data type in which the language model encodes prompts: `auto` is that of its files, bfloat16 as published; the
    official code's is float16. Encoded prompts are kept apart by it."""
    vae_dtype: Literal["auto", "float32", "bfloat16", "float16"] = free("auto", MACHINE)
    """Data type in which videos are decoded; `auto` is float16 on a GPU, like the official code's, and float32 on a
    CPU."""
    decode_memory_gib: float | Literal["auto"] | None = free("auto", MACHINE)
    """Memory that decoding may take for activations. As many videos as fit are decoded at once; one that does not fit
    is decoded in overlapping tiles, which is more work. `auto` decodes a video whole where the plan has room for it on
    the GPU beside all else, and is 16 elsewhere; null decodes every video whole."""
    device: str = free("auto", MACHINE)
    """`auto`, `cpu`, `cuda` or `cuda:N`."""
    kernels: Literal["auto", "reference", "triton"] = free("auto", MACHINE)
    """How the steps of a rollout and the loss are computed: `triton` by the kernels of sage_kernels, `reference` by
    plain PyTorch, `auto` by Triton on a GPU and PyTorch elsewhere."""
    forward: Literal["fused", "stock"] = free("fused", MACHINE)
    """`fused` computes diffusers' transformer with packed tokens and the kernels of sage_kernels; `stock` is diffusers'
    own forward, the reference."""
    attention: Literal["auto", "cudnn", "flash2", "flash3", "flash4", "xformers", "sdpa", "reference"] = free(
        "auto", MACHINE
    )
    """Attention backend of the fused forward. `auto` takes the fastest one that is installed and says which; one named
    here that cannot run is an error."""
    fp8: bool = False
    """Large products of the blocks are in FP8 where no gradient depends on them: in the steps of a rollout that draw no
    noise, and in the anchor's velocities. It needs frozen weights that every rank holds whole, and a GPU of compute
    capability 8.9 or more; on a CPU its rounding is emulated, as a reference."""
    deterministic: bool = free(False, MACHINE)
    """Only attention backends whose backward pass gives the same bits every time."""
    checkpointing: Literal["none", "feed_forward", "selective", "full", "auto"] = free("none", MACHINE)
    """What a transformer block keeps for its backward pass: `none` recomputes elementwise work only, `feed_forward`
    also the first product of the feed-forward, `selective` keeps attention's result and recomputes the rest, `full`
    recomputes everything. `none` takes 73 GB per guidance branch of HunyuanVideo-1.5 at 480x832. `auto` chooses between
    the other three, and `lighter_blocks` with it, so that the plan fills the GPU's memory; it is `selective` on a
    CPU."""
    lighter_blocks: int = free(0, MACHINE)
    """The last so many blocks keep more: what `selective` keeps with checkpointing full, what `feed_forward` keeps with
    checkpointing selective."""
    offload_activations: bool = free(False, MACHINE)
    """Keep in CPU memory, instead of the GPU's, what `checkpointing` keeps."""
    adaln: Literal["auto", "weights", "table", "offload"] = free("auto", MACHINE)
    """Where the timestep modulation comes from: `weights` computes it in every forward; `table` computes it once per
    noise level, which needs frozen AdaLN weights; `offload` is `table` with those weights in CPU memory. `auto` is
    `table` where the AdaLN weights are frozen and `weights` elsewhere."""
    compile: bool = free(False, MACHINE)
    """torch.compile the text refiner, which depends on the timestep and is what the kernels leave. One graph serves
    prompts of every length."""

    def __post_init__(self) -> None:
        limit = self.decode_limit_gib
        _require(limit is None or limit > 0, "model.decode_memory_gib", limit, "auto, null or positive")
        if self.forward == "stock":
            _require(self.attention == "auto", "model.attention", self.attention, "auto with model.forward stock")
            _require(
                self.checkpointing in ("none", "full"),
                "model.checkpointing",
                self.checkpointing,
                "none or full with model.forward stock",
            )
            for key in ("deterministic", "offload_activations", "compile", "fp8"):
                _require(not getattr(self, key), f"model.{key}", True, "false with model.forward stock")
            _require(self.adaln in ("auto", "weights"), "model.adaln", self.adaln, "auto with model.forward stock")
        _require(self.lighter_blocks >= 0, "model.lighter_blocks", self.lighter_blocks, "at least 0")
        if self.lighter_blocks and (self.checkpointing not in ("selective", "full") or self.forward == "stock"):
            raise ConfigError(
                f"model.lighter_blocks is {self.lighter_blocks}, but it belongs to model.forward fused with "
                f"model.checkpointing selective or full, and these are {self.forward} and {self.checkpointing}. Set "
                "lighter_blocks to 0, or change the other two."
            )
        if self.offload_activations and (self.lighter_blocks or self.checkpointing == "auto"):
            raise ConfigError(
                "model.offload_activations keeps activations in CPU memory, so they do not fill the GPU's, but "
                f"model.checkpointing is {self.checkpointing} with lighter_blocks {self.lighter_blocks}. Set "
                "offload_activations to false, or checkpointing to selective with lighter_blocks 0."
            )

    @property
    def settled_checkpointing(self) -> Literal["none", "feed_forward", "selective", "full"]:
        """`checkpointing` as one of a block's, which it is for `auto` too where no plan has settled it."""
        return "selective" if self.checkpointing == "auto" else self.checkpointing

    @property
    def decode_limit_gib(self) -> float | None:
        """`decode_memory_gib` as a number, which it is for `auto` too where no plan has settled it."""
        return 16.0 if self.decode_memory_gib == "auto" else self.decode_memory_gib

    def decode_dtype(self, on_gpu: bool) -> str:
        """`vae_dtype` as the name of a type of torch, which it is for `auto` too."""
        return ("float16" if on_gpu else "float32") if self.vae_dtype == "auto" else self.vae_dtype


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
    """Frames per second of the files that are written."""

    def __post_init__(self) -> None:
        for key in ("num_frames", "height", "width"):
            _require(getattr(self, key) >= 1, f"video.{key}", getattr(self, key), "at least 1")
        # A frame every ten minutes: with less, lengths in seconds overflow.
        _require(1 / 600 <= self.fps < math.inf, "video.fps", self.fps, "at least 1 / 600, and finite")


@dataclass(kw_only=True)
class DataConfig:
    """Training prompts."""

    prompts: str = field(metadata={FREE: PLACE})
    """CSV (columns prompt, optional index and seed), JSONL or text file of prompts. A relative path is looked for in
    the folder of the YAML that names it, then in the working directory, then among the files that ship."""
    shuffle: bool = True
    """Visit the prompts in a new order every epoch (a function of the run's seed and the epoch)."""


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
        _require(self.steps is None or len(self.steps) > 0, "rollout.sde_window.steps", self.steps, "null or non-empty")
        _require(self.size is None or self.size >= 1, "rollout.sde_window.size", self.size, "null or at least 1")
        _require(self.start >= 0, "rollout.sde_window.start", self.start, "at least 0")
        _require(self.stride >= 0, "rollout.sde_window.stride", self.stride, "at least 0")
        _require(self.interval >= 1, "rollout.sde_window.interval", self.interval, "at least 1")


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
    """Start all videos of a group from the same noise, so that only the sampler's noise tells them apart. The steps
    before the first noise of an SDE window are then taken once per group."""
    sde_window: SDEWindowConfig = field(default_factory=SDEWindowConfig)
    """Steps that draw noise."""
    cache_threshold: float = 0.0
    """Steps outside the SDE window, which are never trained, run the first block of the transformer alone where what it
    adds has changed by at most this share since the blocks last ran, and use again what the others added then. It
    changes the sampler, not the gradient's exactness. 0 turns it off."""

    def __post_init__(self) -> None:
        _require(self.num_steps >= 2, "rollout.num_steps", self.num_steps, "at least 2")
        _require(self.shift > 0, "rollout.shift", self.shift, "positive")
        _require(self.eta >= 0, "rollout.eta", self.eta, "at least 0")
        _require(0 < self.sage_sigma_margin < 1, "rollout.sage_sigma_margin", self.sage_sigma_margin, "between 0 and 1")
        if self.sde_type != "sage_grpo" and self.sage_sigma_margin != SAGE_SIGMA_MARGIN:
            raise ConfigError(
                f"rollout.sage_sigma_margin {self.sage_sigma_margin} does nothing with rollout.sde_type "
                f"{self.sde_type}: it belongs to sage_grpo. Leave it at {SAGE_SIGMA_MARGIN}."
            )
        _require(self.guidance_scale >= 0, "rollout.guidance_scale", self.guidance_scale, "at least 0")
        _require(
            not self.negative_prompt or self.guidance_scale != 1,
            "rollout.negative_prompt",
            self.negative_prompt,
            "empty with rollout.guidance_scale 1, where there is no unconditional branch",
        )
        _require(
            self.num_generations >= 2,
            "rollout.num_generations",
            self.num_generations,
            "at least 2: an advantage compares the videos of one prompt",
        )
        _require(self.batch_size >= 1, "rollout.batch_size", self.batch_size, "at least 1")
        _require(
            self.micro_batch_size >= 1 and self.batch_size % self.micro_batch_size == 0,
            "rollout.micro_batch_size",
            self.micro_batch_size,
            f"a divisor of rollout.batch_size = {self.batch_size}",
        )
        window = self.sde_window
        _require(
            window.steps is None or all(0 <= i < self.num_steps for i in window.steps),
            "rollout.sde_window.steps",
            window.steps,
            f"a list of indices in 0..{self.num_steps - 1} (rollout.num_steps = {self.num_steps})",
        )
        _require(
            window.size is None or window.size <= self.num_steps,
            "rollout.sde_window.size",
            window.size,
            f"at most rollout.num_steps = {self.num_steps}",
        )
        _require(window.start < self.num_steps, "rollout.sde_window.start", window.start, f"less than {self.num_steps}")
        self._check_cache()

    @property
    def ode_steps(self) -> int:
        """Steps outside the SDE window."""
        window = self.sde_window
        noisy = window.size if window.steps is None else len(set(window.steps))
        return 0 if noisy is None else self.num_steps - noisy

    def _check_cache(self) -> None:
        """A feature cache needs steps that draw no noise."""
        threshold = self.cache_threshold
        _require(0 <= threshold < 1, "rollout.cache_threshold", threshold, "in [0, 1)")
        if threshold and not self.ode_steps:
            raise ConfigError(
                f"rollout.cache_threshold is {threshold:g}, but all {self.num_steps} steps draw noise and may be "
                "trained, so none of them may use features again. Set rollout.sde_window.size or steps to leave some "
                "out, or cache_threshold to 0."
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
        _require(self.clip > 0, "advantage.clip", self.clip, "positive")
        _require(self.eps >= 0, "advantage.eps", self.eps, "at least 0")


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
    placement: Literal["inline", "process"] = free("inline", MACHINE)
    """`inline` scores between two rollouts; `process` scores in a process of its own, while the policy samples the next
    videos. The scores are the same."""
    device: str | None = free(None, MACHINE)
    """Device of the rewards that have an option `device` and are not given it in `options`, such as `cuda:1` next to
    a policy on cuda:0; null leaves it to each reward."""
    queue_size: int = free(2, MACHINE)
    """Batches of videos that are with the process at once, the one being scored included; a rollout that is further
    ahead waits. Each is in memory, as bytes."""
    timeout_seconds: float = free(1800.0, MACHINE)
    """Longest that the process may take to set its rewards up, and to score one batch."""

    def __post_init__(self) -> None:
        _require(bool(self.rewards), "reward.rewards", self.rewards, "a non-empty list")
        _require(len(set(self.rewards)) == len(self.rewards), "reward.rewards", self.rewards, "a list without repeats")
        _require(any(self.weights.values()), "reward.weights", self.weights, "at least one non-zero weight")
        unknown = set(self.options) - set(self.rewards)
        if unknown:
            raise ConfigError(
                f"reward.options has an entry for {sorted(unknown)}, which reward.rewards = {self.rewards} lacks. "
                "Add it there or remove its options."
            )
        _require(1 <= self.queue_size <= 32, "reward.queue_size", self.queue_size, "in 1 .. 32")
        _require(self.timeout_seconds > 0, "reward.timeout_seconds", self.timeout_seconds, "positive")
        if self.placement == "inline" and (self.queue_size, self.timeout_seconds) != (2, 1800.0):
            raise ConfigError(
                f"reward.queue_size {self.queue_size} and reward.timeout_seconds {self.timeout_seconds} belong to a "
                "process of its own. Set reward.placement to process, or leave the two at 2 and 1800."
            )


@dataclass(kw_only=True)
class LoraConfig:
    """Low-rank adapters on the transformer blocks."""

    rank: int = 32
    """Rank of the adapters."""
    alpha: float | None = None
    """Scale numerator (scale = alpha / rank); null means alpha = rank."""
    target_modules: list[str] = field(
        default_factory=lambda: [
            "attn.to_q",
            "attn.to_k",
            "attn.to_v",
            "attn.to_out.0",
            "attn.add_q_proj",
            "attn.add_k_proj",
            "attn.add_v_proj",
            "attn.to_add_out",
        ]
    )
    """Names of the linear layers inside each transformer block that get an adapter. Layers that cannot influence the
    video (the last block's text output) are left out by themselves."""

    def __post_init__(self) -> None:
        _require(self.rank >= 1, "lora.rank", self.rank, "at least 1")
        _require(self.alpha is None or self.alpha > 0, "lora.alpha", self.alpha, "null or positive")
        _require(bool(self.target_modules), "lora.target_modules", self.target_modules, "a non-empty list")


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
        _require(self.eps > 0, "optimizer.eps", self.eps, "positive")
        _require(self.learning_rate > 0, "optimizer.learning_rate", self.learning_rate, "positive")
        _require(self.warmup_updates >= 0, "optimizer.warmup_updates", self.warmup_updates, "at least 0")
        _require(self.weight_decay >= 0, "optimizer.weight_decay", self.weight_decay, "at least 0")
        _require(all(0 <= b < 1 for b in self.betas), "optimizer.betas", self.betas, "two numbers in [0, 1)")
        _require(0 <= self.momentum < 1, "optimizer.momentum", self.momentum, "in [0, 1)")
        _require(self.max_grad_norm > 0, "optimizer.max_grad_norm", self.max_grad_norm, "positive")


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
            _require(getattr(self, key) >= 0, f"training.train_on.{key}", getattr(self, key), "at least 0")

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
    pairs: Literal["all", "uniform", "weighted"] = "all"
    """Which pairs of a video and a trainable step are trained: `all`; `uniform`, a random share pair_fraction of the
    steps of each video; `weighted`, a share pair_fraction of all pairs, drawn with a probability that grows with the
    advantage and with the step's pull, and weighted by its inverse. The gradient is unbiased either way."""
    pair_fraction: float = 0.5
    """Share of the pairs that uniform and weighted train, rounded down, at least one."""
    train_on: TrainOnConfig = field(default_factory=TrainOnConfig)
    """Videos of each group that are trained."""
    timestep_fraction: float = 1.0
    """Share of the trainable steps of each video that is trained, rounded down, at least one: the published name of
    pairs uniform. With permute_timesteps false these are the first steps, and the gradient is that of them alone."""
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
        _require(self.num_updates >= 1, "training.num_updates", self.num_updates, "at least 1")
        _require(self.updates_per_rollout >= 1, "training.updates_per_rollout", self.updates_per_rollout, "at least 1")
        _require(
            self.num_updates % self.updates_per_rollout == 0,
            "training.num_updates",
            self.num_updates,
            f"a multiple of training.updates_per_rollout = {self.updates_per_rollout}",
        )
        _require(0 < self.timestep_fraction <= 1, "training.timestep_fraction", self.timestep_fraction, "in (0, 1]")
        _require(0 < self.pair_fraction < 1, "training.pair_fraction", self.pair_fraction, "between 0 and 1")
        if self.pairs == "all" and self.pair_fraction != 0.5:
            raise ConfigError(
                f"training.pair_fraction {self.pair_fraction:g} does nothing with training.pairs all. Set pairs to "
                "uniform or weighted, or leave pair_fraction at 0.5."
            )
        if self.pairs != "all" and self.timestep_fraction != 1:
            raise ConfigError(
                f"training.timestep_fraction {self.timestep_fraction:g} is another name of training.pairs uniform with "
                f"that pair_fraction, but training.pairs is {self.pairs}. Set timestep_fraction to 1."
            )
        _require(
            self.skip_nonfinite_updates >= 0,
            "training.skip_nonfinite_updates",
            self.skip_nonfinite_updates,
            "at least 0",
        )
        _require(self.kl_share_every >= 0, "training.kl_share_every", self.kl_share_every, "at least 0")
        _require(self.anchor_interval >= 1, "training.anchor_interval", self.anchor_interval, "at least 1")
        _require(
            self.ema_decay is None or 0 < self.ema_decay < 1, "training.ema_decay", self.ema_decay, "null or in (0, 1)"
        )

    @property
    def step_fraction(self) -> float:
        """Share of the trainable steps that are in each video's order."""
        return self.pair_fraction if self.pairs == "uniform" else self.timestep_fraction


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
        _require(self.every >= 0, "evaluation.every", self.every, "at least 0")
        _require(
            self.num_prompts is None or self.num_prompts >= 2, "evaluation.num_prompts", self.num_prompts, "at least 2"
        )
        _require(self.num_steps is None or self.num_steps >= 2, "evaluation.num_steps", self.num_steps, "at least 2")
        for key in ("num_frames", "height", "width"):
            value = getattr(self, key)
            _require(value is None or value >= 1, f"evaluation.{key}", value, "null or at least 1")
        _require(self.eta is None or self.eta >= 0, "evaluation.eta", self.eta, "null or at least 0")
        _require(self.eta is None or self.sampler != "ode", "evaluation.eta", self.eta, "null with the sampler ode")
        _require(self.batch_size >= 1, "evaluation.batch_size", self.batch_size, "at least 1")
        _require(self.num_samples >= 0, "evaluation.num_samples", self.num_samples, "at least 0")


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
        _require(self.every >= 1, "checkpoint.every", self.every, "at least 1")
        _require(self.keep_last >= 1, "checkpoint.keep_last", self.keep_last, "at least 1")
        _require(
            self.keep_every is None or self.keep_every >= 1, "checkpoint.keep_every", self.keep_every, "at least 1"
        )


@dataclass(kw_only=True)
class LoggingConfig:
    """Where metrics go besides metrics.jsonl."""

    tensorboard: bool = True
    """Write TensorBoard events into the run directory."""
    wandb_project: str | None = None
    """Log to this Weights & Biases project; needs `pip install wandb`."""


@dataclass(kw_only=True)
class RunConfig:
    """GRPO post-training of a text-to-video model."""

    output_dir: str = field(metadata={FREE: PLACE})
    """Run directory: metrics.jsonl, config.yaml, checkpoints/, samples/, reward.png."""
    data: DataConfig
    """Training prompts."""
    seed: int = 0
    """Every random number of the run is a function of it."""
    resume: str = free("none", PACE)
    """`none` starts a new run, `auto` goes on from the newest complete checkpoint of output_dir (or starts one),
    a path goes on from that checkpoint, `restart` moves the run in output_dir aside and starts anew."""
    num_threads: int | None = free(None, MACHINE)
    """CPU threads of torch; null leaves torch's default."""
    model: ModelConfig = field(default_factory=ModelConfig)
    """Model."""
    video: VideoConfig = field(default_factory=VideoConfig, metadata={FIXED: PAIRS})
    """Video size."""
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    """Sampling."""
    advantage: AdvantageConfig = field(default_factory=AdvantageConfig)
    """Advantages."""
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    """Objective."""
    kl_weight: KLWeightConfig = field(default_factory=KLWeightConfig)
    """Weight lambda of the KL terms: warm-up and feedback."""
    reward: RewardConfig = field(default_factory=RewardConfig)
    """Rewards."""
    lora: LoraConfig = field(default_factory=LoraConfig, metadata={FIXED: SHAPES})
    """Adapters (training.mode lora)."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """Optimizer."""
    training: TrainingConfig = field(default_factory=TrainingConfig)
    """Training loop."""
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    """Evaluation and samples."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig, metadata={FREE: PACE})
    """Checkpoints."""
    logging: LoggingConfig = field(default_factory=LoggingConfig, metadata={FREE: PACE})
    """Loggers."""
    distributed: DistributedConfig = field(default_factory=DistributedConfig, metadata={FREE: MACHINE})
    """Processes and how they share the work; they are started by torchrun or SLURM."""

    def __post_init__(self) -> None:
        _check_leaves(asdict(self), "")
        _require(0 <= self.seed < 2**63, "seed", self.seed, "in 0 .. 2^63 - 1")
        _require(
            self.num_threads is None or self.num_threads >= 1, "num_threads", self.num_threads, "null or at least 1"
        )
        _require(bool(self.output_dir.strip()), "output_dir", self.output_dir, "a directory name")
        if self.rollout.sde_type == "ode" or self.rollout.eta == 0:
            raise ConfigError(
                f"rollout.sde_type = {self.rollout.sde_type!r} with eta = {self.rollout.eta} draws no noise, so the "
                "policy has no log-probability and nothing can be trained. Choose sage_grpo, sage_exact, dance_grpo, "
                "flow_grpo or cps with eta > 0 (rollout.eta = 0.5 is the reference default)."
            )
        if self.training.guidance == "conditional" and self.rollout.guidance_scale == 0:
            raise ConfigError(
                "training.guidance conditional differentiates the conditional branch, which has no part in the "
                "velocity with rollout.guidance_scale 0. Raise the scale, or set training.guidance to paired."
            )
        if self.model.adapter is not None and self.training.mode != "lora":
            raise ConfigError(
                f"model.adapter is {self.model.adapter!r}, but training.mode is {self.training.mode!r}, which has no "
                "adapter. Set training.mode to lora, or model.adapter to null and model.path to merged weights "
                "(sage-fast export --format full)."
            )
        if self.training.train_on.count >= self.rollout.num_generations:
            raise ConfigError(
                f"training.train_on takes {self.training.train_on.count} videos of each group (best + worst), but "
                f"rollout.num_generations is {self.rollout.num_generations}, so that none would be left out. Raise "
                "num_generations, lower best and worst, or set both to 0, which trains all videos."
            )
        if self.rollout.cache_threshold and self.model.forward == "stock":
            raise ConfigError(
                f"rollout.cache_threshold is {self.rollout.cache_threshold:g}, which the fused forward does, but "
                "model.forward is stock. Set model.forward to fused, or cache_threshold to 0."
            )
        if self.training.update == "single_pass":
            self._check_single_pass()
        if self.training.kl_share_every and self.objective.kl_mode == "none":
            raise ConfigError(
                f"training.kl_share_every is {self.training.kl_share_every}, but with objective.kl_mode none there is "
                "no KL. Set it to 0, or choose a KL mode."
            )
        if self.evaluation.sampler == "cps":
            _require(self.evaluation_eta <= 1, "evaluation.eta", self.evaluation_eta, "at most 1 with the sampler cps")
        self._check_engine()
        if self.model.adaln in ("table", "offload"):
            self._check_frozen_adaln()
        if self.model.fp8:
            self._check_fp8()

    @property
    def evaluation_video(self) -> VideoConfig:
        """Size of the evaluation's videos."""
        own = {key: getattr(self.evaluation, key) for key in ("num_frames", "height", "width")}
        return replace(self.video, **{key: value for key, value in own.items() if value is not None})

    @property
    def evaluation_steps(self) -> int:
        """Denoising steps of the evaluation."""
        return self.evaluation.num_steps or self.rollout.num_steps

    @property
    def evaluation_eta(self) -> float:
        """Noise scale of the evaluation's sampler, which the ODE does not read."""
        return self.rollout.eta if self.evaluation.eta is None else self.evaluation.eta

    def _check_single_pass(self) -> None:
        """A gradient taken during the rollout needs room per video, one video at a time and the rollout's policy."""
        training = self.training
        if training.mode != "lora":
            raise ConfigError(
                f"training.update single_pass keeps a copy of the trained weights per video, but training.mode is "
                f"{training.mode!r} (33 GB per video for 8.3 B weights, 0.2 GB for adapters of rank 32). Set "
                "training.mode to lora, or training.update to two_phase."
            )
        if training.updates_per_rollout != 1:
            raise ConfigError(
                "training.update single_pass takes the gradient at the policy that makes the rollout, but "
                f"training.updates_per_rollout is {training.updates_per_rollout}. Set it to 1, or training.update to "
                "two_phase."
            )
        if training.pairs == "weighted":
            raise ConfigError(
                "training.pairs weighted draws by the advantage, but training.update single_pass takes the gradient "
                "before there is one. Set training.pairs to uniform, or training.update to two_phase."
            )
        if training.train_on.count:
            raise ConfigError(
                "training.train_on chooses videos by their advantage, but training.update single_pass takes the "
                "gradient of every video before there is one. Set train_on.best and train_on.worst to 0, or "
                "training.update to two_phase."
            )
        if training.kl_share_every:
            raise ConfigError(
                f"training.kl_share_every {training.kl_share_every} measures in passes of its own, but "
                "training.update single_pass makes none. Set it to 0, or training.update to two_phase."
            )
        if self.rollout.micro_batch_size != 1:
            raise ConfigError(
                "training.update single_pass collects a gradient per video, but rollout.micro_batch_size is "
                f"{self.rollout.micro_batch_size}. Set it to 1, or training.update to two_phase."
            )

    def _check_engine(self) -> None:
        """What the engines cannot do."""
        if self.distributed.engine == "deepspeed" and self.training.update == "single_pass":
            raise ConfigError(
                "training.update single_pass takes gradients of single videos, but distributed.engine deepspeed sums "
                "them as they are made. Set training.update to two_phase, or the engine to fsdp."
            )
        if self.distributed.param_dtype != "float32" and self.training.mode != "full":
            raise ConfigError(
                f"distributed.param_dtype is {self.distributed.param_dtype}, but it belongs to training.mode full. "
                "With adapters the frozen weights are computed with in model.dtype; leave param_dtype out."
            )

    def _check_fp8(self) -> None:
        """FP8 copies are of whole, frozen weights, and serve where no gradient is taken."""
        mode, section = self.training.mode, self.distributed
        _require(mode == "lora", "training.mode", mode, "lora with model.fp8, which copies frozen weights")
        _require(section.engine == "fsdp", "distributed.engine", section.engine, "fsdp with model.fp8")
        # One of dp_replicate and dp_shard that is null may stand for any number.
        unsharded = section.sp == 1 and (section.dp_shard == 1 or section.dp_replicate is section.dp_shard is None)
        _require(
            unsharded or section.keep_gathered == "always",
            "distributed.keep_gathered",
            section.keep_gathered,
            "always with model.fp8, which copies whole weights, where dp_shard or sp could shard them",
        )
        if not self.rollout.ode_steps and anchor_kind(self.objective.kl_mode) == "none":
            raise ConfigError(
                f"model.fp8 is true, but all {self.rollout.num_steps} steps draw noise and may be trained, and "
                f"objective.kl_mode {self.objective.kl_mode} has no anchor, so it would do nothing. Set "
                "rollout.sde_window.size or steps to leave some out, or model.fp8 to false."
            )

    def _check_frozen_adaln(self) -> None:
        """A table of the timestep modulation is right as long as the weights it was computed from do not change."""
        trained = [n for n in self.lora.target_modules if n in ("norm1.linear", "norm1_context.linear")]
        given = f"model.adaln is {self.model.adaln!r}, which needs frozen AdaLN weights, but "
        if self.training.mode == "full":
            raise ConfigError(
                f"{given}training.mode full trains them. Set model.adaln to auto or weights, or training.mode to lora."
            )
        if trained:
            raise ConfigError(
                f"{given}lora.target_modules has {', '.join(trained)}. Set model.adaln to auto or weights, or leave "
                "them out of lora.target_modules."
            )


def check_batch(batch_size: int, dp_degree: int, num_generations: int) -> None:
    """A group must be complete within one rollout of all ranks.

    Raises ConfigError unless batch_size * dp_degree is a multiple of num_generations.
    """
    total = batch_size * dp_degree
    if total % num_generations:
        step = next(
            b for b in range(batch_size, batch_size + num_generations + 1) if b * dp_degree % num_generations == 0
        )
        raise ConfigError(
            f"rollout.batch_size {batch_size} * {dp_degree} data-parallel rank(s) = {total} videos per rollout is not "
            f"a multiple of rollout.num_generations = {num_generations}, so a prompt's group would be incomplete. "
            f"Set rollout.batch_size to {step}, or choose another group size."
        )


def to_dict(config: RunConfig) -> dict[str, Any]:
    """Plain nested dict of the resolved configuration."""
    return asdict(config)


def by_dotted_key(tree: Mapping[str, Any], whole: Collection[str] = (), prefix: str = "") -> dict[str, Any]:
    """Values of nested dicts by dotted key, tuples as the lists that files make of them.

    Args:
        whole: dotted keys of dicts that count as one value.

    Example: `by_dotted_key({"a": {"b": 1}})` is `{"a.b": 1}`.
    """
    result: dict[str, Any] = {}
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and key not in whole:
            result |= by_dotted_key(value, whole, f"{key}.")
        else:
            result[key] = list(value) if isinstance(value, tuple) else value
    return result
