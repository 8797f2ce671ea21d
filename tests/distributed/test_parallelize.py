"""Weights over ranks: settings that would do nothing are refused, and those that do
something change no number.
"""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import HunyuanVideo15Transformer3DModel
from torch.distributed.fsdp import FSDPModule

from sage_fast.config.errors import ConfigError
from sage_fast.config.schema import RunConfig
from sage_fast.distributed.world import World
from sage_fast.models.hunyuan15.backbone import velocity
from sage_fast.objectives.base import objective_of
from sage_fast.sharding.parallelize import (
    KeepGathered,
    _resolve_keep_gathered,
    parallelize,
)
from tests.distributed.ranks import run_ranks, train, write_run
from tests.models.hunyuan15.oracle import latents, prompt, tiny_transformer
from tests.run.test_run import MakeRun


@pytest.mark.slow
def test_weights_gathered_in_bfloat16_have_ratio_one(
    tiny_model: Path, tmp_path: Path
) -> None:
    """Rollout and update gather the same numbers; masters stay float32."""
    file = write_run(
        tiny_model, tmp_path, training={"mode": "full"}, rollout={"batch_size": 2}
    )
    for records, _, weights in run_ranks(
        train, 2, file, ["--distributed.param_dtype=bfloat16"]
    ):
        assert [record["ratio/first_max_deviation"] for record in records[:-1]] == [
            0.0,
            0.0,
        ]
        assert {w.dtype for w in weights.values()} == {torch.float32}


ALONE_OR_REPLICATED = World()
TWO_REPLICAS: Any = World(size=2, dp_replicate=2, mesh="mesh", fsdp_mesh="mesh")  # type: ignore[arg-type]
TWO_SHARDS: Any = World(size=2, dp_shard=2, mesh="mesh", fsdp_mesh="mesh")  # type: ignore[arg-type]


def spread(
    transformer: HunyuanVideo15Transformer3DModel, config: RunConfig, world: World
) -> KeepGathered:
    return parallelize(
        transformer,
        config.distributed,
        config.model,
        config.training,
        world,
        torch.device("cpu"),
        check_steps_agree=partial(objective_of(config).check_steps_agree, config),
    )


SINGLE_PASS = ["--training.update=single_pass", "--rollout.micro_batch_size=1"]
# Every video is differentiated at two of its four steps, drawn for itself.
OTHER_STEPS = [*SINGLE_PASS, "--training.timestep_fraction=0.5"]
NEVER = "--distributed.keep_gathered=never"
ZERO = "--distributed.zero_stage=2"
BF16 = ["--distributed.param_dtype=bfloat16", "--training.mode=full"]


@pytest.mark.parametrize(
    ("words", "world", "expected"),
    [
        (
            [NEVER],
            ALONE_OR_REPLICATED,
            "keep_gathered is never, but nothing is gathered",
        ),
        (
            ["--distributed.keep_gathered=rollout"],
            TWO_REPLICAS,
            "Set it to auto, or .* raise distributed.dp_shard",
        ),
        (["--distributed.cpu_offload=true"], TWO_REPLICAS, "cpu_offload moves shards"),
        (
            [*BF16, "--model.forward=stock"],
            TWO_SHARDS,
            "Set model.forward to fused, or param_dtype to float32",
        ),
        (
            [*OTHER_STEPS, "--distributed.cpu_offload=true"],
            TWO_SHARDS,
            "Set cpu_offload to false, .*two_phase",
        ),
        (
            [ZERO, "--optimizer.name=muon"],
            TWO_REPLICAS,
            r"optimizer\.name is 'muon', but with .*zero_stage 2",
        ),
        ([ZERO, *SINGLE_PASS], TWO_REPLICAS, "zero_stage is 2, but with .*single_pass"),
        (
            [*SINGLE_PASS, NEVER, "--objective.kl_position_fraction=0.5"],
            TWO_SHARDS,
            "fraction 0.5.*two_phase",
        ),
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
    """Ranks that decided for themselves would wait for each other. That dp_shard then
    does nothing is said.
    """
    caplog.set_level("INFO")
    for elsewhere, keep in ((True, "rollout"), (False, "always")):
        monkeypatch.setattr(
            World, "any", lambda self, flag, elsewhere=elsewhere: flag or elsewhere
        )
        arguments = (
            tiny_transformer(),
            tiny_run().distributed,
            "lora",
            TWO_SHARDS,
            torch.device("cpu"),
        )
        assert _resolve_keep_gathered(*arguments) == keep
    transformer = tiny_transformer()
    assert (
        spread(transformer, tiny_run(), TWO_SHARDS) == "never"
        and "distributed.dp_shard 2" in caplog.text
    )
    assert not any(isinstance(module, FSDPModule) for module in transformer.modules())


def test_glyph_weights_have_a_gradient_without_glyphs_too(tiny_run: MakeRun) -> None:
    """Else weight decay would reach them on several ranks, where some other rank has
    glyphs, and not on one.
    """
    transformer = tiny_transformer().requires_grad_(True)
    arguments = (transformer, latents(1), torch.tensor([0.7]), [prompt(5, 0)])
    expected = velocity(*arguments)
    spread(transformer, tiny_run("--training.mode=full"), World())
    output = velocity(*arguments)
    torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-5)
    output.square().sum().backward()
    assert all(
        p.grad is not None and not p.grad.any()
        for p in transformer.context_embedder_2.parameters()
    )
