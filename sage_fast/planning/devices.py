"""Ceilings of a device and of the links between devices, and seconds from a cost.

The H200's are measured, the H100's measured or published. Other GPUs are assumed to
reach the share of their vendor's figures that the H100 reaches (798 of 989 TFLOP/s, 3.0
of 3.35 TB/s). Cards without NVLink exchange over PCIe.

Of the collectives only Ulysses' all-to-alls are counted, which nothing hides: P ranks
share a video, and each sends (P - 1)/P of a buffer, within a node over NVLink, to other
nodes over the network, both at once, at the bandwidths that collectives are reported to
reach. Latencies are not counted. FSDP's collectives go on beside the blocks; those of
adapters, of the velocity, of Muon's matrices, of scores and of flags are together less
than 0.02 % of a video's time in every preset.
"""

import math
import os
import timeit
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from sage_fast.planning.memory import MemoryPlan
from sage_fast.planning.trace import Cost
from sage_fast.planning.work import Visits, splits_branches
from sage_fast.sharding.ulysses import all_to_all_bytes

SMALL_MODEL = 1024
"""Width below which a model is planned for the CPU by default."""

ATTENTION_SHARE = 0.9
ELEMENTWISE_SHARE = 0.8
"""Shares of a ceiling that a run is assumed to reach where they are not measured."""

CONVOLUTION_SHARE = 0.5
"""Share of the products' ceiling that a decoder's convolutions reach: measured on an
H200 with HunyuanVideo-1.5's in float16 (benchmarks/results/nvidia-h200). Other
autoencoders are assumed to reach it too.
"""

LINK_SHARE = 0.8
"""Share of NVLink's nominal bandwidth (450 GB/s in each direction of an H100) that
collectives are assumed to reach.
"""

ADAPTER = 46.0
"""GB/s of a network adapter of 400 Gbit/s, one per GPU: NCCL's developers say to expect
46 to 48 (NVIDIA/nccl-tests, issue 290). Those of an A100 are assumed to have 200
Gbit/s.
"""

_PRODUCT = 798 / 989
_BANDWIDTH = 3.0 / 3.35
_BACKWARD = 0.866
"""FlashAttention's backward over forward speed on an H100, both counted as the formulas
do: 561 / 648, 516 / 595.
"""


@dataclass(frozen=True, kw_only=True)
class Efficiencies:
    """Shares of a device's ceilings that a run reaches.

    Attributes:
        linear: of products.
        attention: backend -> forward and backward; `ATTENTION_SHARE` for others.
        elementwise: of a copy.
        source: "assumed", or what they are derived from by benchmarks/efficiencies.py.

    Example: `DEVICES["h200"].efficiencies.attention["cudnn"]` is 0.92.
    """

    linear: float = 0.9
    attention: Mapping[str, float] = field(default_factory=dict)
    elementwise: float = ELEMENTWISE_SHARE
    source: str = "assumed"


