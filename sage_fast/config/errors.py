"""What ends a command with a message instead of a traceback. Light: the command line imports it before torch."""


class SageError(Exception):
    """The message says what happened and what to change; nothing else needs to be shown."""


class ConfigError(SageError, ValueError):
    """A configuration that cannot run; the message names the key, the value and the fix."""


class RunDirectoryError(SageError, RuntimeError):
    """A run directory that another run writes, that is gone, or that holds a file which cannot be used."""


class TrainingError(SageError, RuntimeError):
    """The run cannot go on; the message says at which update, why, and what to do."""


class RewardError(SageError, RuntimeError):
    """A reward raised, or returned something that is not one finite number per video."""


class DecodeError(SageError, RuntimeError):
    """Latents could not be turned into pixels; the message says why and what to change."""


class CheckpointError(SageError, RuntimeError):
    """A checkpoint that cannot be written, found, trusted, or used by this run."""


class DamagedCheckpointError(CheckpointError):
    """A checkpoint that was not written completely, or has changed since."""


class RankFailure(SageError, RuntimeError):
    """Another rank has died, failed or hung; the message names it, its phase and its prompt."""
