"""The policy of the toy world that makes no error, what a sampler does with it, and a
version that can be trained.

The legal videos are finitely many, so the velocity that flow matching aims for has a
closed form: a sampler is judged without a network, and what differs between two
samplers is theirs alone. With weights to train, which share of a caption's videos shows
what, objectives are judged the same way: how much of the policy's mass follows the
caption, and its gradient, are known and not estimated.

Shapes: B samples, M legal videos (atoms), C F H W of a latent, K attributes of a
caption, P trained numbers.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sage_fast.config.sections import VideoConfig
from sage_fast.models.toy.components import PatchCodec
from sage_fast.models.toy.renderer import COLOURS, MOTIONS, SHAPES, manifold_for
from sage_fast.records import Trajectory

DIMENSIONS = 160
OFF_MANIFOLD = 8
"""Of a learnable policy's videos: in which scenes differ, and in which none do."""
SPREAD = 0.02
"""Standard deviation of the data around an atom, in units of the latents."""


class ExactPolicy:
    """Velocity E[z - x0 | x] of data that are N(atom_k, spread^2 I), k uniform in the M
    atoms unless a prior is given.

    `ExactPolicy.velocity` is what `rollout.sample_trajectory` asks for. Computes in the
    dtype of the atoms: float64 for the toy's own, because the weights of two atoms at a
    small sigma differ by the exponential of a large difference.

    Args:
        atoms: (M, C, F, H, W).
        spread: s0, positive.

    Example: `sample_trajectory(ExactWorld(video).velocity, samples, keys, table,
    initial)`
    """

    def __init__(self, atoms: Tensor, spread: float = SPREAD) -> None:
        self.spread = spread
        self.atoms = atoms.flatten(1)
        self._half_energy = self.atoms.square().sum(1) / 2

    def velocity(
        self, step: int, latents: Tensor, sigma: Tensor, log_prior: Tensor | None = None
    ) -> Tensor:
        """Velocity (B, C, F, H, W) at latents of that shape and noise levels sigma
        (B,), of which none is 0.

        log_prior: (B, M), logarithm of each atom's share in the data of a sample's
        prompt, up to a constant; None is the uniform one, whatever the prompt.
        """
        s = sigma.to(self.atoms).view(-1, 1)
        x = latents.flatten(1).to(self.atoms)
        data = 1 - s
        variance = s.square() + (data * self.spread).square()
        logits = (
            data * (x @ self.atoms.T) - data.square() * self._half_energy
        ) / variance
        weights = (logits if log_prior is None else logits + log_prior).softmax(1)
        centre = weights @ self.atoms
        estimate = centre + data * self.spread**2 / variance * (x - data * centre)
        return ((x - estimate) / s).view_as(latents).to(latents.dtype)

    def nearest(self, latents: Tensor) -> tuple[Tensor, Tensor]:
        """Row (B,) of the nearest atom to each of the latents (B, C, F, H, W), and the
        root mean square distance.
        """
        x = latents.flatten(1).to(self.atoms)
        rows = (self._half_energy - x @ self.atoms.T).argmin(1)
        return rows, (x - self.atoms[rows]).square().mean(1).sqrt()


class LearnablePolicy(ExactPolicy):
    """The exact policy of captioned videos, a function of numbers psi (P,) that are 0
    before training.

    A caption asks for one value of each attribute. The share of an atom in a caption's
    data is the product of an entry of a confusion matrix per attribute: the softmax of
    the logits in the row of the value asked for. All data are shifted by phi along
    directions off the manifold. The logits and phi together are  theta = base +
    rotation psi; without a rotation every entry is trained by itself, with one every
    number of psi moves all of them, as in a network.

    Args:
        atoms: (M, D).
        attributes: (M, K) int64, values that an atom shows.
        wrong: share of the wrong values of each attribute before training, in (0, 1).
        directions: (N, D) orthonormal, off the manifold.
        rotated: with a random rotation, the same for every seed of an experiment.
    """

    def __init__(
        self,
        atoms: Tensor,
        attributes: Tensor,
        *,
        wrong: Sequence[float],
        directions: Tensor,
        rotated: bool = True,
        spread: float = SPREAD,
    ) -> None:
        super().__init__(atoms, spread)
        self.attributes = attributes
        self.directions = directions.to(atoms)
        self.sizes = [int(size) for size in attributes.amax(0) + 1]
        columns = zip(attributes.T, self.sizes, strict=True)
        self._shows = torch.cat(
            [torch.nn.functional.one_hot(shown, n) for shown, n in columns], 1
        ).T.to(atoms)
        logits = [
            torch.full((n, n), w / (n - 1)).fill_diagonal_(1 - w).log().flatten()
            for n, w in zip(self.sizes, wrong, strict=True)
        ]
        self.base = torch.cat([*logits, torch.zeros(len(directions))]).to(atoms)
        size = len(self.base)
        mixing = torch.randn(
            size, size, generator=torch.Generator().manual_seed(0), dtype=torch.float64
        )
        self.rotation = (torch.linalg.qr(mixing)[0] if rotated else torch.eye(size)).to(
            atoms
        )

    def initial(self) -> Tensor:
        """Numbers psi (P,) before training."""
        return torch.zeros_like(self.base)

    def log_prior(self, psi: Tensor, captions: Tensor) -> Tensor:
        """Logarithm of each atom's share in the data of captions (B, K), up to a
        constant; (B, M).
        """
        rows = [
            m.log_softmax(1)[asked]
            for m, asked in zip(self._theta(psi)[0], captions.T, strict=True)
        ]
        return torch.cat(rows, 1) @ self._shows

    def velocity_at(
        self, psi: Tensor, captions: Tensor, latents: Tensor, sigma: Tensor
    ) -> Tensor:
        """Velocity (B, D) of the policy psi for captions (B, K) at latents (B, D) and
        noise levels sigma (B,).
        """
        shift = self._theta(psi)[1] @ self.directions
        # Data that are shifted by u have, at x, the velocity of the others at x - (1 -
        # sigma) u, less u.
        data = 1 - sigma.to(latents)[:, None]
        return (
            self.velocity(
                0, latents - data * shift, sigma, self.log_prior(psi, captions)
            )
            - shift
        )

    def aligned(self, psi: Tensor) -> Tensor:
        """Share of the policy's data that show what the caption asks for, mean over all
        captions.
        """
        # The captions are all combinations of the values, so the mean of the products
        # is the product of the means.
        return self.followed(psi).prod()

    def followed(self, psi: Tensor) -> Tensor:
        """Share of the policy's data that show the value asked for, of each attribute
        (K,).
        """
        return torch.stack(
            [m.softmax(1).diagonal().mean() for m in self._theta(psi)[0]]
        )

    def drift(self, psi: Tensor) -> Tensor:
        """Distance that the data have moved off the manifold: the length of phi."""
        return self._theta(psi)[1].norm()

    def _theta(self, psi: Tensor) -> tuple[list[Tensor], Tensor]:
        *parts, phi = (self.base + self.rotation @ psi).split(
            [*(n * n for n in self.sizes), len(self.directions)]
        )
        return [part.view(n, n) for part, n in zip(parts, self.sizes, strict=True)], phi


