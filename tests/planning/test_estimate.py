"""The plan: counts against closed forms and torch, memory against measurement, what
makes a configuration fit.
"""

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKLHunyuanVideo15, AutoencoderKLWan
from torch.utils.flop_counter import FlopCounterMode
from transformers import Qwen2_5_VLTextConfig, Qwen2_5_VLTextModel

from benchmarks.counts.traced import unused_work
from sage_fast import accelerate
from sage_fast.commands import plan as plan_command
from sage_fast.commands.cli import main
from sage_fast.config.errors import ConfigError
from sage_fast.config.load import load_config
from sage_fast.config.schema import RunConfig
from sage_fast.models.family import Decoding, describe_model
from sage_fast.models.hunyuan15.backbone import forward_work
from sage_fast.models.hunyuan15.hunyuan15 import (
    END_TOKENS,
    HUNYUAN_VIDEO_15,
    LANGUAGE_MODEL,
    TEMPLATE_TOKENS,
    TOKENS_PER_WORD,
    encoding,
    published_model,
)
from sage_fast.models.hunyuan15.video_vae import VAEDecoder
from sage_fast.models.wan.components import WanDecoder
from sage_fast.planning import estimate
from sage_fast.planning.devices import DEVICES, gpu_memory_gb, measure_cpu
from sage_fast.planning.estimate import (
    Plan,
    find_options,
    make_plan,
    plan_encoding,
    possible_changes,
    settle_memory,
)
from sage_fast.planning.memory import PROCESS, checkpoint_bytes
from sage_fast.planning.text import to_text
from sage_fast.planning.trace import Call, Cost, meta_transformer, trace
from sage_fast.planning.work import (
    Layout,
    anchor_share,
    count_weights,
    velocity_call,
    visits,
)
from sage_fast.policy import guidance
from sage_fast.policy.lora import add_lora
from sage_fast.records import PromptEmbeds
from sage_fast.rewards.base import RewardCosts
from sage_fast.run.prompt_files import load_eval_prompts
from sage_fast.run.run import build_trainer
from sage_kernels.tracer import count
from tests.commands.programs import check_command
from tests.tiny.checkpoints import VAE

MakeRun = Callable[..., RunConfig]
ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.usefixtures("in_the_repository")
B = "configs/hv15_480p_lora_1gpu.yaml"
SMALL = HUNYUAN_VIDEO_15 | {
    "num_attention_heads": 2,
    "num_layers": 3,
    "text_embed_dim": 64,
    "text_embed_2_dim": 32,
}
SMALL |= {"num_refiner_layers": 1}


@cache
def plan(
    *overrides: str, file: str = B, memory_gb: float | None = None, gpus: int = 1
) -> Plan:
    return make_plan(
        load_config(file, overrides),
        DEVICES["h100"],
        memory_gb=memory_gb,
        gpus=gpus,
        sizes={},
    )


@cache
def small_plan(*overrides: str, memory_gb: float | None = None, gpus: int = 1) -> Plan:
    """Of a model of three narrow blocks, which is traced quickly; decoding and rewards
    take nothing.
    """
    size = ["--video.height=64", "--video.width=96", "--video.num_frames=9"]
    config = load_config(
        B, [*size, "--reward.options.videoalign.device=cuda:1", *overrides]
    )
    return make_plan(
        config,
        DEVICES["h100"],
        memory_gb=memory_gb,
        gpus=gpus,
        runtime=0.0,
        description=published_model(
            transformer=SMALL,
            decoding=lambda latent, videos, model, on_gpu: Decoding(peak_bytes=0.0),
            decoder_gb=0.0,
            encoder_gb=0.0,
        ),
        sizes={},
    )


# --------------------------------------------------------------------------------------
# counts


@pytest.mark.slow
def test_an_evaluation_of_its_own_size_costs_what_it_costs() -> None:
    same = small_plan()
    large = small_plan("--evaluation.height=128", "--evaluation.width=192")
    # Scoring takes as long whatever the size.
    scoring = len(load_eval_prompts(same.config)) * same.phases[2].predicted
    seconds, larger_seconds = (
        plan.seconds_per_evaluation or 0.0 for plan in (same, large)
    )
    assert larger_seconds - scoring > 2 * (seconds - scoring) > 0
    assert large.phases == same.phases and large.latent == same.latent
    memory = same.memory.phases["evaluation"]
    larger = large.memory.phases["evaluation"]
    assert larger.working_set > memory.working_set
    assert larger.trajectories == pytest.approx(4 * memory.trajectories)


def test_the_real_model_has_its_parameters() -> None:
    config = load_config(B)
    weights = count_weights(config, HUNYUAN_VIDEO_15)
    assert weights.total == 8_326_608_160
    assert weights.adaln == 54 * 2 * (2048 * 6 * 2048 + 6 * 2048)


