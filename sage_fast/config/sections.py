"""Sections of a configuration, one class each; `schema.RunConfig` holds them all.

Each field has its meaning below it. Ranges are in the types, and hold for what
`load_config` reads and for what a run is given; checks of one section live in its
`__post_init__`. Metadata of a field says whether it may differ between a checkpoint's
run and the one that goes on; a section's mark covers every key in it. A key without a
mark changes what is trained: it may differ only where the user names it
(`--allow-changes`), and the change goes on record.
"""

import hashlib
import json
import os
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field

from sage_fast.config.errors import ConfigError
from sage_fast.config.registry import (
    ADVANTAGES,
    SAMPLERS,
    TRACKERS,
    UPDATES,
    check_name,
)

T = TypeVar("T")

FREE = "free_on_resume"
FIXED = "fixed_on_resume"

PLACE = "where files lie; the content of those that are read is compared"
PACE = "how long the run is, and how often it saves, evaluates and reports"
MACHINE = (
    "how much of which machine computes it, and by which equal formula: at most the "
    "rounding changes"
)
REMEDY = "what a message tells the user to change so that the run can go on"

SHAPES = "the checkpoint's weights and optimizer state are made for it"
PAIRS = "the evaluations before and after would no longer be of the same thing"


def free(default: T, reason: str) -> T:
    """A field that may always differ.

    Args:
        reason: why no number of the run depends on it, or why it must be possible all
            the same.
    """
    return field(default=default, metadata={FREE: reason})  # type: ignore[return-value]


def fixed(default: T, reason: str) -> T:
    """A field that may never differ, not even by `--allow-changes`."""
    return field(default=default, metadata={FIXED: reason})  # type: ignore[return-value]


def marked_keys(
    config: type, mark: str, prefix: str = "", inherited: str | None = None
) -> dict[str, str]:
    """Dotted key -> reason, of all keys of a configuration class that carry a mark
    (`FREE` or `FIXED`).
    """
    marked: dict[str, str] = {}
    for f in fields(config):
        # The mark of a section is that of its keys, unless they have their own.
        reason = f.metadata.get(mark, inherited)
        if isinstance(f.type, type) and is_dataclass(f.type):
            marked |= marked_keys(f.type, mark, f"{prefix}{f.name}.", reason)
        elif reason is not None:
            marked[prefix + f.name] = reason
    return marked


def digest(values: Any) -> str:
    """SHA-256 of JSON values, the same for the same values: the identity of settings,
    prompts and the like.
    """
    return hashlib.sha256(
        json.dumps(values, sort_keys=True, default=str).encode()
    ).hexdigest()


def require(condition: bool, key: str, value: object, allowed: str) -> None:
    """ConfigError that names the key, what it is and what it must be, unless the
    condition holds.
    """
    if not condition:
        raise ConfigError(f"{key} is {value!r}, but it must be {allowed}.")


# Upper bounds are far above any use: they keep a typing error such as 1e30 from filling
# memory deep inside a run.
MANY = 10**9
Count = Annotated[int, Field(ge=1, le=MANY)]
Natural = Annotated[int, Field(ge=0, le=MANY)]
Length = Annotated[int, Field(ge=1, le=10_000)]
Ranks = Annotated[int, Field(ge=1, le=10**6)]
Pixels = Annotated[int, Field(ge=1, le=16_384)]
Steps = Annotated[int, Field(ge=2, le=10_000)]
Seed = Annotated[int, Field(ge=0, le=2**63 - 1)]
Positive = Annotated[float, Field(gt=0, le=MANY)]
NotNegative = Annotated[float, Field(ge=0, le=MANY)]
Guidance = NotNegative | tuple[NotNegative, NotNegative]
Share = Annotated[float, Field(gt=0, le=1)]
Momentum = Annotated[float, Field(ge=0, lt=1)]
Inside = Annotated[float, Field(gt=0, lt=1)]
Seconds = Annotated[float, Field(gt=0, le=30 * 86_400)]


