"""python -m benchmarks <command> [options]."""

import importlib
import sys
from collections.abc import Sequence

SUITES = {
    "device": "everything that needs a GPU, most valuable first, into one JSON file",
    "kernels": (
        "every op of sage_kernels: GB/s, share of the copy bandwidth, ratio to eager "
        "and torch.compile"
    ),
    "transformer": (
        "9 layers, fused, against diffusers: forward, training step, rollout step; "
        "attention backends"
    ),
    "iteration": "one whole GRPO iteration of the true model",
    "decode": "decoding a video, against diffusers",
    "peers": (
        "updates of public trainers, by their own code in --public FOLDER, and ours "
        "in turns on a CPU"
    ),
    "cpu": (
        "the fused forward and diffusers' in turns on a CPU, which the guard holds on "
        "every change"
    ),
}
"""Command -> what it times."""
COMMANDS = {
    "guard": "exact budgets of benchmarks/budgets.yaml, and limits of timings",
    "report": (
        "tables and plots of committed results, and the parts of the documents that "
        "come from them"
    ),
}
"""Command -> what it does; each is a module with a main(argv)."""


def main(argv: Sequence[str]) -> int:
    """Run a command; returns the exit status."""
    if not argv or argv[0] not in SUITES | COMMANDS:
        if argv and not argv[0].startswith("-"):
            print(f"{argv[0]!r} is not a command.", file=sys.stderr)
        print(
            "usage: python -m benchmarks <command> [--smoke] [options]\n",
            file=sys.stderr,
        )
        for name, purpose in (SUITES | COMMANDS).items():
            print(f"  {name:13} {purpose}", file=sys.stderr)
        return 0 if argv and argv[0] in ("-h", "--help") else 2
    name, *rest = argv
    if name in SUITES:
        from benchmarks import session

        return session.main(name, rest, SUITES[name])
    status: int = importlib.import_module(f"benchmarks.{name}").main(rest)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
