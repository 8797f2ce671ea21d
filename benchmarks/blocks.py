"""One transformer block of full width: fused, and diffusers' as shipped (P1), packed (P2) and compiled (P2c).

    python -m benchmarks blocks            on a GPU: shapes A and B in bfloat16
    python -m benchmarks blocks --smoke    anywhere, tiny; the numbers mean nothing

The block is the first of two in a transformer whose embedders make its input, so every contender gets what its own
forward would give it. `forward` has no graph; `both` is forward and backward pass to the gradients of the block's
inputs, with frozen weights, keeping what the policy benchmark keeps: ours attention's result, the peers the input.
Parity comes first: at a small odd size our errors against float64 may be `ALLOWED` times those of P2 in the same type.
"""

import argparse
import copy
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from diffusers import HunyuanVideo15Transformer3DModel
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import benchmarks  # noqa: F401  first, because it decides where kernels run
from benchmarks import harness, peers, timed
from benchmarks.attention import relative_error
from benchmarks.peers import Velocity
from benchmarks.workload import (
    HUNYUAN_VIDEO_15,
    PARITY,
    SHAPES,
    SMOKE,
    TINY,
    Inputs,
    Shape,
    Work,
    forward_work,
    random_inputs,
    random_transformer,
)
from sage_fast.models.attention.attention import resolve_backend
from sage_fast.records import PromptEmbeds

ALLOWED = 1.25
CONTENDERS = ("ours", "P1", "P2", "P2c")
DIRECTIONS = ("forward", "both")
BACKWARD_WORK = (1, 2)
"""Linear and attention operations of a backward pass to the inputs, over those of a forward pass."""


def block_work(config: dict[str, Any], shape: Shape) -> Work:
    """Operations of one block's forward: those of two blocks less those of one."""
    two, one = (forward_work(config | {"num_layers": n}, shape) for n in (2, 1))
    return Work(linear=two.linear - one.linear, attention=two.attention - one.attention)


def switched_on(
    transformer: HunyuanVideo15Transformer3DModel, contender: str, shape: Shape, backend: str
) -> AbstractContextManager[Velocity]:
    """A contender, to be switched on by `with`."""
    if contender == "ours":
        return peers.fused(transformer, backend=backend, checkpointing="selective")
    if contender == "P1":
        return peers.padded(transformer, shape)
    return peers.packed(transformer, backend=backend, cast_adapters=False)


