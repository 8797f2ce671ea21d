"""The global random generators of a process. The project draws from none of them, but a custom reward may."""

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch


def seed_generators(seed: int) -> None:
    """Seed Python's, NumPy's and torch's generators, CUDA's included."""
    random.seed(seed)
    np.random.seed([seed % 2**32, seed >> 32])
    torch.manual_seed(seed)


def generator_state() -> dict[str, Any]:
    """The state of all of them, fit for JSON. CUDA's, one per device, where this process uses CUDA."""
    version, words, gauss = random.getstate()
    name, keys, *position = np.random.get_state(legacy=True)
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return {
        "python": [version, list(words), gauss],
        "numpy": [name, np.asarray(keys).tolist(), *position],
        "torch": torch.get_rng_state().numpy().tobytes().hex(),
        "cuda": [state.numpy().tobytes().hex() for state in cuda],
    }


def load_generator_state(state: Mapping[str, Any]) -> None:
    """Take over what `generator_state` returned. States of devices that this machine lacks are left out.

    Checkpoints of earlier versions lack NumPy's and CUDA's states; those generators stay as they are.
    """
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    if "numpy" in state:
        name, keys, *position = state["numpy"]
        np.random.set_state((name, np.array(keys, dtype=np.uint32), *position))
    torch.set_rng_state(_from_hex(state["torch"]))
    for device, text in zip(range(torch.cuda.device_count()), state.get("cuda", []), strict=False):
        torch.cuda.set_rng_state(_from_hex(text), device)


def _from_hex(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)
