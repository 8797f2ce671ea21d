"""SAGE-Fast: GRPO post-training of HunyuanVideo-1.5. Importing this package loads nothing heavy."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sage_fast.models.hunyuan15.fused import Acceleration, accelerate

__all__ = ["Acceleration", "accelerate"]

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    # diffusers takes seconds to import.
    if name in __all__:
        from sage_fast.models.hunyuan15 import fused

        return getattr(fused, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
