"""Sequence parallelism: shares of the video tokens compute what one process computes, by counted communication."""

import copy
import multiprocessing
import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from sage_fast import accelerate
from sage_fast.distributed.ulysses import all_to_all_bytes, shard_sequence, share_of
from sage_fast.models.hunyuan15.backbone import velocity
from tests.distributed.ulysses_support import (
    LAYERS,
    Case,
    Recorder,
    Result,
    ThreadGroup,
    check,
    compute,
    poisoned,
    relative_error,
    thread_collectives,
    transformer,
)
from tests.models.hunyuan15.oracle import latents, prompt

MANY: dict[str, Any] = {"heads": 16, "head_dim": 6}
CASES = {
    # name: ranks, case
    "tokens-divide": (2, Case(size=(2, 3, 4))),
    "tokens-do-not-divide": (4, Case()),
    "selective": (4, Case(checkpointing="selective")),
    "full": (2, Case(checkpointing="full")),
    "full-tokens-divide": (4, Case(size=(2, 3, 4), checkpointing="full", prompts=((4, 0),))),
    "no-glyph": (4, Case(prompts=((6, 0),), checkpointing="selective")),
    "rank-of-padding-one-text-token": (4, Case(size=(1, 1, 5), prompts=((1, 0),))),
    "fewer-tokens-than-ranks": (4, Case(size=(1, 1, 3), checkpointing="full")),
    "batch": (4, Case(size=(2, 3, 4), prompts=((5, 2), (5, 2)), checkpointing="selective")),
    "batch-padded": (4, Case(prompts=((5, 2), (5, 2)))),
    "batch-ragged": (2, Case(prompts=((5, 2), (7, 0), (5, 2)), checkpointing="full")),
    "lora": (4, Case(lora=True)),
    "lora-selective": (2, Case(lora=True, checkpointing="selective")),
    "lora-full-batch": (4, Case(lora=True, checkpointing="full", prompts=((5, 2), (5, 2)))),
    "guided-pair": (2, Case(guidance="paired", checkpointing="selective")),
    "guided-split": (4, Case(guidance="split", lora=True, checkpointing="full")),
    # 25 tokens: eight shares of 4 with one of padding alone; sixteen of 2 with three.
    "eight": (8, Case(prompts=((3, 1),), checkpointing="selective", **MANY)),
    "eight-batch": (8, Case(prompts=((3, 1), (3, 1)), checkpointing="full", **MANY)),
    "sixteen": (16, Case(prompts=((3, 1),), checkpointing="full", **MANY)),
    "sixteen-batch": (16, Case(prompts=((3, 1), (3, 1)), checkpointing="selective", **MANY)),
}
COUNTED = {
    "none": Case(),
    "selective-batch": Case(checkpointing="selective", prompts=((5, 2), (5, 2))),
    "full": Case(checkpointing="full"),
}


