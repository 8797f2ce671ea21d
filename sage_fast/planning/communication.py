"""Communication between the ranks of a run: bytes, numbers of collectives and seconds, per phase of an iteration.

Counted for a rank of `sage_fast.distributed`. R ranks share the weights, P of them the tokens of a video, W are all.

    all-gather of S bytes, reduce-scatter to S / R each      (R - 1)/R S sent by a rank
    all-reduce of S bytes                                  2 (R - 1)/R S
    all-to-all of buffers of S bytes                         (P - 1)/P S

A ring passes `local` ranks of a node before it leaves it, over as many network adapters, so 1/local of what a rank
sends goes over the network and the rest over NVLink, both at once. An all-to-all sends as much to every rank.

    seconds = latency + max(NVLink bytes / NVLink bandwidth, network bytes / network bandwidth)

FSDP gathers the next block and scatters the last gradient while a block computes, so of these only what takes longer
than the block's computation is waited for, and the first of each pass. Everything else is waited for.

Sources: latencies are those of NCCL's own tuning model for rings, protocol Simple (NVIDIA/nccl, src/graph/tuning.cc).
Bandwidths (`devices.py`) are what nccl-tests are reported to reach. Both are assumptions: nothing here was measured.
Not counted: that collectives take streaming multiprocessors and memory bandwidth from the computation.
"""

from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass
from typing import Literal

import torch

from sage_fast.distributed.ulysses import all_to_all_bytes, share_of
from sage_fast.models.transformer import Checkpointing
from sage_fast.planning.devices import Device
from sage_fast.planning.layout import Group
from sage_fast.planning.memory import PHASES, MemoryPlan
from sage_fast.planning.trace import Cost
from sage_fast.planning.weights import compute_dtype
from sage_fast.planning.work import Visits, anchor_share

Kind = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all"]

LATENCY, NVLINK_HOP, NETWORK_HOP = 8.4e-6, 3.4e-6, 14.0e-6
"""Seconds: of a collective, and of every step of a ring inside a node and between nodes."""

HOST_HOP = 50e-6
"""Seconds per rank of a collective of Python objects through CPU memory (gloo, TCP); assumed."""

OBJECT_BYTES = 4096.0
"""Bytes that a rank reports of its videos: scores, failures, terms of the loss; assumed."""


@dataclass(frozen=True)
class Exchange:
    """A collective that every rank takes part in `count` times per iteration (per evaluation in phase `evaluation`).

    sent: bytes that a rank sends in one call. window: seconds of computation that go on beside a call. alone: how
    many of the calls have nothing beside them. host: through CPU memory.

    Example: the gathers of a forward of HunyuanVideo-1.5 over 8 ranks are 54 of 264e6 bytes sent.
    """

    phase: str
    purpose: str
    kind: Kind
    group: Group
    _: KW_ONLY
    count: float
    sent: float
    window: float = 0.0
    alone: float = 0.0
    host: bool = False

    @property
    def bytes(self) -> float:
        """All that a rank sends."""
        return self.count * self.sent

    @property
    def network_share(self) -> float:
        """Share of it that leaves the node."""
        group = self.group
        if group.nodes == 1:
            return 0.0
        return (group.ranks - group.local) / (group.ranks - 1) if self.kind == "all_to_all" else 1 / group.local

    def call_seconds(self, device: Device) -> float:
        """One call, with nothing beside it."""
        group, far = self.group, self.network_share * self.sent
        if self.host:
            return HOST_HOP * (group.ranks - 1)
        if self.kind == "all_to_all":
            latency = LATENCY + (NETWORK_HOP if group.nodes > 1 else NVLINK_HOP)
        else:
            hops = (group.ranks - group.nodes) * NVLINK_HOP + (group.nodes - 1) * NETWORK_HOP
            latency = LATENCY + (2 if self.kind == "all_reduce" else 1) * hops
        return latency + max((self.sent - far) / (device.link * 1e9), far / (device.network * 1e9))

    def seconds(self, device: Device) -> float:
        """All calls."""
        return self.count * self.call_seconds(device)

    def exposed(self, device: Device) -> float:
        """Seconds of all calls that are waited for."""
        call = self.call_seconds(device)
        return self.alone * call + (self.count - self.alone) * max(0.0, call - self.window)


