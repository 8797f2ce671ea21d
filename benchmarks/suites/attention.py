"""Every attention backend that runs here, forward and backward pass at the sizes of the
transformer.

Each is first compared with float64: at small sizes with the remainders of tokens at
which kernels go wrong, and at the sizes that are timed; with scores about zero, and
with scores so negative that exp(-lse) overflows, which turns padded keys into NaN. One
that is further from float64 than a few times the plain softmax is not timed. The
fastest of the others is what the other suites compute with (`choose`).

Letters: B batch, N tokens, H heads, D head dimension.
"""

import itertools
from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from benchmarks import results
from benchmarks.errors import relative_error, verdict
from benchmarks.results import Record, Result
from benchmarks.session import Cell, Session, timing
from benchmarks.shapes import (
    HEAD_DIM,
    HEADS,
    SHAPES,
    SMOKE,
    TINY_HEAD_DIM,
    TINY_HEADS,
    Shape,
)
from sage_fast.models.attention.attention import (
    attention,
    backend_report,
    resolve_backend,
)

SUITE = "attention"
ALLOWED = 3.0
"""Error of a backend over the plain softmax's. The latter rounds its results alone; a
flash kernel also rounds what it multiplies in between, probabilities and their
gradients. A wrong kernel is off by hundreds.
"""
ALLOWED_BELOW = 10.0
"""The same with very negative scores. There a key or two take most of the weight, and
gradients of their rows cancel: with a flash kernel's roundings, made by hand on a CPU
at 2,140 tokens, dk was 0.4 to 2.9 times as far off as the plain softmax, from seed to
seed.
"""
PLAIN = "reference"
"""The backend that writes the N x N scores out: the yardstick of the others, and no
contender at full size.
"""
PASSES = {"forward": 4, "backward": 10}
"""Operations over N^2 H D; a flash backward makes five products, one of which computes
the scores again.
"""
REMAINDERS = (0, 1, 64, 92, 114, 127)
"""N mod 128 of the small sizes; 92 and 114 are those of A and B with their text."""
SMALL = 2 * 128
OFFSET = 5.0
"""Added to q and subtracted from k: scores fall by OFFSET^2 sqrt(D), 283 at a head
dimension of 128.
"""
ROWS = 4096
"""Queries for which scores exist at once in float64."""
RESULTS = ("out", "dq", "dk", "dv")
BELOW = ", very negative lse"
"""Behind the name of a result."""


def draw(
    size: Sequence[int], device: torch.device, dtype: torch.dtype, count: int = 4
) -> list[Tensor]:
    """`count` tensors of normal values, the same in every run."""
    generator = torch.Generator(device).manual_seed(0)
    return [
        torch.randn(*size, generator=generator, device=device).to(dtype)
        for _ in range(count)
    ]


def gradients(tensors: Sequence[Tensor], backend: str) -> list[Tensor]:
    """[out, dq, dk, dv] for [q, k, v, gradient of out]."""
    q, k, v, grad = tensors
    out, lse = attention(q, k, v, backend=backend)
    return [
        out,
        *torch.ops.sage_fast.attention_backward(
            grad, q, k, v, out, lse, backend, False
        ),
    ]


def exact(tensors: Sequence[Tensor]) -> list[Tensor]:
    """`gradients` of softmax(q k^T / sqrt(D)) v in float64, for `ROWS` queries at a
    time.
    """
    q, k, v, grad = (t.double().transpose(1, 2) for t in tensors)
    scale = q.shape[-1] ** -0.5
    dk = torch.zeros_like(k)
    dv = torch.zeros_like(v)
    outs = []
    dqs = []
    for q_rows, grad_rows in zip(q.split(ROWS, 2), grad.split(ROWS, 2), strict=True):
        p = (q_rows @ k.transpose(-1, -2) * scale).softmax(-1)
        out = p @ v
        outs.append(out)
        dp = grad_rows @ v.transpose(-1, -2)
        ds = scale * p * (dp - (grad_rows * out).sum(-1, keepdim=True))
        dqs.append(ds @ k)
        dk += ds.transpose(-1, -2) @ q_rows
        dv += p.transpose(-1, -2) @ grad_rows
    return [t.transpose(1, 2) for t in (torch.cat(outs, 2), torch.cat(dqs, 2), dk, dv)]


