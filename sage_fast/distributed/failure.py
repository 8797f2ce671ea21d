"""Failures of a run on several ranks: ranks that differ are refused, ranks that hang
end, ranks that are left say why.

A rank without progress dumps the stacks of its threads to stderr and ends
(`faulthandler`); its launcher ends the others, and starts all again where it was asked
to (`torchrun --max-restarts`). NCCL writes its own flight record where
TORCH_FR_BUFFER_SIZE and TORCH_NCCL_DUMP_ON_TIMEOUT are set; `torchfrtrace` reads it.
"""

import faulthandler
import hashlib
import platform
import re
import warnings
from collections.abc import Mapping, Sequence
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import distributed as dist

from sage_fast.config.errors import ConfigError
from sage_fast.distributed.world import World, set_group_timeouts

# torch 2.13 has other names for some collectives, which 2.11 lacks.
warnings.filterwarnings(
    "ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning
)

STACKS_AFTER = 15.0
"""Seconds by which a hung rank outlives the timeout of the others' collectives, whose
records NCCL writes first. Less than the 30 s that torchrun gives a rank to end.
"""
MOST_SHOWN = 4

# Packages that can change a number or a speed; those not installed are left out.
PACKAGES = (
    "torch",
    "triton",
    "diffusers",
    "transformers",
    "peft",
    "accelerate",
    "safetensors",
    "numpy",
    "av",
    "deepspeed",
    "flash-attn",
    "xformers",
    "torchvision",
)


class HangGuard:
    """Ends this process, with the stacks of its threads on stderr, when it makes no
    progress for too long.

    A context manager; on a single process, which nobody waits for, it does nothing.

    Args:
        world: the ranks.
        seconds: longest time between two calls of `progress`, until
            `use_steady_timeout`.
    """

    def __init__(self, world: World, seconds: float) -> None:
        self.seconds = seconds
        self._world = world
        self._armed = False

    def __enter__(self) -> "HangGuard":
        self._armed = self._world.mesh is not None
        self.progress()
        return self

    def __exit__(
        self, kind: object, error: BaseException | None, trace: object
    ) -> None:
        # A thread that writes a checkpoint may wait for the ranks that are gone, and
        # Python for the thread.
        if self._armed and not (error and is_communication_error(error)):
            faulthandler.cancel_dump_traceback_later()
        self._armed = False

    def progress(self) -> None:
        """Start counting again. Takes microseconds: nothing is sent."""
        if self._armed:
            # Its thread is not Python's, so it ends even a process that hangs with the
            # GIL held.
            faulthandler.dump_traceback_later(self.seconds + STACKS_AFTER, exit=True)

    def use_steady_timeout(self, seconds: float) -> None:
        """Allow `seconds` alone from now on, between progress and in a collective.

        To be called once the first update is done, after which nothing is compiled or
        loaded any more. torchtitan lowers the timeouts of its process groups at the
        same place.
        """
        if self._armed and seconds != self.seconds:
            self.seconds = seconds
            set_group_timeouts(seconds)
            self.progress()


def is_communication_error(error: BaseException) -> bool:
    """True for an error that torch.distributed raises because of another rank or of the
    network.
    """
    if isinstance(error, dist.DistError):
        return True
    # Gloo raises plain RuntimeErrors, which name its source file.
    return type(error) is RuntimeError and bool(
        re.search(r"gloo/transport|Connection (closed|reset) by peer", str(error))
    )


# --------------------------------------------------------------------------------------
# ranks that differ


def check_same_everywhere(
    own: Mapping[str, str], device: torch.device | None = None
) -> None:
    """Refuse ranks that would train on something else than the user believes.
    Collective, over the default group.

    Called before the groups of the mesh are made, whose shape the configuration
    decides, and again for what is loaded; no-op on one process.

    Args:
        own: values that all ranks must share, by name: configuration by dotted key,
            software, digests of files.
        device: this rank's; two ranks must not have the same GPU.

    Raises:
        ConfigError: what differs, and on which ranks; the same on all of them.
    """
    if not dist.is_initialized():
        return
    gpu = ""
    if device is not None and device.type == "cuda":
        # By UUID, since two processes may know one GPU by different numbers.
        gpu = str(torch.cuda.get_device_properties(device).uuid)
    gathered: list[tuple[Mapping[str, str], str]] = [({}, "")] * dist.get_world_size()
    dist.all_gather_object(gathered, (own, gpu))
    everywhere = [values for values, _ in gathered]
    differences = []
    for name in sorted(set().union(*everywhere)):
        owners = _ranks_by_value([values.get(name, "missing") for values in everywhere])
        if len(owners) > 1:
            shown = [f"{value} ({_in_words(ranks)})" for value, ranks in owners.items()]
            differences.append(f"{name}: {', '.join(shown[:MOST_SHOWN])}")
    if differences:
        raise ConfigError(
            f"The ranks differ in {'; '.join(differences[:MOST_SHOWN])}. Start every "
            "process with the same files and overrides, in one environment and on one "
            "file system that all nodes share."
        )
    for uuid, ranks in _ranks_by_value([gpu for _, gpu in gathered]).items():
        if uuid and len(ranks) > 1:
            raise ConfigError(
                f"{_in_words(ranks)} share one GPU. Start as many processes per node "
                "as it has GPUs, with model.device auto, and see that "
                "CUDA_VISIBLE_DEVICES shows every process all of them or one each."
            )


def _ranks_by_value(values: Sequence[str]) -> dict[str, list[int]]:
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    return ranks


def _in_words(ranks: Sequence[int]) -> str:
    """Example: [0, 1, 5] -> "ranks 0, 1, 5"; of more than four the first ones."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    more = ", ..." if len(ranks) > MOST_SHOWN else ""
    return f"ranks {', '.join(map(str, ranks[:MOST_SHOWN]))}{more}"


# --------------------------------------------------------------------------------------
# software


def software() -> dict[str, str]:
    """Versions of Python and of the packages that compute, and a digest of this
    package's Python files.
    """
    digest = hashlib.sha256()
    for package in ("sage_fast", "sage_kernels"):
        spec = find_spec(package)
        if spec is None or spec.origin is None:
            continue
        root = Path(spec.origin).parent
        for file in sorted(root.rglob("*.py")):
            digest.update(f"{package}/{file.relative_to(root)}\n".encode())
            digest.update(file.read_bytes())
    return {
        "python": platform.python_version(),
        "cuda": str(torch.version.cuda),
        **package_versions(),
        "source": digest.hexdigest()[:12],
    }


def package_versions() -> dict[str, str]:
    """Installed versions of the packages in ``PACKAGES``, by name."""
    versions = {name: version_of(name) for name in PACKAGES}
    return {name: version for name, version in versions.items() if version is not None}


def version_of(package: str) -> str | None:
    """The installed version of a package; None without one."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
