"""Sequence parallelism: shares of the video tokens compute what one process computes,
by counted communication.
"""

import copy
import functools
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from sage_fast import accelerate
from sage_fast.models.hunyuan15.backbone import velocity
from sage_fast.models.stored import Checkpointing
from sage_fast.policy.guidance import GuidedPolicy
from sage_fast.policy.lora import add_lora
from sage_fast.sharding.ulysses import all_to_all_bytes, shard_sequence, share_of
from tests.distributed.ranks import run_ranks
from tests.models.hunyuan15.oracle import latents, prompt, tiny_transformer

LAYERS = 2

Result = tuple[Tensor, dict[str, Tensor]]
"""Velocity, and gradients by parameter."""


@dataclass(frozen=True)
class Case:
    """One call with gradients. size: of the latents, whose product is N. prompts:
    (text, glyph) tokens of every one.
    """

    size: tuple[int, int, int] = (1, 5, 5)
    prompts: tuple[tuple[int, int], ...] = ((5, 2),)
    checkpointing: Checkpointing = "none"
    lora: bool = False
    guided: bool = False
    heads: int = 4
    head_dim: int = 16


def transformer(case: Case) -> Any:
    """The same weights in every process and thread; a thread must not be the first to
    ask, for random numbers' sake.
    """
    return copy.deepcopy(_transformer(case.lora, case.heads, case.head_dim))