def test_encoding_is_what_torch_counts_for_the_prompts_that_the_run_uses(
    tmp_path: Path,
) -> None:
    file = tmp_path / "p.txt"
    words = 40
    file.write_text(
        "".join(f"{number} {'word ' * (words - 1)}\n" for number in range(50_000))
    )
    given = [
        f"--data.prompts={file}",
        f"--evaluation.prompts={file}",
        "--evaluation.num_prompts=8",
    ]
    config = load_config(
        B, [*given, "--training.num_updates=200", "--rollout.batch_size=32"]
    )
    every = plan_encoding(config, DEVICES["h100"], published_model(), gpus=1)
    assert every is not None and 200 * 8 <= every.prompts <= 200 * 8 + 8, (
        "some evaluation prompts are trained on"
    )
    shared = plan_encoding(config, DEVICES["h100"], published_model(), gpus=4)
    assert shared is not None and shared.prompts > 3.9 * every.prompts
    assert shared.seconds == pytest.approx(
        every.seconds * shared.prompts / every.prompts / 4
    )

    size = LANGUAGE_MODEL | {
        "hidden_size": 112,
        "intermediate_size": 592,
        "num_hidden_layers": 2,
        "dtype": "float32",
    }
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [1, 1, 0]}
    with torch.device("meta"):
        model = Qwen2_5_VLTextModel(
            Qwen2_5_VLTextConfig(vocab_size=100, rope_parameters=rope, **size)
        )
    tokens = TOKENS_PER_WORD * 72 + END_TOKENS
    length = round(TEMPLATE_TOKENS + tokens)
    with FlopCounterMode(display=False) as counter:
        model(input_ids=torch.zeros(1, length, dtype=torch.long, device="meta"))
    flops, stored = encoding(size, 72)
    attention = 2 * 4 * 112 * length**2  # torch counts a causal product as a whole one
    assert flops + attention / 2 == pytest.approx(counter.get_total_flops(), rel=1e-3)
    assert stored == 4 * 112 * tokens


def test_the_closed_form_is_what_torch_counts_at_full_depth() -> None:
    """All 54 blocks at 480x832x81, without what does not reach the velocity."""
    transformer = meta_transformer(HUNYUAN_VIDEO_15, torch.bfloat16)
    accelerate(transformer, attention="sdpa", kernels="triton", adaln="weights")
    prompt = PromptEmbeds(
        text=torch.empty(250, 3584, dtype=torch.bfloat16, device="meta"),
        glyph=torch.empty(0, 1472, device="meta"),
    )
    call: Any = transformer
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        call(
            hidden_states=torch.empty(1, 32, 21, 30, 52, device="meta"),
            timestep=torch.empty(1, device="meta"),
            prompts=[prompt],
        )
    needed = (
        forward_work(HUNYUAN_VIDEO_15, 32_760, 250).total
        - unused_work(HUNYUAN_VIDEO_15, 32_760, 250).total
    )
    assert counter.get_total_flops() == needed


def small_call(num_layers: int = 3, **changes: Any) -> Call:
    config = load_config(
        B, ["--video.height=64", "--video.width=96", "--video.num_frames=9"]
    )
    call = velocity_call(
        config,
        published_model(transformer=SMALL | {"num_layers": num_layers}),
        on_gpu=True,
    )
    return replace(
        call, **{"gradient": True, "guidance": config.training.guidance} | changes
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes", [{"gradient": False}, {}], ids=["velocity", "gradient"]
)
def test_six_blocks_follow_from_two_and_three(changes: dict[str, Any]) -> None:
    """Tracing all blocks gives the same work to the last operation, and the same
    memory.
    """
    from sage_fast.planning import trace as module

    call = small_call(6, **changes)
    line = trace(call)
    whole = module._trace(call, 6)
    for name in ("linear", "attention", "attention_backward", "elementwise", "kept"):
        assert getattr(line, name) == getattr(whole, name), name
    assert line.working == pytest.approx(whole.working, rel=0.05)


def flops(cost: Cost) -> float:
    return cost.linear + cost.attention + cost.attention_backward


@pytest.mark.slow
def test_splitting_guidance_halves_what_is_kept_and_offers_the_same_work() -> None:
    paired = trace(small_call(guidance="paired"))
    split = trace(small_call(guidance="split"))
    late = trace(small_call(guidance="split", on_policy=False))
    assert split.kept == pytest.approx(paired.kept / 2, rel=0.05) and flops(
        split
    ) == flops(paired)
    once = flops(trace(small_call(gradient=False)))
    assert flops(late) - flops(split) == pytest.approx(once / 2, rel=1e-6)


def test_full_checkpointing_repeats_attention_and_keeps_half() -> None:
    selective, full = (
        trace(small_call(6, checkpointing=mode)) for mode in ("selective", "full")
    )
    assert full.kept == pytest.approx(selective.kept / 2, rel=0.15)
    assert full.attention == pytest.approx(2 * selective.attention, rel=0.02)


# --------------------------------------------------------------------------------------
# visits, time


CPS_WINDOW = ["--rollout.sde_window.size=5", "--rollout.sde_type=cps"]
"""The last step of `cps` draws no noise, so a quarter of the positions trains four
steps.
"""


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], (20, 0, 18, 0, 20, 0)),
        (["--training.timestep_fraction=0.5"], (20, 0, 9, 0, 10, 0)),
        (["--training.updates_per_rollout=2"], (20, 0, 16, 0, 20, 0)),
        (["--rollout.sde_window.size=5"], (20, 0, 4.5, 0, 5, 0)),
        (CPS_WINDOW, (20, 0, 4.275, 0, 4.75, 0)),
        ([*CPS_WINDOW, "--rollout.sde_window.within=0.9"], (20, 0, 4.5, 0, 5, 0)),
        (
            ["--objective.kl_position_fraction=0.05", "--training.update=single_pass"],
            (0, 20, 0.9, 0.9, 0, 0.9),
        ),
        (["--training.best_and_worst=1"], (20, 0, 9, 0, 10, 0)),
        (
            ["--training.best_and_worst=1", "--rollout.micro_batch_size=4"],
            (20, 0, 18, 0, 20, 0),
        ),
    ],
    ids=[
        "reference",
        "fraction",
        "two-updates",
        "window",
        "degenerate",
        "within",
        "fast",
        "best-and-worst",
        "in-fours",
    ],
)
def test_visits_per_video(overrides: list[str], expected: tuple[float, ...]) -> None:
    found = visits(load_config(B, overrides))
    assert tuple(
        getattr(found, field.name) for field in fields(found)
    ) == pytest.approx(expected)


