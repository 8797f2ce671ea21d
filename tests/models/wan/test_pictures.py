"""Wan 2.2 5B, and pictures: kept as first frames by the 5B model, read as channels and
tokens by Wan 2.1's image-to-video. Against the stock pipelines and class, and by all
that a run does.
"""

import copy
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import (
    FlowMatchEulerDiscreteScheduler,
    WanImageToVideoPipeline,
    WanPipeline,
)
from diffusers.utils import load_image
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from sage_fast import Prompt, accelerate
from sage_fast.commands.cli import main
from sage_fast.config.load import load_config
from sage_fast.config.sections import ModelConfig
from sage_fast.models.family import (
    Components,
    describe_model,
    family_of,
    load_components,
    model_family,
)
from sage_fast.models.wan.components import WanDecoder
from sage_fast.models.wan.fused import IMAGE_TOKENS, WanTransformer
from sage_fast.models.wan.wan import PUBLISHED, VAE_22
from sage_fast.planning.trace import Tracer, meta_transformer
from sage_fast.policy.guidance import GuidedPolicy
from sage_fast.records import Pictured, PromptEmbeds, Sample
from sage_fast.rollout import noise_keys, policy_velocity, sample_trajectory
from sage_fast.run.run import Run, build_trainer
from sage_fast.sde import transition_table
from sage_fast.sharding.ulysses import shard_sequence
from sage_fast.tools.api import generate
from tests.distributed.ranks import assert_same_updates, run_ranks, train
from tests.distributed.test_ulysses import thread_collectives, thread_group
from tests.models.runs import assert_resumes_to_the_bit, run_file
from tests.models.wan.test_fused import (
    CHECKPOINTING,
    Result,
    check,
    fuse,
    prompt,
    transformer,
)
from tests.models.wan.test_training import FORWARD_PROCESS
from tests.tiny.wan import IMAGE_WIDTH, READS_PICTURES, save_wan

pytestmark = pytest.mark.usefixtures("nothing_drawn")

TEXT = "a red fox in the snow"
FRAMES = 9
HEIGHT = 64
WIDTH = 96


@dataclass(frozen=True)
class World:
    """A model, its prompt file, and the picture of one of its prompts."""

    folder: Path
    kind: str
    shift: float
    picture: Path
    prompts: Path


