"""Memory of a run by component and phase, in bytes, on each of its GPUs.

Exact: weights, adapters, gradients, optimizer state, copies, accumulators, trajectories (counted), and what graphs keep
and what works beside them (traced on the meta device). Taken from elsewhere: weights beside the transformer, what
decoding and scoring need, the runtime, and a reserve for fragmentation.

With weights over R ranks (`distributed/parallelize.py`) each holds 1/R of the weights, and with training.mode full of
gradients, optimizer state, anchor and average. With P ranks per video each computes n = N / P video tokens and all text
tokens, and attends with 1/P of the heads.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import gcd, prod

import torch

from sage_fast.config.schema import RolloutConfig, RunConfig
from sage_fast.distributed.ulysses import share_of
from sage_fast.models.family import ModelDescription
from sage_fast.models.hub import stored_bytes
from sage_fast.objective import anchor_kind, kl_uses
from sage_fast.planning.layout import Layout
from sage_fast.planning.trace import Call, Cost, trace
from sage_fast.planning.weights import Gathered, Weights, compute_dtype, gathered_weights, hashable
from sage_fast.rewards.base import RewardCosts, reward_costs

GB = 1e9

PHASES = ("encode", "rollout", "decode", "reward", "anchor", "update", "optimizer", "evaluation")

CUDA_RUNTIME = 1.5 * GB
"""CUDA context and libraries."""

FRAGMENTATION, CPU_FRAGMENTATION = 0.05, 0.3
"""Share of what comes and goes that the allocator is taken to lose: a GPU's caching one, and the C library's, which
keeps freed blocks of up to 32 MB. The latter is fitted to the toy run."""

STOCK_KEPT, STOCK_WORKING = {"none": 28.3, "full": 1.0}, 40.0
"""Tensors of all tokens that a block of diffusers' own forward keeps (counted), and that one works with (estimated)."""


@dataclass(frozen=True, kw_only=True)
class Calls:
    """Cost of the calls that a configuration makes of the model, each for one micro-batch.

    velocity: a step of the rollout. gradient, late_gradient: a step of an update, at its first and its later optimizer
    updates. single_pass: a step of the rollout that leaves its gradient. evaluation: a step of an evaluation.
    """

    velocity: Cost
    gradient: Cost
    late_gradient: Cost
    single_pass: Cost
    evaluation: Cost


def model_calls(config: RunConfig, description: ModelDescription, on_gpu: bool, sp: int = 1) -> Calls:
    """Trace, or for diffusers' own forward estimate, what the phases are made of on each of a video's `sp` ranks."""
    rollout, training = config.rollout, config.training
    if training.mode == "full" and config.model.dtype != "float32":
        raise ValueError(
            f"training.mode full needs float32 master weights, but model.dtype is {config.model.dtype}. Set it to "
            "float32 (distributed.param_dtype is what is computed with), or training.mode to lora."
        )
    batch = rollout.micro_batch_size

    def cost(*, batch: int, gradient: bool, on_policy: bool = True, collected: bool = False) -> Cost:
        call = _call(config, description, on_gpu, batch=batch, gradient=gradient, on_policy=on_policy, single=collected)
        return _share(call, sp) if config.model.forward == "fused" else _stock(call)

    nothing = Cost()
    two_phase = training.update == "two_phase"
    differs = training.guidance == "split" and training.updates_per_rollout > 1
    gradient = cost(batch=batch, gradient=True) if two_phase else nothing
    return Calls(
        velocity=cost(batch=batch, gradient=False),
        gradient=gradient,
        late_gradient=cost(batch=batch, gradient=True, on_policy=False) if two_phase and differs else gradient,
        single_pass=nothing if two_phase else cost(batch=batch, gradient=True, collected=True),
        evaluation=cost(batch=config.evaluation.batch_size, gradient=False),
    )