@dataclass(kw_only=True)
class ModelConfig:
    """The text-to-video model that is trained."""

    family: str = fixed("toy", SHAPES)
    """Short name of a model family, or `package.module:Class` of a `ModelFamily` or of
    a function that returns `Components`.
    """
    path: str | None = free(None, PLACE)
    """Folder of the weights, or the id of a repository on the Hugging Face hub; null
    takes the family's own default.
    """
    cache_dir: str | None = free(None, PLACE)
    """Where prompt embeddings are kept; null keeps them in `.sage_fast` inside `path`,
    or in ~/.cache/sage_fast where `path` is not a folder that can be written to.
    """
    dtype: Literal["float32", "bfloat16"] = fixed("float32", SHAPES)
    """Data type of the frozen transformer weights. Trained weights are always float32.
    """
    adapter: str | None = fixed(None, SHAPES)
    """LoRA adapter to start from: the folder or .safetensors file of another run's
    export or of another program, or the lora/ folder of a checkpoint. It is loaded
    before training (training.mode lora; lora.rank and target_modules must fit), and is
    part of what the run calls its initial weights: the fixed anchor, and "before" in
    the paired evaluation.
    """
    vae_dtype: Literal["auto", "float32", "bfloat16", "float16"] = free("auto", MACHINE)
    """Data type in which videos are decoded; `auto` is float16 on a GPU, like the
    official code's, and float32 on a CPU.
    """
    decode_memory_gib: Positive | Literal["auto"] | None = free("auto", MACHINE)
    """Memory that decoding a video of Wan may take for activations. One that does not
    fit is decoded in overlapping tiles, which is more work. `auto` decodes a video
    whole where the plan has room for it on the GPU beside all else, and is 16
    elsewhere; null decodes every video whole. HunyuanVideo-1.5 is decoded a latent
    frame at a time, whatever is given here.
    """
    device: str = free("auto", MACHINE)
    """`auto`, `cpu`, `cuda` or `cuda:N`."""
    kernels: Literal["auto", "reference", "triton"] = free("auto", MACHINE)
    """How the steps of a rollout and the loss are computed: `triton` by the kernels of
    sage_kernels, `reference` by plain PyTorch, `auto` by Triton on a GPU and PyTorch
    elsewhere.
    """
    forward: Literal["fused", "stock"] = free("fused", MACHINE)
    """`fused` computes diffusers' transformer with packed tokens and the kernels of
    sage_kernels; `stock` is diffusers' own forward, the reference.
    """
    attention: Literal[
        "auto", "cudnn", "flash2", "flash3", "flash4", "xformers", "sdpa", "reference"
    ] = free("auto", MACHINE)
    """Attention backend of the fused forward. A run on a GPU times the installed ones
    for `auto` at the size of its videos, logs the fastest, and keeps it through a
    resume. A backend that is named here and cannot run is an error.
    """
    deterministic: bool = free(False, MACHINE)
    """Only attention backends whose backward pass gives the same bits every time."""
    checkpointing: Literal["none", "feed_forward", "selective", "full", "auto"] = free(
        "none", MACHINE
    )
    """Tensors that a block keeps for its backward pass: `none` recomputes elementwise
    work only, `feed_forward` also the first product of the feed-forward, `selective`
    keeps attention's result and recomputes the rest, `full` recomputes everything.
    `none` takes 73 GB per guidance branch of HunyuanVideo-1.5 at 480x832. `auto` takes
    the first of the other three that fits the GPU by the plan; it is `selective` on a
    CPU.
    """
    adaln: Literal["auto", "weights", "table", "offload"] = free("auto", MACHINE)
    """Where the timestep modulation comes from: `weights` computes it in every forward;
    `table` computes it once per noise level, which needs frozen AdaLN weights;
    `offload` is `table` with those weights in CPU memory. `auto` is `table` where the
    AdaLN weights are frozen and `weights` elsewhere.
    """

    def __post_init__(self) -> None:
        if self.adapter is not None:
            self.adapter = os.path.expanduser(self.adapter)
        if self.forward == "stock":
            require(
                self.attention == "auto",
                "model.attention",
                self.attention,
                "auto with model.forward stock",
            )
            allowed = "none or full with model.forward stock"
            require(
                self.checkpointing in ("none", "full"),
                "model.checkpointing",
                self.checkpointing,
                allowed,
            )
            require(
                not self.deterministic,
                "model.deterministic",
                True,
                "false with model.forward stock",
            )
            require(
                self.adaln in ("auto", "weights"),
                "model.adaln",
                self.adaln,
                "auto with model.forward stock",
            )

    @property
    def settled_checkpointing(
        self,
    ) -> Literal["none", "feed_forward", "selective", "full"]:
        """`checkpointing` as one of a block's, which it is for `auto` too where no plan
        has settled it.
        """
        return "selective" if self.checkpointing == "auto" else self.checkpointing

    @property
    def decode_limit_gib(self) -> float | None:
        """`decode_memory_gib` as a number, which it is for `auto` too where no plan has
        settled it.
        """
        return 16.0 if self.decode_memory_gib == "auto" else self.decode_memory_gib

    def decode_dtype(self, on_gpu: bool) -> str:
        """`vae_dtype` as the name of a type of torch, which it is for `auto` too."""
        if self.vae_dtype == "auto":
            return "float16" if on_gpu else "float32"
        return self.vae_dtype


