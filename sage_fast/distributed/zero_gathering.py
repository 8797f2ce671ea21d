"""When the weights of a ZeRO-3 transformer are gathered.

DeepSpeed gathers a module's weights when the module is called. The fused forward calls blocks but reads the weights
inside them, and reads `x_embedder.proj` and `cond_type_embed` without calling them. What DeepSpeed offers for that does
not fit:

* Leaf modules gather a block as a whole, but sum its gradient in a hook that runs before the gradient exists where no
  input of the block needs one (the first block under LoRA), and twice where two graphs share a backward pass (both
  branches of guidance).
* External parameters leave the count of backward passes to one graph per module: with two, blocks stay gathered.
* Both follow a record of the modules that were called, which the ranks must share. Prompts with and without glyph
  tokens call different modules.

So DeepSpeed's module hooks are taken off. A block is gathered around its call and in its backward pass, the next one
ahead of its use; the rest of the transformer, as large as one or two blocks, stays whole from its first use to the next
step. All ranks gather the same in the same order, whatever their prompts contain.
"""

import importlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sage_fast.models.transformer import transformer_blocks


class BlockGathering:
    """Gathers the weights of a ZeRO-3 transformer where they are needed.

    A block's are whole around its call and from its backward pass to that of the block before, and those of the next
    block are on their way meanwhile: two blocks at a time. The stock forward keeps more, because torch's linear layers
    save their transposed weight for the backward pass.
    """

    def __init__(self, transformer: nn.Module) -> None:
        self._statuses = importlib.import_module("deepspeed.runtime.zero.partition_parameters").ZeroParamStatus
        blocks = transformer_blocks(transformer)
        self._blocks: list[list[Any]] = [list(block.parameters()) for block in blocks]
        within = {id(p) for block in self._blocks for p in block}
        self._rest: list[Any] = [p for p in transformer.parameters() if id(p) not in within]
        self._handles: dict[int, Any] = {}
        """Gathering that is under way, by block."""
        self._backward: int | None = None
        """The block that is in its backward pass."""
        transformer.register_forward_pre_hook(lambda module, arguments: self._gather_rest(), prepend=True)
        for index, block in enumerate(blocks):
            block.register_forward_pre_hook(lambda module, arguments, index=index: self._before_forward(index))
            block.register_forward_hook(
                lambda module, arguments, outputs, index=index: self._after_forward(index, arguments, outputs)
            )

    def end_backward(self) -> None:
        """Give back what the backward pass has left gathered."""
        for index in list(self._handles):
            self._finish(index)
            self._release(index)
        if self._backward is not None:
            self._release(self._backward)
        self._backward = None

    def _gather_rest(self) -> None:
        self._wait(self._start(self._rest))

    def _before_forward(self, index: int) -> None:
        self._finish(index)
        if not _in_backward():
            self._prefetch(index + 1)

    def _after_forward(self, index: int, inputs: Sequence[Any], outputs: Any) -> None:
        if _in_backward():
            return  # computed again for the backward pass that is under way, which needs the weights
        self._release(index)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        for output in outputs:
            # The last block hands its text through: that is an output of the block before.
            if isinstance(output, Tensor) and output.requires_grad and not any(output is given for given in inputs):
                output.register_hook(lambda grad: self._before_backward(index))

    def _before_backward(self, index: int) -> None:
        """Autograd runs nodes in the reverse order of their making, and adds to the gradients of weights at once: when
        it comes to an output of this block, every other block is done.
        """
        if self._backward == index:
            return
        if self._backward is not None:
            self._release(self._backward)
        self._backward = index
        self._finish(index)
        self._prefetch(index - 1)

    # ------------------------------------------------------------------------------------------------- collectives

    def _prefetch(self, index: int) -> None:
        if 0 <= index < len(self._blocks) and index not in self._handles:
            self._handles[index] = self._start(self._blocks[index])

    def _finish(self, index: int) -> None:
        """Have a block whole."""
        handle = self._handles.pop(index, None)
        self._wait(self._start(self._blocks[index]) if handle is None else handle)

    def _start(self, parameters: Sequence[Any]) -> Any:
        missing = [p for p in parameters if p.ds_status == self._statuses.NOT_AVAILABLE]
        return missing[0].all_gather_coalesced(missing) if missing else None

    def _wait(self, handle: Any) -> None:
        if handle is not None:
            with torch.no_grad():
                handle.wait()

    def _release(self, index: int) -> None:
        whole = [p for p in self._blocks[index] if p.ds_status == self._statuses.AVAILABLE and not p.ds_persist]
        if whole:
            whole[0].partition(whole)


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1