def _share(call: Call, sp: int) -> Cost:
    """Cost of a call on one of the ranks that share its video tokens."""
    whole = trace(call)
    if sp == 1:
        return whole
    config = dict(call.transformer)
    channels, *grid = call.latent
    share = share_of(prod(grid), sp)
    # As many tokens on a line: all but attention is what a rank does. Attention is of all tokens and 1/P of the heads.
    # (The text refiner's, which every rank repeats, is one part in 10^5 of it.)
    part = trace(replace(call, latent=(channels, 1, 1, share)))
    width = config["num_attention_heads"] * config["attention_head_dim"]
    # What an all-to-all sends and what it receives: q, k and v; in the backward also the result and its gradient.
    exchanged = 5 * share + call.text_tokens if call.gradient else 3 * share
    buffers = 2 * call.batch * width * exchanged * getattr(torch, call.dtype).itemsize
    return replace(
        part,
        attention=whole.attention / sp,
        attention_backward=whole.attention_backward / sp,
        working=part.working + buffers,
    )


def _call(
    config: RunConfig,
    description: ModelDescription,
    on_gpu: bool,
    *,
    batch: int,
    gradient: bool,
    on_policy: bool,
    single: bool,
) -> Call:
    model, video, kernels = config.model, config.video, config.model.kernels
    return Call(
        transformer=hashable(description.transformer),
        latent=description.latent_shape(video.num_frames, video.height, video.width),
        text_tokens=description.text_tokens,
        dtype=compute_dtype(config),
        trained=config.training.mode,
        rank=config.lora.rank,
        target_modules=tuple(config.lora.target_modules),
        checkpointing=model.checkpointing,
        kernels=("triton" if on_gpu else "reference") if kernels == "auto" else kernels,
        adaln="weights" if model.adaln == "weights" else "auto",
        guidance_scale=config.rollout.guidance_scale,
        batch=batch,
        gradient=gradient,
        guidance=config.training.guidance if gradient else "paired",
        on_policy=on_policy,
        collected=single,
    )