@dataclass(kw_only=True)
class LoraConfig:
    """Low-rank adapters on the transformer blocks."""

    rank: Count = 32
    """Rank of the adapters."""
    alpha: Positive | None = None
    """Scale numerator (scale = alpha / rank); null means alpha = rank."""
    target_modules: list[str] | None = None
    """Names of the linear layers inside each transformer block that get an adapter;
    null takes those of the family. Layers that cannot influence the video are left out
    by themselves.
    """

    def __post_init__(self) -> None:
        require(
            self.target_modules != [],
            "lora.target_modules",
            self.target_modules,
            "a non-empty list",
        )


@dataclass(kw_only=True)
class DataConfig:
    """Training prompts."""

    prompts: str | list[str | dict[str, str | int]] = field(metadata={FREE: PLACE})
    """CSV (columns prompt, optional index, seed and image), JSON or text file of
    prompts, or a list of texts and rows `{prompt: ..., image: ...}`, or `hf:NAME` or
    `hf:NAME:SPLIT` (default train) of the Hugging Face hub, by the package `datasets`.
    A relative path is looked for in the folder of the YAML that names it, then in the working directory,
    then among the files that ship; that of a listed picture is relative to the working
    directory.
    """
    prompt_key: str = free("prompt", PLACE)
    """Column or JSON key that holds the prompts, the evaluation's too, such as
    `prompt_en` or `caption`.
    """
    shuffle: bool = True
    """Visit the prompts in a new order every epoch (a function of the run's seed and
    the epoch).
    """


@dataclass(kw_only=True)
class VideoConfig:
    """Size of the generated videos, in pixels."""

    num_frames: Length = 81
    """Frames per video."""
    height: Pixels = 352
    """Rows."""
    width: Pixels = 624
    """Columns."""
    fps: Annotated[float, Field(ge=1 / 600, le=1000)] = 24.0
    """Frames per second of the files that are written, and the option `fps` of rewards
    that have one.
    """


def first_steps(num_steps: int, share: float) -> int:
    """How many of so many steps, from the noisiest on, are a share of them; at least
    one.
    """
    return max(1, round(share * num_steps))


@dataclass(kw_only=True)
class SDEWindowConfig:
    """Draw noise, and train, only in some of the rollout steps; the others are ODE
    steps.
    """

    size: Count | None = None
    """Width of a sliding window of steps; null leaves every step stochastic."""
    stride: Natural = 1
    """Steps by which the window moves after every rollout (0 keeps it in place); it
    starts at the first step, and wraps around at the last, or the last of `within`.
    """
    within: Share = 1.0
    """Share of the rollout's steps, from the noisiest on, that the window stays within
    and wraps around in.
    """

    def __post_init__(self) -> None:
        if self.size is None:
            for name in ("stride", "within"):
                value = getattr(self, name)
                require(
                    value == 1,
                    f"rollout.sde_window.{name}",
                    value,
                    "1 where rollout.sde_window.size is null",
                )

    def span(self, num_steps: int) -> int:
        """The first so many of a rollout's steps are those of `within`, at least one."""
        return first_steps(num_steps, self.within)


