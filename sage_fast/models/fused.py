"""A fused forward over diffusers' own modules, of any family: switching it on and off,
and how its blocks compute.

The forward of one instance of a transformer and of its blocks is replaced. Class,
parameters, their names and `state_dict` stay, so LoRA adapters, `save_pretrained` and
FSDP work as before.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Literal, NamedTuple, Self

import torch
from torch import Tensor, nn

from sage_fast.kernels import Choice, Kernels, select_kernels
from sage_fast.models.attention.attention import (
    call_backward,
    call_forward,
    resolve_backend,
)
from sage_fast.models.attention.joint import JointAttention
from sage_fast.models.family import family_of, transformer_blocks
from sage_fast.models.projection import stack_weights, unstack_weights
from sage_fast.models.stored import Checkpointing, FusedForward


@dataclass(frozen=True)
class LocalAttention:
    """All tokens and heads on this device."""

    backend: str
    deterministic: bool = False

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, num_video: int
    ) -> tuple[Tensor, Tensor]:
        # On meta the op gives shapes and counts FLOPs. Elsewhere the dispatcher would
        # only cost time.
        run = torch.ops.sage_fast.attention if q.device.type == "meta" else call_forward
        return run(q, k, v, self.backend, self.deterministic)

    def backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        num_video: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        run = call_backward
        if q.device.type == "meta":
            run = torch.ops.sage_fast.attention_backward
        return run(grad, q, k, v, out, lse, self.backend, self.deterministic)


@dataclass(frozen=True)
class BlockSettings:
    """How a block is computed; the same for all of them.

    Attributes:
        attention: over the video tokens of all ranks.
        local: of this rank's queries over keys that every rank has.
        first: tokens of this rank that have another noise level than the others.
    """

    kernels: Kernels
    attention: JointAttention
    checkpointing: Checkpointing
    local: LocalAttention
    first: int = 0


class Rotary(NamedTuple):
    """Rotary tables cos and sin, (N, head dim) float32, of the video tokens that are
    computed here.
    """

    cos: Tensor
    sin: Tensor


_NOTHING = nullcontext()


def without_autocast(
    tensor: Tensor, weights_dtype: torch.dtype | None = None
) -> AbstractContextManager[Any]:
    """Products write into given memory, which autocast cannot handle; the weights'
    dtype decides, and a warning says so where it is float32.
    """
    device = tensor.device.type
    on = device in ("cpu", "cuda") and torch.is_autocast_enabled(device)
    if on and weights_dtype == torch.float32:
        # by default Python shows it once
        warnings.warn(
            "torch.autocast is on, but the fused forward computes in its weights' type, "
            "float32. Load the transformer in bfloat16 (adapters may stay float32), or "
            "call undo() of its handle.",
            stacklevel=2,
        )
    return torch.autocast(device, enabled=False) if on else _NOTHING


def require_full_scale(attention_kwargs: dict[str, Any]) -> None:
    """ValueError where a call of diffusers scales its adapters."""
    if attention_kwargs.get("scale", 1.0) != 1.0:
        raise ValueError(
            "The fused forward takes no scale of adapters in a call. Set it by "
            "set_adapters of the transformer, or set model.forward to stock."
        )


@dataclass(kw_only=True, eq=False, repr=False)
class BlockwiseForward(FusedForward):
    """The fused forward of one transformer; `undo`, or the end of a `with`, restores
    diffusers' own.
    """

    computes: ClassVar[Mapping[str, Any]]
    """Values of the transformer's config that the fused forward is for."""
    forwards: ClassVar[tuple[Callable[..., Any], Callable[..., Any]]]
    """Functions of a module that replace the forward of the transformer and of a block,
    which have this handle as their `_acceleration`.
    """
    adjacent: ClassVar[tuple[tuple[str, ...], ...]]
    """Layers of a block that share their input, by name."""

    transformer: Any
    attention: str
    kernels: Choice
    checkpointing: Checkpointing
    deterministic: bool

    rotary: Rotary = field(init=False)
    """Tables of the forward that runs, for the video tokens that are computed here."""
    num_video: int = field(default=0, init=False)
    """Video tokens of the forward that runs, on all ranks that share them."""
    blocks: list[Any] = field(init=False)
    """Its blocks, in their order."""
    _settings: dict[tuple[Any, ...], BlockSettings] = field(
        default_factory=dict, init=False
    )
    _rope: dict[tuple[Any, ...], tuple[Tensor, Tensor]] = field(
        default_factory=dict, init=False
    )

    def install(self, device: torch.device, dtype: torch.dtype) -> None:
        """Replace the forward of this instance and of its blocks, and make query, key
        and value weights adjacent.

        Args:
            device, dtype: of the blocks' inputs.

        ValueError: a forward has been replaced already, a variant of the model, or
        options that cannot be satisfied.
        """
        for key, computed in self.computes.items():
            if (value := self.transformer.config[key]) != computed:
                raise ValueError(
                    f"{key} is {value!r}; the fused forward computes {computed!r}."
                )
        if device.type != "meta":
            # Options that cannot be satisfied are refused now, not in the middle of a
            # run.
            self.settings(device, dtype)
        self.blocks = transformer_blocks(self.transformer)
        inside = {module for block in self.blocks for module in block.modules()}
        for name, module in self.transformer.named_modules():
            if "forward" in module.__dict__ and (
                module is self.transformer or module in inside
            ):
                raise ValueError(
                    f"The forward of {name or 'the transformer'} has been replaced "
                    "already, by an offloading or "
                    "caching hook. Accelerate first and add the hook afterwards, or "
                    "do without one of them."
                )
        whole, one = self.forwards
        for layers in self._layers_of_one_input():
            stack_weights(layers)
        for block in self.blocks:
            block.forward = partial(one, block)
            block._acceleration = self
        self.transformer.forward = partial(whole, self.transformer)
        self.transformer._acceleration = self

    def undo(self) -> None:
        """Restore diffusers' forward; calling it again does nothing. Weights keep their
        values, names and devices.

        ValueError if a hook has been put around the fused forward since; remove it
        first.
        """
        if self.transformer.__dict__.get("_acceleration") is not self:
            return
        # All are checked before any is restored, so a refusal leaves the whole as it
        # was.
        for module in (self.transformer, *self.blocks):
            if (
                getattr(module.__dict__.get("forward"), "func", None)
                not in self.forwards
            ):
                raise ValueError(
                    "A forward has been replaced since this transformer was "
                    "accelerated, by an offloading or caching "
                    "hook. Remove the hook, then undo."
                )
        for module in (self.transformer, *self.blocks):
            for name in ("forward", "_acceleration"):
                module.__dict__.pop(name, None)
        for layers in self._layers_of_one_input():
            unstack_weights(layers)

    def _layers_of_one_input(self) -> Iterator[list[nn.Linear]]:
        for block in self.blocks:
            for names in self.adjacent:
                layers: list[Any] = [block.get_submodule(name) for name in names]
                # peft's wrapper has the weight in its base layer.
                yield [getattr(layer, "base_layer", layer) for layer in layers]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.undo()

    def make_rope(self, latents: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin, (N, head dim) float32, of the size of latents."""
        cos, sin = self.transformer.rope(latents)
        return cos.flatten(0, -2), sin.flatten(0, -2)

    def enter(self, x: Tensor, latents: Tensor) -> Tensor:
        """Video tokens (B, N, D) of latents, or this rank's share of them; leaves their
        tables in `rotary`.
        """
        key = (*latents.shape[2:], latents.device)
        if key not in self._rope:
            # Tables made in inference mode, while generating, must serve training as
            # well.
            with torch.inference_mode(False), torch.no_grad():
                self._rope[key] = self.make_rope(latents)
        cos, sin = self._rope[key]
        self.num_video = x.shape[1]
        if self.sequence is not None:
            x = self.sequence.split(x, 1)
            cos = self.sequence.split(cos, 0)
            sin = self.sequence.split(sin, 0)
        # Not through the blocks' arguments, which FSDP may cast to bfloat16.
        self.rotary = Rotary(cos, sin)
        return x

    def leave(self, tokens: Tensor) -> Tensor:
        """The video tokens of all ranks (B, N, ...)."""
        if self.sequence is None:
            return tokens
        return self.sequence.join(tokens, 1, self.num_video)

    def settings(self, device: torch.device, dtype: torch.dtype) -> BlockSettings:
        """How blocks are computed for tensors of a device and dtype."""
        checkpointing = self.checkpointing
        if checkpointing == "none" and self.transformer.gradient_checkpointing:
            # diffusers' own switch, `enable_gradient_checkpointing`
            checkpointing = "full"
        # Blocks use the settings of their forward in the backward too, so both exchange
        # tokens in the same way.
        sequence = None if self.sequence is None else (self.sequence, self.num_video)
        key = (device, dtype, checkpointing, sequence)
        if key not in self._settings:
            kernels = select_kernels(self.kernels, device, dtype)
            backend = resolve_backend(
                self.attention,
                device=device,
                dtype=dtype,
                head_dim=self.transformer.config["attention_head_dim"],
                deterministic=self.deterministic,
            )
            local = LocalAttention(backend, self.deterministic)
            attention: JointAttention = local
            if self.sequence is not None:
                attention = self.sequence.attention(attention, self.num_video)
            self._settings[key] = BlockSettings(
                kernels, attention, checkpointing, local
            )
        return self._settings[key]

    def __getstate__(self) -> dict[str, Any]:
        """Content of a copy or a pickle, without what is made again."""
        return self.__dict__ | {"_settings": {}, "_rope": {}}


def accelerate(
    model: Any,
    *,
    attention: str = "auto",
    kernels: Choice = "auto",
    checkpointing: Checkpointing = "none",
    deterministic: bool = False,
    adaln: Literal["auto", "weights", "table", "offload"] = "auto",
) -> Any:
    """Give one transformer of any family the fused forward, for training and for
    generating; its signature stays that of diffusers.

    Args:
        model: a transformer, with or without LoRA adapters, or a pipeline of diffusers
            that has one as its `transformer`.
        attention, kernels, checkpointing, deterministic, adaln: see `ModelConfig`.

    Returns:
        The handle whose `undo()` restores diffusers' forward, as does the end of a
        `with` over it.

    Raises:
        ValueError: a model of a class that no family has, an unsupported variant, or
            options that do not exist or cannot be satisfied.
    """
    from pydantic import TypeAdapter

    from sage_fast.config.sections import ModelConfig  # imports pydantic

    settings = TypeAdapter(ModelConfig).validate_python(
        {
            "attention": attention,
            "kernels": kernels,
            "checkpointing": checkpointing,
            "deterministic": deterministic,
            "adaln": adaln,
        }
    )
    transformer = getattr(model, "transformer", model)
    family = family_of(transformer)
    if "_acceleration" in transformer.__dict__:
        raise ValueError(
            "This transformer is accelerated already; call undo() of its handle first."
        )
    return family.fuse(transformer, settings)
