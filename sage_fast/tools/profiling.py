"""One training update under torch.profiler: a trace to look at, and torch's table of
the most expensive operators.

The trainer names its phases by `record_function`; blocks are named here, by hooks that
only a profiled model has. Attention and the ops of sage_kernels are operators with
names that the profiler shows.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils.hooks import RemovableHandle

from sage_fast.config.files import replacing, write_text
from sage_fast.models.family import transformer_blocks
from sage_fast.trainer import Trainer

TRACE = "trace.json.gz"
TABLE = "top.txt"
BLOCK = "transformer block"


def profile_update(
    trainer: Trainer, folder: Path, *, warmup: int, memory: bool, top: int
) -> str:
    """Profile one iteration of a trainer (a rollout and its updates) and write trace
    and table into a folder.

    Args:
        warmup: iterations before it, without the profiler. The first rollout of a run
            meets cold caches, and needs no forward for an anchor.
        memory: also record what operators allocate.
        top: rows of the table, which are operators and phases by their own time on the
            GPU, or on the CPU without one.

    Returns:
        The table.

    Raises:
        OSError: the folder cannot be written. What `Trainer.iterate` raises.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for _ in range(warmup):
        trainer.iterate()
    on_gpu = trainer.device.type == "cuda"
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * on_gpu
    with (
        named_blocks(trainer.policy.transformer),
        profile(
            activities=activities, profile_memory=memory, acc_events=True
        ) as profiler,
    ):
        trainer.iterate()
    with replacing(folder / TRACE) as partial:
        # The profiler compresses a file with the ending .gz.
        named = partial.with_name(TRACE)
        profiler.export_chrome_trace(str(named))
        named.replace(partial)
    order = "self_cuda_time_total" if on_gpu else "self_cpu_time_total"
    table: str = profiler.key_averages().table(
        sort_by=order, row_limit=top, max_name_column_width=60
    )
    write_text(folder / TABLE, table + "\n")
    return table


@contextmanager
def named_blocks(transformer: nn.Module) -> Iterator[None]:
    """Within the context every call of a transformer block is a range of the trace."""
    ranges: list[record_function] = []

    handles: list[RemovableHandle] = []
    for block in transformer_blocks(transformer):
        enter = block.register_forward_pre_hook(
            lambda *_: ranges.append(record_function(BLOCK).__enter__())
        )
        leave = block.register_forward_hook(
            lambda *_: ranges.pop().__exit__(None, None, None)
        )
        handles += [enter, leave]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
