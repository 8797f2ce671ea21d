"""Opening a checkpoint runs no code, whoever has written it."""

import os
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

import sage_fast
from sage_fast.checkpoint.folder import describe_files, write_manifest
from sage_fast.checkpoint.reader import find_checkpoint, open_checkpoint
from sage_fast.config.errors import CheckpointError, DamagedCheckpointError
from tests.checkpoint.test_checkpoint import save


class Prepared:
    """A pickle that makes a folder when it is read."""

    def __init__(self, evidence: Path) -> None:
        self.evidence = evidence

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return os.mkdir, (str(self.evidence),)


def replace_metadata(folder: Path, data: bytes) -> None:
    """Put other bytes into `.metadata`, with a manifest that agrees."""
    (folder / "shards/.metadata").write_bytes(data)
    (folder / "manifest.json").unlink()
    write_manifest(
        folder, 2, describe_files((p for p in folder.rglob("*") if p.is_file()), folder)
    )


def test_a_prepared_pickle_does_nothing(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    evidence = tmp_path / "evidence"
    save(root, 1, 2)
    folder = root / "update-000002"
    metadata = pickle.loads((folder / "shards/.metadata").read_bytes())
    metadata.planner_data = Prepared(evidence)
    replace_metadata(folder, pickle.dumps(metadata))
    with pytest.raises(
        CheckpointError, match=r"calls for posix.mkdir, .* Nothing in it was run"
    ) as error:
        find_checkpoint("auto", root)
    # A damaged one would be passed over, and the run go on from an older one.
    assert not evidence.exists() and not isinstance(error.value, DamagedCheckpointError)
    pickle.loads((folder / "shards/.metadata").read_bytes())
    assert evidence.exists(), "the pickle was harmless"


def leads_elsewhere(metadata: Any) -> None:
    for place in metadata.storage_data.values():
        place.relative_path = "../../other/__0_0.distcp"


def holds_an_object(metadata: Any) -> None:
    metadata.state_dict_metadata["weights.w"] = BytesStorageMetadata()


def is_too_large(metadata: Any) -> None:
    metadata.state_dict_metadata["weights.transposed"].size = torch.Size([2**62, 2**62])


def has_no_storage(metadata: Any) -> None:
    metadata.storage_data = None


@pytest.mark.parametrize(
    "change",
    [
        leads_elsewhere,
        holds_an_object,
        is_too_large,
        has_no_storage,
        b"",
        b"cposix\nsystem\n(S'false'\ntR.",
    ],
)
def test_metadata_that_no_checkpoint_has_is_refused(
    tmp_path: Path, change: Callable[[Any], None] | bytes
) -> None:
    """Descriptions that were changed, and other pickles in their place."""
    save(tmp_path, 1)
    folder = tmp_path / "update-000001"
    metadata = pickle.loads((folder / "shards/.metadata").read_bytes())
    if callable(change):
        change(metadata)
    replace_metadata(folder, pickle.dumps(metadata) if callable(change) else change)
    with pytest.raises(
        CheckpointError, match="does not describe a checkpoint's tensors"
    ):
        open_checkpoint(folder)


def test_metadata_of_another_python_is_read(tmp_path: Path) -> None:
    """Python 3.13 writes paths by the name `pathlib._local`, which others lack."""
    save(tmp_path, 1)
    folder = tmp_path / "update-000001"
    metadata = pickle.loads((folder / "shards/.metadata").read_bytes())
    # Protocol 2 has names as lines, of any length.
    text, count = re.subn(
        rb"cpathlib(\._local)?\n",
        b"cpathlib._local\n",
        pickle.dumps(metadata, protocol=2),
    )
    assert count == 1
    replace_metadata(folder, text)
    assert open_checkpoint(folder).shapes["weights"]


def test_a_prepared_shard_does_nothing(tmp_path: Path) -> None:
    """torch reads every tensor of a shard with weights_only."""
    save(tmp_path, 1)
    checkpoint = open_checkpoint(tmp_path / "update-000001")
    evidence = tmp_path / "evidence"
    torch.save(Prepared(evidence), tmp_path / "update-000001/shards/__0_0.distcp")
    for place in checkpoint._shards._metadata.storage_data.values():
        place.offset = 0
        place.length = (tmp_path / "update-000001/shards/__0_0.distcp").stat().st_size
    with pytest.raises(CheckpointError, match="cannot be read"):
        checkpoint.read("weights", "blocks.0.weight")
    assert not evidence.exists()


UNSAFE = re.compile(
    r"(?<![.\w])(eval|exec)\(|\bpickle\.loads?\(|torch\.hub\.load\(|joblib\.load\("
    r"|YAML\((?!typ=.safe.)|torch\.load\((?![^)]*weights_only=True)"
    r"|(allow_pickle|trust_remote_code)=(?!False)"
)


def test_no_module_reads_a_file_in_a_way_that_runs_code() -> None:
    """torch.load with weights_only, no pickle, no unsafe YAML, no code from a hub."""
    for bad in ("torch.load(file)", "eval(text)", "YAML()", "x(allow_pickle=True)"):
        assert UNSAFE.search(bad)
    for path in Path(sage_fast.__file__).parent.rglob("*.py"):
        assert not UNSAFE.search(path.read_text(encoding="utf-8")), path
