"""Sampling: from initial noise to final latents, with what the policy update needs, and
on to videos and their scores.

The noise of a sample is a function of (seed, update, prompt, member, step) and of
nothing else, so one process or many, in any micro-batch, fresh or resumed, sample the
same videos.
"""

import hashlib
import struct
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal, TypeVar

import torch
from torch import Tensor

from sage_fast.config.errors import (
    ConfigError,
    DecodeError,
    RewardError,
    RewardServerError,
)
from sage_fast.config.sections import (
    EvaluationConfig,
    ObjectiveConfig,
    RolloutConfig,
    TrainingConfig,
)
from sage_fast.data import num_trained
from sage_fast.distributed.world import SINGLE_PROCESS, World
from sage_fast.kernels import REFERENCE, Kernels, StepColumns
from sage_fast.models.family import VideoDecoder
from sage_fast.noise import STREAM_INITIAL, NoiseKey, gaussian, noise_ids
from sage_fast.objective import loss_columns
from sage_fast.policy.guidance import GuidedPolicy
from sage_fast.records import Prompt, PromptEmbeds, Sample, Trajectory, with_kept
from sage_fast.rewards.base import OnFailure, describe_batch, seed_generators
from sage_fast.rewards.composite import CompositeReward, ScoredBatch, gather_scores
from sage_fast.sde import TransitionTable, sigma_schedule, transition_table

T = TypeVar("T")

StepVelocity = Callable[[int, Tensor, Tensor], Tensor]
"""Called as velocity(step, latents, sigma) with the state (B, C, F, H, W) and noise
levels (B,) of a sampler's step.
"""

Progress = Callable[[str, int, int, str], None]
"""Called as progress(phase, done, total, subject) during an iteration; the subject
names the videos being worked on.
"""


def rollout_table(config: RolloutConfig, rollout: int) -> TransitionTable:
    """Transition table of rollout number `rollout` (from 0): the configured sampler,
    restricted to its SDE window, in steps of the configured order.

    A sliding window wraps around: with 8 steps and size 3 it covers steps 6, 7 and 0 in
    rollout 6, and steps 2, 3 and 0 where it stays within the first half.
    """
    table = transition_table(
        config.sde_type, sigma_schedule(config.num_steps, config.shift), config.eta
    )
    window = config.sde_window
    if window.size is not None:
        first = rollout * window.stride
        span = window.span(config.num_steps)
        table = table.restrict([(first + i) % span for i in range(window.size)])
    return table.second_order() if config.solver_order == 2 else table


def rollout_tables(config: RolloutConfig) -> list[TransitionTable]:
    """The different tables of a run's rollouts: after so many of them an SDE window is
    back where it began.
    """
    cycle = config.sde_window.span(config.num_steps) if config.sde_window.size else 1
    return [rollout_table(config, rollout) for rollout in range(cycle)]


def noise_keys(
    samples: Sequence[Sample], seed: int, update: int, usual: int = 0
) -> list[NoiseKey]:
    """The key of each sample's noise; `seed` and `usual` as in `noise_seed`."""
    return [noise_key(s.prompt, s.member, seed, update, usual) for s in samples]


def noise_key(
    prompt: Prompt, member: int, seed: int, update: int, usual: int = 0
) -> NoiseKey:
    """The key of the noise of a prompt's member; `seed` and `usual` as in `noise_seed`."""
    seed = noise_seed(prompt, seed, usual)
    return NoiseKey(
        seed=seed, update=update, prompt_index=prompt.index, sample_index=member
    )


def noise_seed(prompt: Prompt, seed: int, usual: int = 0) -> int:
    """The seed of a prompt's noise: `seed`, or for a prompt with a seed of its own a
    mixture of the two.

    Args:
        seed: of the run, of its evaluation or of a call that generates.
        usual: its default, at which a prompt's own seed is taken as it is.
    """
    if prompt.seed is None or seed == usual:
        return seed if prompt.seed is None else prompt.seed
    both = struct.pack("<2q", prompt.seed, seed)
    # 63 bits, since `NoiseKey` takes signed 64-bit integers.
    return (
        int.from_bytes(
            hashlib.blake2b(both, digest_size=8, person=b"sage_fast.seeds").digest(),
            "little",
        )
        >> 1
    )


