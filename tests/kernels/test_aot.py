"""Ahead-of-time builds: limits on every kernel of the registry, and proof that the
limits are measured.
"""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import triton
from triton.backends.nvidia.compiler import CUDABackend

from sage_kernels import aot, common, launch, registry
from sage_kernels.aot import (
    ARCHITECTURES,
    MAX_REGISTERS,
    RECORDS,
    Build,
    global_accesses,
    launched_kernels,
)

ROOT = Path(__file__).resolve().parents[2]
CONTENT = json.loads(RECORDS.read_text("utf-8"))
WRITTEN = [Build(**row) for row in CONTENT["builds"]]
WRITTEN_GELU = next(
    build for build in WRITTEN if (build.op, build.arch) == ("gelu_tanh", 90)
)

PTX = """
.visible .entry kernel(
	.param .u64 .ptr .global .align 1 kernel_param_0,
	.param .u32 kernel_param_1,
	.param .u64 .ptr .global .align 1 kernel_param_2
)
{
	ld.param.b64 	%rd1, [kernel_param_0];
	ld.param.b64 	%rd2, [kernel_param_2];
	mul.wide.u32 	%rd3, %r1, 8;
	add.s64 	%rd4, %rd1, %rd3;
$L__BB0_1:
	@%p1 ld.global.v4.b32 { %r2, %r3, %r4, %r5 }, [ %rd4 + 0 ];
	add.s64 	%rd4, %rd4, 128;
	mov.b64 	%rd5, %rd2;
	@%p2 st.global.v2.b16 [ %rd5 + 16 ], { %rs1, %rs2 };
	@%p3 bra 	$L__BB0_1;
}
"""


def kernels_of(arch: int) -> list[str]:
    """Names of what the cases of all ops launch there."""
    specs = registry.specs().values()
    return [name for spec in specs for name in launched_kernels(spec, arch)]


def run_python(*arguments: str) -> subprocess.CompletedProcess[str]:
    """A process whose kernels are compiled, not interpreted."""
    environment = {
        name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"
    }
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
    return subprocess.run(
        [sys.executable, *arguments],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


def test_loads_behind_a_barrier_are_late_and_copies_are_not() -> None:
    def kinds(inserted: str, before: str) -> list[str]:
        ptx = PTX.replace(before, f"{inserted};\n\t{before}")
        return [
            kind for kind, _, _ in global_accesses(ptx, ["x_ptr", "size", "out_ptr"])
        ]

    assert kinds("bar.sync 	0", "@%p1 ld.global") == ["late ld", "st"]
    assert kinds("bar.sync 	0", "add.s64 	%rd4, %rd1, %rd3") == ["ld", "st"], (
        "before the loop"
    )
    copy = (
        "bar.sync 	0;\n\tcp.async.cg.shared.global [ %r11 + 0 ], [ %rd4 + 0 ], 0x10, "
        "%r19"
    )
    assert kinds(copy, "@%p2 st.global") == ["ld", "ld", "st"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"registers": MAX_REGISTERS + 1}, "129 registers"),
        ({"stack": 8}, "8 bytes of stack"),
        ({"spills": 2}, "2 spill instructions"),
        ({"loads": {"x_ptr": [16, 8]}}, "x_ptr is a stream"),
        ({"programs_per_sm": 5, "registers": 97}, "5 programs a multiprocessor, 4 fit"),
        (
            {"programs_per_sm": 4, "shared": 57 * 1024},
            "4 programs a multiprocessor, 3 fit",
        ),
        ({"instructions": 14.1}, "14.1 instructions an element, the limit is 14"),
        ({"late": ["x_ptr"]}, "x_ptr is loaded after a barrier"),
    ],
    ids=str,
)
def test_every_limit_can_be_broken(change: dict[str, object], words: str) -> None:
    assert WRITTEN_GELU.violations() == []
    (line,) = dataclasses.replace(WRITTEN_GELU, **change).violations()  # type: ignore[arg-type]
    assert words in line


