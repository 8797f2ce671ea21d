"""Optimizers and the learning-rate schedule.

Both optimizers are torch's own. Muon orthogonalises matrices only, so biases, norms and
embeddings go to AdamW. With `match_rms_adamw` the elements of Muon's update have an RMS
of 0.17 times the rate (measured; its aim is 0.2), from the first step on. AdamW's first
update moves every element by the rate, six times as far; later ones shrink as gradients
disagree. So one rate does not serve both: `first_movement` compares them, and runs with
published recipes.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Muon, Optimizer

from sage_fast.config.sections import LoraConfig, OptimizerConfig

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

MUON_RMS = 0.17
"""RMS of the elements of Muon's update over the learning rate: the 0.2 of
`match_rms_adamw`, times what five Newton-Schulz steps leave of singular values of 1.
Measured.
"""

WIDTH = 2048
"""Inputs of a weight, where the movement of whole weights is asked for."""

LARGE_MODEL = 10**9
"""Parameters from which on a model is compared with published recipes, whose models
have 1.3 to 14 billion.
"""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Settings that decide how far an update moves the weights.

    Example: `published_recipe(GRPO_RECIPES["lora"]).movement` is 9.2e-4.
    """

    name: str
    optimizer: Literal["muon", "adamw"]
    learning_rate: float
    rank: int | None = None
    """Of adapters; null for whole weights."""
    alpha: float | None = None
    """Numerator of the adapters' scale, alpha / rank; null means a scale of 1."""

    @property
    def scale(self) -> float:
        return self.alpha / self.rank if self.alpha and self.rank else 1.0

    @property
    def movement(self) -> float:
        return first_movement(self.optimizer, self.learning_rate, self.rank, self.scale)

    def __str__(self) -> str:
        scale = "" if self.rank is None else f", alpha / rank {self.scale:g}"
        return f"{self.name} ({self.optimizer}, {self.learning_rate:g}{scale})"


def published_recipe(key: str) -> Recipe:
    """A recipe of `config/published_recipes.yaml`, which has the places of its values."""
    # Its YAML reader may be missing where the optimizers alone are used.
    from sage_fast.config.documents import read_yaml

    file = Path(__file__).parent / "config/published_recipes.yaml"
    quoted = read_yaml(file.read_text("utf-8"), str(file))[key]
    return Recipe(**{field.name: quoted.get(field.name) for field in fields(Recipe)})


GRPO_RECIPES: dict[Literal["lora", "full"], str] = {
    "lora": "flow_factory_wan21_grpo",
    "full": "sage_grpo_hv15",
}
NFT_RECIPES: dict[Literal["lora", "full"], str] = {
    "lora": "diffusion_nft_sd35",
    "full": "sage_grpo_hv15",
}
"""Key of `published_recipe` by training.mode, of GRPO and of the forward process: what
a run without a preset is compared with. Others differ: UniRL moves a LoRA of Wan 2.1 3
times as far as Flow-Factory, and one of HunyuanVideo-1.5 a twentieth as far.
"""


def first_movement(
    optimizer: Literal["muon", "adamw"],
    learning_rate: float,
    rank: int | None = None,
    scale: float = 1.0,
) -> float:
    """Norm of the change that a first update makes to a weight W of n inputs, over W's,
    if W's variance is 1/n.

    AdamW moves every element by the rate, Muon by `MUON_RMS` of it (root mean square).
    Whole weights (rank None) move by that times sqrt(n), n = `WIDTH`. Adapters are W +
    scale B A, B starts at 0 and A with variance 1/(3n): the RMS of the change scale dB
    A is scale |dB| sqrt(rank / 3n), whose share of W's does not depend on n.
    """
    element = learning_rate * (1.0 if optimizer == "adamw" else MUON_RMS)
    return element * (math.sqrt(WIDTH) if rank is None else scale * math.sqrt(rank / 3))


def unusual_movement(
    optimizer: OptimizerConfig,
    lora: LoraConfig,
    published: str,
    parameters: int,
) -> tuple[str, float] | None:
    """Warning where a first update moves the weights less than a tenth or more than ten
    times as far as published.

    Args:
        published: key of the recipe of the objective and of what is trained.
        parameters: of the model; none is published for a small one.

    Returns:
        The warning and the rate that moves them as far; None where there is nothing to
        warn of.
    """
    if parameters < LARGE_MODEL:
        return None
    recipe = published_recipe(published)
    rank = None if recipe.rank is None else lora.rank
    scale = (lora.alpha or lora.rank) / lora.rank
    share = (
        first_movement(optimizer.name, optimizer.learning_rate, rank, scale)
        / recipe.movement
    )
    if 0.1 <= share <= 10:
        return None
    feared = "the reward may not move" if share < 1 else "the videos may break"
    # The movement is proportional to the rate. One digit is as much as is known of it.
    rate = float(f"{optimizer.learning_rate / share:.1g}")
    text = (
        f"optimizer.learning_rate is {optimizer.learning_rate:g} with "
        f"{optimizer.name}: a first update moves weights {share:.2g} times as far as "
        f"that of {recipe}, so {feared}. Set it to about {rate:g}, unless this is "
        "meant."
    )
    return text, rate


