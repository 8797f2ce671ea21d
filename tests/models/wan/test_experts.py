"""A tiny pair of experts, as Wan 2.2 A14B has them: against diffusers' `WanPipeline`,
and trained, resumed, spread, planned and exported by the code that every family has.
"""

import itertools
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, WanPipeline
from torch import Tensor

from sage_fast.checkpoint.reader import open_checkpoint
from sage_fast.config.errors import ConfigError
from sage_fast.config.load import load_config
from sage_fast.config.schema import RunConfig
from sage_fast.config.sections import LoraConfig, ModelConfig
from sage_fast.models.family import (
    Components,
    family_of,
    load_components,
    transformer_blocks,
)
from sage_fast.models.wan.experts import EXPERTS, WanExperts, WanPair
from sage_fast.models.wan.fused import WanTransformer
from sage_fast.planning.devices import DEVICES
from sage_fast.planning.estimate import make_plan
from sage_fast.policy.adapters import load_model, use_adapter, use_weights
from sage_fast.policy.guidance import GuidedPolicy
from sage_fast.policy.layouts import read_adapter
from sage_fast.records import PromptEmbeds
from sage_fast.run.run import Run, build_trainer
from sage_fast.tools.api import generate
from sage_fast.tools.exporting import export
from tests.distributed.ranks import assert_same_updates, run_ranks, train
from tests.models.runs import assert_resumes_to_the_bit
from tests.models.wan.test_training import BF16, FORWARD_PROCESS, STOCK, probe
from tests.models.wan.test_training import write as write_one
from tests.tiny.wan import save_pair, save_wan

pytestmark = pytest.mark.usefixtures("nothing_drawn")

