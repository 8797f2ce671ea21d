"""The configuration file of DeepSpeed against the run's own: what is refused, what is said, what is filled in.

Nothing here needs DeepSpeed.
"""

import ast
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from sage_fast import accelerate
from sage_fast.config.errors import ConfigError
from sage_fast.config.training_sections import OptimizerConfig
from sage_fast.distributed.deepspeed.zero_config import read_config
from tests.models.hunyuan15.oracle import tiny_transformer

ROOT = Path(__file__).resolve().parents[2]
ADAMW = OptimizerConfig(name="adamw", max_grad_norm=0.5)
ZERO3 = {"zero_optimization": {"stage": 3}}


def check(
    tmp_path: Path, document: Any, *, mode: Any = "full", dtype: torch.dtype = torch.float32, **optimizer: Any
) -> Any:
    path = tmp_path / "zero.json"
    path.write_text(document if isinstance(document, str) else json.dumps(document))
    settings: dict[str, Any] = {"name": "adamw", "learning_rate": 1e-5, "max_grad_norm": 1.0}
    config = OptimizerConfig(**(settings | optimizer))
    return read_config(path, config, mode=mode, dtype=dtype)


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ("{", ["no valid JSON"]),
        ("[]", ["no JSON object"]),
        ('{"bf16": {}, "bf16": {}}', ["'bf16'", "twice"]),
        ({}, ["zero_optimization.stage", "must be 2"]),
        ({"zero_optimization": {"stage": 1}}, ["zero_optimization.stage = 1", "distributed.engine to fsdp"]),
        ({"zero_optimization": {"stage": True}}, ["zero_optimization.stage = true"]),
        ({"zero_optimization": 3}, ["zero_optimization = 3", "object"]),
        ({"zero_optimisation": {"stage": 3}}, ["zero_optimisation", "Did you mean zero_optimization?"]),
        (ZERO3 | {"colour": 1}, ["colour", "Remove it"]),
        (
            {"zero_optimization": {"stage": 2, "reduce_buckets": 1}},
            ["Did you mean zero_optimization.reduce_bucket_size?"],
        ),
        (
            {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}},
            ["offload_optimizer", "cpu_offload"],
        ),
        ({"zero_optimization": {"stage": 3, "zero_quantized_weights": True}}, ["zero_quantized_weights", "policy"]),
        ({"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 8}}, ["zero_hpz_partition_size = 8"]),
        ({"zero_optimization": {"stage": 3, "leaf_module": {"classes": ["X"]}}}, ["leaf_module", "LoRA"]),
        (ZERO3 | {"fp16": {"enabled": True}}, ["fp16.enabled", "1e-4", "Use bf16"]),
        (ZERO3 | {"bfloat16": {"enabled": True}}, ["bfloat16", '"bf16"']),
        (ZERO3 | {"bf16": {"enabled": 1}}, ["bf16.enabled = 1"]),
        (ZERO3 | {"bf16": {"enable": True}}, ["Did you mean bf16.enabled?"]),
        (ZERO3 | {"gradient_clipping": 0.5}, ["gradient_clipping = 0.5", "must be 1.0", "optimizer.max_grad_norm"]),
        (ZERO3 | {"train_batch_size": 8}, ["train_batch_size = 8", "rollout.batch_size"]),
        (ZERO3 | {"train_micro_batch_size_per_gpu": 1}, ["rollout.micro_batch_size"]),
        (ZERO3 | {"gradient_accumulation_steps": 4}, ["training.updates_per_rollout"]),
        (ZERO3 | {"optimizer": {"type": "Muon"}}, ["optimizer.type", "adamw"]),
        (ZERO3 | {"optimizer": {"params": {"lr": 1e-4}}}, ["optimizer.params.lr = 0.0001", "optimizer.learning_rate"]),
        (ZERO3 | {"optimizer": {"params": {"betas": [0.9, 0.95]}}}, ["optimizer.params.betas", "optimizer.betas"]),
        (ZERO3 | {"optimizer": {"params": {"learning_rate": 1}}}, ["optimizer.params.learning_rate"]),
        (ZERO3 | {"scheduler": {"type": "WarmupLR"}}, ["scheduler", "optimizer.warmup_updates"]),
        (ZERO3 | {"communication_data_type": "fp16"}, ["communication_data_type", "bf16"]),
        (ZERO3 | {"data_types": {"grad_accum_dtype": "bf16"}}, ["grad_accum_dtype", "fp32"]),
        (ZERO3 | {"gradient_allreduce_op": "sum"}, ["gradient_allreduce_op", "mean"]),
        (ZERO3 | {"managed_gradient_accumulation": True}, ["managed_gradient_accumulation"]),
        (ZERO3 | {"activation_checkpointing": {}}, ["model.checkpointing"]),
    ],
    ids=lambda value: None if isinstance(value, list) else str(value)[:60],
)
def test_a_file_that_does_not_fit_is_refused(document: Any, words: list[str], tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        check(tmp_path, document)
    assert all(word in str(error.value) for word in ["distributed.deepspeed_config", *words]), error.value


def test_what_the_run_decides_may_be_said_too(tmp_path: Path) -> None:
    document = ZERO3 | {
        "gradient_clipping": 1.0,
        "train_batch_size": "auto",
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-5, "betas": [0.9, 0.999], "eps": "auto"}},
        "scheduler": "auto",
        "fp16": {"enabled": False},
        "data_types": {"grad_accum_dtype": "fp32"},
        "zero_allow_untested_optimizer": True,
    }
    config = check(tmp_path, document)
    assert (config.stage, config.bf16) == (3, False)
    assert not {"optimizer", "scheduler", "fp16", "train_batch_size"} & set(config.document)


