"""One training update under torch.profiler: a trace to look at, and the top costs of every phase.

The trainer names its phases by `record_function`; blocks are named here, by hooks that only a profiled model has.
Attention and the ops of sage_kernels are operators of their own and carry their names.
"""

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

from sage_fast.config.files import replacing, write_text
from sage_fast.models.transformer import transformer_blocks
from sage_fast.trainer import PHASE_PREFIX, Trainer

TRACE, TABLE_TEXT, TABLE_JSON = "trace.json.gz", "top.txt", "top.json"
BLOCK = "transformer block"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One operator in one phase. seconds: its own time, without what it calls; of the device where there is a GPU.

    allocated: bytes it allocated less those it freed; None unless memory was profiled.

    Example: `Row(phase="update", name="aten::addmm", calls=5376, seconds=0.41, share=0.32, allocated=None)`
    """

    phase: str
    name: str
    calls: int
    seconds: float
    share: float
    allocated: int | None


@dataclass(frozen=True, kw_only=True)
class PhaseTime:
    """seconds: from the start to the end of a phase, its later parts added. blocks: calls of transformer blocks in it.

    operators: sum of the operators' own seconds.
    """

    phase: str
    seconds: float
    operators: float
    blocks: int


@dataclass(frozen=True, kw_only=True)
class Profile:
    """What one update spent its time on; phases and rows by falling time.

    Example: `Profile(device="cpu", phases=[PhaseTime(phase="update", ...)], rows=[Row(...)])`
    """

    device: str
    phases: list[PhaseTime]
    rows: list[Row]

    def to_text(self, top: int) -> str:
        """The `top` rows of every phase, as a table."""
        total = sum(phase.seconds for phase in self.phases)
        width = max((len(row.name) for row in self.rows), default=0)
        width = min(max(width, 20), 60)
        lines = []
        for phase in self.phases:
            lines.append(
                f"{phase.phase}: {phase.seconds:.3f} s, {phase.seconds / total:.0%} of the update; "
                f"{phase.blocks} calls of transformer blocks"
            )
            memory = any(row.allocated is not None for row in self.rows)
            lines.append(
                f"  {'':<{width}}  {'calls':>7}  {'seconds':>8}  {'share':>5}" + ("  allocated" if memory else "")
            )
            for row in [row for row in self.rows if row.phase == phase.phase][:top]:
                allocated = "" if row.allocated is None else f"  {row.allocated / 1e6:>6.1f} MB"
                lines.append(
                    f"  {row.name[:width]:<{width}}  {row.calls:>7}  {row.seconds:>8.4f}  {row.share:>5.0%}{allocated}"
                )
            lines.append("")
        where = "of the GPU" if self.device.startswith("cuda") else "of the CPU"
        lines.append(f"Seconds of an operator are its own, {where}, as shares of the phase's operators.")
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """Every row, without rounding."""
        return asdict(self)


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
    activities = [ProfilerActivity.CPU]
    if trainer.device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with (
        named_blocks(trainer.policy.transformer),
        profile(activities=activities, profile_memory=memory, acc_events=True) as profiler,
    ):
        trainer.iterate()
    result = summarise(profiler.events() or [], str(trainer.device), memory)
    with replacing(folder / TRACE) as partial:
        # The profiler compresses what is named .gz.
        named = partial.with_name(TRACE)
        profiler.export_chrome_trace(str(named))
        named.replace(partial)
    write_text(folder / TABLE_TEXT, result.to_text(top) + "\n")
    write_text(folder / TABLE_JSON, json.dumps(result.to_json(), indent=1))
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

    blocks = transformer_blocks(transformer)
    handles = [block.register_forward_pre_hook(enter) for block in blocks]
    handles += [block.register_forward_hook(leave) for block in blocks]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def summarise(events: Sequence[Any], device: str, memory: bool) -> Profile:
    """The profiler's events by phase. An operator belongs to the innermost phase at whose time it was called, also
    when autograd calls it from a thread of its own.
    """
    spans = sorted(
        (e.time_range.start, e.time_range.end, e.name.removeprefix(PHASE_PREFIX))
        for e in events
        if e.name.startswith(PHASE_PREFIX) and e.device_type.name == "CPU"
    )
    on_gpu = device.startswith("cuda")
    seconds: dict[tuple[str, str], float] = defaultdict(float)
    calls: dict[tuple[str, str], int] = defaultdict(int)
    allocated: dict[tuple[str, str], int] = defaultdict(int)
    blocks: dict[str, int] = defaultdict(int)
    for event in events:
        if event.name.startswith(PHASE_PREFIX) or event.device_type.name != "CPU":
            continue
        phase = _phase_at(spans, event.time_range.start)
        if phase is None:
            continue
        if event.name == BLOCK:
            blocks[phase] += 1
        key = phase, event.name
        calls[key] += 1
        seconds[key] += (event.self_device_time_total if on_gpu else event.self_cpu_time_total) / 1e6
        if memory:
            allocated[key] += event.self_device_memory_usage if on_gpu else event.self_cpu_memory_usage
    own: dict[str, float] = defaultdict(float)
    for (phase, _), value in seconds.items():
        own[phase] += value
    lasting = _lasting(spans)
    rows = [
        Row(
            phase=phase,
            name=name,
            calls=calls[phase, name],
            seconds=value,
            share=value / own[phase] if own[phase] else 0.0,
            allocated=allocated[phase, name] if memory else None,
        )
        for (phase, name), value in sorted(seconds.items(), key=lambda item: -item[1])
    ]
    phases = [
        PhaseTime(phase=phase, seconds=value, operators=own[phase], blocks=blocks[phase])
        for phase, value in sorted(lasting.items(), key=lambda item: -item[1])
    ]
    return Profile(device=device, phases=phases, rows=rows)


Span = tuple[float, float, str]
"""Start, end (microseconds) and name of a phase."""


def _phase_at(spans: Sequence[Span], moment: float) -> str | None:
    """The innermost phase at a moment: of those that hold it, the one that began last."""
    found = None
    for start, end, name in spans:
        if start > moment:
            break
        if moment <= end:
            found = name
    return found


def _lasting(spans: Sequence[Span]) -> dict[str, float]:
    """Seconds of each phase, without those of a phase within it."""
    lasting: dict[str, float] = defaultdict(float)
    for start, end, name in spans:
        lasting[name] += (end - start) / 1e6
        outer = _phase_at([span for span in spans if span != (start, end, name)], start)
        if outer is not None:
            lasting[outer] -= (end - start) / 1e6
    return lasting