def initial_latents(
    keys: Sequence[NoiseKey],
    shape: tuple[int, ...],
    device: torch.device | str = "cpu",
    *,
    kind: Literal["own", "shared", "fixed"] = "own",
    members: int = 1,
) -> Tensor:
    """Pure noise (B, *shape) float32 to start from, of a stream that no step uses.

    Args:
        shape: (C, F, H, W).
        kind: `rollout.initial_noise`. With `shared` the first member's noise stands for
            the group; with `fixed` neither the rollout nor the prompt's number matters.
        members: of a group.
    """
    if kind == "shared":
        keys = [start_key(key, members) for key in keys]
    elif kind == "fixed":
        keys = [
            replace(
                key, update=0, prompt_index=0, sample_index=key.sample_index % members
            )
            for key in keys
        ]
    return gaussian(keys, 0, shape, stream=STREAM_INITIAL, device=device)


def start_key(key: NoiseKey, members: int) -> NoiseKey:
    """The key of a group's first member, from which the group starts with
    `rollout.initial_noise: shared`.

    Its number is not always 0: a prompt that occurs twice has two groups, each with its
    own first member.
    """
    return replace(key, sample_index=key.sample_index // members * members)


def shares_first_steps(config: RolloutConfig, sharded: bool) -> bool:
    """True if the steps before the first noise are computed once per group, see
    `FirstSteps`.

    Args:
        sharded: a forward communicates weights. All ranks must then run equally many,
            so whole groups lie on each.
    """
    whole_groups = config.batch_size % config.num_generations == 0
    return config.initial_noise == "shared" and (whole_groups or not sharded)


def num_first_steps(table: TransitionTable) -> int:
    """Number of steps before the first that draws noise; all of an ODE's."""
    noisy = table.std.nonzero().flatten().tolist()
    return noisy[0] if noisy else table.num_steps


def policy_velocity(policy: GuidedPolicy, samples: Sequence[Sample]) -> StepVelocity:
    """The policy's velocity of some samples, as a sampler asks for it."""
    embeds = [sample.embeds for sample in samples]
    return lambda step, latents, sigma: policy.velocity(latents, sigma, embeds)


@torch.no_grad()
def sample_trajectory(
    velocity: StepVelocity,
    samples: Sequence[Sample],
    keys: Sequence[NoiseKey],
    table: TransitionTable,
    initial: Tensor,
    kernels: Kernels = REFERENCE,
    *,
    keep_steps: bool = True,
    steps: range | None = None,
) -> Trajectory:
    """Generate one micro-batch of latents.

    Args:
        velocity: called once per step.
        samples, keys: B records and the keys of their noise.
        table: the sampler; an `ode` table draws no noise.
        initial: (B, C, F, H, W) float32, see `initial_latents`, or the state before the
            first of `steps`.
        kernels: how the step is computed.
        keep_steps: False returns the final latents alone.
        steps: of the table, those that are taken; None means all.

    Returns:
        Trajectory whose tensors are float32 on the device of `initial`.
    """
    latents = []
    velocities = []
    x = initial
    last: Tensor | None = None
    for step in range(table.num_steps) if steps is None else steps:
        v = velocity(step, x, step_sigma(table, [step] * len(samples)))
        if keep_steps:
            latents.append(x)
            velocities.append(v)
        direction = v
        if table.extrapolation is not None and last is not None:
            direction = torch.lerp(last, v, 1 + float(table.extrapolation[step]))
        last = v
        # Numbers of Python: a step costs no copy to the GPU, and float64 is rounded
        # once, by the kernel.
        a, b, std = (float(column[step]) for column in (table.a, table.b, table.std))
        x = kernels.sde_step(
            x,
            direction,
            noise_ids(keys, [step] * len(keys), x.device) if std else None,
            a,
            b,
            std,
        )
    if steps is None or steps.stop == table.num_steps:
        # To the bit: a step only comes near what its prompt keeps.
        x = with_kept(x, [sample.embeds for sample in samples])
    return Trajectory(
        samples=list(samples),
        keys=list(keys),
        table=table,
        latents=latents,
        velocities=velocities,
        final=x,
    )


@torch.no_grad()
def solve_by_unipc(
    velocity: StepVelocity, initial: Tensor, num_steps: int, shift: float
) -> Tensor:
    """Integrate the flow by diffusers' UniPC of order 2 with its corrector (Zhao et al.
    2023, arXiv:2302.04867), as `WanPipeline` does.

    The noise levels are the scheduler's own. Its timesteps are whole numbers, cut off,
    and it is at these that the pipeline asks for a velocity. Every coefficient is a
    number of the step, so a video does not depend on its batch.

    Args:
        velocity, initial: as in `sample_trajectory`.
        shift: the scheduler's `flow_shift`.

    Returns:
        Final latents, like `initial`.
    """
    # Here, since it takes seconds to import.
    from diffusers import UniPCMultistepScheduler

    # A new one for every batch: it keeps the estimates of the last two steps.
    solver = UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=shift
    )
    solver.set_timesteps(num_steps)
    solver.set_begin_index(0)
    x = initial
    for step, timestep in enumerate(solver.timesteps):
        # A family's sigma * 1000 is that number again; of 10 of the 1000 it is the next
        # float32, which moves latents by 1e-7.
        sigma = (timestep / 1000).expand(len(x))
        x = solver.step(velocity(step, x, sigma), timestep, x, return_dict=False)[0]
    return x


