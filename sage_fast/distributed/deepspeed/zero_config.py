"""The user's DeepSpeed file: what of it is taken, what must agree with the run, what is refused.

DeepSpeed ignores keys that it does not know and lets some of them disagree silently with what is done around it. Here
every key is one of four kinds:

* taken: buckets, overlap, data type of the communication, comms_logger;
* decided by the run: learning rate, clipping, batch sizes. Absent, "auto", or the same value;
* without effect here: said aloud and left out;
* anything else: an error that names the key and what to do.
"""

import difflib
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn

import torch

from sage_fast.config.errors import ConfigError
from sage_fast.config.text_files import read_json, read_text
from sage_fast.config.training_sections import OptimizerConfig

logger = logging.getLogger(__name__)

KEY = "distributed.deepspeed_config"

_TAKEN = ("zero_optimization", "bf16", "communication_data_type", "comms_logger")
_DECIDED = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "gradient_clipping",
    "optimizer",
    "scheduler",
    "fp16",
    "data_types",
)
_FIXED: dict[str, tuple[Any, str]] = {
    "managed_gradient_accumulation": (False, "the trainer says when an update's gradient is complete"),
    "zero_allow_untested_optimizer": (True, "the optimizer is torch's AdamW"),
    "zero_force_ds_cpu_optimizer": (False, "the optimizer is torch's AdamW"),
    "prescale_gradients": (False, "gradients of all ranks are summed"),
    "gradient_predivide_factor": (1.0, "gradients of all ranks are summed"),
    "gradient_allreduce_op": ("mean", "DeepSpeed's mean is turned into the sum over all ranks"),
    "sequence_parallel_size": (1, "distributed.sp says how many ranks share a video"),
}
"""What is never the user's to choose: the one value, and why."""
_SILENT = (
    "steps_per_print",
    "wall_clock_breakdown",
    "memory_breakdown",
    "dump_state",
    "log_level",
    "flops_profiler",
    "tensorboard",
    "wandb",
    "csv_monitor",
    "comet",
    "checkpoint",
    "disable_allgather",
    "dataloader_drop_last",
    "timers",
    "aio",
)
"""They belong to DeepSpeed's own loop, loader, logs and checkpoints, none of which runs here."""
_REFUSED = {
    "bfloat16": 'the old name of "bf16"',
    "activation_checkpointing": "model.checkpointing says what blocks keep for the backward pass",
    "torch_autocast": "autocast would compute rollout and update in other types than the fused forward's",
    "amp": "NVIDIA Apex is gone from DeepSpeed; use bf16",
    "hybrid_engine": "videos are sampled by the model that is trained",
    "pipeline": "the transformer is not a pipeline of stages",
    "tensor_parallel": "use distributed.sp to share a video between ranks",
    "compile": "the fused forward has kernels of its own",
    "data_efficiency": "prompts come from data.prompts",
}

_ZERO_TAKEN = (
    "stage",
    "contiguous_gradients",
    "reduce_scatter",
    "reduce_bucket_size",
    "use_multi_rank_bucket_allreduce",
    "allgather_partitions",
    "allgather_bucket_size",
    "overlap_comm",
    "round_robin_gradients",
    "parameter_alignment",
    "sub_group_size",
    "stage3_param_persistence_threshold",
    "stage3_model_persistence_threshold",
)
_ZERO_SILENT = (
    "stage3_prefetch_bucket_size",
    "stage3_max_live_parameters",
    "stage3_max_reuse_distance",
    "stage3_module_granularity_threshold",
    "stage3_gather_16bit_weights_on_model_save",
    "stage3_gather_fp16_weights_on_model_save",
    "ignore_unused_parameters",
    "load_from_fp32_weights",
    "memory_efficient_linear",
    "log_trace_cache_warnings",
)
"""A transformer block is gathered as a whole and the next one ahead of its use, whatever these say."""
_ZERO_REFUSED = {
    "offload_optimizer": "DeepSpeed's CPU optimizer is not torch's AdamW; distributed.engine fsdp has cpu_offload",
    "offload_param": "weights stay on the GPU; distributed.engine fsdp has cpu_offload",
    "cpu_offload": "distributed.engine fsdp has cpu_offload",
    "zero_quantized_weights": "quantized weights are another policy than the one that is saved",
    "zero_quantized_nontrainable_weights": "quantized weights are another policy than the one that is saved",
    "zero_quantized_gradients": "gradients are summed in the type of communication_data_type",
    "zero_hpz_partition_size": "weights are sharded over all ranks",
    "leaf_module": "leaf modules sum their gradient before it exists where the block's input needs none, as under LoRA",
    "zenflow": "every gradient is applied in its own update",
}


