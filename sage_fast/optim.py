"""Optimizers and the learning-rate schedule.

Both optimizers are torch's own. Muon orthogonalises matrices only, so biases, norms and embeddings go to AdamW; with
`match_rms_adamw` its updates have AdamW's size and one learning rate serves both.
"""

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.optim import AdamW, Muon, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from sage_fast.config import OptimizerConfig


class OptimizerSet:
    """One or more optimizers over disjoint parameters, with one learning-rate schedule, stepped as one.

    Args:
        parameters: qualified name -> trained parameter.
        config: the run's optimizer section.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], config: OptimizerConfig) -> None:
        self.parameters = list(parameters.values())
        self.max_grad_norm = config.max_grad_norm
        matrices: list[nn.Parameter] = []
        others: list[nn.Parameter] = []
        for name, parameter in parameters.items():
            is_matrix = parameter.ndim == 2 and "embed.weight" not in name
            (matrices if config.name == "muon" and is_matrix else others).append(parameter)
        self.optimizers: list[Optimizer] = []
        if matrices:
            self.optimizers.append(
                Muon(
                    matrices,
                    lr=config.learning_rate,
                    momentum=config.momentum,
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
        """Scale gradients to the configured global norm; returns the norm before scaling."""
        return float(nn.utils.clip_grad_norm_(self.parameters, self.max_grad_norm))

    def step(self) -> None:
        """Apply the gradients, advance the schedule, forget the gradients."""
        for optimizer, scheduler in zip(self.optimizers, self.schedulers, strict=True):
            optimizer.step()
            scheduler.step()
        self.zero_grad()

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)

    def state_dict(self) -> dict[str, Any]:
        return {
            "optimizers": [o.state_dict() for o in self.optimizers],
            "schedulers": [s.state_dict() for s in self.schedulers],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """ValueError when the state belongs to another choice of optimizer."""
        if len(state["optimizers"]) != len(self.optimizers):
            raise ValueError(
                f"The checkpoint holds {len(state['optimizers'])} optimizer(s), this run has {len(self.optimizers)}: "
                "optimizer.name differs from the run that saved it."
            )
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        for scheduler, saved in zip(self.schedulers, state["schedulers"], strict=True):
            scheduler.load_state_dict(saved)