def on_threads(degree: int, function: Callable[[Any], Any]) -> list[Any]:
    """function(group) of every rank."""
    with ThreadPoolExecutor(degree) as pool:
        return list(pool.map(function, ThreadGroup(degree).members()))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (CASES[name][0] > 8)) for name in CASES]
)
def test_ranks_compute_what_one_process_does(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    degree, case = CASES[name]
    expected = compute(case)
    thread_collectives(monkeypatch)
    with poisoned():
        results = on_threads(degree, lambda group: compute(case, group))
    check(results, expected)


# ------------------------------------------------------------------------------------------------ real processes


def process(rank: int, folder: str, degree: int) -> None:
    """All checks that need processes, in one start of them."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=degree)
    group = dist.group.WORLD
    case = CASES["batch-ragged"][1]
    found: dict[str, Any] = {"result": compute(case, group), "expected": compute(case)}
    found["collectives"] = {name: record(case, group) for name, case in COUNTED.items()}
    found["copy"], found["undone"] = copied_and_undone(group)
    torch.save(found, f"{folder}/{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may abort an orderly exit


def record(case: Case, group: Any) -> dict[str, Any]:
    """Collectives of a forward, of its backward and of a forward without gradients; values that they waited for."""
    model = transformer(case)
    shard_sequence(accelerate(model, checkpointing=case.checkpointing), group)
    x, sigma = latents(len(case.prompts), size=case.size), torch.full([len(case.prompts)], 0.5)
    prompts = [prompt(*tokens, dtype=case.dtype) for tokens in case.prompts]
    with Recorder() as forward:
        output = velocity(model, x, sigma, prompts)
    with Recorder() as backward:
        output.square().sum().backward()
    with Recorder() as no_grad, torch.no_grad():
        velocity(model, x, sigma, prompts)
    recorders = {"forward": forward, "backward": backward, "no_grad": no_grad}
    found = {name: recorder.collectives for name, recorder in recorders.items()}
    return found | {"waits": sum(recorder.waits for recorder in recorders.values())}


def copied_and_undone(group: Any) -> tuple[float, float]:
    """Errors of a sharded transformer's deep copy, and of the stock forward after undo."""
    x, sigma, prompts = latents(1, size=(1, 5, 5)), torch.tensor([0.5]), [prompt(5, 2)]
    model = transformer(Case(dtype=torch.float32))
    with torch.no_grad():
        stock = velocity(model, x, sigma, prompts)
        acceleration = accelerate(model)
        shard_sequence(acceleration, group)
        fused, again = (velocity(m, x, sigma, prompts) for m in (model, copy.deepcopy(model)))
        acceleration.undo()
        return relative_error(again, fused), relative_error(velocity(model, x, sigma, prompts), stock)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Findings of every process of a group."""
    folder = tmp_path_factory.mktemp("ulysses")
    # The processes fork from one that has imported what takes seconds, and has started no threads.
    multiprocessing.set_forkserver_preload(
        ["sage_fast.models.hunyuan15.fused", "diffusers.models.transformers", "peft"]
    )
    mp.start_processes(process, (str(folder), 4), nprocs=4, start_method="forkserver")
    return [torch.load(folder / f"{rank}.pt") for rank in range(4)]


@pytest.mark.slow
def test_processes_compute_what_one_does(ranks: list[dict[str, Any]]) -> None:
    check([rank["result"] for rank in ranks], ranks[0]["expected"])
    assert [(rank["copy"], rank["undone"]) for rank in ranks] == [(0.0, 0.0)] * len(ranks)


@pytest.mark.slow
@pytest.mark.parametrize("name", COUNTED)
def test_collectives_per_layer(ranks: list[dict[str, Any]], name: str) -> None:
    case, degree = COUNTED[name], len(ranks)
    num_video, (text, glyph) = case.size[0] * case.size[1] * case.size[2], case.prompts[0]
    layers = [
        all_to_all_bytes(
            batch=len(case.prompts),
            num_video=num_video,
            num_text=text + glyph,
            width=case.heads * case.head_dim,
            degree=degree,
            itemsize=8,
            checkpointing=case.checkpointing,
            last=layer == LAYERS - 1,
        )
        for layer in range(LAYERS)
    ]

    def sent(collectives: list[tuple[str, int]], per_layer: int) -> list[int]:
        """Bytes that each layer sends to others; no collective but so many all-to-alls for each."""
        assert [kind for kind, _ in collectives] == ["alltoall_base_"] * (per_layer * LAYERS)
        sizes = [size * (degree - 1) // degree for _, size in collectives]
        return [sum(sizes[i : i + per_layer]) for i in range(0, len(sizes), per_layer)]

    for rank in ranks:
        found = rank["collectives"][name]
        for key in ("forward", "no_grad"):
            *exchanges, join = found[key]
            assert sent(exchanges, 2) == [layer.forward for layer in layers]
            assert join == ("allgather_", len(case.prompts) * share_of(num_video, degree) * 4 * 8)
        repeated = 2 if case.checkpointing == "full" else 0
        assert sent(found["backward"], 2 + repeated) == [layer.backward for layer in reversed(layers)]
        assert found["waits"] == 0


def test_bytes_of_a_layer() -> None:
    sizes = dict(batch=1, num_video=32760, num_text=250, width=2048, degree=4, itemsize=2)
    tokens, text = 8190 * 2048 * 2, 250 * 2048 * 2
    middle, last, full = (
        all_to_all_bytes(**sizes, **kind) for kind in ({}, {"last": True}, {"last": True, "checkpointing": "full"})
    )
    assert middle == ((4 * tokens + text) * 3 // 4, (8 * tokens + text) * 3 // 4)
    assert last == (4 * tokens * 3 // 4, 8 * tokens * 3 // 4)
    assert full == (last.forward, last.forward + last.backward)
    assert all_to_all_bytes(**(sizes | {"degree": 1})) == (0, 0)


def test_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """As near to float64 as one process is, within a factor of two."""
    exact, case = compute(Case()), Case(dtype=torch.bfloat16)

    def distances(results: list[Result]) -> tuple[float, float]:
        velocities = [relative_error(output.double(), exact[0]) for output, _ in results]
        errors = [
            sum(own[name].double() for _, own in results) - gradient  # the sum over ranks is taken in float32
            for name, gradient in exact[1].items()
        ]
        return max(velocities), float(torch.cat([error.flatten() for error in errors]).norm())

    one = distances([compute(case)])
    thread_collectives(monkeypatch)
    for mine, single in zip(distances(on_threads(2, lambda group: compute(case, group))), one, strict=True):
        assert 0 < mine < 2 * single


def test_two_sizes_before_the_backward_of_either(monkeypatch: pytest.MonkeyPatch) -> None:
    """A backward exchanges by the size of its forward."""

    def run(group: Any) -> Result:
        model = transformer(Case())
        acceleration = accelerate(model)
        if group is not None:
            shard_sequence(acceleration, group)
        text = [prompt(5, 2, dtype=torch.float64)]
        outputs = [velocity(model, latents(1, size=(1, 5, n)), torch.tensor([0.5]), text) for n in (5, 3)]
        for output in outputs:
            output.square().sum().backward()
        return outputs[0].detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    expected = run(None)
    thread_collectives(monkeypatch)
    check(on_threads(2, run), expected)


def test_what_cannot_be_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    thread_collectives(monkeypatch)
    acceleration = accelerate(transformer(Case()))
    shard_sequence(acceleration, ThreadGroup(1).members()[0])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"sp is 3, which does not divide the model's 4 attention heads"):
        shard_sequence(acceleration, ThreadGroup(3).members()[0])  # type: ignore[arg-type]
    assert acceleration.sequence is None
    acceleration.undo()
    for stock in (None, acceleration):
        with pytest.raises(ValueError, match=r"diffusers' own forward.*model\.forward to fused"):
            shard_sequence(stock, ThreadGroup(2).members()[0])  # type: ignore[arg-type]