def made(folder: Path, kind: str) -> World:
    save_wan(folder / "model", kind)
    random = np.random.default_rng(0)
    for name in ("fox.png", "sign.png"):
        pixels = random.integers(0, 255, (HEIGHT, WIDTH, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / name)
    rows = [(TEXT, "fox.png"), ("a blue square", "sign.png")]
    prompts = folder / "p.jsonl"
    prompts.write_text(
        "\n".join(json.dumps({"prompt": text, "image": file}) for text, file in rows)
    )
    shift = 5.0 if kind == "5B" else 3.0
    return World(folder, kind, shift, folder / "fox.png", prompts)


@pytest.fixture(scope="module", params=["5B", "i2v"])
def world(request: pytest.FixtureRequest, tmp_path_factory: Any) -> World:
    return made(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def second(tmp_path_factory: pytest.TempPathFactory) -> World:
    return made(tmp_path_factory.mktemp("second"), "5B")


def load(world: World) -> Components:
    return load_components(section(world.folder / "model"))


def section(path: Path | str, **options: Any) -> ModelConfig:
    return ModelConfig(family="wan", path=str(path), device="cpu", **options)


def pictured(world: World) -> Pictured:
    return Pictured(TEXT, str(world.picture), HEIGHT, WIDTH, FRAMES)


# --------------------------------------------------------------------------------------
# the stock pipelines


def compare(world: World, ours: Components, stock: Any, embeds: PromptEmbeds) -> None:
    """Latents and frames of both forwards, guided, with the pipeline's."""
    stock.set_progress_bar_config(disable=True)
    stock.scheduler = FlowMatchEulerDiscreteScheduler(shift=world.shift)
    shape = ours.video_decoder.latent_shape(FRAMES, HEIGHT, WIDTH)
    start = torch.randn(1, *shape, generator=torch.Generator().manual_seed(4))
    options = {
        "prompt": TEXT,
        "negative_prompt": "",
        "num_frames": FRAMES,
        "height": HEIGHT,
        "width": WIDTH,
        "num_inference_steps": 4,
        "guidance_scale": 5.0,
    }
    if isinstance(stock, WanImageToVideoPipeline):
        options["image"] = load_image(str(world.picture))
    latents, frames = (
        stock(latents=start.clone(), output_type=kind, **options).frames
        for kind in ("latent", "pt")
    )
    table = transition_table("ode", stock.scheduler.sigmas.double(), 0.0)
    (empty,) = ours.prompt_encoder.encode([""])
    samples = [Sample(prompt=Prompt(text=TEXT, index=0), embeds=embeds, member=0)]
    policy = GuidedPolicy(ours.transformer, empty, 5.0)
    found = []
    for forward in ("stock", "fused"):
        handle = WanTransformer.choose_forward(
            ours.transformer, section("", forward=forward)
        )
        final = sample_trajectory(
            policy_velocity(policy, samples),
            samples,
            noise_keys(samples, 0, 0),
            table,
            start,
        ).final
        assert (final - latents).norm() <= 1e-6 * latents.norm(), forward
        found.append(final)
    assert handle is not None
    handle.undo()
    with accelerate(stock):
        again = stock(latents=start.clone(), output_type="latent", **options).frames
    assert (again - latents).norm() <= 1e-6 * latents.norm(), "accelerated pipeline"
    assert not torch.equal(*found) and (latents - start).norm() > 0.1 * start.norm()
    if embeds.kept is not None:
        assert all(torch.equal(x[:, :, :1], latents[:, :, :1]) for x in found)
        assert torch.equal(found[0][0, :, :1], embeds.kept), "to the bit"
    expected = (frames * 255).round().to(torch.uint8)
    assert expected.float().std() > 5
    assert torch.equal(ours.video_decoder.decode(latents), expected)


def test_the_second_model_draws_from_text_as_the_stock_pipeline(second: World) -> None:
    ours = load(second)
    (embeds,) = ours.prompt_encoder.encode([TEXT])
    assert embeds.kept is None
    compare(second, ours, WanPipeline.from_pretrained(second.folder / "model"), embeds)


def test_pictures_are_animated_as_by_the_stock_pipeline(world: World) -> None:
    ours = load(world)
    lengths = ours.prompt_encoder.prepare([pictured(world)])
    (embeds,) = ours.prompt_encoder.encode([pictured(world)])
    assert lengths == [(len(embeds.text),)]
    # Of Wan 2.1: 4 x 4 patches and a class token.
    assert embeds.lengths[2] == (17 if world.kind == "i2v" else 0)
    stock = WanImageToVideoPipeline.from_pretrained(world.folder / "model")
    compare(world, ours, stock, embeds)


def test_a_picture_is_known_by_what_is_made_of_it(world: World) -> None:
    """Wan 2.1 reads one beside as many grey frames as the video has."""
    encoder: Any = load(world).prompt_encoder
    asked = pictured(world)
    others = [asked._replace(num_frames=5), asked._replace(height=32), TEXT]
    keys = {encoder.path_of(one) for one in (asked, *others)}
    assert len(keys) == (4 if world.kind == "i2v" else 3)
    empty = encoder.encode([""])[0].beside(encoder.encode([asked])[0])
    assert (empty.kept is None) == (empty.image is not None) == (world.kind == "i2v")


# --------------------------------------------------------------------------------------
# the fused forward


def with_pictures(kind: str, size: tuple[int, ...]) -> list[PromptEmbeds]:
    """Two prompts; of `mixed` one has no picture."""
    generator = torch.Generator().manual_seed(2)
    first, *_ = pictures = [
        torch.randn(4, 1, *size[1:], generator=generator).double() for _ in range(2)
    ]
    prompts = [prompt(7), prompt(3)]
    if kind == "mixed":
        return [replace(prompts[0], kept=first), prompts[1]]
    if kind == "kept":
        return [replace(p, kept=x) for p, x in zip(prompts, pictures, strict=True)]
    return [
        replace(
            one,
            image=torch.randn(5, IMAGE_WIDTH, generator=generator).double(),
            frame=torch.randn(8, *size, generator=generator).double(),
        )
        for one in prompts
    ]


def compute(model: Any, size: tuple[int, ...], split: bool | None, kind: str) -> Result:
    """As in test_fused.py."""
    generator = torch.Generator().manual_seed(1)
    latents, cotangent = (
        torch.randn(2, 4, *size, generator=generator).double() for _ in range(2)
    )
    policy = GuidedPolicy(model, prompt(1), 1.0 if split is None else 5.0)
    velocity = policy.velocity_and_gradient(
        latents,
        torch.tensor([0.75, 0.25]),
        with_pictures(kind, size),
        [cotangent],
        split=bool(split),
    )
    return velocity, {
        name: p.grad for name, p in model.named_parameters() if p.grad is not None
    }


def sizes_of(kind: str) -> dict[str, Any]:
    return READS_PICTURES if kind == "read" else {}


@pytest.fixture
def in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """Diffusers' class takes its norms in float32, whatever its weights are."""
    monkeypatch.setattr(Tensor, "float", Tensor.double)


@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize("kind", ["kept", "mixed", "read"])
@pytest.mark.parametrize("trained", ["full", "lora"])
def test_velocity_and_every_gradient_are_those_of_the_stock_class(
    trained: str, kind: str
) -> None:
    # With 64 tokens of width 24 the adapters' products are widened.
    size = (4, 8, 8) if trained == "lora" else (2, 4, 6)
    split = trained == "lora"
    expected = compute(transformer(trained, **sizes_of(kind)), size, split, kind)
    for checkpointing in CHECKPOINTING:
        model = transformer(trained, **sizes_of(kind))
        fuse(model, checkpointing=checkpointing)
        given = compute(model, size, split, kind)
        assert all(gradient.any() for gradient in given[1].values())
        check(given, expected, 1e-10)


@pytest.mark.usefixtures("in_float64")
def test_many_tokens_of_one_sample_have_two_gates(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """From so many tokens on a gate's gradient comes from the weights', where there is
    one gate.
    """
    monkeypatch.setattr("sage_fast.models.block._FEW_TOKENS", 8)
    results = []
    for fused in (False, True):
        model = transformer()
        if fused:
            fuse(model)
        x, g = (
            torch.randn(
                1, 4, 3, 4, 6, generator=torch.Generator().manual_seed(i)
            ).double()
            for i in (1, 2)
        )
        policy = GuidedPolicy(model, prompt(1), 1.0)
        prompts = with_pictures("mixed", (3, 4, 6))[:1]
        velocity = policy.velocity_and_gradient(x, torch.tensor([0.5]), prompts, [g])
        results.append(
            (
                velocity,
                {n: p.grad for n, p in model.named_parameters() if p.grad is not None},
            )
        )
    check(results[1], results[0], 1e-10)


@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize("kind", ["mixed", "read"])
def test_shares_of_the_tokens_compute_what_one_process_computes(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 30 tokens in four shares the first frame's 15 are one share and most of
    another's.
    """
    size = (2, 6, 10)
    whole = transformer(
        num_attention_heads=4,
        num_layers=1,
        **sizes_of(kind) | ({"added_kv_proj_dim": 48} if kind == "read" else {}),
    )
    models = [copy.deepcopy(whole) for _ in range(4)]
    fuse(whole)
    expected = compute(whole, size, None, kind)
    thread_collectives(monkeypatch)

    def of_rank(model: Any, member: Any) -> Result:
        shard_sequence(fuse(model, checkpointing="selective"), member)
        return compute(model, size, None, kind)

    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(of_rank, models, thread_group(4)))
    total = {name: sum(own[name] for _, own in results) for name in expected[1]}
    check((results[0][0], total), expected, 1e-10)  # type: ignore[arg-type]


def test_a_kept_frame_has_the_velocity_that_leads_to_it() -> None:
    """Whatever the noise is, so it adds nothing to a loss of the forward process."""
    kept, z = torch.randn(2, 4, 1, 4, 4).unbind()
    model = transformer(dtype=torch.float32)
    prompts = [replace(prompt(3, torch.float32), kept=kept)]
    clean = torch.cat([kept, torch.randn(4, 2, 4, 4)], 1)
    noise = torch.cat([z, torch.randn(4, 2, 4, 4)], 1)
    x = (0.6 * clean + 0.4 * noise)[None]
    velocity = WanTransformer.velocity(model, x, torch.tensor([0.4]), prompts)
    torch.testing.assert_close(velocity[0, :, :1], z - kept, rtol=1e-5, atol=1e-5)
    other = torch.cat([torch.randn(1, 4, 1, 4, 4), x[:, :, 1:]], 2)
    again = WanTransformer.velocity(model, other, torch.tensor([0.4]), prompts)
    assert torch.equal(again[:, :, 1:], velocity[:, :, 1:]), (
        "the model sees the picture"
    )


# --------------------------------------------------------------------------------------
# a run


def write(world: World, folder: Path, **changes: dict[str, Any]) -> str:
    """File of a run of two guided updates, each of two videos of two prompts."""
    rollout = {"num_steps": 2, "micro_batch_size": 2, "guidance_scale": 3.0}
    return run_file(
        folder,
        **{"data": {"prompts": str(world.prompts)}} | changes,
        model={"family": "wan", "path": str(world.folder / "model")},
        video={"num_frames": 5, "height": 32, "width": 64, "fps": 24},
        rollout=rollout | {"shift": world.shift},
        lora={"rank": 2, "alpha": 3},
    )


@pytest.mark.parametrize(
    "words",
    [[], pytest.param(FORWARD_PROCESS, marks=pytest.mark.slow)],
    ids=["grpo", "nft"],
)
def test_a_resumed_run_is_the_whole_one_to_the_bit(
    words: list[str], world: World, tmp_path: Path
) -> None:
    assert_resumes_to_the_bit(partial(write, world), tmp_path, words)


def test_every_video_of_a_rollout_keeps_its_picture(
    second: World, tmp_path: Path
) -> None:
    """With noise in every step, which a step adds to all frames."""
    trainer = build_trainer(load_config(write(second, tmp_path)))
    seen: list[Tensor] = []
    decode = trainer.decoder.decode
    trainer.decoder.decode = lambda latents: seen.append(latents) or decode(latents)  # type: ignore[func-returns-value]
    trainer.iterate()
    kept = [
        trainer.encoder.encode([Pictured(text, str(second.folder / file), 32, 64)])[
            0
        ].kept
        for text, file in ((TEXT, "fox.png"), ("a blue square", "sign.png"))
    ]
    first = [x[:, :1] for x in torch.cat(seen)]
    assert len(first) >= 4
    assert all(any(torch.equal(x, frame) for frame in kept) for x in first)  # type: ignore[arg-type]


@pytest.mark.slow
def test_two_ranks_train_like_one_process(world: World, tmp_path: Path) -> None:
    layout = "--distributed.sp=2" if world.kind == "5B" else "--distributed.dp_shard=2"
    file = write(world, tmp_path)
    ((expected, _, _),) = run_ranks(train, 1, file, [])
    words = [layout]
    if "shard" in layout:
        words += ["--rollout.batch_size=2", "--distributed.keep_gathered=rollout"]
    for records, _, _ in run_ranks(train, 2, file, words):
        assert_same_updates(records, expected, first=1e-5)


@pytest.mark.slow
def test_videos_are_generated_and_exported(world: World, tmp_path: Path) -> None:
    file = write(world, tmp_path, training={"num_updates": 1})
    run = Run(load_config(file))
    run.train()
    fox = Prompt(text=TEXT, image=str(world.picture), index=0)
    assert generate(run.config, [fox], tmp_path / "videos")[0].is_file()
    for layout in ("diffusers", "comfyui"):
        words = ["export", str(tmp_path / "run"), "--layout", layout, "--output_dir"]
        assert main([*words, str(tmp_path / layout)]) == 0
    kind = WanImageToVideoPipeline if world.kind == "i2v" else WanPipeline
    card = (tmp_path / "diffusers/README.md").read_text("utf-8")
    assert f"{kind.__name__}.from_pretrained(" in card
    effects = []
    for layout in ("diffusers", "comfyui"):
        pipeline = kind.from_pretrained(world.folder / "model")
        (weights,) = (tmp_path / layout).glob("*.safetensors")
        pipeline.load_lora_weights(str(tmp_path / layout), weight_name=weights.name)
        loaded = dict(pipeline.transformer.named_parameters())
        # The loader fills up with zeros for a picture's layers.
        effects.append(
            [p for n, p in loaded.items() if "lora_B" in n and "attn2.add_" not in n]
        )
    trained = load_file(
        next((tmp_path / "run/checkpoints").glob("*1/lora/*.safetensors"))
    )
    count = sum("lora_B" in name for name in trained)
    assert len(effects[0]) == len(effects[1]) == count > 0
    assert all(map(torch.equal, *effects)) and any(p.any() for p in effects[0])


def test_prompts_without_a_picture_are_refused_where_one_is_read(
    world: World, tmp_path: Path
) -> None:
    file = write(world, tmp_path, data={"prompts": ["a red fox", "a blue square"]})
    config = load_config(file)
    if world.kind == "5B":
        assert build_trainer(config).iterate()["grad_norm"] > 0
    else:
        with pytest.raises(ValueError, match="have no picture"):
            build_trainer(config)


# --------------------------------------------------------------------------------------
# the plan


def test_a_folder_of_720p_is_not_completed_by_480p(tmp_path: Path) -> None:
    """The transformers have one shape, so nothing would have noticed."""
    name = "Wan2.1-I2V-14B-720P-Diffusers"
    folder = save_wan(tmp_path / name, "i2v")
    next((folder / "transformer").glob("*.safetensors")).unlink()
    (needed,) = model_family("wan").requirements(section(folder))
    assert needed.fetch.startswith(f"hf download Wan-AI/{name} ")
    assert "image_encoder" in needed.fetch
    with pytest.raises(ValueError, match=f"hf download Wan-AI/{name} "):
        load_components(section(folder))


@pytest.mark.parametrize(
    ("path", "parameters", "images", "shape"),
    [
        ("Wan-AI/Wan2.2-TI2V-5B-Diffusers", 4_999_787_712, 0, (48, 31, 44, 80)),
        (
            "Wan-AI/Wan2.1-I2V-14B-480P-Diffusers",
            16_394_878_784,
            257,
            (16, 31, 88, 160),
        ),
    ],
)
def test_the_published_models_are_described(
    path: str, parameters: int, images: int, shape: tuple[int, ...]
) -> None:
    described = describe_model(section(path))
    assert described.latent_shape(121, 704, 1280) == shape
    assert (described.image_tokens, described.text_tokens) == (images, 512 + images)
    with torch.device("meta"):
        whole = model_family("wan").build(PUBLISHED[path])
    assert sum(p.numel() for p in whole.parameters()) == parameters
    (needed,) = model_family("wan").requirements(section(path))
    assert path in needed.fetch and 40 < needed.gigabytes < 95
    assert ("image_encoder" in needed.fetch) == bool(images)
    # Of three blocks, by the closed form.
    config = {**described.transformer, "num_layers": 3}
    small = meta_transformer(config, torch.bfloat16, 3)
    family = family_of(small)
    text = family.empty_prompt(config, described.text_tokens, torch.bfloat16)
    assert text.lengths == (512, 0, IMAGE_TOKENS if images else 0)
    latents = torch.empty(1, *described.latent_shape(17, 352, 640), device="meta")
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        family.velocity(small, latents, torch.tensor([0.5]), [text])
    tokens = described.tokens(tuple(latents.shape[1:]))  # type: ignore[arg-type]
    work = described.forward_work(config, tokens, described.text_tokens)
    assert counter.get_total_flops() == work.total


@pytest.mark.parametrize(
    ("options", "size", "tiled"),
    [
        ({}, (3, 60, 104), False),
        ({}, (3, 36, 40), True),
        (VAE_22, (3, 30, 52), False),
        (VAE_22, (3, 22, 40), True),
    ],
)
def test_memory_bound_of_the_published_autoencoders(
    options: dict[str, Any], size: tuple[int, int, int], tiled: bool
) -> None:
    """The peak of a decode, traced without data, lies just below the bound."""
    decoder = WanDecoder.empty("float32", tuple(options.items()))
    latents = torch.empty(1, decoder.channels, *size, device="meta")
    limit = 1e-9 if tiled else None
    decoder.memory_gib = limit
    with torch.no_grad(), Tracer([latents, *decoder.vae.parameters()]) as tracer:
        for pixels in decoder.parts(latents):
            del pixels
    decoder.memory_gib = None
    shape = decoder.channels, *size
    assert 0.85 < tracer.peak / decoder.decoding(shape, limit).peak_bytes < 1
