"""Ranks that deal out the trained videos of a group leave the gradient of one process,
in float64.
"""

import math
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from sage_fast import trainer as trainer_module
from sage_fast.objectives.base import gather_terms
from tests.distributed.ranks import build, run_ranks, write_run
from tests.tiny.velocity_field import move_weights, relative, use_smooth_velocity

VIDEOS = 16
STEPS = 3
COMMON = [
    "--optimizer.max_grad_norm=1e9",
    "--kl_weight.minimum=0.5",
    "--kl_weight.maximum=0.5",
]
UPDATES = {
    "two_phase": ["--objective.kl_mode=dual", "--rollout.guidance_scale=2"],
    "forward_process": [
        "--objective.kl_mode=moving",
        "--training.update=forward_process",
        "--rollout.sde_type=ode",
        f"--forward_process.levels={STEPS}",
    ],
}
SPLITS = {
    # trained videos, which are the first ones; videos of a micro-batch; videos of every
    # rank once they are dealt out
    "a-rank-with-none": (6, 1, [[0, 1], [4, 5], [2, 3], [12, 13]]),
    "in-twos": (8, 2, [[0, 1], [4, 5], [2, 3], [6, 7]]),
}


class Trained(NamedTuple):
    """Sum of the gradient over the ranks, terms of all, passes of this rank, and its
    videos among all.
    """

    gradient: Tensor
    terms: tuple[Tensor, ...]
    passes: int
    rows: list[int]


def train(file: str, words: list[str], chosen: int) -> Trained:
    """One update of weights that have moved from their anchor and from the policy that
    sampled.

    chosen: trained videos of a group.
    """
    trainer = build(file, words)
    objective = trainer.objective
    engine = trainer.engine
    passes = []
    vjp = engine.vjp
    engine.vjp = lambda *arguments: (passes.append(1), vjp(*arguments))
    with pytest.MonkeyPatch.context() as patch:
        use_smooth_velocity(trainer, patch)
        first = torch.arange(VIDEOS)[None] < chosen
        patch.setattr(trainer_module, "best_and_worst", lambda *_: first)
        if objective.old is not None:
            objective.old = engine.snapshot()
        move_weights(trainer)
        objective.begin(0, 0)
        with objective.sampling():
            sampled = trainer._rollout()
        scored, _ = trainer._score(*sampled)
        assert not sampled[0] or trainer.world.size == 1, (
            "what is not trained frees its memory"
        )
        objective.measure(scored)
        terms = objective.accumulate(scored, range(STEPS), 0)
        terms, fault = gather_terms(scored, terms, range(STEPS), trainer.world)
        engine.clip_gradients()
        objective.verify(terms, 0)
    assert fault is None
    gradient = torch.cat([p.grad.flatten() for p in trainer.parameters.values()])
    return Trained(gradient, tuple(terms), len(passes), scored.own.tolist())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("update", "split"),
    [
        ("two_phase", "a-rank-with-none"),
        ("two_phase", "in-twos"),
        ("forward_process", "a-rank-with-none"),
    ],
)
def test_dealt_videos_have_the_gradient_of_one_process(
    update: str, split: str, tiny_model: Path, tmp_path: Path
) -> None:
    chosen, size, dealt = SPLITS[split]
    file = write_run(
        tiny_model,
        tmp_path,
        rollout={
            "num_generations": VIDEOS,
            "batch_size": VIDEOS,
            "micro_batch_size": size,
            "num_steps": STEPS,
        },
        training={"best_and_worst": chosen // 2},
        reward={
            "rewards": ["tests.distributed.rewards:Brightness"],
            "weights": {"brightness": 1.0},
        },
    )
    words = [*COMMON, *UPDATES[update]]
    (one,) = run_ranks(train, 1, file, words, chosen)
    ranks = len(dealt)
    found = run_ranks(
        train, ranks, file, [*words, f"--rollout.batch_size={VIDEOS // ranks}"], chosen
    )
    batches = chosen // size
    assert one.passes == STEPS * batches == sum(rank.passes for rank in found)
    assert max(rank.passes for rank in found) == STEPS * math.ceil(batches / ranks)
    assert [rank.rows for rank in found] == dealt
    for rank in found:
        assert relative(rank.gradient, one.gradient) < 1e-12
        assert all(
            torch.equal(given, expected)
            for given, expected in zip(rank.terms, one.terms, strict=True)
        )