def block_call(
    transformer: HunyuanVideo15Transformer3DModel, velocity: Velocity, inputs: Inputs
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The first block and the arguments with which a contender calls it."""
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


def gradients(run: Callable[..., Any], arguments: tuple[Any, ...]) -> list[Tensor]:
    """[video, d video . noise / d input video] of a block's call, the noise being a function of the size alone."""
    x = arguments[0].detach().requires_grad_()
    video = run(x, *arguments[1:])[0]
    generator = torch.Generator(video.device).manual_seed(2)
    noise = torch.randn(video.shape, generator=generator, device=video.device).to(video.dtype)
    (gradient,) = torch.autograd.grad(video, x, noise)
    return [video.detach(), gradient]


def check(config: dict[str, Any], device: torch.device, backend: str, *, smoke: bool) -> dict[str, Any]:
    """{contender: {"output", "gradient": relative errors, "passed"}, ...}; P2c computes what P2 does, by a compiler."""
    shape = SMOKE[1] if smoke else PARITY
    transformer = random_transformer(config | {"num_layers": 2}, device, torch.bfloat16)
    inputs = random_inputs(shape, config, device, torch.bfloat16)
    wide = copy.deepcopy(transformer).double()
    exact_inputs = Inputs(
        latents=inputs.latents.double(),
        noise=inputs.noise.double(),
        sigma=inputs.sigma,
        conditional=PromptEmbeds(text=inputs.conditional.text.double(), glyph=inputs.conditional.glyph.double()),
        unconditional=inputs.unconditional,
    )
    with peers.packed(wide, backend="reference", cast_adapters=False) as velocity:
        exact = gradients(*block_call(wide, velocity, exact_inputs))
    errors: dict[str, Any] = {}
    for contender in ("P2", "ours", "P1"):
        try:
            with switched_on(transformer, contender, shape, backend) as velocity:
                found = gradients(*block_call(transformer, velocity, inputs))
        except harness.FAILURES as error:
            errors[contender] = {"passed": False, "status": f"{type(error).__name__}: {error}"}
            continue
        pair = [relative_error(given, oracle) for given, oracle in zip(found, exact, strict=True)]
        # P2 is the yardstick itself; what it may be off by is what bfloat16 is.
        bounds = [0.05, 0.05] if contender == "P2" else [ALLOWED * errors["P2"][k] for k in ("output", "gradient")]
        passed = all(error <= bound for error, bound in zip(pair, bounds, strict=True))
        errors[contender] = {"output": pair[0], "gradient": pair[1], "bounds": bounds, "passed": passed}
    return errors


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


def run(device: torch.device, *, smoke: bool, matmul_tflop_per_s: float | None = None) -> dict[str, Any]:
    """{"block_parity", "blocks": rows with shape, contender, direction, seconds, tflop_per_s, mfu, peak_memory_gb}."""
    config = TINY if smoke else HUNYUAN_VIDEO_15
    backend = resolve_backend(
        "auto", device=device, dtype=torch.bfloat16, head_dim=config["attention_head_dim"], deterministic=False
    )
    parity = check(config, device, backend, smoke=smoke)
    transformer = random_transformer(config | {"num_layers": 2}, device, torch.bfloat16)
    rows: list[dict[str, Any]] = []
    for shape in SMOKE[:1] if smoke else reversed(SHAPES):
        inputs = random_inputs(shape, config, device, torch.bfloat16)
        for contender in CONTENDERS:
            if parity[contender.removesuffix("c")]["passed"]:
                with switched_on(transformer, contender, shape, backend) as velocity:
                    block, arguments = block_call(transformer, velocity, inputs)
                    rows += time_block(block, arguments, contender, shape, smoke=smoke)
    for row in rows:
        shape = next(s for s in (*SMOKE[: 1 if smoke else 0], *SHAPES) if s.name == row["shape"])
        forward_ops = block_work(config, shape)
        work = forward_ops if row["direction"] == "forward" else forward_ops.times(*(1 + n for n in BACKWARD_WORK))
        if "seconds" in row:
            row["tflop_per_s"] = work.total / row["seconds"]["median"] / 1e12
            if matmul_tflop_per_s is not None:
                row["mfu"] = row["tflop_per_s"] / matmul_tflop_per_s
    return {"block_parity": parity, "blocks": rows}


def time_block(
    block: Callable[..., Any], arguments: tuple[Any, ...], contender: str, shape: Shape, *, smoke: bool
) -> list[dict[str, Any]]:
    """A row per direction of one contender at one shape."""
    if contender == "P2c":
        torch._dynamo.reset()
        block = torch.compile(block, backend="aot_eager" if smoke else "inductor", dynamic=False)
    calls: dict[str, Callable[[], object]] = {
        "forward": partial(forward, block, arguments),
        "both": partial(both, block, arguments, keep_input_only=contender != "ours"),
    }
    rows = []
    for direction, call in calls.items():
        row: dict[str, Any] = {"shape": shape.name, "contender": contender, "direction": direction}
        rows.append(row)
        try:
            if torch.cuda.is_available():
                torch.cuda.reset_peak_memory_stats()
            call()
            if torch.cuda.is_available():
                row["peak_memory_gb"] = torch.cuda.max_memory_allocated() / 1e9
            row["seconds"] = asdict(timed.time_calls({direction: call}, rounds=2 if smoke else 10)[direction])
        except harness.FAILURES as error:
            row["status"] = (
                f"failed: {type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"
            )
        harness.reset_clock()
    return rows


def table(result: dict[str, Any]) -> str:
    """The rows for people; a contender whose parity failed has words in place of figures."""
    form = "{:6} {:8} {:9} {:>10} {:>9} {:>9}"
    lines = [form.format("block", "shape", "pass", "ms", "TFLOP/s", "x ours")]
    ours = {(row["shape"], row["direction"]): row for row in result["blocks"] if row["contender"] == "ours"}
    for row in result["blocks"]:
        if "seconds" not in row:
            lines.append(f"{row['contender']:6} {row['shape']:8} {row['direction']:9} {row['status']}")
            continue
        mine = ours.get((row["shape"], row["direction"]), {}).get("seconds")
        ratio = f"{row['seconds']['median'] / mine['median']:.2f}" if mine else "-"
        shown = f"{row['seconds']['median'] * 1e3:.2f}", f"{row['tflop_per_s']:.1f}", ratio
        lines.append(form.format(row["contender"], row["shape"], row["direction"], *shown))
    for contender, found in result["block_parity"].items():
        if not found["passed"]:
            lines.append(f"{contender:6} PARITY FAILED, not timed: {found.get('status', found)}")
    return "\n".join(lines)


def succeeded(result: dict[str, Any]) -> bool:
    """Whether everything passed its parity and was timed; a peer that does not compile here is no success."""
    return all(found["passed"] for found in result["block_parity"].values()) and all(
        "seconds" in row for row in result["blocks"]
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns 1 when something failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks blocks", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--smoke", action="store_true", help="a tiny block; runs without a GPU")
    parser.add_argument("--output", type=Path, help="JSON file; default benchmarks/results/<gpu>/...-blocks.json")
    options = parser.parse_args(argv)
    if not torch.cuda.is_available() and not options.smoke:
        sys.exit("There is no CUDA device here: run with --smoke, or on a machine with a GPU.")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    environment = harness.environment()
    matmul = harness.matmul_peak(device, smoke=options.smoke)
    result = {"matmul": matmul} | run(device, smoke=options.smoke, matmul_tflop_per_s=matmul["tflop_per_s"])
    if options.smoke:
        print("SMOKE RUN: a tiny block. The numbers below mean nothing.\n")
    print(table(result))
    path = options.output or (None if options.smoke else harness.result_file(environment, suffix="-blocks"))
    if path is not None:
        harness.write_result(path, {"environment": environment, "smoke": options.smoke} | result)
        print(f"written to {path}")
    return 0 if succeeded(result) else 1


if __name__ == "__main__":
    sys.exit(main())
