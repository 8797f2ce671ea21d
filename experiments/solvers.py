"""The evaluation by Euler's steps and by UniPC, at several numbers of steps.

    python -m experiments.solvers > docs/results/solvers.jsonl

Each line has one evaluation of the toy network as it was pretrained, on the prompts of
its preset; all start from the same noise. `gain` is over Euler with as many steps.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

import torch

from sage_fast.config.load import load_config
from sage_fast.config.schema import RunConfig
from sage_fast.evaluation import paired_test
from sage_fast.run.provenance import SOURCE_ROOT, git_commit
from sage_fast.run.run import build_trainer


def measure(config: RunConfig, steps: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Rows of both solvers."""
    trainer = build_trainer(config)
    for count in steps:
        euler: list[float] | None = None
        for solver in ("euler", "unipc"):
            asked: dict[str, Any] = {"num_steps": count, "solver": solver}
            trainer.config = replace(
                config, evaluation=replace(config.evaluation, **asked)
            )
            found = trainer.evaluate()
            euler = euler or found.reward
            gain = paired_test(euler, found.reward)
            scores = {"reward": found.reward, **found.scores}
            yield asked | {
                "prompts": len(found.prompts),
                "noises": found.noises,
                "gain": round(gain.mean, 4),
                "stderr": round(gain.stderr, 4),
                **{name: round(fmean(column), 4) for name, column in scores.items()},
            }


def main(words: Sequence[str] | None = None) -> None:
    """Command line of the module."""
    parser = argparse.ArgumentParser(prog="python -m experiments.solvers")
    parser.add_argument("--config", default="toy_cpu")
    parser.add_argument("--noises", type=int, default=4)
    parser.add_argument("--steps", type=int, nargs="+", default=[4, 8, 16])
    given = parser.parse_args(words)
    torch.set_num_threads(1)
    made = {"commit": git_commit(SOURCE_ROOT), "torch": torch.__version__}
    config = load_config(given.config, {"evaluation.noises": given.noises})
    for row in measure(config, given.steps):
        print(json.dumps(row | made), flush=True)


if __name__ == "__main__":
    main()