def test_a_fixed_anchor_is_behind_in_all_but_the_first_rollout() -> None:
    config = load_config(B, ["--objective.kl_mode=fixed"])
    assert anchor_share(config) == pytest.approx(1 - 1 / 200)


def test_ranks_share_what_is_trained() -> None:
    """Of a group of 16 over eight ranks, eight videos are trained: one by each; or six,
    and two ranks have none.
    """
    half = ["--rollout.num_generations=16", "--training.best_and_worst=4"]
    spread, whole = (
        load_config(B, [*half, f"--rollout.batch_size={size}"]) for size in (2, 16)
    )
    assert visits(spread, 8).update == visits(spread, 64).update == 10
    assert (
        visits(spread).update == visits(whole).update == visits(whole, 8).update == 10
    )
    fewer = load_config(
        B, [half[0], "--training.best_and_worst=3", "--rollout.batch_size=2"]
    )
    assert visits(fewer).update == pytest.approx(7.5) and visits(fewer, 8).update == 10
    # Of eight pairs over two ranks k run in C(8, k) C(k, 8 - k) 2^(2k - 8) choices, and
    # half of k is rounded up.
    pairs = load_config(
        B, [*half, "--rollout.batch_size=8", "--rollout.micro_batch_size=2"]
    )
    ways = {
        k: math.comb(8, k) * math.comb(k, 8 - k) * 2 ** (2 * k - 8) for k in range(4, 9)
    }
    share = sum(count * math.ceil(k / 2) / 4 for k, count in ways.items()) / math.comb(
        16, 8
    )
    assert visits(pairs, 2).update == pytest.approx(20 * share, rel=0.02)
    assert visits(pairs).update < 0.95 * visits(pairs, 2).update


def test_steps_before_the_window_count_once_per_group() -> None:
    """A window of five of 20 steps opens after six on average. Of four ranks with three
    videos each, of groups of four, two have parts of two groups.
    """
    shared = [
        "--rollout.sde_window.size=5",
        "--rollout.num_generations=4",
        "--rollout.initial_noise=shared",
    ]
    whole, parts = (
        load_config(B, [*shared, f"--rollout.batch_size={size}"]) for size in (4, 3)
    )
    assert (
        visits(whole).rollout
        == visits(whole, 4, sharded=True).rollout
        == 20 - 6 * 3 / 4
    )
    assert (visits(parts).rollout, visits(parts, 4).rollout) == pytest.approx(
        (20 - 6 / 2, 20 - 6 / 3)
    )
    assert visits(parts, 4, sharded=True).rollout == 20
    assert visits(load_config(B, shared[:2])).rollout == 20
    within = load_config(
        B, [*shared, "--rollout.batch_size=4", "--rollout.sde_window.within=0.5"]
    )
    assert visits(within).rollout == pytest.approx(20 - 1.5 * 3 / 4)


FORWARD = [
    "--training.update=forward_process",
    "--rollout.sde_type=ode",
    "--objective.kl_mode=none",
]
FORWARD.append("--rollout.guidance_scale=1")
ONE_OF_FOUR = (
    "--rollout.micro_batch_size=1 --rollout.num_generations=4 "
    "--training.best_and_worst=1"
)
SHARED_START = "--rollout.initial_noise=shared --rollout.sde_window.size=2"
DRAWN_KL = "--rollout.micro_batch_size=1 --objective.kl_position_fraction=0.25"


