"""The type that every reference computes in."""

import torch


def compute_dtype(*dtypes: torch.dtype) -> torch.dtype:
    """float64 if any of the types is, else float32. Results are rounded once, when they
    are stored.
    """
    return torch.float64 if torch.float64 in dtypes else torch.float32
