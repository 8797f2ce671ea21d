"""A configuration file for the commands."""

from collections.abc import Callable
from pathlib import Path

import pytest

from sage_fast.config.load import dump_config
from sage_fast.config.schema import RunConfig


@pytest.fixture
def config_file(tiny_run: Callable[..., RunConfig], tmp_path: Path) -> Path:
    """A configuration that no run was made of."""
    file = tmp_path / "new.yaml"
    file.write_text(dump_config(tiny_run()))
    return file
