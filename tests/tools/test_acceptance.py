"""`doctor --deep`: whole tiny models pass it, and every fault is found in the part that
has it.
"""

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from sage_fast.commands.cli import main
from sage_fast.config.load import load_config, preset_names
from sage_fast.models.hunyuan15 import components
from sage_fast.models.hunyuan15.fused import Acceleration
from sage_fast.models.hunyuan15.video_vae import VAEDecoder
from sage_fast.models.media_files import read_video_and_rate, write_video
from sage_fast.policy import guidance
from sage_fast.rewards.videoalign import VideoAlignReward
from sage_fast.tools import acceptance
from sage_fast.tools.acceptance import examine_deeply, one_update
from tests.rewards.videoalign.published import (
    PROMPTS,
    VIDEOS,
    build_attentive_videoalign,
)
from tests.tiny.checkpoints import build_pipeline, copy_tree

ROOT = Path(__file__).resolve().parents[2]
FPS = 8


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model, VideoAlign, scores of its examples, and prompts."""
    root = tmp_path_factory.mktemp("world")
    pipeline = build_pipeline()
    pipeline.save_pretrained(root / "model")
    pipeline.transformer.save_pretrained(
        root / "model/transformer", max_shard_size="60KB"
    )
    (root / "model/transformer/diffusion_pytorch_model.safetensors").unlink()
    checkpoint, base = build_attentive_videoalign(root / "rewards")
    reward = VideoAlignReward(
        str(checkpoint), fps=FPS, base_model=str(base), device="cpu", dtype="bfloat16"
    )
    rows = []
    for number in range(2):
        write_video(root / f"{number}.mp4", VIDEOS[number], FPS)
        seen, _ = read_video_and_rate(root / f"{number}.mp4")
        scores = {
            name: float(value[0])
            for name, value in reward.score(seen[None], [PROMPTS[number]]).items()
        }
        rows.append(
            {"video": f"{number}.mp4", "prompt": PROMPTS[number], "scores": scores}
        )
    (root / "scores.json").write_text(json.dumps({"videoalign": rows}))
    (root / "prompts.txt").write_text(
        'a red cat jumps over a sign that says "OPEN"\nrain\n'
    )
    return root


def words(world: Path, model: Path, *more: str) -> list[str]:
    return [
        str(ROOT / "configs/hv15_352x624_lora_1gpu.yaml"),
        f"--output_dir={world / 'run'}",
        f"--model.path={model}",
        f"--model.cache_dir={world / 'cache'}",
        "--model.device=cpu",
        f"--data.prompts={world / 'prompts.txt'}",
        f"--evaluation.prompts={world / 'prompts.txt'}",
        "--evaluation.num_prompts=null",
        "--video={num_frames: 9, height: 64, width: 64, fps: 8}",
        f"--reward.options.videoalign.path={world}/rewards/videoalign_3",
        f"--reward.options.videoalign.base_model={world}/rewards/qwen2_vl",
        "--reward.options.videoalign.device=cpu",
        "--reward.options.videoalign.dtype=bfloat16",
        *more,
    ]


@pytest.mark.slow
def test_a_whole_model_passes(world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(
            [
                "doctor",
                *words(world, world / "model"),
                "--deep",
                "--scores",
                str(world / "scores.json"),
            ]
        )
        == 0
    )
    table = capsys.readouterr().out.partition("\ndeep\n")[2]
    for part in (
        "videoalign: scores",
        "prompt",
        "velocity",
        "timesteps",
        "ratio",
        "update",
        "decode",
    ):
        assert re.search(rf"^  ok +(reward )?{part}  ", table, re.MULTILINE), part
    assert not (world / "run").exists()


def stored_nan(model: Path, patch: pytest.MonkeyPatch) -> list[str]:
    """A stored score that is no number, before one that is right."""
    read = acceptance.read_scores

    def spoilt(file: Path) -> Any:
        stored = read(file)
        stored["videoalign"][0]["scores"] = {"VQ": float("nan")}
        return stored

    patch.setattr(acceptance, "read_scores", spoilt)
    return []


Fault = Callable[[Path, pytest.MonkeyPatch], list[str]]
"""Damages a copy of the model or the code; returns settings."""


def rounded_timestep(model: Path, patch: pytest.MonkeyPatch) -> list[str]:
    exact = guidance.model_velocity

    def rounded(transformer: Any, latents: Tensor, sigma: Tensor, *rest: Any) -> Tensor:
        return exact(transformer, latents, sigma.bfloat16().float(), *rest)

    patch.setattr(guidance, "model_velocity", rounded)
    return []


def wrong_crop(model: Path, patch: pytest.MonkeyPatch) -> list[str]:
    pipeline: Any = components.HunyuanVideo15Pipeline
    patch.setattr(
        pipeline,
        "_get_mllm_prompt_embeds",
        partial(pipeline._get_mllm_prompt_embeds, crop_start=100),
    )
    return [f"--model.cache_dir={model / 'cache'}"]


def other_reward_options(model: Path, patch: pytest.MonkeyPatch) -> list[str]:
    return ["--reward.options.videoalign.normalise=false"]


def other_positions(model: Path, patch: pytest.MonkeyPatch) -> list[str]:
    rope: Any = Acceleration.make_rope
    patch.setattr(
        Acceleration,
        "make_rope",
        lambda self, latents: tuple(part.flip(0) for part in rope(self, latents)),
    )
    return []


def undivided_latents(model: Path, patch: pytest.MonkeyPatch) -> list[str]:
    decode: Any = VAEDecoder.decode
    patch.setattr(
        VAEDecoder, "decode", lambda self, latents: decode(self, latents * 1.03682)
    )
    return []


FAULTS: dict[Fault, tuple[str, str]] = {
    rounded_timestep: ("timesteps", "of the sampler's 4 among them"),
    wrong_crop: ("prompt", "relative error"),
    other_reward_options: ("reward videoalign: scores", "largest difference"),
    stored_nan: ("reward videoalign: scores", "VQ of 0.mp4"),
    other_positions: ("velocity", "relative error"),
    undivided_latents: ("decode", "levels from the stock decoder"),
}
"""The part that must fail of each, all others passing, and what is said of it."""


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_fault_is_found_in_its_part(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Fault
) -> None:
    model = copy_tree(world / "model", tmp_path / "model")
    file, *overrides = words(world, model, *fault(model, monkeypatch))
    checks = examine_deeply(load_config(file, overrides), world / "scores.json")
    found = {check.name: check.detail for check in checks if check.status == "failed"}
    part, said = FAULTS[fault]
    assert found.keys() == {part} and said in found[part]


def test_every_preset_has_its_one_update() -> None:
    for preset in preset_names():
        if preset.startswith("hv15"):
            config = one_update(load_config(preset))
            assert config.rollout.sde_window.size is None
            assert config.training.best_and_worst == 0
            assert config.rollout.batch_size == config.rollout.num_generations == 2
