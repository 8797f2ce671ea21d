"""One update of SAGE-Fast beside one of public trainers, on a CPU: the same network,
prompts, videos and steps.

    python -m benchmarks peers --public FOLDER            its flow_grpo, DiffusionNFT and UniRL are checkouts
    python -m benchmarks peers --public FOLDER --smoke    one round on the small network

An update is the rollout, the loss, the backward passes and the optimizer's step; ours
also decodes and scores the videos, whose FLOPs count. Trainers take turns on one
thread, timed by the clock of the process. FLOPs are counted by torch in one update, and
memory is what the process takes beyond its size before an update, at its peak.
"""

import ctypes
import gc
import statistics
import time
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch.utils.flop_counter import (
    FlopCounterMode,
    sdpa_backward_flop_count,
    sdpa_flop_count,
)

from benchmarks import public
from benchmarks.results import Record
from benchmarks.session import Cell, Session
from benchmarks.suites import cpu
from sage_fast.config.load import load_config
from sage_fast.models.toy.components import TRANSFORMER_CONFIG, PatchCodec, WordEncoder
from sage_fast.run.prompt_files import read_prompts

SUITE = "peers"
ROUNDS = 3
NUM_STEPS = 3
OURS = {
    "grpo": {"ours": "two_phase", "ours, single pass": "single_pass"},
    "forward_process": {"ours": "forward_process"},
}
"""Objective -> contender -> `training.update`."""
CHANGES: dict[str, dict[str, Any]] = {
    "grpo": {"training.timestep_fraction": (NUM_STEPS - 1) / NUM_STEPS + 1e-6},
    "forward_process": {
        "rollout.sde_type": "ode",
        "forward_process.levels": public.LEVELS,
    },
}
"""Objective -> settings of ours."""
ATTENTION: dict[Any, Callable[..., int]] = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, v, *_, **__: (
        sdpa_flop_count(q, k, v)
    ),
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: (
        lambda grad, q, k, v, *_, **__: sdpa_backward_flop_count(grad, q, k, v)
    ),
}
"""Operators of a CPU that torch's counter does not know, by shapes."""
RESET = Path("/proc/self/clear_refs")
"""Where Linux forgets the peak of a process."""


class Contender:
    """An update, the FLOPs of one, and its peaks of memory."""

    def __init__(self, update: Callable[[], object]) -> None:
        self.update = update
        self.peaks = list[float]()
        with FlopCounterMode(display=False, custom_mapping=ATTENTION) as counter:
            update()
        self.flop = counter.get_total_flops()

    def turn(self) -> float:
        """Seconds of an update."""
        gc.collect()
        if RESET.exists():
            ctypes.CDLL(None).malloc_trim(0)
            RESET.write_text("5")
            before = resident("VmRSS")
        start = time.process_time()
        self.update()
        seconds = time.process_time() - start
        if RESET.exists():
            self.peaks.append(resident("VmHWM") - before)
        return seconds


def resident(name: str) -> float:
    """VmRSS or VmHWM, memory of this process now or at its peak, in MB of 1e6 bytes."""
    status = Path("/proc/self/status").read_text("utf-8").splitlines()
    return (
        next(float(line.split()[1]) for line in status if line.startswith(name))
        * 1024
        / 1e6
    )


def task_of(network: str) -> public.Task:
    """The task of `cpu.toy_trainer`, for public trainers; the pipeline's padding would
    be two tokens, none is made.
    """
    heads, layers, videos, _ = cpu.UPDATES[network]
    config = load_config("toy_cpu")
    video = config.video
    prompts = read_prompts(config.data.prompts)[: videos // 2]
    encoded = WordEncoder().encode(
        [prompt.text for prompt in prompts for _ in range(2)]
    )
    return public.Task(
        config=TRANSFORMER_CONFIG
        | {"num_attention_heads": heads, "num_layers": layers},
        latent=PatchCodec().latent_shape(video.num_frames, video.height, video.width),
        text=torch.stack([record.text for record in encoded]),
        advantages=torch.tensor([1.0, -1.0]).repeat(len(prompts)),
        num_steps=NUM_STEPS,
    )


def cells(session: Session) -> Iterator[Cell]:
    """Each public trainer alone, which says what is missing; then those that work and
    ours in turns.
    """
    if (folder := session.public) is None:
        sources = " ".join(
            f"git clone {source};" for source, _ in public.KNOWN.values()
        )
        raise ValueError(
            "--public FOLDER is missing, with checkouts of the public trainers: "
            f"{sources}"
        )
    for network in list(cpu.UPDATES)[: 1 if session.smoke else None]:
        for objective, trainers in public.TRAINERS.items():
            contender = cache(partial(make, folder, objective, network))
            names = {who: f"{objective} {network} {who}" for who in trainers}
            for who, name in names.items():
                work = partial(first_update, contender, folder / who)
                yield Cell(suite=SUITE, name=name, work=work)
            works = [
                who
                for who in trainers
                if session.cells[f"{SUITE} {names[who]}"]["status"] == "done"
            ]
            work = partial(measure, session, objective, network, contender, works)
            yield Cell(suite=SUITE, name=f"{objective} {network}", work=work)


def first_update(contender: Callable[[str], Contender], checkout: Path) -> Record:
    """A public trainer alone, whose name is its folder's."""
    contender(checkout.name)
    return {"checkout": public.commit_of(checkout)}


def make(folder: Path, objective: str, network: str, who: str) -> Contender:
    """A contender by its name, which has made an update."""
    if who in public.KNOWN:
        return Contender(public.ready(objective, who, folder, task_of(network)))
    heads, layers, videos, _ = cpu.UPDATES[network]
    update = OURS[objective][who]
    return Contender(
        cpu.toy_trainer(
            update,
            heads,
            layers,
            videos,
            **CHANGES[objective] | {"lora.target_modules": public.TARGETS},
        ).iterate
    )


def measure(
    session: Session,
    objective: str,
    network: str,
    contender: Callable[[str], Contender],
    works: list[str],
) -> Record:
    """The rows of an objective."""
    made = {who: contender(who) for who in [*OURS[objective], *works]}
    turns = 1 if session.smoke else ROUNDS
    record = cpu.in_turns(
        objective, network, list(made), lambda who: made[who].turn(), turns
    )
    for row in record["rows"]:
        one = made[row["contender"]]
        alone = f"{SUITE} {objective} {network} {row['contender']}"
        peak = statistics.median(one.peaks) if one.peaks else None
        said = [f"{one.flop / 1e9:.1f} GFLOP", "" if peak is None else f"{peak:.0f} MB"]
        said.append(session.cells.get(alone, {}).get("checkout", ""))
        row |= {
            "flop": one.flop,
            "peak_mb": peak,
            "note": ", ".join(filter(None, said)),
        }
    return record
