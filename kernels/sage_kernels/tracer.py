"""Counts the bytes that PyTorch operators read and write, on any device, the meta
device included.

Every operator that reaches the dispatcher counts the elements of its tensor arguments
as read and those of its results as written; views and uninitialised allocations count
nothing, an expanded tensor counts its stored elements, an argument given twice counts
once, one that is given as `out` is not read. A custom op is one operator: what it does
inside is its own affair, so its count is the traffic that a fused kernel cannot avoid.
This is memory traffic without a cache, the model that byte formulas use.

    with ByteCounter() as counter:
        model(x)
    counter.traffic.total
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sage_kernels.parity import run_forward
from sage_kernels.registry import Case, Inputs, OpSpec

_ALLOCATIONS = frozenset(
    {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
)


@dataclass(kw_only=True)
class Traffic:
    """Bytes moved by a number of operators.

    Example:
        >>> Traffic(read=8192, written=4096, operators=1).total
        12288
    """

    read: int = 0
    """Bytes of arguments."""
    written: int = 0
    """Bytes of results."""
    operators: int = 0
    """Operators that moved them: about the number of kernel launches."""

    @property
    def total(self) -> int:
        """Bytes read and written."""
        return self.read + self.written


class ByteCounter(TorchDispatchMode):
    """Context manager that adds up the traffic of everything that runs inside it."""

    def __init__(self) -> None:
        super().__init__()
        self.traffic = Traffic()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run the operator and count it."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        traffic = moved(func, args, kwargs, result)
        self.traffic.read += traffic.read
        self.traffic.written += traffic.written
        self.traffic.operators += traffic.operators
        return result


def moved(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
) -> Traffic:
    """Traffic of an operator that has run; nothing where it has written nothing, such
    as a view.
    """
    if func.overloadpacket.__name__ in _ALLOCATIONS:
        return Traffic()
    inputs = _tensors(
        (args, {name: value for name, value in kwargs.items() if name != "out"})
    )
    mutated: list[Tensor] = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            mutated += _tensors(
                args[position] if position < len(args) else kwargs.get(argument.name)
            )
    storages = {_storage(tensor) for tensor in (*inputs, *mutated)}
    written = mutated + [
        tensor for tensor in _tensors(result) if _storage(tensor) not in storages
    ]
    return (
        Traffic(read=_bytes(inputs), written=_bytes(written), operators=1)
        if written
        else Traffic()
    )


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _bytes(tensors: Iterable[Tensor]) -> int:
    seen: dict[tuple[object, ...], int] = {}
    for tensor in tensors:
        sizes = [
            size
            for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
            if stride
        ]
        place = (
            _storage(tensor),
            tensor.storage_offset(),
            tuple(tensor.shape),
            tuple(tensor.stride()),
        )
        seen[place] = torch.Size(sizes).numel() * tensor.element_size()
    return sum(seen.values())


def count(function: Callable[[], object]) -> Traffic:
    """Traffic of one call."""
    with ByteCounter() as counter:
        function()
    return counter.traffic


class _LastBackward(TorchDispatchMode):
    """Keeps the last call of a backward operator of sage_kernels."""

    call: tuple[Any, dict[str, Any]] | None = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run the operator and look at it."""
        if func.namespace == "sage_kernels" and func.overloadpacket.__name__.endswith(
            "_backward"
        ):
            names = [argument.name for argument in func._schema.arguments]
            self.call = func, dict(zip(names, args, strict=False)) | (kwargs or {})
        return func(*args, **(kwargs or {}))


def backward_call(spec: OpSpec, case: Case, inputs: Inputs) -> Callable[[], object]:
    """A call of the op's backward operator with the arguments that a backward pass of
    the case has.

    Raises:
        ValueError: nothing is differentiable.
    """
    outputs, leaves = run_forward(spec.for_case(case), spec.op, inputs)
    if not leaves:
        raise ValueError(f"{spec.name} has no backward pass in case {case.id}")
    outputs = spec.with_gradient(outputs)
    with _LastBackward() as mode:
        torch.autograd.grad(
            outputs,
            list(leaves.values()),
            [torch.randn_like(output) for output in outputs],
        )
    assert mode.call is not None
    function, arguments = mode.call
    arguments = {
        name: value.detach() if isinstance(value, Tensor) else value
        for name, value in arguments.items()
    }
    arguments |= {
        name: value(arguments) if callable(value) else value
        for name, value in case.backward.items()
    }
    return partial(function, **arguments)


def count_op(spec: OpSpec, case: Case, dtype: torch.dtype) -> tuple[Traffic, Traffic]:
    """Traffic of the op's forward and backward operator in a case, counted on the meta
    device without computing.
    """
    inputs = spec.make_inputs(case, dtype, "meta", None)
    forward = count(partial(spec.op, **inputs))
    if not spec.differentiable:
        return forward, Traffic()
    return forward, count(backward_call(spec, case, inputs))


def count_eager(
    spec: OpSpec, case: Case, dtype: torch.dtype
) -> tuple[Traffic, Traffic]:
    """The same for the op as eager PyTorch writes it; cotangents are there before the
    backward pass is counted.
    """
    inputs = spec.make_inputs(case, dtype, "meta", None)
    function = spec.eager or spec.reference
    with ByteCounter() as forward:
        outputs, leaves = run_forward(spec.for_case(case), function, inputs)
    if not leaves:
        return forward.traffic, Traffic()
    outputs = spec.with_gradient(outputs)
    cotangents = [torch.empty_like(output) for output in outputs]
    with ByteCounter() as backward:
        torch.autograd.grad(outputs, list(leaves.values()), cotangents)
    return forward.traffic, backward.traffic
