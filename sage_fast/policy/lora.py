"""Choice of the trained weights: LoRA adapters, or the whole transformer; and gradients
of adapters by video.

Adapters are peft's, through diffusers' `add_adapter`, and are saved in diffusers'
layout, so that a stock pipeline loads them. Trained weights are float32 masters, also
over a bfloat16 transformer.

Autograd sums a weight's gradient over the batch. A copy of the weight for each video (a
view, without memory) has each video's own: the product of the video's rows alone, as
many FLOPs as the product over all rows.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from diffusers.loaders.lora_base import LORA_ADAPTER_METADATA_KEY
from peft import LoraConfig as PeftLoraConfig
from peft import get_peft_model_state_dict
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

from sage_fast.config.sections import LoraConfig
from sage_fast.models.family import family_of, transformer_blocks
from sage_fast.models.stored import is_dead


class PerVideo:
    """The trained LoRA weights of a transformer, of which every video of a batch may
    have a copy.

    Args:
        transformer: with an adapter; nothing else is trained, and the weights are whole
            on this device.
    """

    def __init__(self, transformer: nn.Module) -> None:
        self.layers: list[Any] = [
            module
            for module in transformer.modules()
            if isinstance(module, nn.Linear) and module.weight.requires_grad
        ]
        self.weights: list[Tensor] = [layer.weight for layer in self.layers]

    @contextmanager
    def copies(self, videos: int) -> Iterator[Sequence[Tensor]]:
        """Within the context the model computes a batch of so many videos with a copy
        for each, and only such a batch.

        Backward passes belong into the context too, because checkpointing runs the
        forward again.

        Yields:
            The copies, (B, *shape) each, in the order of `Module.parameters`; for one
            video the weights themselves.
        """
        if videos == 1:
            yield self.weights
            return
        leaves = [
            weight.detach().expand(videos, *weight.shape).requires_grad_()
            for weight in self.weights
        ]
        for layer, leaf in zip(self.layers, leaves, strict=True):
            # The fused forward reads the weight, a stock one calls the layer.
            # Into the dictionary: the attribute takes a Parameter alone.
            layer._parameters["weight"] = leaf
            layer.forward = partial(_Linear.apply, leaf)
        try:
            yield leaves
        finally:
            for layer, weight in zip(self.layers, self.weights, strict=True):
                layer._parameters["weight"] = weight
                del layer.forward


class _Linear(torch.autograd.Function):
    """x W^T of rows x (B ..., K), which lie video after video, with B copies of W (B,
    M, K).
    """

    @staticmethod
    def forward(ctx: Any, copies: Tensor, x: Tensor) -> Tensor:
        ctx.save_for_backward(copies, x)
        return F.linear(x, copies[0])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None]:  # type: ignore[override]
        copies, x = ctx.saved_tensors
        rows, columns = (
            tensor.reshape(len(copies), -1, tensor.shape[-1]) for tensor in (x, grad)
        )
        of_x = grad @ copies[0] if ctx.needs_input_grad[1] else None
        return torch.bmm(columns.mT, rows), of_x


ADAPTER_FILE = "pytorch_lora_weights.safetensors"


def make_trainable(
    transformer: Any, mode: Literal["lora", "full"], lora: LoraConfig, seed: int
) -> None:
    """Prepare a transformer for `training.mode`: the adapter that is there, or a new
    one, or every weight that matters.

    ValueError as `add_lora` and `train_all`.
    """
    if mode == "lora" and has_adapter(transformer):
        for name, parameter in transformer.named_parameters():
            parameter.requires_grad_(".lora_" in name)
    elif mode == "lora":
        add_lora(
            transformer,
            rank=lora.rank,
            alpha=lora.alpha,
            target_modules=lora.target_modules,
            seed=seed,
        )
    else:
        train_all(transformer)


def has_adapter(transformer: nn.Module) -> bool:
    """Return True if an adapter was added."""
    return bool(getattr(transformer, "peft_config", None))


def lora_targets(transformer: Any, target_modules: Sequence[str] | None) -> list[str]:
    """Qualified names of the linear layers that get an adapter; None are those of the
    family.

    ValueError when a name of `target_modules` matches no linear layer of the
    transformer blocks.
    """
    family = family_of(transformer)
    dead = family.dead_modules(transformer)
    targets: list[str] = []
    for suffix in family.lora_targets if target_modules is None else target_modules:
        experts = "|".join(family.experts)
        pattern = re.compile(rf"({experts}){family.blocks}\.\d+\.{re.escape(suffix)}")
        matches = [
            n
            for n, m in transformer.named_modules()
            if isinstance(m, nn.Linear) and pattern.fullmatch(n)
        ]
        if not matches:
            block = transformer_blocks(transformer)[0]
            known = [n for n, m in block.named_modules() if isinstance(m, nn.Linear)]
            raise ValueError(
                f"lora.target_modules has {suffix!r}, which is not a linear layer of a "
                f"transformer block. Choose from {sorted(known)}."
            )
        targets += [n for n in matches if not is_dead(n, dead)]
    return targets


def add_lora(
    transformer: Any,
    *,
    rank: int,
    alpha: float | None,
    target_modules: Sequence[str] | None,
    seed: int,
) -> None:
    """Freeze the transformer and add one trainable float32 adapter, initially the
    identity.

    The initial weights are a function of `seed` alone; torch's global generator is left
    as it was.
    """
    transformer.requires_grad_(False)
    config = PeftLoraConfig(
        r=rank,
        lora_alpha=alpha if alpha is not None else rank,
        target_modules=lora_targets(transformer, target_modules),
        init_lora_weights=True,
    )
    with torch.random.fork_rng(devices=[]):
        # `torch.manual_seed` would seed the GPUs too, whose generators are not restored
        # here.
        torch.default_generator.manual_seed(seed)  # adapters are made on the CPU
        transformer.add_adapter(config)
    for parameter in transformer.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()


def train_all(transformer: Any) -> None:
    """Make every weight trainable that can influence the velocity.

    ValueError unless the weights are float32: the optimizer needs full-precision
    masters.
    """
    if transformer.dtype != torch.float32:
        raise ValueError(
            "training.mode full needs float32 master weights, but model.dtype is "
            f"{transformer.dtype}. "
            "Set model.dtype to float32, or training.mode to lora."
        )
    dead = family_of(transformer).dead_modules(transformer)
    for name, parameter in transformer.named_parameters():
        parameter.requires_grad_(not is_dead(name, dead))


def trainable_parameters(transformer: nn.Module) -> dict[str, nn.Parameter]:
    """Qualified name -> parameter of everything that is trained, in a fixed order."""
    return {name: p for name, p in transformer.named_parameters() if p.requires_grad}


@torch.no_grad()
def base_digest(
    transformer: nn.Module, weights: Mapping[str, Tensor] | None = None
) -> str:
    """SHA-256 of names, shapes and the first and last numbers of the base weights,
    without adapters: cheap for 8.3 B parameters, and different for any two sets of
    weights that were trained apart.

    Args:
        weights: of a transformer that has not been given them yet.
    """
    digest = hashlib.sha256()
    for name, parameter in transformer.named_parameters():
        if ".lora_" in name:
            continue
        name = name.replace(".base_layer", "")
        # In the model's type: weights that are still on disk, in another one, have the
        # same digest.
        flat = (parameter if weights is None else weights[name]).detach().flatten()
        ends = torch.cat([flat[:8], flat[-8:]]).to(parameter.dtype).double().cpu()
        digest.update(f"{name} {tuple(parameter.shape)} {ends.tolist()}".encode())
    return digest.hexdigest()


def described(config: PeftLoraConfig) -> str:
    """peft's description of an adapter as JSON."""
    # JSON has no sets, and their order differs from process to process.
    fields = {
        key: sorted(value) if isinstance(value, set) else value
        for key, value in config.to_dict().items()
    }
    return json.dumps(fields, indent=2, sort_keys=True)


def copy_lora(transformer: Any, folder: Path) -> Callable[[], None]:
    """Copy the adapter as it is now to CPU memory; the function that is returned writes
    it in diffusers' layout.

    The file is that of diffusers' `save_lora_adapter`, which can only write
    immediately. A stock transformer loads it with `load_lora_adapter(folder,
    prefix=None, weight_name=ADAPTER_FILE)`. Without the file name diffusers guesses it,
    and refuses to do so below a folder named `checkpoints`.
    """
    ((name, config),) = transformer.peft_config.items()
    weights = get_peft_model_state_dict(transformer, adapter_name=name)
    # A copy also of what is on the CPU, where training goes on before it is written.
    copies = {
        key: value.detach().to("cpu", copy=True).contiguous()
        for key, value in weights.items()
    }
    metadata = {"format": "pt", LORA_ADAPTER_METADATA_KEY: described(config)}

    def write() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        save_file(copies, folder / ADAPTER_FILE, metadata=metadata)

    return write
