"""The policy of the toy world that makes no error, and what a sampler does with it.

The legal videos are finitely many, so the velocity that flow matching aims for has a closed form: a sampler is judged
without a network, and what differs between two samplers is theirs alone.

Shapes: B samples, M legal videos (atoms), C F H W of a latent.
"""

from dataclasses import dataclass

from torch import Tensor

from sage_fast.config.sections import VideoConfig
from sage_fast.models.toy.codec import PatchCodec
from sage_fast.models.toy.renderer import manifold_for
from sage_fast.records import Trajectory

SPREAD = 0.02
"""Standard deviation of the data around an atom, in units of the latents."""


class ExactPolicy:
    """Velocity E[z - x0 | x] of data that are N(atom_k, spread^2 I), k uniform in the M atoms unless a prior is given.

    `ExactPolicy.velocity` is what `rollout.sample_trajectory` asks for. Computes in the dtype of the atoms: float64 for
    the toy's own, because the weights of two atoms at a small sigma differ by the exponential of a large difference.

    Args:
        atoms: (M, C, F, H, W).
        spread: s0, positive.

    Example: `sample_trajectory(ExactWorld(video).velocity, samples, keys, table, initial)`
    """

    def __init__(self, atoms: Tensor, spread: float = SPREAD) -> None:
        self.spread = spread
        self.atoms = atoms.flatten(1)
        self._half_energy = self.atoms.square().sum(1) / 2

    def velocity(self, step: int, latents: Tensor, sigma: Tensor, log_prior: Tensor | None = None) -> Tensor:
        """Velocity (B, C, F, H, W) at latents of that shape and noise levels sigma (B,), of which none is 0.

        log_prior: (B, M), logarithm of each atom's share in the data of a sample's prompt, up to a constant; None is
        the uniform one, whatever the prompt.
        """
        s = sigma.to(self.atoms).view(-1, 1)
        x, data = latents.flatten(1).to(self.atoms), 1 - s
        variance = s.square() + (data * self.spread).square()
        logits = (data * (x @ self.atoms.T) - data.square() * self._half_energy) / variance
        weights = (logits if log_prior is None else logits + log_prior).softmax(1)
        centre = weights @ self.atoms
        estimate = centre + data * self.spread**2 / variance * (x - data * centre)
        return ((x - estimate) / s).view_as(latents).to(latents.dtype)

    def nearest(self, latents: Tensor) -> tuple[Tensor, Tensor]:
        """Row (B,) of the nearest atom to each of the latents (B, C, F, H, W), and the root mean square distance."""
        x = latents.flatten(1).to(self.atoms)
        rows = (self._half_energy - x @ self.atoms.T).argmin(1)
        return rows, (x - self.atoms[rows]).square().mean(1).sqrt()


@dataclass(frozen=True, kw_only=True)
class SamplerMeasures:
    """Measures of a sampler on the exact policy. Distances are root mean squares over elements and samples.

    Example: `sage_grpo` at 20 steps, shift 5 and eta 0.5 has `leftover_noise` 0.08 and `distance` 0.08.
    """

    leftover_noise: float
    """Standard deviation of the last step's noise, in latents: it stays in the sample."""
    dispersion: float
    """Distance of the last step's mean to the nearest atom over that of the data, 1 for the data themselves."""
    distance: float
    """Distance of the sample to the nearest atom, in latents; the data have `SPREAD`."""
    pixel_distance: float
    """Mean `Manifold.distance` of the decoded videos, pixels in [0, 1]."""
    coverage: float
    """Distinct atoms reached over the number that as many draws from the data reach on average."""
    exploration: float
    """Distinct atoms reached from one start, mean over the groups."""
    group_spread: float
    """Root mean square deviation of the samples from the mean of their group, in latents."""


class ExactWorld:
    """The exact policy of the legal videos of one size, and what it measures, as a study of samplers asks for it."""

    def __init__(self, video: VideoConfig) -> None:
        self.manifold = manifold_for(video.num_frames, video.height, video.width)
        self.policy = ExactPolicy(PatchCodec().encode(self.manifold.videos).double())
        self.velocity = self.policy.velocity
        self.latent_shape = PatchCodec().latent_shape(video.num_frames, video.height, video.width)

    def measure(self, trajectory: Trajectory, group: int) -> SamplerMeasures:
        """Measure a trajectory of the exact policy, each `group` consecutive samples of which have one start."""
        table, last = trajectory.table, trajectory.latents[-1]
        mean = float(table.a[-1]) * last + float(table.b[-1]) * trajectory.velocities[-1]
        final = trajectory.final
        rows, distance = self.policy.nearest(final)
        atoms = len(self.policy.atoms)
        groups = rows.view(-1, group)
        members = final.reshape(-1, group, final[0].numel())
        return SamplerMeasures(
            leftover_noise=float(table.std[-1]),
            dispersion=float(self.policy.nearest(mean)[1].square().mean().sqrt()) / self.policy.spread,
            distance=float(distance.square().mean().sqrt()),
            pixel_distance=float(self.manifold.distance(PatchCodec().decode(final)).mean()),
            coverage=len(rows.unique()) / (atoms * (1 - (1 - 1 / atoms) ** len(final))),
            exploration=sum(len(row.unique()) for row in groups) / len(groups),
            group_spread=float((members - members.mean(1, keepdim=True)).square().mean().sqrt()),
        )