@dataclass(frozen=True)
class ZeroConfig:
    """A checked DeepSpeed configuration.

    stage: 2 (gradients and optimizer state are sharded) or 3 (weights too). bf16: whether weights are computed with in
    bfloat16; masters are float32. document: what `deepspeed.initialize` is given.

    Example: `{"zero_optimization": {"stage": 3}, "bf16": {"enabled": true}}` is stage 3 in bfloat16.
    """

    stage: Literal[2, 3]
    bf16: bool
    document: dict[str, Any]


def read_config(
    path: str | Path,
    optimizer: OptimizerConfig,
    *,
    mode: Literal["lora", "full"],
    dtype: torch.dtype,
    warn: bool = True,
) -> ZeroConfig:
    """Read the user's file and check it against the run.

    Args:
        path: the JSON file.
        optimizer: the run's optimizer section.
        mode: what is trained.
        dtype: the transformer's, before DeepSpeed has it.
        warn: name the keys that have no effect; of many ranks one should.

    Raises:
        ConfigError: no such file, no JSON, or a key that does not fit; the message says what to change.
    """
    path = Path(path)
    try:
        given = read_json(read_text(path), path.name)
    except OSError as error:
        raise ConfigError(f"{KEY} is {str(path)!r}, which cannot be read: {error.strerror}.") from error
    except ValueError as error:
        raise ConfigError(f"{KEY} is {str(path)!r}, which is no valid JSON: {error}.") from error
    if not isinstance(given, dict):
        raise ConfigError(f"{KEY} is {str(path)!r}, which holds no JSON object.")
    if optimizer.name != "adamw":
        raise ConfigError(
            f"optimizer.name is {optimizer.name!r}, but distributed.engine is deepspeed: ZeRO cuts all weights into "
            "flat pieces, and Muon orthogonalises whole matrices. Set optimizer.name to adamw, or distributed.engine "
            "to fsdp, which has both."
        )
    return _Check(str(path), given, optimizer, mode, dtype, warn).run()


