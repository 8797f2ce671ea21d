"""Costs of a configuration's calls of the model on each GPU: traced, or estimated for diffusers' own forward.

With P ranks per video each computes n = N / P video tokens and all text tokens, and attends with 1/P of the heads.
"""

from dataclasses import dataclass, replace
from math import prod

import torch

from sage_fast.config.schema import RunConfig
from sage_fast.distributed.ulysses import share_of
from sage_fast.models.family import ModelDescription
from sage_fast.planning.trace import Call, Cost, trace
from sage_fast.planning.weights import compute_dtype, hashable
from sage_fast.planning.work import forward_work

STOCK_KEPT, STOCK_WORKING = {"none": 28.3, "full": 1.0}, 40.0
"""Tensors of all tokens that a block of diffusers' own forward keeps (counted), and that one works with (estimated)."""


@dataclass(frozen=True, kw_only=True)
class Calls:
    """Cost of the calls that a configuration makes of the model, each for one micro-batch.

    velocity: a step of the rollout, or of the anchor. gradient, late_gradient: a
    step of an update, at its first and its later optimizer updates. single_pass: a step of the rollout that leaves its
    gradient. evaluation: a step of an evaluation.
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

    def cost(
        *, batch: int, gradient: bool, on_policy: bool = True, collected: bool = False, of: RunConfig = config
    ) -> Cost:
        call = _call(of, description, on_gpu, batch=batch, gradient=gradient, on_policy=on_policy, single=collected)
        return _share(call, sp) if config.model.forward == "fused" else _stock(call)

    nothing = Cost()
    two_phase, forward = training.update != "single_pass", training.update == "forward_process"
    differs = training.guidance == "split" and training.updates_per_rollout > 1
    # The forward process is at states that the sampler has not been to: no velocity is known before the forward.
    gradient = cost(batch=batch, gradient=True, on_policy=not forward) if two_phase else nothing
    evaluated = replace(config, video=config.evaluation_video)
    return Calls(
        velocity=cost(batch=batch, gradient=False),
        gradient=gradient,
        late_gradient=cost(batch=batch, gradient=True, on_policy=False) if two_phase and differs else gradient,
        single_pass=nothing if two_phase else cost(batch=batch, gradient=True, collected=True),
        evaluation=cost(batch=config.evaluation.batch_size, gradient=False, of=evaluated),
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
    # Buffers that an all-to-all sends and receives: q, k and v; in the backward also the result and its gradient.
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
        checkpointing=model.settled_checkpointing,
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
