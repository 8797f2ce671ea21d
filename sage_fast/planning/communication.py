"""Exchanges of a run's ranks: numbers of collectives and bytes, per phase of an iteration.

Counted for a rank of `sage_fast.distributed`. R ranks share the weights, P of them the tokens of a video, W are all.

    all-gather of S bytes, reduce-scatter to S / R each      (R - 1)/R S sent by a rank
    all-reduce of S bytes                                  2 (R - 1)/R S
    all-to-all of buffers of S bytes                         (P - 1)/P S

A ring passes `local` ranks of a node before it leaves it, over as many network adapters, so 1/local of a rank's bytes
goes over the network and the rest over NVLink, both at once. An all-to-all sends as much to every rank.

FSDP gathers the next block and scatters the last gradient while a block computes: these are `hidden`. The others are
waited for, at the bandwidths that collectives are reported to reach (`devices.py`). Latencies are not counted.
"""

from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass
from typing import Literal

from sage_fast.objectives.base import second_half
from sage_fast.planning.devices import Device
from sage_fast.planning.layout import Group
from sage_fast.planning.memory import PHASES, MemoryPlan
from sage_fast.planning.work import (
    Visits,
    anchor_share,
    keeps_old_policy,
    measures_old_policy,
    policy_moves,
    splits_branches,
)
from sage_fast.sharding.ulysses import all_to_all_bytes, share_of

Kind = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all"]

OBJECT_BYTES = 4096.0
"""Scores, failures and terms of the loss that a rank reports; assumed."""


@dataclass(frozen=True)
class Exchange:
    """A collective that every rank takes part in `count` times per iteration (per evaluation in phase `evaluation`).

    sent: bytes that a rank sends in one call. hidden: whether it goes on beside a block's computation.

    Example: the gathers of a forward of HunyuanVideo-1.5 over 8 ranks are 54 of 264e6 bytes sent.
    """

    phase: str
    purpose: str
    kind: Kind
    group: Group
    _: KW_ONLY
    count: float
    sent: float
    hidden: bool = False

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

    def waiting(self, device: Device) -> float:
        """Seconds in which nothing is computed because of all calls."""
        far = self.network_share * self.bytes
        return 0.0 if self.hidden else max((self.bytes - far) / (device.link * 1e9), far / (device.network * 1e9))


@dataclass(frozen=True, kw_only=True)
class _Passes:
    """Passes of one branch through the model that a phase makes, each of a micro-batch.

    pulls: calls of autograd that make the backward passes; with paired guidance one makes both branches'.
    """

    phase: str
    batch: int
    forwards: float
    backwards: float = 0.0
    pulls: float = 0.0


