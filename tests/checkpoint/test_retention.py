"""Checkpoints that stay: the newest, milestones, the best; and what an interrupted
deletion leaves.
"""

from pathlib import Path

import pytest

from sage_fast.checkpoint.folder import list_checkpoints
from sage_fast.checkpoint.reader import newest_checkpoint
from sage_fast.checkpoint.writer import CheckpointWriter
from tests.checkpoint.test_checkpoint import contents, save


def updates(root: Path) -> list[int]:
    return [int(folder.name[-6:]) for folder in list_checkpoints(root)]


def test_the_best_by_evaluation_stays_and_a_kill_changes_nothing(
    tmp_path: Path,
) -> None:
    scores = {1: 0.1, 2: 0.5, 3: 0.4, 4: 0.5, 5: 0.2}
    for update, score in scores.items():
        # each a separate process
        with CheckpointWriter(tmp_path, keep_last=1, asynchronous=True) as writer:
            writer.save(update, contents(update))
            writer.pin_best(update, score)
            writer.pin_best(update, score)
    assert updates(tmp_path) == [2, 5]
    with CheckpointWriter(tmp_path, keep_last=1) as writer:
        writer.save(6, contents(6))
        writer.pin_best(6, 0.6)
        writer.pin_best(0, 9.0)  # before training there is no checkpoint
        writer.save(7, contents(7))
    assert updates(tmp_path) == [6, 7]


def test_a_pin_of_updates_that_were_given_up_is_forgotten(tmp_path: Path) -> None:
    """The run went back to update 1; what it made before of update 3 says nothing of
    the new update 3.
    """
    with CheckpointWriter(tmp_path, keep_last=9) as writer:
        for update in (1, 2, 3):
            writer.save(update, contents(update))
        writer.pin_best(3, 9.0)
        (tmp_path / "update-000003").rename(tmp_path / "abandoned-update-000003")
        writer.save(2, contents(2))
        writer.pin_best(2, 0.5)
        writer.save(3, contents(3))
        writer.pin_best(3, 0.4)
    save(tmp_path, 4, keep_last=1)
    assert updates(tmp_path) == [2, 4]
    (tmp_path / "update-000002").rename(tmp_path / "abandoned-update-000002")
    with CheckpointWriter(tmp_path, keep_last=1) as writer:
        writer.pin_best(4, 0.1)
        writer.save(5, contents(5))
    assert updates(tmp_path) == [4, 5]


def test_a_damaged_newer_checkpoint_is_not_the_best(tmp_path: Path) -> None:
    """The run passed over update 4 and went on from update 1: what it makes now
    competes with that alone.
    """
    save(tmp_path, 1, 4)
    with CheckpointWriter(tmp_path, keep_last=1) as writer:
        writer.pin_best(4, 9.0)
        (tmp_path / "update-000004/state.json").write_text("{}")
        writer.save(2, contents(2))
        writer.pin_best(2, 0.5)
        writer.save(3, contents(3))
    assert (
        updates(tmp_path) == [2, 3, 4]
        and '"update": 2' in (tmp_path / "best.json").read_text()
    )


@pytest.mark.parametrize("content", ['{"update": 1', "[]", "{}"])
def test_a_damaged_pin_is_named_and_replaced(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, content: str
) -> None:
    save(tmp_path, 1, keep_last=1)
    (tmp_path / "best.json").write_text(content)
    with CheckpointWriter(tmp_path, keep_last=1) as writer:
        writer.save(2, contents(2))
        writer.pin_best(2, 0.1)
        writer.save(3, contents(3))
    assert "best.json is damaged" in caplog.text and updates(tmp_path) == [2, 3]


def test_a_deletion_that_is_cut_short_leaves_no_half_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def stuck(*_: object, **__: object) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr("sage_fast.checkpoint.writer.shutil.rmtree", stuck)
        save(tmp_path, 1, 2, keep_last=1)
    newest = newest_checkpoint(tmp_path)
    assert (
        newest is not None
        and updates(tmp_path) == [2]
        and "could not be deleted" in caplog.text
    )
    assert len(list(tmp_path.glob(".update-000001.*.partial"))) == 1
