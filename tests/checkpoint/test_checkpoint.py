"""Checkpoints of one process: complete or not there, and written while training goes
on.
"""

import hashlib
import json
import os
import re
import resource
import shutil
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from sage_fast.checkpoint import writer
from sage_fast.checkpoint.folder import MANIFEST, checkpoint_name, list_checkpoints
from sage_fast.checkpoint.reader import (
    find_checkpoint,
    newest_checkpoint,
    open_checkpoint,
)
from sage_fast.checkpoint.writer import CheckpointData, CheckpointWriter
from sage_fast.config.errors import CheckpointError, DamagedCheckpointError


def contents(
    update: int = 1, rows: int = 3, dtype: torch.dtype = torch.bfloat16
) -> CheckpointData:
    """Everything that a run may bring, with the numbers of `update`."""
    value = float(update)
    return CheckpointData(
        tensors={
            "weights": {
                "blocks.0.weight": nn.Parameter(torch.full((rows, 5), value)),
                "blocks.0.bias": torch.full((4,), value, dtype=dtype),
                "transposed": torch.arange(6.0).view(2, 3).t() * value,
                "part of a larger one": torch.full((8, 2), value)[3:5],
            },
            "optimizer": {
                "blocks.0.weight.step": torch.tensor(value),
                "blocks.0.weight.exp_avg": torch.full((rows, 5), 2 * value),
                "counts": torch.tensor([3, 1 << 40]),
                "empty": torch.empty(0, 7),
            },
        },
        state={"update": update, "python_rng": [3, [1, 2], None]},
    )


def assert_holds(folder: Path, data: CheckpointData) -> None:
    checkpoint = open_checkpoint(folder)
    assert checkpoint.state == data.state
    assert {group: set(named) for group, named in checkpoint.tensors.items()} == {
        group: set(named) for group, named in data.tensors.items()
    }
    for group, named in data.tensors.items():
        for name, tensor in named.items():
            found = checkpoint.read(group, name)
            assert found.dtype == tensor.dtype and not found.requires_grad
            assert torch.equal(found, tensor), (group, name)


def save(root: Path, *updates: int, **options: Any) -> None:
    with CheckpointWriter(root, **{"keep_last": 9} | options) as saver:
        for update in updates:
            saver.save(update, contents(update))


# --------------------------------------------------------------------------------------
# what is written


