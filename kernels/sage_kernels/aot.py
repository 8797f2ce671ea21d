"""Builds every kernel of the registry without a GPU and reports what the compiler made of it.

Per kernel and architecture: registers a thread, bytes of stack and local memory, spill instructions, bytes of shared
memory, and the width of every global access, attributed to the pointer argument it goes through by following the
address arithmetic in the PTX. `violations` compares that with the limits.

    python -m sage_kernels.aot                              a table on standard output; exit status 1 on a violation
    python -m sage_kernels.aot --write docs/kernels_aot.md  the same into a file
    python -m sage_kernels.aot --json                       for tests

Run it without TRITON_INTERPRET: interpreted kernels cannot be compiled.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from sage_kernels import common
from sage_kernels.registry import Kernel, specs

ARCHITECTURES = (80, 90, 100)
"""A100, H100/H200, B100/B200."""
MAX_REGISTERS = 128
STREAMING_BYTES = 16
_WARP_SIZE = 32


@dataclass(frozen=True, kw_only=True)
class Build:
    """What the compiler made of one kernel for one architecture.

    Example:
        >>> Build(kernel="gelu_tanh_forward[bf16]", arch=90, num_warps=8, registers=32, stack=0, local=0, spills=0,
        ...       shared=0, loads={"x_ptr": [16]}, stores={"out_ptr": [16]}, narrow=())
    """

    kernel: str
    arch: int
    """80 for sm_80."""
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
    loads: dict[str, list[int]]
    """Pointer argument -> widths of the loads through it, in bytes a thread, without repetition."""
    stores: dict[str, list[int]]
    """The same for stores."""
    narrow: tuple[str, ...]
    """Streaming pointers with an access narrower than 16 bytes, or with none at all."""

    def violations(self) -> list[str]:
        """Broken limits, in words; empty for a build that is in order."""
        where = f"{self.kernel} for sm_{self.arch}"
        broken = []
        if self.registers > MAX_REGISTERS:
            broken.append(f"{where}: {self.registers} registers, the limit is {MAX_REGISTERS}")
        if self.stack or self.local or self.spills:
            broken.append(
                f"{where}: {self.stack} bytes of stack, {self.local} of local memory, {self.spills} spill instructions"
            )
        for pointer in self.narrow:
            widths = f"loads {self.loads.get(pointer, [])}, stores {self.stores.get(pointer, [])} bytes wide"
            broken.append(f"{where}: {pointer} is a stream but has {widths}, the limit is {STREAMING_BYTES}")
        return broken


def build(kernel: Kernel, arch: int) -> Build:
    """Compile `kernel` for an architecture (80, 90, 100) and read the result.

    Raises:
        RuntimeError: kernels are interpreted, or a tool that comes with Triton failed.
    """
    if common.INTERPRETED:
        raise RuntimeError("kernels are interpreted: unset TRITON_INTERPRET to compile them")
    names = kernel.function.arg_names
    signature = {name: "constexpr" if name in kernel.constexprs else kernel.signature[name] for name in names}
    aligned = [
        index
        for index, name in enumerate(names)
        if signature[name][0] in "*i" and name not in kernel.unaligned and name not in kernel.constexprs
    ]
    source = ASTSource(
        fn=kernel.function,
        signature=signature,
        constexprs={(names.index(name),): value for name, value in kernel.constexprs.items()},
        attrs={(index,): [["tt.divisibility", 16]] for index in aligned},
    )
    compiled = triton.compile(
        source,
        target=GPUTarget("cuda", arch, _WARP_SIZE),
        options={"num_warps": kernel.num_warps, "enable_fp_fusion": kernel.fp_fusion},
    )
    runtime_names = [name for name in names if name not in kernel.constexprs]
    loads: dict[str, set[int]] = {}
    stores: dict[str, set[int]] = {}
    for access, name, width in global_accesses(compiled.asm["ptx"], runtime_names):
        (loads if access == "ld" else stores).setdefault(name, set()).add(width)
    usage, spills = _inspect(compiled.asm["cubin"])
    widths = {name: loads.get(name, set()) | stores.get(name, set()) for name in kernel.streaming}
    return Build(
        kernel=kernel.name,
        arch=arch,
        num_warps=kernel.num_warps,
        registers=usage["REG"],
        stack=usage["STACK"],
        local=usage["LOCAL"],
        spills=spills,
        shared=compiled.metadata.shared,
        loads={name: sorted(found) for name, found in loads.items()},
        stores={name: sorted(found) for name, found in stores.items()},
        narrow=tuple(name for name, found in widths.items() if min(found, default=0) < STREAMING_BYTES),
    )


def global_accesses(ptx: str, parameters: Sequence[str]) -> Iterator[tuple[str, str, int]]:
    """Every global load ("ld") and store ("st") of a kernel as (kind, pointer parameter, bytes a thread).

    Args:
        ptx: the assembly of one kernel.
        parameters: names of its run-time parameters in order.

    Raises:
        RuntimeError: an address that comes from no parameter, or from more than one pointer.
    """
    entry = re.search(r"\.entry\s+\w+\s*\((.*?)\)", ptx, re.S)
    if entry is None:
        raise RuntimeError("the PTX holds no kernel entry")
    # ".param .u64 .ptr .global .align 1 name_param_0": pointers are marked as such.
    is_pointer = [".ptr" in line for line in entry[1].split(",")]
    pointers = {f"_param_{i}": name for i, name in enumerate(parameters) if is_pointer[i]}

    # One instruction an entry, without comments, directives, labels and predicates.
    body = ptx[ptx.index("{", entry.end()) + 1 :]
    body = re.sub(r"//[^\n]*|^\s*\.(?:loc|file|reg|pragma)\b[^\n]*|^\s*[$\w]+:", "", body, flags=re.M)
    lines = [re.sub(r"^[\s{}]*(?:@!?%\w+\s+)?", "", line) for line in body.split(";")]

    # Which pointer parameters a register's value is computed from, to a fixed point because loops carry addresses.
    origins: dict[str, set[str]] = {}
    changed = True
    while changed:
        changed = False
        for line in lines:
            parts = re.match(r"([\w.:]+)\s+(\{[^}]*\}|%\w+)\s*,\s*(.*)", line, re.S)
            if parts is None or parts[1].startswith(("ld.global", "st.", "setp")):
                continue
            found: set[str] = set()
            for name in re.findall(r"_param_\d+\b", parts[3]) if parts[1].startswith("ld.param") else ():
                found |= {pointers[name]} if name in pointers else set()
            for register in re.findall(r"%\w+", parts[3]):
                found |= origins.get(register, set())
            for target in re.findall(r"%\w+", parts[2]):
                if not found <= origins.setdefault(target, set()):
                    origins[target] |= found
                    changed = True

    for line in lines:
        access = re.match(r"(ld|st)\.global([\w.:]*)", line)
        if access is None:
            continue
        address = re.search(r"\[\s*(%\w+)", line)
        names = origins.get(address[1], set()) if address else set()
        if len(names) != 1:
            raise RuntimeError(f"cannot tell which pointer this goes through, candidates {sorted(names)}: {line}")
        vector = re.search(r"\.v(\d)", access[2])
        bits = re.search(r"\.[busf](\d+)", access[2])
        if bits is None:
            raise RuntimeError(f"no element type in {line}")
        yield access[1], next(iter(names)), (int(vector[1]) if vector else 1) * int(bits[1]) // 8


def _inspect(cubin: bytes) -> tuple[dict[str, int], int]:
    """Resource usage of a cubin (REG, STACK, LOCAL, ...) and its number of local memory instructions."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = _run(triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name)
        numbers = {key: int(value) for key, value in re.findall(r"\b([A-Z]+):(\d+)", usage)}
        # What is spilled lies in the stack or in local memory: without either the code need not be read (0.3 s).
        has_room = numbers["STACK"] or numbers["LOCAL"]
        code = _run(triton.knobs.nvidia.nvdisasm.path, "-c", file.name) if has_room else ""
    return numbers, len(re.findall(r"\b(?:LDL|STL)\b", code))


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}: {done.stderr.strip()}")
    return done.stdout


