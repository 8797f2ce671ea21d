"""Sessions without a file, and results made up in their format."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from benchmarks.session import Session

MakeSession = Callable[..., Session]


@pytest.fixture
def session() -> MakeSession:
    """Makes a smoke session on the CPU; `cells` are known already."""

    def make(cells: dict[str, Any] | None = None, **options: Any) -> Session:
        result = {"environment": {}, "smoke": True, "cells": dict(cells or {})}
        return Session(
            **{"device": torch.device("cpu"), "smoke": True, "result": result} | options
        )

    return make
