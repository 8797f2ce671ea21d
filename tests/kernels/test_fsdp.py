"""Every op inside a module that FSDP2 shards over two gloo processes."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils._pytree import tree_leaves

from sage_kernels import registry
from sage_kernels.registry import OpSpec
from tests.distributed.ranks import run_ranks

WORLD_SIZE = 2


class OpModule(nn.Module):
    """An op whose differentiable inputs are parameters; its loss is a fixed random
    projection of the outputs.
    """

    def __init__(self, spec: OpSpec) -> None:
        super().__init__()
        self.spec = spec
        case = next(case for case in spec.test_cases if case.id == "odd")
        self.inputs: dict[str, Any] = spec.make_inputs(
            case, torch.float32, "cpu", torch.Generator().manual_seed(0)
        )
        for name in spec.differentiable:
            setattr(self, name, nn.Parameter(self.inputs.pop(name)))

    def forward(self, seed: int) -> Tensor:
        parameters = {name: getattr(self, name) for name in self.spec.differentiable}
        outputs = self.spec.with_gradient(
            tree_leaves(self.spec.op(**self.inputs, **parameters))
        )
        generator = torch.Generator().manual_seed(seed)
        return torch.stack(
            [
                (out * torch.randn(out.shape, generator=generator)).sum()
                for out in outputs
            ]
        ).sum()


def gradients(module: OpModule, seed: int) -> dict[str, Any]:
    module.zero_grad()
    module(seed).backward()
    return {name: parameter.grad for name, parameter in module.named_parameters()}


def largest_differences() -> dict[str, float]:
    """By op: sharded over the ranks, each with its own loss, against the mean of the
    ranks' plain gradients.
    """
    torch.distributed.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (WORLD_SIZE,))
    rank = torch.distributed.get_rank()
    found: dict[str, float] = {}
    for op, spec in registry.specs().items():
        if not spec.differentiable:
            continue
        plain = [gradients(OpModule(spec), seed) for seed in range(WORLD_SIZE)]
        sharded = gradients(fully_shard(OpModule(spec), mesh=mesh), rank)
        for name, gradient in sharded.items():
            expected = sum(each[name] for each in plain) / WORLD_SIZE
            error = (
                gradient.full_tensor() - expected
            ).abs().max() / expected.square().mean().sqrt()
            found[f"{op}, {name}"] = float(error)
    return found


@pytest.mark.slow
def test_sharded_gradients_are_the_mean_of_the_ranks() -> None:
    for found in run_ranks(largest_differences, WORLD_SIZE):
        assert {name: error for name, error in found.items() if error > 1e-6} == {}
        assert len(found) == sum(
            len(spec.differentiable) for spec in registry.specs().values()
        )