@dataclass(kw_only=True)
class RolloutConfig:
    """How the videos of an update are sampled."""

    sde_type: str = "sage_grpo"
    """Sampler of the exploration, or `package.module:function` of your own, called as
    `transition_table`. `ode` draws no noise, so it cannot be trained with.
    """
    num_steps: Steps = fixed(20, PAIRS)
    """Denoising steps T."""
    shift: Positive = fixed(5.0, PAIRS)
    """Timestep shift of the sigma schedule."""
    solver_order: Literal[1, 2] = 1
    """Steps that draw no noise: 1 are Euler's, as the samplers define them; 2 are
    Adams-Bashforth's, one velocity each too, for fewer `num_steps`. Evaluations have
    `evaluation.solver`.
    """
    eta: NotNegative = 0.5
    """Noise scale of the sampler; 0 is the ODE. With `flow_grpo_wan` it is a factor of
    the noise of flow_grpo's code for Wan, which has no such setting: 1 is theirs.
    """
    guidance_scale: Guidance = fixed(6.0, PAIRS)
    """Classifier-free guidance; 1 evaluates the conditional branch only. Two numbers
    are for a model of two experts, the one at the noisier levels first.
    """
    negative_prompt: str = fixed("", PAIRS)
    """Prompt of the unconditional branch, which guidance leads away from; empty as in
    the reference.
    """
    num_generations: Annotated[int, Field(ge=2, le=10_000)] = 4
    """Group size G: videos per prompt that compete."""
    batch_size: Length = free(4, MACHINE)
    """Videos per rollout on each data-parallel rank; batch_size * ranks must be a
    multiple of num_generations.
    """
    micro_batch_size: Length | Literal["auto"] = free(1, MACHINE)
    """Videos that go through the model at once. Rollout and update share it, so that
    their velocities agree bit for bit and the ratio starts at exactly 1. `auto` takes
    as many of a group as fill the GPU and fit it by the plan; it is 1 on a CPU.
    """
    initial_noise: Literal["own", "shared", "fixed"] = "own"
    """Start of the videos: `own` is noise of each; `shared` the same for all of a
    group, so that only the sampler's noise tells them apart, and steps before
    `sde_window` are computed once per group; `fixed` for member g of a group the same
    in every rollout, as in SAGE-GRPO's code: that of its prompt's seed, or without a
    column `seed` that of the run's, so that all prompts share num_generations starts.
    """
    sde_window: SDEWindowConfig = field(default_factory=SDEWindowConfig)
    """Steps that draw noise."""

    def __post_init__(self) -> None:
        check_name(self.sde_type, SAMPLERS, "rollout.sde_type")
        require(
            self.batch_size % self.videos_at_once == 0,
            "rollout.micro_batch_size",
            self.micro_batch_size,
            f"a divisor of rollout.batch_size = {self.batch_size}",
        )
        # Its noise is n sin(eta pi/2).
        require(
            self.sde_type != "cps" or self.eta <= 1,
            "rollout.eta",
            self.eta,
            "at most 1 with rollout.sde_type cps",
        )
        window = self.sde_window
        span = window.span(self.num_steps)
        allowed = f"at most rollout.num_steps = {self.num_steps}"
        if window.within < 1:
            allowed = (
                f"at most {span}, the steps of rollout.sde_window.within = "
                f"{window.within:g}"
            )
        require(
            (window.size or 0) <= span, "rollout.sde_window.size", window.size, allowed
        )

    @property
    def videos_at_once(self) -> int:
        """`micro_batch_size`, which is a number for `auto` too where no plan has
        settled it.
        """
        return 1 if self.micro_batch_size == "auto" else self.micro_batch_size


@dataclass(kw_only=True)
class EvaluationConfig:
    """The paired evaluation: the same prompts and the same noise before and after,
    sampled by ODE.
    """

    prompts: str | list[str | dict[str, str | int]] | None = free(None, PLACE)
    """Prompts, given like `data.prompts`; null evaluates on the training prompts."""
    num_prompts: Annotated[int, Field(ge=2, le=MANY)] | None = fixed(None, PAIRS)
    """Use only the first so many prompts."""
    every: Natural = free(20, PACE)
    """Updates between evaluations; 0 turns evaluation off."""
    num_steps: Steps | None = fixed(None, PAIRS)
    """Denoising steps; null takes the rollout's."""
    solver: Literal["euler", "unipc"] = fixed("euler", PAIRS)
    """`euler` steps from level to level of the rollout. `unipc` is diffusers'
    UniPCMultistepScheduler of order 2 at its own levels, as Wan's pipeline samples.
    """
    height: Pixels | None = fixed(None, PAIRS)
    """Rows; null takes those of the training."""
    width: Pixels | None = fixed(None, PAIRS)
    """Columns; null takes those of the training."""
    batch_size: Length = free(1, MACHINE)
    """Videos that go through the model at once."""
    seed: Seed = fixed(1_000_003, PAIRS)
    """Seed of the evaluation noise, apart from the training noise."""
    noises: Count = fixed(1, PAIRS)
    """Videos per prompt, each from its own noise; a prompt's score is their mean."""
    num_samples: Natural = free(4, PACE)
    """Videos written to samples/ at every evaluation (mp4 and a contact sheet)."""
    stop_when_worse: bool = free(False, PACE)
    """End the run, with a checkpoint, when the paired gain is more than 3 standard
    errors below 0. It continues from there only with false, or from an earlier
    checkpoint.
    """

    def __post_init__(self) -> None:
        require(
            self.every > 0 or not self.stop_when_worse,
            "evaluation.stop_when_worse",
            True,
            "false with every 0",
        )


KLMode = Literal["none", "fixed", "stepwise", "fixed_stepwise", "moving", "dual"]


def kl_uses(mode: str) -> tuple[bool, bool]:
    """(uses the position KL, uses the velocity KL) of a KL mode.

    fixed and moving hold the position, stepwise holds the velocity (the paper's Eq.
    15), the other two hold both.
    """
    return mode in ("fixed", "fixed_stepwise", "moving", "dual"), mode in (
        "stepwise",
        "fixed_stepwise",
        "dual",
    )