def build_all(ops: Sequence[str] = (), architectures: Sequence[int] = ARCHITECTURES) -> list[Build]:
    """Build the kernels of the named ops (all by default) for the architectures."""
    known = specs()
    unknown = sorted(set(ops) - set(known))
    if unknown:
        raise ValueError(f"unknown ops {unknown}; known are {sorted(known)}")
    return [
        build(kernel, arch)
        for name, spec in known.items()
        if not ops or name in ops
        for kernel in spec.kernels()
        for arch in architectures
    ]


def markdown(builds: Sequence[Build]) -> str:
    """The table of builds as a document."""
    lines = [
        "# Kernels as compiled",
        "",
        "Written by `python -m sage_kernels.aot --write` "
        f"(Triton {triton.__version__}); no GPU is needed. Limits, held by a test: at most {MAX_REGISTERS} registers a "
        f"thread, no stack, local memory or spills, and at least {STREAMING_BYTES} bytes a thread in every access to a "
        "stream. Widths are bytes a thread, streams in bold. Shapes are those of HunyuanVideo-1.5 (width 2048, 16 "
        "heads of 128).",
        "",
        "| kernel | arch | warps | registers | stack + local | spills | shared | loads | stores |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    streams = {kernel.name: kernel.streaming for spec in specs().values() for kernel in spec.kernels()}

    def accesses(found: dict[str, list[int]], streaming: Sequence[str]) -> str:
        groups: dict[str, list[str]] = {}
        for name, widths in found.items():
            short = name.removesuffix("_ptr").removeprefix("p_")
            text = f"**{short}**" if name in streaming else short
            groups.setdefault("/".join(map(str, widths)), []).append(text)
        return "; ".join(f"{', '.join(names)} {widths}" for widths, names in groups.items())

    for item in builds:
        streaming = streams[item.kernel]
        lines.append(
            f"| {item.kernel} | sm_{item.arch} | {item.num_warps} | {item.registers} | {item.stack + item.local} "
            f"| {item.spills} | {item.shared} | {accesses(item.loads, streaming)} "
            f"| {accesses(item.stores, streaming)} |"
        )
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m sage_kernels.aot", description=__doc__.split("\n")[0])
    parser.add_argument("ops", nargs="*", help="ops to build; all by default")
    parser.add_argument("--arch", type=int, nargs="+", default=list(ARCHITECTURES), help="80 for sm_80")
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--write", type=Path, help="file for the table")
    output.add_argument("--json", action="store_true", help="print records instead of a table")
    options = parser.parse_args(argv)
    builds = build_all(options.ops, options.arch)
    if options.json:
        print(json.dumps([asdict(item) for item in builds]))
    elif options.write:
        options.write.write_text(markdown(builds), "utf-8")
    else:
        print(markdown(builds), end="")
    broken = [line for item in builds for line in item.violations()]
    print("\n".join(broken), end="\n" if broken else "", file=sys.stderr)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
