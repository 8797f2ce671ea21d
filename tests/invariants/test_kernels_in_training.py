"""The convergence pair: the same toy trainings with the fused kernels and with plain PyTorch, number by number.

The two sides round differently (1e-7), and training amplifies that: a rollout feeds its own output back, and AdamW's
first updates follow the sign of a gradient. The bounds are some ten times what the pairs show; `test_fused_in_training`
shows that a layer that is wrong by a tenth of a percent does not fit into them.
"""

from collections.abc import Callable

import pytest
import torch

import sage_kernels
from sage_fast.config.errors import ConfigError
from sage_fast.config.schema import RunConfig
from sage_fast.kernels import REFERENCE, select_kernels
from sage_kernels.common import INTERPRETED
from tests.invariants.paired_training import STRONG, WEIGHTS_TOLERANCE, MakeRun, assert_same_metrics, distance, train

RUNS = {
    "on-policy": ["--objective.kl_mode=moving", "--rollout.num_steps=2"],
    "clipped-updates-exact-kl": [
        "--training.updates_per_rollout=2",
        "--objective.clip_range=1e-3",
        "--objective.kl_velocity=exact",
        "--rollout.sde_type=dance_grpo",
    ],
    "unnormalized-cps": [
        "--training.updates_per_rollout=2",
        "--rollout.sde_type=cps",
        "--objective.logprob=unnormalized",
        "--rollout.guidance_scale=1.0",
        "--training.mode=full",
    ],
    "ratio-norm-window": [
        "--training.updates_per_rollout=2",
        "--rollout.sde_type=flow_grpo",
        "--objective.ratio=ratio_norm",
        "--objective.equalizer=false",
        "--rollout.sde_window.size=2",
    ],
}


@pytest.fixture
def pair(tiny_run: MakeRun) -> Callable[..., tuple[RunConfig, RunConfig]]:
    # The transformer's own kernels would take minutes in the interpreter; their pair is in test_fused.py.
    stock = [*STRONG, "--model.forward=stock"]

    def make(*overrides: str) -> tuple[RunConfig, RunConfig]:
        return tuple(tiny_run(*stock, *overrides, f"--model.kernels={side}") for side in ("reference", "triton"))

    return make


# One of them in the quick tests: the interpreter takes its time.
CASES = [
    pytest.param(words, id=name, marks=[] if name == "on-policy" else [pytest.mark.slow])
    for name, words in RUNS.items()
]


@pytest.mark.parametrize("overrides", CASES)
def test_training_is_the_same_with_and_without_kernels(pair: Callable, overrides: list[str]) -> None:
    reference_config, fused_config = pair(*overrides)
    reference, fused = train(reference_config), train(fused_config)
    assert_same_metrics(reference, fused)
    assert distance(reference, fused) < WEIGHTS_TOLERANCE
    if "--training.updates_per_rollout=2" in overrides:
        assert any(r["ratio/max_deviation"] > 1e-6 for r in fused.records)
    else:
        assert all(r["ratio/max_deviation"] == 0.0 for r in fused.records)


def test_auto_is_the_reference_on_a_cpu_and_triton_on_a_gpu() -> None:
    assert select_kernels("auto", torch.device("cpu")) is REFERENCE
    assert select_kernels("auto", torch.device("cuda")) is sage_kernels
    assert select_kernels("reference", torch.device("cuda")) is REFERENCE
    if INTERPRETED:
        assert select_kernels("triton", torch.device("cpu")) is sage_kernels


def test_triton_on_a_cpu_without_the_interpreter_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sage_kernels.common.INTERPRETED", False)
    with pytest.raises(ConfigError, match=r"model\.kernels is 'triton'.*'cpu'.*TRITON_INTERPRET=1"):
        select_kernels("triton", torch.device("cpu"))


def test_triton_that_is_not_installed_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert select_kernels("auto", torch.device("cuda")) is REFERENCE
    with pytest.raises(ConfigError, match=r"not installed.*set model\.kernels to auto"):
        select_kernels("triton", torch.device("cuda"))
