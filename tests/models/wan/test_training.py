"""A tiny Wan trains, resumes, spreads over ranks, plans, profiles and exports by the
code that every family has.
"""

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import WanPipeline, WanTransformer3DModel
from torch import Tensor

from sage_fast.checkpoint.reader import open_checkpoint
from sage_fast.config.errors import ConfigError
from sage_fast.config.load import load_config
from sage_fast.config.schema import RunConfig
from sage_fast.models.family import describe_model, load_components
from sage_fast.models.wan.fused import WanTransformer
from sage_fast.planning.devices import DEVICES
from sage_fast.planning.estimate import make_plan
from sage_fast.policy.adapters import use_weights
from sage_fast.run.run import Run, build_trainer
from sage_fast.tools.exporting import export
from sage_fast.tools.profiling import BLOCK, profile_update
from tests.distributed.ranks import assert_same_updates, run_ranks, train
from tests.models.runs import assert_resumes_to_the_bit, run_file
from tests.tiny.wan import TEXT_WIDTH, save_wan

pytestmark = pytest.mark.usefixtures("nothing_drawn")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_wan(tmp_path_factory.mktemp("wan"))


def write(
    model: Path, folder: Path, family: str = "wan", **changes: dict[str, Any]
) -> str:
    """File of a run of two updates, each of four videos of a prompt."""
    rollout = {
        "num_steps": 3,
        "num_generations": 4,
        "batch_size": 4,
        "micro_batch_size": 2,
    }
    changes["rollout"] = rollout | changes.get("rollout", {})
    return run_file(
        folder,
        data={"prompts": ["a red circle moving left", "a fox in the snow"]},
        model={"family": family, "path": str(model)},
        video={"num_frames": 5, "height": 32, "width": 32, "fps": 16},
        **changes,
    )


FORWARD_PROCESS = [
    "--training.update=forward_process",
    "--rollout.sde_type=ode",
    "--objective.kl_mode=none",
]
FULL = "--training.mode=full"
BF16 = "--model.dtype=bfloat16"
STOCK = "--model.forward=stock"
MODES = {
    "two_phase_bf16": [BF16, "--model.checkpointing=selective"],
    "two_phase_bf16_stock": [STOCK, BF16, "--model.checkpointing=full"],
    "two_phase_full": [FULL],
    "split": ["--training.guidance=split", "--model.checkpointing=full"],
    "single_pass": ["--training.update=single_pass"],
    "forward_process_full": [*FORWARD_PROCESS, FULL],
    "forward_process_bf16": [*FORWARD_PROCESS, BF16],
}


@pytest.mark.parametrize("mode", MODES)
def test_every_update_trains_and_begins_at_a_ratio_of_one(
    mode: str, model: Path, tmp_path: Path
) -> None:
    words = [*MODES[mode], "--evaluation.every=0"]
    trainer = build_trainer(load_config(write(model, tmp_path), words))
    before = {name: p.detach().clone() for name, p in trainer.engine.parameters.items()}
    assert set(before) and {p.dtype for p in before.values()} == {torch.float32}
    for _ in range(2):
        row = trainer.iterate()
        assert row.get("ratio/first_max_deviation", 0.0) == 0.0 and row["grad_norm"] > 0
    moved = [
        name
        for name, p in trainer.engine.parameters.items()
        if not torch.equal(p, before[name])
    ]
    # lora_A has a gradient from the second update on.
    assert set(moved) == set(before)
    if FULL not in words:
        assert len(before) == 2 * 2 * len(WanTransformer.lora_targets)


LAYOUTS = {
    "shared_videos": ["--distributed.sp=2"],
    "four_ranks": [
        "--distributed.sp=2",
        "--distributed.dp_shard=2",
        "--distributed.keep_gathered=rollout",
    ],
    "lora_sharded_bf16": [
        "--distributed.dp_shard=2",
        "--distributed.keep_gathered=never",
        BF16,
    ],
    "full_sharded": [FULL, "--distributed.dp_shard=2"],
    "forward_process": [
        *FORWARD_PROCESS,
        "--distributed.dp_shard=2",
        "--distributed.keep_gathered=rollout",
    ],
}


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(layout, marks=[] if layout == "full_sharded" else pytest.mark.slow)
        for layout in LAYOUTS
    ],
)
def test_ranks_train_like_one_process(layout: str, model: Path, tmp_path: Path) -> None:
    file = write(model, tmp_path)
    words = LAYOUTS[layout]
    alone = [word for word in words if "distributed" not in word]
    # lora_B of zeros: its first sign is that of a rounded gradient
    wide = 1e-3 if BF16 in words else 0.0
    expected, _, weights = train(file, alone)
    ranks = 4 if layout == "four_ranks" else 2
    videos = 4 if layout == "shared_videos" else 2
    for records, _, spread in run_ranks(
        train, ranks, file, [*words, f"--rollout.batch_size={videos}"]
    ):
        assert_same_updates(records, expected, first=1e-6, wide=wide)
        for name, value in weights.items():
            torch.testing.assert_close(
                spread[name], value, rtol=1e-3, atol=max(wide, 1e-5)
            )