@functools.cache
def _transformer(lora: bool, heads: int, head_dim: int) -> Any:
    axes = (head_dim // 3 // 2 * 2,) * 2
    model = tiny_transformer(
        layers=LAYERS,
        dtype=torch.float64,
        num_attention_heads=heads,
        attention_head_dim=head_dim,
        rope_axes_dim=(head_dim - sum(axes), *axes),
    )
    if lora:
        targets = ["attn.to_q", "attn.to_out.0", "attn.add_v_proj", "attn.to_add_out"]
        targets += ["ff.net.2", "ff_context.net.0.proj"]
        add_lora(model, rank=2, alpha=None, target_modules=targets, seed=0)
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                # adapters are made in float32
                parameter.data = parameter.data.double()
                nn.init.normal_(
                    parameter,
                    std=0.1,
                    generator=torch.Generator().manual_seed(len(name)),
                )
    return model


def compute(case: Case, group: Any = None) -> Result:
    """Velocity and gradients; on the ranks of a group, this rank's part of the
    gradients.
    """
    model = transformer(case)
    acceleration = accelerate(model, checkpointing=case.checkpointing)
    if group is not None:
        shard_sequence(acceleration, group)
    x = latents(len(case.prompts), size=case.size)
    sigma = torch.linspace(0.3, 0.7, len(case.prompts))
    prompts = [
        prompt(*tokens, seed=i, dtype=torch.float64)
        for i, tokens in enumerate(case.prompts)
    ]
    if not case.guided:
        output = velocity(model, x, sigma, prompts)
        output.square().sum().backward()
    else:
        policy = GuidedPolicy(model, prompt(3, 0, seed=9, dtype=torch.float64), 6.0)
        cotangent = torch.randn(
            x.shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64
        )
        output = policy.velocity_and_gradient(
            x, sigma, prompts, [cotangent], split=True
        )
    return output.detach(), {
        name: p.grad for name, p in model.named_parameters() if p.grad is not None
    }


def relative_error(given: Tensor, expected: Tensor, *, least: float = 0.0) -> float:
    """Largest error over the largest expected value, or over `least` where that is
    larger; infinite of a NaN.
    """
    error = float((given - expected).abs().max())
    return (
        error / max(float(expected.abs().max()), least)
        if math.isfinite(error)
        else math.inf
    )


def check(results: Sequence[Result], expected: Result, limit: float = 1e-10) -> None:
    """Every rank has the velocity of one process, and their gradients add up to its
    gradients.

    Some gradients are zero but for rounding (the bias of a key moves all scores of a
    query alike), so each is measured against at least a millionth of the largest of
    all.
    """
    velocity_of_one, gradients = expected
    least = 1e-6 * max(float(gradient.abs().max()) for gradient in gradients.values())
    for velocity_of_rank, own in results:
        assert relative_error(velocity_of_rank, velocity_of_one) < limit
        assert own.keys() == gradients.keys()
    for name, gradient in gradients.items():
        total = torch.stack([own[name] for _, own in results]).sum(0)
        assert relative_error(total, gradient, least=least) < limit, name


class Recorder(TorchDispatchMode):
    """Collectives of a stretch of code, as (operator, bytes of its input), and how
    often a value was waited for.
    """

    def __init__(self) -> None:
        super().__init__()
        self.collectives: list[tuple[str, int]] = []
        self.waits = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func.namespace == "c10d":
            (given,) = args[1] if isinstance(args[1], list) else args[1:2]
            size = given.numel() * given.element_size()
            self.collectives.append((func._overloadpacket.__name__, size))
        self.waits += func._overloadpacket.__name__ in (
            "_local_scalar_dense",
            "nonzero",
        )
        return func(*args, **(kwargs or {}))


@contextmanager
def poisoned() -> Iterator[None]:
    """Memory that nobody has written to holds NaN."""
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(1).isnan()
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@dataclass(frozen=True, eq=False)
class Member:
    """A process group of threads in one process as one of them sees it, for
    `thread_collectives`.
    """

    rank: int
    slots: list[Any]
    barrier: threading.Barrier

    def gather(self, value: Tensor) -> list[Tensor]:
        self.slots[self.rank] = value.detach().clone()
        self.barrier.wait()
        values = list(self.slots)
        self.barrier.wait()
        return values


def thread_group(size: int) -> list[Any]:
    """Its members."""
    slots = [None] * size
    barrier = threading.Barrier(size, timeout=30)
    return [Member(rank, slots, barrier) for rank in range(size)]


def thread_collectives(monkeypatch: Any) -> None:
    """Let torch.distributed's functions that sequence parallelism calls serve a
    `thread_group`.
    """

    def all_to_all_single(received: Tensor, send: Tensor, *, group: Member) -> None:
        assert (
            received.is_contiguous()
            and send.is_contiguous()
            and received.numel() == send.numel()
        )
        rows = received.view(len(group.slots), -1)
        for source, sent in enumerate(group.gather(send)):
            rows[source] = sent.view(len(group.slots), -1)[group.rank]

    def all_gather(gathered: list[Tensor], share: Tensor, *, group: Member) -> None:
        assert share.is_contiguous()
        for target, sent in zip(gathered, group.gather(share), strict=True):
            assert target.is_contiguous()
            target.copy_(sent)

    monkeypatch.setattr(dist, "get_world_size", lambda group: len(group.slots))
    monkeypatch.setattr(dist, "get_rank", lambda group: group.rank)
    monkeypatch.setattr(dist, "all_to_all_single", all_to_all_single)
    monkeypatch.setattr(dist, "all_gather", all_gather)


# --------------------------------------------------------------------------------------
# threads


CASES = {
    # name: ranks, case
    "tokens-do-not-divide": (4, Case()),
    "rank-of-padding-one-text-token": (4, Case(size=(1, 1, 5), prompts=((1, 0),))),
    "tokens-divide": (2, Case(size=(2, 3, 4), checkpointing="selective")),
    "batch-ragged": (2, Case(prompts=((5, 2), (7, 0), (5, 2)), checkpointing="full")),
    "guided-split-lora": (2, Case(guided=True, lora=True, checkpointing="full")),
    # 25 tokens: sixteen shares of 2, three of padding alone.
    "sixteen-batch": (
        16,
        Case(prompts=((3, 1), (3, 1)), checkpointing="selective", heads=16, head_dim=6),
    ),
}
COUNTED = {
    "none": Case(),
    "selective-batch": Case(checkpointing="selective", prompts=((5, 2), (5, 2))),
    "full": Case(checkpointing="full"),
}


def on_threads(degree: int, function: Callable[[Any], Any]) -> list[Any]:
    """function(group) of every rank."""
    with ThreadPoolExecutor(degree) as pool:
        return list(pool.map(function, thread_group(degree)))


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] * (CASES[name][0] > 8))
        for name in CASES
    ],
)
def test_ranks_compute_what_one_process_does(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    degree, case = CASES[name]
    expected = compute(case)
    thread_collectives(monkeypatch)
    with poisoned():
        results = on_threads(degree, lambda group: compute(case, group))
    check(results, expected)


# --------------------------------------------------------------------------------------
# real processes


def on_processes() -> tuple[Result, dict[str, Any]]:
    """All that needs processes, in one start of them: a result, and what is recorded of
    every counted case.
    """
    dist.init_process_group("gloo")
    group = dist.group.WORLD
    return compute(CASES["batch-ragged"][1], group), {
        name: record(case, group) for name, case in COUNTED.items()
    }


def record(case: Case, group: Any) -> dict[str, Any]:
    """Collectives of a forward, of its backward and of a forward without gradients;
    values that they waited for.
    """
    model = transformer(case)
    shard_sequence(accelerate(model, checkpointing=case.checkpointing), group)
    x = latents(len(case.prompts), size=case.size)
    sigma = torch.full([len(case.prompts)], 0.5)
    prompts = [prompt(*tokens, dtype=torch.float64) for tokens in case.prompts]
    with Recorder() as forward:
        output = velocity(model, x, sigma, prompts)
    with Recorder() as backward:
        output.square().sum().backward()
    with Recorder() as no_grad, torch.no_grad():
        velocity(model, x, sigma, prompts)
    recorders = {"forward": forward, "backward": backward, "no_grad": no_grad}
    found = {name: recorder.collectives for name, recorder in recorders.items()}
    return found | {"waits": sum(recorder.waits for recorder in recorders.values())}


@pytest.fixture(scope="module")
def ranks() -> list[tuple[Result, dict[str, Any]]]:
    return run_ranks(on_processes, 4)


@pytest.mark.slow
def test_processes_compute_what_one_does(ranks: list[tuple[Result, Any]]) -> None:
    check([result for result, _ in ranks], compute(CASES["batch-ragged"][1]))


@pytest.mark.slow
@pytest.mark.parametrize("name", COUNTED)
def test_collectives_per_layer(
    ranks: list[tuple[Any, dict[str, Any]]], name: str
) -> None:
    case = COUNTED[name]
    degree = len(ranks)
    num_video = case.size[0] * case.size[1] * case.size[2]
    text, glyph = case.prompts[0]
    sizes: Any = {
        "batch": len(case.prompts),
        "num_video": num_video,
        "num_text": text + glyph,
        "degree": degree,
    }
    sizes |= {
        "width": case.heads * case.head_dim,
        "itemsize": 8,
        "checkpointing": case.checkpointing,
    }
    layers = [
        all_to_all_bytes(**sizes, last=layer == LAYERS - 1) for layer in range(LAYERS)
    ]

    def sent(collectives: list[tuple[str, int]], per_layer: int) -> list[int]:
        """Bytes that each layer sends to others; no collective but so many all-to-alls
        for each.
        """
        assert [kind for kind, _ in collectives] == ["alltoall_base_"] * (
            per_layer * LAYERS
        )
        sizes = [size * (degree - 1) // degree for _, size in collectives]
        return [sum(sizes[i : i + per_layer]) for i in range(0, len(sizes), per_layer)]

    for _, recorded in ranks:
        found = recorded[name]
        for key in ("forward", "no_grad"):
            *exchanges, join = found[key]
            assert sent(exchanges, 2) == [layer.forward for layer in layers]
            assert join == (
                "allgather_",
                len(case.prompts) * share_of(num_video, degree) * 4 * 8,
            )
        repeated = 2 if case.checkpointing == "full" else 0
        assert sent(found["backward"], 2 + repeated) == [
            layer.backward for layer in reversed(layers)
        ]
        assert found["waits"] == 0


def test_two_sizes_before_the_backward_of_either(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A backward exchanges by the size of its forward. The model is a copy, which runs
    on the same ranks.
    """

    def run(group: Any) -> Result:
        model = transformer(Case())
        acceleration = accelerate(model)
        if group is not None:
            shard_sequence(acceleration, group)
            model = copy.deepcopy(model)
        text = [prompt(5, 2, dtype=torch.float64)]
        outputs = [
            velocity(model, latents(1, size=(1, 5, n)), torch.tensor([0.5]), text)
            for n in (5, 3)
        ]
        for output in outputs:
            output.square().sum().backward()
        return outputs[0].detach(), {
            name: p.grad for name, p in model.named_parameters() if p.grad is not None
        }

    expected = run(None)
    thread_collectives(monkeypatch)
    check(on_threads(2, run), expected)


def test_what_cannot_be_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    thread_collectives(monkeypatch)
    acceleration = accelerate(transformer(Case()))
    shard_sequence(acceleration, thread_group(1)[0])
    with pytest.raises(
        ValueError,
        match=r"sp is 3, which does not divide the model's 4 attention heads",
    ):
        shard_sequence(acceleration, thread_group(3)[0])
    assert acceleration.sequence is None
    acceleration.undo()
    with pytest.raises(ValueError, match="diffusers' own forward"):
        shard_sequence(acceleration, thread_group(2)[0])
