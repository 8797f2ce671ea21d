"""The convergence pairs: the same toy trainings with a fast path and with its plain
twin, number by number.

The two sides round differently (1e-7), and training amplifies that: a rollout feeds its
own output back, and AdamW's first updates follow the sign of a gradient. The bounds are
some ten times what the pairs show.
"""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

import sage_kernels
from sage_fast.config.errors import ConfigError
from sage_fast.config.schema import RunConfig
from sage_fast.kernels import REFERENCE, select_kernels
from sage_fast.run.run import build_trainer
from tests.run.test_run import MakeRun

STRONG = [
    *(
        "--kl_weight.minimum=1.0",
        "--kl_weight.maximum=1.0",
        "--training.anchor_interval=2",
    ),
    "--optimizer.learning_rate=1e-2",
]
"""Steps and KL weights large enough for every term of the loss to count."""

METRIC_TOLERANCE = {"rel": 1e-3, "abs": 2e-6}
# Rewards are measured on 8-bit videos: a pixel at the edge between two values may fall
# on either side.
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
    records = [trainer.iterate() for _ in range(2)]
    return Training(
        records,
        start,
        {name: p.detach().clone() for name, p in trainer.parameters.items()},
    )


def distance(one: Training, other: Training) -> float:
    """Distance of the final weights over the distance that training moved them."""
    gap = sum(
        float((one.weights[n] - w).double().square().sum())
        for n, w in other.weights.items()
    )
    way = sum(
        float((one.weights[n] - w).double().square().sum())
        for n, w in one.start.items()
    )
    return (gap / way) ** 0.5


def assert_same_metrics(one: Training, other: Training) -> None:
    for expected, record in zip(one.records, other.records, strict=True):
        assert record.keys() == expected.keys()
        for name, value in expected.items():
            if not name.startswith("time/"):
                tolerance = (
                    REWARD_TOLERANCE
                    if name.startswith(("reward/", "advantage/"))
                    else METRIC_TOLERANCE
                )
                assert record[name] == pytest.approx(value, **tolerance), name


# ------------------------------------------------------------------------------ the
# fused forward and diffusers' own


FUSED_RUNS = {
    "lora-guided-ragged": "rollout.guidance_scale=3.0 objective.kl_mode=moving "
    "rollout.batch_size=8 rollout.micro_batch_size=8 rollout.num_steps=2",
    "lora-feed-forward-selective": "rollout.sde_type=cps model.checkpointing=selective "
    "lora.target_modules=[attn.to_q,attn.to_out.0,ff.net.0.proj,ff.net.2,ff_context.net.0.proj]",
    "full": "training.mode=full model.checkpointing=full training.updates_per_rollout=2",
}


@pytest.mark.parametrize("name", FUSED_RUNS)
def test_training_is_the_same_with_the_stock_and_the_fused_forward(
    tiny_run: MakeRun, name: str
) -> None:
    overrides = [f"--{word}" for word in FUSED_RUNS[name].split()]
    same = [word for word in overrides if not word.startswith("--model.checkpointing")]
    stock = train(tiny_run(*STRONG, *same, "--model.forward=stock"))
    fused = train(tiny_run(*STRONG, *overrides))
    assert_same_metrics(stock, fused)
    assert distance(stock, fused) < WEIGHTS_TOLERANCE
    assert fused.records[0]["ratio/first_max_deviation"] == 0.0


# --------------------------------------------------------------------------------------
# Triton kernels and plain PyTorch


KERNEL_RUNS = {
    "on-policy": "objective.kl_mode=moving rollout.num_steps=2 "
    "rollout.batch_size=2 rollout.micro_batch_size=2",
    "clipped-updates": (
        "training.updates_per_rollout=2 objective.clip_range=1e-3 "
        "rollout.sde_type=dance_grpo"
    ),
    "unnormalized-cps": "training.updates_per_rollout=2 rollout.sde_type=cps objective.ratio=unnormalized "
    "rollout.guidance_scale=1.0 training.mode=full",
    "ratio-norm-window": "training.updates_per_rollout=2 rollout.sde_type=flow_grpo "
    "objective.ratio=ratio_norm "
    "objective.equalizer=false rollout.sde_window.size=2",
}


# One of them in the quick tests: the interpreter takes its time.
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] * (name != "on-policy"))
        for name in KERNEL_RUNS
    ],
)
def test_training_is_the_same_with_and_without_kernels(
    tiny_run: MakeRun, name: str
) -> None:
    overrides = [f"--{word}" for word in KERNEL_RUNS[name].split()]
    # The transformer's own kernels would take minutes in the interpreter; theirs are
    # above.
    words = [*STRONG, "--model.forward=stock", *overrides]
    reference, fused = (
        train(tiny_run(*words, f"--model.kernels={side}"))
        for side in ("reference", "triton")
    )
    assert_same_metrics(reference, fused)
    assert distance(reference, fused) < WEIGHTS_TOLERANCE
    if "--training.updates_per_rollout=2" in overrides:
        assert any(r["ratio/max_deviation"] > 1e-6 for r in fused.records)
    else:
        assert all(r["ratio/max_deviation"] == 0.0 for r in fused.records)


def test_auto_is_the_reference_on_a_cpu_and_triton_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cpu = torch.device("cpu")
    cuda = torch.device("cuda")
    assert select_kernels("auto", cpu) is select_kernels("reference", cuda) is REFERENCE
    assert select_kernels("auto", cuda) is sage_kernels
    monkeypatch.setattr("sage_kernels.common.INTERPRETED", False)
    with pytest.raises(
        ConfigError, match=r"model\.kernels is 'triton'.*'cpu'.*TRITON_INTERPRET=1"
    ):
        select_kernels("triton", cpu)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert select_kernels("auto", cuda) is REFERENCE
    with pytest.raises(ConfigError, match=r"not installed.*set model\.kernels to auto"):
        select_kernels("triton", cuda)