@dataclass(kw_only=True)
class FirstSteps:
    """The steps before the first noise of groups whose members start alike: computed
    once per group.

    The first micro-batch that has members of a group computes them, in a batch with one
    row for each such group; the others take the states, and references to what is kept
    of the steps. A micro-batch forgets the groups that it has no members of, since
    groups lie side by side.

    With micro-batches of one video the bits are those of a sampler that computes every
    member. With larger ones the forward of these steps has fewer rows than that
    sampler's, and may round otherwise: a micro-batch within one group takes the bits of
    micro-batches of one video.

    Attributes:
        velocity: of a batch, without a gradient.
        members: of a group.
        known: by the key of the start, one row each.
    """

    velocity: Callable[[Sequence[Sample]], StepVelocity]
    members: int
    known: dict[NoiseKey, Trajectory] = field(default_factory=dict)

    def __call__(
        self, sampler: "Sampler", batch: Sequence[Sample], keys: Sequence[NoiseKey]
    ) -> Trajectory:
        """Trajectory of a micro-batch up to the first noise: its `final` is the state
        there.
        """
        starts = [start_key(key, self.members) for key in keys]
        known = {start: self.known[start] for start in starts if start in self.known}
        new = {
            start: sample
            for start, sample in zip(starts, batch, strict=True)
            if start not in known
        }
        if new:
            found = sample_trajectory(
                self.velocity(list(new.values())),
                list(new.values()),
                list(new),
                sampler.table,
                sampler.initial(list(new)),
                sampler.kernels,
                keep_steps=sampler.keep_steps,
                steps=range(num_first_steps(sampler.table)),
            )
            known |= {
                start: _of_rows(found, slice(row, row + 1))
                for row, start in enumerate(new)
            }
        self.known = known
        rows = [known[start] for start in starts]
        return replace(
            rows[0],
            samples=batch,
            keys=keys,
            latents=[
                _side_by_side(states)
                for states in zip(*(row.latents for row in rows), strict=True)
            ],
            velocities=[
                _side_by_side(values)
                for values in zip(*(row.velocities for row in rows), strict=True)
            ],
            final=_side_by_side([row.final for row in rows]).contiguous(),
        )


def _of_rows(trajectory: Trajectory, rows: slice) -> Trajectory:
    """The trajectory of some rows of a micro-batch, without copies."""
    return replace(
        trajectory,
        samples=trajectory.samples[rows],
        keys=trajectory.keys[rows],
        latents=[state[rows] for state in trajectory.latents],
        velocities=[velocity[rows] for velocity in trajectory.velocities],
        final=trajectory.final[rows],
    )


def _side_by_side(rows: Sequence[Tensor]) -> Tensor:
    """B tensors (1, ...) as one (B, ...), without a copy where all are the same tensor."""
    first = rows[0]
    if all(row is first for row in rows):
        return first.expand(len(rows), *first.shape[1:])
    return torch.cat(list(rows))


