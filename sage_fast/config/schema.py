"""Run configuration: one typed section per concern, and the checks that need two of
them.

The sections are in `sections.py`. `load.py` reads and writes all of them as YAML.
"""

import os
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, ClassVar, Literal

from sage_fast.config.errors import ConfigError
from sage_fast.config.registry import (
    MODEL_FAMILIES,
    REGISTERED,
    SAMPLERS,
    UPDATES,
    resolve,
)
from sage_fast.config.sections import (
    FIXED,
    FREE,
    MACHINE,
    PACE,
    PAIRS,
    PLACE,
    SHAPES,
    AdvantageConfig,
    CheckpointConfig,
    DataConfig,
    DistributedConfig,
    EvaluationConfig,
    ForwardProcessConfig,
    Guidance,
    KLWeightConfig,
    LoggingConfig,
    LoraConfig,
    ModelConfig,
    ObjectiveConfig,
    OptimizerConfig,
    RewardConfig,
    RolloutConfig,
    Seed,
    TrainingConfig,
    VideoConfig,
    free,
    marked_keys,
    require,
)


@dataclass(kw_only=True)
class RunConfig:
    """GRPO post-training of a text-to-video model."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {
        "extra": "forbid",
        "strict": True,
        "allow_inf_nan": False,
        "use_attribute_docstrings": True,
    }
    """How `load_config` has pydantic read this class and its sections."""

    output_dir: str = field(metadata={FREE: PLACE})
    """Run directory: metrics.jsonl, config.yaml, checkpoints/, samples/, reward.png."""
    data: DataConfig
    """Training prompts."""
    seed: Seed = 0
    """Every random number of the run is a function of it."""
    resume: str = free("none", PACE)
    """`none` starts a new run, `auto` continues from the newest complete checkpoint of
    output_dir (or starts one), a path continues from that checkpoint, `restart` moves
    the run in output_dir aside and starts over.
    """
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
    forward_process: ForwardProcessConfig = field(default_factory=ForwardProcessConfig)
    """Objective of training.update forward_process."""
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    """Evaluation and samples."""
    checkpoint: CheckpointConfig = field(
        default_factory=CheckpointConfig, metadata={FREE: PACE}
    )
    """Checkpoints."""
    logging: LoggingConfig = field(default_factory=LoggingConfig, metadata={FREE: PACE})
    """Loggers."""
    distributed: DistributedConfig = field(
        default_factory=DistributedConfig, metadata={FREE: MACHINE}
    )
    """Processes and how they share the work; they are started by torchrun or SLURM."""

    def __post_init__(self) -> None:
        self.output_dir = os.path.expanduser(self.output_dir)
        require(
            bool(self.output_dir.strip()),
            "output_dir",
            self.output_dir,
            "a directory name",
        )
        require(
            not self.rollout.negative_prompt or self.sampling_guidance != 1,
            "rollout.negative_prompt",
            self.rollout.negative_prompt,
            (
                "empty with rollout.guidance_scale 1, where there is no unconditional "
                "branch"
            ),
        )
        if self.model.adapter is not None:
            needs: list[Need] = [
                (
                    "training.mode",
                    self.training.mode,
                    ("lora",),
                    "no other mode has an adapter",
                )
            ]
            check_needs(
                f"model.adapter {self.model.adapter!r}", "model.adapter to null", needs
            )
        if 2 * self.training.best_and_worst >= self.rollout.num_generations:
            raise ConfigError(
                f"training.best_and_worst is {self.training.best_and_worst}, but "
                "rollout.num_generations is "
                f"{self.rollout.num_generations}, so that no video would be left out. "
                "Raise num_generations, or set "
                "best_and_worst to 0, which trains all videos."
            )
        # What one objective alone needs or refuses is said by its own class. To read a
        # configuration must not import code that it names: `objective_of` asks such a
        # class once it is trusted.
        if not self.own_step - REGISTERED.keys():
            resolve(self.training.update, UPDATES, "training.update").check_config(self)
        self._check_engine()
        if self.model.adaln in ("table", "offload"):
            self._check_frozen_adaln()

    @property
    def own_step(self) -> set[str]:
        """Objective and sampler, as far as they are the user's own code."""
        return {self.training.update, self.rollout.sde_type} - {*UPDATES, *SAMPLERS}

    @property
    def samples_by_ode(self) -> bool:
        """True if a rollout draws no noise after its start."""
        return self.rollout.sde_type == "ode" or self.rollout.eta == 0

    @property
    def compute_dtype(self) -> Literal["float32", "bfloat16"]:
        """Type in which the transformer computes: its own, or that in which FSDP
        gathers float32 masters.
        """
        if self.training.mode == "full":
            return self.distributed.param_dtype
        return self.model.dtype

    @property
    def sampling_guidance(self) -> Guidance:
        """Guidance scale of a rollout's sampler."""
        scale = self.forward_process.sampling_guidance
        return self.rollout.guidance_scale if scale is None else scale

    @property
    def evaluation_video(self) -> VideoConfig:
        """Size of the evaluation's videos."""
        own = {key: getattr(self.evaluation, key) for key in ("height", "width")}
        return replace(
            self.video,
            **{key: value for key, value in own.items() if value is not None},
        )

    @property
    def steps_by_key(self) -> dict[str, int]:
        """Denoising steps of rollout and evaluation."""
        return {
            "rollout.num_steps": self.rollout.num_steps,
            "evaluation.num_steps": self.evaluation_steps,
        }

    @property
    def evaluation_steps(self) -> int:
        """Denoising steps of the evaluation."""
        return self.evaluation.num_steps or self.rollout.num_steps

    def _check_engine(self) -> None:
        """Refuse what DeepSpeed, or training without FSDP2's masters, cannot have."""
        section = self.distributed
        if section.zero_stage is not None:
            fsdp = "it belongs to FSDP2, and DeepSpeed shards over all ranks"
            needs: list[Need] = [
                ("distributed.keep_gathered", section.keep_gathered, ("auto",), fsdp),
                ("distributed.cpu_offload", section.cpu_offload, (False,), fsdp),
                ("distributed.dp_replicate", section.dp_replicate, (None,), fsdp),
                ("distributed.dp_shard", section.dp_shard, (None,), fsdp),
                (
                    "optimizer.name",
                    self.optimizer.name,
                    ("adamw",),
                    "it cuts weights, and Muon takes whole matrices",
                ),
                (
                    "model.adaln",
                    self.model.adaln,
                    ("auto", "weights"),
                    "it keeps the AdaLN weights with the others",
                ),
            ]
            check_needs(
                f"distributed.zero_stage {section.zero_stage}",
                "zero_stage to null",
                needs,
            )
        if self.training.mode == "lora":
            why = "frozen weights are computed with in model.dtype"
            needs = [
                ("distributed.param_dtype", section.param_dtype, ("float32",), why)
            ]
            check_needs("training.mode lora", "training.mode to full", needs)

    def _check_frozen_adaln(self) -> None:
        """A table of the timestep modulation is right as long as the weights it was
        computed from do not change.
        """
        setting = f"model.adaln {self.model.adaln}"
        needs = [
            (
                "training.mode",
                self.training.mode,
                ("lora",),
                "it needs frozen AdaLN weights",
            )
        ]
        check_needs(setting, "model.adaln to auto", needs)
        # A run asks a family of the user's own once it is trusted.
        if self.model.family in {*MODEL_FAMILIES, *REGISTERED}:
            family = resolve(self.model.family, MODEL_FAMILIES, "model.family")
            self.check_frozen_adaln(getattr(family, "adaln_targets", ()))

    def check_frozen_adaln(self, adaln_targets: Collection[str]) -> None:
        """ConfigError where an adapter trains layers whose results `model.adaln`
        replaces by a table.

        Args:
            adaln_targets: these layers, see `ModelFamily`; its own `lora_targets` are
                none of them.
        """
        trained = [
            name for name in self.lora.target_modules or () if name in adaln_targets
        ]
        if trained and self.model.adaln in ("table", "offload"):
            raise ConfigError(
                f"lora.target_modules has {', '.join(trained)}, but model.adaln "
                f"{self.model.adaln} needs frozen AdaLN "
                "weights. Leave them out, or set model.adaln to auto."
            )