@dataclass(frozen=True, kw_only=True)
class ObjectiveConfig:
    """Terms of the loss of a trained step. The defaults are those of the SAGE-GRPO
    reference.
    """

    clip_range: Inside = 1e-4
    """PPO clip range c of the ratio. The log-ratio is a mean over elements, hence the
    small number.
    """
    ratio: Literal["gaussian", "unnormalized", "bias_corrected", "ratio_norm"] = (
        "gaussian"
    )
    """"gaussian" is the true ratio. "unnormalized" drops 1 / (2 std^2) from its
    log-probabilities, as the public CPS code does: the log-ratio is multiplied by 2
    std^2. "bias_corrected" is exp(mean(r eps dv)): the log-ratio less its mean under
    the rollout policy. "ratio_norm" is GRPO-Guard's RatioNorm, the bias-corrected
    log-ratio times std in a surrogate that is divided by the length of the step in
    sigma; that takes the equalizer's place. The KL terms stay those of the Gaussian
    with all of them.
    """
    equalizer: bool = True
    """Scale a step's surrogate by median(|r|) / |r|, so that all steps pull with the
    same strength.
    """
    kl_mode: KLMode = "dual"
    """KL terms: fixed and moving hold the position, stepwise the velocity,
    fixed_stepwise and dual both. The anchor of the position is the start of the run, or
    with moving and dual the weights at every training.anchor_interval.
    """
    kl_position_weight: NotNegative = 1.0
    """Weight of the KL to the anchor, inside the KL weight lambda."""
    kl_position_fraction: Share = 1.0
    """Share q of a video's trained steps, redrawn in every rollout, at which the KL to
    the anchor is measured; it counts 1/q there, so its gradient and the value that
    kl_weight watches are unbiased. The anchor's forwards, or the single pass's second
    backward passes, are taken at these steps alone. Rounded down, at least one step.
    """
    kl_velocity_weight: NotNegative = 0.1
    """Weight of the KL to the rollout policy, mean(log pi_old - log pi_new) at the
    drawn noise (Eq. 15), inside the KL weight lambda.
    """

    def __post_init__(self) -> None:
        if self.ratio == "ratio_norm" and self.equalizer:
            raise ConfigError(
                "objective.ratio is 'ratio_norm' with equalizer True; RatioNorm "
                "scales the loss of every step itself: "
                "set equalizer to false, or ratio to bias_corrected"
            )
        if self.kl_position_fraction < 1 and not kl_uses(self.kl_mode)[0]:
            raise ConfigError(
                f"objective.kl_position_fraction is {self.kl_position_fraction}, but "
                f"kl_mode {self.kl_mode!r} has no "
                "KL to an anchor; set it to 1, or kl_mode to fixed, fixed_stepwise, "
                "moving or dual"
            )


@dataclass(frozen=True, kw_only=True)
class KLWeightConfig:
    """How the KL weight lambda moves: a linear warm-up, then a controller that keeps
    the KL near a target.
    """

    minimum: NotNegative = 1e-7
    """lambda of the first update and lower bound."""
    maximum: NotNegative = 1e-5
    """lambda after the warm-up and upper bound."""
    warmup_updates: Natural = 100
    """Updates K from minimum to maximum; 0 starts at the maximum."""
    target: Positive = 1e-4
    """KL value that the controller aims for."""
    advance: Literal["update", "step"] = "update"
    """How often the controller moves: once per update, as in the paper's text, or as in
    the reference's code once per video of a rank and trained step. There that is 40
    times per update, and warmup_updates 100 are 2.5 updates.
    """

    def __post_init__(self) -> None:
        allowed = f"at most kl_weight.maximum = {self.maximum}"
        require(
            self.minimum <= self.maximum, "kl_weight.minimum", self.minimum, allowed
        )


