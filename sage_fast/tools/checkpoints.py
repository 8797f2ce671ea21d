"""The checkpoint of a run that is meant by a word, and a warning where another one is
better.
"""

import logging

from sage_fast.checkpoint.folder import checkpoint_name, read_best, update_of
from sage_fast.checkpoint.reader import Checkpoint, find_checkpoint, open_checkpoint
from sage_fast.config.errors import ConfigError
from sage_fast.evaluation import describe_worse
from sage_fast.run.directory import RunDirectory, read_metrics

logger = logging.getLogger(__name__)

TRAINED_MODEL = r"model\.family|lora\..*|training\.mode"
"""Keys that say which model a checkpoint's weights belong to."""


def choose_checkpoint(chosen: str, directory: RunDirectory) -> Checkpoint | None:
    """The checkpoint of a run that is meant; None for `none`.

    Args:
        chosen: `auto` (the newest; a warning says where the run's evaluations found it
            worse than its start or its best), `best` (of the best evaluation), `none`,
            or a checkpoint folder.
        directory: of the run.

    Raises:
        ConfigError: there is none. CheckpointError: it is damaged.
    """
    root = directory.checkpoints
    if chosen == "best":
        if (best := read_best(root)) is None:
            raise ConfigError(
                f"{root} holds no checkpoint that an evaluation found best. Give "
                "--checkpoint auto or a folder, or "
                "train with evaluation.every above 0."
            )
        return open_checkpoint(root / checkpoint_name(best[0]))
    found = find_checkpoint(chosen, root)
    if found is None and chosen == "auto":
        raise ConfigError(
            f"{root} holds no complete checkpoint. Continue training, or give "
            "--checkpoint FOLDER, or for `generate` "
            "--checkpoint none, the model that the run starts from."
        )
    # Checkpoints may have been copied from elsewhere without what the run has measured.
    if found is not None and chosen == "auto" and directory.metrics.exists():
        _warn_of_better(directory, update_of(found.folder))
    return found


def _warn_of_better(directory: RunDirectory, update: int) -> None:
    """Say where the run's last evaluation up to an update is worse than its start or
    its best.
    """
    gains = {
        row["update"]: (row["eval/paired_gain"], row["eval/paired_gain_stderr"])
        for row in read_metrics(directory.metrics)
        if "eval/paired_gain" in row and row["update"] <= update
    }
    if (worse := describe_worse(gains)) is not None:
        logger.warning("The newest checkpoint is %s.", worse)
    best = read_best(directory.checkpoints)
    if gains and best is not None and best[1] > gains[max(gains)][0]:
        logger.warning(
            "The newest checkpoint is worse than update %d, whose gain was %+.3g: "
            "--checkpoint best takes that one.",
            *best,
        )