class Counter:
    """Counts the exchanges of a rank in an iteration.

    Args:
        held: the run, its ranks and their memory.
        visited: calls of the model.
        evaluation_tokens: video tokens of an evaluation's sample. eval_batches: of an evaluation, on a rank.
    """

    def __init__(self, held: MemoryPlan, visited: Visits, *, evaluation_tokens: int, eval_batches: float) -> None:
        config = self.config = held.config
        self.held, self.visited, self.layout = held, visited, held.layout
        self.description, self.weights, self.item = held.description, held.weights, held.gathered.item
        self.evaluation_tokens, self.eval_batches = evaluation_tokens, eval_batches
        self.full = config.training.mode == "full"
        self.branches = 1 if config.rollout.guidance_scale == 1.0 else 2
        self.pulls_per_step = 2 if splits_branches(config) else 1
        self.updates = float(config.training.updates_per_rollout)
        self.layers = held.description.num_layers

    def exchanges(self) -> tuple[Exchange, ...]:
        """Everything, in the order of the phases."""
        if self.layout.gpus == 1:
            return ()
        found: list[Exchange] = []
        for passes in self._passes():
            found += [*self._weights(passes), *self._tokens(passes)]
        found = [exchange for exchange in [*found, *self._optimizer(), *self._objects()] if exchange.count]
        # The sort is stable: within a phase the order above stays.
        return tuple(sorted(found, key=lambda exchange: PHASES.index(exchange.phase)))

    def _passes(self) -> Iterator[_Passes]:
        rollout, training, visited = self.config.rollout, self.config.training, self.visited
        micro_batches, batch = rollout.batch_size / rollout.videos_at_once, rollout.videos_at_once
        branches = self.branches
        # With split guidance and a policy that has moved, the unconditional branch is computed once more.
        more = splits_branches(self.config) and policy_moves(training)
        # The forward process may sample with another guidance, so its branches are counted apart. The repeated
        # forwards are of the unconditional branch alone.
        sampling = 1 if self.config.sampling_guidance == 1.0 else 2
        sampled = sampling * (visited.rollout + visited.pass_steps) + visited.repeated
        # (phase, forwards of one branch, steps with a gradient), per video.
        for phase, forwards, with_gradient in (
            ("rollout", sampled, visited.pass_steps + visited.second_products),
            ("anchor", branches * visited.anchor, 0.0),
            ("update", (branches + more) * visited.update, visited.update),
        ):
            yield _Passes(
                phase=phase,
                batch=batch,
                forwards=micro_batches * forwards,
                backwards=branches * micro_batches * with_gradient,
                pulls=self.pulls_per_step * micro_batches * with_gradient,
            )
        evaluated = branches * self.eval_batches * self.config.evaluation_steps
        yield _Passes(phase="evaluation", forwards=evaluated, batch=self.config.evaluation.batch_size)

    def _weights(self, passes: _Passes) -> Iterator[Exchange]:
        """Gathers of sharded weights, and the sums of their gradients."""
        group, replicas = self.layout.groups["weights"], self.layout.groups["replicas"]
        alone = group.ranks == 1
        # Weights that every rank has whole are not gathered, but their gradients are summed over the replicas.
        if not passes.forwards or (alone and not (self.full and replicas.ranks > 1)):
            return
        ring = (group.ranks - 1) / group.ranks
        blocks = self.layers * self.weights.block
        phase, layers, pulls, keep = passes.phase, self.layers, passes.pulls, self.held.gathered.keep
        # With `rollout` an update alone gathers again for every pass.
        stay = keep == "always" or (keep == "rollout" and phase != "update")

        def units(
            purpose: str, kind: Kind, scale: float, calls: tuple[float, float], outside: float, group: Group = group
        ) -> Iterator[Exchange]:
            """Calls for every block, `scale` bytes sent per weight, and for the weights outside of blocks."""
            sent = scale * self.weights.block
            yield Exchange(phase, purpose, kind, group, count=calls[0], sent=sent, hidden=True)
            yield Exchange(phase, purpose, kind, group, count=calls[1], sent=scale * outside, hidden=True)

        outside, times = self.weights.total - blocks, self._gathers(phase) if stay else passes.forwards
        if not alone:
            yield from units("weights", "all_gather", ring * self.item, (times * layers, times), outside)
        if not pulls:
            return
        if not stay and not alone:
            # The input of the first block has no gradient under adapters, so FSDP keeps the block to the pull's end.
            kept = 0.0 if self.full else passes.backwards - pulls
            again = passes.backwards * layers - kept
            yield from units("weights", "all_gather", ring * self.item, (again, pulls), outside)
        if not self.full:
            return
        # Autograd adds up the branches of a pull before FSDP has the gradient. Frozen weights have none.
        trained = self.weights.trained - blocks
        if not alone:
            yield from units("gradients", "reduce_scatter", ring * 4.0, (pulls * layers, pulls), trained)
        if replicas.ranks > 1:
            # Shards are summed over the replicas in the pulls of an update's last step.
            scale = 2 * (replicas.ranks - 1) / replicas.ranks * 4.0 / group.ranks
            last = self.updates * self.pulls_per_step
            yield from units("gradients of replicas", "all_reduce", scale, (last * layers, last), trained, replicas)

    def _gathers(self, phase: str) -> float:
        """How often a phase gathers all weights, where they stay from one of its passes to the next."""
        behind = anchor_share(self.config.training, self.config.objective.kl_mode)
        if self.held.gathered.keep == "rollout":
            # The single pass measures the anchor within the rollout.
            measured = 0.0 if self.config.training.update == "single_pass" else behind
            # Exchanging the policy's values for the old ones' and back frees what was gathered.
            return measured + measures_old_policy(self.config) if phase == "anchor" else 1.0
        if not self.full:
            return 0.0
        # Kept until they change: by a step, and when the anchor takes their place and gives it back.
        # An old policy that is not measured gives its place back to the update.
        sampled_alone = keeps_old_policy(self.config) and not measures_old_policy(self.config)
        update = self.updates - 1.0 + sampled_alone * (1.0 - behind)
        behind += measures_old_policy(self.config)
        return {"rollout": 1.0, "anchor": 2 * behind, "update": update, "evaluation": 0.0}[phase]

    def _tokens(self, passes: _Passes) -> Iterator[Exchange]:
        """Ulysses: two all-to-alls per layer and pass, and the velocity of all tokens at the end of a forward."""
        group, sp = self.layout.groups["sp"], self.layout.sp
        if sp == 1 or not passes.forwards:
            return
        checkpointing = self.config.model.settled_checkpointing
        tokens = self.evaluation_tokens if passes.phase == "evaluation" else self.held.video_tokens
        middle, end = (
            all_to_all_bytes(
                batch=passes.batch,
                num_video=tokens,
                num_text=self.description.text_tokens,
                width=self.description.width,
                degree=sp,
                itemsize=self.item,
                checkpointing=checkpointing,
                last=last,
            )
            for last in (False, True)
        )
        # The last layer's text has no result to send.
        forward, backward = (
            (self.layers - 1) * of_middle + of_end for of_middle, of_end in zip(middle, end, strict=True)
        )
        calls = 2 * self.layers
        # Full checkpointing repeats the forward's exchanges.
        repeated = 2 if checkpointing == "full" else 1
        phase, name = passes.phase, "tokens and heads"
        yield Exchange(phase, name, "all_to_all", group, count=passes.forwards * calls, sent=forward / calls)
        count, sent = passes.backwards * calls * repeated, backward / (calls * repeated)
        yield Exchange(phase, f"{name}, backward", "all_to_all", group, count=count, sent=sent)
        # A rank sends its share of the velocity to every other one.
        channels = self.description.transformer["out_channels"]
        share = share_of(tokens, sp) * channels * self.item * passes.batch
        yield Exchange(phase, "velocity", "all_gather", group, count=passes.forwards, sent=(sp - 1) * share)

    def _optimizer(self) -> Iterator[Exchange]:
        """The gradient of adapters, the norm, and the matrices that Muon makes orthogonal."""
        everybody, shards = self.layout.groups["all"], self.layout.groups["weights"]
        if not self.full:
            sent = 2 * (everybody.ranks - 1) / everybody.ranks * 4.0 * self.weights.trained
            # That of the first half of the videos too, where the halves are compared.
            count = self.updates + (second_half(self.config, self.layout.data_parallel) is not None)
            yield Exchange("optimizer", "gradients", "all_reduce", everybody, count=count, sent=sent)
            return
        if shards.ranks == 1:
            return
        ring = (shards.ranks - 1) / shards.ranks
        yield Exchange("optimizer", "norm", "all_reduce", shards, count=self.updates, sent=2 * ring * 4.0)
        if self.config.optimizer.name == "muon" and self.weights.matrices:
            # The momentum update of every matrix, whole and in bfloat16, on every rank.
            count = self.updates * self.weights.matrices
            sent = ring * 2.0 * self.weights.matrix_elements / self.weights.matrices
            yield Exchange("optimizer", "updates of Muon", "all_gather", shards, count=count, sent=sent)

    def _objects(self) -> Iterator[Exchange]:
        """Scores once per rollout, terms of the loss once per update, flags: Python objects through CPU memory."""
        group = self.layout.groups["all"]
        sent = (group.ranks - 1) * OBJECT_BYTES
        for phase, purpose, count in (("reward", "scores", 1.0), ("update", "terms", self.updates)):
            yield Exchange(phase, purpose, "all_gather", group, count=count, sent=sent)
        yield Exchange("optimizer", "flag", "all_reduce", group, count=1.0, sent=4.0)
        if self.eval_batches:
            yield Exchange("evaluation", "scores", "all_gather", group, count=1.0, sent=sent)