def test_all_is_on_disk_before_its_name_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In order: every file with its last byte, the manifest of them, the folders, the
    name, and that the name lasts.
    """
    events: list[tuple[str, str, int]] = []
    fsync = os.fsync
    replace = os.replace

    def synced(descriptor: int) -> None:
        events.append(
            (
                "sync",
                os.readlink(f"/proc/self/fd/{descriptor}"),
                os.fstat(descriptor).st_size,
            )
        )
        fsync(descriptor)

    def renamed(source: Any, target: Any, **options: Any) -> None:
        replace(source, target, **options)
        events.append(("rename", str(target), 0))

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", renamed)
    with CheckpointWriter(
        tmp_path / "checkpoints", keep_last=2, asynchronous=True
    ) as saver:
        folder = saver.save(1, contents(), add_adapter)
    named = events.index(("rename", str(folder), 0))
    before = [
        (re.sub(r".*\.partial/?", "", path), size)
        for kind, path, size in events[:named]
        if kind == "sync"
    ]
    sizes = {
        path.relative_to(folder).as_posix(): path.is_file() and path.stat().st_size
        for path in folder.rglob("*")
    }
    files = {name: size for name, size in sizes.items() if size}
    assert len(files) > 3 and len(sizes) == len(files) + 2
    assert files.items() <= set(before)
    order = [path for path, _ in before]
    manifest = order.index(MANIFEST)
    assert {*order[:manifest]} >= files.keys() - {MANIFEST}
    assert {*order[manifest + 1 :]} == sizes.keys() - files.keys() | {""}
    assert events[named + 1][:2] == ("sync", str(folder.parent))


def add_adapter(partial: Path) -> None:
    (partial / "lora").mkdir()
    (partial / "lora/adapter.json").write_text("{}")


@pytest.mark.parametrize(
    "asynchronous", [False, True], ids=["foreground", "background"]
)
def test_training_goes_on_in_place(tmp_path: Path, asynchronous: bool) -> None:
    """The tensors change as soon as `save` returns; the copies of one save are reused
    by the next, but for those of another shape or type: bfloat16 has no 257.
    """
    saves: list[Any] = [(1, 3), (2, 3), (3, 4), (257, 4, torch.float32)]
    with CheckpointWriter(tmp_path, keep_last=4, asynchronous=asynchronous) as saver:
        for arguments in saves:
            data = contents(*arguments)
            saver.save(arguments[0], data)
            with torch.no_grad():
                for named in data.tensors.values():
                    for tensor in named.values():
                        tensor.zero_()
    for arguments in saves:
        assert_holds(tmp_path / checkpoint_name(arguments[0]), contents(*arguments))


def test_tensors_are_read_in_place_and_shapes_without_reading(tmp_path: Path) -> None:
    save(tmp_path, 5)
    checkpoint = open_checkpoint(tmp_path / "update-000005")
    kept = weakref.ref(checkpoint.read("weights", "blocks.0.bias"))
    assert kept() is None, "one tensor is in memory at a time"
    assert checkpoint.shapes["weights"]["blocks.0.weight"] == (3, 5)
    assert checkpoint.tensors["weights"].meta["blocks.0.bias"].dtype == torch.bfloat16
    parameter = nn.Parameter(torch.zeros(3, 5))
    wide = torch.zeros(4)
    address = parameter.data_ptr()
    checkpoint.load_into(
        {"weights": {"blocks.0.weight": parameter, "blocks.0.bias": wide}}
    )
    assert parameter.data_ptr() == address and parameter.requires_grad
    assert torch.equal(parameter, torch.full((3, 5), 5.0)) and torch.equal(
        wide, torch.full((4,), 5.0)
    )


@pytest.mark.parametrize(
    ("group", "message"),
    [
        (
            "weights",
            r"has weights 'blocks.0.weight' of shape \(3, 5\), this run's is \(4, 5\)",
        ),
        ("ema", "update-000005 has no tensor 'blocks.0.weight' in its group 'ema'"),
    ],
)
def test_what_does_not_fit_is_named_and_nothing_is_read(
    tmp_path: Path, group: str, message: str
) -> None:
    save(tmp_path, 5)
    fits = torch.zeros(4)
    other = torch.zeros(4, 5)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(tmp_path / "update-000005").load_into(
            {"optimizer": {"counts": fits[:2]}, group: {"blocks.0.weight": other}}
        )
    assert not fits.any() and not other.any()


def test_only_the_last_are_kept(tmp_path: Path) -> None:
    save(tmp_path, 1, 2, 3, 4, keep_last=2, asynchronous=True)
    assert [p.name for p in list_checkpoints(tmp_path)] == [
        "update-000003",
        "update-000004",
    ]
    # A damaged one that the run has passed over pushes nothing out.
    shutil.copytree(tmp_path / "update-000004", tmp_path / "update-000009")
    (tmp_path / "update-000009/manifest.json").unlink()
    save(tmp_path, 5, keep_last=2)
    assert [p.name for p in list_checkpoints(tmp_path)] == [
        "update-000004",
        "update-000005",
        "update-000009",
    ]


# --------------------------------------------------------------------------------------
# what goes wrong


def test_what_ends_the_run_is_not_hidden_by_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(writer, "write_manifest", full)
    for error, expected in (
        (ZeroDivisionError, ZeroDivisionError),
        (None, CheckpointError),
    ):
        with (
            pytest.raises(expected),
            CheckpointWriter(tmp_path, keep_last=2, asynchronous=True) as saver,
        ):
            saver.save(1, contents())
            if error:
                raise error
    assert "Could not write checkpoint" in caplog.text


@pytest.mark.parametrize(("asynchronous", "limit"), [(True, 100), (False, 4000)])
def test_a_full_disk_loses_nothing(
    tmp_path: Path, asynchronous: bool, limit: int
) -> None:
    """The size limit of the process stands in for a full disk: both fail in the middle
    of a write.
    """
    saver = CheckpointWriter(tmp_path, keep_last=1, asynchronous=asynchronous)
    saver.save(1, contents(1))
    saver.wait()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        with pytest.raises(CheckpointError) as error:
            saver.save(2, contents(2))
            saver.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert re.search(
        r"update-000002: .* GB free\). Free space, .* --resume auto", str(error.value)
    )
    assert [p.name for p in tmp_path.iterdir()] == ["update-000001"]
    assert_holds(tmp_path / "update-000001", contents(1))
    saver.save(2, contents(2))
    saver.close()
    assert_holds(tmp_path / "update-000002", contents(2))


def test_an_earlier_attempt_that_has_not_ended_yet_publishes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its folder is removed, also while it writes there. Nothing has a name before it
    is complete.
    """
    complete = threading.Event()
    publish = CheckpointWriter._publish

    def waiting(self: CheckpointWriter, *arguments: Any) -> None:
        assert complete.wait(30)
        publish(self, *arguments)

    monkeypatch.setattr(CheckpointWriter, "_publish", waiting)
    earlier = CheckpointWriter(tmp_path, keep_last=1, asynchronous=True)
    later = CheckpointWriter(tmp_path, keep_last=1, asynchronous=True)
    earlier.save(1, contents(1, rows=4))
    while not list(tmp_path.rglob("state.json")):  # all is written but the manifest
        time.sleep(0.01)
    later.save(1, contents(1, rows=3))
    assert [p.match(".update-000001.*.partial") for p in tmp_path.iterdir()] == [True]
    assert newest_checkpoint(tmp_path) is None
    complete.set()
    later.close()
    with pytest.raises(CheckpointError):
        earlier.close()
    assert_holds(tmp_path / "update-000001", contents(1, rows=3))
    assert [p.name for p in tmp_path.iterdir()] == ["update-000001"]


