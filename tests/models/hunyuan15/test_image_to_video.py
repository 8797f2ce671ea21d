"""HunyuanVideo-1.5 from pictures: against the stock pipeline, and by all that a run
does.

The fused forward with pictures is held against diffusers in float64 in test_fused.py.
"""

import json
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import HunyuanVideo15ImageToVideoPipeline
from diffusers.utils import load_image
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.counts.traced import unused_work
from sage_fast import Prompt, accelerate
from sage_fast.commands.cli import main
from sage_fast.config.errors import ConfigError
from sage_fast.config.load import load_config
from sage_fast.config.schema import RunConfig
from sage_fast.config.sections import ModelConfig
from sage_fast.models.family import (
    Components,
    describe_model,
    family_of,
    load_components,
)
from sage_fast.models.hunyuan15.backbone import dead_modules
from sage_fast.planning.trace import meta_transformer
from sage_fast.policy.guidance import GuidedPolicy
from sage_fast.records import Pictured, PromptEmbeds
from sage_fast.run.run import Run, build_trainer
from sage_fast.tools.api import evaluate, generate
from sage_fast.tools.diagnosis import Check, files
from tests.distributed.ranks import assert_same_updates, run_ranks, train
from tests.models.runs import assert_resumes_to_the_bit, run_file
from tests.run.test_media import damaged
from tests.tiny.checkpoints import (
    IMAGE_TOKENS,
    LATENT_CHANNELS,
    build_image_to_video,
    picture,
)

pytestmark = pytest.mark.usefixtures("nothing_drawn")

HEIGHT = 48
WIDTH = 64
SIGN = 'a sign that says "open"'


@pytest.fixture(scope="module")
def animator() -> HunyuanVideo15ImageToVideoPipeline:
    return build_image_to_video()