SCALES = (4.0, 3.0)
LEVELS = torch.tensor([0.9, 0.3, 0.875, 0.8749])
"""Of the first expert, the second, the first, the second."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_pair(tmp_path_factory.mktemp("pair"))


def section(folder: Path, **options: Any) -> ModelConfig:
    return ModelConfig(family="wan_experts", path=str(folder), device="cpu", **options)


def write(model: Path, folder: Path, **changes: dict[str, Any]) -> str:
    """File of a run whose 4 steps are two of each expert."""
    rollout = {"num_steps": 4, "shift": 8.0, "guidance_scale": list(SCALES)}
    changes["rollout"] = rollout | changes.get("rollout", {})
    return write_one(model, folder, family="wan_experts", **changes)


# --------------------------------------------------------------------------------------
# velocity


@pytest.fixture(scope="module")
def ours(model: Path) -> Components:
    return load_components(section(model))


def states(ours: Components) -> tuple[Tensor, list[PromptEmbeds], PromptEmbeds]:
    prompt, empty = ours.prompt_encoder.encode(["a red fox", ""])
    shape = ours.video_decoder.latent_shape(5, 32, 32)
    latents = torch.randn(4, *shape, generator=torch.Generator().manual_seed(0))
    return latents, [prompt] * 4, empty


def test_latents_are_those_of_the_stock_pipeline(model: Path, ours: Components) -> None:
    stock = WanPipeline.from_pretrained(model)
    stock.set_progress_bar_config(disable=True)
    stock.scheduler = FlowMatchEulerDiscreteScheduler(shift=8.0)
    latents, (prompt, *_), empty = states(ours)
    start = latents[:1]
    high, low = SCALES
    expected = stock(
        "a red fox",
        negative_prompt="",
        num_frames=5,
        height=32,
        width=32,
        num_inference_steps=6,
        guidance_scale=high,
        guidance_scale_2=low,
        latents=start.clone(),
        output_type="latent",
    ).frames
    sigmas = stock.scheduler.sigmas
    assert {0, 1} == set(ours.transformer.experts_at(sigmas[:-1]))

    def sampled(scales: Any) -> Tensor:
        policy = GuidedPolicy(ours.transformer, empty, scales)
        x = start.clone()
        with torch.no_grad():
            for here, there in itertools.pairwise(sigmas):
                x += (there - here) * policy.velocity(x, here[None], [prompt])
        return x

    for forward in ("stock", "fused"):
        handle = WanPair.choose_forward(
            ours.transformer, section(model, forward=forward)
        )
        assert (sampled(SCALES) - expected).norm() <= 1e-6 * expected.norm()
        assert (sampled(high) - expected).norm() > 1e-4 * expected.norm()
    assert handle is not None
    handle.undo()
    modules = ours.transformer.modules()
    assert not any("_acceleration" in module.__dict__ for module in modules)


def test_a_batch_at_levels_of_both_experts_has_the_bits_of_each(
    ours: Components,
) -> None:
    latents, prompts, empty = states(ours)
    assert ours.transformer.experts_at(LEVELS) == [0, 1, 0, 1]
    policy = GuidedPolicy(ours.transformer, empty, SCALES)
    with torch.no_grad():
        mixed = policy.velocity(latents, LEVELS, prompts)
        # The same rows where the batch is at levels of one expert alone.
        for expert, rows in ((0, [0, 2]), (1, [1, 3])):
            levels = LEVELS[rows].repeat_interleave(2)
            if expert:
                levels = levels[[0, 0, 1, 1]]
            alone = policy.velocity(latents, levels, prompts)
            where = [row for row in rows if levels[row] == LEVELS[row]]
            assert where and torch.equal(mixed[where], alone[where])


@pytest.mark.parametrize("split", [False, True])
def test_the_gradient_of_a_mixed_batch_is_the_sum_of_its_rows(
    split: bool, model: Path
) -> None:
    config = LoraConfig(rank=2)
    found = load_model(section(model), config)
    from sage_fast.policy.lora import make_trainable, trainable_parameters

    make_trainable(found.transformer, "lora", config, seed=0)
    weights = trainable_parameters(found.transformer)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for weight in weights.values():
            weight.data += 0.1 * torch.randn_like(weight)
    latents, prompts, empty = states(found)
    policy = GuidedPolicy(found.transformer, empty, SCALES)

    def gradient(rows: list[int]) -> dict[str, Tensor]:
        for weight in weights.values():
            weight.grad = None
        given = latents[rows], LEVELS[rows], [prompts[row] for row in rows]
        policy.velocity_and_gradient(*given, [latents[rows].sin()], split=split)
        return {
            name: torch.zeros_like(p) if p.grad is None else p.grad
            for name, p in weights.items()
        }

    whole = gradient([0, 1, 2, 3])
    rows = [gradient([row]) for row in range(4)]
    for name, value in whole.items():
        added = sum(row[name] for row in rows)
        torch.testing.assert_close(value, added, rtol=1e-4, atol=1e-5)
    # A row has no gradient of the other expert.
    for number, expert in ((0, "low_noise."), (1, "high_noise.")):
        others = [v for n, v in rows[number].items() if n.startswith(expert)]
        assert others and not any(value.any() for value in others)


# --------------------------------------------------------------------------------------
# training

MODES = {
    "two_phase": [],
    "stock_bf16": [STOCK, BF16, "--model.checkpointing=full"],
    "split": [
        "--training.guidance=split",
        "--model.checkpointing=full",
        "--training.permute_timesteps=false",
    ],
    "single_pass": ["--training.update=single_pass"],
    "forward_process": FORWARD_PROCESS,
}


@pytest.mark.parametrize("mode", MODES)
def test_both_adapters_move_from_a_ratio_of_one(
    mode: str, model: Path, tmp_path: Path
) -> None:
    words = [*MODES[mode], "--evaluation.every=0", "--rollout.batch_size=2"]
    words += ["--rollout.num_generations=2"]
    trainer = build_trainer(load_config(write(model, tmp_path), words))
    before = {name: p.detach().clone() for name, p in trainer.parameters.items()}
    assert len(before) == 2 * 2 * 2 * len(WanTransformer.lora_targets)
    for _ in range(2):
        row = trainer.iterate()
        assert row.get("ratio/first_max_deviation", 0.0) == 0.0 and row["grad_norm"] > 0
    assert not [n for n, p in trainer.parameters.items() if torch.equal(p, before[n])]


LAYOUTS = {
    "sharded": ["--distributed.dp_shard=2", "--distributed.keep_gathered=rollout"],
    "shared_videos": ["--distributed.sp=2"],
    "forward_process": [
        *FORWARD_PROCESS,
        "--distributed.dp_shard=2",
        "--distributed.keep_gathered=rollout",
    ],
}


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(layout, marks=[] if layout == "sharded" else pytest.mark.slow)
        for layout in LAYOUTS
    ],
)
def test_ranks_train_like_one_process(layout: str, model: Path, tmp_path: Path) -> None:
    """Micro-batches of one video: ranks are at levels of different experts."""
    file = write(model, tmp_path, rollout={"micro_batch_size": 1})
    words = LAYOUTS[layout]
    alone = [word for word in words if "distributed" not in word]
    expected, _, weights = train(file, alone)
    videos = 4 if layout == "shared_videos" else 2
    for records, _, spread in run_ranks(
        train, 2, file, [*words, f"--rollout.batch_size={videos}"]
    ):
        assert_same_updates(records, expected, first=1e-6)
        for name, value in weights.items():
            torch.testing.assert_close(spread[name], value, rtol=1e-3, atol=5e-5)


def test_a_resumed_run_is_the_whole_one_to_the_bit(model: Path, tmp_path: Path) -> None:
    words = ["--training.ema_decay=0.9"]
    assert_resumes_to_the_bit(partial(write, model), tmp_path, words)


@pytest.mark.parametrize(
    "words", [["--training.mode=full"], ["--distributed.zero_stage=2"]]
)
def test_what_needs_a_gradient_of_both_is_refused(
    words: list[str], model: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="wan_experts, of which one expert at a time"):
        WanPair.always_read(load_components(section(model)).transformer)
    if "full" in words[0]:
        with pytest.raises(ConfigError, match="wan_experts, of which one"):
            build_trainer(load_config(write(model, tmp_path), words))


# --------------------------------------------------------------------------------------
# files


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


def pair_of(transformer: WanExperts) -> list[Tensor]:
    return [probe(getattr(transformer, e.rstrip("."))) for e in EXPERTS]


def of_the_run(config: RunConfig) -> list[Tensor]:
    transformer = load_components(config.model).transformer
    folder = max((Path(config.output_dir) / "checkpoints").iterdir())
    weights = open_checkpoint(folder).tensors["weights"]
    use_weights(transformer, weights, mode="lora", lora=config.lora)
    return pair_of(transformer)


@pytest.mark.parametrize("layout", ["diffusers", "musubi"])
def test_the_stock_pipeline_loads_both_files_of_an_export(
    layout: Any, trained: RunConfig, tmp_path: Path
) -> None:
    result = export(trained.output_dir, tmp_path / "o", layout=layout)
    high, low = result.adapter_files
    assert (high, low) == ("high_noise.safetensors", "low_noise.safetensors")
    pipeline = WanPipeline.from_pretrained(str(trained.model.path))
    base = [probe(getattr(pipeline, expert)) for expert in EXPERTS.values()]
    folder = str(tmp_path / "o")
    pipeline.load_lora_weights(folder, weight_name=high)
    pipeline.load_lora_weights(folder, weight_name=low, load_into_transformer_2=True)
    expected = of_the_run(trained)
    for expert, wanted, was in zip(EXPERTS.values(), expected, base, strict=True):
        given = probe(getattr(pipeline, expert))
        assert (was - wanted).abs().max() > 1e-3, "the adapter does nothing"
        assert (given - wanted).norm() <= 1e-6 * wanted.norm()
    # This project reads the folder, and the checkpoint's own file, to the same model.
    checkpoint = max((Path(trained.output_dir) / "checkpoints").iterdir()) / "lora"
    for source in (tmp_path / "o", checkpoint):
        transformer = load_components(trained.model).transformer
        use_adapter(transformer, source)
        for given, wanted in zip(pair_of(transformer), expected, strict=True):
            assert (given - wanted).norm() <= 1e-6 * wanted.norm()
    started = load_model(
        section(Path(str(trained.model.path)), adapter=folder), trained.lora
    )
    for given, wanted in zip(pair_of(started.transformer), expected, strict=True):
        assert (given - wanted).norm() <= 1e-6 * wanted.norm()
    card = (tmp_path / "o/README.md").read_text("utf-8")
    assert "guidance 4.0 and 3.0," in card
    if layout == "diffusers":
        assert (
            f"pipeline.transformer_2.load_lora_adapter('{folder}', weight_name" in card
        )


def test_half_of_a_pair_is_refused(
    model: Path, trained: RunConfig, tmp_path: Path
) -> None:
    export(trained.output_dir, tmp_path / "o")
    with pytest.raises(
        ValueError,
        match=r"high_noise.safetensors is for 1 transformer\(s\), and this model is 2",
    ):
        read_adapter(tmp_path / "o/high_noise.safetensors", WanPair)
    with pytest.raises(
        ValueError, match=r"is for 2 transformer\(s\), and this model is 1"
    ):
        read_adapter(tmp_path / "o", WanTransformer)
    with pytest.raises(ConfigError, match="--format full is for one transformer"):
        export(trained.output_dir, tmp_path / "f", format="full")
    with pytest.raises(ValueError, match="set model.family to wan; get two"):
        load_components(section(save_wan(tmp_path / "one")))
    one = shutil.copytree(model, tmp_path / "half")
    shutil.rmtree(one / "transformer_2")
    with pytest.raises(ValueError, match="transformer_2/config.json"):
        load_components(section(one))
    facts = WanPair().inspect(section(model))
    facts.check_guidance(SCALES)
    alone = load_components(
        ModelConfig(family="wan", path=str(tmp_path / "one"), device="cpu")
    )
    with pytest.raises(ValueError, match="these weights are one"):
        alone.check_guidance(SCALES)


def test_videos_of_a_run(trained: RunConfig, tmp_path: Path) -> None:
    asked = {"prompts": ["a red fox"], "output_dir": tmp_path / "v"}
    (first,) = generate(trained, **asked)
    stamp = first.stat().st_mtime_ns
    (again,) = generate(trained, **asked)
    assert again.stat().st_mtime_ns == stamp, "both scales are in the record"
    export(trained.output_dir, tmp_path / "o")
    (other,) = generate(
        trained, lora=tmp_path / "o", prompts=["a red fox"], output_dir=tmp_path / "w"
    )
    assert other.read_bytes() == first.read_bytes()


def test_the_plan_counts_both_experts_and_the_work_of_one(
    model: Path, tmp_path: Path
) -> None:
    one = save_wan(tmp_path / "one")
    plans = [
        make_plan(load_config(file), DEVICES["h100"])
        for file in (write(model, tmp_path), write_one(one, tmp_path / "one"))
    ]
    pair = load_components(section(model)).transformer
    assert family_of(pair).transformer_class == "WanExperts"
    assert len(transformer_blocks(pair)) == 4
    assert plans[0].weights.total == sum(p.numel() for p in pair.parameters())
    assert plans[0].weights.total == 2 * plans[1].weights.total


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--model.path=Wan-AI/Wan2.2-T2V-A14B-Diffusers"], "to wan_experts"),
        (["--model.family=wan_experts"], "one transformer. Set model.family to wan"),
        (["--rollout.guidance_scale=[4,3]"], "but these weights are one transformer"),
    ],
)
def test_a_plan_of_another_number_of_transformers_is_refused(
    words: list[str], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        make_plan(load_config("wan_480p_lora_1gpu", words), DEVICES["h200"], sizes={})
