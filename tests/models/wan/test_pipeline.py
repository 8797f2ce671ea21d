"""From prompt to pixels, this project against diffusers' `WanPipeline` on the same tiny
checkpoint.
"""

import json
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, WanPipeline
from diffusers.pipelines.wan.pipeline_wan import prompt_clean

from sage_fast.config.errors import ConfigError
from sage_fast.config.load import load_config
from sage_fast.config.sections import ModelConfig
from sage_fast.models.family import Components, load_components, model_family
from sage_fast.models.wan.fused import WanTransformer
from sage_fast.policy.guidance import GuidedPolicy
from sage_fast.records import Prompt, Sample
from sage_fast.rollout import (
    initial_latents,
    noise_keys,
    policy_velocity,
    sample_trajectory,
)
from sage_fast.sde import transition_table
from sage_fast.tools.diagnosis import files
from tests.tiny.wan import save_wan

PROMPTS = ["a red circle moving left", "  a fox\nin the &amp; snow ", ""]
STEPS = 5
GUIDANCE = 5.0
FRAMES = 9
HEIGHT = 32
WIDTH = 48


@dataclass(frozen=True)
class Model:
    """A checkpoint as each side reads it."""

    folder: Path
    stock: WanPipeline
    ours: Components


def section(folder: Path, **options: str) -> ModelConfig:
    return ModelConfig(family="wan", path=str(folder), device="cpu", **options)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = save_wan(tmp_path_factory.mktemp("wan"))
    stock = WanPipeline.from_pretrained(folder)
    stock.set_progress_bar_config(disable=True)
    return Model(folder, stock, load_components(section(folder)))


@pytest.mark.parametrize("text", PROMPTS)
def test_conditioning_is_the_valid_part_of_the_stock_one(
    model: Model, text: str
) -> None:
    encoder = model.ours.prompt_encoder
    (ours,) = encoder.encode([text])
    assert encoder.prepare([text]) == [(len(ours.text),)]
    (expected,), _ = model.stock.encode_prompt(
        text, do_classifier_free_guidance=False, max_sequence_length=512
    )
    assert not expected[len(ours.text) :].any() and expected[len(ours.text) - 1].any()
    assert (ours.text - expected[: len(ours.text)]).norm() <= 5e-6 * expected.norm()
    plain = encoder.encode_plainly(text)  # type: ignore[attr-defined]
    assert (
        plain.shape == ours.text.shape
        and (plain - ours.text).norm() <= 5e-6 * plain.norm()
    )


