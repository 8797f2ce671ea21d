"""FLOPs and bytes of operators on tensors without memory, each run once for the forms
that it is given.

Blocks, steps and tiles repeat themselves, and what an operator takes on the meta device
is Python that finds shapes.
"""

import weakref
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from sage_fast.kernels import moved


@dataclass(frozen=True, slots=True)
class Result:
    """A result of an operator: a new tensor, a view of an argument, or that argument,
    then without a shape.
    """

    argument: int | None
    shape: torch.Size | None = None
    strides: tuple[int, ...] = ()
    offset: int = 0
    dtype: torch.dtype | None = None

    def of(self, arguments: list[Tensor]) -> Tensor:
        """The same result of other tensors."""
        if self.argument is None:
            assert self.shape is not None
            return torch.empty_strided(
                self.shape, self.strides, dtype=self.dtype, device="meta"
            )
        given = arguments[self.argument]
        if self.shape is None:
            return given
        return given.as_strided(self.shape, self.strides, self.offset)


@dataclass(frozen=True, slots=True)
class Known:
    """Effect of an operator.

    Attributes:
        flops: by torch's formulas.
        moved: bytes read and written.
        results: None if only the operator can make them.
        several: they are a tuple, even one.
    """

    flops: int
    moved: int
    results: list[Result] | None
    several: bool


class CountingMode(TorchDispatchMode):
    """Context manager that counts what runs inside it; a mode around it does not see an
    operator that is known.

    flops: by name of the operator. `count` is for what a subclass counts.
    """

    known: ClassVar[dict[Any, Known]] = {}
    """By operator and form of its arguments, of all traces of this process."""

    def __init__(self) -> None:
        super().__init__()
        self.flops: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run the operator, or give what it gave, and count it."""
        kwargs = kwargs or {}
        called = (func, args, *kwargs.items())
        arguments: list[Tensor] = []
        form = _form(called, arguments, {})
        known = self.known.get(form)
        if known is not None and known.results is not None:
            made = [result.of(arguments) for result in known.results]
            result: Any = tuple(made) if known.several else made[0]
        else:
            result = func(*args, **kwargs)
            if known is None:
                known = _observed(func, args, kwargs, result, arguments)
                # what changes the shape of an argument is observed every time
                if form == _form(called, [], {}):
                    self.known[form] = known
        name = func.overloadpacket.__name__
        self.flops[name] += known.flops
        self.count(name, args, result, known.moved)
        return result

    def count(self, name: str, args: Any, result: Any, moved: int) -> None:
        """An operator has run; `moved` bytes are read and written."""


PRODUCTS = frozenset(
    {
        "mm",
        "addmm",
        "addmm_",
        "bmm",
        "baddbmm",
        "_addmm_activation",
        "_scaled_mm",
        "attention",
        "attention_backward",
    }
    | {
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_backward",
    }
)
"""Operators that are not elementwise."""

THIN = 128
"""A product with a dimension of at most so many is memory traffic: its operands cost
more time than its arithmetic.
"""


def is_thin(name: str, arguments: Sequence[Any]) -> bool:
    """True if an operator is a matrix product with a dimension of at most `THIN`.

    Args:
        name: of the operator.
        arguments: its positional arguments.
    """
    if name not in PRODUCTS or name.startswith(("attention", "_scaled")):
        return False
    # The last two tensors: `addmm` and `baddbmm` have a summand before them.
    a, b = [argument for argument in arguments if isinstance(argument, Tensor)][-2:]
    return min(*a.shape[-2:], b.shape[-1]) <= THIN


class Tracer(CountingMode):
    """Context manager that adds up FLOPs by operator and elementwise bytes, and follows
    which storages are alive.

    Args:
        own: tensors that were there before; they do not count.
    """

    def __init__(self, own: Iterable[Tensor]) -> None:
        super().__init__()
        self.now = self.peak = self.elementwise = 0
        self._own = {tensor.untyped_storage()._cdata for tensor in own}
        self._alive: dict[int, int] = {}

    def count(self, name: str, args: Any, result: Any, moved: int) -> None:
        """See `CountingMode`; follows the results."""
        if name not in PRODUCTS or is_thin(name, args):
            self.elementwise += moved
        for tensor in (result,) if isinstance(result, Tensor) else tree_leaves(result):
            if not isinstance(tensor, Tensor):
                continue
            # Views share a storage, which counts once.
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key not in self._own and key not in self._alive:
                self._alive[key] = storage.nbytes()
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self._forget, key)
        if name == "attention_backward":
            # Flash kernels add up the gradient of the queries, the size of the first
            # argument, in float32.
            self.peak = max(self.peak, self.now + 4 * args[0].numel())

    def _forget(self, key: int) -> None:
        self.now -= self._alive.pop(key)


def _form(value: Any, tensors: list[Tensor], storages: dict[int, int]) -> Any:
    """All that results without memory depend on: shapes, and which arguments share
    memory. Collects the tensors.
    """
    if isinstance(value, Tensor):
        tensors.append(value)
        # Numbered as they appear: addresses differ from call to call, what is shared
        # does not.
        shared = storages.setdefault(value.untyped_storage()._cdata, len(storages))
        return (
            value.device,
            value.dtype,
            value.shape,
            value.stride(),
            value.storage_offset(),
            shared,
        )
    if isinstance(value, tuple | list):
        return tuple([_form(part, tensors, storages) for part in value])
    return value.__class__, value  # 1, 1.0 and True are equal


def _observed(
    func: Any, args: Any, kwargs: dict[str, Any], result: Any, arguments: list[Tensor]
) -> Known:
    formula = flop_registry.get(func.overloadpacket)
    flops = formula(*args, **kwargs, out_val=result) if formula else 0
    several = isinstance(result, tuple | list)
    results = [_way(part, arguments) for part in (result if several else [result])]
    # One result that cannot be made again, and the operator runs every time.
    found = [way for way in results if way is not None]
    traffic = moved(func, args, kwargs, result).total
    return Known(flops, traffic, found if len(found) == len(results) else None, several)


def _way(part: Any, arguments: list[Tensor]) -> Result | None:
    """How a result is made again; None if its form does not tell."""
    if (
        not isinstance(part, Tensor)
        or part.device.type != "meta"
        or part.is_conj()
        or part.is_neg()
    ):
        return None
    storage = part.untyped_storage()
    for place, argument in enumerate(arguments):
        if part is argument:
            return Result(place)
        if storage._cdata == argument.untyped_storage()._cdata:
            # `as_strided` keeps the type, so a view in another one is not made this
            # way.
            view = Result(place, part.shape, part.stride(), int(part.storage_offset()))
            return view if part.dtype == argument.dtype else None
    # Shape and strides make a result again only where it fills its memory from end to
    # end.
    made = Result(None, part.shape, part.stride(), 0, part.dtype)
    whole = (
        not part.storage_offset()
        and storage.nbytes() == made.of([]).untyped_storage().nbytes()
    )
    return made if whole else None
