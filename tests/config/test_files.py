"""Identity of files, and one process at a time."""

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from sage_fast.config.files import fingerprint, replacing


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    """Twelve MiB of tensors, so that most of the file is not read."""
    path = tmp_path / "model.safetensors"
    save_file({f"layer.{i}": torch.full((2**20,), float(i)) for i in range(3)}, path, metadata={"format": "pt"})
    return path


def test_a_copy_is_the_same(weights: Path, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    copy = tmp_path / "other" / weights.name
    copy.write_bytes(weights.read_bytes())
    os.utime(copy, (0, 0))
    assert fingerprint([copy]) == fingerprint([weights])
    renamed = weights.rename(weights.with_name("renamed.safetensors"))
    assert fingerprint([renamed]) != fingerprint([copy])


@pytest.mark.parametrize("layer", range(3))
def test_a_change_of_any_tensor_shows(weights: Path, layer: int) -> None:
    before = fingerprint([weights])
    tensors = load_file(weights)
    tensors[f"layer.{layer}"] = tensors[f"layer.{layer}"] + 1e-3
    save_file(tensors, weights, metadata={"format": "pt"})
    assert fingerprint([weights]) != before


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
    assert path.read_text() == "same" and [p.name for p in path.parent.iterdir()] == [path.name]