@dataclass(frozen=True, kw_only=True)
class Device:
    """Ceilings of one device, and how much of them a run reaches.

    Attributes:
        memory_gb: 1e9 bytes.
        matmul, matmul_float32: TFLOP/s of products in bfloat16, and in float32 without
            TF32.
        attention: backend -> TFLOP/s forward and backward (five products) in bfloat16,
            head dimension 128; the first one is what `auto` is taken for.
        bandwidth: TB/s of a copy, bytes read and written.
        link: GB/s of a GPU to others of its node, network: to other nodes, both in one
            direction and as collectives reach them.
        source: where the figures are from.

    Example: `DEVICES["h100"].attention["cudnn"]` is `(595, 516)`.
    """

    name: str
    memory_gb: float
    matmul: float
    matmul_float32: float
    attention: Mapping[str, tuple[float, float]]
    bandwidth: float
    link: float
    network: float
    source: str
    efficiencies: Efficiencies = Efficiencies()

    @property
    def is_gpu(self) -> bool:
        return self.link > 0

    def backend(self, name: str) -> str:
        """The key of `attention` that a backend is planned by."""
        # both run its kernels
        kin = "flash2" if name in ("sdpa", "xformers") else name
        return next(n for n in (name, kin, *self.attention) if n in self.attention)

    def attention_share(self, dtype: str, backend: str) -> float:
        """Share of the rates of attention that a run reaches."""
        if dtype == "float32":
            return ATTENTION_SHARE
        known = self.efficiencies.attention
        return known.get(self.backend(backend), ATTENTION_SHARE)

    def rates(self, dtype: str, backend: str) -> tuple[float, float, float, str]:
        """FLOP/s of products, of attention forward and backward, and the backend that
        was taken.
        """
        if dtype == "float32":
            product = self.matmul_float32 * 1e12
            return (
                product,
                product / 2,
                product / 2,
                "float32 attention at half the rate of products",
            )
        chosen = self.backend(backend)
        forward, backward = self.attention[chosen]
        return (
            self.matmul * 1e12,
            forward * 1e12,
            backward * 1e12,
            f"{chosen} {forward:.0f}/{backward:.0f} TFLOP/s",
        )

    def seconds(self, cost: Cost, dtype: str, backend: str) -> tuple[float, float]:
        """(predicted, at the ceilings) seconds of a cost."""
        product, forward, backward, _ = self.rates(dtype, backend)
        linear = cost.linear / product
        attention = cost.attention / forward + cost.attention_backward / backward
        elementwise = cost.elementwise / (self.bandwidth * 1e12)
        predicted = (
            linear / self.efficiencies.linear
            + attention / self.attention_share(dtype, backend)
            + elementwise / self.efficiencies.elementwise
        )
        return predicted, linear + attention + elementwise

    def decode_seconds(self, cost: Cost, dtype: str) -> tuple[float, float]:
        """(predicted, at the ceilings) seconds of decoding, whose linear work is
        convolutions.
        """
        # By torch's default cuDNN computes float32 convolutions in TF32, at half the
        # rate of 16 bits.
        half = dtype == "float32" and self.is_gpu
        convolutions = cost.linear / (
            self.matmul * 1e12 / 2 if half else self.rates(dtype, "sdpa")[0]
        )
        elementwise = cost.elementwise / (self.bandwidth * 1e12)
        predicted = convolutions / CONVOLUTION_SHARE + elementwise / ELEMENTWISE_SHARE
        return predicted, convolutions + elementwise


_H100 = Device(
    name="H100 SXM",
    memory_gb=80,
    matmul=798,
    matmul_float32=67 * _PRODUCT,
    attention={
        "cudnn": (595.0, 516.0),
        "flash3": (648.0, 561.0),
        "flash2": (370.0, 322.0),
    },
    bandwidth=3.0,
    link=LINK_SHARE * 450,
    network=ADAPTER,
    source="bfloat16 product and copy measured; attention published (arXiv 2407.08608)",
)

GIB = 2**30 / 1e9


def _card(
    name: str,
    memory_gib: int,
    matmul: float,
    matmul_float32: float,
    bandwidth: float,
    link: float,
) -> Device:
    """A card of the vendor's dense bfloat16 and float32 TFLOP/s, TB/s, and GB/s of PCIe
    or NVLink; nothing measured.
    """
    return Device(
        name=name,
        memory_gb=memory_gib * GIB,
        matmul=matmul * _PRODUCT,
        matmul_float32=matmul_float32 * _PRODUCT,
        attention={"flash2": (0.73 * matmul, 0.73 * matmul * _BACKWARD)},
        bandwidth=bandwidth * _BANDWIDTH,
        link=LINK_SHARE * link,
        network=ADAPTER / 2,
        source=(
            f"the vendor's {matmul:g} TFLOP/s and {bandwidth:g} TB/s, in shares that "
            "an H100 and an A100 reach"
        ),
    )


