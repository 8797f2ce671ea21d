"""Builds every kernel that the benchmark cases launch, without a GPU.

Per kernel and architecture: registers a thread, bytes of stack and local memory, spill
instructions, bytes of shared memory, how many of its programs fit a multiprocessor,
instructions an element, and the width of every global access, attributed to the pointer
argument it goes through by following the address arithmetic in the PTX. `violations`
compares that with the limits.

    python -m sage_kernels.aot             a table on standard output; exit status 1 on a violation
    python -m sage_kernels.aot --write     renew kernels/aot.json
    python -m sage_kernels.aot --json      the records on standard output, for tests
    python -m sage_kernels.aot --changed   with any of these: build only what changed since kernels/aot.json

Run it without TRITON_INTERPRET: interpreted kernels cannot be compiled.
"""

import argparse
import hashlib
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from sage_kernels import common
from sage_kernels.custom_op import recording_on_meta
from sage_kernels.launch import TRITON_TYPES, Kernel
from sage_kernels.registry import OpSpec, specs
from sage_kernels.tracer import backward_call

ARCHITECTURES = (80, 89, 90, 100, 120)
"""A100; RTX 4090 and L40S; H100/H200; B100/B200; RTX 5090."""
MAX_REGISTERS = 128
STREAMING_BYTES = 16
INSTRUCTIONS = {"gelu_tanh_forward": 14, "gelu_tanh_backward": 28}
"""Most machine instructions an element of kernels that compute more than they wait: an
H100 issues 128 a cycle on each of its multiprocessors and reads or writes some 15
bytes.
"""
SHARED_MEMORY = {80: 164, 89: 100, 90: 228, 100: 228, 120: 100}
"""KiB of a multiprocessor; a program takes one of them beside its own."""
WARPS = {80: 64, 89: 48, 90: 64, 100: 64, 120: 48}
"""Warps that a multiprocessor holds."""
RECORDS = Path(__file__).resolve().parents[1] / "aot.json"
_WARP_SIZE = 32


