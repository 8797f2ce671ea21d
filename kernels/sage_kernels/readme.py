"""The table of ops in kernels/README.md, made from the registry.

python -m sage_kernels.readme --write    renew it between its markers; without --write print it
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from sage_kernels.registry import specs
from sage_kernels.tracer import count_eager, count_op

README = Path(__file__).resolve().parents[1] / "README.md"
_BEGIN = "<!-- table of ops: begin -->\n"
_END = "<!-- table of ops: end -->\n"


def table() -> str:
    """The table of ops in Markdown. Megabytes are counted by the dispatch tracer on the
    meta device, case B.
    """
    lines = [
        "| op | formula | bytes forward, backward | MB forward: fused, eager | MB "
        "backward: fused, eager | reference "
        "| float32 error, bf16 k |",
        "|---|---|---|---|---|---|---|",
    ]
    for spec in specs().values():
        case = spec.bench_cases[1]
        fused, eager = (
            count(spec, case, spec.bench_dtype) for count in (count_op, count_eager)
        )
        megabytes = [
            f"{a.total / 1e6:.1f}, {b.total / 1e6:.1f}"
            for a, b in zip(fused, eager, strict=True)
        ]
        formula = spec.formula.replace("|", "\\|")
        traffic = ", ".join(filter(None, spec.bytes_formula))
        lines.append(
            f"| [{spec.name}](sage_kernels/ops/{spec.name}.py) | {formula} | {traffic} "
            f"| {megabytes[0]} | {megabytes[1]} | [plain "
            f"PyTorch](sage_kernels/reference/{spec.name}.py) "
            f"| {spec.atol_fp32:.0e}, {spec.k_bf16:g} |"
        )
    return "\n".join(lines) + "\n"


def with_table(text: str, rows: str) -> str:
    """README text with the part between its markers replaced.

    Raises:
        ValueError: the markers are not there.
    """
    before, begin, rest = text.partition(_BEGIN)
    _, end, after = rest.partition(_END)
    if not begin or not end:
        raise ValueError(
            f"kernels/README.md holds no lines {_BEGIN.strip()} and {_END.strip()} "
            "around the table"
        )
    return before + begin + rows + end + after


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m sage_kernels.readme", description=__doc__.split("\n")[0]
    )
    parser.add_argument(
        "--write", action="store_true", help=f"renew the table in {README.name}"
    )
    if parser.parse_args(argv).write:
        README.write_text(with_table(README.read_text("utf-8"), table()), "utf-8")
    else:
        print(table(), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
