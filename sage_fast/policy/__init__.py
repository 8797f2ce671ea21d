"""The policy: HunyuanVideo-1.5's velocity, fast or plain, and what is trained of it.

from sage_fast.policy import accelerate
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sage_fast.policy.fused import Acceleration, accelerate

__all__ = ["Acceleration", "accelerate"]


def __getattr__(name: str) -> Any:
    # diffusers takes seconds to import, and many submodules of this package do without it.
    if name in __all__:
        from sage_fast.policy import fused

        return getattr(fused, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
