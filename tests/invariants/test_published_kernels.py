"""The kernels that are published are the ones that training runs, in the variants that
the benchmark times.

A variant of an operator is what its arguments switch: which optional ones are absent,
and the value of every bool. One iteration of each kind of training is recorded;
operators stand in for their launchers meanwhile and run their plain twins, which takes
a fraction of the interpreter's time.
"""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import sage_kernels
from sage_fast.run.run import build_trainer
from sage_kernels import common, launchers, registry
from sage_kernels.tracer import backward_call
from tests.models.wan import test_fused as wan
from tests.run.test_run import MakeRun

SPECS = registry.specs()
WANS = "qk_norm_across_heads"
"""The kernel that Wan alone has; the tiny runs are of HunyuanVideo-1.5's class."""
OPTIONS = [
    [
        "--training.update=single_pass",
        "--training.guidance=split",
        "--rollout.micro_batch_size=1",
    ],
    ["--training.mode=full"],
    ["--training.update=forward_process", "--objective.kl_mode=none"],
    ["--objective.kl_mode=none", "--lora.target_modules=[attn.to_q,attn.to_k]"],
    ["--objective.ratio=ratio_norm", "--objective.equalizer=false"],
    ["--objective.ratio=bias_corrected"],
    [
        "--objective.ratio=unnormalized",
        "--objective.equalizer=false",
        "--rollout.sde_type=cps",
    ],
]

Variant = tuple[str, tuple[tuple[str, object], ...]]


class Recorder(TorchDispatchMode):
    """Variants of the operators of sage_kernels that were called."""

    def __init__(self) -> None:
        super().__init__()
        self.variants: set[Variant] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func.namespace == "sage_kernels":
            self.variants.add(
                (func.overloadpacket.__name__, switches(func, args, kwargs or {}))
            )
        return func(*args, **(kwargs or {}))


def switches(func: Any, args: Any, kwargs: Any) -> tuple[tuple[str, object], ...]:
    """Optional arguments and whether they were given, bool arguments and their values."""
    found: list[tuple[str, object]] = []
    for position, argument in enumerate(func._schema.arguments):
        default = argument.default_value if argument.has_default_value() else None
        value = (
            args[position]
            if position < len(args)
            else kwargs.get(argument.name, default)
        )
        if str(argument.type).startswith("Optional"):
            found.append((argument.name, value is not None))
        elif str(argument.type) == "bool":
            found.append((argument.name, value))
    return tuple(found)


def benchmark_variants() -> set[Variant]:
    """Cases of the benchmark, on the meta device."""
    with Recorder() as recorder:
        for spec in SPECS.values():
            for case in spec.bench_cases:
                inputs = spec.make_inputs(case, spec.bench_dtype, "meta", None)
                spec.op(**inputs)
                if spec.differentiable:
                    backward_call(spec, case, inputs)()
    return recorder.variants


def test_training_runs_what_the_benchmark_times_and_nothing_else(
    tiny_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log-probability alone is there for other trainers."""
    timed = benchmark_variants()
    monkeypatch.setattr(common, "runs_triton", lambda tensor: tensor.is_cuda)
    for name in launchers.__all__:
        operator = getattr(
            torch.ops.sage_kernels, name, getattr(sage_kernels, name, None)
        )
        monkeypatch.setattr(launchers, name, operator)
    trained: set[Variant] = set()
    small = [
        "--model.kernels=triton",
        "--rollout.num_steps=2",
        "--rollout.batch_size=2",
        "--rollout.micro_batch_size=2",
    ]
    for overrides in OPTIONS:
        trainer = build_trainer(tiny_run(*small, *overrides))
        with Recorder() as recorder:
            trainer.iterate()
        # The forward process has no log-probability.
        without = {WANS}
        if "--training.update=forward_process" in overrides:
            without.add("policy_loss")
        called = {name.removesuffix("_backward") for name, _ in recorder.variants}
        assert called == set(SPECS) - without, overrides
        trained |= recorder.variants
    for kind in ("full", "lora"):
        model = wan.transformer(kind, torch.float32)
        wan.fuse(model, kernels="triton", attention="reference")
        with Recorder() as recorder:
            wan.compute(model, (2, 4, 4), None)
        trained |= {
            variant for variant in recorder.variants if variant[0].startswith(WANS)
        }
    assert trained <= timed
    assert timed - trained == {("sde_step", (("noise_ids", True), ("log_prob", True)))}
    for name in {name for name, _ in timed}:
        variants = [dict(arguments) for other, arguments in timed if other == name]
        assert all(
            any(variant[argument] for variant in variants) for argument in variants[0]
        ), name
    published = {
        name for name in vars(torch.ops.sage_kernels) if not name.startswith("_")
    }
    assert published - {"name"} == {name for name, _ in timed}
