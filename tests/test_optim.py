"""The optimizers: who gets which weight, decay, and the schedule of a run that goes on."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.optim import AdamW, Muon

from sage_fast.config.sections import OptimizerConfig
from sage_fast.optim import OptimizerSet, ShardedMuon


def parameter(*shape: int, seed: int = 0) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape, generator=torch.Generator().manual_seed(seed)))


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[DeviceMesh]:
    """A mesh of this process alone."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.parametrize("name", ["muon", "adamw"])
def test_without_a_gradient_only_the_decay_moves_a_weight(name: str) -> None:
    weight, bias = parameter(4, 6), parameter(6, seed=1)
    before = [weight.detach().clone(), bias.detach().clone()]
    config = OptimizerConfig(name=name, learning_rate=0.5, weight_decay=0.1)  # type: ignore[arg-type]
    optimizer = OptimizerSet({"proj.weight": weight, "proj.bias": bias}, config)
    weight.grad, bias.grad = torch.zeros_like(weight), torch.zeros_like(bias)
    optimizer.step()
    for value, old in zip((weight, bias), before, strict=True):
        torch.testing.assert_close(value.detach(), (1 - 0.5 * 0.1) * old)


def test_sharded_muon_is_muon(mesh: DeviceMesh) -> None:
    """Three steps of a wide and a high matrix, decay included."""
    settings = {"lr": 0.1, "weight_decay": 0.3, "momentum": 0.95, "adjust_lr_fn": "match_rms_adamw"}
    whole = [parameter(8, 24), parameter(24, 8, seed=1)]
    shards = [nn.Parameter(distribute_tensor(p.detach().clone(), mesh, [Shard(0)])) for p in whole]
    plain, sharded = Muon(whole, **settings), ShardedMuon(shards, **settings)  # type: ignore[arg-type]
    for step in range(3):
        for i, (p, shard) in enumerate(zip(whole, shards, strict=True)):
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(10 * step + i))
            shard.grad = distribute_tensor(p.grad.clone(), mesh, [Shard(0)])
        plain.step()
        sharded.step()
    for p, shard in zip(whole, shards, strict=True):
        # Orthogonalised in bfloat16 in both, from values that were rounded before or after the gathering.
        torch.testing.assert_close(shard.detach().full_tensor(), p.detach(), rtol=1e-2, atol=2e-3)


def test_muon_leaves_embeddings_to_adamw() -> None:
    parameters = {"token_embed.weight": parameter(4, 4), "proj.weight": parameter(4, 4), "proj.bias": parameter(4)}
    muon, adamw = OptimizerSet(parameters, OptimizerConfig(name="muon")).optimizers
    assert isinstance(muon, Muon) and muon.param_groups[0]["params"] == [parameters["proj.weight"]]
    rest = [parameters["token_embed.weight"], parameters["proj.bias"]]
    assert isinstance(adamw, AdamW) and all(a is b for a, b in zip(adamw.param_groups[0]["params"], rest, strict=True))


def test_the_schedule_goes_on_where_it_was() -> None:
    config = OptimizerConfig(name="adamw", learning_rate=0.8, warmup_updates=4)

    def made() -> OptimizerSet:
        weight = parameter(3, 3)
        weight.grad = torch.ones_like(weight)
        return OptimizerSet({"proj.weight": weight}, config)

    whole, rates = made(), []
    for _ in range(6):
        rates.append(whole.learning_rate)
        whole.step()
    assert rates == pytest.approx([0.2, 0.4, 0.6, 0.8, 0.8, 0.8])
    resumed = made()
    resumed.load_schedule({"updates": 2})
    assert resumed.learning_rate == rates[2] == resumed.optimizers[0].param_groups[0]["lr"]
    resumed.step()
    assert resumed.learning_rate == rates[3] == resumed.optimizers[0].param_groups[0]["lr"]
