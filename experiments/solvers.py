"""The evaluation by Euler's steps and by UniPC, at several numbers of steps.

    python -m experiments.solvers > docs/results/solvers.jsonl

Each line has one evaluation of the toy network as it was pretrained, on the prompts and
noises of its preset. `error` is the distance of the final latents of the first noise
from those of many Euler steps, relative to these.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sage_fast.config.load import load_config
from sage_fast.config.schema import RunConfig
from sage_fast.evaluation import Evaluation, paired_test
from sage_fast.rollout import evaluation_sampler, initial_latents
from sage_fast.run.provenance import SOURCE_ROOT, git_commit
from sage_fast.run.run import build_trainer
from sage_fast.trainer import Trainer

EXACT = 256
"""Steps of Euler's that stand for the flow itself."""


def first_latents(trainer: Trainer) -> Tensor:
    """Final latents (P, C, F, H, W) of the first noise of each prompt."""
    config = trainer.config
    initial = partial(initial_latents, shape=trainer.evaluation_latent_shape)
    sampler = evaluation_sampler(
        config.rollout,
        config.evaluation,
        trainer.policy,
        lambda prompt: trainer.embed(prompt.text),
        initial,
    )
    return sampler(
        sampler.samples((prompt, 0) for prompt in trainer.eval_prompts)
    ).final


def measure(config: RunConfig, steps: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Rows of both solvers; those of UniPC have the paired gain over Euler."""
    trainer = build_trainer(config)
    asked = partial(replace, config.evaluation)

    def take(**changes: Any) -> None:
        trainer.config = replace(config, evaluation=asked(**changes))

    take(num_steps=EXACT)
    exact = first_latents(trainer)
    for count in steps:
        found: dict[str, Evaluation] = {}
        for solver in ("euler", "unipc"):
            take(num_steps=count, solver=solver)
            found[solver] = trainer.evaluate()
            error = (first_latents(trainer) - exact).norm() / exact.norm()
            gain = paired_test(found["euler"].reward, found[solver].reward)
            scores = {"reward": found[solver].reward, **found[solver].scores}
            yield {
                "solver": solver,
                "steps": count,
                "prompts": len(found[solver].prompts),
                "noises": config.evaluation.noises,
                "error": round(float(error), 4),
                "gain": round(gain.mean, 4),
                "gain_stderr": round(gain.stderr, 4),
                **{
                    name: round(sum(column) / len(column), 4)
                    for name, column in scores.items()
                },
            }


def main(words: Sequence[str] | None = None) -> None:
    """Command line of the module."""
    parser = argparse.ArgumentParser(prog="python -m experiments.solvers")
    parser.add_argument("--config", default="toy_cpu")
    parser.add_argument("--steps", type=int, nargs="+", default=[4, 8, 16])
    given = parser.parse_args(words)
    torch.set_num_threads(1)
    made = {"commit": git_commit(SOURCE_ROOT), "torch": torch.__version__}
    for row in measure(load_config(given.config), given.steps):
        print(json.dumps(row | made), flush=True)


if __name__ == "__main__":
    main()
