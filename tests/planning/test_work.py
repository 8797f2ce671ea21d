"""Work in the plan: counts against closed forms and torch, and forwards of the trainer."""

import math
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKLHunyuanVideo15, AutoencoderKLWan
from torch.utils.flop_counter import FlopCounterMode
from transformers import Qwen2_5_VLTextConfig, Qwen2_5_VLTextModel

from sage_fast.config.load import load_config
from sage_fast.config.schema import RunConfig
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
from sage_fast.planning.devices import DEVICES
from sage_fast.planning.estimate import plan_encoding
from sage_fast.planning.trace import Call, Cost, trace
from sage_fast.planning.work import anchor_share, count_weights, velocity_call, visits
from sage_fast.policy import guidance
from sage_fast.run.run import build_trainer
from sage_kernels.tracer import count
from tests.planning.small import FORWARD, SMALL, B, small_plan
from tests.tiny.checkpoints import VAE

MakeRun = Callable[..., RunConfig]
pytestmark = pytest.mark.usefixtures("in_the_repository")


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
def test_six_blocks_follow_from_two_and_three() -> None:
    """Tracing all blocks gives the same work to the last operation, and the same
    memory.
    """
    from sage_fast.planning import trace as module

    call = small_call(6)
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


ONE_OF_FOUR = (
    "--rollout.micro_batch_size=1 --rollout.num_generations=4 "
    "--training.best_and_worst=1"
)


SHARED_START = "--rollout.initial_noise=shared --rollout.sde_window.size=2"


DRAWN_KL = "--rollout.micro_batch_size=1 --objective.kl_position_fraction=0.25"


@pytest.mark.parametrize(
    "words",
    [
        f"{ONE_OF_FOUR} --rollout.sde_window.size=2",
        f"{DRAWN_KL} --training.update=single_pass --training.guidance=split",
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
        "best-and-worst",
        "single-pass-split",
        "shared-one",
        "forward-process",
        "path",
    ],
)
def test_forwards_of_the_trainer_are_those_of_the_plan(
    words: str, tiny_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A whole training of a tiny model calls the transformer as often as `visits` says."""
    # Windows of two steps take turns, and steps before them may be shared.
    updates = 4 if SHARED_START in words else 2
    config = tiny_run(
        "--training.anchor_interval=2",
        f"--training.num_updates={updates}",
        *words.split(),
    )
    calls = []
    velocity = guidance.model_velocity

    def counted(*arguments: Any) -> Any:
        calls.append(len(arguments[1]))
        return velocity(*arguments)

    monkeypatch.setattr(guidance, "model_velocity", counted)
    trainer = build_trainer(config)
    for _ in range(updates):
        trainer.iterate()
    found = visits(config)
    branches = 1 if config.rollout.guidance_scale == 1 else 2
    sampled = 1 if config.sampling_guidance == 1 else 2
    made = sampled * found.rollout + branches * (
        found.pass_steps + found.anchor + found.update
    )
    made += found.repeated
    assert sum(calls) == updates * config.rollout.batch_size * made


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


def test_guidance_of_the_sampler_costs_the_rollout_alone() -> None:
    plain, guided = (
        small_plan(*FORWARD, *more)
        for more in ([], ["--forward_process.sampling_guidance=5"])
    )
    (first, *rest) = plain.phases
    (guided_first, *guided_rest) = guided.phases
    assert flops(guided_first.cost) == 2 * flops(first.cost) > 0 and guided_rest == rest
