"""A family of the user's own, examples/qwen_image.py: what it computes, against
diffusers' `QwenImagePipeline` on the same tiny weights, and every command with it.
"""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, QwenImagePipeline

from examples.qwen_image import Decoder, QwenImage
from sage_fast import train
from sage_fast.commands.cli import main
from sage_fast.config.errors import ConfigError
from sage_fast.config.load import load_config
from sage_fast.config.schema import RunConfig
from sage_fast.config.sections import ModelConfig
from sage_fast.models.family import (
    Components,
    ModelDescription,
    describe_model,
    load_components,
    model_family,
)
from sage_fast.models.hub import hashable
from sage_fast.planning.devices import DEVICES
from sage_fast.planning.estimate import make_plan
from sage_fast.policy.guidance import GuidedPolicy
from sage_fast.records import Prompt, Sample
from sage_fast.rollout import (
    initial_latents,
    noise_keys,
    policy_velocity,
    sample_trajectory,
)
from sage_fast.sde import sigma_schedule, transition_table
from tests.conftest import TINY_RUN
from tests.models.runs import run_file
from tests.tiny.qwen_image import save_qwen_image

FAMILY = "examples.qwen_image:QwenImage"
PROMPTS = ["a red fox in the snow", "blue", ""]
HEIGHT = 32
WIDTH = 48
STEPS = 5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_qwen_image(tmp_path_factory.mktemp("qwen"))


@pytest.fixture(scope="module")
def stock(folder: Path) -> QwenImagePipeline:
    pipeline = QwenImagePipeline.from_pretrained(folder)
    pipeline.set_progress_bar_config(disable=True)
    # The levels that it is given are those that it takes.
    pipeline.scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    return pipeline


def section(folder: Path, **options: Any) -> ModelConfig:
    return ModelConfig(
        **{"family": FAMILY, "path": str(folder), "device": "cpu", "forward": "stock"}
        | options
    )


@pytest.fixture(scope="module")
def ours(folder: Path) -> Components:
    return load_components(section(folder))


@pytest.fixture
def tiny(folder: Path, tmp_path: Path) -> Callable[..., RunConfig]:
    """Run of two updates on pictures of 32 x 32."""
    file = run_file(
        tmp_path,
        model=vars(section(folder)),
        video={"num_frames": 1, "height": 32, "width": 32},
        evaluation=TINY_RUN["evaluation"],
    )
    return lambda *words: load_config(file, words)


@torch.no_grad()
def test_its_tokens_are_the_pipelines(
    ours: Components, stock: QwenImagePipeline
) -> None:
    found = ours.prompt_encoder.encode(PROMPTS)
    for text, embeds in zip(PROMPTS, found, strict=True):
        tokens, _ = stock.encode_prompt(text or " ", max_sequence_length=512)
        torch.testing.assert_close(embeds.text, tokens[0], rtol=1e-6, atol=1e-6)
        assert len(embeds.glyph) == 0
    lengths = ours.prompt_encoder.prepare(PROMPTS)
    assert lengths == [(len(embeds.text),) for embeds in found]