@dataclass(frozen=True, kw_only=True)
class Sampler:
    """Samples videos of prompts from a loaded model: those of a rollout, of an
    evaluation, and of `generate`.

    Attributes:
        velocity: of a batch and the keys of its noise.
        embed: conditioning of a prompt.
        initial: noise to start from.
        table: the steps.
        seed, update, usual: of the noise, see `noise_seed`.
        kernels, keep_steps: see `sample_trajectory`.
        first_steps: None where every member of a group computes its own.
        solve: replaces the table's steps, see `solve_by_unipc`.
    """

    velocity: Callable[[Sequence[Sample], Sequence[NoiseKey]], StepVelocity]
    embed: Callable[[Prompt], PromptEmbeds]
    initial: Callable[[Sequence[NoiseKey]], Tensor]
    table: TransitionTable
    seed: int
    update: int = 0
    usual: int = 0
    kernels: Kernels = REFERENCE
    keep_steps: bool = True
    first_steps: FirstSteps | None = None
    solve: Callable[[StepVelocity, Tensor], Tensor] | None = None

    def samples(self, members: Iterable[tuple[Prompt, int]]) -> list[Sample]:
        """Samples of prompts and their members."""
        return [
            Sample(prompt=p, embeds=self.embed(p), member=member, group=p.index)
            for p, member in members
        ]

    def __call__(self, batch: Sequence[Sample]) -> Trajectory:
        """Latents of one micro-batch."""
        keys = noise_keys(batch, self.seed, self.update, self.usual)
        velocity = self.velocity(batch, keys)
        sample = partial(sample_trajectory, velocity, batch, keys, self.table)
        if self.solve is not None:
            behind = range(self.table.num_steps, self.table.num_steps)
            return sample(self.solve(velocity, self.initial(keys)), steps=behind)
        if self.first_steps is None:
            return sample(self.initial(keys), self.kernels, keep_steps=self.keep_steps)
        first = self.first_steps(self, batch, keys)
        others = range(num_first_steps(self.table), self.table.num_steps)
        rest = sample(
            first.final, self.kernels, keep_steps=self.keep_steps, steps=others
        )
        return replace(
            rest,
            latents=[*first.latents, *rest.latents],
            velocities=[*first.velocities, *rest.velocities],
        )


def evaluation_sampler(
    rollout: RolloutConfig,
    evaluation: EvaluationConfig,
    policy: GuidedPolicy,
    embed: Callable[[Prompt], PromptEmbeds],
    initial: Callable[[Sequence[NoiseKey]], Tensor],
    *,
    sde_type: str = "ode",
) -> Sampler:
    """The sampler of a run's evaluations, which videos are made with afterwards too.

    A `sde_type` that draws noise has its own steps, whatever `evaluation.solver` is.
    """
    steps = evaluation.num_steps or rollout.num_steps
    sigmas = sigma_schedule(steps, rollout.shift)
    solve = None
    if sde_type == "ode" and evaluation.solver == "unipc":
        solve = partial(solve_by_unipc, num_steps=steps, shift=rollout.shift)
    return Sampler(
        velocity=lambda batch, keys: policy_velocity(policy, batch),
        embed=embed,
        initial=initial,
        table=transition_table(sde_type, sigmas, rollout.eta),
        seed=evaluation.seed,
        usual=EvaluationConfig.seed,
        solve=solve,
    )


def decode(decoder: VideoDecoder, latents: Tensor) -> Tensor:
    """Videos of sampled latents, see `VideoDecoder`. DecodeError where a latent is not
    finite, of any family.
    """
    if not latents.isfinite().all():
        raise DecodeError(
            "Sampled latents are not finite: the velocity of the model was not. Use "
            "model.dtype float32 or bfloat16, "
            "and check the weights, the adapter and the text encoder."
        )
    return decoder.decode(latents)