class OptimizerSet:
    """One or more optimizers over disjoint parameters, stepped as one.

    Args:
        parameters: qualified name -> trained parameter.
        config: the run's optimizer section.
    """

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], config: OptimizerConfig
    ) -> None:
        self.names = {parameter: name for name, parameter in parameters.items()}
        self.parameters = list(parameters.values())
        self.max_grad_norm = config.max_grad_norm
        matrices: list[nn.Parameter] = []
        others: list[nn.Parameter] = []
        for name, parameter in parameters.items():
            is_matrix = parameter.ndim == 2 and "embed.weight" not in name
            (matrices if config.name == "muon" and is_matrix else others).append(
                parameter
            )
        self.optimizers: list[Optimizer] = []
        if matrices:
            # a second, which reading a configuration need not pay
            from torch.distributed.tensor import DTensor

            muon = (
                ShardedMuon if any(isinstance(p, DTensor) for p in matrices) else Muon
            )
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

    def clip_gradients(self) -> float:
        """Scale gradients to the configured global norm; returns the norm before
        scaling. Collective for shards.
        """
        from torch.distributed.tensor import DTensor

        norm = nn.utils.clip_grad_norm_(self.parameters, self.max_grad_norm)
        return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)

    def step(self, learning_rate: float) -> None:
        """Apply the gradients and forget them."""
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate
            optimizer.step()
        self.zero_grad()

    @torch.no_grad()
    def eps_share(self) -> float | None:
        """Mean of eps / (sqrt(v) + eps) after a step, v AdamW's second moment without
        its bias; takes one copy of it.

        Over the whole elements that AdamW has moved, not those whose gradient has
        always been 0. None without any.
        """
        moments = list[Tensor]()
        scales = list[float]()
        for optimizer in self.optimizers:
            for group in optimizer.param_groups if isinstance(optimizer, AdamW) else ():
                for state in (
                    optimizer.state[parameter] for parameter in group["params"]
                ):
                    if state:
                        moments.append(state["exp_avg_sq"])
                        scales.append(
                            group["eps"]
                            * math.sqrt(1 - group["betas"][1] ** float(state["step"]))
                        )
        if not moments:
            return None
        moved = torch.stack([moment.count_nonzero() for moment in moments]).sum()
        # 1 - share = 1 / (1 + eps / sqrt(v)), which is 0 where v is.
        parts = torch._foreach_sqrt(moments)
        torch._foreach_reciprocal_(parts)
        torch._foreach_mul_(parts, scales)
        torch._foreach_add_(parts, 1.0)
        torch._foreach_reciprocal_(parts)
        # One wait for the GPU.
        share = 1 - torch.stack(torch._foreach_norm(parts, 1)).double().sum() / moved
        found = float(share)
        return found if math.isfinite(found) else None

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)

    def tensors(self) -> dict[str, Tensor]:
        """The live state by `parameter.state`, such as `proj.weight.exp_avg`; before
        the first step it is created.
        """
        result: dict[str, Tensor] = {}
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    state = optimizer.state[parameter]
                    # A checkpoint may be made, or loaded, before the first step.
                    if not state:
                        state.update(_fresh_state(optimizer, parameter))
                    result |= {
                        f"{self.names[parameter]}.{key}": value
                        for key, value in state.items()
                    }
        return result


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

    Momentum stays sharded. Once per step every matrix is gathered in bfloat16, in which
    it is orthogonalised anyway. DTensor's own products would sum partial results in
    bfloat16, and so train differently on every number of ranks.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One step; the same numbers as `Muon.step` on whole matrices."""
        from torch.distributed.tensor import distribute_tensor

        assert closure is None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state.update(_fresh_state(self, parameter))
                momentum = state["momentum_buffer"]
                # As in `Muon.step`: the momentum is a moving average.
                momentum.lerp_(parameter.grad, 1 - group["momentum"])
                if group["nesterov"]:
                    update = parameter.grad.lerp(momentum, group["momentum"])
                else:
                    update = momentum
                whole = _orthogonalized(_gathered(update.bfloat16()), group)
                # With no source rank nothing is sent: every rank cuts its part out of
                # the same matrix.
                own = distribute_tensor(
                    whole,
                    parameter.device_mesh,
                    parameter.placements,
                    src_data_rank=None,
                )
                rate = group["lr"]
                shard = parameter.to_local()
                shard.mul_(1 - rate * group["weight_decay"])
                # The factor of `match_rms_adamw`.
                change = -rate * (0.2 * math.sqrt(max(parameter.shape)))
                shard.add_(own.to_local().to(shard.device), alpha=change)


def _orthogonalized(matrix: Tensor, group: Mapping[str, Any]) -> Tensor:
    """Newton-Schulz as `Muon` runs it: one step of rate 1 from zero, without momentum,
    is minus the result.
    """
    # `adjust_lr_fn` "original" leaves the rate of a matrix alone that is at least as
    # wide as high.
    wide = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
    step = nn.Parameter(torch.zeros_like(wide))
    step.grad = wide
    settings = {key: group[key] for key in ("ns_coefficients", "ns_steps", "eps")}
    Muon(
        [step], lr=1.0, weight_decay=0.0, momentum=0.0, nesterov=False, **settings
    ).step()
    made = -step.detach()
    return made if wide is matrix else made.T


def _gathered(matrix: "DTensor") -> Tensor:
    """The whole matrix, on the GPU even if its shards are in CPU memory
    (`distributed.cpu_offload`).
    """
    from torch.distributed.tensor import DTensor

    shard = matrix.to_local().to(matrix.device_mesh.device_type)
    placed = DTensor.from_local(
        shard,
        matrix.device_mesh,
        matrix.placements,
        run_check=False,
        shape=matrix.shape,
        stride=matrix.stride(),
    )
    return placed.full_tensor()


@torch.no_grad()
def norm_is_finite(tensors: Iterable[Tensor]) -> bool:
    """True if the joint 2-norm of tensors on one device, of DTensors their local
    shards, is finite in their dtype.

    It overflows before the tensors do: at 1.8e19 in float32, far beyond any weight that
    a model can compute with.
    """
    from torch.distributed.tensor import DTensor

    local = [t.to_local() if isinstance(t, DTensor) else t for t in tensors]
    return bool(nn.utils.get_total_norm(local).isfinite())
