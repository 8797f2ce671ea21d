"""Two trainings side by side, compared number by number."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
from torch import Tensor

from sage_fast.config.schema import RunConfig
from sage_fast.run.run import build_trainer

MakeRun = Callable[..., RunConfig]

STRONG = [
    *("--kl_weight.minimum=1.0", "--kl_weight.maximum=1.0", "--training.anchor_interval=2"),
    "--optimizer.learning_rate=1e-2",
]
"""Steps and KL weights large enough for every term of the loss to count."""

METRIC_TOLERANCE = {"rel": 1e-3, "abs": 2e-6}
# Rewards are measured on 8-bit videos: a pixel at the edge between two values may fall on either side.
REWARD_TOLERANCE = {"rel": 1e-3, "abs": 1e-4}
WEIGHTS_TOLERANCE = 2e-4


@dataclass(frozen=True)
class Training:
    """Results of a run: its metrics, the first and the last weights."""

    records: list[dict[str, float]]
    start: dict[str, Tensor]
    weights: dict[str, Tensor]


def train(config: RunConfig) -> Training:
    trainer = build_trainer(config)
    start = {name: p.detach().clone() for name, p in trainer.parameters.items()}
    records = [trainer.iterate() for _ in range(3)]
    return Training(records, start, {name: p.detach().clone() for name, p in trainer.parameters.items()})


def distance(one: Training, other: Training) -> float:
    """Distance of the final weights over the distance that training moved them."""
    gap = sum(float((one.weights[n] - w).double().square().sum()) for n, w in other.weights.items())
    way = sum(float((one.weights[n] - w).double().square().sum()) for n, w in one.start.items())
    return (gap / way) ** 0.5


def assert_same_metrics(one: Training, other: Training) -> None:
    for expected, record in zip(one.records, other.records, strict=True):
        assert record.keys() == expected.keys()
        for name, value in expected.items():
            if not name.startswith("time/"):
                tolerance = REWARD_TOLERANCE if name.startswith(("reward/", "advantage/")) else METRIC_TOLERANCE
                assert record[name] == pytest.approx(value, **tolerance), name
