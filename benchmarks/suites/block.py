"""One transformer block of full width: fused, and diffusers' as shipped (P1), packed (P2) and compiled (P2c).

    python -m benchmarks block            on a GPU: shapes A and B in bfloat16
    python -m benchmarks block --smoke    anywhere, tiny; the numbers mean nothing

The block is the first of two in a transformer whose embedders make its input, so every contender gets what its own
forward would give it. `forward` has no graph; `both` is forward and backward pass to the gradients of the block's
inputs, with frozen weights, keeping what the transformer's training steps keep: ours attention's result, the peers the
input. Parity comes first: at a small odd size our errors against float64 may be `ALLOWED` times those of P2.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cache, partial
from typing import Any

import torch
from diffusers import HunyuanVideo15Transformer3DModel
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from benchmarks import harness, peers, workload
from benchmarks.errors import against_p2, relative_error
from benchmarks.peers import Velocity
from benchmarks.results import Record
from benchmarks.session import Cell, Session, Suite, peer_parity, timing
from benchmarks.suites import attention
from benchmarks.workload import Inputs, Shape, Work

SUITE = "block"
CONTENDERS = ("ours", "P1", "P2")
WORK = {"forward": (1, 1), "both": (2, 3)}
"""Direction -> linear and attention operations, over those of a forward pass."""
Call = tuple[Callable[..., Any], tuple[Any, ...]]
"""A block and the arguments with which a contender calls it."""


def block_work(config: Mapping[str, Any], shape: Shape) -> Work:
    """Operations of one block's forward: those of two blocks less those of one."""
    two, one = (workload.forward_work({**config, "num_layers": n}, shape) for n in (2, 1))
    return Work(linear=two.linear - one.linear, attention=two.attention - one.attention)


def switched_on(
    contender: str, transformer: HunyuanVideo15Transformer3DModel, shape: Shape, backend: str
) -> AbstractContextManager[Velocity]:
    """A contender, to be switched on by `with`; P2c is P2, whose block is compiled alone."""
    name = contender.removesuffix("c")
    return peers.contender(name, transformer, shape, backend, checkpointing="selective", cast_adapters=False)


def block_call(transformer: HunyuanVideo15Transformer3DModel, velocity: Velocity, inputs: Inputs) -> Call:
    """The first block as a contender calls it."""
    block = transformer.transformer_blocks[0]
    seen: list[tuple[Any, ...]] = []

    def remember(module: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        assert not keywords
        seen.append(arguments)

    handle = block.register_forward_pre_hook(remember, with_kwargs=True)
    try:
        with torch.no_grad():
            velocity(inputs.latents, inputs.sigma, inputs.conditional)
    finally:
        handle.remove()
    return block, seen[0]


def gradients(run: Callable[..., Any], arguments: tuple[Any, ...]) -> dict[str, Tensor]:
    """The video output of a block's call, and d video . noise / d input video for a noise that depends on the size."""
    x = arguments[0].detach().requires_grad_()
    video = run(x, *arguments[1:])[0]
    generator = torch.Generator(video.device).manual_seed(2)
    noise = torch.randn(video.shape, generator=generator, device=video.device).to(video.dtype)
    (gradient,) = torch.autograd.grad(video, x, noise)
    return {"output": video.detach(), "gradient": gradient}


class Parity:
    """Two layers of full width at a small odd size, and what float64 makes of their first block."""

    def __init__(self, config: Mapping[str, Any], device: torch.device, backend: str, *, smoke: bool) -> None:
        self.shape, self.backend = workload.SMOKE[1] if smoke else workload.PARITY, backend
        self.transformer = workload.random_transformer({**config, "num_layers": 2}, device, torch.bfloat16)
        self.inputs = workload.random_inputs(self.shape, config, device, torch.bfloat16)
        wide, inputs = workload.oracle_of(self.transformer, self.inputs)
        with peers.packed(wide, backend="reference", cast_adapters=False) as velocity:
            self.exact = gradients(*block_call(wide, velocity, inputs))

    def errors(self, contender: str) -> dict[str, float]:
        """Relative errors of a contender."""
        with switched_on(contender, self.transformer, self.shape, self.backend) as velocity:
            found = gradients(*block_call(self.transformer, velocity, self.inputs))
        return {name: relative_error(value, self.exact[name]) for name, value in found.items()}

    def check(self, contender: str, p2: dict[str, float] | None) -> Record:
        """The verdict on a contender, given P2's errors."""
        return against_p2(self.errors(contender), p2)


def both(run: Callable[..., Any], arguments: tuple[Any, ...], *, keep_input_only: bool) -> None:
    """Forward and backward pass to the gradients of the two token streams."""
    x, text = (tokens.detach().requires_grad_() for tokens in arguments[:2])
    if keep_input_only:
        outputs = checkpoint(run, x, text, *arguments[2:], use_reentrant=False)
    else:
        outputs = run(x, text, *arguments[2:])
    torch.autograd.grad(outputs, (x, text), [torch.ones_like(tokens) for tokens in outputs])


def forward(run: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    """Forward pass without a graph."""
    with torch.no_grad():
        run(*arguments)


def cells(session: Session, contenders: Sequence[str] | None = None) -> Iterator[Cell]:
    """Parity of every contender, then both directions at the larger shape and the smaller one."""
    config = workload.TINY if session.smoke else workload.HUNYUAN_VIDEO_15
    backend = attention.choose(session, config)
    parity = cache(lambda: Parity(config, session.device, backend, smoke=session.smoke))
    yield from peer_parity(session, SUITE, lambda contender, p2: parity().check(contender, p2))
    parity.cache_clear()
    model = cache(lambda: workload.random_transformer({**config, "num_layers": 2}, session.device, torch.bfloat16))
    for shape in workload.SMOKE[:1] if session.smoke else reversed(workload.SHAPES):
        for contender in contenders or CONTENDERS:
            for direction in WORK:

                def work(shape: Shape = shape, contender: str = contender, direction: str = direction) -> Record:
                    return time_block(session, model(), config, backend, shape, contender, direction)

                needs = (f"{SUITE} parity {contender.removesuffix('c')}",)
                yield Cell(suite=SUITE, name=f"{direction} {shape.name} {contender}", work=work, needs=needs)


def time_block(
    session: Session,
    transformer: HunyuanVideo15Transformer3DModel,
    config: Mapping[str, Any],
    backend: str,
    shape: Shape,
    contender: str,
    direction: str,
) -> Record:
    """The row of one contender, shape and direction."""
    inputs = workload.random_inputs(shape, config, session.device, torch.bfloat16)
    with switched_on(contender, transformer, shape, backend) as velocity:
        block, arguments = block_call(transformer, velocity, inputs)
        if contender == "P2c":
            torch._dynamo.reset()
            block = torch.compile(block, backend="aot_eager" if session.smoke else "inductor", dynamic=False)
        call: Callable[[], object] = partial(forward, block, arguments)
        if direction == "both":
            call = partial(both, block, arguments, keep_input_only=contender != "ours")
        harness.forget_peak(session.device)
        call()
        peak = harness.peak_memory_gb(session.device)
        seconds = session.time(call, rounds=10)
    flop = block_work(config, shape).times(*WORK[direction]).total
    return {"rows": [timing(direction, shape.name, contender, seconds, flop=flop, peak_memory_gb=peak)]}


FULL = Suite(name=SUITE, cells=cells, limit=60.0)
COMPILED = Suite(name=f"{SUITE} compiled", cells=partial(cells, contenders=("P2c",)), limit=60.0)
SUITES = (FULL, COMPILED)
