"""What the compiler made of the kernels, read from docs/kernels_aot.md.

Building every kernel takes minutes. `python -m sage_kernels.aot --write` does it, and a test holds the file to what it
writes, so the guard reads the file.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "kernels_aot.md"


@dataclass(frozen=True, kw_only=True)
class CompiledKernel:
    """One row of the table.

    Example: `CompiledKernel(name="gelu_tanh_forward[bf16]", arch=90, registers=26, local=0, spills=0, narrowest=16)`
    """

    name: str
    arch: int
    """90 for sm_90."""
    registers: int
    """A thread."""
    local: int
    """Bytes of stack and local memory a thread."""
    spills: int
    """Instructions that load from or store to local memory."""
    narrowest: int | None
    """Bytes a thread of the narrowest access to a stream; None for a kernel without streams."""

    def op(self, names: Sequence[str]) -> str:
        """Which of the ops it belongs to: the longest name that its own begins with."""
        return max((name for name in names if self.name.startswith(name)), key=len, default="of no op")


def compiled_kernels(arch: int) -> list[CompiledKernel]:
    """Rows of an architecture.

    Raises:
        ValueError: the file has no row of this architecture.
    """
    found = []
    for line in DOCUMENT.read_text("utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if len(cells) == 9 and cells[1] == f"sm_{arch}":
            name, _, _, registers, local, spills, _, loads, stores = cells
            widths = [
                int(width)
                for group in f"{loads}; {stores}".split(";")
                if "**" in group
                for width in re.split("/", group.split()[-1])
            ]
            found.append(
                CompiledKernel(
                    name=name,
                    arch=arch,
                    registers=int(registers),
                    local=int(local),
                    spills=int(spills),
                    narrowest=min(widths, default=None),
                )
            )
    if not found:
        raise ValueError(f"{DOCUMENT} has no row for sm_{arch}. Write it anew: python -m sage_kernels.aot --write.")
    return found
