"""metrics.jsonl survives kills and resumes, keeps every digit, and refuses numbers that
are none; so do trackers.
"""

import json
import logging
import math
import resource
import signal
import sys
from pathlib import Path
from unittest.mock import MagicMock, call

import numpy as np
import pytest
import torch
from PIL import Image

from sage_fast.config.errors import ConfigError, RunDirectoryError
from sage_fast.models.media_files import write_video
from sage_fast.run.directory import read_metrics
from sage_fast.run.metrics import MetricsLogger


def test_lines_hold_numbers_of_any_kind_in_full_precision_and_ordered_keys(tmp_path):
    logger = MetricsLogger(tmp_path / "run")
    values = {"time/rollout": 0.1 + 0.2, "kl/position": 5e-324, "reward/mean": -1 / 3}
    logger.log({**values, "update": 1, "note": "第一"})
    numbers = {"a": torch.tensor([0.5]), "b": np.float32(0.25), "c": torch.tensor(True)}
    logger.log({"update": np.int64(2), "reward/mean": None, **numbers})
    logger.close()
    lines = (tmp_path / "run" / "metrics.jsonl").read_text("utf-8").splitlines()
    assert list(json.loads(lines[0])) == [
        "update",
        "kl/position",
        "note",
        "reward/mean",
        "time/rollout",
    ]
    first, second = read_metrics(logger.path)
    assert first == {"update": 1, "note": "第一", **values}
    assert second == {"update": 2, "a": 0.5, "b": 0.25, "c": True, "reward/mean": None}


@pytest.mark.parametrize("bad", [math.inf, torch.tensor(math.nan)], ids=repr)
def test_non_finite_values_are_refused_with_their_key(tmp_path, bad):
    logger = MetricsLogger(tmp_path)
    with pytest.raises(ValueError, match="'loss/policy' is (nan|inf)"):
        logger.log({"update": 1, "reward/mean": 0.5, "loss/policy": bad})
    logger.close()
    assert read_metrics(logger.path) == []


def test_a_bad_line_before_the_last_is_an_error(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"update": 1}\nnot json\n{"update": 2}\n', "utf-8")
    with pytest.raises(
        RunDirectoryError, match=r"metrics\.jsonl:2: not a metrics record"
    ):
        read_metrics(path)


@pytest.mark.parametrize(
    ("tail", "kept"),
    [('{"update": 2, "a"', [1]), ('{"update": 2}', [1, 2])],
    ids=["cut", "whole"],
)
def test_logging_continues_after_a_line_without_its_end(tmp_path, caplog, tail, kept):
    (tmp_path / "metrics.jsonl").write_text('{"update": 1}\n' + tail, "utf-8")
    with caplog.at_level(logging.WARNING):
        logger = MetricsLogger(tmp_path)
    assert ("metrics.jsonl:2: dropped" in caplog.text) == (kept == [1])
    logger.log({"update": 3})
    logger.close()
    assert [row["update"] for row in read_metrics(logger.path)] == [*kept, 3]


def test_a_full_disk_leaves_no_part_of_a_record(tmp_path):
    """The size limit of the process stands in for a full disk: both fail in the middle
    of a line.
    """
    logger = MetricsLogger(tmp_path)
    logger.log({"update": 1})
    before = logger.path.read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 5, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            logger.log({"update": 2, "reward/mean": 0.5})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, ignored)
    assert logger.path.read_bytes() == before
    logger.log({"update": 3})
    logger.close()
    assert [row["update"] for row in read_metrics(logger.path)] == [1, 3]


# --------------------------------------------------------------------------------------
# trackers

PROMPT = "一只红色的圆圈 | left"
SETTINGS = {
    "config": {"seed": 3, "model": {"family": "toy"}},
    "environment": {"commit": "3f2c-dirty"},
}


@pytest.fixture
def sheet(tmp_path: Path) -> Path:
    """A contact sheet of one video, which lies beside it."""
    Image.new("RGB", (20, 10), (0, 0, 200)).save(tmp_path / "sheet.png")
    write_video(tmp_path / "00.mp4", torch.zeros(6, 3, 16, 16, dtype=torch.uint8), 4)
    return tmp_path / "sheet.png"