DEVICES = {
    "h100": _H100,
    "h200": replace(
        _H100,
        name="H200 SXM",
        memory_gb=141,
        matmul=804,
        # By torch 2.11. FlashAttention-3's is the H100's.
        attention={
            "cudnn": (639.0, 565.0),
            "flash2": (368.0, 315.0),
            "flash3": (648.0, 561.0),
        },
        bandwidth=4.24,
        source=(
            "bfloat16 product, copy and attention measured "
            "(benchmarks/results/nvidia-h200)"
        ),
        efficiencies=Efficiencies(
            linear=0.79,
            attention={"cudnn": 0.92, "flash2": 0.99},
            elementwise=0.94,
            source="measured on an H200 (benchmarks/results/nvidia-h200, 2026-11-27)",
        ),
    ),
    "a100": replace(
        _card("A100 SXM 80 GB", 80, 312, 19.5, 2.04, 300),
        memory_gb=80,
        source=(
            "0.81 of the vendor's 312 TFLOP/s, 0.9 of 2.04 TB/s; attention 0.73 of "
            "312 (arXiv 2307.08691)"
        ),
    ),
    "b200": Device(
        name="B200",
        memory_gb=180,
        matmul=2250 * _PRODUCT,
        matmul_float32=80 * _PRODUCT,
        attention={
            "flash4": (1600, 1600 * _BACKWARD),
            "cudnn": (1230, 1230 * _BACKWARD),
            "flash2": (370.0, 322.0),
        },
        bandwidth=8.0 * _BANDWIDTH,
        link=LINK_SHARE * 900,
        network=ADAPTER,
        source=(
            "0.81 of the vendor's 2250 TFLOP/s, 0.9 of 8 TB/s; attention 0.71 of 2250 "
            "(FlashAttention-4's abstract)"
        ),
    ),
    # NVIDIA's whitepapers on Ada (AD102) and RTX Blackwell, products summed in float32;
    # datasheet of the L40S.
    "rtx4090": _card("RTX 4090", 24, 165.2, 82.6, 1.008, 32),
    "rtx5090": _card("RTX 5090", 32, 209.5, 104.8, 1.792, 64),
    "l40s": _card("L40S", 48, 362.05, 91.6, 0.864, 32),
}
"""GPUs by the name that `--device` takes; `cpu` is measured where it runs."""


def measure_cpu(memory_gb: float) -> Device:
    """This machine's processor, from a product and a copy of a few milliseconds."""
    a = torch.ones(768, 768)
    # 64 MiB each, more than caches hold.
    source = torch.ones(2**24)
    target = torch.zeros(2**24)
    # The best of three, after one that warms up.
    multiplying, copying = (
        min(timeit.repeat(work, number=1, repeat=4)[1:])
        for work in (lambda: a @ a, lambda: target.copy_(source))
    )
    # A product of n x n matrices is 2 n^3 FLOPs; a copy reads every byte and writes it.
    product = 2 * 768**3 / multiplying / 1e12
    bandwidth = 2 * source.nbytes / copying / 1e12
    return Device(
        name=f"this CPU, {torch.get_num_threads()} thread(s)",
        memory_gb=memory_gb,
        matmul=product,
        matmul_float32=product,
        attention={"sdpa": (product / 2, product / 2)},
        bandwidth=bandwidth,
        link=0.0,
        network=0.0,
        source="a product and a copy measured now; attention at half the product's rate",
    )


def choose_device(
    name: str | None, device: str, width: int, presets: Sequence[str] = ()
) -> Device:
    """The device of `--device`.

    Args:
        name: of `--device`; without one it is what `device` means.
        device: `model.device`; "auto" is a GPU, or for a small model the processor.
        width: of the model.
        presets: that the configuration was made of; those of 24 GB are named after it.
    """
    if name is None:
        # `cuda` does not say which GPU.
        gpu = "rtx4090" if any("_24gb" in Path(p).stem for p in presets) else "h100"
        automatic = "cpu" if width < SMALL_MODEL else gpu
        name = {"cpu": "cpu", "auto": automatic}.get(device, gpu)
    if name != "cpu":
        return DEVICES[name]
    memory = host_memory()
    return measure_cpu(memory / 1e9 if memory else math.inf)