@dataclass(kw_only=True)
class RewardConfig:
    """The rewards that are maximised."""

    rewards: list[str] = field(default_factory=lambda: ["toy"], metadata={FIXED: PAIRS})
    """Short names, or `package.module:Class` or `package.module:function` of your own;
    each yields named scores.
    """
    evaluation: list[str] = field(default_factory=list, metadata={FIXED: PAIRS})
    """More rewards, which evaluations alone compute: judges that nothing is trained on."""
    options: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Arguments per entry of `rewards` and `evaluation`. A reward that has an option
    `device` is on the policy's unless it is given here, such as `cuda:1` next to a
    policy on cuda:0.
    """
    weights: dict[str, Annotated[float, Field(ge=-MANY, le=MANY)]] = field(
        default_factory=lambda: {"VQ": 1.0, "MQ": 1.0, "TA": 1.0},
        metadata={FIXED: PAIRS},
    )
    """Score name -> weight. Scores without a weight are logged, not trained on."""
    on_failure: Literal["stop", "drop_group"] = free("stop", REMEDY)
    """When a reward raises or returns a non-finite score: `stop` ends the run;
    `drop_group` leaves that prompt's group out of the update, and the prompt out of the
    paired evaluation, which then compares the prompts scored in both.
    """
    url: str | None = free(None, MACHINE)
    """Address of a server that scores instead of this process: `python -m
    sage_fast.rewards.server CONFIG`. The environment variable SAGE_FAST_REWARD_TOKEN
    holds its token, if it has one.
    """
    python: str | None = free(None, MACHINE)
    """Interpreter of another environment, which scores the rewards that are
    `package.module:attribute`.
    """

    def __post_init__(self) -> None:
        address = self.url is None or self.url.startswith(("http://", "https://"))
        require(
            address,
            "reward.url",
            self.url,
            "null or an address such as http://127.0.0.1:8000",
        )
        require(
            None in (self.url, self.python),
            "reward.python",
            self.python,
            "null with reward.url",
        )
        require(bool(self.rewards), "reward.rewards", self.rewards, "a non-empty list")
        require(
            len(set(self.named)) == len(self.named),
            "reward.rewards and reward.evaluation",
            self.named,
            "a list without repeats",
        )
        require(
            any(self.weights.values()),
            "reward.weights",
            self.weights,
            "at least one non-zero weight",
        )
        unknown = set(self.options) - set(self.named)
        if unknown:
            raise ConfigError(
                f"reward.options has an entry for {sorted(unknown)}, which "
                f"reward.rewards = {self.rewards} lacks. "
                "Add it there or remove its options."
            )

    @property
    def named(self) -> list[str]:
        """The trained rewards and those of evaluations."""
        return [*self.rewards, *self.evaluation]


@dataclass(kw_only=True)
class AdvantageConfig:
    """How rewards become advantages."""

    normalization: str = "sum"
    """`sum`: weighted sum of the rewards, then one normalisation. `per_reward`:
    normalise each, then sum. `package.module:function` of your own.
    """
    std: Literal["group", "global"] = "group"
    """Divide by the population std of the prompt's group, or of the whole batch."""

    def __post_init__(self) -> None:
        check_name(self.normalization, ADVANTAGES, "advantage.normalization")


@dataclass(kw_only=True)
class OptimizerConfig:
    """Optimizer and learning rate."""

    name: Literal["muon", "adamw"] = fixed("muon", SHAPES)
    """`muon` (torch.optim.Muon for matrices, AdamW for everything else) or `adamw`."""
    learning_rate: Annotated[float, Field(gt=0, le=1e30)] = 1e-5
    """Learning rate after warm-up."""
    warmup_updates: Natural = 0
    """Updates over which the learning rate rises linearly from 0."""
    weight_decay: NotNegative = 0.01
    """Decoupled weight decay."""
    betas: tuple[Momentum, Momentum] = (0.9, 0.999)
    """AdamW's running averages."""
    eps: Positive = 1e-8
    """AdamW's epsilon."""
    max_grad_norm: Positive = 1.0
    """Global gradient norm above which gradients are scaled down."""