@pytest.mark.parametrize(
    "words",
    [
        "--training.guidance=split",
        f"{ONE_OF_FOUR} --rollout.sde_window.size=2",
        DRAWN_KL,
        f"{DRAWN_KL} --training.update=single_pass",
        f"{DRAWN_KL} --training.update=single_pass --training.guidance=split",
        SHARED_START,
        f"{SHARED_START} --rollout.micro_batch_size=1 --training.update=single_pass",
        f"{DRAWN_KL} {' '.join(FORWARD)} --objective.kl_mode=moving "
        "--forward_process.sampling_guidance=2 "
        "--training.updates_per_rollout=2",
        (
            f"{' '.join(FORWARD)} --rollout.sde_type=sage_exact "
            "--forward_process.states=path --forward_process.levels=2"
        ),
    ],
    ids=[
        "all",
        "best-and-worst",
        "drawn",
        "single-pass",
        "single-pass-split",
        "shared-start",
        "shared-one",
        "forward-process",
        "path",
    ],
)
def test_forwards_of_the_trainer_are_those_of_the_plan(
    words: str, tiny_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A whole training of a tiny model calls the transformer as often as `visits` says."""
    config = tiny_run(
        "--training.anchor_interval=2", "--training.num_updates=4", *words.split()
    )
    calls = []
    velocity = guidance.model_velocity

    def counted(*arguments: Any) -> Any:
        calls.append(len(arguments[1]))
        return velocity(*arguments)

    monkeypatch.setattr(guidance, "model_velocity", counted)
    trainer = build_trainer(config)
    for _ in range(4):
        trainer.iterate()
    found = visits(config)
    branches = 1 if config.rollout.guidance_scale == 1 else 2
    sampled = 1 if config.sampling_guidance == 1 else 2
    made = sampled * found.rollout + branches * (
        found.pass_steps + found.anchor + found.update
    )
    made += found.repeated
    assert sum(calls) == 4 * config.rollout.batch_size * made


def test_seconds_are_work_over_ceilings() -> None:
    found = small_plan()
    by_name = {phase.name: phase for phase in found.phases}
    assert found.seconds_per_video == pytest.approx(
        sum(p.predicted for p in found.phases)
    )
    assert all(phase.predicted >= phase.bound >= 0 for phase in found.phases)
    rollout = by_name["rollout"].cost
    seconds = (
        rollout.linear / 798e12
        + rollout.attention / 595e12
        + rollout.elementwise / 3.0e12
    )
    assert by_name["rollout"].bound == pytest.approx(seconds)
    assert found.videos_per_gpu_hour == pytest.approx(3600 / found.seconds_per_video)
    # Convolutions at half of the products' ceiling.
    decoded = by_name["decode"].cost
    seconds = decoded.linear / 798e12 / 0.5 + decoded.elementwise / 3.0e12 / 0.8
    assert by_name["decode"].predicted == pytest.approx(seconds)
    assert found.seconds_per_evaluation is not None
    between = found.config.evaluation.every * found.config.rollout.batch_size
    assert found.evaluation_per_video == pytest.approx(
        found.seconds_per_evaluation / between
    )
    # Updates are counted between two evaluations, and of a rollout there may be
    # several.
    twice = small_plan(
        *FORWARD, "--training.updates_per_rollout=2", "--rollout.micro_batch_size=1"
    )
    assert twice.seconds_per_evaluation is not None
    videos = twice.config.evaluation.every / 2 * twice.config.rollout.batch_size
    assert twice.evaluation_per_video == pytest.approx(
        twice.seconds_per_evaluation / videos
    )
    # The anchor is behind in nine of ten rollouts.
    assert by_name["anchor"].predicted == pytest.approx(
        0.9 * by_name["rollout"].predicted
    )


def test_bytes_of_decoding_are_those_of_all_operators_but_products() -> None:
    """Of a small autoencoder: the trace is what a decode on the CPU moves, less what
    its convolutions and attention read and write.
    """
    latents = torch.randn(1, VAE["latent_channels"], 3, 4, 3)
    decoder = VAEDecoder(AutoencoderKLHunyuanVideo15(**VAE))
    with torch.device("meta"):
        traced = VAEDecoder(AutoencoderKLHunyuanVideo15(**VAE))
    products = []
    tokens = 4 * 3

    def add(
        module: torch.nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor
    ) -> None:
        products.append(
            sum(tensor.nbytes for tensor in (*inputs, *module.parameters(), output))
        )

    for module in decoder.vae.modules():
        if isinstance(module, torch.nn.Conv2d | torch.nn.Conv3d):
            module.register_forward_hook(add)
    width = VAE["block_out_channels"][-1]
    # Queries of a frame and keys of the frames so far, then scores and values.
    for frames in (1, 2, 3):
        keys = frames * tokens
        scores = tokens * keys
        products.append(4 * (tokens * width + keys * width + scores))
        products.append(4 * (scores + keys * width + tokens * width))
    with torch.no_grad():
        others = count(lambda: [*decoder.parts(latents)]).total - sum(products)
    assert traced.traced(latents.to("meta")).moved == others
    assert decoder.traced(latents).moved == others


def test_decoding_in_tiles_costs_what_the_tiles_do() -> None:
    """The decoder counts a tile of each size once, and of Wan's frames two and three."""
    latent = (16, 4, 33, 24)
    flops, moved = WanDecoder.empty("float16").work(latent, tiled=True)
    with torch.device("meta"):
        decoder = WanDecoder(AutoencoderKLWan().to(torch.float16), memory_gib=1e-9)
    whole = decoder.traced(
        torch.empty(1, *latent, dtype=decoder.vae.dtype, device="meta")
    )
    assert decoder.vae.use_tiling
    assert flops == whole.flops.total()
    assert moved == pytest.approx(whole.moved, rel=2e-3)


# --------------------------------------------------------------------------------------
# memory


def test_components_of_memory_are_sizes() -> None:
    found = small_plan("--training.ema_decay=0.9", "--optimizer.name=adamw")
    update, step = (
        found.memory.phases[phase].parts() for phase in ("update", "optimizer")
    )
    trained = 4 * found.weights.trained
    latent = 4 * 32 * 3 * 4 * 6
    for name in ("adapters", "anchor", "average (EMA)"):
        assert update[name] == trained
    # Those of the first half of the videos too, which are gone when the optimizer moves
    # the weights.
    assert update["gradients"] == 2 * step["gradients"] == 2 * trained
    assert update["optimizer state"] == 2 * trained
    assert update["transformer"] == 2 * found.weights.total
    assert (
        update["trajectories"] == 8 * 41 * latent
        and update["anchor velocities"] == 8 * 20 * latent
    )
    assert found.memory.peak == max(held.total for held in found.memory.phases.values())


def test_an_anchor_and_an_old_policy_are_two_copies_and_two_velocities() -> None:
    words = (
        "--training.update=forward_process",
        "--optimizer.name=adamw",
        "--forward_process.levels=4",
    )
    old = ("--forward_process.old_decay=0.5",)
    anchor = ("--objective.kl_mode=fixed", "--objective.kl_position_fraction=0.5")
    neither = ("--forward_process.old_decay=null", "--objective.kl_mode=none")
    found = {}
    for name, more in {
        "none": neither,
        "old": (*neither[1:], *old),
        "anchor": (*neither[:1], *anchor),
    }.items():
        found[name] = small_plan(*words, *more)
    found["both"] = small_plan(*words, *old, *anchor)
    latent = 4 * 32 * 3 * 4 * 6
    for name, copies, kept, passes in (
        ("old", 1, 4, 4.0),
        ("anchor", 1, 2, 1.99),
        ("both", 2, 6, 5.99),
    ):
        update = found[name].memory.phases["update"].parts()
        assert update["anchor"] == 4 * found[name].weights.trained * copies
        assert update["anchor velocities"] == 8 * kept * latent
        assert found[name].visits.anchor == pytest.approx(passes)
        assert found[name].checkpoint - found["none"].checkpoint == update["anchor"]


def test_a_node_needs_cpu_memory_for_what_is_not_read_straight_to_its_gpus() -> None:
    """Neither for the transformer nor for the text encoder, but for whatever is
    offloaded.
    """
    plain = small_plan("--checkpoint.asynchronous=false").loading or {}
    assert sum(plain.values()) == PROCESS, (
        "rewards are elsewhere, the decoder takes nothing"
    )
    found = small_plan("--model.adaln=offload", "--checkpoint.asynchronous=false")
    assert (
        found.loading is not None
        and found.loading["weights that stay"] == 2.0 * found.weights.adaln
    )
    many = replace(found, layout=Layout(replicate=16)).loading
    assert many == {name: 8 * size for name, size in found.loading.items()}, (
        "a node has eight"
    )


def test_pinned_memory_counts_as_torch_rounds_it() -> None:
    """Each tensor takes a power of two of bytes: copies of a checkpoint, and shards in
    CPU memory.
    """
    transformer = meta_transformer(dict(SMALL), torch.float32)
    rounded = sum(
        2 ** math.ceil(math.log2(p.numel())) for p in transformer.parameters()
    )
    found = small_plan("--training.mode=full", "--model.dtype=float32")
    weights = found.weights
    loading = found.loading
    assert weights.pinned == rounded > 1.1 * weights.total and loading is not None
    copies = (
        weights.trained_pinned
        / weights.trained
        * checkpoint_bytes(found.config, weights)
    )
    assert weights.trained_pinned > 1.05 * weights.trained
    assert loading["weights that stay"] == pytest.approx(copies)


TOY_RUN = """
import json, sys
from pathlib import Path
from sage_fast.planning.estimate import resident_bytes
runtime = resident_bytes()
from sage_fast.config.load import load_config
from sage_fast.run.run import Run
words = [f"--output_dir={sys.argv[1]}", "--training.num_updates=1", "--evaluation.noises=1", *sys.argv[2:]]
Run(load_config("configs/toy_cpu.yaml", words)).train()
# Not `ru_maxrss`, which starts with what the parent process held when it forked.
status = Path("/proc/self/status").read_text()
peak = 1024 * int(status.split("VmHWM:")[1].split()[0])
print(json.dumps({"runtime": runtime, "peak": peak}))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_peak_of_the_toy_run_is_the_measured_one(tmp_path: Path) -> None:
    """Resident memory of a whole `train` of one update with its evaluations, libraries
    included.
    """
    words = ["--rollout.num_steps=3"]  # memory is that of a step
    command = [sys.executable, "-c", TOY_RUN, str(tmp_path / "run"), *words]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    found = json.loads(result.stdout.splitlines()[-1])
    config = load_config("configs/toy_cpu.yaml", words)
    predicted = make_plan(
        config, measure_cpu(1.0), runtime=found["runtime"]
    ).memory.peak
    assert predicted == pytest.approx(found["peak"], rel=0.15)
    # The libraries are the larger part, so what comes on top of them has its own bound.
    assert predicted - found["runtime"] == pytest.approx(
        found["peak"] - found["runtime"], rel=0.35
    )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU of 80 GB")
def test_the_peak_of_a_gradient_at_480p_is_the_measured_one() -> None:
    """LoRA at 480x832x81, selective checkpointing, split guidance: weights, adapters,
    gradients and activations.
    """
    before = torch.cuda.memory_allocated()
    lora = load_config(B).lora
    torch.cuda.reset_peak_memory_stats()
    transformer = meta_transformer(HUNYUAN_VIDEO_15, torch.bfloat16).to_empty(
        device="cuda"
    )
    with torch.no_grad():
        for parameter in transformer.parameters():
            parameter.normal_(0, 0.02)
    add_lora(
        transformer,
        rank=lora.rank,
        alpha=None,
        target_modules=lora.target_modules,
        seed=0,
    )
    accelerate(transformer, checkpointing="selective")
    text = torch.randn(250, 3584, dtype=torch.bfloat16, device="cuda")
    prompt = PromptEmbeds(text=text, glyph=torch.zeros(0, 1472, device="cuda"))
    policy = guidance.GuidedPolicy(transformer, prompt, 6.0)
    x = torch.randn(1, 32, 21, 30, 52, device="cuda")
    for _ in range(2):
        policy.velocity_and_gradient(
            x, torch.tensor([0.64]), [prompt], [torch.randn_like(x)], split=True
        )
    update = plan().memory.phases["update"].parts()
    names = (
        "transformer",
        "adapters",
        "gradients",
        "tables",
        "kept activations",
        "working set",
    )
    assert sum(update[name] for name in names) == pytest.approx(
        torch.cuda.max_memory_allocated() - before, rel=0.1
    )


# --------------------------------------------------------------------------------------
# what makes it fit


def test_guidance_of_the_sampler_costs_the_rollout_alone() -> None:
    plain, guided = (
        small_plan(*FORWARD, *more)
        for more in ([], ["--forward_process.sampling_guidance=5"])
    )
    (first, *rest) = plain.phases
    (guided_first, *guided_rest) = guided.phases
    assert flops(guided_first.cost) == 2 * flops(first.cost) > 0 and guided_rest == rest


def test_an_evaluation_scores_its_videos(monkeypatch: pytest.MonkeyPatch) -> None:
    free = small_plan()
    costs = {"videoalign": RewardCosts(seconds=2.0)}
    monkeypatch.setattr(
        "sage_fast.planning.estimate.reward_costs", lambda *arguments: costs
    )
    paid = small_plan("--seed=9")
    prompts = len(load_eval_prompts(free.config))
    assert (
        free.seconds_per_evaluation is not None
        and paid.seconds_per_evaluation is not None
    )
    # the reward's own figure is in the first plan
    scoring = 2.0 - free.phases[2].predicted
    assert paid.seconds_per_evaluation - free.seconds_per_evaluation == pytest.approx(
        prompts * scoring
    )


OFFLOAD = ("distributed.cpu_offload", True)


def test_nothing_is_offered_that_a_run_would_refuse() -> None:
    """Of weights that must stay gathered, and of a single pass whose ranks differ in
    their steps.
    """
    full = small_plan(
        "--training.mode=full",
        "--distributed.keep_gathered=rollout",
        "--model.dtype=float32",
        gpus=2,
    )
    (offloaded,) = [
        option for option in find_options(full) if OFFLOAD in option.changes
    ]
    assert offloaded.changes == (OFFLOAD, ("distributed.keep_gathered", "auto"))
    words = (
        "--training.update=single_pass",
        "--objective.kl_position_fraction=0.05",
        "--distributed.dp_shard=2",
    )
    single = small_plan(*words, "--distributed.keep_gathered=rollout", gpus=2)
    assert "distributed" not in str([option.changes for option in find_options(single)])
    with pytest.raises(ConfigError, match="cpu_offload keeps weights off the GPU"):
        small_plan(
            "--distributed.dp_shard=2",
            "--distributed.keep_gathered=always",
            "--distributed.cpu_offload=true",
            gpus=2,
        )
    with pytest.raises(
        ConfigError, match="single_pass takes gradients at different steps"
    ):
        small_plan(*words, "--distributed.keep_gathered=never", gpus=2)


def test_a_limit_of_memory_is_that_of_the_card() -> None:
    """Frozen weights stay whole where they take less than a third of it."""
    large, size = (
        small_plan("--distributed.dp_shard=2", gpus=2, memory_gb=limit)
        for limit in (None, 0.02)
    )
    assert large.gathered.keep == "always" and size.gathered.keep == "rollout"


def test_weights_behind_a_table_stay_whole_on_every_rank() -> None:
    words = ("--distributed.dp_shard=2", "--distributed.keep_gathered=never")
    plans = {
        adaln: small_plan(*words, f"--model.adaln={adaln}", gpus=2)
        for adaln in ("weights", "table", "auto")
    }
    held = {adaln: found.memory.phases["rollout"] for adaln, found in plans.items()}
    adaln_bytes = 2 * plans["table"].weights.adaln
    assert held["table"].transformer - held["weights"].transformer == adaln_bytes / 2
    assert (
        held["auto"].transformer == held["weights"].transformer
        and held["auto"].tables == held["weights"].tables
    )


def test_an_evaluation_by_unipc_has_noise_levels_of_its_own() -> None:
    word = "--rollout.num_steps=10"
    euler, unipc, more = (
        small_plan(
            word, f"--evaluation.num_steps={steps}", f"--evaluation.solver={name}"
        )
        .memory.phases["rollout"]
        .tables
        for steps, name in ((10, "euler"), (10, "unipc"), (20, "euler"))
    )
    assert (unipc - euler) * 2 == pytest.approx(more - euler)
    assert unipc > euler


def test_a_single_pass_may_become_two_phases() -> None:
    found = small_plan()
    change = ("training.update", "two_phase")
    asked = replace(
        found.asked, training=replace(found.asked.training, update="single_pass")
    )
    assert change in possible_changes(
        replace(found, asked=asked)
    ) and change not in possible_changes(found)


@pytest.mark.slow
def test_what_does_not_fit_comes_with_the_smallest_changes() -> None:
    words = ["--training.guidance=paired", "--model.checkpointing=none"]
    whole = small_plan(*words)
    assert whole.fits and whole.memory.peak_phase == "update"
    one_is_not_enough = 0.99 * min(
        option.plan.memory.peak for option in find_options(whole)
    )
    tight = small_plan(*words, memory_gb=one_is_not_enough / 1e9)
    assert not tight.fits
    found = find_options(tight)
    (first,) = found
    assert first.plan.fits and len(first.changes) == 2
    again = small_plan(
        *words, *first.overrides.split(), memory_gb=tight.memory_limit / 1e9
    )
    assert again.memory.peak == first.plan.memory.peak, (
        "the words that are printed do what is said"
    )


@pytest.mark.slow
def test_what_never_fits_says_what_needs_least() -> None:
    hopeless = small_plan(memory_gb=1e-3)
    (least,) = find_options(hopeless)
    assert not least.plan.fits and least.plan.memory.peak < hopeless.memory.peak
    text = to_text(hopeless, [least])
    assert "no change that keeps the result makes it fit" in text and text.endswith(
        "of the memory."
    )


# --------------------------------------------------------------------------------------
# the command


def test_a_preset_of_a_small_card_is_planned_for_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["plan", "wan_quick_lora_24gb", "--json"]
    assert main(words) == 0
    assert json.loads(capsys.readouterr().out)["device"]["name"] == "RTX 4090"
    main([*words, "--device", "h100"])
    assert "H100" in json.loads(capsys.readouterr().out)["device"]["name"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--gpus", "2"], "2 processes and a CPU"),
        (
            ["--gpus", "3", "--device", "h100", "--distributed.sp=2"],
            "do not fit 3 process(es)",
        ),
        (
            ["--device", "h100", "--distributed.sp=4"],
            "does not divide the model's 6 attention heads",
        ),
        (["--model.family=json:loads"], "describe(model: ModelConfig)"),
        (["--model.forward=stock"], "give --model.forward=fused"),
        (
            ["--distributed.zero_stage=2", "--optimizer.name=adamw"],
            "--distributed.zero_stage=null",
        ),
    ],
    ids=["cpus", "ranks", "heads", "family", "stock", "deepspeed"],
)
def test_what_cannot_be_planned(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "configs/toy_cpu.yaml", *words]) == 2
    assert message in capsys.readouterr().err


def test_a_local_folder_decides_the_model(tmp_path: Path) -> None:
    (tmp_path / "transformer").mkdir()
    shape = {"_class_name": "HunyuanVideo15Transformer3DModel", "num_layers": 12}
    (tmp_path / "transformer/config.json").write_text(json.dumps(shape))
    description = describe_model(load_config(B, [f"--model.path={tmp_path}"]).model)
    assert description.num_layers == 12 and description.width == 2048


WAN = "Wan-AI/Wan2.1-T2V"
HUNYUAN = "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers"
SIZES = {
    ("wan", f"{WAN}-1.3B-Diffusers"): 1_418_996_800,
    ("wan", f"{WAN}-14B-Diffusers"): 14_288_491_584,
    ("hunyuan15", f"{HUNYUAN}-720p_i2v_distilled"): 8_326_608_160,
}


@pytest.mark.parametrize(("family", "path"), SIZES)
def test_a_published_repository_is_planned_by_its_name(family: Any, path: str) -> None:
    config = load_config(B, [f"--model.family={family}", f"--model.path={path}"])
    assert (
        count_weights(config, describe_model(config.model).transformer).total
        == SIZES[family, path]
    )


@pytest.mark.parametrize(
    "path",
    ["somebody/wan-14b-tuned", "models/wan-14b", f"{WAN}-14B", f"{HUNYUAN}-480p_t2v"],
)
def test_a_model_of_unknown_size_asks_for_its_configuration(
    path: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    (tmp_path / "models").mkdir()
    words = [
        "plan",
        str(ROOT / "configs/wan_480p_lora_1gpu.yaml"),
        f"--model.path={path}",
    ]
    assert main(words) == 2
    command = capsys.readouterr().err.partition("Get it (2 KB) with: ")[2].strip()
    check_command(command)
    repository = f"{WAN}-14B-Diffusers" if path.startswith("models/") else path
    assert command.startswith(
        f"hf download {repository} --include transformer/config.json"
    )
    assert command.endswith(" --local-dir models/wan-14b") == path.startswith("models/")
    folder = tmp_path / path
    if not path.startswith("models/"):
        entry = tmp_path / f"hub/models--{path.replace('/', '--')}"
        (entry / "refs").mkdir(parents=True)
        (entry / "refs/main").write_text("0" * 40)
        folder = entry / "snapshots" / ("0" * 40)
    # What that command leaves.
    (folder / "transformer").mkdir(parents=True)
    (folder / "transformer/config.json").write_text(
        json.dumps({"num_layers": 40, "num_attention_heads": 7})
    )
    described = describe_model(load_config(words[1], words[2:]).model)
    assert (described.num_layers, described.width) == (40, 7 * 128)


@pytest.mark.slow
def test_the_page_shows_what_the_command_prints() -> None:
    """Without weights on this machine, whose sizes would replace the published ones.
    The page leaves out time and assumptions, whose lines are too long for it.
    """
    page = (ROOT / "docs/planning.md").read_text(encoding="utf-8")
    example = page.split("```text\n")[1].split("\n```")[0]
    found = plan("--training.guidance=paired", memory_gb=48)
    parts = to_text(found, find_options(found)).split("\n\n")
    assert example.split("\n\n") == [*parts[:2], parts[3], parts[5]]


@pytest.mark.parametrize(
    ("reported", "name", "expected"),
    [
        (85.0e9, "NVIDIA H100 80GB HBM3", 80),
        (42.4e9, "NVIDIA H100 80GB HBM3", 42.4),
        (25.4e9, "NVIDIA GeForce RTX 4090", 25.4),
        (48e9, "NVIDIA GeForce RTX 4090", DEVICES["rtx4090"].memory_gb),
        (47.7e9, "NVIDIA L40S", 47.7),
    ],
)
def test_plan_and_run_count_the_same_memory(
    reported: float, name: str, expected: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An H100 reports more bytes than the 80e9 of its name; a smaller one of a kind has
    what it reports.
    """
    properties: Any = SimpleNamespace(total_memory=reported, name=name)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    assert gpu_memory_gb("cuda") == expected


def test_the_command_knows_every_device() -> None:
    assert {*plan_command.DEVICES} == {*DEVICES, "cpu"}


def test_a_limit_that_changes_nothing_is_said() -> None:
    """HunyuanVideo-1.5 has no tiles, and the toy's codec has none."""
    words = "model.decode_memory_gib changes nothing"
    for name in ("hv15_quick_lora_24gb", "toy_cpu"):
        found, given = (
            make_plan(load_config(name, more), DEVICES["h100"], sizes={})
            for more in ([], ["--model.decode_memory_gib=1"])
        )
        assert words not in to_text(found, []) and words in to_text(given, [])
        assert found.memory == given.memory and not given.decoding.tiled
        assert not any(
            key == "model.decode_memory_gib"
            for key, _ in estimate.possible_changes(found)
        )
    wan = load_config("wan_quick_lora_24gb")
    found = make_plan(wan, DEVICES["rtx4090"], sizes={})
    assert found.decoding.tiled and words not in to_text(found, [])


@pytest.mark.slow
def test_a_run_decodes_as_its_gpu_has_room(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config(
        ROOT / "configs/wan_480p_lora_1gpu.yaml",
        [
            "--model.device=cpu",
            "--video.height=1088",
            "--video.width=1920",
            "--training.guidance=split",
            "--rollout.guidance_scale=5",
            "--rollout.num_steps=20",
            "--rollout.batch_size=8",
            "--rollout.sde_window.size=null",
            "--rollout.sde_window.within=1.0",
            "--rollout.sde_window.stride=1",
            "--objective.kl_mode=dual",
            "--lora={rank: 32, target_modules: null}",
        ],
    )
    assert settle_memory(config) is config
    monkeypatch.setattr(estimate, "rank_device", lambda name: torch.device("cuda"))
    properties: Any = SimpleNamespace(total_memory=80e9, name="a GPU")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    assert settle_memory(config).model.decode_memory_gib == 41
    filled = settle_memory(
        replace(config, model=replace(config.model, checkpointing="auto"))
    ).model
    assert filled.decode_memory_gib == 41 and filled.checkpointing == "full"
    properties.total_memory = 24e9
    assert settle_memory(config).model.decode_memory_gib == "auto", (
        "in tiles where a whole video does not fit"
    )
    given = replace(config, model=replace(config.model, decode_memory_gib=8.0))
    assert settle_memory(given) is given
    properties.total_memory = 80e9
    frames = load_config(
        "hv15_352x624_lora_1gpu", ["--model.device=cpu", "--model.checkpointing=auto"]
    )
    filled = settle_memory(frames).model
    assert filled.decode_memory_gib == "auto", "it has no tiles"
    assert filled.checkpointing == "selective"


@pytest.mark.slow
def test_the_other_update_of_the_same_gradient_is_what_makes_it_fit() -> None:
    config = load_config("hv15_quick_lora_1gpu")
    found = make_plan(config, DEVICES["h100"], memory_gb=40, sizes={})
    assert not found.fits and found.memory.peak > 47e9
    (only,) = find_options(found)
    assert (
        only.overrides == "--training.update=two_phase"
        and only.plan.memory.peak == pytest.approx(32.2e9, abs=5e7)
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "memory", "expected"),
    [
        ((), None, 4),  # the whole group: its calls are short
        ((), 0.013, 1),
        (("--rollout.num_generations=2",), None, 2),
        (("--training.update=single_pass",), None, 4),
    ],
)
def test_micro_batch_size_auto_is_what_fills_and_fits_the_gpu(
    words: tuple[str, ...], memory: float | None, expected: int
) -> None:
    auto = (
        "--rollout.micro_batch_size=auto",
        "--rollout.num_generations=4",
        "--rollout.batch_size=8",
    )
    found = small_plan(*auto, *words, memory_gb=memory)
    assert (
        found.config.rollout.micro_batch_size == expected
        and found.asked.rollout.micro_batch_size == "auto"
    )
    assert f"rollout.micro_batch_size auto: {expected}" in to_text(found, [])


@pytest.mark.slow
def test_micro_batch_size_auto_stops_at_a_full_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    words = (
        "--rollout.micro_batch_size=auto",
        "--rollout.num_generations=4",
        "--rollout.batch_size=4",
    )
    tokens = small_plan().video_tokens
    monkeypatch.setattr(estimate, "FULL_CALL", 1.5 * tokens)
    assert small_plan.__wrapped__(*words).config.rollout.micro_batch_size == 2
