"""Optimizers and the learning-rate schedule.

Both optimizers are torch's own. Muon orthogonalises matrices only, so biases, norms and embeddings go to AdamW; with
`match_rms_adamw` Muon's updates have AdamW's size, and one learning rate serves both.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import AdamW, Muon, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from sage_fast.config.sections import OptimizerConfig


class OptimizerSet:
    """One or more optimizers over disjoint parameters, with one learning-rate schedule, stepped as one.

    Args:
        parameters: qualified name -> trained parameter.
        config: the run's optimizer section.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], config: OptimizerConfig) -> None:
        self.names = {parameter: name for name, parameter in parameters.items()}
        self.parameters = list(parameters.values())
        self.max_grad_norm = config.max_grad_norm
        matrices: list[nn.Parameter] = []
        others: list[nn.Parameter] = []
        for name, parameter in parameters.items():
            is_matrix = parameter.ndim == 2 and "embed.weight" not in name
            (matrices if config.name == "muon" and is_matrix else others).append(parameter)
        self.optimizers: list[Optimizer] = []
        if matrices:
            muon = ShardedMuon if any(isinstance(p, DTensor) for p in matrices) else Muon
            self.optimizers.append(
                muon(
                    matrices,
                    lr=config.learning_rate,
                    momentum=0.95,
                    weight_decay=config.weight_decay,
                    adjust_lr_fn="match_rms_adamw",
                )
            )
        if others:
            self.optimizers.append(
                AdamW(
                    others,
                    lr=config.learning_rate,
                    betas=config.betas,
                    eps=config.eps,
                    weight_decay=config.weight_decay,
                )
            )
        warmup = config.warmup_updates

        def rise(update: int) -> float:
            return min(1.0, (update + 1) / warmup) if warmup else 1.0

        self.schedulers = [LambdaLR(optimizer, rise) for optimizer in self.optimizers]

    @property
    def learning_rate(self) -> float:
        """Rate of the next step."""
        return float(self.schedulers[0].get_last_lr()[0])

    def clip_gradients(self) -> float:
        """Scale gradients to the configured global norm; returns the norm before scaling. Collective for shards."""
        norm = nn.utils.clip_grad_norm_(self.parameters, self.max_grad_norm)
        return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)

    def step(self) -> None:
        """Apply the gradients, advance the schedule, forget the gradients."""
        for optimizer, scheduler in zip(self.optimizers, self.schedulers, strict=True):
            optimizer.step()
            scheduler.step()
        self.zero_grad()

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)

    def tensors(self) -> dict[str, Tensor]:
        """The live state by `parameter.state`, such as `proj.weight.exp_avg`; before the first step it is created."""
        result: dict[str, Tensor] = {}
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    state = optimizer.state[parameter]
                    if not state:
                        state.update(_fresh_state(optimizer, parameter))
                    result |= {f"{self.names[parameter]}.{key}": value for key, value in state.items()}
        return result

    def schedule(self) -> dict[str, Any]:
        """The position in the learning-rate schedule, fit for JSON."""
        return {"updates": self.schedulers[0].last_epoch}

    def load_schedule(self, state: Mapping[str, Any]) -> None:
        """Continue from the position that `schedule` returned."""
        for scheduler in self.schedulers:
            scheduler.last_epoch = int(state["updates"])
            for group, base, rise in zip(
                scheduler.optimizer.param_groups, scheduler.base_lrs, scheduler.lr_lambdas, strict=True
            ):
                group["lr"] = base * rise(scheduler.last_epoch)
            scheduler._last_lr = [group["lr"] for group in scheduler.optimizer.param_groups]


def _fresh_state(optimizer: Optimizer, parameter: Tensor) -> dict[str, Tensor]:
    """The state that an optimizer's first step would create."""
    if isinstance(optimizer, Muon):
        return {"momentum_buffer": torch.zeros_like(parameter)}
    return {
        "step": torch.tensor(0.0),
        "exp_avg": torch.zeros_like(parameter),
        "exp_avg_sq": torch.zeros_like(parameter),
    }


class ShardedMuon(Muon):
    """torch's Muon over matrices that FSDP2 has sharded.

    Momentum stays sharded. Once per step every matrix is gathered in bfloat16, in which it is orthogonalised anyway.
    DTensor's own products would sum partial results in bfloat16, and so train differently on every number of ranks.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One step; the same numbers as `Muon.step` on whole matrices."""
        assert closure is None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state.update(_fresh_state(self, parameter))
                momentum = state["momentum_buffer"]
                momentum.lerp_(parameter.grad, 1 - group["momentum"])
                update = parameter.grad.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum
                whole = _orthogonalized(_gathered(update.bfloat16()), group)
                own = distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)
                rate = group["lr"]
                shard = parameter.to_local()
                shard.mul_(1 - rate * group["weight_decay"])
                # The factor of `match_rms_adamw`.
                change = -rate * (0.2 * math.sqrt(max(parameter.shape)))
                shard.add_(own.to_local().to(shard.device), alpha=change)


def _orthogonalized(matrix: Tensor, group: Mapping[str, Any]) -> Tensor:
    """Newton-Schulz as `Muon` runs it: one step of rate 1 from zero, without momentum, is minus the result."""
    # `adjust_lr_fn` "original" leaves the rate of a matrix alone that is at least as wide as high.
    wide = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
    step = nn.Parameter(torch.zeros_like(wide))
    step.grad = wide
    settings = {key: group[key] for key in ("ns_coefficients", "ns_steps", "eps")}
    Muon([step], lr=1.0, weight_decay=0.0, momentum=0.0, nesterov=False, **settings).step()
    made = -step.detach()
    return made if wide is matrix else made.T


def _gathered(matrix: DTensor) -> Tensor:
    """The whole matrix, on the GPU even if its shards are in CPU memory (`distributed.cpu_offload`)."""
    shard = matrix.to_local().to(matrix.device_mesh.device_type)
    placed = DTensor.from_local(
        shard, matrix.device_mesh, matrix.placements, run_check=False, shape=matrix.shape, stride=matrix.stride()
    )
    return placed.full_tensor()


@torch.no_grad()
def norm_is_finite(tensors: Iterable[Tensor]) -> bool:
    """True if the joint 2-norm of tensors on one device, of DTensors their local shards, is finite in their dtype.

    It overflows before the tensors do: at 1.8e19 in float32, far beyond any weight that a model can compute with.
    """
    local = [t.to_local() if isinstance(t, DTensor) else t for t in tensors]
    return bool(nn.utils.get_total_norm(local).isfinite())
