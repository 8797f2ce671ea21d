"""A pretend CUDA device for a whole process: `from tests.pretend_cuda import install`,
before torch is imported.

device.cpp is the device; here are torch.cuda's functions over it, the operators that
CUDA alone has, and sage_kernels, whose launchers run all of their Python while their
plain twins compute. Eager: a missing `wait_stream` does not show.
"""

import ctypes
import fcntl
import hashlib
import importlib.util
import inspect
import math
import os
import shutil
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

SOURCE = Path(__file__).with_name("device.cpp")
PLACES = ("sage_fast", "sage_kernels", "benchmarks")
H100 = {
    "name": "NVIDIA H100 80GB HBM3",
    "major": 9,
    "minor": 0,
    "total_memory": 79 * 2**30,
    "multi_processor_count": 132,
}

waits: Counter[tuple[str, str]] = Counter()
"""(what, innermost place of the project) -> how often the host waited."""
races: list[str] = []
launches: Counter[str] = Counter()
"""Kernel -> launches."""
compiled: list[str] = []
"""Kernels that Triton's JIT compiled."""


def compiler() -> str | None:
    """The C++ compiler that builds the device; None where there is none."""
    return shutil.which(os.environ.get("CXX", "g++"))


def build() -> Path:
    """The device's library, built where this source has not been (a quarter of a
    minute) for this torch.
    """
    from importlib.metadata import version

    key = hashlib.sha256(SOURCE.read_bytes() + version("torch").encode()).hexdigest()[
        :16
    ]
    folder = (
        Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
        / "sage-fast-tests"
        / key
    )
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(folder.parent / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # of several test processes one builds
        if (folder / "pretend_cuda.so").is_file():
            return folder / "pretend_cuda.so"
        from torch.utils.cpp_extension import load

        with tempfile.TemporaryDirectory(dir=folder.parent) as made:
            flags = {
                "extra_cflags": ["-O1"],
                "build_directory": made,
                "is_python_module": False,
            }
            load("pretend_cuda", [str(SOURCE)], **flags)
            folder.mkdir(exist_ok=True)
            os.replace(Path(made) / "pretend_cuda.so", folder / "pretend_cuda.so")
    return folder / "pretend_cuda.so"


def _load(library: Path) -> Any:
    """The extension, whose hooks torch looks up as it is imported: torch's own
    libraries come first, without torch.
    """
    assert "torch" not in sys.modules, (
        "the pretend device must be installed before torch is imported"
    )
    (torch_folder,) = importlib.util.find_spec("torch").submodule_search_locations  # type: ignore[union-attr,misc]
    for name in (
        "torch_global_deps",
        "c10",
        "torch_cpu",
        "torch",
        "shm",
        "torch_python",
    ):
        path = Path(torch_folder) / "lib" / f"lib{name}.so"
        ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    import torch  # noqa: F401

    spec = importlib.util.spec_from_file_location("pretend_cuda", library)
    extension = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
    spec.loader.exec_module(extension)  # type: ignore[union-attr]
    return extension


def _place() -> str:
    """Innermost file and function of the project."""
    for frame, _ in traceback.walk_stack(None):
        if any(name in Path(frame.f_code.co_filename).parts for name in PLACES):
            return f"{frame.f_code.co_filename}:{frame.f_code.co_name}"
    return "?"


def _noted(kind: str, what: str) -> None:
    if kind == "race":
        races.append(f"{what} ({_place()})")
    else:
        waits[what, _place()] += 1


machine = SimpleNamespace(devices=1, jit=False, extension=None)
"""`jit` compiles every launch by Triton and ptxas for sm_90."""


def choose_machine(devices: int, jit: bool) -> None:
    """Another number of GPUs, before anything is on one."""
    machine.devices = devices
    machine.jit = jit
    machine.extension.start(devices, _noted)


def install() -> None:
    """Give this process pretended GPUs."""
    extension = machine.extension = _load(Path(os.environ["PRETEND_CUDA_LIBRARY"]))
    import torch

    choose_machine(1, jit=False)

    def index(device: Any = None) -> int:
        number: int = torch.cuda._utils._get_device_index(device, optional=True)
        return extension.current() if number < 0 else number

    def exchange(to: int) -> int:
        before = extension.current()
        if to >= 0:
            extension.set_device(to)
        return int(before)

    class Stream(torch.Stream):
        def __new__(cls, device: Any = None, priority: int = 0) -> Any:
            return torch.Stream(torch.device("cuda", index(device)), priority=priority)

    class Event(torch.Event):
        def __new__(cls, enable_timing: bool = False, **_: Any) -> Any:
            return torch.Event("cuda", enable_timing=enable_timing)

    replaced: dict[str, Any] = {
        # A function for each name: Dynamo has rules by function.
        **{
            n: (lambda *_, **__: True)
            for n in (
                "is_available",
                "is_initialized",
                "is_bf16_supported",
                "_is_compiled",
            )
        },
        **{
            name: (lambda: None)
            for name in ("_lazy_init", "init", "empty_cache", "ipc_collect")
        },
        **{
            name: (lambda: False)
            for name in ("is_current_stream_capturing", "_is_in_bad_fork")
        },
        **{
            name: (lambda to: exchange(to))
            for name in ("_exchange_device", "_maybe_exchange_device")
        },
        **{
            name: (lambda d=None: extension.held(index(d)))
            for name in ("memory_allocated", "memory_reserved")
        },
        **{
            name: (lambda d=None: extension.peak(index(d)))
            for name in ("max_memory_allocated", "max_memory_reserved")
        },
        "reset_peak_memory_stats": lambda d=None: extension.reset_peak(index(d)),
        "mem_get_info": lambda d=None: (
            H100["total_memory"] - extension.held(index(d)),
            H100["total_memory"],
        ),
        "memory_stats": lambda d=None: {"num_alloc_retries": 0, "num_ooms": 0},
        "device_count": lambda: machine.devices,
        "current_device": extension.current,
        "set_device": lambda d: extension.set_device(index(d)),
        "get_device_properties": lambda d=None: SimpleNamespace(
            **H100 | {"uuid": f"pretended-{index(d)}"}
        ),
        "synchronize": lambda d=None: extension.synchronize(index(d)),
        "_sleep": lambda cycles: None,
        "Stream": Stream,
        "Event": Event,
        "stream": lambda given: given or nullcontext(),
        "current_stream": lambda d=None: torch.accelerator.current_stream(
            torch.device("cuda", index(d))
        ),
        "manual_seed_all": lambda seed: [
            extension.generator(d).manual_seed(seed) for d in range(machine.devices)
        ],
        "get_rng_state": lambda d="cuda": extension.generator(index(d)).get_state(),
        "set_rng_state": lambda state, d="cuda": extension.generator(
            index(d)
        ).set_state(state),
    }
    for name, value in replaced.items():
        for module in (
            torch.cuda,
            torch.cuda.random,
            torch.cuda.memory,
            torch.cuda.streams,
        ):
            if module is torch.cuda or hasattr(module, name):
                setattr(module, name, value)
    resize = torch.UntypedStorage.resize_

    def resize_storage(storage: Any, size: int) -> Any:
        return (
            extension.resize_storage(storage, size)
            if storage.device.type == "cuda"
            else resize(storage, size)
        )

    torch.UntypedStorage.resize_ = resize_storage  # type: ignore[method-assign]
    torch.version.cuda = "13.0"
    torch.backends.cudnn.is_available = lambda: True
    torch.backends.cudnn.version = lambda: 91300  # type: ignore[assignment]
    # Capturable optimizers and others ask what the build has.
    torch._C._cuda_getDeviceCount = lambda: machine.devices  # type: ignore[attr-defined]
    torch._C._cuda_getCurrentRawStream = lambda device: 0  # type: ignore[attr-defined]
    _operators(extension)
    _kernels(extension)


# --------------------------------------------------------------------------------------
# operators of CUDA alone

_library: Any = None


@contextmanager
def _hosts(extension: Any, arguments: Sequence[Any]) -> Iterator[list[Any]]:
    """Arguments of an operator with their tensors on the host, where nothing counts as
    a wait of the program.
    """
    import torch

    extension.quiet(True)
    try:
        yield [
            extension.host(a) if isinstance(a, torch.Tensor) else a for a in arguments
        ]
    finally:
        extension.quiet(False)


def _operators(extension: Any) -> None:
    """The three attention kernels of torch and the product with a float32 result."""
    global _library
    import torch

    _library = torch.library.Library("aten", "IMPL", "CUDA")

    def on_host(function: Callable[..., Any]) -> Callable[..., Any]:
        """The function over tensors of the host, with its results on the device."""

        def run(*arguments: Any, **options: Any) -> Any:
            places = {a.device for a in arguments if isinstance(a, torch.Tensor)}
            assert len(places) == 1, "tensors on several devices"
            with _hosts(extension, arguments) as hosts:
                found = function(*hosts, **options)
                return torch.utils._pytree.tree_map_only(
                    torch.Tensor, lambda t: t.to(*places), found
                )

        return run

    def softmax(q: Any, k: Any, v: Any, scale: float | None) -> tuple[Any, Any]:
        assert all(t.stride(-1) == 1 and t.shape[-1] % 8 == 0 for t in (q, k, v)), (
            "layout of q, k, v"
        )
        scores = torch.einsum("bhqd,bhkd->bhqk", q.double(), k.double()) * (
            scale or q.shape[-1] ** -0.5
        )
        lse = scores.logsumexp(-1, keepdim=True)
        return ((scores - lse).exp() @ v.double()).to(q.dtype), lse[..., 0].float()

    def gradients(
        grad: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, scale: float
    ) -> tuple[Any, ...]:
        wide = grad.double()
        weights = (
            torch.einsum("bhqd,bhkd->bhqk", q.double(), k.double()) * scale
            - lse.double()[..., None]
        ).exp()
        inner = torch.einsum("bhqd,bhkd->bhqk", wide, v.double()) - (
            wide * out.double()
        ).sum(-1, keepdim=True)
        scores = weights * inner * scale
        dq = scores @ k.double()
        dk = scores.transpose(2, 3) @ q.double()
        return (
            dq.to(q.dtype),
            dk.to(q.dtype),
            (weights.transpose(2, 3) @ wide).to(q.dtype),
        )

    nothing = (torch.empty(0, dtype=torch.int64),) * 3

    def flash(q: Any, k: Any, v: Any, *rest: Any, scale: float | None = None) -> Any:
        assert q.dtype in (torch.bfloat16, torch.float16), (
            "the flash kernel computes in half precision"
        )
        out, lse = softmax(q, k, v, scale)
        return out, lse, None, None, q.shape[2], k.shape[2], *nothing

    def flash_backward(
        grad: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, *rest: Any, scale: float
    ) -> Any:
        assert rest[2:4] == (q.shape[2], k.shape[2]), "lengths"
        return gradients(grad, q, k, v, out, lse, scale)

    def efficient(
        q: Any, k: Any, v: Any, *rest: Any, scale: float | None = None
    ) -> Any:
        out, lse = softmax(q, k, v, scale)
        # Rows of the lse are whole multiples of 32.
        return (
            out,
            torch.nn.functional.pad(lse, (0, -lse.shape[-1] % 32), value=math.inf),
            *nothing[:2],
        )

    def efficient_backward(
        grad: Any,
        q: Any,
        k: Any,
        v: Any,
        bias: Any,
        out: Any,
        lse: Any,
        *_: Any,
        scale: float,
    ) -> Any:
        assert lse.shape[-1] % 32 == 0, "rows of the lse"
        return *gradients(grad, q, k, v, out, lse[..., : q.shape[2]], scale), None

    def cudnn(q: Any, k: Any, v: Any, *rest: Any, scale: float | None = None) -> Any:
        out, lse = softmax(q, k, v, scale)
        return out, lse[..., None], None, None, q.shape[2], k.shape[2], *nothing

    def cudnn_backward(
        grad: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, *_: Any, scale: float
    ) -> Any:
        return gradients(grad, q, k, v, out, lse[..., 0], scale)

    def product(a: Any, b: Any, dtype: Any) -> Any:
        return (a.float() @ b.float()).to(dtype)

    for function in (
        flash,
        flash_backward,
        efficient,
        efficient_backward,
        cudnn,
        cudnn_backward,
    ):
        name, _, backward = function.__name__.partition("_")
        _library.impl(
            f"_scaled_dot_product_{name}_attention{backward and '_backward'}",
            on_host(function),
        )
    _library.impl("mm.dtype", on_host(product))


# --------------------------------------------------------------------------------------
# sage_kernels


def _kernels(extension: Any) -> None:
    """Launchers run all of their Python, and their plain twins give what the kernels
    would.
    """
    import torch
    from torch._library.custom_ops import OPDEFS
    from torch.utils._pytree import tree_leaves

    _compile(extension)
    from sage_kernels import launch, launchers, reference

    start = launch.start

    def started(function: Any, grid: Any, arguments: Any, options: Any) -> None:
        places = {
            a.device for a in arguments if isinstance(a, torch.Tensor) and a.numel()
        }
        assert len(places) == 1, f"{function.__name__}: pointers on {places}"
        assert places.pop().index == extension.current(), (
            f"{function.__name__} is launched on another device"
        )
        assert all(0 < n < 2 ** (16 if axis else 31) for axis, n in enumerate(grid)), (
            f"{function.__name__}: {grid}"
        )
        launches[function.__name__] += 1
        if machine.jit:
            start(function, grid, arguments, options)

    def twin(
        launcher: Callable[..., Any], plain: Callable[..., Any]
    ) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            given = launcher(*arguments)
            if not any(isinstance(a, torch.Tensor) and a.is_cuda for a in arguments):
                return given
            with _hosts(extension, arguments) as hosts:
                for mine, theirs in zip(
                    tree_leaves(given), tree_leaves(plain(*hosts)), strict=True
                ):
                    assert (mine.shape, mine.dtype) == (
                        theirs.shape,
                        theirs.dtype,
                    ) and mine.is_contiguous(), plain
                    mine.copy_(theirs)
            return given

        return run

    launch.start = started
    for name, definition in OPDEFS.items():
        if name.startswith("sage_kernels::"):
            known = inspect.getclosurevars(definition._init_fn).nonlocals
            definition.register_kernel("cuda")(
                twin(known["launcher"], known["in_pytorch"])
            )
    for name in launchers.__all__:
        setattr(
            launchers, name, twin(getattr(launchers, name), getattr(reference, name))
        )


def _compile(extension: Any) -> None:
    """Let Triton's JIT bind, specialise and compile for an H100; nothing is launched."""
    import torch
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    limits = {
        "max_shared_mem": 232448,
        "multiprocessor_count": 132,
        "max_num_regs": 65536,
        "warpSize": 32,
    }
    loaded = {
        "load_binary.return_value": (1, 1, 0, 0, 1024),
        "get_device_properties.return_value": limits,
    }
    driver.set_active(
        Mock(
            utils=Mock(**loaded),
            get_current_device=extension.current,
            get_current_stream=lambda device: 0,
            get_current_target=lambda: GPUTarget("cuda", 90, 32),
            get_active_torch_device=lambda: torch.device("cuda", extension.current()),
        )
    )
    compile_one = JITFunction._do_compile

    def counted(self: Any, *arguments: Any, **options: Any) -> Any:
        compiled.append(self.__name__)
        return compile_one(self, *arguments, **options)

    JITFunction._do_compile = counted