@dataclass(frozen=True, kw_only=True)
class SamplerMeasures:
    """Measures of a sampler on the exact policy. Distances are root mean squares over
    elements and samples.

    Example: `sage_grpo` at 20 steps, shift 5 and eta 0.5 has `leftover_noise` 0.08 and
    `distance` 0.08.
    """

    leftover_noise: float
    """Standard deviation of the last step's noise, in latents: it stays in the sample.
    """
    dispersion: float
    """Distance of the last step's mean to the nearest atom over that of the data, 1 for
    the data themselves.
    """
    distance: float
    """Distance of the sample to the nearest atom, in latents; the data have `SPREAD`.
    """
    pixel_distance: float
    """Mean `Manifold.distance` of the decoded videos, pixels in [0, 1]."""
    coverage: float
    """Distinct atoms reached over the number that as many draws from the data reach on
    average.
    """
    exploration: float
    """Distinct atoms reached from one start, mean over the groups."""
    group_spread: float
    """Root mean square deviation of the samples from the mean of their group, in
    latents.
    """


class ExactWorld:
    """The exact policy of the legal videos of one size, and what it measures, as a
    study of samplers asks for it.
    """

    def __init__(self, video: VideoConfig) -> None:
        self.manifold = manifold_for(video.num_frames, video.height, video.width)
        self.policy = ExactPolicy(PatchCodec().encode(self.manifold.videos).double())
        self.velocity = self.policy.velocity
        self.latent_shape = PatchCodec().latent_shape(
            video.num_frames, video.height, video.width
        )

    def learnable(self, *, rotated: bool = True) -> LearnablePolicy:
        """The policy of the base model's faults, with weights to train: colours are
        often wrong, motions sometimes.

        It has the 360 scenes in the middle of their track, in the `DIMENSIONS` in which
        they differ most (an exact rotation, without their common mean, which a flow
        carries along), and `OFF_MANIFOLD` more in which they do not.
        """
        scenes = self.manifold.scenes
        rows = [
            row
            for row, scene in enumerate(scenes)
            if scene.along == 0 and scene.across in (-2, 0, 2)
        ]
        names = [list(COLOURS), list(SHAPES), list(MOTIONS)]
        shown = [
            (scenes[row].colour, scenes[row].shape, scenes[row].motion) for row in rows
        ]
        attributes = torch.tensor(
            [[n.index(v) for n, v in zip(names, one, strict=True)] for one in shown]
        )
        atoms = self.policy.atoms[rows]
        centred = atoms - atoms.mean(0)
        basis = torch.linalg.svd(centred, full_matrices=False)[2][:DIMENSIONS]
        atoms = torch.cat(
            [centred @ basis.T, torch.zeros(len(rows), OFF_MANIFOLD)], 1
        ).float()
        directions = torch.eye(DIMENSIONS + OFF_MANIFOLD)[DIMENSIONS:]
        wrong = (0.45, 0.03, 0.15)
        return LearnablePolicy(
            atoms, attributes, wrong=wrong, directions=directions, rotated=rotated
        )

    def measure(self, trajectory: Trajectory, group: int) -> SamplerMeasures:
        """Measure a trajectory of the exact policy, each `group` consecutive samples of
        which have one start.
        """
        table = trajectory.table
        last = trajectory.latents[-1]
        mean = (
            float(table.a[-1]) * last + float(table.b[-1]) * trajectory.velocities[-1]
        )
        final = trajectory.final
        rows, distance = self.policy.nearest(final)
        atoms = len(self.policy.atoms)
        groups = rows.view(-1, group)
        members = final.reshape(-1, group, final[0].numel())
        return SamplerMeasures(
            leftover_noise=float(table.std[-1]),
            dispersion=float(self.policy.nearest(mean)[1].square().mean().sqrt())
            / self.policy.spread,
            distance=float(distance.square().mean().sqrt()),
            pixel_distance=float(
                self.manifold.distance(PatchCodec().decode(final)).mean()
            ),
            coverage=len(rows.unique()) / (atoms * (1 - (1 - 1 / atoms) ** len(final))),
            exploration=sum(len(row.unique()) for row in groups) / len(groups),
            group_spread=float(
                (members - members.mean(1, keepdim=True)).square().mean().sqrt()
            ),
        )
