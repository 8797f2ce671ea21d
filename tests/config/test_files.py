"""Identity of files, and one process at a time."""

import errno
import os
import re
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from sage_fast.config.files import LEFT_AFTER, fingerprint, loads, replacing, write_text


def test_a_copy_is_the_same_and_a_change_of_any_tensor_shows(tmp_path: Path) -> None:
    """Twelve MiB of tensors, so that most of the file is not read."""
    tensors = {f"layer.{i}": torch.full((2**20,), float(i)) for i in range(3)}
    path = tmp_path / "model.safetensors"
    copy = tmp_path / "other/model.safetensors"
    copy.parent.mkdir()
    save_file(tensors, path)
    copy.write_bytes(path.read_bytes())
    os.utime(copy, (0, 0))
    same = fingerprint([path])
    assert fingerprint([copy]) == same
    assert fingerprint([path.rename(tmp_path / "renamed.safetensors")]) != same
    for name, values in tensors.items():
        save_file(tensors | {name: values + 1e-3}, copy)
        assert fingerprint([copy]) != same, name


def test_other_files_and_sizes_show(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    content = bytearray(8 * 2**20)
    seen = set()
    for place in (None, 0, 2**20, 7 * 2**20):
        if place is not None:
            content[place] += 1
        path.write_bytes(content)
        seen.add(fingerprint([path]))
    path.write_bytes(content[:-1])
    seen.add(fingerprint([path]))
    (tmp_path / "config.json").write_text("{}")
    seen.add(fingerprint([path, tmp_path / "config.json"]))
    assert len(seen) == 6
    assert fingerprint([tmp_path / "config.json", path]) in seen, "in any order"


def test_two_nodes_may_write_the_same_file_at_once(tmp_path: Path) -> None:
    """Processes of two containers may have the same number, as these two writers have."""
    path = tmp_path / "deep/prompt.safetensors"
    with replacing(path) as one, replacing(path) as other:
        one.write_text("same")
        other.write_text("same")
    assert path.read_text() == "same" and [p.name for p in path.parent.iterdir()] == [
        path.name
    ]


@pytest.mark.parametrize(
    ("age", "stays"),
    [(2 * LEFT_AFTER, False), (LEFT_AFTER / 2, True)],
    ids=["left", "written"],
)
def test_what_a_killed_process_left_goes_with_the_next_file_of_its_folder(
    age: float, stays: bool, tmp_path: Path
) -> None:
    """One that somebody still writes has a date of just now."""
    half = [
        tmp_path / name
        for name in (".status.json.7-0f.partial", ".other.mp4.8-aa.partial")
    ]
    for file in (*half, tmp_path / "mine.partial", tmp_path / ".hidden"):
        file.touch()
        os.utime(file, (time.time() - age, time.time() - age))
    write_text(tmp_path / "index.html", "page")
    assert all(file.exists() == stays for file in half)
    assert (tmp_path / "mine.partial").exists() and (tmp_path / ".hidden").exists()


def test_an_error_of_a_write_names_the_file(tmp_path: Path) -> None:
    """The system's own names a descriptor at most."""
    path = tmp_path / "scores.json"
    with pytest.raises(OSError, match=re.escape(str(path))), replacing(path):
        raise OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(PermissionError, match="elsewhere"), replacing(path):
        raise PermissionError(errno.EACCES, "Permission denied", "elsewhere")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"a":' * 100_000, "{", "", "\0", b"\xff"], ids=range(6)
)
def test_whatever_is_wrong_with_a_json_text_is_a_value_error(text: str | bytes) -> None:
    with pytest.raises(ValueError, match="."):
        loads(text)


@pytest.mark.parametrize("lasting", [True, False])
def test_a_file_that_must_last_is_on_disk_before_its_name_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lasting: bool
) -> None:
    events: list[tuple[str, str]] = []
    rename = os.replace

    def synced(descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        events.append(("sync", path.read_text() if path.is_file() else path.name))

    def renamed(source: Path, target: Path) -> None:
        events.append(("rename", target.name))
        rename(source, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", renamed)
    write_text(tmp_path / "new/words.txt", "all of it", lasting=lasting)
    content = ("sync", "all of it")
    name = ("rename", "words.txt")
    entry = ("sync", "new")
    assert events == ([content, name, entry] if lasting else [name])