@dataclass(kw_only=True)
class TrainingConfig:
    """The training loop."""

    num_updates: Count = free(200, PACE)
    """Optimizer updates in all."""
    mode: Literal["lora", "full"] = fixed("lora", SHAPES)
    """Train adapters, or every weight that influences the video. `full` keeps float32
    weights; it computes in float32, or in distributed.param_dtype where FSDP2 gathers
    them.
    """
    update: str = "two_phase"
    """`two_phase` rolls out first and runs the model again for the gradient.
    `single_pass` takes the gradient during the rollout and weighs it when the rewards
    arrive: the same gradient with one forward less. It keeps a copy of the adapters per
    video of the rollout, and one per group where a KL acts: 225 MB each at lora.rank 32
    with the default targets. It pays with objective.kl_mode none and stepwise;
    docs/memory.md has the arithmetic. `forward_process` is another objective (section
    `forward_process`): DiffusionNFT's and AWM's, at noised videos instead of the
    sampler's steps. It samples by ODE, and is the cheapest of the three.
    `package.module:Class` is an `Objective` of your own.
    """
    guidance: Literal["paired", "split"] = free("paired", REMEDY)
    """Gradient through guidance: `paired` holds the activations of both branches at
    once, `split` differentiates them one after the other, with half the memory; it
    takes one more forward from the second update of a rollout on, in the forward
    process, and in a single pass where the KL to the anchor is measured.
    """
    updates_per_rollout: Count = 1
    """Optimizer updates from one rollout. 1 is on-policy; more split the trained steps
    into mini-batches, and with `forward_process` the videos of every group.
    """
    best_and_worst: Natural = 0
    """Train only so many videos of each group with the highest advantages and as many
    with the lowest; 0 trains all. Biased: advantages are still those of the whole
    group, but loss and gradient are the mean over the trained videos. Ranks exchange
    whole micro-batches so that each trains equally many.
    """
    timestep_fraction: Share = 1.0
    """Share of the trainable steps of each video that is trained, rounded down, at
    least one. With permute_timesteps they are a random choice, so the gradient is
    unbiased; without it they are the first steps.
    """
    kl_share_every: Natural = free(0, REMEDY)
    """Updates between two measurements of `kl/grad_share`, the norm of the KL's part of
    the gradient over that of the surrogate's; 0 never measures. One takes two more
    passes of the update phase and changes no other number.
    """
    permute_timesteps: bool = True
    """Visit each video's steps in its own random order."""
    anchor_interval: Count = 10
    """Updates between two refreshes of the moving anchor (kl_mode moving or dual)."""
    ema_decay: Inside | None = None
    """Keep an exponential moving average of the trained weights and evaluate with it;
    null is off. After n updates its decay is at most (1 + n) / (10 + n), so that a
    short run's average does not stay at the first weights.
    """
    skip_nonfinite_updates: Natural = free(0, REMEDY)
    """Updates that may be left out in all because their loss or gradient is not finite;
    one more stops the run. A skipped update counts as an update, but weights, optimizer
    and average stay as they are.
    """

    def __post_init__(self) -> None:
        check_name(self.update, UPDATES, "training.update")
        require(
            self.num_updates % self.updates_per_rollout == 0,
            "training.num_updates",
            self.num_updates,
            f"a multiple of training.updates_per_rollout = {self.updates_per_rollout}",
        )


@dataclass(kw_only=True)
class ForwardProcessConfig:
    """The objective of training.update forward_process; of `objective` it reads kl_mode
    (none, fixed or moving), kl_position_weight and kl_position_fraction.
    """

    levels: Length = 4
    """Noise levels K at which a video is trained, one of the sampler's own in each of K
    equal parts of its schedule.
    """
    within: Share = 1.0
    """Share of the schedule, from the noisiest level on, in which the K levels lie."""
    states: Literal["noised", "path"] = "noised"
    """Where a video is trained: at its finished latents `noised` again, or at states on
    the `path` that a noisy sampler took to it, of the steps that drew noise. On the
    path the rollout's velocities are the old policy's, whose K forwards fall away. This
    is GRPO without most of its noise: docs/objectives.md.
    """
    sampling_guidance: NotNegative | None = None
    """Guidance scale with which the rollout samples, while the unguided velocity is
    trained (rollout.guidance_scale 1, which also evaluates): guidance is distilled into
    it, weighted by the advantages. null samples what is trained.
    """
    weighting: Literal["adaptive", "branches", "x0", "velocity"] = "adaptive"
    """Weight of a level's loss: s^2 over s times the mean absolute error of the
    velocity, or of each of DiffusionNFT's branches, as in its code; s^2; or 1.
    """
    beta: NotNegative = 0.1
    """Weight of the trust region around the old policy, DiffusionNFT's beta."""
    old_decay: Momentum | Literal["rising", "late"] | None = 0.5
    """The old policy, which samples and which the trust region holds, is an average of
    the trained weights; this is the share of itself that it keeps after every rollout.
    `rising` is min(0.001 n, 0.5) after n updates, `late` min(0.0075 (n - 75), 0.999)
    from the 75th update on: the schedules of DiffusionNFT's code. null: the trained
    weights themselves sample, and the trust region is inert.
    """
    clip: Inside | None = None
    """Clip range of AWM's ratio; null takes the linear term, DiffusionNFT's."""

    def __post_init__(self) -> None:
        single = self.clip is None or self.weighting != "branches"
        require(
            single,
            "forward_process.clip",
            self.clip,
            "null with forward_process.weighting branches",
        )


@dataclass(kw_only=True)
class CheckpointConfig:
    """Checkpoints to resume from."""

    every: Count = 10
    """Updates between checkpoints; the last update is always saved."""
    keep_last: Count = 3
    """The newest checkpoints that are kept. The best one by evaluation is kept too."""
    asynchronous: bool = True
    """Write in the background while training goes on; it stalls for a copy into CPU
    memory alone. A failure to write is reported at the next checkpoint or at the end.
    """