@dataclass(kw_only=True)
class VideoScoring:
    """Decodes sampled latents, scores the videos, and gathers the scores of all ranks.

    Ranks that share a video (sequence parallelism) have the same latents, so each
    decodes and scores every sp-th one.

    Attributes:
        phase: entered with "decode" and "reward", for timing.
        progress: as in an iteration.
        seed: of the global generators before each batch, together with the number of
            its first video; None leaves them alone.
        evaluating: the judges score too, and every video is decoded, to be shown.
        group_size: videos of a group.
        held: what waits for the rest of its group, where a reward needs it whole.
    """

    decoder: VideoDecoder
    reward: CompositeReward
    on_failure: OnFailure
    world: World = SINGLE_PROCESS
    phase: Callable[[str], AbstractContextManager[None]] = lambda name: nullcontext()
    progress: Progress = lambda phase, done, total, subject: None
    seed: tuple[int, int] | None = None
    evaluating: bool = False
    group_size: int = 1
    scored: list[ScoredBatch] = field(default_factory=list)
    held: list[tuple[int, Sample, Tensor | None]] = field(default_factory=list)
    error: str | None = None
    pending: list[Future[None]] = field(default_factory=list)

    def add(
        self, trajectory: Trajectory, *, first: int, turn: int
    ) -> list[tuple[int, Tensor]]:
        """Decode and score this rank's part of a batch.

        Args:
            first: number of the batch's first video among all videos that are scored.
            turn: its number in the count by which ranks take turns.

        Returns:
            Numbers of the videos that were decoded here, with the videos (F, 3, H, W)
            uint8.
        """
        samples = trajectory.samples
        world = self.world
        # Ranks take turns by groups where these must be whole.
        whole = self.reward.whole_groups(self.evaluating)
        turns = [s.group if whole else turn + row for row, s in enumerate(samples)]
        rows = [
            r for r, at in enumerate(turns) if at % world.sp == world.rank % world.sp
        ]
        if not rows:
            return []
        own = [samples[row] for row in rows]
        read = self.reward.reads(self.evaluating)
        videos = None
        if self.evaluating or "video" in read:
            self.progress("decode", rows[0], len(samples), describe_batch(own))
            with self.phase("decode"):
                videos = decode(self.decoder, trajectory.final[rows])
        if "latents" in read:
            latents = trajectory.final[rows].cpu()
            own = [replace(s, latents=x) for s, x in zip(own, latents, strict=True)]
        numbers = [first + row for row in rows]
        decoded = [] if videos is None else list(zip(numbers, videos, strict=True))
        if whole:
            numbers, own, videos = self._whole(numbers, own, videos)
        # A judge of this process must not score in that thread.
        thread = None if self.evaluating and self.reward.judges else self.reward.thread
        if thread and own:
            self.pending.append(thread.submit(self._score, videos, own, numbers))
        elif own:
            if self.seed is not None:
                # A function of the first video's number, so a resumed run's rewards
                # draw alike.
                key = hashlib.sha256(repr((*self.seed, numbers[0])).encode())
                seed_generators(int.from_bytes(key.digest()[:8], "little"))
            with self.phase("reward"):
                self._score(videos, own, numbers)
        return decoded

    def _whole(
        self, numbers: list[int], samples: list[Sample], videos: Tensor | None
    ) -> tuple[list[int], list[Sample], Tensor | None]:
        """Hold some videos, and hand out all whose group is whole."""
        shown = [None] * len(numbers) if videos is None else videos
        self.held += zip(numbers, samples, shown, strict=True)
        counts = Counter(sample.group for _, sample, _ in self.held)
        whole = [one for one in self.held if counts[one[1].group] == self.group_size]
        self.held = [one for one in self.held if counts[one[1].group] < self.group_size]
        found = [video for _, _, video in whole if video is not None]
        numbers = [number for number, _, _ in whole]
        return numbers, [s for _, s, _ in whole], torch.stack(found) if found else None

    def _score(
        self, videos: Tensor | None, samples: Sequence[Sample], numbers: Sequence[int]
    ) -> None:
        failed = torch.zeros(len(samples), dtype=torch.bool)
        whose = {"evaluating": self.evaluating}
        try:
            if self.on_failure == "drop_group":
                scores, failed = self.reward.score_or_mark(videos, samples, **whose)
            else:
                scores = self.reward.score(videos, samples, **whose)
        except (RewardError, RewardServerError) as error:
            if self.world.size == 1:
                raise
            # Raised here it would leave the other ranks in the next collective, and
            # they could not name it.
            self.error = self.error or str(error)
        else:
            self.scored.append(
                ScoredBatch(numbers=numbers, scores=scores, failed=failed)
            )

    def wait(self) -> None:
        """Wait for what is being scored elsewhere."""
        for batch in self.pending:
            batch.result()

    def gather(self, count: int) -> tuple[dict[str, Tensor], Tensor]:
        """The scores of `count` videos from all ranks, see `gather_scores`. Collective."""
        self.wait()
        assert not self.held
        return gather_scores(self.scored, self.error, count, self.world)