@torch.no_grad()
def test_its_velocity_is_the_transformers_of_each_prompt_alone(
    ours: Components, stock: QwenImagePipeline
) -> None:
    prompts = ours.prompt_encoder.encode(PROMPTS)
    shape = ours.video_decoder.latent_shape(1, HEIGHT, WIDTH)
    latents = torch.randn(3, *shape, generator=torch.Generator().manual_seed(0))
    sigma = torch.tensor([0.9, 0.5, 0.2])
    together = QwenImage.velocity(ours.transformer, latents, sigma, prompts)
    for row, prompt in enumerate(prompts):
        packed = stock._pack_latents(
            latents[row : row + 1, :, 0], 1, shape[0], *shape[2:]
        )
        alone = stock.transformer(
            hidden_states=packed,
            encoder_hidden_states=prompt.text[None],
            timestep=sigma[row : row + 1],
            img_shapes=[[(1, shape[2] // 2, shape[3] // 2)]],
            return_dict=False,
        )[0]
        expected = stock._unpack_latents(alone, HEIGHT, WIDTH, 8)[0]
        assert (together[row] - expected).norm() <= 1e-6 * expected.norm()


@pytest.mark.parametrize("text", PROMPTS[:2])
@torch.no_grad()
def test_latents_and_pixels_are_the_pipelines_at_the_same_levels(
    ours: Components, stock: QwenImagePipeline, text: str
) -> None:
    embeds, empty = ours.prompt_encoder.encode([text, ""])
    samples = [Sample(prompt=Prompt(text=text, index=0), embeds=embeds, member=0)]
    keys = noise_keys(samples, seed=0, update=0)
    shape = ours.video_decoder.latent_shape(1, HEIGHT, WIDTH)
    start = initial_latents(keys, shape)
    options = {
        "height": HEIGHT,
        "width": WIDTH,
        "num_inference_steps": STEPS,
        "true_cfg_scale": 1.0,
        "latents": stock._pack_latents(start[:, :, 0], 1, shape[0], *shape[2:]),
    }
    packed = stock(text, output_type="latent", **options).images
    expected = stock._unpack_latents(packed, HEIGHT, WIDTH, 8)
    picture = stock(text, output_type="pt", **options).images
    table = transition_table("ode", sigma_schedule(STEPS, 3.0), 0.0)
    final = sample_trajectory(
        policy_velocity(GuidedPolicy(ours.transformer, empty, 1.0), samples),
        samples,
        keys,
        table,
        start,
    ).final
    assert (final - expected).norm() <= 1e-6 * expected.norm()
    assert (start - expected).norm() > 0.1 * expected.norm()
    pixels = (picture * 255).round().to(torch.uint8)[:, None]
    assert torch.equal(ours.video_decoder.decode(expected), pixels)
    assert pixels.float().std() > 5


def test_modules_that_it_calls_dead_have_no_gradient_and_the_others_have_one(
    ours: Components,
) -> None:
    transformer = ours.transformer
    prompts = ours.prompt_encoder.encode(PROMPTS[:2])
    latents = torch.randn(2, *ours.video_decoder.latent_shape(1, HEIGHT, WIDTH))
    sigma = torch.tensor([0.9, 0.5])
    QwenImage.velocity(transformer, latents, sigma, prompts).square().sum().backward()
    dead = QwenImage.dead_modules(transformer)
    for name, weight in transformer.named_parameters():
        moved = weight.grad is not None and bool(weight.grad.any())
        assert moved is not name.startswith(dead), name
        weight.grad = None


def test_it_is_planned_from_its_folders_json_alone(
    folder: Path, tiny: Callable[..., RunConfig], tmp_path: Path
) -> None:
    for part in ("transformer", "vae"):
        (tmp_path / part).mkdir()
        config = (folder / part / "config.json").read_text()
        (tmp_path / part / "config.json").write_text(config)
    plan = make_plan(tiny(f"--model.path={tmp_path}"), DEVICES["h100"])
    parameters = load_components(section(folder)).transformer.parameters()
    assert plan.weights.total == sum(p.numel() for p in parameters)
    # Of one picture of 2 x 2 tokens and 250 text tokens, in each of two blocks and two
    # streams four products of width D and a feed-forward of 4 D, and the modulation.
    width = 32
    blocks = 2 * (2 * (4 + 250) * 12 * width**2 + 2 * 2 * 6 * width**2)
    ends = 2 * (4 * 2 * 64 * width + 250 * width**2 + 256 * width + 3 * width**2)
    assert plan.forward.linear == blocks + ends
    assert plan.forward.attention == 2 * 4 * (4 + 250) ** 2 * width
    decode = next(phase for phase in plan.phases if phase.name == "decode")
    decoder = Decoder.empty("float16", hashable(json.loads(config)))
    assert decode.cost.linear == decoder.work((16, 1, 4, 4), tiled=False)[0] > 0
    # The picture and the eight channels of the last layers are alive at once.
    assert plan.decoding.peak_bytes > 2 * 32 * 32 * (3 + 8)


def test_what_is_missing_is_said_with_its_command(
    folder: Path, tiny: Callable[..., RunConfig], tmp_path: Path
) -> None:
    lacking = shutil.copytree(folder / "vae", tmp_path / "half/vae").parent
    command = f"hf download Qwen/Qwen-Image .*--local-dir {lacking}"
    with pytest.raises(ConfigError, match=command):
        describe_model(section(lacking))
    (needed,) = model_family(FAMILY).requirements(section(lacking))
    assert needed.missing[0] == "transformer/config.json"
    assert model_family(FAMILY).requirements(section(folder))[0].missing == []
    with pytest.raises(ConfigError, match="num_frames is 5; a picture has 1"):
        make_plan(tiny("--video.num_frames=5"), DEVICES["h100"])
    with pytest.raises(ConfigError, match="forward is fused, which this family lacks"):
        make_plan(tiny("--model.forward=fused"), DEVICES["h100"])


def test_a_decoder_of_another_class_needs_two_facts_to_be_planned(
    tiny: Callable[..., RunConfig],
) -> None:
    config = tiny()
    whole = describe_model(config.model)
    least = ModelDescription(
        transformer=whole.transformer, latent_shape=whole.latent_shape
    )
    plan, known = (
        make_plan(config, DEVICES["h100"], description=description)
        for description in (least, whole)
    )
    assert plan.forward == known.forward
    assert plan.memory.phases["update"].total < known.memory.phases["update"].total
    assert plan.decoding.peak_bytes == 0


def test_it_trains(tiny: Callable[..., RunConfig]) -> None:
    run = train(tiny("--evaluation.every=0"))
    assert run.finished and run.update == 2


@pytest.mark.slow
def test_every_command_works_with_it(
    tiny: Callable[..., RunConfig],
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    tiny()
    file = str(tmp_path / "run.yaml")
    run = str(tmp_path / "run")
    assert main(["doctor", file]) == 0
    said = capsys.readouterr().out
    assert re.search(r"ok +training +about", said) and f"ok       {folder}" in said
    assert main(["plan", file]) == 0
    assert main(["train", file]) == 0
    trust = ["--trust-config", "--output_dir"]
    assert main(["evaluate", run, *trust, str(tmp_path / "scores")]) == 0
    asked = ["generate", run, "--prompt", "a red fox"]
    assert main([*asked, *trust, str(tmp_path / "pictures")]) == 0
    assert main(["profile", file, "--output_dir", str(tmp_path / "profile")]) == 0
    exported = tmp_path / "exported"
    assert main(["export", run, *trust, str(exported)]) == 0
    card = (exported / "README.md").read_text()
    assert "pipeline_tag: text-to-image" in card
    match = re.search(r"```python\n(.*?)```", card, re.DOTALL)
    assert match
    names: dict[str, Any] = {}
    exec(match[1], names)
    assert type(names["pipeline"]) is QwenImagePipeline
    assert not names["pipeline"].scheduler.config["use_dynamic_shifting"]
    assert names["pipeline"].scheduler.shift == 3.0
    loaded = QwenImagePipeline.from_pretrained(folder)
    loaded.load_lora_weights(exported)
    products = {
        name: weight
        for name, weight in loaded.transformer.named_parameters()
        if "lora_B" in name
    }
    # All layers but the two dead ones.
    assert len(products) == 2 * 8 - 2 and all(w.any() for w in products.values())
