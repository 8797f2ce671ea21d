"""A user's way with HunyuanVideo-1.5, by the command line and with the shipped recipe:
doctor, train, export. The model and the three rewards are tiny and random, in the
layouts of the published checkpoints.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import HunyuanVideo15Pipeline

from sage_fast.checkpoint.reader import open_checkpoint
from sage_fast.commands.cli import main
from sage_fast.run.directory import read_metrics
from tests.tiny.checkpoints import save_diffusers_layout
from tests.tiny.clip import build_tiny_clip
from tests.tiny.videoalign import build_tiny_videoalign

ROOT = Path(__file__).resolve().parents[3]
PRESET = ROOT / "configs/hv15_352x624_lora_1gpu.yaml"
ABLATION = ROOT / "configs/ablations/setting_b.yaml"


@dataclass(frozen=True)
class World:
    """The folder of a workspace, and the words that turn the shipped recipe into one
    for it.
    """

    root: Path
    words: list[str]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    """The model, the rewards, the prompts, and a finished run of one update."""
    root = tmp_path_factory.mktemp("real")
    save_diffusers_layout(root / "model")
    videoalign, base_model = build_tiny_videoalign(root / "rewards")
    clip = build_tiny_clip(root / "rewards/clip")
    prompts = root / "prompts.txt"
    prompts.write_text('a red cat jumps\na sign that says "OPEN"\n')
    words = [
        str(PRESET),
        str(ABLATION),
        f"--output_dir={root / 'run'}",
        f"--model.path={root / 'model'}",
        "--model.device=cpu",
        f"--data.prompts={prompts}",
        f"--evaluation.prompts={prompts}",
        "--evaluation.num_prompts=null",
        "--evaluation.num_steps=3",
        "--evaluation.every=1",
        "--evaluation.num_samples=1",
        "--video={num_frames: 5, height: 64, width: 48, fps: 24}",
        "--rollout.num_steps=3",
        "--rollout.num_generations=2",
        "--rollout.batch_size=4",
        "--lora.rank=2",
        "--lora.alpha=2",
        "--optimizer.learning_rate=0.1",
        "--training.num_updates=1",
        "--training.ema_decay=0.5",
        "--reward.rewards=[videoalign, clip_score, pick_score]",
        f"--reward.options.videoalign.path={videoalign}",
        f"--reward.options.videoalign.base_model={base_model}",
        f"--reward.options.clip_score.path={clip}",
        f"--reward.options.pick_score.path={clip}",
        "--logging.report_to=[]",
    ]
    assert main(["train", *words]) == 0
    return World(root, words)


def test_the_shipped_recipe_trains(world: World) -> None:
    run = world.root / "run"
    rows = read_metrics(run / "metrics.jsonl")
    assert [row["update"] for row in rows] == [0, 1]
    for row in rows[1:]:
        assert row["ratio/first_max_deviation"] == 0.0 and row["grad_norm"] > 0
        assert row["advantage/zero_spread_groups"] == 0
        overall = (
            0.5 * row["reward/VQ_mean"]
            + 0.5 * row["reward/MQ_mean"]
            + row["reward/TA_mean"]
        )
        assert row["reward/mean"] == pytest.approx(overall, abs=1e-6)
        assert row["reward/CLIPScore_mean"] != 0 and row["reward/PickScore_mean"] != 0
    assert rows[-1]["eval/paired_gain"] != 0
    assert (run / "reward.png").exists() and (run / "before_after.png").exists()
    stored = open_checkpoint(run / "checkpoints/update-000001")
    assert stored.state["trainer"]["update"] == 1


def test_doctor_says_that_it_can_run(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", *world.words]) == 0
    text = capsys.readouterr().out
    assert "This configuration can run." in text and "already holds a run" in text
    for name in ("HunyuanVideo-1.5", "VideoAlign", "CLIPScore", "PickScore"):
        assert re.search(rf"ok +{name} ", text), name


@pytest.mark.parametrize(
    ("lost", "name", "fetch"),
    [
        (
            "model/vae/config.json",
            "HunyuanVideo-1.5",
            "hf download hunyuanvideo-community/HunyuanVideo-1.5-Diffusers",
        ),
        (
            "rewards/qwen2_vl/config.json",
            "VideoAlign's base model",
            "hf download Qwen/Qwen2-VL-2B-Instruct",
        ),
    ],
    ids=["model", "qwen"],
)
def test_doctor_and_train_agree_on_what_is_missing(
    world: World, capsys: pytest.CaptureFixture[str], lost: str, name: str, fetch: str
) -> None:
    file = world.root / lost
    content = file.read_bytes()
    file.unlink()
    try:
        assert main(["doctor", "--json", *world.words]) == 1
        checks = json.loads(capsys.readouterr().out)["checks"]
        assert main(["train", *world.words, f"--output_dir={world.root / 'lost'}"]) == 2
        assert Path(lost).name in capsys.readouterr().err
    finally:
        file.write_bytes(content)
    missing = {check["name"]: check for check in checks if check["status"] == "missing"}
    assert name in missing and fetch in missing[name]["fix"]
    assert not (world.root / "lost").exists()


@pytest.mark.parametrize(
    ("words", "dtype"),
    [
        (["--format", "lora"], torch.bfloat16),
        (["--format", "full", "--model.dtype=float32"], torch.float32),
    ],
    ids=["lora", "full"],
)
def test_the_readme_of_an_export_gives_a_stock_pipeline_that_generates(
    world: World, tmp_path: Path, words: list[str], dtype: torch.dtype
) -> None:
    run = world.root / "run"
    folder = tmp_path / "exported"
    assert (
        main(
            [
                "export",
                str(run),
                "--output_dir",
                str(folder),
                *words,
                "--rollout.shift=4",
            ]
        )
        == 0
    )
    code = re.search(
        r"```python\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL
    )
    assert code
    names: dict[str, Any] = {}
    exec(code[1], names)
    pipeline = names["pipeline"]
    assert (
        isinstance(pipeline, HunyuanVideo15Pipeline)
        and pipeline.transformer is names["transformer"]
    )
    assert pipeline.transformer.dtype == dtype and pipeline.scheduler.shift == 4.0

    def sample(pipe: HunyuanVideo15Pipeline) -> torch.Tensor:
        size = {"height": 64, "width": 48, "num_frames": 5}
        generator = torch.Generator().manual_seed(0)
        return pipe(
            "a red cat jumps",
            **size,
            num_inference_steps=2,
            generator=generator,
            output_type="latent",
        ).frames

    stock = HunyuanVideo15Pipeline.from_pretrained(
        world.root / "model", dtype=torch.bfloat16
    )
    assert (sample(pipeline) - sample(stock)).abs().max() > 1e-2, (
        "the export changes nothing"
    )