def exchange_trajectories(
    trajectories: list[Trajectory],
    dealt: Tensor,
    samples: Callable[[Sequence[int]], Sequence[Sample]],
    keys: Sequence[NoiseKey],
    world: World,
) -> list[Trajectory]:
    """The micro-batches that this rank trains, by their numbers, from the ranks that
    sampled them. Collective.

    Args:
        trajectories: that this rank has sampled. The list is emptied, and what is not
            trained frees its memory.
        dealt: numbers of micro-batches by data-parallel rank, see `deal`.
        samples: of videos, by their numbers.
        keys: of all videos.
    """
    rank = world.dp_rank
    sampled = len(trajectories)
    like = trajectories[0]
    size = len(like.samples)
    steps = len(like.latents)
    sources = dealt // sampled
    moved = sources != torch.arange(len(dealt))[:, None]
    leaving = moved & (sources == rank)
    coming = moved[rank]
    held = dict(enumerate(trajectories, rank * sampled))
    sent = [held[number] for number in dealt[leaving].tolist()]
    found = {number: held[number] for number in dealt[rank][~coming].tolist()}
    trajectories.clear()
    held.clear()
    if not moved.any():
        return list(found.values())
    counts = (
        leaving.sum(dim=1) * size,
        sources[rank][coming].bincount(minlength=len(dealt)) * size,
    )
    columns = []
    # One step after the other, so that the buffers are small.
    for place, tensor in enumerate(_tensors(like)):
        videos = torch.cat(
            [tensor[:0], *(_tensors(trajectory)[place] for trajectory in sent)]
        )
        columns.append(
            world.exchange(videos, *(count.tolist() for count in counts)).split(size)
        )
    numbers = dealt[rank][coming]
    rows = (numbers[:, None] * size + torch.arange(size)).flatten().tolist()
    made = micro_batches(samples(rows), size)
    made_keys = micro_batches([keys[row] for row in rows], size)
    for number, batch, of_batch, *values in zip(
        numbers.tolist(), made, made_keys, *columns, strict=False
    ):
        latents = values[:steps]
        velocities = values[steps:-1]
        found[number] = replace(
            like,
            samples=batch,
            keys=of_batch,
            latents=latents,
            velocities=velocities,
            final=values[-1],
        )
    return [found[number] for number in sorted(found)]


def _tensors(trajectory: Trajectory) -> list[Tensor]:
    return [*trajectory.latents, *trajectory.velocities, trajectory.final]


def step_sigma(table: TransitionTable, steps: Sequence[int]) -> Tensor:
    """Noise levels (B,) float32 of the given steps, on the CPU, for the model's time
    input.
    """
    return table.sigmas[list(steps)].float()


def at_steps(values: Sequence[Tensor], steps: Sequence[int]) -> Tensor:
    """Row b of the value of step `steps[b]`, (B, ...): with permuted timesteps every
    sample is at another step.
    """
    return torch.stack([values[i][b] for b, i in enumerate(steps)])


def step_columns(
    settings: ObjectiveConfig,
    table: TransitionTable,
    steps: Sequence[int],
    advantage: Tensor,
) -> StepColumns:
    """Columns of step `steps[b]` of sample b for the loss, (B,) float32 on the device
    of `advantage` (B,).
    """

    def column(values: Tensor) -> Tensor:
        return values[list(steps)].float().to(advantage.device, non_blocking=True)

    return loss_columns(
        settings,
        gain=column(table.gain),
        std=column(table.std),
        scale=column(table.scale),
        size=column(-table.sigmas.diff()),
        advantage=advantage,
    )


def micro_batches(samples: Sequence[T], size: int) -> Iterable[Sequence[T]]:
    """Consecutive slices of `size` samples or prompts; the last may be shorter."""
    return (samples[i : i + size] for i in range(0, len(samples), size))


def check_trainable_steps(rollout: RolloutConfig, training: TrainingConfig) -> None:
    """ConfigError where some position of the SDE window has fewer trained steps than
    the rollout has updates.
    """
    fewest = min(int(table.trainable.sum()) for table in rollout_tables(rollout))
    trained = num_trained(training.timestep_fraction, fewest) if fewest else 0
    if trained < training.updates_per_rollout:
        where = " in the SDE window"
        fix = "Widen rollout.sde_window"
        if not rollout.sde_window.size:
            where = ""
            fix = "Raise training.timestep_fraction or rollout.num_steps,"
        raise ConfigError(
            f"{fewest} trainable step(s) of {rollout.sde_type}{where}, of which a "
            f"share of {training.timestep_fraction:g} trains {trained}: too few for "
            f"training.updates_per_rollout = {training.updates_per_rollout}. {fix} or "
            "lower updates_per_rollout."
        )
