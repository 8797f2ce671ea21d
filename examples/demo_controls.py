"""Controls of the demo: guidance alone, and training by rewards that say nothing.

    python -m examples.demo_controls SEED

It takes ten minutes on two CPU cores; docs/tutorials/demo.md has the results.
"""

import argparse
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from sage_fast import (
    Callback,
    EvaluationRecord,
    StopRun,
    TrainedRun,
    load_config,
    train,
)
from sage_fast.evaluation import Evaluation, format_comparison, paired_tests
from sage_fast.rewards.toy import ToyReward

WEIGHTS = {"VQ": 1.0, "MQ": 2.0, "TA": 1.0}


class Shuffled:
    """The demo's reward, but each video has that of another one of its batch."""

    def score(self, videos: Tensor, prompts: Sequence[str]) -> dict[str, Tensor]:
        scores = ToyReward().score(videos, prompts)
        weighted = [weight * scores[name] for name, weight in WEIGHTS.items()]
        reward = torch.stack(weighted).sum(0)
        # The videos are the seed, so that a run which goes on after an interruption
        # shuffles as it would have.
        generator = torch.Generator().manual_seed(int(videos.sum()))
        order = torch.randperm(len(reward), generator=generator)
        return {"shuffled": reward[order]}


class Stop(Callback):
    """Ends a run before its first update."""

    def on_evaluation(self, record: EvaluationRecord) -> None:
        raise StopRun("the base model is evaluated")


def evaluation(run: TrainedRun, update: int) -> Evaluation:
    """An evaluation of a run, whose reward is the demo's whatever the run was trained
    on.
    """
    found = Evaluation.load(run.output_dir / f"evaluation/update-{update:06d}.json")
    columns = [found.scores[name] for name in WEIGHTS]
    rewards = [
        sum(weight * score for weight, score in zip(WEIGHTS.values(), row, strict=True))
        for row in zip(*columns, strict=True)
    ]
    return replace(found, reward=rewards)


def main(words: Sequence[str] | None = None) -> None:
    """Train the controls of a seed, and print what they gain over the base model."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.demo_controls",
        description=(__doc__ or "").split("\n")[0],
    )
    parser.add_argument(
        "seed", type=int, metavar="SEED", help="of the demo that the controls are for"
    )
    seed = parser.parse_args(words).seed
    nothing = {"shuffled": 1.0, "VQ": 0.0, "MQ": 0.0, "TA": 0.0}
    run = load_config("toy_nft", {"seed": seed, "output_dir": f"runs/shuffled-{seed}"})
    shuffled = train(run, reward=[Shuffled(), "toy"], reward_weights=nothing)
    guided = train(
        "toy_cpu",
        callbacks=Stop(),
        output_dir=f"runs/guided-{seed}",
        rollout={"guidance_scale": 2.0},
    )
    base = evaluation(shuffled, 0)
    for what, found in (
        ("trained by shuffled rewards", evaluation(shuffled, 20)),
        ("not trained, guidance 2", evaluation(guided, 0)),
    ):
        print(what, format_comparison(paired_tests(base, found)), sep="\n")


if __name__ == "__main__":
    main()
