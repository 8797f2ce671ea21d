"""What a machine has: packages, processor, GPUs."""

import importlib.util
import os
import platform
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from typing import Any, Literal

import torch

from sage_fast import __version__
from sage_fast.distributed.failure import version_of
from sage_fast.planning.devices import host_memory

Status = Literal["ok", "info", "warning", "missing", "failed"]

REQUIRED = ("torch", "diffusers", "transformers", "peft", "safetensors", "av")
OPTIONAL = {
    "triton": "the kernels of sage_kernels; without it plain PyTorch computes the steps and the loss",
    "accelerate": "faster loading of large models",
    "flash-attn": "attention backends flash2 and flash3",
    "xformers": "attention backend xformers",
    "deepspeed": "the DeepSpeed engine",
    "huggingface_hub": "downloads",
    "wandb": "logging.wandb_project",
    "tensorboard": "logging.tensorboard",
}
"""Package -> what it is for."""

OPEN_FILES = 4096
"""Open files that a process of a large run may want; shells often start with 1,024."""


@dataclass(frozen=True)
class Check:
    """One finding. `fix`: what to do, for anything that is not ok.

    status: `missing` means that the configuration cannot run, `failed` that it has run, and not as it should.

    Example: `Check("files", "VideoAlign", "missing", "...", fix="hf download ...")`
    """

    section: str
    name: str
    status: Status
    detail: str
    fix: str = ""


def software() -> Iterator[Check]:
    """Versions of the packages, and whether videos can be written."""
    section = "software"
    yield Check(section, "sage-fast", "ok", __version__)
    yield Check(section, "python", "ok", platform.python_version())
    ranges = _supported_versions()
    for name in (*REQUIRED, *OPTIONAL):
        version = version_of(name)
        if version is None and name in REQUIRED:
            yield Check(section, name, "missing", "not installed", fix=f"pip install {name}")
        elif version is None:
            yield Check(section, name, "info", f"not installed (for {OPTIONAL[name]})")
        elif name in ranges and not ranges[name].contains(version, prereleases=True):
            fix = f'pip install "{name}{ranges[name]}"'
            yield Check(section, name, "warning", f"{version}; tested with {ranges[name]}", fix=fix)
        else:
            yield Check(section, name, "ok", version)
    yield _video_encoder()


def _supported_versions() -> dict[str, Any]:
    """Package -> version range, from this project's own metadata; nothing where it is not installed."""
    from packaging.requirements import Requirement

    try:
        lines = metadata.requires("sage-fast") or []
    except metadata.PackageNotFoundError:
        return {}
    return {r.name: r.specifier for r in map(Requirement, lines) if r.specifier}


def _video_encoder() -> Check:
    if importlib.util.find_spec("av") is None:
        return Check("software", "mp4 (H.264)", "missing", "PyAV is not installed", fix="pip install av")
    import av

    if "libx264" in av.codecs_available:
        return Check("software", "mp4 (H.264)", "ok", f"libx264 in PyAV {av.__version__}")
    fix = "pip install --force-reinstall av   (PyPI's wheels have it)"
    return Check("software", "mp4 (H.264)", "missing", "PyAV was built without libx264", fix=fix)


def hardware() -> Iterator[Check]:
    """Processor, memory and GPUs."""
    section = "hardware"
    gib = 2**30
    memory = host_memory()
    of_memory = f", {memory / gib:.0f} GiB of memory" if memory else ""
    yield Check(section, "cpu", "ok", f"{os.cpu_count()} cores{of_memory}")
    yield _open_files()
    devices = list(_nvidia_devices())
    yield from devices
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            detail = (
                f"{properties.name}, {properties.total_memory / gib:.0f} GiB, sm_{properties.major}{properties.minor}"
            )
            yield Check(section, f"cuda:{index}", "ok", detail)
    elif devices:
        fix = "install a torch with CUDA that fits the driver: https://pytorch.org/get-started/locally"
        yield Check(section, "cuda", "missing", f"there is a GPU, but torch {torch.__version__} cannot use it", fix=fix)
    else:
        yield Check(section, "cuda", "info", "none; the preset toy_cpu trains on the CPU")


def _open_files() -> Check:
    """The limit of open files: sockets to other ranks and mapped weights."""
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    enough = limit == resource.RLIM_INFINITY or limit >= OPEN_FILES
    return Check(
        "hardware",
        "open files",
        "ok" if enough else "warning",
        f"limit {'none' if limit == resource.RLIM_INFINITY else limit}",
        fix="" if enough else f"ulimit -n {OPEN_FILES}" + (", by an administrator" if 0 <= most < OPEN_FILES else ""),
    )


def _nvidia_devices() -> Iterator[Check]:
    """Driver and free memory, as the driver reports them; nothing where there is no NVIDIA driver."""
    if importlib.util.find_spec("pynvml") is None:
        return
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return
    try:
        for index in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
            used = memory.used / memory.total
            yield Check(
                "hardware",
                f"gpu {index}",
                "warning" if used > 0.1 else "ok",
                f"driver {_text(pynvml.nvmlSystemGetDriverVersion())}, {memory.free / 2**30:.0f} of "
                f"{memory.total / 2**30:.0f} GiB free",
                fix="another process uses this GPU: see nvidia-smi" if used > 0.1 else "",
            )
    finally:
        pynvml.nvmlShutdown()


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