@pytest.mark.parametrize(
    "words", [[], FORWARD_PROCESS], ids=["two_phase", "forward_process"]
)
def test_a_resumed_run_is_the_whole_one_to_the_bit(
    words: list[str], model: Path, tmp_path: Path
) -> None:
    adapters = assert_resumes_to_the_bit(partial(write, model), tmp_path, words)
    assert len(adapters) == 2 * 2 * len(WanTransformer.lora_targets)


@pytest.fixture(scope="module")
def trained(model: Path, tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    folder = tmp_path_factory.mktemp("trained")
    options = {
        "optimizer": {"name": "adamw", "learning_rate": 0.05},
        "lora": {"rank": 2, "alpha": 3},
    }
    run = Run(load_config(write(model, folder, **options), ["--evaluation.every=0"]))
    run.train()
    return run.config


def probe(transformer: WanTransformer3DModel) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    latents, text = (
        torch.randn(shape, generator=generator)
        for shape in ((1, 4, 2, 4, 4), (1, 512, TEXT_WIDTH))
    )
    with torch.no_grad():
        result: Tensor = transformer(
            latents, torch.tensor([700.0]), text, return_dict=False
        )[0]
    return result


def of_the_run(config: RunConfig) -> Tensor:
    transformer = load_components(config.model).transformer
    checkpoint = open_checkpoint(
        max((Path(config.output_dir) / "checkpoints").iterdir())
    )
    use_weights(
        transformer,
        checkpoint.tensors["weights"],
        mode=config.training.mode,
        lora=config.lora,
    )
    return probe(transformer)


@pytest.mark.parametrize("layout", ["diffusers", "comfyui", "musubi"])
def test_the_stock_pipeline_loads_an_export(
    layout: Any, trained: RunConfig, tmp_path: Path
) -> None:
    result = export(trained.output_dir, tmp_path / "o", layout=layout)
    pipeline = WanPipeline.from_pretrained(str(trained.model.path))
    base = probe(pipeline.transformer)
    expected = of_the_run(trained)
    pipeline.load_lora_weights(str(tmp_path / "o"), weight_name=result.adapter_file)
    assert (base - expected).abs().max() > 1e-3, "the adapter does nothing"
    assert (probe(pipeline.transformer) - expected).norm() <= 1e-6 * expected.norm()
    card = (tmp_path / "o/README.md").read_text("utf-8")
    # A name that the hub knows needs neither a name of its own nor a link.
    assert "\nlicense: apache-2.0\n" in card and "license_" not in card
    assert "Hunyuan" not in card
    if layout == "diffusers":
        assert (
            "WanPipeline.from_pretrained(" in card
            and "UniPCMultistepScheduler.from_config(" in card
        )
        assert "flow_shift=3.0" in card


def test_a_whole_transformer_is_exported(trained: RunConfig, tmp_path: Path) -> None:
    export(trained.output_dir, tmp_path / "o", format="full")
    transformer = WanTransformer3DModel.from_pretrained(tmp_path / "o")
    torch.testing.assert_close(
        probe(transformer), of_the_run(trained), rtol=1e-5, atol=1e-6
    )


def test_a_layout_without_names_is_refused(trained: RunConfig, tmp_path: Path) -> None:
    with pytest.raises(
        ValueError,
        match="--layout is official, and model.family wan has names for diffusers",
    ):
        export(trained.output_dir, tmp_path / "o", layout="official")


@pytest.mark.slow
def test_a_trace_names_its_blocks(model: Path, tmp_path: Path) -> None:
    # The profiler takes 0.1 ms for each operator.
    rollout = {"num_steps": 2, "num_generations": 2, "batch_size": 2}
    trainer = build_trainer(
        load_config(write(model, tmp_path, rollout=rollout), ["--evaluation.every=0"])
    )
    profile_update(trainer, tmp_path / "profile", warmup=0, memory=False, top=200)
    assert BLOCK in (tmp_path / "profile/top.txt").read_text()


def test_the_plan_of_a_local_folder_is_of_its_transformer(
    model: Path, tmp_path: Path
) -> None:
    config = load_config(
        write(model, tmp_path), ["--training.mode=full", "--optimizer.name=adamw"]
    )
    plan = make_plan(config, DEVICES["h100"])
    weights = sum(
        p.numel() for p in load_components(config.model).transformer.parameters()
    )
    assert (
        plan.weights.total == plan.weights.trained == weights
        and plan.video_tokens == 2 * 2 * 2
    )
    # Cosine and sine of every token, in float32; without adapters AdaLN's weights have
    # no table.
    head_dim = plan.description.transformer["attention_head_dim"]
    assert plan.memory.phases["update"].tables == 2 * 4 * plan.video_tokens * head_dim


def test_a_folder_of_another_model_is_one_line_before_anything_is_loaded(
    model: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(model, tmp_path / "other")
    config = load_config(write(folder, tmp_path))
    file = folder / "transformer/config.json"
    stored = json.loads(file.read_text())
    # A key of a newer diffusers is ignored, as diffusers ignores it.
    file.write_text(json.dumps(stored | {"future_option": None}))
    assert "future_option" not in describe_model(config.model).transformer
    file.write_text(
        json.dumps(stored | {"_class_name": "HunyuanVideo15Transformer3DModel"})
    )
    with pytest.raises(
        ConfigError,
        match=r"config.json is of a HunyuanVideo15Transformer3DModel, and .* WanTransformer",
    ):
        describe_model(config.model)
