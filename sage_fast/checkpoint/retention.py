"""Which checkpoints of a run are kept: the newest, a milestone every so many updates, and the best by evaluation."""

import json
import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from sage_fast.checkpoint.folder import update_of
from sage_fast.config.files import write_text

BEST = "best.json"

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Best:
    """The checkpoint with the highest score so far, as `best.json` beside the checkpoints names it.

    Example: `Best(update=40, score=0.61)`
    """

    update: int
    score: float


def read_best(root: Path) -> Best | None:
    """The pinned checkpoint of a run; None without one. A file that is cut or altered is ignored with a warning.

    Raises:
        OSError: the file is there and cannot be read.
    """
    path = root / BEST
    try:
        best = Best(**json.loads(path.read_bytes()))
        if type(best.update) is not int or not isinstance(best.score, int | float):
            raise ValueError("an update and a score are expected")
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, RecursionError) as error:
        logger.warning("%s is ignored, because it is damaged (%s); the next best evaluation replaces it.", path, error)
        return None
    return best


def write_best(root: Path, best: Best) -> None:
    """Replace the pin. OSError when that fails; the old one is then untouched."""
    write_text(root / BEST, json.dumps(asdict(best)))


def superfluous(folders: Sequence[Path], *, keep_last: int, keep_every: int | None, best: int | None) -> list[Path]:
    """The checkpoints that a run no longer needs.

    Args:
        folders: all of them, oldest first.
        keep_last: how many of the newest are kept.
        keep_every: the first checkpoint at or after each multiple of this is kept; None keeps no milestones.
        best: update of the one that is pinned.
    """
    kept = {update_of(folder) for folder in folders[-keep_last:]}
    if best is not None:
        kept.add(best)
    if keep_every is not None:
        milestones: dict[int, int] = {}
        for update in map(update_of, folders):
            milestones.setdefault(update // keep_every, update)
        milestones.pop(0, None)  # no multiple has been reached
        kept.update(milestones.values())
    return [folder for folder in folders if update_of(folder) not in kept]