@dataclass(kw_only=True)
class LoggingConfig:
    """Further places for metrics than metrics.jsonl."""

    report_to: list[str] = field(default_factory=lambda: ["tensorboard"])
    """`tensorboard` writes events into the run directory. `wandb` needs `pip install
    wandb`, and logs to the project in the environment variable WANDB_PROJECT, or to
    `sage-fast`. `package.module:Class` is a `Tracker` of your own.
    """

    def __post_init__(self) -> None:
        for name in self.report_to:
            check_name(name, TRACKERS, "logging.report_to")


@dataclass(kw_only=True)
class DistributedConfig:
    """How a run is spread over processes, one per GPU, that torchrun or SLURM has
    started.

    ranks = dp_replicate * dp_shard * sp. Every `sp` consecutive ranks share the tokens
    of the same videos.

    Raises:
        ConfigError: a degree or a time out of range, or settings that exclude each
            other.

    Example: 64 GPUs as 4 replicas of weights that 16 ranks share, every pair on one
    video, are `DistributedConfig(dp_replicate=4, dp_shard=8, sp=2)`.
    """

    zero_stage: Literal[2] | None = None
    """null: torch's FSDP2. 2: DeepSpeed ZeRO-2, which shards gradients and optimizer
    state over all ranks. FSDP2 shards the weights too.
    """
    dp_replicate: Ranks | None = None
    """Data-parallel replicas of the weights. null: with training.mode lora what the
    other degrees leave, else 1.
    """
    dp_shard: Ranks | None = None
    """Data-parallel ranks over which the weights are sharded; the `sp` ranks of a video
    share them too. null: 1 with training.mode lora, what the other degrees leave with
    full.
    """
    sp: Ranks = 1
    """Ulysses sequence parallelism: ranks that share the tokens of a video. It divides
    the model's heads.
    """
    keep_gathered: Literal["auto", "never", "rollout", "always"] = "auto"
    """How long sharded weights stay gathered: `never` past the layer that needs them,
    through a `rollout` with its anchor pass, or `always` until they change. Frozen
    weights (training.mode lora) never change: with `always` every rank simply holds
    them whole. `auto` is always with lora where they take up to a third of the GPU,
    else rollout.
    """
    param_dtype: Literal["float32", "bfloat16"] = "float32"
    """Data type in which weights of training.mode full are gathered and computed with.
    Masters, gradient sums and optimizer state are float32.
    """
    cpu_offload: bool = False
    """Keep sharded weights, gradients and optimizer state in CPU memory."""
    timeout_seconds: Seconds = 600.0
    """Longest that a rank may make no progress, and that a collective may wait. It is
    three times as long until the first update is done, for loading and compiling.
    Encoding prompts is progress.
    """

    @property
    def startup_timeout_seconds(self) -> float:
        """`timeout_seconds` until the first update is done."""
        return 3 * self.timeout_seconds

    def degrees(
        self, world_size: int, mode: Literal["lora", "full"]
    ) -> tuple[int, int, int]:
        """(dp_replicate, dp_shard, sp) on `world_size` ranks. ValueError unless their
        product is that number.
        """
        replicate = self.dp_replicate
        shard = self.dp_shard
        sp = self.sp
        # Where neither is set, adapters are whole on every rank, and full weights are
        # sharded over all of them.
        if replicate is None and shard is None:
            if mode == "lora":
                shard = 1
            else:
                replicate = 1
        known = (replicate or 1) * (shard or 1) * sp
        # The degree that is left open takes the ranks that remain; 0 leads to the error
        # below.
        rest = world_size // known if world_size % known == 0 else 0
        replicate, shard = (
            rest if degree is None else degree for degree in (replicate, shard)
        )
        if replicate * shard * sp != world_size:
            shown = [
                "null" if degree is None else degree
                for degree in (self.dp_replicate, self.dp_shard)
            ]
            given = (
                f"distributed.dp_replicate {shown[0]}, dp_shard {shown[1]} and sp {sp}"
            )
            raise ValueError(
                f"{given} do not fit {world_size} process(es): their product must be "
                "that number (null takes what the "
                f"others leave). Start {known} or a multiple, as by torchrun "
                f"--nproc_per_node={known}, or change them."
            )
        return replicate, shard, sp


def check_heads(sp: int, heads: int) -> None:
    """ConfigError unless the `sp` ranks of a video can share the attention heads of a
    model evenly.
    """
    if heads % sp:
        allowed = ", ".join(
            str(degree) for degree in range(1, heads + 1) if heads % degree == 0
        )
        raise ConfigError(
            f"distributed.sp is {sp}, which does not divide the model's {heads} "
            "attention heads. Set it to one of "
            f"{allowed}."
        )