def _stock(call: Call) -> Cost:
    """Diffusers' own forward, which cannot run on the meta device: closed forms and counted constants."""
    from sage_fast.planning.work import forward_work

    config = dict(call.transformer)
    tokens = prod(call.latent[1:])
    work = forward_work(config, tokens, call.text_tokens)
    joint = tokens + call.text_tokens
    item = getattr(torch, call.dtype).itemsize
    unit = call.batch * joint * config["num_attention_heads"] * config["attention_head_dim"] * item
    branches = (1 if call.guidance_scale == 1.0 else 2) * call.batch
    layers = config["num_layers"]
    masks = 2 * call.batch * joint**2
    forward = Cost(
        linear=branches * work.linear,
        attention=branches * work.attention,
        elementwise=branches / call.batch * layers * 122.7 * unit,
        working=STOCK_WORKING * unit + masks,
    )
    if not call.gradient:
        return forward
    again = 1 if call.checkpointing == "full" else 0
    products = 1 if call.trained == "lora" else 2
    alive = 1 if call.guidance_scale == 1.0 or call.guidance != "paired" else 2
    return Cost(
        linear=forward.linear * (1 + again + products),
        attention=forward.attention * (1 + again),
        attention_backward=2.5 * forward.attention,
        elementwise=forward.elementwise * (1 + again) + branches / call.batch * layers * 207.8 * unit,
        kept=alive * layers * STOCK_KEPT["full" if again else "none"] * unit,
        working=1.5 * STOCK_WORKING * unit + masks,
    )


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes by phase and component.

    Example: `memory.phases["update"]["kept activations"]` is 14.9e9 for LoRA at 480x832x81 with split guidance.
    """

    phases: Mapping[str, Mapping[str, float]]

    def total(self, phase: str) -> float:
        return sum(self.phases[phase].values())

    @property
    def peak_phase(self) -> str:
        return max(self.phases, key=self.total)

    @property
    def peak(self) -> float:
        return self.total(self.peak_phase)


def plan_memory(
    config: RunConfig,
    description: ModelDescription,
    *,
    on_gpu: bool,
    calls: Calls,
    weights: Weights,
    sizes: Mapping[str, float],
    runtime: float,
    layout: Layout | None = None,
    gathered: Gathered | None = None,
) -> Memory:
    """Memory of every phase.

    Args:
        sizes: gigabytes of the weights that are here, by reward.
        runtime: bytes of the process before it loads anything.
        layout, gathered: how GPUs share the work and the weights; None is one GPU.
    """
    model, rollout, training, objective = config.model, config.rollout, config.training, config.objective
    layout = layout or Layout()
    gathered = gathered or gathered_weights(config, weights, description.num_layers, layout, 0.0)
    item = getattr(torch, compute_dtype(config)).itemsize
    lora = training.mode == "lora"
    latent = description.latent_shape(config.video.num_frames, config.video.height, config.video.width)
    latent_bytes = 4 * prod(latent)
    offloaded = item * weights.adaln / layout.weight_shards if lora and model.adaln == "offload" and on_gpu else 0.0
    anchor = anchor_kind(objective.kl_mode) != "none"
    # What there is once per trained weight is sharded with it; adapters are whole on every rank.
    held = 1.0 if lora else 1 / layout.weight_shards
    if not lora and gathered.sharded and config.distributed.cpu_offload:
        held = 0.0
    copy = 4.0 * weights.trained * held

    rewards = rewards_here(config)
    single_pass = training.update == "single_pass"
    accumulators = 0.0
    if single_pass:
        needs_kl = any(kl_uses(objective.kl_mode))
        accumulators = copy * (rollout.batch_size + (_most_groups(rollout) if needs_kl else 0))

    always = {
        "runtime": runtime,
        "transformer": max(0.0, gathered.resident - offloaded),
        "adapters": copy if lora else 0.0,
        "optimizer state": 4.0 * weights.moments * held,
        "anchor": copy if anchor else 0.0,
        "average (EMA)": copy if training.ema_decay is not None else 0.0,
        "video decoder": description.decoder_gb * GB,
        "reward models": sum(sizes.get(name, costs.weights / GB) * GB for name, costs in rewards.items()),
        "rewards' tables": float(sum(costs.tables for costs in rewards.values())),
        "tables": _tables(config, description, latent, item),
    }
    if gathered.sharded and gathered.keep == "always":
        always["gathered weights"] = gathered.whole
    through, passing = _in_flight(gathered)
    steps = rollout.num_steps
    trajectories = {"trajectories": float(rollout.batch_size * (2 * steps + 1) * latent_bytes)}
    if not on_gpu:
        video = config.video
        trajectories["videos"] = float(rollout.batch_size * video.num_frames * 3 * video.height * video.width)
    anchored = dict(trajectories)
    if anchor and not single_pass:
        anchored["anchor velocities"] = float(rollout.batch_size * steps * latent_bytes)
    evaluation_steps = config.evaluation.num_steps or steps
    evaluated = config.evaluation.batch_size * (2 * evaluation_steps + 1) * latent_bytes

    def working(cost: Cost) -> dict[str, float]:
        kept, working = cost.kept, cost.working
        if model.offload_activations and on_gpu and kept:
            # The block at work has its own, and the next one's are on their way.
            working, kept = working + 2 * kept / description.num_layers, 0.0
        return {"kept activations": kept, "working set": working}

    def decoding(videos: int) -> float:
        return description.decoding(latent, videos, model, on_gpu).peak_bytes

    collected = {"gradient accumulators": accumulators}
    gradients = {"gradients": copy}
    # AdamW for all weights at once makes a copy of the second moment; the others go tensor by tensor.
    foreach = on_gpu and config.optimizer.name == "adamw"
    step = copy if foreach else 16.0 * weights.largest
    one_video = float(max((costs.working for costs in rewards.values()), default=0.0))
    phases: dict[str, dict[str, float]] = {
        "encode": {
            "runtime": runtime,
            "reward models": always["reward models"],
            "prompt encoder": description.encoder_gb * GB,
        },
        "rollout": always
        | through
        | trajectories
        | collected
        | working(calls.single_pass if single_pass else calls.velocity),
        "decode": always | through | trajectories | collected | {"decoding": decoding(rollout.micro_batch_size)},
        "reward": always | through | trajectories | collected | {"scoring": one_video},
        "anchor": always | through | anchored | collected | working(calls.velocity),
        "update": always | passing | anchored | gradients | working(calls.gradient),
        "optimizer": always | anchored | gradients | {"optimizer step": step},
        "evaluation": always
        | through
        | {"trajectories": float(evaluated)}
        | _larger(
            working(calls.evaluation), {"decoding": decoding(config.evaluation.batch_size)}, {"scoring": one_video}
        ),
    }
    if not on_gpu:
        phases["encode"]["transformer"] = always["transformer"]
    if single_pass:
        phases["update"] = always | anchored | collected | gradients
        del phases["anchor"]
    elif not anchor:
        del phases["anchor"]
    if not config.evaluation.every:
        del phases["evaluation"]
    for parts in phases.values():
        comes_and_goes = ["kept activations", "working set", "decoding", "optimizer step", "weights in flight"]
        comes_and_goes += ["scoring"] if on_gpu else ["trajectories", "anchor velocities"]
        share = FRAGMENTATION if on_gpu else CPU_FRAGMENTATION
        parts["fragmentation"] = share * sum(parts.get(name, 0.0) for name in comes_and_goes)
    return Memory(phases=phases)


def _most_groups(rollout: RolloutConfig) -> int:
    """Groups of which a rank has videos, on the rank that has most: its first video may be in a group's middle."""
    latest = rollout.num_generations - gcd(rollout.batch_size, rollout.num_generations)
    return (latest + rollout.batch_size - 1) // rollout.num_generations + 1