@dataclass(frozen=True, kw_only=True)
class _Passes:
    """Passes of one branch through the model that a phase makes, each of a micro-batch.

    pulls: calls of autograd that make the backward passes; with paired guidance one makes both branches'. seconds: of
    the forward and the backward of one block.
    """

    phase: str
    batch: int
    forwards: float
    forward_seconds: float
    backwards: float = 0.0
    pulls: float = 0.0
    backward_seconds: float = 0.0


class Counter:
    """Counts what a rank exchanges in an iteration.

    Args:
        held: the run, its ranks and what each of them holds.
        visited: calls of the model.
        evaluation_tokens: video tokens of an evaluation's sample. eval_batches: of an evaluation, on a rank.
    """

    def __init__(
        self, held: MemoryPlan, device: Device, visited: Visits, *, evaluation_tokens: int, eval_batches: float
    ) -> None:
        config = self.config = held.config
        self.device, self.visited, self.calls, self.layout = device, visited, held.calls, held.layout
        self.description, self.weights, self.gathered = held.description, held.weights, held.gathered
        self.video_tokens, self.evaluation_tokens = held.video_tokens, evaluation_tokens
        self.eval_batches = eval_batches
        self.full = config.training.mode == "full"
        self.branches = 1 if config.rollout.guidance_scale == 1.0 else 2
        self.pulls_per_step = self.branches if config.training.guidance == "split" else 1
        self.layers = held.description.num_layers
        self.item = getattr(torch, compute_dtype(config)).itemsize

    def exchanges(self) -> tuple[Exchange, ...]:
        """Everything, in the order of the phases."""
        if self.layout.gpus == 1:
            return ()
        found: list[Exchange] = []
        for passes in self._passes():
            found += [*self._weights(passes), *self._tokens(passes)]
        found = [exchange for exchange in [*found, *self._optimizer(), *self._objects()] if exchange.count]
        return tuple(sorted(found, key=lambda exchange: PHASES.index(exchange.phase)))

    def _passes(self) -> Iterator[_Passes]:
        rollout, training, visited, calls = self.config.rollout, self.config.training, self.visited, self.calls
        micro_batches = rollout.batch_size / rollout.micro_batch_size
        branches = self.branches
        differentiated = 1 if training.guidance == "conditional" else branches
        velocity = self._seconds(calls.velocity)
        forward = velocity / branches / self.layers

        def backward(gradient: float) -> float:
            return max(0.0, gradient - velocity) / differentiated / self.layers

        single = training.update == "single_pass"
        with_gradient = visited.pass_steps + visited.second_products
        yield _Passes(
            phase="rollout",
            forwards=branches * micro_batches * (visited.rollout + visited.pass_steps),
            backwards=differentiated * micro_batches * with_gradient,
            pulls=self.pulls_per_step * micro_batches * with_gradient,
            batch=rollout.micro_batch_size,
            forward_seconds=forward,
            backward_seconds=backward(self._seconds(calls.single_pass)) if single else 0.0,
        )
        yield _Passes(
            phase="anchor",
            forwards=branches * micro_batches * visited.anchor,
            batch=rollout.micro_batch_size,
            forward_seconds=forward,
        )
        # With split guidance and a policy that has moved, the unconditional branch is computed once more.
        late = branches + 1 if training.guidance == "split" and branches == 2 else branches
        yield _Passes(
            phase="update",
            forwards=micro_batches * (branches * visited.update + late * visited.late_updates),
            backwards=differentiated * micro_batches * (visited.update + visited.late_updates),
            pulls=self.pulls_per_step * micro_batches * (visited.update + visited.late_updates),
            batch=rollout.micro_batch_size,
            forward_seconds=forward,
            backward_seconds=backward(self._seconds(calls.gradient)),
        )
        evaluation = self.config.evaluation
        yield _Passes(
            phase="evaluation",
            forwards=branches * self.eval_batches * self.config.evaluation_steps,
            batch=evaluation.batch_size,
            forward_seconds=self._seconds(calls.evaluation) / branches / self.layers,
        )

    def _seconds(self, cost: Cost) -> float:
        return self.device.seconds(cost, compute_dtype(self.config), self.config.model.attention)[0]

    def _weights(self, passes: _Passes) -> Iterator[Exchange]:
        """Gathers of sharded weights, and the sums of their gradients."""
        group = self.layout.groups["weights"]
        if group.ranks == 1 or not passes.forwards:
            return
        ring = (group.ranks - 1) / group.ranks
        blocks = self.layers * self.weights.block
        outside = self.weights.total - blocks

        def units(
            purpose: str,
            kind: Kind,
            scale: float,
            passes: tuple[float, float, float],
            window: float,
            *,
            which: Group = group,
            outside: float = outside,
        ) -> list[Exchange]:
            """Of every block and of what is not in a block: passes that have nothing beside their first block's call,
            calls for blocks, calls for the rest.
            """
            alone, of_blocks, of_rest = passes
            sent = scale * self.weights.block
            return [
                Exchange(phase, purpose, kind, which, count=of_blocks, sent=sent, window=window, alone=alone),
                Exchange(phase, purpose, kind, which, count=of_rest, sent=scale * outside),
            ]

        phase, layers, pulls = passes.phase, self.layers, passes.pulls
        times = self._gathers(passes)
        once = (times, times * layers, times)
        yield from units("weights", "all_gather", ring * self.item, once, passes.forward_seconds)
        if not pulls:
            return
        left = passes.backward_seconds
        if not self._stays(phase):
            # The input of the first block has no gradient under adapters, so FSDP keeps the block to the pull's end.
            kept = 0.0 if self.full else passes.backwards - pulls
            calls = (passes.backwards, passes.backwards * layers - kept, pulls)
            again = units("weights", "all_gather", ring * self.item, calls, left)
            yield from again
            left = max(0.0, left - again[0].call_seconds(self.device))
        if not self.full:
            return
        # Autograd adds up the branches of a pull before FSDP has the gradient. Frozen weights have none.
        trained = self.weights.trained - blocks
        calls = (pulls, pulls * layers, pulls)
        sums = units("gradients", "reduce_scatter", ring * 4.0, calls, left, outside=trained)
        yield from sums
        left = max(0.0, left - sums[0].call_seconds(self.device))
        replicas = self.layout.groups["replicas"]
        if replicas.ranks > 1:
            # Shards are summed over the replicas in the pulls of an update's last step.
            scale = 2 * (replicas.ranks - 1) / replicas.ranks * 4.0 / group.ranks
            last = float(self.config.training.updates_per_rollout * self.pulls_per_step)
            calls = (last, last * layers, last)
            yield from units("gradients of replicas", "all_reduce", scale, calls, left, which=replicas, outside=trained)

    def _stays(self, phase: str) -> bool:
        """True if weights stay gathered from one pass of a phase to the next."""
        keep = self.gathered.keep
        return keep == "always" or (keep == "rollout" and phase != "update")

    def _gathers(self, passes: _Passes) -> float:
        """How often a phase's forwards gather all weights."""
        keep, phase = self.gathered.keep, passes.phase
        if not self._stays(phase):
            return passes.forwards
        behind = anchor_share(self.config.training, self.config.objective.kl_mode)
        if keep == "rollout":
            # The single pass measures the anchor within the rollout.
            measured = behind if self.config.training.update == "two_phase" else 0.0
            return measured if phase == "anchor" else 1.0
        if not self.full:
            return 0.0
        # Kept until they change: by a step, and when the anchor takes their place and gives it back.
        updates = self.config.training.updates_per_rollout
        return {"rollout": 1.0, "anchor": 2 * behind, "update": updates - 1.0, "evaluation": 0.0}[phase]

    def _tokens(self, passes: _Passes) -> Iterator[Exchange]:
        """Ulysses: two all-to-alls per layer and pass, and the velocity of all tokens at the end of a forward."""
        group, sp = self.layout.groups["sp"], self.layout.sp
        if sp == 1 or not passes.forwards:
            return
        model = self.config.model
        # Blocks that compute attention again exchange again.
        checkpointing: Checkpointing = "full" if model.checkpointing == "full" else "selective"
        tokens = self.evaluation_tokens if passes.phase == "evaluation" else self.video_tokens

        def layer(last: bool) -> tuple[int, int]:
            return all_to_all_bytes(
                batch=passes.batch,
                num_video=tokens,
                num_text=self.description.text_tokens,
                width=self.description.width,
                degree=sp,
                itemsize=self.item,
                checkpointing=checkpointing,
                last=last,
            )

        forward, backward = (
            (self.layers - 1) * each + last for each, last in zip(layer(False), layer(True), strict=True)
        )
        calls = 2 * self.layers
        repeated = 2 if checkpointing == "full" else 1
        phase, name = passes.phase, "tokens and heads"
        yield Exchange(phase, name, "all_to_all", group, count=passes.forwards * calls, sent=forward / calls)
        count, sent = passes.backwards * calls * repeated, backward / (calls * repeated)
        yield Exchange(phase, f"{name}, backward", "all_to_all", group, count=count, sent=sent)
        channels = self.description.transformer["out_channels"]
        share = share_of(tokens, sp) * channels * self.item * passes.batch
        yield Exchange(phase, "velocity", "all_gather", group, count=passes.forwards, sent=(sp - 1) * share)

    def _optimizer(self) -> Iterator[Exchange]:
        """The gradient of adapters, the norm, and the matrices that Muon makes orthogonal."""
        updates = float(self.config.training.updates_per_rollout)
        everybody, shards = self.layout.groups["all"], self.layout.groups["weights"]
        if not self.full:
            sent = 2 * (everybody.ranks - 1) / everybody.ranks * 4.0 * self.weights.trained
            yield Exchange("optimizer", "gradients", "all_reduce", everybody, count=updates, sent=sent)
            return
        if shards.ranks == 1:
            return
        ring = (shards.ranks - 1) / shards.ranks
        yield Exchange("optimizer", "norm", "all_reduce", shards, count=updates, sent=2 * ring * 4.0)
        if self.config.optimizer.name == "muon" and self.weights.matrices:
            # The momentum update of every matrix, whole and in bfloat16, on every rank.
            count = updates * self.weights.matrices
            sent = ring * 2.0 * self.weights.matrix_elements / self.weights.matrices
            yield Exchange("optimizer", "updates of Muon", "all_gather", shards, count=count, sent=sent)

    def _objects(self) -> Iterator[Exchange]:
        """Small talk: scores once per rollout, terms of the loss once per update, flags."""
        group = self.layout.groups["all"]
        sent = (group.ranks - 1) * OBJECT_BYTES
        updates = float(self.config.training.updates_per_rollout)
        for phase, purpose, count in (("reward", "scores", 1.0), ("update", "terms", updates)):
            yield Exchange(phase, purpose, "all_gather", group, count=count, sent=sent, host=True)
        yield Exchange("optimizer", "flag", "all_reduce", group, count=1.0, sent=4.0, host=True)
        if self.eval_batches:
            yield Exchange("evaluation", "scores", "all_gather", group, count=1.0, sent=sent, host=True)
