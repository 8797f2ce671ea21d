"""Tiny checkpoints that the tests of the loading code share; copy one before changing
it.
"""

from pathlib import Path

import pytest
from diffusers import HunyuanVideo15Pipeline

from tests.tiny.checkpoints import build_pipeline


@pytest.fixture(scope="session")
def pipeline() -> HunyuanVideo15Pipeline:
    """The stock pipeline whose weights the checkpoint holds."""
    return build_pipeline()


@pytest.fixture(scope="session")
def diffusers_checkpoint(
    pipeline: HunyuanVideo15Pipeline, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    folder = tmp_path_factory.mktemp("diffusers")
    pipeline.save_pretrained(folder)
    return folder