# --------------------------------------------------------------------------------------
# which one to trust


def test_what_resume_means(tmp_path: Path) -> None:
    assert find_checkpoint("auto", tmp_path / "nowhere") is None
    save(tmp_path, 1, 2)
    assert find_checkpoint("none", tmp_path) is None
    for resume, name in (
        ("auto", "update-000002"),
        (str(tmp_path / "update-000001"), "update-000001"),
    ):
        assert find_checkpoint(resume, tmp_path).folder.name == name  # type: ignore[union-attr]
    with pytest.raises(
        CheckpointError,
        match="no checkpoint folder .*update-000009.*Give a folder such as",
    ):
        find_checkpoint(str(tmp_path / "update-000009"), tmp_path)


@pytest.mark.parametrize(
    ("file", "damage"),
    [
        ("shards/__0_0.distcp", lambda path: os.truncate(path, 40)),
        ("state.json", Path.unlink),
        ("manifest.json", Path.unlink),
    ],
)
def test_a_damaged_one_is_skipped_with_a_warning(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    file: str,
    damage: Callable[[Path], None],
) -> None:
    save(tmp_path, 1, 2)
    damage(tmp_path / "update-000002" / file)
    with pytest.raises(DamagedCheckpointError, match=file):
        open_checkpoint(tmp_path / "update-000002")
    found = newest_checkpoint(tmp_path)
    assert found is not None and found.folder.name == "update-000001"
    assert (
        "Skipping a damaged checkpoint" in caplog.text
        and "update-000002" in caplog.text
    )


def test_one_of_another_format_says_who_wrote_it(tmp_path: Path) -> None:
    """It is whole, so a run that would go on from an older one, or from the start,
    would throw it away.
    """
    save(tmp_path, 1)
    old = shutil.copytree(tmp_path / "update-000001", tmp_path / "update-000002")
    manifest = {"format_version": 3, "sage_fast": "9.1", "update": 2, "files": {}}
    digest = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
    (old / "manifest.json").write_text(json.dumps(manifest | {"sha256": digest}))
    for resume in ("auto", str(old)):
        with pytest.raises(
            CheckpointError,
            match=r"checkpoint format 3 of SAGE-Fast 9\.1; .* Finish that run",
        ) as error:
            find_checkpoint(resume, tmp_path)
        assert not isinstance(error.value, DamagedCheckpointError)
