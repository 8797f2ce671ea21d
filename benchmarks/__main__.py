"""python -m benchmarks <command> [options]."""

import importlib
import sys
from collections.abc import Sequence

COMMANDS = {
    "kernels": "every op of sage_kernels: GB/s, share of the copy bandwidth, ratio to eager and torch.compile",
    "policy": "the full-size transformer, fused, against diffusers: forward, training step, rollout step",
    "blocks": "one transformer block, fused, against diffusers as shipped, packed and compiled",
    "vae": "decoding a video, against diffusers",
    "sharded": "a train step under FSDP2 on one rank, against the same unwrapped; full fine-tuning with CPU offload",
    "trainer_costs": "what surrounds the model: an iteration of the toy run, saving a checkpoint, the host's share",
    "guard": "exact budgets of benchmarks/budgets.yaml on any machine, the committed baseline on a GPU",
    "device": "everything that needs a GPU, most valuable first, into one JSON file",
    "levers": "what each option is worth, predicted from counted work",
    "report": "tables and plots of committed results, and the parts of the documents that come from them",
}
"""Command -> what it does; each is the module of the same name with a main(argv)."""


def main(argv: Sequence[str]) -> int:
    """Run a command; returns the exit status."""
    if not argv or argv[0] not in COMMANDS:
        wrong = f"{argv[0]!r} is no command.\n" if argv and not argv[0].startswith("-") else ""
        print(f"{wrong}usage: python -m benchmarks <command> [--smoke] [options]\n", file=sys.stderr)
        for name, purpose in COMMANDS.items():
            print(f"  {name:13} {purpose}", file=sys.stderr)
        return 0 if argv and argv[0] in ("-h", "--help") else 2
    status: int = importlib.import_module(f"benchmarks.{argv[0]}").main(argv[1:])
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