def _in_flight(gathered: Gathered) -> tuple[dict[str, float], dict[str, float]]:
    """Gathered weights of the phases without a gradient, and of the update."""
    if not gathered.sharded:
        return {}, {}
    kept = {"gathered weights": gathered.whole}
    flying = {"weights in flight": gathered.flying}
    sums = {"weights in flight": (0.0 if gathered.keep == "always" else gathered.flying) + gathered.summed}
    return {"never": flying, "rollout": kept, "always": {}}[gathered.keep], sums


def _larger(*parts: dict[str, float]) -> dict[str, float]:
    return max(parts, key=lambda part: sum(part.values()))


def _tables(config: RunConfig, description: ModelDescription, latent: tuple[int, ...], item: int) -> float:
    """Rotary tables, and with frozen AdaLN weights the modulation of every noise level."""
    if config.model.forward != "fused":
        return 0.0
    rope = 2 * 4 * prod(latent[1:]) * description.transformer["attention_head_dim"]
    if config.model.adaln == "weights" or config.training.mode == "full":
        return float(rope)
    levels = set(range(config.rollout.num_steps))
    count = len(levels)
    if config.evaluation.every and config.evaluation.num_steps not in (None, count):
        count += config.evaluation.num_steps or 0
    return float(rope + count * description.num_layers * 12 * description.width * item)


def rewards_here(config: RunConfig) -> dict[str, RewardCosts]:
    """Rewards on the device of the policy, in its process's memory where that is a CPU."""
    here = {}
    for name, costs in reward_costs(config.reward, config.video).items():
        device = config.reward.options.get(name, {}).get("device", config.reward.device)
        if device in (None, "auto", config.model.device):
            here[name] = costs
    return here


def weight_sizes(config: RunConfig) -> dict[str, float]:
    """Gigabytes (1e9 bytes) of the weights that are here, by reward."""
    folders = {name: costs.folder for name, costs in reward_costs(config.reward, config.video).items()}
    sizes = {name: stored_bytes(folder) / 1e9 for name, folder in folders.items() if folder is not None}
    return {name: size for name, size in sizes.items() if size}
