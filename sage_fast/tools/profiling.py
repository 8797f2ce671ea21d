"""One training update under torch.profiler: a trace to look at, and the top costs of every phase.

The trainer names its phases by `record_function`; blocks are named here, by hooks that only a profiled model has.
Attention and the ops of sage_kernels are operators with names that the profiler shows.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

from sage_fast.config.files import replacing, write_text
from sage_fast.trainer import PHASE_PREFIX, Trainer

TRACE, TABLE_TEXT, TABLE_JSON = "trace.json.gz", "top.txt", "top.json"
BLOCK = "transformer block"


@dataclass(kw_only=True)
class Row:
    """One operator in one phase. seconds: its own time, without what it calls; of the device where there is a GPU.

    allocated: bytes it allocated less those it freed; None unless memory was profiled.

    Example: `Row(phase="update", name="aten::addmm", calls=5376, seconds=0.41, share=0.32, allocated=None)`
    """

    phase: str
    name: str
    calls: int = 0
    seconds: float = 0.0
    share: float = 0.0
    allocated: int | None = None


@dataclass(kw_only=True)
class PhaseTime:
    """seconds: from the start to the end of a phase, its later parts added, those of phases within it left out.

    operators: sum of the operators' own seconds. blocks: calls of transformer blocks.
    """

    phase: str
    seconds: float = 0.0
    operators: float = 0.0
    blocks: int = 0


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Costs of one update; phases and rows by falling time.

    Example: `Profile(device="cpu", phases=[PhaseTime(phase="update", ...)], rows=[Row(...)])`
    """

    device: str
    phases: list[PhaseTime]
    rows: list[Row]

    def to_text(self, top: int) -> str:
        """The `top` rows of every phase, as a table."""
        total = sum(phase.seconds for phase in self.phases)
        width = min(max([20, *(len(row.name) for row in self.rows)]), 60)
        memory = any(row.allocated is not None for row in self.rows)
        lines = []
        for phase in self.phases:
            share = f"{phase.seconds / total:.0%} of the update"
            lines.append(f"{phase.phase}: {phase.seconds:.3f} s, {share}; {phase.blocks} calls of transformer blocks")
            head = f"  {'':<{width}}  {'calls':>7}  {'seconds':>8}  {'share':>5}"
            lines.append(head + ("  allocated" if memory else ""))
            for row in [row for row in self.rows if row.phase == phase.phase][:top]:
                allocated = "" if row.allocated is None else f"  {row.allocated / 1e6:>6.1f} MB"
                lines.append(
                    f"  {row.name[:width]:<{width}}  {row.calls:>7}  {row.seconds:>8.4f}  {row.share:>5.0%}{allocated}"
                )
            lines.append("")
        where = "of the GPU" if self.device.startswith("cuda") else "of the CPU"
        return "\n".join([*lines, f"Seconds of an operator are its own, {where}, as shares of the phase's operators."])


def profile_update(trainer: Trainer, folder: Path, *, warmup: int, memory: bool, top: int) -> Profile:
    """Profile one iteration of a trainer (a rollout and its updates) and write trace and tables into a folder.

    Args:
        warmup: iterations before it, without the profiler. The first rollout of a run meets cold caches, and needs no
            forward for an anchor.
        memory: also record what operators allocate.
        top: rows per phase in the text.

    Raises:
        OSError: the folder cannot be written. What `Trainer.iterate` raises.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for _ in range(warmup):
        trainer.iterate()
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (trainer.device.type == "cuda")
    with (
        named_blocks(trainer.policy.transformer),
        profile(activities=activities, profile_memory=memory, acc_events=True) as profiler,
    ):
        trainer.iterate()
    result = summarise(profiler.events() or [], str(trainer.device), memory)
    with replacing(folder / TRACE) as partial:
        # The profiler compresses a file with the ending .gz.
        named = partial.with_name(TRACE)
        profiler.export_chrome_trace(str(named))
        named.replace(partial)
    write_text(folder / TABLE_TEXT, result.to_text(top) + "\n")
    write_text(folder / TABLE_JSON, json.dumps(asdict(result), indent=1))
    return result


@contextmanager
def named_blocks(transformer: nn.Module) -> Iterator[None]:
    """Within the context every call of a transformer block is a range of the trace."""
    ranges: list[record_function] = []

    def enter(module: nn.Module, arguments: object) -> None:
        ranges.append(record_function(BLOCK))
        ranges[-1].__enter__()

    def leave(module: nn.Module, arguments: object, result: object) -> None:
        ranges.pop().__exit__(None, None, None)

    blocks: Any = transformer.transformer_blocks
    handles = [block.register_forward_pre_hook(enter) for block in blocks]
    handles += [block.register_forward_hook(leave) for block in blocks]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def summarise(events: Sequence[Any], device: str, memory: bool) -> Profile:
    """The profiler's events by phase. An operator belongs to the innermost phase at whose time it was called, also
    when autograd calls it from another thread.
    """
    on_gpu = device.startswith("cuda")
    on_cpu = [event for event in events if event.device_type.name == "CPU"]
    # Start, end (microseconds) and name of every phase.
    spans = sorted(
        (event.time_range.start, event.time_range.end, event.name.removeprefix(PHASE_PREFIX))
        for event in on_cpu
        if event.name.startswith(PHASE_PREFIX)
    )

    def phase_at(moment: float, without: object = None) -> str | None:
        # Of the phases that hold the moment, the one that began last.
        holding = [span for span in spans if span[0] <= moment <= span[1] and span is not without]
        return holding[-1][2] if holding else None

    phases: dict[str, PhaseTime] = {}
    for span in spans:
        phase = phases.setdefault(span[2], PhaseTime(phase=span[2]))
        phase.seconds += (span[1] - span[0]) / 1e6
    for span in spans:
        if (outer := phase_at(span[0], without=span)) is not None:
            phases[outer].seconds -= (span[1] - span[0]) / 1e6
    rows: dict[tuple[str, str], Row] = {}
    for event in on_cpu:
        name = None if event.name.startswith(PHASE_PREFIX) else phase_at(event.time_range.start)
        if name is None:
            continue
        row = rows.setdefault((name, event.name), Row(phase=name, name=event.name, allocated=0 if memory else None))
        own = (event.self_device_time_total if on_gpu else event.self_cpu_time_total) / 1e6
        row.calls += 1
        row.seconds += own
        phases[name].operators += own
        phases[name].blocks += event.name == BLOCK
        if row.allocated is not None:
            row.allocated += event.self_device_memory_usage if on_gpu else event.self_cpu_memory_usage
    for row in rows.values():
        row.share = row.seconds / phases[row.phase].operators if phases[row.phase].operators else 0.0
    return Profile(
        device=device,
        phases=sorted(phases.values(), key=lambda phase: -phase.seconds),
        rows=sorted(rows.values(), key=lambda row: -row.seconds),
    )
