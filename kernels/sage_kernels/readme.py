"""The table of ops in kernels/README.md, made from the registry.

    python -m sage_kernels.readme --write    renew it between its markers; without --write print it

The bandwidth column is read from benchmarks/results/<gpu>/<date>-<commit>.json, newest last, as far as those files
hold cells of the suite "kernels" (`benchmarks.session` has their format).
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from sage_kernels.registry import specs
from sage_kernels.tracer import count_eager, count_op

README = Path(__file__).resolve().parents[1] / "README.md"
RESULTS = README.parents[1] / "benchmarks" / "results"
_BEGIN, _END = "<!-- table of ops: begin -->\n", "<!-- table of ops: end -->\n"


def bandwidths(results: Path = RESULTS) -> dict[str, str]:
    """Op -> achieved bandwidth of case B with the file it comes from, from the newest run of a GPU."""
    found: dict[str, str] = {}
    for file in sorted(results.glob("*/*.json"), key=lambda path: path.name):
        cells = json.loads(file.read_text("utf-8")).get("cells", {}).values()
        rows = [row for cell in cells if cell.get("suite") == "kernels" for row in cell.get("rows", [])]
        rows = [row for row in rows if (row["contender"], row["shape"]) == ("ours", "B")]
        for op in {row["op"] for row in rows}:
            parts = [
                f"{row['step'].removeprefix(op).strip()} {row['rate']:.0f} GB/s ({row['share']:.0%} of copy)"
                for row in rows
                if row["op"] == op
            ]
            found[op] = f"{', '.join(parts)}, {file.parent.name}/{file.name}"
    return found


def table() -> str:
    """The table of ops in Markdown. Megabytes are counted by the dispatch tracer on the meta device, case B."""
    measured = bandwidths()
    lines = [
        "| op | formula | bytes forward, backward | MB forward: fused, eager | MB backward: fused, eager | reference "
        "| float32 error, bf16 k | bandwidth |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for spec in specs().values():
        case = spec.bench_cases[1]
        fused, eager = (count(spec, case, spec.bench_dtype) for count in (count_op, count_eager))
        megabytes = [f"{a.total / 1e6:.1f}, {b.total / 1e6:.1f}" for a, b in zip(fused, eager, strict=True)]
        formula, traffic = spec.formula.replace("|", "\\|"), ", ".join(filter(None, spec.bytes_formula))
        lines.append(
            f"| [{spec.name}](sage_kernels/ops/{spec.name}.py) | {formula} | {traffic} "
            f"| {megabytes[0]} | {megabytes[1]} | [plain PyTorch](sage_kernels/reference/{spec.name}.py) "
            f"| {spec.atol_fp32:.0e}, {spec.k_bf16:g} | {measured.get(spec.name, 'not measured')} |"
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
        raise ValueError(f"kernels/README.md holds no lines {_BEGIN.strip()} and {_END.strip()} around the table")
    return before + begin + rows + end + after


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m sage_kernels.readme", description=__doc__.split("\n")[0])
    parser.add_argument("--write", action="store_true", help=f"renew the table in {README.name}")
    if parser.parse_args(argv).write:
        README.write_text(with_table(README.read_text("utf-8"), table()), "utf-8")
    else:
        print(table(), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