@pytest.mark.slow
def test_a_narrow_and_a_spilling_kernel_are_found(tmp_path: Path) -> None:
    script = tmp_path / "bad.py"
    script.write_text(
        """
import triton
import triton.language as tl
from sage_kernels.aot import build
from sage_kernels.launch import Kernel


@triton.jit
def copy(x_ptr, out_ptr, size, BLOCK: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + o, tl.load(x_ptr + o * size, mask=o < size), mask=o < size)


@triton.jit
def hoard(x_ptr, out_ptr, size, BLOCK: tl.constexpr):
    o = tl.arange(0, BLOCK)
    first = tl.load(x_ptr + o)
    second = first
    for i in range(size):
        second += first
        first = first * tl.load(x_ptr + i * BLOCK + o) + tl.sum(first, 0)
    tl.store(out_ptr + o, first * second)


def kernel(function, block, warps):
    return Kernel(function=function, signature={"x_ptr": "*fp32", "out_ptr": "*fp32", "size": "i32"},
                  constexprs={"BLOCK": block}, num_warps=warps, aligned=("x_ptr", "out_ptr", "size"),
                  streaming=("x_ptr", "out_ptr"))


for function, block, warps in ((copy, 1024, 4), (hoard, 4096, 1)):
    for line in build("bad", function.__name__, kernel(function, block, warps), 90).violations():
        print(line)
"""
    )
    done = run_python(str(script))
    assert done.returncode == 0, done.stderr
    assert "copy for sm_90: x_ptr is a stream but has loads [4]" in done.stdout
    assert "out_ptr" not in done.stdout
    assert "hoard for sm_90" in done.stdout and "spill instructions" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nonsense"], "unknown ops ['nonsense']; known are ['adaln'"),
        (["--arch", "75"], "argument --arch: invalid choice: 75 (choose from 80, 89"),
        (["--arch", "90", "--json"], "kernels are interpreted: unset TRITON_INTERPRET"),
    ],
    ids=["op", "architecture", "interpreter"],
)
def test_a_mistake_of_the_command_line_is_its_own_line(
    arguments: list[str],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(common, "INTERPRETED", True)
    with pytest.raises(SystemExit, match="2"):
        aot.main(arguments)
    assert f"error: {words}" in capsys.readouterr().err


@pytest.fixture(scope="module")
def built() -> subprocess.CompletedProcess[str]:
    """The records of a process that builds for every architecture what has changed."""
    return run_python("-m", "sage_kernels.aot", "--json", "--changed")


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_kernels_stay_within_limits(
    arch: int, built: subprocess.CompletedProcess[str]
) -> None:
    assert built.stdout, built.stderr
    builds = [
        build
        for record in json.loads(built.stdout)["builds"]
        if (build := Build(**record)).arch == arch
    ]
    assert [build.kernel for build in builds] == kernels_of(arch)
    assert built.returncode == 0, built.stderr
    # another compiler may choose other registers
    if CONTENT["triton"] == triton.__version__:
        assert [build for build in WRITTEN if build.arch == arch] == builds, (
            "run python -m sage_kernels.aot --write"
        )


@pytest.mark.slow
@pytest.mark.skipif(CONTENT["triton"] != triton.__version__, reason="another compiler")
def test_what_has_not_changed_is_what_the_compiler_still_makes() -> None:
    """Of one op: all take the same way from a kernel to its record."""
    done = run_python(
        "-m", "sage_kernels.aot", "qk_norm_rope", "--json", "--arch", "90"
    )
    builds = [Build(**record) for record in json.loads(done.stdout)["builds"]]
    assert builds == [
        build for build in WRITTEN if (build.op, build.arch) == ("qk_norm_rope", 90)
    ]


@pytest.mark.slow
def test_a_record_follows_from_the_kernel_and_how_it_is_launched() -> None:
    done = run_python(
        "-c",
        """
from dataclasses import replace
from sage_kernels.aot import digest_of, launched_kernels
from sage_kernels.registry import specs
kernel, *_ = launched_kernels(specs()["gelu_tanh"]).values()
for changed in (
    kernel,
    replace(kernel, num_warps=2 * kernel.num_warps),
    replace(kernel, aligned=()),
    replace(kernel, constexprs={"BLOCK": 64}),
):
    print(digest_of(changed, 90))
print(digest_of(kernel, 80))
""",
    )
    digests = done.stdout.split()
    assert digests[0] == WRITTEN_GELU.digest, done.stderr
    assert len(set(digests)) == 5


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_kernels_build_where_every_integer_is_one() -> None:
    """Triton makes an integer argument of 1 a compile-time constant, which has other
    methods than a value.

    That does not depend on the type of the tensors, so each kernel is built for one.
    """
    done = run_python(
        "-c",
        """
from dataclasses import replace
from sage_kernels.aot import build, launched_kernels
from sage_kernels.registry import specs
built = set()
for spec in specs().values():
    for name, kernel in launched_kernels(spec).items():
        kind = kernel.name, repr(kernel.constexprs)
        if kind in built:
            continue
        built.add(kind)
        ones = {key: 1 for key, kind in kernel.signature.items() if kind in ("i32", "i64")}
        constexprs = ones | dict(kernel.constexprs)
        aligned = tuple(key for key in kernel.aligned if key not in constexprs)
        build(spec.name, name, replace(kernel, constexprs=constexprs, aligned=aligned), 90)
        print(name)
""",
    )
    found = done.stdout.splitlines()
    assert {name.partition("[")[0] for name in found} == {
        name.partition("[")[0] for name in kernels_of(90)
    }, done.stderr[-3000:]
    assert done.returncode == 0 and len(found) > 20, done.stderr[-3000:]


def test_the_recorder_sees_what_triton_specialises_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = pytest.importorskip("triton.runtime.jit")
    x, on_meta = (
        torch.zeros(64, 32, dtype=torch.bfloat16, device=device)
        for device in ("cpu", "meta")
    )
    numbers = (None, 32, 33, 1, 2**40, 0.5)
    arguments = (x, x[:, 1:], *numbers)
    function = SimpleNamespace(arg_names=list("abcdefgh"), __name__="some_kernel")
    monkeypatch.setattr(launch, "STREAM_ELEMENTS", 2048)
    with launch.recording() as kernels:
        launch.launch(
            function,
            (1,),
            on_meta,
            on_meta[:, 1:],
            *numbers,
            settings=launch.Launch(num_warps=4),
        )
    (kernel,) = kernels
    for name, argument in zip(function.arg_names, arguments, strict=True):
        kind, key = calls.native_specialize_impl(
            CUDABackend, argument, False, True, True
        )
        if kind == "constexpr":
            assert (
                kernel.constexprs[name] is argument
                or kernel.constexprs[name] == argument == 1
            )
        else:
            assert (kernel.signature[name], name in kernel.aligned) == (
                kind,
                key == "D",
            ), name
    assert kernel.streaming == ("a",)


@pytest.mark.parametrize(
    "arch",
    [pytest.param(a, marks=[] if a == 90 else pytest.mark.slow) for a in ARCHITECTURES],
)
def test_records_are_of_what_the_cases_launch(arch: int) -> None:
    written = [build.kernel for build in WRITTEN if build.arch == arch]
    assert written == kernels_of(arch), "run python -m sage_kernels.aot --write"


def test_records_are_within_limits() -> None:
    assert [line for build in WRITTEN for line in build.violations()] == []
