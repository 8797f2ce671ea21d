"""Every attention backend that runs here, forward and backward pass at the sizes of the transformer.

Each is first compared with float64 on a small odd size; one that is further from it than `ALLOWED` times the plain
softmax is not timed.

Letters: B batch, N tokens, H heads, D head dimension.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.errors import relative_error, verdict
from benchmarks.results import Record
from benchmarks.session import Cell, Session, Suite, timing
from benchmarks.workload import HUNYUAN_VIDEO_15, SHAPES, SMOKE, TINY, Shape
from sage_fast.models.attention.attention import attention, attention_backward, backend_report

SUITE = "attention"
ALLOWED = 3.0
"""Error of a backend over the plain softmax's. The latter rounds its results alone; a flash kernel also rounds what it
multiplies in between, probabilities and their gradients. A wrong kernel is off by hundreds."""
PLAIN = "reference"
"""The backend that writes the N x N scores out: the yardstick of the others, and no contender at full size."""
PASSES = {"forward": 4, "backward": 10}
"""Operations over N^2 H D; a flash backward makes five products, one of which computes the scores again."""
SMALL = (1, 333, 4)
"""(B, N, H) of the comparison with float64."""
RESULTS = ("out", "dq", "dk", "dv")


def draw(size: Sequence[int], device: torch.device, dtype: torch.dtype, count: int = 4) -> list[Tensor]:
    """`count` tensors of normal values, the same in every run."""
    generator = torch.Generator(device).manual_seed(0)
    return [torch.randn(*size, generator=generator, device=device).to(dtype) for _ in range(count)]


def gradients(tensors: Sequence[Tensor], backend: str) -> list[Tensor]:
    """[out, dq, dk, dv] for [q, k, v, gradient of out]."""
    q, k, v, grad = tensors
    out, lse = attention(q, k, v, backend=backend)
    return [out, *attention_backward(grad, q, k, v, out, lse, backend=backend)]


def exact(tensors: Sequence[Tensor]) -> list[Tensor]:
    """`gradients` of softmax(q k^T / sqrt(D)) v in float64, by autograd."""
    q, k, v = (t.double().transpose(1, 2).requires_grad_() for t in tensors[:3])
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    out = scores.softmax(-1) @ v
    out.backward(tensors[3].double().transpose(1, 2))
    results = [out.detach(), *(t.grad for t in (q, k, v) if t.grad is not None)]
    return [t.transpose(1, 2) for t in results]


def check(backend: str, device: torch.device, dtype: torch.dtype, head_dim: int) -> Record:
    """Errors of a backend beside those of the plain softmax in the same type; or why it does not run here."""
    missing = backend_report(device, dtype, head_dim)[backend]
    if missing is not None:
        return {"status": f"absent: {missing}"}
    tensors = draw((*SMALL, head_dim), device, dtype)
    oracle = exact(tensors)

    def errors(of: str) -> dict[str, float]:
        return {n: relative_error(t, e) for n, t, e in zip(RESULTS, gradients(tensors, of), oracle, strict=True)}

    return verdict(errors(backend), {name: ALLOWED * error for name, error in errors(PLAIN).items()})


def time_backend(session: Session, backend: str, shape: Shape, config: Mapping[str, Any]) -> Record:
    """A row per direction."""
    tokens = shape.video_tokens + shape.text_tokens
    heads, head_dim = config["num_attention_heads"], config["attention_head_dim"]
    q, k, v, grad = draw((1, tokens, heads, head_dim), session.device, torch.bfloat16)
    out, lse = attention(q, k, v, backend=backend)
    calls = {
        "forward": lambda: attention(q, k, v, backend=backend),
        "backward": lambda: attention_backward(grad, q, k, v, out, lse, backend=backend),
    }
    rows = []
    for direction, call in calls.items():
        seconds = session.time(call, rounds=10, warmup=3)
        flop = PASSES[direction] * tokens**2 * heads * head_dim
        rows.append(timing(direction, shape.name, backend, seconds, flop=flop))
    return {"rows": rows}


def cells(session: Session) -> Iterator[Cell]:
    """A parity check per backend, then both shapes."""
    config = TINY if session.smoke else HUNYUAN_VIDEO_15
    backends = list(backend_report(session.device, torch.bfloat16, config["attention_head_dim"]))
    for backend in backends:
        work = partial(check, backend, session.device, torch.bfloat16, config["attention_head_dim"])
        yield Cell(suite=SUITE, name=f"parity {backend}", work=work)
    for shape in reversed(SMOKE if session.smoke else SHAPES):
        for backend in backends:
            parity = f"{SUITE} parity {backend}"
            if (backend == PLAIN and not session.smoke) or session.cells[parity]["status"].startswith("absent"):
                continue
            work = partial(time_backend, session, backend, shape, config)
            yield Cell(suite=SUITE, name=f"{shape.name} {backend}", work=work, needs=(parity,))


SUITES = (Suite(name=SUITE, cells=cells, limit=40.0),)
