"""What the compiler made of the kernels, read from kernels/aot.json.

Building every kernel takes minutes. `python -m sage_kernels.aot --write` does it, and a test holds the file to what it
writes, so the guard reads the file.
"""

import json

from sage_kernels.aot import RECORDS, Build


def compiled_kernels(arch: int) -> list[Build]:
    """Builds for an architecture (90 for sm_90).

    Raises:
        ValueError: the file has none.
    """
    rows = json.loads(RECORDS.read_text("utf-8"))["builds"]
    found = [Build(**row) for row in rows if row["arch"] == arch]
    if not found:
        raise ValueError(f"{RECORDS} has no build for sm_{arch}. Write it anew: python -m sage_kernels.aot --write.")
    return found