Need = tuple[str, Any, tuple[Any, ...], str]
"""A key, its value, the values that it may have, and why."""


def check_needs(setting: str, way_out: str, needs: Iterable[Need]) -> None:
    """ConfigError for the first key that has another value than a setting allows."""
    for key, value, allowed, why in needs:
        if value not in allowed:
            words = " or ".join(
                "null" if one is None else str(one).lower() for one in allowed
            )
            raise ConfigError(
                f"{key} is {value!r}, but with {setting} it must be {words}: {why}. "
                f"Set it to {words}, or {way_out}."
            )


def check_gathering(
    section: DistributedConfig,
    model: ModelConfig,
    training: TrainingConfig,
    *,
    launched: bool,
    shards: int,
) -> None:
    """ConfigError for FSDP2 settings that have no effect or exclude each other.

    Args:
        launched: whether the process is one of a group.
        shards: ranks that share the weights.
    """
    mode = training.mode
    if section.cpu_offload and section.keep_gathered in ("rollout", "always"):
        raise ConfigError(
            "distributed.cpu_offload keeps weights off the GPU, but "
            "distributed.keep_gathered is "
            f"{section.keep_gathered}, which keeps them there. Set keep_gathered to "
            "auto or never."
        )
    if not launched and (section.cpu_offload or section.param_dtype != "float32"):
        name = "cpu_offload" if section.cpu_offload else "param_dtype"
        raise ConfigError(
            f"distributed.{name} is {getattr(section, name)!r}, which FSDP2 does, but "
            "this process was not launched as "
            "one of a group. Start it by `torchrun --nproc_per_node=1 -m sage_fast "
            "train ...`, one or more per node."
        )
    if section.param_dtype != "float32" and model.forward == "stock":
        raise ConfigError(
            f"distributed.param_dtype is {section.param_dtype}, but model.forward "
            "stock feeds float32 inputs to "
            "weights that are gathered in that dtype. Set model.forward to fused, or "
            "param_dtype to float32."
        )
    one_holder = not launched or (mode == "lora" and shards == 1)
    if one_holder and section.keep_gathered in ("never", "rollout"):
        raise ConfigError(
            f"distributed.keep_gathered is {section.keep_gathered}, but nothing is "
            "gathered here: every rank holds the "
            "weights whole. Set it to auto, or with training.mode lora raise "
            "distributed.dp_shard."
        )
    if section.cpu_offload and mode == "lora" and shards == 1:
        raise ConfigError(
            "distributed.cpu_offload moves shards of the weights, but with "
            "training.mode lora they are whole on every "
            "rank unless distributed.dp_shard or sp is more than 1. Raise dp_shard, "
            "or leave cpu_offload out."
        )


