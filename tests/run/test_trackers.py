"""Trackers keep what an evaluation shows and what the run was made with, and never end a run."""

import io
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from sage_fast.models.video_files import write_video
from sage_fast.run.metrics import MetricsLogger
from sage_fast.run.trackers import EvaluationMedia, SampleVideo

PROMPT = "一只红色的圆圈 | left"
SETTINGS = {"config": {"seed": 3, "model": {"family": "toy"}}, "environment": {"commit": "3f2c-dirty"}}


@pytest.fixture
def shown(tmp_path: Path) -> EvaluationMedia:
    """One video of six grey levels, a table of one prompt, and a page."""
    levels = torch.arange(0, 240, 40, dtype=torch.uint8)
    video = levels[:, None, None, None].expand(6, 3, 16, 16).contiguous()
    write_video(tmp_path / "00.mp4", video, 4)
    (tmp_path / "index.html").write_text("<p>the page</p>", "utf-8")
    return EvaluationMedia(
        videos=[SampleVideo(prompt=PROMPT, video=video, fps=4, file=tmp_path / "00.mp4")],
        head=["prompt", "Reward at update 0", "Reward"],
        rows=[[PROMPT, 0.25, 0.5]],
        page=tmp_path / "index.html",
    )


def test_tensorboard_has_moving_pictures_the_table_and_the_settings(tmp_path: Path, shown: EvaluationMedia) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logger = MetricsLogger(tmp_path, tensorboard=True, settings=SETTINGS)
    logger.log({"update": 4, "eval/reward_mean": 0.5})
    logger.show(4, shown)
    logger.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    (picture,) = events.Images("samples/00")
    with Image.open(io.BytesIO(picture.encoded_image_string)) as gif:
        assert (picture.step, gif.n_frames, gif.size) == (4, 6, (picture.width, picture.height))
        assert gif.info["duration"] == 250

    def text(name: str) -> str:
        return events.Tensors(f"{name}/text_summary")[0].tensor_proto.string_val[0].decode()

    assert text("evaluation/prompts").splitlines()[2] == "| 一只红色的圆圈 \\| left | 0.25 | 0.5 |"
    for name, tree in SETTINGS.items():
        assert json.loads(text(name).removeprefix("```json\n").removesuffix("\n```")) == tree


def test_weights_and_biases_has_video_table_page_and_settings_offline(
    tmp_path: Path, shown: EvaluationMedia, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb = pytest.importorskip("wandb")
    for name, value in {"MODE": "offline", "SILENT": "true", "CACHE_DIR": str(tmp_path / "cache")}.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    logger = MetricsLogger(tmp_path, wandb_project="videos", settings=SETTINGS)
    logger.log({"update": 4, "eval/reward_mean": 0.5})
    logger.show(4, shown)
    logger.close()
    wandb.teardown()  # its process writes the last of the file when it ends
    (run,) = (tmp_path / "wandb").glob("offline-run-*")
    media = run / "files" / "media"
    (video,) = media.rglob("*.mp4")
    assert video.read_bytes() == (tmp_path / "00.mp4").read_bytes()
    (table,) = media.rglob("*.table.json")
    assert json.loads(table.read_text("utf-8"))["data"] == [[PROMPT, 0.25, 0.5]]
    (page,) = media.rglob("*.html")
    assert "the page" in page.read_text("utf-8")
    recorded = next(run.glob("*.wandb")).read_bytes()
    assert b"3f2c-dirty" in recorded and b"eval/reward_mean" in recorded
    assert (tmp_path / "wandb_run_id").exists()


def test_a_tracker_that_takes_no_media_is_a_warning(
    tmp_path: Path, shown: EvaluationMedia, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("no room")

    logger = MetricsLogger(tmp_path, tensorboard=True)
    monkeypatch.setattr("sage_fast.run.media.animation", fail)
    with caplog.at_level(logging.WARNING):
        logger.show(4, shown)
    logger.close()
    assert "TensorBoard has no media of update 4: no room" in caplog.text