def test_what_has_no_effect_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    section = {"stage": 3, "stage3_prefetch_bucket_size": 1, "stage3_max_live_parameters": "auto"}
    config = check(tmp_path, {"zero_optimization": section, "steps_per_print": 10, "wall_clock_breakdown": False})
    assert "steps_per_print, zero_optimization.stage3_prefetch_bucket_size: no effect" in caplog.text
    assert "max_live" not in caplog.text and "wall_clock" not in caplog.text
    assert config.document["zero_optimization"] == {"stage": 3, "memory_efficient_linear": False}


def test_adapters_need_the_models_own_type(tmp_path: Path) -> None:
    for dtype, enabled in ((torch.float32, False), (torch.bfloat16, True)):
        for value in (enabled, "auto"):
            assert check(tmp_path, ZERO3 | {"bf16": {"enabled": value}}, mode="lora", dtype=dtype).bf16 is enabled
        assert check(tmp_path, ZERO3, mode="lora", dtype=dtype).bf16 is enabled
        with pytest.raises(ConfigError, match="bf16.enabled.*model.dtype"):
            check(tmp_path, ZERO3 | {"bf16": {"enabled": not enabled}}, mode="lora", dtype=dtype)
    assert check(tmp_path, ZERO3 | {"bf16": {"enabled": True}}, mode="full").bf16


def test_muon_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Muon orthogonalises whole matrices. Set optimizer.name to adamw"):
        check(tmp_path, ZERO3, name="muon")


def test_a_file_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match="nowhere.json.*cannot be read"):
        read_config("nowhere.json", ADAMW, mode="lora", dtype=torch.float32)


@pytest.mark.parametrize("stage", [2, 3])
def test_the_files_that_ship_are_good(stage: int) -> None:
    path = ROOT / f"configs/deepspeed/zero{stage}.json"
    config = read_config(path, ADAMW, mode="full", dtype=torch.float32)
    assert config.stage == stage and config.bf16
    assert config.document["communication_data_type"] == config.document["data_types"]["grad_accum_dtype"] == "fp32"


def test_a_missing_package_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    from sage_fast.distributed.deepspeed import zero_engine as deepspeed

    monkeypatch.setitem(sys.modules, "deepspeed", None)
    with pytest.raises(ConfigError, match=r"pip install 'sage-fast\[deepspeed\]'"):
        deepspeed._import_deepspeed(torch.device("cpu"))


def test_an_old_deepspeed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from sage_fast.distributed.deepspeed import zero_engine as deepspeed

    old = ModuleType("deepspeed")
    old.__version__ = "0.17.1"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "deepspeed", old)
    with pytest.raises(ConfigError, match=r"DeepSpeed 0.17.1 is installed, but 0.19.8"):
        deepspeed._import_deepspeed(torch.device("cpu"))


@pytest.mark.slow
def test_options_of_the_forward_that_cannot_be_had(tmp_path: Path) -> None:
    from sage_fast.distributed.deepspeed.zero_engine import _check_forward

    zero2, zero3 = (check(tmp_path, {"zero_optimization": {"stage": stage}}) for stage in (2, 3))
    for adaln, config in (("offload", zero2), ("table", zero3)):
        transformer = tiny_transformer(layers=1)
        transformer.requires_grad_(False)
        acceleration = accelerate(transformer, adaln=adaln)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="model.adaln"):
            _check_forward(acceleration, config)
    _check_forward(None, zero3)


def test_nothing_imports_deepspeed_by_itself() -> None:
    for path in (ROOT / "sage_fast").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not any(name.split(".")[0] == "deepspeed" for name in names), path
