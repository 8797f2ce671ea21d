"""The checkpoint of a run that is meant by a word, and a warning where another one is
better.
"""

import logging

from sage_fast.checkpoint.folder import checkpoint_name, read_best, update_of
from sage_fast.checkpoint.reader import Checkpoint, find_checkpoint, open_checkpoint
from sage_fast.config.errors import ConfigError
from sage_fast.run.directory import RunDirectory
from sage_fast.run.results import decline

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
        text = decline(directory, update_of(found.folder))
        if text is not None:
            logger.warning("%s", text)
    return found
