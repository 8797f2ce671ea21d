"""metrics.jsonl survives kills and resumes, keeps every digit, and refuses numbers that are none."""

import json
import logging
import math
import os
import resource
import signal
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from sage_fast.config.errors import RunDirectoryError
from sage_fast.run.metrics import FILE_NAME, MetricsLogger, read_metrics


def test_lines_hold_full_precision_and_ordered_keys(tmp_path):
    logger = MetricsLogger(tmp_path / "run")
    values = {"time/rollout": 0.1 + 0.2, "kl/position": 5e-324, "reward/mean": -1 / 3}
    logger.log({**values, "update": 1, "note": "第一"})
    logger.log({"update": 2, "reward/mean": None, "policy/skipped": True})
    logger.close()
    lines = (tmp_path / "run" / FILE_NAME).read_text("utf-8").splitlines()
    assert list(json.loads(lines[0])) == ["update", "kl/position", "note", "reward/mean", "time/rollout"]
    first, second = read_metrics(logger.path)
    assert first == {"update": 1, "note": "第一", **values}
    assert second == {"update": 2, "policy/skipped": True, "reward/mean": None}


def test_a_record_is_on_disk_before_the_logger_is_closed(tmp_path):
    logger = MetricsLogger(tmp_path)
    logger.log({"update": 0})
    assert read_metrics(logger.path) == [{"update": 0}]
    logger.close()


def test_one_element_tensors_and_arrays_become_numbers(tmp_path):
    logger = MetricsLogger(tmp_path)
    logger.log({"update": np.int64(3), "a": torch.tensor([0.5]), "b": np.float32(0.25), "c": torch.tensor(True)})
    logger.close()
    assert read_metrics(logger.path) == [{"update": 3, "a": 0.5, "b": 0.25, "c": True}]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, torch.tensor(math.nan)], ids=repr)
def test_non_finite_values_are_refused_with_their_key(tmp_path, bad):
    logger = MetricsLogger(tmp_path)
    with pytest.raises(ValueError, match="'loss/policy' is (nan|inf|-inf)"):
        logger.log({"update": 1, "reward/mean": 0.5, "loss/policy": bad})
    logger.close()
    assert read_metrics(logger.path) == []


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"a": 1}, "needs 'update'.*not None"),
        ({"update": 1.5}, "needs 'update'.*not 1.5"),
        ({"update": True}, "needs 'update'.*not True"),
        ({"update": -1}, "needs 'update'.*not -1"),
        ({"update": 1, "a": torch.zeros(3)}, r"'a' must be one number, not \(3,\)"),
        ({"update": 1, "a": [1.0]}, "'a' must be a number.*not list"),
    ],
    ids=["missing", "float", "bool", "negative", "many-elements", "list"],
)
def test_records_that_are_none_are_refused(tmp_path, record, message):
    logger = MetricsLogger(tmp_path)
    with pytest.raises(ValueError, match=message):
        logger.log(record)
    logger.close()


def test_a_line_cut_short_is_dropped_on_read_with_a_warning(tmp_path, caplog):
    path = tmp_path / FILE_NAME
    path.write_text('{"update": 1}\n{"update": 2, "rew', "utf-8")
    with caplog.at_level(logging.WARNING):
        assert read_metrics(path) == [{"update": 1}]
    assert f"{path}:2" in caplog.text


def test_a_bad_line_before_the_last_is_an_error(tmp_path):
    path = tmp_path / FILE_NAME
    path.write_text('{"update": 1}\nnot json\n{"update": 2}\n', "utf-8")
    with pytest.raises(RunDirectoryError, match=r"metrics\.jsonl:2: not a metrics record"):
        read_metrics(path)


@pytest.mark.parametrize(
    ("tail", "kept"), [('{"update": 2, "a"', [1]), ('{"update": 2}', [1, 2])], ids=["cut", "whole"]
)
def test_logging_continues_after_a_line_without_its_end(tmp_path, tail, kept):
    (tmp_path / FILE_NAME).write_text('{"update": 1}\n' + tail, "utf-8")
    logger = MetricsLogger(tmp_path)
    logger.log({"update": 3})
    logger.close()
    assert [row["update"] for row in read_metrics(logger.path)] == [*kept, 3]


def test_a_full_disk_leaves_no_part_of_a_record(tmp_path):
    """The size limit of the process stands in for a full disk: both fail in the middle of a line."""
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


def test_truncate_after_drops_later_updates_and_logging_goes_on(tmp_path):
    logger = MetricsLogger(tmp_path)
    for update in range(5):
        logger.log({"update": update, "reward/mean": update / 3})
    logger.truncate_after(2)
    assert [row["update"] for row in read_metrics(logger.path)] == [0, 1, 2]
    logger.log({"update": 3, "reward/mean": 9.0})
    logger.close()
    rows = read_metrics(logger.path)
    assert [row["update"] for row in rows] == [0, 1, 2, 3]
    assert rows[1]["reward/mean"] == 1 / 3
    assert [entry.name for entry in tmp_path.iterdir()] == [FILE_NAME]


def test_a_failed_truncation_leaves_the_file_whole(tmp_path, monkeypatch):
    logger = MetricsLogger(tmp_path)
    for update in range(3):
        logger.log({"update": update})
    before = logger.path.read_bytes()

    def fail(*_):
        raise OSError("disk gone")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="disk gone"):
        logger.truncate_after(0)
    assert logger.path.read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == [FILE_NAME]


def test_tensorboard_gets_the_numbers_and_forgets_what_was_truncated(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logger = MetricsLogger(tmp_path, tensorboard=True)
    for update in range(4):
        logger.log({"update": update, "reward/mean": float(update), "note": "text"})
    logger.truncate_after(1)
    logger.log({"update": 2, "reward/mean": 20.0})
    logger.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert events.Tags()["scalars"] == ["reward/mean"]
    assert [(e.step, e.value) for e in events.Scalars("reward/mean")] == [(0, 0.0), (1, 1.0), (2, 20.0)]


def test_wandb_that_is_missing_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ValueError, match=r"'videos'.*pip install wandb, or unset wandb_project"):
        MetricsLogger(tmp_path, wandb_project="videos")


def test_wandb_gets_the_records_and_a_resumed_run_keeps_its_identity(tmp_path, monkeypatch):
    calls = []

    def init(**options):
        calls.append(options)
        return SimpleNamespace(
            id="abc",
            log=lambda row, step: calls.append((step, dict(row))),
            finish=lambda: calls.append("finish"),
        )

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    for update in (1, 2):
        logger = MetricsLogger(tmp_path, wandb_project="videos")
        logger.log({"update": update, "a": 0.5})
        logger.close()
    first, second = (call for call in calls if isinstance(call, dict))
    assert first["project"] == "videos" and first["id"] is None and second["id"] == "abc"
    assert [call for call in calls if isinstance(call, tuple)] == [
        (1, {"update": 1, "a": 0.5}),
        (2, {"update": 2, "a": 0.5}),
    ]
    assert calls[-1] == "finish"


def test_unwritable_run_directory(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(OSError):
        MetricsLogger(tmp_path / "file" / "run")