@dataclass(frozen=True)
class _Check:
    """One file against one run."""

    path: str
    given: dict[str, Any]
    optimizer: OptimizerConfig
    mode: Literal["lora", "full"]
    dtype: torch.dtype
    warn: bool

    def run(self) -> ZeroConfig:
        known = [*_TAKEN, *_DECIDED, *_FIXED, *_SILENT, *_REFUSED]
        ignored = []
        for name, value in self.given.items():
            if name in _REFUSED:
                self.refuse(name, value, f"{_REFUSED[name]}. Remove it.")
            if name in _FIXED:
                allowed, why = _FIXED[name]
                self.agree(name, value, allowed, why)
            elif name in _SILENT:
                ignored += [name] if value not in (False, "auto") else []
            elif name not in known:
                self.unknown(name, known)
        self.check_batches()
        self.check_fp16()
        self.agree(
            "gradient_clipping",
            self.given.get("gradient_clipping", "auto"),
            self.optimizer.max_grad_norm,
            "optimizer.max_grad_norm says it",
        )
        self.check_optimizer()
        if self.given.get("scheduler", "auto") not in ("auto", None):
            self.refuse("scheduler", self.given["scheduler"], "optimizer.warmup_updates is the schedule. Remove it.")
        stage, zero, silent = self.zero()
        bf16 = self.bf16()
        document = {
            "zero_optimization": zero,
            "bf16": {"enabled": bf16},
            "communication_data_type": self.communication(),
            "data_types": self.data_types(),
            "gradient_clipping": self.optimizer.max_grad_norm,
            # DeepSpeed wants a batch size, and divides by nothing but the number of ranks with these.
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,
            "managed_gradient_accumulation": False,
            "zero_allow_untested_optimizer": True,
        }
        if "comms_logger" in self.given:
            document["comms_logger"] = self.given["comms_logger"]
        ignored += silent
        if ignored and self.warn:
            logger.warning("%s: %s: no effect in this project, left out.", self.path, ", ".join(ignored))
        return ZeroConfig(stage, bf16, document)

    # ------------------------------------------------------------------------------------------------- complaints

    def refuse(self, name: str, value: Any, reason: str) -> NoReturn:
        raise ConfigError(f"{KEY} ({self.path}) has {name} = {json.dumps(value)}, but {reason}")

    def agree(self, name: str, value: Any, allowed: Any, why: str) -> None:
        """ConfigError unless a value is "auto" or the one allowed."""
        if value == "auto":
            return
        same = value == allowed and isinstance(value, bool) == isinstance(allowed, bool)
        if not same:
            self.refuse(
                name,
                value,
                f'it must be {json.dumps(allowed)} or "auto": {why}. Change the one or the other, or remove it.',
            )

    def unknown(self, name: str, known: list[str], section: str = "") -> NoReturn:
        close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
        hint = f"Did you mean {section}{close[0]}?" if close else "Remove it."
        raise ConfigError(f"{KEY} ({self.path}) has the key {section}{name}, which is not known here. {hint}")

    # ---------------------------------------------------------------------------------------------------- sections

    def section(self, name: str) -> dict[str, Any]:
        value = self.given.get(name, {})
        if value in ("auto", None):
            return {}
        if not isinstance(value, dict):
            self.refuse(name, value, "it must be an object with braces.")
        return value

    def check_batches(self) -> None:
        for name in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"):
            value = self.given.get(name, "auto")
            if value != "auto":
                self.refuse(
                    name,
                    value,
                    "rollout.batch_size, rollout.micro_batch_size and training.updates_per_rollout say how many videos "
                    'an update has and how they are split. Set it to "auto", or remove it.',
                )

    def check_fp16(self) -> None:
        enabled = self.section("fp16").get("enabled", False)
        if enabled not in (False, "auto"):
            self.refuse(
                "fp16.enabled",
                enabled,
                "float16 needs a loss scale, and its rounding (5e-4) is larger than the log-ratio clip of 1e-4 that "
                "the update works within. Use bf16, which needs no scale, or float32.",
            )

    def check_optimizer(self) -> None:
        section = self.section("optimizer")
        for name, value in section.items():
            if name == "type":
                if value not in ("AdamW", "auto"):
                    self.refuse("optimizer.type", value, 'optimizer.name is adamw. Set it to "AdamW", or remove it.')
            elif name != "params":
                self.unknown(name, ["type", "params"], "optimizer.")
        own = {
            "lr": ("learning_rate", self.optimizer.learning_rate),
            "betas": ("betas", list(self.optimizer.betas)),
            "eps": ("eps", self.optimizer.eps),
            "weight_decay": ("weight_decay", self.optimizer.weight_decay),
        }
        for name, value in section.get("params", {}).items():
            if name not in own:
                self.unknown(name, list(own), "optimizer.params.")
            key, allowed = own[name]
            self.agree(f"optimizer.params.{name}", value, allowed, f"optimizer.{key} says it")

    def zero(self) -> tuple[Literal[2, 3], dict[str, Any], list[str]]:
        """The stage, what DeepSpeed is given of the section, and what has no effect."""
        section = self.section("zero_optimization")
        stage = section.get("stage")
        if stage not in (2, 3) or isinstance(stage, bool):
            self.refuse(
                "zero_optimization.stage",
                stage,
                "it must be 2 (gradients and optimizer state sharded) or 3 (weights too). For less, set "
                "distributed.engine to fsdp with distributed.dp_shard 1.",
            )
        taken: dict[str, Any] = {}
        silent = []
        for name, value in section.items():
            if name in _ZERO_REFUSED:
                if not _is_off(value):
                    self.refuse(f"zero_optimization.{name}", value, f"{_ZERO_REFUSED[name]}. Remove it.")
            elif name in _ZERO_SILENT:
                silent += [f"zero_optimization.{name}"] if value not in (False, "auto") else []
            elif name not in _ZERO_TAKEN:
                known = [*_ZERO_TAKEN, *_ZERO_SILENT, *_ZERO_REFUSED]
                self.unknown(name, known, "zero_optimization.")
            elif value != "auto":
                taken[name] = value
        if stage == 3:
            # Else DeepSpeed replaces torch.nn.functional.linear, for reward models too, by one that rounds the product
            # before it adds the bias.
            taken["memory_efficient_linear"] = False
        return (2 if stage == 2 else 3), taken, silent

    def bf16(self) -> bool:
        section = self.section("bf16")
        for name in section:
            if name != "enabled":
                self.unknown(name, ["enabled"], "bf16.")
        whole = self.dtype == torch.float32
        value = section.get("enabled", "auto" if self.mode == "lora" else False)
        if value == "auto":
            value = not whole
        if not isinstance(value, bool):
            self.refuse("bf16.enabled", value, 'it must be true, false or "auto".')
        if self.mode == "lora" and value is whole:
            want = json.dumps(not whole)
            self.refuse(
                "bf16.enabled",
                value,
                f"model.dtype is {str(self.dtype).removeprefix('torch.')}, which the frozen weights are computed with. "
                f'Set model.dtype to {"bfloat16" if whole else "float32"}, or bf16.enabled to {want} or "auto".',
            )
        return value

    def communication(self) -> str:
        value = self.given.get("communication_data_type", "auto")
        if value in ("auto", None):
            return "fp32"
        if value not in ("fp32", "bf16"):
            self.refuse("communication_data_type", value, 'it must be "fp32", or "bf16" for half the bytes.')
        return str(value)

    def data_types(self) -> dict[str, str]:
        for name, value in self.section("data_types").items():
            if name != "grad_accum_dtype":
                self.unknown(name, ["grad_accum_dtype"], "data_types.")
            self.agree("data_types.grad_accum_dtype", value, "fp32", "many small gradients are added per update")
        return {"grad_accum_dtype": "fp32"}


def _is_off(value: Any) -> bool:
    """Whether a key that is refused says what its absence does."""
    if isinstance(value, Mapping):
        return value.get("device", None) in ("none", None) and "device" in value
    return value in (False, None, "auto", 1) and value is not True
