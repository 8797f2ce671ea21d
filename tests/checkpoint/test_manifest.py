"""Every altered bit of a checkpoint is found, and distinguished from a checkpoint that
cannot be read.
"""

import errno
import hashlib
import io
import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from sage_fast.checkpoint.folder import (
    agree,
    list_checkpoints,
    verify_checkpoint,
    write_manifest,
)
from sage_fast.checkpoint.reader import newest_checkpoint
from sage_fast.checkpoint.writer import CheckpointData, CheckpointWriter
from sage_fast.config.errors import DamagedCheckpointError, UnreadableCheckpointError
from sage_fast.distributed.world import World
from tests.checkpoint.test_checkpoint import save


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """A checkpoint with an adapter, one file of which is written after `save` has
    returned.
    """

    def adapter(folder: Path) -> Callable[[], object]:
        save_file({"a": torch.ones(1)}, folder / "adapter.safetensors")
        return lambda: (folder / "README.md").write_text("written later")

    data = CheckpointData(
        tensors={"weights": {"w": torch.ones(2)}}, state={"update": 1}
    )
    with CheckpointWriter(tmp_path, keep_last=1) as writer:
        return writer.save(1, data, extra=adapter)


def overwrite(file: io.FileIO, position: int, byte: int) -> None:
    file.seek(position)
    file.write(bytes([byte]))


def test_every_flipped_bit_is_damage(tiny: Path) -> None:
    """Every bit of the manifest, and one of every byte of the other files."""
    for path in (p for p in tiny.rglob("*") if p.is_file()):
        with path.open("r+b", buffering=0) as file:
            for position, byte in enumerate(path.read_bytes()):
                for bit in range(8) if path.name == "manifest.json" else [position % 8]:
                    overwrite(file, position, byte ^ 1 << bit)
                    with pytest.raises(DamagedCheckpointError, match=path.name):
                        verify_checkpoint(tiny)
                overwrite(file, position, byte)
    verify_checkpoint(tiny)


ENTRY = {"bytes": 13, "sha256": "0" * 64}
GOOD = {"state.json": ENTRY, "shards/.metadata": ENTRY}


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"state.json": ENTRY},
        GOOD | {"../../secret": ENTRY},
        GOOD | {"/etc/passwd": ENTRY},
        GOOD | {"a\0b": ENTRY},
    ],
    ids=str,
)
def test_a_made_up_manifest_is_damage(tiny: Path, files: Any) -> None:
    """With a digest that is right, as somebody who means harm would write it."""
    make_up(tiny, files)
    with pytest.raises(DamagedCheckpointError, match="no intact manifest.json"):
        verify_checkpoint(tiny)


def make_up(folder: Path, files: Any) -> None:
    manifest = json.loads((folder / "manifest.json").read_bytes()) | {"files": files}
    del manifest["sha256"]
    digest = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
    (folder / "manifest.json").write_text(json.dumps(manifest | {"sha256": digest}))


def test_the_size_of_a_file_counts_beside_its_sum(tiny: Path) -> None:
    """Of a file that another machine wrote and this one sees in part, nothing becomes a
    checkpoint.
    """
    files = json.loads((tiny / "manifest.json").read_bytes())["files"]
    files["state.json"]["bytes"] += 1
    with pytest.raises(OSError, match="state.json is not what its writer has left"):
        write_manifest(tiny, 1, files)
    make_up(tiny, files)
    with pytest.raises(
        DamagedCheckpointError, match="state.json is missing, truncated or altered"
    ):
        verify_checkpoint(tiny)


@pytest.mark.parametrize("text", ["", "[]", "[" * 100_000])
def test_other_text_is_damage(tiny: Path, text: str) -> None:
    (tiny / "manifest.json").write_text(text)
    with pytest.raises(DamagedCheckpointError):
        verify_checkpoint(tiny)


# --------------------------------------------------------------------------------------
# unreadable


def refuse(monkeypatch: pytest.MonkeyPatch, path: Path, code: int) -> None:
    """Let the system refuse to open or list a path, as it does to others than root or
    when a server is gone.
    """

    def refusing(call: Any) -> Any:
        def wrapped(target: Any, *arguments: Any, **options: Any) -> Any:
            if isinstance(target, str | os.PathLike) and Path(target) == path:
                raise OSError(code, os.strerror(code), str(target))
            return call(target, *arguments, **options)

        return wrapped

    monkeypatch.setattr(io, "open", refusing(io.open))
    # what Path.iterdir asks before Python 3.13, and since
    monkeypatch.setattr(os, "listdir", refusing(os.listdir))
    monkeypatch.setattr(os, "scandir", refusing(os.scandir))


@pytest.mark.parametrize(
    ("file", "code"),
    [
        ("manifest.json", errno.EACCES),
        ("state.json", errno.ESTALE),
        ("shards/.metadata", errno.EIO),
        ("shards/__0_0.distcp", errno.ESTALE),
    ],
)
def test_a_newest_checkpoint_that_cannot_be_read_stops_the_search(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, file: str
) -> None:
    save(tmp_path, 1, 2, 3)
    # nobody asks for it
    refuse(monkeypatch, tmp_path / "update-000001/manifest.json", code)
    assert newest_checkpoint(tmp_path).folder.name == "update-000003"  # type: ignore[union-attr]
    path = tmp_path / "update-000003" / file
    refuse(monkeypatch, path, code)
    with pytest.raises(UnreadableCheckpointError, match="try again") as error:
        newest_checkpoint(tmp_path)
    assert error.value.path == path and errno.errorcode[code] in error.value.reason


def test_a_folder_that_cannot_be_listed_is_not_an_empty_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 1)
    refuse(monkeypatch, tmp_path, errno.EIO)
    for look in (list_checkpoints, newest_checkpoint):
        with pytest.raises(UnreadableCheckpointError, match="EIO"):
            look(tmp_path)


def test_what_one_rank_cannot_read_is_more_than_what_another_finds_damaged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else all would pass over a checkpoint that may be whole."""
    of_ranks = [
        DamagedCheckpointError("altered"),
        UnreadableCheckpointError(Path("a"), "ESTALE"),
    ]
    for failures in (of_ranks, of_ranks[::-1]):
        monkeypatch.setattr(
            World, "gather", lambda self, value, failures=failures: failures
        )
        with pytest.raises(UnreadableCheckpointError):
            agree(World(), lambda: None)


def test_only_names_of_checkpoints_count(tmp_path: Path) -> None:
    for name in (
        "update-000002",
        "update-1000000",
        "update-999999",
        "update-000003-copy",
        "abandoned-update-000004",
    ):
        (tmp_path / name).mkdir()
    assert [p.name for p in list_checkpoints(tmp_path)] == [
        "update-000002",
        "update-999999",
        "update-1000000",
    ]


def test_every_file_has_the_permissions_that_the_umask_allows(tiny: Path) -> None:
    """safetensors makes files that nobody else may read."""
    other = tiny / "other"
    other.touch()
    assert {stat.S_IMODE(p.stat().st_mode) for p in tiny.rglob("*") if p.is_file()} == {
        stat.S_IMODE(other.stat().st_mode)
    }
