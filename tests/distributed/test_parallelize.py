"""Weights over ranks: settings that would do nothing are refused, and those that do something change no number."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import HunyuanVideo15Transformer3DModel
from torch.distributed.tensor import DTensor

from sage_fast.config.errors import ConfigError
from sage_fast.config.schema import RunConfig
from sage_fast.distributed.parallelize import Gathering, _resolve_keep_gathered, parallelize
from sage_fast.distributed.world import World
from sage_fast.models.hunyuan15.backbone import velocity
from tests.conftest import TINY_RUN
from tests.distributed.ranks import join, run_ranks
from tests.models.hunyuan15.oracle import latents, prompt, tiny_transformer
from tests.run.test_run import MakeRun


def write_run(model: Path, folder: Path) -> str:
    """A run that trains every weight, two videos of a group on each of two ranks."""
    tree: dict[str, Any] = json.loads(json.dumps(TINY_RUN))
    tree["rollout"] |= {"num_generations": 4, "batch_size": 4, "micro_batch_size": 2}
    tree["training"] = {"mode": "full", "num_updates": 2}
    tree |= {"model": {"path": str(model), "device": "cpu", "adaln": "weights"}, "output_dir": str(folder / "run")}
    file = folder / "run.yaml"
    file.write_text(json.dumps(tree))
    return str(file)


def train(file: str, words: list[str]) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
    """Metrics of two updates, and the whole weights in the end."""
    from sage_fast.config.load import load_config
    from sage_fast.run.run import build_trainer

    config = load_config(file, words)
    trainer = build_trainer(config, join(config))
    records = [trainer.iterate() for _ in range(2)]
    whole = {n: p.full_tensor() if isinstance(p, DTensor) else p for n, p in trainer.parameters.items()}
    return records, {name: value.detach() for name, value in whole.items()}


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_shards_in_cpu_memory_train_alike(optimizer: str, tiny_model: Path, tmp_path: Path) -> None:
    file = write_run(tiny_model, tmp_path)
    words = [f"--optimizer.name={optimizer}", "--rollout.batch_size=2"]
    expected, weights = run_ranks(train, 2, file, words)[0]
    given, offloaded = run_ranks(train, 2, file, [*words, "--distributed.cpu_offload=true"])[0]
    for before, after in zip(expected, given, strict=True):
        assert {k: v for k, v in before.items() if "time/" not in k} == {
            k: v for k, v in after.items() if "time/" not in k
        }
    assert all(torch.equal(weights[name], offloaded[name]) for name in weights)


def test_weights_gathered_in_bfloat16_have_ratio_one(tiny_model: Path, tmp_path: Path) -> None:
    """Rollout and update gather the same numbers; masters stay float32."""
    words = ["--rollout.batch_size=2", "--distributed.param_dtype=bfloat16"]
    for records, weights in run_ranks(train, 2, write_run(tiny_model, tmp_path), words):
        assert all(record["ratio/first_max_deviation"] == 0.0 for record in records)
        assert {w.dtype for w in weights.values()} == {torch.float32}


ALONE_OR_REPLICATED = World()
TWO_REPLICAS: Any = World(size=2, dp_replicate=2, mesh="mesh", fsdp_mesh="mesh")  # type: ignore[arg-type]
TWO_SHARDS: Any = World(size=2, dp_shard=2, mesh="mesh", fsdp_mesh="mesh")  # type: ignore[arg-type]


def spread(transformer: HunyuanVideo15Transformer3DModel, config: RunConfig, world: World) -> Gathering:
    sections = config.distributed, config.model, config.training
    share = config.objective.kl_position_fraction
    return parallelize(transformer, *sections, world, torch.device("cpu"), kl_position_fraction=share)


# Every video is differentiated at two of its four steps, drawn for itself.
SINGLE_PASS = ["--training.update=single_pass", "--rollout.micro_batch_size=1", "--distributed.keep_gathered=never"]
ZERO = "--distributed.zero_stage=2"
OTHER_STEPS = [*SINGLE_PASS[:2], "--training.timestep_fraction=0.5"]


@pytest.mark.parametrize(
    ("words", "world", "expected"),
    [
        (["--distributed.keep_gathered=never"], ALONE_OR_REPLICATED, "keep_gathered is never, but nothing is gathered"),
        (["--distributed.keep_gathered=rollout"], TWO_REPLICAS, "Set it to auto, or .* raise distributed.dp_shard"),
        (["--distributed.cpu_offload=true"], TWO_REPLICAS, "cpu_offload moves shards"),
        (["--distributed.cpu_offload=true"], ALONE_OR_REPLICATED, "was not launched"),
        (
            ["--distributed.param_dtype=bfloat16", "--training.mode=full", "--model.forward=stock"],
            TWO_SHARDS,
            "Set model.forward to fused, or param_dtype to float32",
        ),
        ([*OTHER_STEPS, "--distributed.keep_gathered=never"], TWO_SHARDS, "Set keep_gathered to rollout, .*two_phase"),
        ([*OTHER_STEPS, "--distributed.cpu_offload=true"], TWO_SHARDS, "Set cpu_offload to false, .*two_phase"),
        (
            [ZERO, "--optimizer.name=muon"],
            TWO_REPLICAS,
            r"optimizer\.name is 'muon', but with distributed\.zero_stage 2",
        ),
        ([ZERO, *SINGLE_PASS[:2]], TWO_REPLICAS, r"single_pass', but .*zero_stage 2"),
        ([*SINGLE_PASS, "--objective.kl_position_fraction=0.5"], TWO_SHARDS, "kl_position_fraction 0.5.*two_phase"),
    ],
)
def test_settings_that_do_nothing_or_exclude_each_other_are_refused(
    words: list[str], world: World, expected: str, tiny_run: MakeRun
) -> None:
    with pytest.raises(ConfigError, match=expected):
        spread(tiny_transformer(), tiny_run(*words), world)


def test_the_smallest_gpu_decides_whether_frozen_weights_stay(
    tiny_run: MakeRun, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Ranks that decided for themselves would wait for each other. That dp_shard then does nothing is said."""
    caplog.set_level("INFO")
    for elsewhere, keep in ((True, "rollout"), (False, "always")):
        monkeypatch.setattr(World, "any", lambda self, flag, elsewhere=elsewhere: flag or elsewhere)
        arguments = (tiny_transformer(), tiny_run().distributed, "lora", TWO_SHARDS, torch.device("cpu"))
        assert _resolve_keep_gathered(*arguments) == keep
    gathering = spread(tiny_transformer(), tiny_run(), TWO_SHARDS)
    assert not gathering.modules and "distributed.dp_shard 2" in caplog.text


def test_glyph_weights_have_a_gradient_without_glyphs_too(tiny_run: MakeRun) -> None:
    """Else weight decay would reach them on several ranks, where some other rank has glyphs, and not on one."""
    transformer = tiny_transformer().requires_grad_(True)
    arguments = (transformer, latents(1), torch.tensor([0.7]), [prompt(5, 0)])
    expected = velocity(*arguments)
    spread(transformer, tiny_run("--training.mode=full"), World())
    output = velocity(*arguments)
    torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-5)
    output.square().sum().backward()
    assert all(p.grad is not None and not p.grad.any() for p in transformer.context_embedder_2.parameters())