@dataclass(frozen=True, kw_only=True)
class Build:
    """Result of compiling one kernel for one architecture.

    Example:
        >>> Build(op="gelu_tanh", kernel="gelu_tanh_forward[bf16, A]", arch=90, digest="5ec4", num_warps=8,
        ...       registers=32, stack=0, local=0, spills=0, shared=0, programs_per_sm=1, instructions=13.8, late=[],
        ...       loads={"x_ptr": [16]}, stores={"out_ptr": [16]}, streaming=("x_ptr", "out_ptr"))
    """

    op: str
    kernel: str
    """Its function, the type of the large inputs and the first case that launches it.
    """
    arch: int
    """80 for sm_80."""
    digest: str
    """Of all that the record follows from, see `digest_of`."""
    num_warps: int
    registers: int
    """A thread."""
    stack: int
    """Bytes a thread; spilled registers live there."""
    local: int
    """Bytes of local memory a thread beyond the stack."""
    spills: int
    """Loads from and stores to local memory in the machine code."""
    shared: int
    """Bytes a program."""
    programs_per_sm: int
    """Programs that the launch wants on a multiprocessor at once."""
    instructions: float
    """An element, where `INSTRUCTIONS` limits them, else 0."""
    late: list[str]
    """Streams that are loaded after a barrier, and not by an asynchronous copy."""
    loads: dict[str, list[int]]
    """Pointer argument -> widths of the loads through it, in bytes a thread, without
    repetition.
    """
    stores: dict[str, list[int]]
    """The same for stores."""
    streaming: tuple[str, ...]
    """Pointers to large tensors, all of whose accesses must be 16 bytes wide."""

    @property
    def fitting_programs(self) -> int:
        """Programs that registers, threads and shared memory of a multiprocessor admit."""
        registers = 2**16 // (-(-self.registers // 8) * 8 * self.num_warps * _WARP_SIZE)
        shared = SHARED_MEMORY[self.arch] * 1024 // (self.shared + 1024)
        return min(registers, WARPS[self.arch] // self.num_warps, shared)

    @property
    def widths(self) -> dict[str, int]:
        """Stream -> bytes a thread of its narrowest access, 0 where it has none."""
        return {
            name: min(
                [*self.loads.get(name, []), *self.stores.get(name, [])], default=0
            )
            for name in self.streaming
        }

    def violations(self) -> list[str]:
        """Broken limits, in words; empty for a build that is in order."""
        where = f"{self.kernel} for sm_{self.arch}"
        broken = []
        if self.registers > MAX_REGISTERS:
            broken.append(
                f"{where}: {self.registers} registers, the limit is {MAX_REGISTERS}"
            )
        if self.stack or self.local or self.spills:
            broken.append(
                f"{where}: {self.stack} bytes of stack, {self.local} of local memory, "
                f"{self.spills} spill instructions"
            )
        if self.programs_per_sm > self.fitting_programs:
            broken.append(
                f"{where}: {self.programs_per_sm} programs a multiprocessor, "
                f"{self.fitting_programs} fit"
            )
        most = INSTRUCTIONS.get(self.kernel.split("[")[0], self.instructions)
        if self.instructions > most:
            broken.append(
                f"{where}: {self.instructions} instructions an element, the limit is "
                f"{most}"
            )
        broken += [
            f"{where}: {pointer} is loaded after a barrier" for pointer in self.late
        ]
        for pointer in (
            name for name, width in self.widths.items() if width < STREAMING_BYTES
        ):
            widths = (
                f"loads {self.loads.get(pointer, [])}, stores "
                f"{self.stores.get(pointer, [])} bytes wide"
            )
            broken.append(
                f"{where}: {pointer} is a stream but has {widths}, the limit is "
                f"{STREAMING_BYTES}"
            )
        return broken


def launched_kernels(spec: OpSpec, arch: int = 90) -> dict[str, Kernel]:
    """The kernels that the op's cases launch on an architecture, each once, by their
    names in reports.
    """
    cases = [(case, dtype) for dtype in spec.dtypes for case in spec.bench_cases]
    cases += [(case, torch.bfloat16) for case in spec.wide_cases]
    found: dict[tuple[object, ...], tuple[str, Kernel]] = {}
    for case, dtype in cases:
        inputs = spec.make_inputs(case, dtype, "meta", None)
        backward = backward_call(spec, case, inputs) if spec.differentiable else None
        with recording_on_meta(divmod(arch, 10)) as kernels:
            spec.op(**inputs)
            if backward:
                backward()
        for kernel in kernels:
            found.setdefault(
                kernel.identity,
                (f"{kernel.name}[{TRITON_TYPES[dtype]}, {case.id}]", kernel),
            )
    return dict(found.values())


def source_of(kernel: Kernel) -> ASTSource:
    """A kernel as Triton's compiler takes it."""
    names = kernel.function.arg_names
    return ASTSource(
        fn=kernel.function,
        signature={
            name: "constexpr" if name in kernel.constexprs else kernel.signature[name]
            for name in names
        },
        constexprs={
            (names.index(name),): value for name, value in kernel.constexprs.items()
        },
        attrs={
            (names.index(name),): [["tt.divisibility", 16]] for name in kernel.aligned
        },
    )


def digest_of(kernel: Kernel, arch: int) -> str:
    """Equal for kernels whose records are equal: of Triton's version, of the kernel's
    source with all that it calls, its arguments and its launch, and of this file.
    """
    parts = (
        triton.__version__,
        source_of(kernel).hash(),
        repr(kernel),
        arch,
        Path(__file__).read_text("utf-8"),
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def build(op: str, name: str, kernel: Kernel, arch: int) -> Build:
    """Compile a kernel for an architecture (one of `ARCHITECTURES`) and read the
    result.

    Raises:
        RuntimeError: kernels are interpreted, or a tool that comes with Triton failed.
    """
    if common.INTERPRETED:
        raise RuntimeError(
            "kernels are interpreted: unset TRITON_INTERPRET to compile them"
        )
    names = kernel.function.arg_names
    compiled = triton.compile(
        source_of(kernel),
        target=GPUTarget("cuda", arch, _WARP_SIZE),
        options={"num_warps": kernel.num_warps, "enable_fp_fusion": kernel.fp_fusion},
    )
    runtime_names = [name for name in names if name not in kernel.constexprs]
    accesses = list(global_accesses(compiled.asm["ptx"], runtime_names))

    def widths(*kinds: str) -> dict[str, list[int]]:
        found = [(name, width) for kind, name, width in accesses if kind in kinds]
        return {
            name: sorted({width for other, width in found if other == name})
            for name, _ in found
        }

    usage, code = _inspect(
        compiled.asm["cubin"], disassemble=kernel.name in INSTRUCTIONS
    )
    instructions = 0.0
    if kernel.name in INSTRUCTIONS:
        elements = kernel.constexprs["BLOCK"] / (kernel.num_warps * _WARP_SIZE)
        instructions = round(len(code) / elements, 1)
    return Build(
        op=op,
        kernel=name,
        arch=arch,
        digest=digest_of(kernel, arch),
        num_warps=kernel.num_warps,
        registers=usage["REG"],
        stack=usage["STACK"],
        local=usage["LOCAL"],
        spills=sum(name in ("LDL", "STL") for name in code),
        shared=compiled.metadata.shared,
        programs_per_sm=kernel.programs_per_sm,
        instructions=instructions,
        late=sorted(set(widths("late ld")) & set(kernel.streaming)),
        loads=widths("ld", "late ld"),
        stores=widths("st"),
        streaming=kernel.streaming,
    )


def global_accesses(
    ptx: str, parameters: Sequence[str]
) -> Iterator[tuple[str, str, int]]:
    """Every global access of a kernel as (kind, pointer parameter, bytes a thread).

    Kinds are "ld" for loads and asynchronous copies to shared memory, "late ld" for
    loads that follow a barrier in their basic block, as in the body of a loop, and "st"
    for stores.

    Args:
        ptx: the assembly of one kernel.
        parameters: names of its run-time parameters in order.

    Raises:
        RuntimeError: an address that comes from no parameter, or from more than one
            pointer.
    """
    entry = re.search(r"\.entry\s+\w+\s*\((.*?)\)", ptx, re.S)
    if entry is None:
        raise RuntimeError("the PTX holds no kernel entry")
    # ".param .u64 .ptr .global .align 1 name_param_0": pointers are marked as such.
    is_pointer = [".ptr" in line for line in entry[1].split(",")]
    pointers = {
        f"_param_{i}": name for i, name in enumerate(parameters) if is_pointer[i]
    }

    # One instruction an entry, without comments, directives, labels of debugging and
    # predicates.
    body = ptx[ptx.index("{", entry.end()) + 1 :]
    body = re.sub(r"^\$L__BB\w+:", "label;", body, flags=re.M)
    body = re.sub(
        r"//[^\n]*|^\s*\.(?:loc|file|reg|pragma)\b[^\n]*|^\s*[$\w]+:",
        "",
        body,
        flags=re.M,
    )
    lines = [re.sub(r"^[\s{}]*(?:@!?%\w+\s+)?", "", line) for line in body.split(";")]

    # Which pointer parameters a register's value is computed from, to a fixed point
    # because loops carry addresses.
    origins: dict[str, set[str]] = {}
    changed = True
    while changed:
        changed = False
        for line in lines:
            parts = re.match(r"([\w.:]+)\s+(\{[^}]*\}|%\w+)\s*,\s*(.*)", line, re.S)
            if parts is None or parts[1].startswith(("ld.global", "st.", "setp")):
                continue
            found: set[str] = set()
            if parts[1].startswith("ld.param"):
                names = re.findall(r"_param_\d+\b", parts[3])
                found = {pointers[name] for name in names if name in pointers}
            for register in re.findall(r"%\w+", parts[3]):
                found |= origins.get(register, set())
            for target in re.findall(r"%\w+", parts[2]):
                if not found <= origins.setdefault(target, set()):
                    origins[target] |= found
                    changed = True

    behind_barrier = False
    for line in lines:
        behind_barrier = (
            behind_barrier or line.startswith("bar.sync")
        ) and not line.startswith("label")
        access = re.match(r"(ld|st|cp\.async\.c[ag]\.shared)\.global([\w.:]*)", line)
        if access is None:
            continue
        is_copy = access[1].startswith("cp")
        address = re.search(r"\],\s*\[\s*(%\w+)" if is_copy else r"\[\s*(%\w+)", line)
        candidates = origins.get(address[1], set()) if address else set()
        if len(candidates) != 1:
            raise RuntimeError(
                "cannot tell which pointer this goes through, candidates "
                f"{sorted(candidates)}: {line}"
            )
        (pointer,) = candidates
        if is_copy:
            yield "ld", pointer, int(line.split("],")[2].split(",")[0], 0)
            continue
        vector = re.search(r"\.v(\d)", access[2])
        bits = re.search(r"\.[busf](\d+)", access[2])
        if bits is None:
            raise RuntimeError(f"no element type in {line}")
        kind = "late ld" if access[1] == "ld" and behind_barrier else access[1]
        elements = int(vector[1]) if vector else 1
        yield kind, pointer, elements * int(bits[1]) // 8


def _inspect(cubin: bytes, *, disassemble: bool) -> tuple[dict[str, int], list[str]]:
    """Resource usage of a cubin (REG, STACK, LOCAL, ...) and its instructions by name,
    if something asks for them.
    """
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = _run(
            triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name
        )
        numbers = {
            key: int(value) for key, value in re.findall(r"\b([A-Z]+):(\d+)", usage)
        }
        # Spilled registers lie in the stack or in local memory: without either the code
        # need not be read (0.3 s).
        code = ""
        if numbers["STACK"] or numbers["LOCAL"] or disassemble:
            code = _run(triton.knobs.nvidia.nvdisasm.path, "-c", file.name)
    names = re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z]\w*)", code)
    return numbers, [name for name in names if name != "NOP"]


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(
            f"{' '.join(command)} ended with {done.returncode}: {done.stderr.strip()}"
        )
    return done.stdout