def test_prompts_are_repaired_as_those_that_the_model_was_trained_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The package ftfy, which diffusers leaves out where it is missing, without a word,
    or with a NameError.
    """
    assert prompt_clean("a “fox” it’s &amp; schÃ¶n") == 'a "fox" it\'s & schön'
    monkeypatch.setitem(sys.modules, "ftfy", None)
    monkeypatch.delitem(sys.modules, "sage_fast.models.wan.wan")
    with pytest.raises(
        ConfigError, match="model.family is 'wan', but importing .*ftfy"
    ):
        model_family("wan")


def test_a_long_prompt_is_cut_where_the_pipeline_cuts_it(
    model: Model, caplog: pytest.LogCaptureFixture
) -> None:
    text = "a red fox " * 200
    assert model.ours.prompt_encoder.prepare([text]) == [(512,)]
    assert "cut off after 512 tokens" in caplog.text
    (ours,) = model.ours.prompt_encoder.encode([text])
    (expected,), _ = model.stock.encode_prompt(
        text, do_classifier_free_guidance=False, max_sequence_length=512
    )
    assert (ours.text - expected).norm() <= 5e-6 * expected.norm()


@pytest.mark.parametrize("text", PROMPTS[:2])
def test_latents_and_frames_at_the_pipelines_own_sigmas(
    model: Model, text: str
) -> None:
    stock = model.stock
    transformer = model.ours.transformer
    stock.scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    embeds, unconditional = model.ours.prompt_encoder.encode([text, ""])
    samples = [Sample(prompt=Prompt(text=text, index=0), embeds=embeds, member=0)]
    keys = noise_keys(samples, seed=0, update=0)
    start = initial_latents(
        keys, model.ours.video_decoder.latent_shape(FRAMES, HEIGHT, WIDTH)
    )
    given = {
        "num_frames": FRAMES,
        "height": HEIGHT,
        "width": WIDTH,
        "num_inference_steps": STEPS,
    }
    options = {
        "guidance_scale": GUIDANCE,
        "negative_prompt": "",
        "latents": start.clone(),
        **given,
    }
    latents = stock(text, output_type="latent", **options).frames
    frames = stock(text, output_type="pt", **options).frames
    table = transition_table("ode", stock.scheduler.sigmas.double(), 0.0)
    policy = GuidedPolicy(transformer, unconditional, GUIDANCE)
    for forward in ("stock", "fused"):
        handle = WanTransformer.choose_forward(
            transformer, section(model.folder, forward=forward)
        )
        ours = sample_trajectory(
            policy_velocity(policy, samples), samples, keys, table, start
        ).final
        assert (ours - latents).norm() <= 1e-6 * latents.norm()
    assert handle is not None
    handle.undo()
    assert (latents - start).norm() > 0.1 * latents.norm(), (
        "the comparison is of something that moves"
    )
    expected = (frames * 255).round().to(torch.uint8)
    decoder = model.ours.video_decoder
    assert (
        expected.shape == (1, FRAMES, 3, HEIGHT, WIDTH) and expected.float().std() > 5
    )
    assert torch.equal(decoder.decode(latents), expected)
    assert torch.equal(decoder.decode_plainly(latents), expected)  # type: ignore[attr-defined]
    assert torch.equal(decoder.decode(torch.cat([latents, start]))[:1], expected), (
        "each video by itself"
    )


def test_a_video_that_does_not_fit_is_decoded_in_tiles(model: Model) -> None:
    small = load_components(section(model.folder, decode_memory_gib=1e-9))  # type: ignore[arg-type]
    latents = torch.randn(1, 4, 1, 40, 40)
    tiled, whole = (
        parts.video_decoder.decode(latents) for parts in (small, model.ours)
    )
    assert small.video_decoder.vae.use_tiling and tiled.shape == whole.shape  # type: ignore[attr-defined]
    assert not torch.equal(tiled, whole)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"_class_name": "WanVACEPipeline"}, "is of a WanVACEPipeline"),
        ({"transformer_2": ["diffusers", "WanTransformer3DModel"]}, "two experts"),
        ({"boundary_ratio": 0.875}, "two experts take turns"),
        ({"vae": "gone"}, "hf download"),
    ],
)
def test_what_cannot_be_trained_is_refused_with_a_way_out(
    model: Model, changes: dict[str, object], expected: str, tmp_path: Path
) -> None:
    for part in model.folder.iterdir():
        if (
            part.name not in ("model_index.json", ".sage_fast")
            and part.name not in changes
        ):
            (tmp_path / part.name).symlink_to(part)
    index = json.loads((model.folder / "model_index.json").read_text())
    (tmp_path / "model_index.json").write_text(json.dumps(index | changes))
    for use in (load_components, model_family("wan").inspect):
        with pytest.raises(ValueError, match=expected):
            use(section(tmp_path))


@pytest.mark.parametrize("described", [True, False])
def test_half_a_folder_of_two_experts_is_refused(
    model: Model, described: bool, tmp_path: Path
) -> None:
    """The other expert beside it is enough, whatever the pipeline's file says, or
    without that file.
    """
    folder = Path(shutil.copytree(model.folder, tmp_path / "half"))
    shutil.copytree(folder / "transformer", folder / "transformer_2")
    if not described:
        (folder / "model_index.json").unlink()
    for use in (load_components, model_family("wan").inspect):
        with pytest.raises(
            ValueError,
            match=r"transformer_2 beside it.*Use Wan 2\.1 or Wan 2\.2 5B, for .*: hf download",
        ):
            use(section(folder))


@pytest.mark.parametrize(
    ("family", "lacks", "message"),
    [
        ("hunyuan15", "", "is of a WanTransformer3DModel"),
        ("wan_experts", "", "is one transformer. Set model.family to wan"),
        ("hunyuan15", "text_encoder", "is of a WanTransformer3DModel"),
    ],
)
def test_no_download_into_the_folder_of_another_family(
    model: Model, tmp_path: Path, family: str, lacks: str, message: str
) -> None:
    """Doctor's command would have written one model over parts of the other."""
    ignored = shutil.ignore_patterns(".sage_fast", *([lacks] if lacks else []))
    folder = shutil.copytree(model.folder, tmp_path / "mine", ignore=ignored)
    path = [f"--model.path={folder}", f"--model.family={family}"]
    checks = list(files(load_config("wan_480p_lora_1gpu", path)))
    assert not any(str(folder) in check.fix for check in checks)
    (found,) = (check for check in checks if check.name == "model weights")
    assert found.status == "missing" and message in found.detail


def test_two_experts_that_are_not_here_come_from_a_repository_that_has_two(
    tmp_path: Path,
) -> None:
    pair = model_family("wan_experts")
    for folder in (tmp_path / "mine", tmp_path):
        config = ModelConfig(family="wan_experts", path=str(folder))
        (needed,) = pair.requirements(config)
        with pytest.raises(ValueError) as error:
            pair.describe(config)
        for text in (needed.fetch, str(error.value)):
            assert "hf download Wan-AI/Wan2.2-T2V-A14B-Diffusers" in text


def test_facts_and_files(model: Model) -> None:
    family = model_family("wan")
    facts = family.inspect(section(model.folder))
    assert facts is not None and facts.shift == 3.0 and facts.shift_difference(5.0)
    (whole,) = family.requirements(section(model.folder))
    (none,) = family.requirements(ModelConfig(family="wan"))
    assert (
        whole.missing == []
        and "Wan-AI/Wan2.1-T2V-1.3B-Diffusers" in none.fetch
        and none.gigabytes < 30
    )


def test_the_large_model_is_counted_and_completed_as_what_it_is(
    model: Model, tmp_path: Path
) -> None:
    folder = Path(
        shutil.copytree(
            model.folder, tmp_path / "mine", ignore=shutil.ignore_patterns(".sage_fast")
        )
    )
    config = folder / "transformer/config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"num_layers": 40}))
    shutil.rmtree(folder / "vae")
    with pytest.raises(
        ValueError,
        match=rf"Wan2.1-T2V-14B-Diffusers --include 'vae/\*' --local-dir {folder}$",
    ):
        load_components(section(folder))
    for path in ("Wan-AI/Wan2.1-T2V-14B-Diffusers", tmp_path / "wan2.1-14b", folder):
        (needed,) = model_family("wan").requirements(section(Path(path)))
        assert (
            "Wan-AI/Wan2.1-T2V-14B-Diffusers" in needed.fetch
            and 80 < needed.gigabytes < 81
        )
        assert ("--local-dir" in needed.fetch) == isinstance(path, Path)
