"""Gradients and optimizer by torch itself: on one process, replicated, or sharded by FSDP2."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from sage_fast.config.sections import OptimizerConfig
from sage_fast.distributed.engine import Phase, TensorSource, WeightSnapshot
from sage_fast.distributed.parallelize import Gathering
from sage_fast.distributed.world import World
from sage_fast.optim import OptimizerSet, norm_is_finite
from sage_fast.policy.guidance import vjp_into_grad


class TorchEngine:
    """`Engine` (engine.py) with torch's optimizers.

    Adapters are whole on every rank, so their gradient is summed here, once per update. FSDP2 sums the gradient of
    sharded weights in the backward pass.

    Args:
        parameters: qualified name -> trained weight, a DTensor where it is sharded.
        config: the run's optimizer section.
        world: the ranks.
        gathering: from `parallelize`.
    """

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], config: OptimizerConfig, world: World, gathering: Gathering
    ) -> None:
        self.parameters = parameters
        self.shapes: Mapping[str, torch.Size] = {name: p.shape for name, p in parameters.items()}
        self.world = world
        self.gathering = gathering
        self.optimizer = OptimizerSet(parameters, config)
        self.sharded = self.lockstep = bool(gathering.modules)
        self.shards_trained = any(isinstance(p, DTensor) for p in parameters.values())

    vjp = staticmethod(vjp_into_grad)

    def last_vjp(self, last: bool) -> None:
        """As in `Engine`: sums over replicas of the weights wait for the last backward."""
        if self.shards_trained and self.world.dp_replicate > 1:
            self.gathering.sum_over_replicas(last)

    def clip_gradients(self) -> float:
        """As in `Engine`."""
        if not self.shards_trained:
            for parameter in self.parameters.values():
                if parameter.grad is None:  # no video of this rank has one; decay and moments act all the same
                    parameter.grad = torch.zeros_like(parameter)
            self.world.sum_([p.grad for p in self.parameters.values() if p.grad is not None])
        return self.optimizer.clip_gradients()

    def step(self) -> None:
        """As in `Engine`."""
        self.optimizer.step()
        self._weights_changed()

    def zero_grad(self) -> None:
        """As in `Engine`."""
        self.optimizer.zero_grad()

    @torch.no_grad()
    def weights_finite(self) -> bool:
        """As in `Engine`: one fused norm."""
        return norm_is_finite(self.parameters.values())

    @property
    def learning_rate(self) -> float:
        """As in `Engine`."""
        return self.optimizer.learning_rate

    def snapshot(self) -> WeightSnapshot:
        """As in `Engine`."""
        return WeightSnapshot(self.parameters, self._weights_changed)

    def phase(self, name: Phase) -> AbstractContextManager[None]:
        """As in `Engine`."""
        return self.gathering.phase(name)

    def whole(self) -> AbstractContextManager[None]:
        """As in `Engine`; adapters are."""
        return nullcontext()

    def _weights_changed(self) -> None:
        """Gathered copies of trained weights are stale."""
        if self.shards_trained:
            self.gathering.free()

    # ------------------------------------------------------------------------------------------ state

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """As in `Engine`."""
        return {
            "weights": {name: p.detach() for name, p in self.parameters.items()},
            "optimizer": self.optimizer.tensors(),
        }

    def load_tensors(self, source: TensorSource) -> None:
        """As in `Engine`."""
        source.load_into(self.tensors())
        self._weights_changed()

    def state(self) -> dict[str, Any]:
        """As in `Engine`."""
        return self.optimizer.schedule()

    def load_state(self, state: Mapping[str, Any]) -> None:
        """As in `Engine`."""
        self.optimizer.load_schedule(state)
