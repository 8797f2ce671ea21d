"""Errors that end a command with a message instead of a traceback. Light: the command
line imports it before torch.
"""

import errno
from pathlib import Path


def shown(value: object, most: int = 80) -> str:
    """A value for a message, cut after so many characters."""
    text = repr(value)
    return text if len(text) <= most else f"{text[:most]}..."


class SageError(Exception):
    """The message says what happened and what to change; nothing else needs to be
    shown.
    """


class ConfigError(SageError, ValueError):
    """A configuration that cannot run; the message names the key, the value and the
    fix.
    """


class RunDirectoryError(SageError, RuntimeError):
    """A run directory that another run writes, that is gone, or that holds a file which
    cannot be used.
    """


class TrainingError(SageError, RuntimeError):
    """The run cannot go on; the message says at which update, why, and what to do."""


class RewardError(SageError, RuntimeError):
    """A reward raised, or returned something that is not one finite number per video."""


class RewardServerError(SageError, RuntimeError):
    """The server of a reward does not answer, or is not the one that the run began
    with: no video is at fault.
    """


class CallbackError(SageError, RuntimeError):
    """A callback of the user's own raised; the run was saved before it ended.
    `__cause__` is what was raised.
    """


class DecodeError(SageError, RuntimeError):
    """Latents could not be turned into pixels; the message says why and what to change."""


class CheckpointError(SageError, RuntimeError):
    """A checkpoint that cannot be written, found, trusted, or used by this run."""


class DamagedCheckpointError(CheckpointError):
    """A checkpoint that was not written completely, or has changed since."""


class UnreadableCheckpointError(CheckpointError):
    """A checkpoint, or the folder of them, that the system refuses to read. It may be
    whole, so nothing replaces it.

    Attributes:
        path: what could not be read.
        reason: why, such as "EACCES: Permission denied".

    Example: `UnreadableCheckpointError(Path("runs/a/checkpoints"), "ESTALE: Stale file
    handle")`
    """

    def __init__(self, path: Path, reason: str) -> None:
        # the arguments, so that the error survives the way to another rank
        super().__init__(path, reason)
        self.path = path
        self.reason = reason

    @classmethod
    def of(cls, path: Path, error: OSError) -> "UnreadableCheckpointError":
        """Wrap an OSError for `path`."""
        name = errno.errorcode.get(error.errno or 0, type(error).__name__)
        return cls(path, f"{name}: {error.strerror or error}")

    def __str__(self) -> str:
        return (
            f"{self.path} cannot be read ({self.reason}). It may be undamaged, so "
            "nothing was started in its place. "
            "Restore access (permissions, mount, disk) and try again. To go on "
            "without it, move that checkpoint's "
            "folder elsewhere, or name an older checkpoint by --resume PATH."
        )


def printable(text: str) -> str:
    """A text of a file or of a server without what a terminal would obey: control
    characters become escapes.
    """
    return "".join(
        c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in text
    )


class RankFailure(SageError, RuntimeError):
    """Another rank has died, failed or hung; the message names it, its phase and its
    prompt.
    """
