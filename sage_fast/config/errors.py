"""What a mistake of the user raises, apart from everything heavy: the command line imports it before torch."""


class ConfigError(ValueError):
    """A configuration that cannot run; the message names the key, the value and the fix."""