def key_of(gpu: str) -> str | None:
    """Key of `DEVICES` for the name that torch has for a GPU; None for a kind that no
    plan counts.
    """
    # Without spaces, so that "NVIDIA GeForce RTX 4090" holds the key "rtx4090".
    return next((key for key in DEVICES if key in gpu.lower().replace(" ", "")), None)


def gpu_memory_gb(device: torch.device | str) -> float:
    """1e9 bytes that may be planned with on a GPU: no more than a plan of its kind
    counts, which the vendor names.
    """
    properties = torch.cuda.get_device_properties(device)
    key = key_of(properties.name)
    return min(
        properties.total_memory / 1e9,
        math.inf if key is None else DEVICES[key].memory_gb,
    )


def host_memory() -> int | None:
    """Bytes of memory this machine has, or this container may use."""
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return None
    # Of control groups, version 2. Without a limit the file says "max".
    limit = Path("/sys/fs/cgroup/memory.max")
    if limit.is_file() and (text := limit.read_text().strip()).isdigit():
        total = min(total, int(text))
    return total


def waiting(
    held: MemoryPlan,
    visited: Visits,
    device: Device,
    *,
    evaluation_tokens: int,
    eval_batches: float,
) -> dict[str, float]:
    """Seconds by phase, per rollout and its updates, and per evaluation (`eval_batches`
    batches on a rank).
    """
    config = held.config
    rollout = config.rollout
    if held.layout.sp == 1:
        return {}
    branches = 1 if rollout.guidance_scale == 1.0 else 2
    # The forward process may sample with another guidance, so its branches are counted
    # apart.
    sampled = (1 if config.sampling_guidance == 1.0 else 2) * (
        visited.rollout + visited.pass_steps
    )
    # With split guidance and a policy that has moved, the unconditional branch is
    # computed once more.
    more = splits_branches(config) and held.costs.policy_moves
    # Passes of one branch, per video: (forwards, backwards). The repeated forwards are
    # of the unconditional branch.
    passes = {
        "rollout": (
            sampled + visited.repeated,
            branches * (visited.pass_steps + visited.second_products),
        ),
        "anchor": (branches * visited.anchor, 0.0),
        "update": ((branches + more) * visited.update, branches * visited.update),
    }
    batches = rollout.batch_size / rollout.videos_at_once
    found = {
        phase: batches
        * _seconds(held, device, held.video_tokens, rollout.videos_at_once, *counts)
        for phase, counts in passes.items()
    }
    evaluated = branches * eval_batches * config.evaluation_steps
    return found | {
        "evaluation": _seconds(
            held, device, evaluation_tokens, config.evaluation.batch_size, evaluated
        )
    }


def _seconds(
    held: MemoryPlan,
    device: Device,
    tokens: int,
    batch: int,
    forwards: float,
    backwards: float = 0.0,
) -> float:
    group = held.layout.videos
    layers = held.description.num_layers
    # The last layer's text has no result to send.
    middle, end = (
        all_to_all_bytes(
            batch=batch,
            num_video=tokens,
            num_text=held.description.text_tokens,
            width=held.description.width,
            degree=group.ranks,
            itemsize=held.gathered.item,
            checkpointing=held.config.model.settled_checkpointing,
            last=last,
        )
        for last in (False, True)
    )
    forward, backward = (
        (layers - 1) * one + last for one, last in zip(middle, end, strict=True)
    )
    sent = forwards * forward + backwards * backward
    # It sends as much to every other rank.
    if group.nodes > 1:
        far = sent * (group.ranks - group.local) / (group.ranks - 1)
    else:
        far = 0.0
    return max((sent - far) / (device.link * 1e9), far / (device.network * 1e9))
