"""The least time that a step of the transformer can take at the ceilings that the same run measured.

    bound = products / product rate + attention / rate of its backend + other traffic / copy bandwidth

Recomputed work belongs to the step as it is, so it is in the bound and not in the MFU: at 480x832 and 81 frames
an H100's training step has a bound of about 58 % MFU with cuDNN's attention, whatever the code.
"""

from functools import cache

from benchmarks import results
from benchmarks.results import Rows
from benchmarks.workload import GUIDANCE_SCALE, HUNYUAN_VIDEO_15, SHAPES
from sage_fast.config.sections import LoraConfig
from sage_fast.planning.trace import Call, Cost, trace
from sage_fast.planning.weights import hashable


@cache
def cost(step: str, shape: str) -> Cost:
    """FLOPs and bytes of our `forward` or `train` step at A or B, traced on the meta device."""
    lora, trains = LoraConfig(), step == "train"
    size = next(each for each in SHAPES if each.name == shape)
    call = Call(
        transformer=hashable(HUNYUAN_VIDEO_15),
        latent=size.latent,
        text_tokens=size.text_tokens,
        dtype="bfloat16",
        trained="lora",
        rank=lora.rank,
        target_modules=None if lora.target_modules is None else tuple(lora.target_modules),
        checkpointing="selective" if trains else "none",
        kernels="triton",
        adaln="auto",
        guidance_scale=GUIDANCE_SCALE if trains else 1.0,
        batch=1,
        gradient=trains,
    )
    return trace(call)


def bound(rows: Rows, step: str, shape: str, backend: str) -> float | None:
    """Seconds of a step at the ceilings of a run; None where one of them was not measured."""
    product, copy = (results.ceiling_row(rows, name) for name in ("matmul", "copy"))
    passes = [rows.get(("attention", direction, shape), {}).get(backend) for direction in ("forward", "backward")]
    if product is None or copy is None or None in passes:
        return None
    forward, backward = (row["rate"] for row in passes if row is not None)
    counted = cost(step, shape)
    seconds = counted.linear / product["rate"] + counted.attention / forward + counted.attention_backward / backward
    return float(seconds / 1e12 + counted.elementwise / (copy["rate"] * 1e9))