@pytest.fixture(scope="module")
def world(
    animator: HunyuanVideo15ImageToVideoPipeline,
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """A model, and a prompt file with two pictures."""
    folder = tmp_path_factory.mktemp("i2v")
    animator.save_pretrained(folder / "model")
    (folder / "pictures").mkdir()
    picture(folder / "pictures/fox.png", seed=1)
    picture(folder / "sign.png", seed=2, size=(80, 90))
    rows = [("a red fox", "pictures/fox.png"), (SIGN, "sign.png")]
    (folder / "p.jsonl").write_text(
        "\n".join(json.dumps({"prompt": text, "image": file}) for text, file in rows)
    )
    return folder


def write(world: Path, folder: Path, **changes: dict[str, Any]) -> str:
    """File of a run of two guided updates, each of two videos of two prompts."""
    model = {"family": "hunyuan15", "path": str(world / "model"), "adaln": "weights"}
    changes["model"] = model | changes.get("model", {})
    return run_file(
        folder,
        **{"data": {"prompts": str(world / "p.jsonl")}} | changes,
        video={"num_frames": 5, "height": HEIGHT, "width": WIDTH, "fps": 24},
        rollout={"num_steps": 2, "micro_batch_size": 2},
    )


def load(world: Path, cache: Path) -> Components:
    path = str(world / "model")
    return load_components(
        ModelConfig(family="hunyuan15", path=path, device="cpu", cache_dir=str(cache))
    )


def pair(components: Components, world: Path) -> list[PromptEmbeds]:
    """Conditioning of the empty prompt, and of the sign with the picture of the fox."""
    return components.prompt_encoder.encode(
        ["", Pictured(SIGN, str(world / "pictures/fox.png"), HEIGHT, WIDTH)]
    )


# --------------------------------------------------------------------------------------
# the stock pipeline


def test_the_whole_pipeline_is_the_stock_one(
    animator: HunyuanVideo15ImageToVideoPipeline, world: Path
) -> None:
    size = HEIGHT // 16, WIDTH // 16
    noise = torch.randn(
        1, LATENT_CHANNELS, 2, *size, generator=torch.Generator().manual_seed(4)
    )
    options = {
        "num_frames": 5,
        "num_inference_steps": 4,
        "output_type": "latent",
        "negative_prompt": "",
    }
    image = load_image(str(world / "pictures/fox.png"))

    def stock() -> Tensor:
        return animator(
            image=image, prompt=SIGN, latents=noise.clone(), **options
        ).frames

    expected = stock()
    sigmas = animator.scheduler.sigmas
    uncond, prompt = pair(load(world, world / "cache"), world)
    assert (
        prompt.lengths[2] == IMAGE_TOKENS
        and prompt.frame is not None
        and prompt.frame.shape[2:] == size
    )
    policy = GuidedPolicy(animator.transformer, uncond, animator.guider.guidance_scale)

    def own() -> Tensor:
        x = noise.clone()
        with torch.no_grad():
            for step, sigma in enumerate(sigmas[:-1]):
                x += (sigmas[step + 1] - sigma) * policy.velocity(
                    x, sigma[None], [prompt]
                )
        return x

    found = [own()]
    with accelerate(animator):
        found += [own(), stock()]
    assert len({float(x.double().sum()) for x in [expected, *found[1:]]}) == 3, (
        "three computations"
    )
    for name, x in zip(
        ("stock velocity", "fused velocity", "accelerated pipeline"), found, strict=True
    ):
        assert float((x - expected).norm() / expected.norm()) <= 1e-6, name
    blank = replace(
        prompt,
        image=torch.zeros_like(prompt.image[:0]),
        frame=torch.zeros_like(prompt.frame),
    )
    assert (
        policy.velocity(noise, sigmas[:1], [blank])
        - policy.velocity(noise, sigmas[:1], [prompt])
    ).norm() > 0.01


# --------------------------------------------------------------------------------------
# the cache


def test_the_cache_knows_a_picture_by_its_content_and_size(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder: Any = load(world, tmp_path / "cache").prompt_encoder
    file = picture(tmp_path / "a.png", seed=1)
    asked = Pictured("a red fox", str(file), HEIGHT, WIDTH)
    key = encoder.path_of(asked)
    assert (
        encoder.path_of(asked._replace(image=str(world / "pictures/fox.png"))) == key
    ), "a copy is the same picture"
    assert (
        len(
            {
                key,
                encoder.path_of(asked._replace(height=64)),
                encoder.path_of("a red fox"),
            }
        )
        == 3
    )
    lengths = encoder.prepare([asked, "a red fox"])
    pictured, alone = encoder.encode([asked, "a red fox"])
    assert lengths == [pictured.lengths, alone.lengths[:2]]
    assert lengths[0][2] == IMAGE_TOKENS
    wide, square = encoder.encode([asked, asked._replace(height=64)])
    assert (
        torch.equal(wide.text, square.text)
        and wide.frame.shape[2:] != square.frame.shape[2:]
    )
    picture(file, seed=2)
    assert encoder.path_of(asked) != key, "another picture at the same path"
    file.write_bytes(b"no picture")
    monkeypatch.setattr(
        type(encoder), "_load", lambda *_: pytest.fail("the encoders were loaded")
    )
    for kind in ("text.png", "huge.png"):
        broken = damaged(tmp_path, kind)
        with pytest.raises(ValueError, match=rf"{kind} cannot be read as a picture"):
            encoder.prepare(["a fox", asked._replace(image=str(broken))])


# --------------------------------------------------------------------------------------
# what is refused


def weights_check(config: RunConfig) -> Check:
    return next(check for check in files(config) if check.name == "model weights")


def test_the_class_of_the_pipeline_decides_and_prompts_must_fit(
    world: Path, diffusers_checkpoint: Path, tmp_path: Path
) -> None:
    config = load_config(write(world, tmp_path))
    assert weights_check(config).status == "ok"
    text_alone = {"data": {"prompts": ["a", "b"]}}
    cases = {
        r"2 of 4 prompts have a picture, the first is 'a red fox'.*text-to-video. Leave .* --image out": {
            "model": {"path": str(diffusers_checkpoint)},
            "evaluation": {"prompts": ["a", "b"]},
        },
        r"4 of 4 prompts have no picture.*image-to-video. Name one .*'image'.* by --image.*text-to-video": text_alone,
    }
    for message, changes in cases.items():
        wrong = load_config(write(world, tmp_path, **changes))
        found = weights_check(wrong)
        with pytest.raises(ConfigError, match=message) as error:
            build_trainer(wrong)
        assert found.status == "missing" and found.detail == str(error.value)


def test_doctor_reads_the_pictures(
    world: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tall = picture(tmp_path / "tall.png", size=(40, 120))
    prompts = [
        {"prompt": "a", "image": str(tall)},
        {"prompt": "b", "image": str(world / "sign.png")},
    ]
    config = load_config(write(world, tmp_path, data={"prompts": prompts}))
    assert (
        weights_check(config).status == "ok"
        and f"Of the picture {tall} a video 64 wide" in caplog.text
    )
    tall.write_bytes(tall.read_bytes()[:100])
    found = weights_check(config)
    assert (
        found.status == "missing"
        and "tall.png cannot be read as a picture" in found.detail
    )


def test_files_of_image_to_video_are_asked_for(world: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(world / "model", tmp_path / "model"))
    shutil.rmtree(copy / "image_encoder")
    config = load_config(write(world, tmp_path, model={"path": str(copy)}))
    found = next(iter(files(config)))
    assert found.status == "missing" and "image_encoder/config.json" in found.detail
    fetch = r"hf download hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_i2v"
    assert fetch in found.fix
    with pytest.raises(
        ConfigError,
        match=rf"image_encoder/config.json is missing. Get it with: {fetch}",
    ):
        build_trainer(config)


# --------------------------------------------------------------------------------------
# a run


UPDATES = {
    "two_phase": [],
    "single_pass": ["--training.update=single_pass", "--rollout.micro_batch_size=1"],
}


@pytest.mark.slow
@pytest.mark.parametrize("words", UPDATES.values(), ids=UPDATES)
def test_a_resumed_run_is_the_whole_one_to_the_bit(
    words: list[str], world: Path, tmp_path: Path
) -> None:
    adapters = assert_resumes_to_the_bit(partial(write, world), tmp_path, words)
    assert len(adapters) > 8


@pytest.mark.slow
@pytest.mark.parametrize("words", [[], ["--training.mode=full"]], ids=["lora", "full"])
def test_two_ranks_train_like_one_process(
    words: list[str], world: Path, tmp_path: Path
) -> None:
    file = write(world, tmp_path)
    ((expected, _, _),) = run_ranks(train, 1, file, words)
    sharded = [
        *words,
        "--distributed.dp_shard=2",
        "--rollout.batch_size=2",
        "--distributed.keep_gathered=rollout",
    ]
    for records, _, _ in run_ranks(train, 2, file, sharded):
        assert_same_updates(records, expected, first=1e-5)


@pytest.mark.slow
def test_videos_of_pictures_are_generated_evaluated_and_exported(
    world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(world, tmp_path, training={"num_updates": 1})
    run = Run(load_config(file))
    run.train()
    report = evaluate(run.config, tmp_path / "scores", resamples=100)
    assert len(report.videos) == 2
    fox = str(world / "pictures/fox.png")
    sign = str(world / "sign.png")
    out = tmp_path / "videos"
    words = [
        "generate",
        file,
        "--output_dir",
        str(out),
        "--prompt",
        "a",
        "--prompt",
        "b",
    ]
    assert main([*words, "--image", fox, "--image", sign, "--image", fox]) == 2
    assert "3 --image and 2 --prompt were given" in capsys.readouterr().err
    assert main([*words, "--image", fox, "--image", sign]) == 0
    # known, and kept
    again = generate(run.config, [Prompt(text="a", image=fox, index=0)], out)
    assert again[0].is_file() and len(list(out.glob("*.mp4"))) == 2
    with pytest.raises(ConfigError, match="made with other settings.*prompt"):
        generate(run.config, [Prompt(text="a", image=sign, index=0)], out)
    assert (
        main(
            [
                "export",
                str(tmp_path / "run"),
                "--output_dir",
                str(tmp_path / "exported"),
            ]
        )
        == 0
    )
    card = (tmp_path / "exported/README.md").read_text("utf-8")
    assert (
        "import FlowMatchEulerDiscreteScheduler, HunyuanVideo15ImageToVideoPipeline"
        in card
    )
    assert "pipeline_tag: image-to-video" in card


# --------------------------------------------------------------------------------------
# the plan


def test_the_plan_counts_the_picture() -> None:
    """Of three blocks at 480x832x81, without what does not reach the velocity."""
    described = describe_model(
        ModelConfig(
            family="hunyuan15",
            path="hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_i2v",
        )
    )
    assert (described.text_tokens, described.image_tokens) == (250 + 729, 729)
    config = {**described.transformer, "num_layers": 3}
    transformer = meta_transformer(config, torch.bfloat16, 3)
    family = family_of(transformer)
    family.choose_forward(
        transformer, ModelConfig(attention="sdpa", kernels="reference", adaln="weights")
    )
    prompt = family.empty_prompt(config, described.text_tokens, torch.bfloat16)
    assert prompt.lengths == (250, 0, 729)
    latents = torch.empty(1, *described.latent_shape(81, 480, 832), device="meta")
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        family.velocity(transformer, latents, torch.tensor([0.5]), [prompt])
    work, unused = (
        f(config, 32_760, described.text_tokens).total
        for f in (described.forward_work, unused_work)
    )
    assert counter.get_total_flops() == work - unused
    assert "image_embedder" not in dead_modules(transformer)