HEAD = (
    "kernel",
    "arch",
    "warps",
    "registers",
    "stack + local",
    "spills",
    "shared",
    "programs: wanted, fit",
    "instructions",
    "loads",
    "stores",
)


def table(builds: Sequence[Build]) -> str:
    """Markdown table: shared memory in bytes a program, accesses in bytes a thread."""

    def accesses(found: dict[str, list[int]]) -> str:
        return ", ".join(
            f"{name} {'/'.join(map(str, widths))}" for name, widths in found.items()
        )

    rows: list[Sequence[object]] = [HEAD, ["---"] * len(HEAD)]
    for item in builds:
        rows.append(
            (
                item.kernel,
                f"sm_{item.arch}",
                item.num_warps,
                item.registers,
                item.stack + item.local,
                item.spills,
                item.shared,
                f"{item.programs_per_sm}, {item.fitting_programs}",
                item.instructions or "",
                accesses(item.loads),
                accesses(item.stores),
            )
        )
    return "".join(f"| {' | '.join(map(str, row))} |\n" for row in rows)


def read_records() -> dict[tuple[str, str], Build]:
    """The records of `RECORDS`, by kernel and digest."""
    rows = json.loads(RECORDS.read_text("utf-8"))["builds"]
    builds = [Build(**{**row, "streaming": tuple(row["streaming"])}) for row in rows]
    return {(item.kernel, item.digest): item for item in builds}


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m sage_kernels.aot", description=__doc__.split("\n")[0]
    )
    parser.add_argument("ops", nargs="*", help="ops to build; all by default")
    parser.add_argument(
        "--arch",
        type=int,
        nargs="+",
        choices=ARCHITECTURES,
        default=ARCHITECTURES,
        help="80: sm_80",
    )
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--write", action="store_true", help=f"renew {RECORDS.name}")
    output.add_argument(
        "--json", action="store_true", help="print records instead of a table"
    )
    parser.add_argument(
        "--changed",
        action="store_true",
        help=f"take from {RECORDS.name} what has not changed since",
    )
    options = parser.parse_args(argv)
    known = specs()
    if unknown := sorted(set(options.ops) - known.keys()):
        parser.error(f"unknown ops {unknown}; known are {sorted(known)}")
    if common.INTERPRETED:
        parser.error("kernels are interpreted: unset TRITON_INTERPRET to compile them")
    written = read_records() if options.changed else {}
    builds = [
        written.get((name, digest_of(kernel, arch))) or build(op, name, kernel, arch)
        for op in known
        if not options.ops or op in options.ops
        for arch in options.arch
        for name, kernel in launched_kernels(known[op], arch).items()
    ]
    rows = ",\n".join(json.dumps(asdict(item)) for item in builds)
    text = f'{{"triton": "{triton.__version__}", "builds": [\n{rows}\n]}}\n'
    if options.write:
        RECORDS.write_text(text, "utf-8")
    else:
        print(text if options.json else table(builds), end="")
    broken = [line for item in builds for line in item.violations()]
    print("\n".join(broken), end="\n" if broken else "", file=sys.stderr)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