def test_tensorboard_has_numbers_frames_and_settings_and_forgets_what_was_truncated(
    tmp_path, sheet, caplog
):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logger = MetricsLogger(tmp_path, report_to=["tensorboard"], settings=SETTINGS)
    for update in range(4):
        logger.log({"update": update, "reward/mean": float(update), "note": "text"})
    logger.truncate_after(1)
    logger.log({"update": 2, "reward/mean": 20.0})
    logger.show(2, sheet, [(PROMPT, tmp_path / "00.mp4")])
    sheet.unlink()
    with caplog.at_level(logging.WARNING):
        logger.show(3, sheet, [])
    assert "TensorBoard has no samples of update 3" in caplog.text, (
        "a run does not end for a picture"
    )
    logger.close()
    assert [
        (row["update"], row["reward/mean"]) for row in read_metrics(logger.path)
    ] == [(0, 0.0), (1, 1.0), (2, 20.0)]
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert events.Tags()["scalars"] == ["reward/mean"]
    assert [(e.step, e.value) for e in events.Scalars("reward/mean")] == [
        (0, 0.0),
        (1, 1.0),
        (2, 20.0),
    ]
    (picture,) = events.Images("samples")
    assert (picture.step, picture.width, picture.height) == (2, 20, 10)
    for name, tree in SETTINGS.items():
        text = (
            events.Tensors(f"{name}/text_summary")[-1]
            .tensor_proto.string_val[0]
            .decode()
        )
        assert json.loads(text.removeprefix("```json\n").removesuffix("\n```")) == tree


def test_weights_and_biases_has_numbers_videos_and_settings_and_a_resumed_run_keeps_its_identity(
    tmp_path, sheet, monkeypatch
):
    wandb = MagicMock()
    run = wandb.init.return_value
    run.id = "abc"
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setenv("WANDB_PROJECT", "videos")
    for update in (1, 2):
        logger = MetricsLogger(tmp_path, report_to=["wandb"], settings=SETTINGS)
        logger.log({"update": update, "a": 0.5})
        logger.close()
    logger.show(2, sheet, [(PROMPT, tmp_path / "00.mp4")])
    first, second = (begun.kwargs for begun in wandb.init.call_args_list)
    assert (first["project"], first["id"], second["id"]) == ("videos", None, "abc")
    assert (
        run.config.update.call_args_list == [call(SETTINGS, allow_val_change=True)] * 2
    ), "a resumed run's own"
    assert run.define_metric.call_args_list[2:] == [
        call("update"),
        call("*", step_metric="update"),
    ]
    # without `step`, below which W&B drops rows
    rows = [call({"update": update, "a": 0.5}) for update in (1, 2)]
    assert run.log.call_args_list == [
        *rows,
        call({"update": 2, "samples/00": wandb.Video.return_value}),
    ]
    wandb.Video.assert_called_once_with(
        str(tmp_path / "00.mp4"), caption=PROMPT, format="mp4"
    )
    assert run.finish.call_count == 2


def test_a_tracker_that_fails_is_one_warning_and_the_others_go_on(
    tmp_path, sheet, monkeypatch, caplog
):
    run = MagicMock(id="abc")
    run.log.side_effect = run.finish.side_effect = RuntimeError("the service is gone")
    monkeypatch.setitem(sys.modules, "wandb", MagicMock(**{"init.return_value": run}))
    logger = MetricsLogger(tmp_path, report_to=["wandb", "tensorboard"])
    for update in (1, 2):
        logger.log({"update": update, "a": 0.5})
        logger.show(update, sheet, [])
    logger.truncate_after(1)
    logger.close()
    said = [
        record.getMessage()
        for record in caplog.records
        if record.name == "sage_fast.run.metrics"
    ]
    parts = ("numbers of update 1", "samples of update 1", "end of the run")
    assert said == [
        f"WeightsAndBiases has no {part} (said once): the service is gone"
        for part in parts
    ]
    assert [row["update"] for row in read_metrics(logger.path)] == [1] and list(
        (tmp_path / "tensorboard").iterdir()
    )


@pytest.mark.parametrize("installed", [True, False])
def test_wandb_that_cannot_begin_is_an_error_with_its_fix(
    tmp_path, monkeypatch, installed
):
    wandb = MagicMock()
    wandb.init.side_effect = RuntimeError("api_key not configured (no-tty)")
    monkeypatch.setitem(sys.modules, "wandb", wandb if installed else None)
    fix = (
        "no-tty.*wandb login.*WANDB_MODE=offline" if installed else "pip install wandb"
    )
    with pytest.raises(ConfigError, match=rf"logging\.report_to has wandb.*{fix}"):
        MetricsLogger(tmp_path, report_to=["wandb"])