def check_batch(batch_size: int, dp_degree: int, num_generations: int) -> None:
    """A group must be complete within one rollout of all ranks.

    Raises ConfigError unless batch_size * dp_degree is a multiple of num_generations.
    """
    total = batch_size * dp_degree
    if total % num_generations:
        # The next size that fits: of any num_generations sizes in a row one does.
        step = next(
            b
            for b in range(batch_size, batch_size + num_generations + 1)
            if b * dp_degree % num_generations == 0
        )
        raise ConfigError(
            f"rollout.batch_size {batch_size} * {dp_degree} data-parallel rank(s) = "
            f"{total} videos per rollout is not "
            f"a multiple of rollout.num_generations = {num_generations}, so a "
            "prompt's group would be incomplete. "
            f"Set rollout.batch_size to {step}, or choose another group size."
        )


def to_dict(config: RunConfig) -> dict[str, Any]:
    """Plain nested dict of the resolved configuration."""
    return asdict(config)


def by_dotted_key(
    tree: Mapping[str, Any], whole: Collection[str] = (), prefix: str = ""
) -> dict[str, Any]:
    """Values of nested dicts by dotted key, tuples as the lists that files make of
    them.

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


def settings_of(tree: Mapping[str, Any]) -> dict[str, Any]:
    """A run's configuration by dotted key, from `to_dict` or its file.

    Weights and options of rewards are one value each: there a missing entry is a
    difference.
    """
    return by_dotted_key(tree, whole=("reward.weights", "reward.options"))


def tried_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that make an experiment another one: not its seed, nor what a
    resumed run may change.

    Length, size and model are among those all the same: a run may go on with other
    ones, and then proves another thing.
    """
    told = {
        "rollout.batch_size",
        "training.num_updates",
        "training.update",
        "model.path",
    }
    ignored = {*marked_keys(RunConfig, FREE), "seed"} - told
    return {key: value for key, value in settings.items() if key not in ignored}
