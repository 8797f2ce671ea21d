"""Checkpoints of one process: complete or not there, and written while training goes on."""

import hashlib
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sage_fast.checkpoint import (
    CheckpointData,
    CheckpointWriter,
    checkpoint_name,
    find_checkpoint,
    list_checkpoints,
    newest_checkpoint,
    open_checkpoint,
    verify_checkpoint,
    writer,
)
from sage_fast.config.errors import CheckpointError, DamagedCheckpointError

ROOT = Path(__file__).resolve().parents[2]
WAYS = pytest.mark.parametrize("asynchronous", [False, True], ids=["foreground", "background"])


def contents(update: int = 1, rows: int = 3) -> CheckpointData:
    """Everything that a run may bring, with the numbers of `update`."""
    value = float(update)
    return CheckpointData(
        tensors={
            "weights": {
                "blocks.0.weight": nn.Parameter(torch.full((rows, 5), value)),
                "blocks.0.bias": torch.full((4,), value, dtype=torch.bfloat16),
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


# ------------------------------------------------------------------------------------------ what is written


@WAYS
def test_every_tensor_comes_back_bit_for_bit(tmp_path: Path, asynchronous: bool) -> None:
    with CheckpointWriter(tmp_path, keep_last=2, asynchronous=asynchronous) as saver:
        folder = saver.save(7, contents(7))
    assert folder == tmp_path / "update-000007"
    assert_holds(folder, contents(7))


@WAYS
def test_training_goes_on_in_place(tmp_path: Path, asynchronous: bool) -> None:
    """The tensors change as soon as `save` returns; the copies of one save are reused by the next."""
    with CheckpointWriter(tmp_path, keep_last=3, asynchronous=asynchronous) as saver:
        for update, rows in ((1, 3), (2, 3), (3, 4)):
            data = contents(update, rows)
            saver.save(update, data)
            with torch.no_grad():
                for named in data.tensors.values():
                    for tensor in named.values():
                        tensor.zero_()
    for update, rows in ((1, 3), (2, 3), (3, 4)):
        assert_holds(tmp_path / checkpoint_name(update), contents(update, rows))


def test_both_ways_write_the_same_bytes(tmp_path: Path) -> None:
    for name, asynchronous in (("foreground", False), ("background", True)):
        save(tmp_path / name, 1, asynchronous=asynchronous)
    first, second = (tmp_path / name / "update-000001" for name in ("foreground", "background"))
    assert (first / "shards/__0_0.distcp").read_bytes() == (second / "shards/__0_0.distcp").read_bytes()
    assert (first / "state.json").read_bytes() == (second / "state.json").read_bytes()


def test_tensors_are_read_in_place_and_shapes_without_reading(tmp_path: Path) -> None:
    save(tmp_path, 5)
    checkpoint = open_checkpoint(tmp_path / "update-000005")
    assert checkpoint.shapes["weights"]["blocks.0.weight"] == (3, 5)
    assert checkpoint.tensors["weights"].meta["blocks.0.bias"].dtype == torch.bfloat16
    parameter, wide = nn.Parameter(torch.zeros(3, 5)), torch.zeros(4)
    address = parameter.data_ptr()
    checkpoint.load_into({"weights": {"blocks.0.weight": parameter, "blocks.0.bias": wide}})
    assert parameter.data_ptr() == address and parameter.requires_grad
    assert torch.equal(parameter, torch.full((3, 5), 5.0)) and torch.equal(wide, torch.full((4,), 5.0))
    with pytest.raises(KeyError):
        checkpoint.read("weights", "nothing")


def test_a_disk_that_fails_later_is_an_error_that_names_the_checkpoint(tmp_path: Path) -> None:
    save(tmp_path, 5)
    checkpoint = open_checkpoint(tmp_path / "update-000005")
    os.truncate(tmp_path / "update-000005/shards/__0_0.distcp", 100)
    with pytest.raises(CheckpointError, match="update-000005 cannot be read"):
        checkpoint.read("weights", "blocks.0.weight")
    with pytest.raises(CheckpointError, match="update-000005 cannot be read"):
        checkpoint.load_into({"weights": {"blocks.0.weight": torch.zeros(3, 5)}})


def test_the_manifest_describes_every_other_file(tmp_path: Path) -> None:
    def adapter(folder: Path) -> Callable[[], object]:
        (folder / "lora").mkdir()
        (folder / "lora/adapter.safetensors").write_bytes(b"weights")
        return lambda: (folder / "lora/README.md").write_text("written later")

    with CheckpointWriter(tmp_path, keep_last=1) as saver:
        folder = saver.save(1, contents(), extra=adapter)
    manifest = json.loads((folder / "manifest.json").read_text())
    files = {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    del files["manifest.json"]
    lora, shards = {"lora/adapter.safetensors", "lora/README.md"}, {"shards/.metadata", "shards/__0_0.distcp"}
    assert set(files) == {"state.json"} | lora | shards
    assert manifest["files"] == {
        name: {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()} for name, data in files.items()
    }
    assert manifest["format_version"] == 2 and manifest["update"] == 1


def test_only_the_last_are_kept(tmp_path: Path) -> None:
    save(tmp_path, 1, 2, 3, 4, keep_last=2, asynchronous=True)
    assert [p.name for p in list_checkpoints(tmp_path)] == ["update-000003", "update-000004"]
    # A damaged one that the run has passed over pushes nothing out.
    shutil.copytree(tmp_path / "update-000004", tmp_path / "update-000009")
    (tmp_path / "update-000009/manifest.json").unlink()
    save(tmp_path, 5, keep_last=2)
    assert [p.name for p in list_checkpoints(tmp_path)] == ["update-000004", "update-000005", "update-000009"]


def test_a_group_is_one_word() -> None:
    with pytest.raises(ValueError, match=r"'ema.slow'; a group's name has no dot"):
        CheckpointData(tensors={"ema.slow": {}}, state={})


def test_nothing_is_said(tmp_path: Path, capfd: pytest.CaptureFixture[str], recwarn: Any) -> None:
    save(tmp_path, 1, asynchronous=True)
    dict(open_checkpoint(tmp_path / "update-000001").tensors["weights"])
    assert capfd.readouterr() == ("", "") and not list(recwarn)


# ------------------------------------------------------------------------------------------ in the background


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Checkpoints are not published before the event is set."""
    event = threading.Event()
    publish = CheckpointWriter._publish

    def waiting(self: CheckpointWriter, *arguments: Any) -> None:
        assert event.wait(30)
        publish(self, *arguments)

    monkeypatch.setattr(CheckpointWriter, "_publish", waiting)
    yield event
    event.set()


def test_a_checkpoint_has_no_name_before_it_is_complete(tmp_path: Path, gate: threading.Event) -> None:
    with CheckpointWriter(tmp_path, keep_last=1, asynchronous=True) as saver:
        saver.save(1, contents())
        (partial,) = tmp_path.iterdir()
        assert partial.match(".update-000001.*.partial")
        assert newest_checkpoint(tmp_path) is None
        gate.set()
        saver.wait()
        assert [p.name for p in tmp_path.iterdir()] == ["update-000001"]


def test_what_extra_returns_is_called_in_the_background(tmp_path: Path) -> None:
    threads = []

    def extra(folder: Path) -> Callable[[], None]:
        threads.append(threading.current_thread().name)
        return lambda: threads.append(threading.current_thread().name)

    with CheckpointWriter(tmp_path, keep_last=1, asynchronous=True) as saver:
        saver.save(1, contents(), extra=extra)
    assert threads[0] == threading.current_thread().name and threads[1].startswith("checkpoint")


def test_a_save_waits_for_the_one_before(tmp_path: Path, gate: threading.Event) -> None:
    order = []

    def release() -> None:
        time.sleep(0.2)
        order.append("released")
        gate.set()

    with CheckpointWriter(tmp_path, keep_last=2, asynchronous=True) as saver:
        saver.save(1, contents(1))
        threading.Thread(target=release).start()
        saver.save(2, contents(2), extra=lambda folder: order.append("second"))
    assert order == ["released", "second"]
    assert [p.name for p in list_checkpoints(tmp_path)] == ["update-000001", "update-000002"]


def test_a_failure_in_the_background_is_raised_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saver = CheckpointWriter(tmp_path, keep_last=2, asynchronous=True)
    saver.save(1, contents(1))
    saver.wait()
    with monkeypatch.context() as patch:
        patch.setattr(writer, "write_manifest", _full)
        saver.save(2, contents(2))
        with pytest.raises(CheckpointError, match=r"update-000002: .*No space left.*--resume auto from update-000001"):
            saver.save(3, contents(3))
    saver.save(4, contents(4))
    saver.close()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["update-000001", "update-000004"]


def _full(*_: Any) -> None:
    raise OSError(28, "No space left on device")


def test_what_ends_the_run_is_not_hidden_by_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(writer, "write_manifest", _full)
    with (
        pytest.raises(ZeroDivisionError),
        CheckpointWriter(tmp_path, keep_last=2, asynchronous=True) as saver,
    ):
        saver.save(1, contents())
        raise ZeroDivisionError
    assert "Could not write checkpoint" in caplog.text
    with pytest.raises(CheckpointError), CheckpointWriter(tmp_path, keep_last=2, asynchronous=True) as saver:
        saver.save(1, contents())


# ------------------------------------------------------------------------------------------ disks, kills


@WAYS
@pytest.mark.parametrize("limit", [100, 1500, 4000])
def test_a_full_disk_loses_nothing(tmp_path: Path, asynchronous: bool, limit: int) -> None:
    """The size limit of the process stands in for a full disk: both fail in the middle of a write."""
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
    assert re.search(r"update-000002: .* GB free\). Free space, .* --resume auto from update-000001", str(error.value))
    assert [p.name for p in tmp_path.iterdir()] == ["update-000001"]
    assert_holds(tmp_path / "update-000001", contents(1))
    saver.save(2, contents(2))
    saver.close()
    assert_holds(tmp_path / "update-000002", contents(2))


@WAYS
def test_a_file_in_the_way(tmp_path: Path, asynchronous: bool) -> None:
    (tmp_path / "checkpoints").write_text("a file")
    with (
        pytest.raises(CheckpointError, match="Could not write checkpoint .*from the beginning"),
        CheckpointWriter(tmp_path / "checkpoints", keep_last=1, asynchronous=asynchronous) as saver,
    ):
        saver.save(1, contents())
    assert (tmp_path / "checkpoints").read_text() == "a file"


CHILD = """
import sys, time
from pathlib import Path
import torch
from sage_fast.checkpoint import CheckpointData, CheckpointWriter

publish = CheckpointWriter._publish
def slow(self, update, files):
    time.sleep(float(sys.argv[2]) if update == 2 else 0)
    publish(self, update, files)
CheckpointWriter._publish = slow

saver = CheckpointWriter(Path(sys.argv[1]), keep_last=5, asynchronous=True)
for update in (1, 2):
    saver.save(update, CheckpointData(tensors={"weights": {"w": torch.ones(1000)}}, state={}))
print("saved", flush=True)
"""


def start_child(root: Path, seconds: float) -> "subprocess.Popen[str]":
    """A program that comes to its end while its second checkpoint has yet to be published."""
    call = [sys.executable, "-c", CHILD, str(root), str(seconds)]
    child = subprocess.Popen(call, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None and child.stdout.readline() == "saved\n"
    return child


def test_a_kill_while_writing_loses_nothing(tmp_path: Path) -> None:
    child = start_child(tmp_path, 60)
    child.send_signal(signal.SIGKILL)
    child.wait()
    left, good = sorted(tmp_path.iterdir())
    assert left.match(".update-000002.*.partial") and good.name == "update-000001"
    newest = newest_checkpoint(tmp_path)
    assert newest is not None and newest.folder.name == "update-000001"
    save(tmp_path, 3)
    assert [p.name for p in sorted(tmp_path.iterdir())] == ["update-000001", "update-000003"]


def test_an_earlier_attempt_that_has_not_ended_yet_publishes_nothing(tmp_path: Path, gate: threading.Event) -> None:
    """Its folder is removed, also while it writes there."""
    earlier = CheckpointWriter(tmp_path, keep_last=1, asynchronous=True)
    later = CheckpointWriter(tmp_path, keep_last=1, asynchronous=True)
    earlier.save(1, contents(1, rows=4))
    while not list(tmp_path.rglob("state.json")):  # all is written but the manifest
        time.sleep(0.01)
    later.save(1, contents(1, rows=3))
    gate.set()
    later.close()
    with pytest.raises(CheckpointError):
        earlier.close()
    assert_holds(tmp_path / "update-000001", contents(1, rows=3))
    assert [p.name for p in tmp_path.iterdir()] == ["update-000001"]


def test_a_program_that_ends_finishes_its_checkpoint(tmp_path: Path) -> None:
    assert start_child(tmp_path, 0.5).wait(30) == 0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["update-000001", "update-000002"]
    verify_checkpoint(tmp_path / "update-000002")


# ------------------------------------------------------------------------------------------ which one to trust


def test_what_resume_means(tmp_path: Path) -> None:
    assert find_checkpoint("auto", tmp_path / "nowhere") is None
    save(tmp_path, 1, 2)
    assert find_checkpoint("none", tmp_path) is None
    for resume, name in (("auto", "update-000002"), (str(tmp_path / "update-000001"), "update-000001")):
        found = find_checkpoint(resume, tmp_path)
        assert found is not None and found.folder == tmp_path / name
    with pytest.raises(CheckpointError, match="no checkpoint folder .*update-000009.*Give a folder such as"):
        find_checkpoint(str(tmp_path / "update-000009"), tmp_path)


@pytest.mark.parametrize("file", ["shards/__0_0.distcp", "shards/.metadata", "state.json", "manifest.json"])
@pytest.mark.parametrize("damage", ["truncated", "altered", "missing"])
def test_a_damaged_one_is_skipped_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, file: str, damage: str
) -> None:
    save(tmp_path, 1, 2)
    path = tmp_path / "update-000002" / file
    data = bytearray(path.read_bytes())
    if damage == "truncated":
        path.write_bytes(data[:-1])
    elif damage == "altered":
        data[len(data) // 2] ^= 1 if file != "manifest.json" else 0x80
        path.write_bytes(data)
    else:
        path.unlink()
    with pytest.raises(DamagedCheckpointError, match=re.escape(file if file != "manifest.json" else "update-000002")):
        open_checkpoint(tmp_path / "update-000002")
    found = newest_checkpoint(tmp_path)
    assert found is not None and found.folder.name == "update-000001"
    assert "Skipping a damaged checkpoint" in caplog.text and "update-000002" in caplog.text


def test_one_of_another_format_says_who_wrote_it(tmp_path: Path) -> None:
    """It is whole, so a run that would go on from an older one, or from the start, would throw it away."""
    save(tmp_path, 1)
    old = shutil.copytree(tmp_path / "update-000001", tmp_path / "update-000002")
    for version, wrote, manifest in (
        (1, "an earlier version", {"format_version": 1, "update": 2, "files": {}}),
        (3, "SAGE-Fast 9.1", {"format_version": 3, "sage_fast": "9.1", "update": 2, "files": {}}),
    ):
        (old / "manifest.json").write_text(json.dumps(manifest))
        for resume in ("auto", str(old)):
            with pytest.raises(CheckpointError, match=f"has checkpoint format {version}, which {wrote} wrote") as error:
                find_checkpoint(resume, tmp_path)
            assert "Finish that run with the version that started it, or start a new run" in str(error.value)


def test_one_tensor_is_in_memory_at_a_time(tmp_path: Path) -> None:
    names = [str(n) for n in range(16)]
    weights: dict[str, Tensor] = {name: torch.ones(2**20) for name in names}  # 4 MiB each
    with CheckpointWriter(tmp_path, keep_last=1) as saver:
        saver.save(1, CheckpointData(tensors={"weights": weights}, state={}))
    script = """
import re, sys
from pathlib import Path
from sage_fast.checkpoint import open_checkpoint
def peak(): return int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) / 1024
found = open_checkpoint(Path(sys.argv[1]))
found.read("weights", "0")
before = peak()
total = sum(float(value.sum()) for value in found.tensors["weights"].values())
print(total, peak() - before)
"""
    output = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "update-000001")],
        env=os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"},  # what is freed goes back to the system at once
        cwd=ROOT, capture_output=True, text=True, check=True, timeout=60,
    ).stdout  # fmt: skip
    total, grown = map(float, output.split())
    assert total == 16 * 2**20 and grown < 24, "MiB, of 64"