def check(
    backend: str, device: torch.device, sizes: Sequence[tuple[int, int]], head_dim: int
) -> Record:
    """Errors of a backend over those of the plain softmax in the same type, the worst
    of all cases; or why it does not run here.

    Args:
        sizes: (N, H).
    """
    dtype = torch.bfloat16
    missing = backend_report(device, dtype, head_dim)[backend]
    if missing is not None:
        return {"status": f"absent: {missing}"}
    bounds = {0.0: ALLOWED, OFFSET: ALLOWED_BELOW}
    limits = dict.fromkeys(RESULTS, ALLOWED)
    limits |= {f"{name}{BELOW}": ALLOWED_BELOW for name in RESULTS}
    worst = dict.fromkeys(limits, 0.0)
    wrong = []
    for (tokens, heads), offset in itertools.product(sizes, bounds):
        below = BELOW if offset else ""
        tensors = draw((1, tokens, heads, head_dim), device, dtype)
        tensors[0] += offset
        tensors[1] -= offset
        oracle = exact(tensors)
        plain = gradients(tensors, PLAIN)
        given = gradients(tensors, backend)
        for name, of_plain, of_backend, right in zip(
            RESULTS, plain, given, oracle, strict=True
        ):
            times = relative_error(of_backend, right) / relative_error(of_plain, right)
            worst[name + below] = max(worst[name + below], times)
            if not times <= bounds[offset]:
                wrong.append(f"{name} of {tokens} tokens{below}")
    found = verdict(worst, limits)
    if wrong:
        found["reason"] = f"wrong are {'; '.join(wrong[:6])}"
    return found


def time_backend(
    session: Session, backend: str, shape: Shape, heads: int, head_dim: int
) -> Record:
    """A row per direction."""
    tokens = shape.video_tokens + shape.text_tokens
    q, k, v, grad = draw((1, tokens, heads, head_dim), session.device, torch.bfloat16)
    out, lse = attention(q, k, v, backend=backend)
    calls = {
        "forward": lambda: attention(q, k, v, backend=backend),
        "backward": lambda: torch.ops.sage_fast.attention_backward(
            grad, q, k, v, out, lse, backend, False
        ),
    }
    rows = []
    for direction, call in calls.items():
        seconds = session.time(call, rounds=10, warmup=3)
        flop = PASSES[direction] * tokens**2 * heads * head_dim
        rows.append(timing(direction, shape.name, backend, seconds, flop=flop))
    return {"rows": rows}


def cells(session: Session) -> Iterator[Cell]:
    """Parity of every backend at small sizes; then both shapes, parity and time."""
    heads, head_dim = (
        (TINY_HEADS, TINY_HEAD_DIM) if session.smoke else (HEADS, HEAD_DIM)
    )
    backends = list(backend_report(session.device, torch.bfloat16, head_dim))
    small = [(SMALL + remainder, 4) for remainder in REMAINDERS]
    for backend in backends:
        work = partial(check, backend, session.device, small, head_dim)
        yield Cell(suite=SUITE, name=f"parity {backend}", work=work)
    for shape in SMOKE if session.smoke else SHAPES:
        for backend in backends:
            small_parity = f"{SUITE} parity {backend}"
            parity = f"{SUITE} parity {shape.name} {backend}"
            if (backend == PLAIN and not session.smoke) or session.cells[small_parity][
                "status"
            ].startswith("absent"):
                continue
            size = (shape.video_tokens + shape.text_tokens, 1)
            work = partial(check, backend, session.device, [size], head_dim)
            yield Cell(
                suite=SUITE,
                name=f"parity {shape.name} {backend}",
                work=work,
                needs=(small_parity,),
            )
            work = partial(time_backend, session, backend, shape, heads, head_dim)
            yield Cell(
                suite=SUITE,
                name=f"{shape.name} {backend}",
                work=work,
                needs=(small_parity, parity),
            )


def fastest(result: Result) -> str | None:
    """The backend whose forward and backward pass at B took least time, of those that
    passed; None without any.
    """
    timings = results.rows(result)
    forward, backward = (
        timings.get((SUITE, direction, "B"), {}) for direction in PASSES
    )
    seconds = {
        backend: row["seconds"]["median"] + backward[backend]["seconds"]["median"]
        for backend, row in forward.items()
        if backend in backward and backend != PLAIN
    }
    return min(seconds, key=seconds.__getitem__, default=None)


def choose(session: Session) -> str:
    """Attention of the transformer and its peers: the one that --attention names, else
    the fastest that passed in this run, else what a training run would take.
    """
    found = fastest(session.result) if session.attention == "auto" else None
    head_dim = TINY_HEAD_DIM if session.smoke else HEAD_DIM
    return found or resolve_backend(
        session.attention,
        device=session.device,
        dtype=torch.bfloat16,
        head_dim=head_dim,
    )
