"""Samplers as affine Gaussian transitions.

Every sampler of this project is one step  x' ~ N(a x + b v, std^2 I)  whose scalars a,
b and std depend on the noise levels alone. They are computed before a rollout, in
float64, from one table of noise levels, and are looked up by step index: a rounded
timestep never takes part. `docs/algorithm.md` derives the table.

Notation: noise level sigma from 1 (noise) to 0 (data), s = sigma_i, n = sigma_{i+1}, D
= s - n > 0; x_sigma = (1 - sigma) x0 + sigma z and velocity v = dx/dsigma = z - x0.
Shapes: B batch, T steps.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sage_fast.config.registry import SAMPLERS, resolve
from sage_fast.kernels import transition

__all__ = [
    "SDE_TYPES",
    "TransitionTable",
    "sigma_schedule",
    "table_of_variance",
    "transition",
    "transition_table",
]

SDE_TYPES = tuple(SAMPLERS)

SAGE_SIGMA_MARGIN = 3e-3
"""With this margin the SAGE-GRPO reference keeps the logarithm of its variance finite
at sigma = 1.
"""


def sigma_schedule(num_steps: int, shift: float) -> Tensor:
    """Noise levels of a rollout: t = linspace(1, 0, T + 1), sigma = shift t / (1 +
    (shift - 1) t).

    Args:
        num_steps: number of steps T, at least 1.
        shift: time shift of the flow, positive; 1 leaves the levels uniform, 5 is
            HunyuanVideo-1.5 at 480p.

    Returns:
        float64 tensor (T + 1,), strictly decreasing, exactly 1 first and exactly 0
        last.

    Raises:
        ValueError: for a shift out of range, or so extreme that two levels coincide.
    """
    if not math.isfinite(shift) or shift <= 0:
        raise ValueError(
            f"shift is {shift!r}; it must be a positive finite number (5.0 for 480p, "
            "9.0 for 720p)"
        )
    t = torch.linspace(1, 0, num_steps + 1, dtype=torch.float64)
    sigmas = shift * t / (1 + (shift - 1) * t)
    # Exact, whatever rounding has left of them.
    sigmas[0] = 1.0
    sigmas[-1] = 0.0
    if not bool((sigmas.diff() < 0).all()):
        raise ValueError(
            f"shift {shift} with {num_steps} steps puts two noise levels on the same "
            "number; bring the shift closer to 1"
        )
    return sigmas


@dataclass(frozen=True, kw_only=True, eq=False)
class TransitionTable:
    """Coefficients of every step of a sampler; step i goes from sigmas[i] to sigmas[i +
    1].

    All tensors are on the CPU. No entry is ever NaN or infinite.

    Example:
        >>> table = transition_table("sage_grpo", sigma_schedule(num_steps=20, shift=5.0), eta=0.5)
        >>> round(float(table.a[19]), 4), round(float(table.std[19]), 4)
        (0.9848, 0.0795)
    """

    sde_type: str
    """One of SDE_TYPES, or the name of a sampler of the user's own."""
    eta: float
    """Noise level of the sampler; 0 is deterministic."""
    sigmas: Tensor
    """(T + 1,) float64, strictly decreasing."""
    a: Tensor
    """(T,) float64, factor of x in the mean."""
    b: Tensor
    """(T,) float64, factor of the velocity in the mean; negative."""
    std: Tensor
    """(T,) float64, standard deviation of the step's noise; 0 for a deterministic step.
    """
    gain: Tensor
    """(T,) float64, b / std: how far a velocity change moves the mean, in units of std;
    0 where std is 0.
    """
    scale: Tensor
    """(T,) float64, gradient equalizer median(|gain|) / |gain| over the trainable
    steps; 0 where std is 0.
    """
    trainable: Tensor
    """(T,) bool, steps that draw noise and therefore have a policy gradient."""
    extrapolation: Tensor | None = None
    """(T,) float64, how far a step's velocity is led on from the one of the step
    before; 0 takes it as it is, and None does so at every step.
    """
    degenerate: tuple[int, ...] = ()
    """Steps that a noisy sampler had to take deterministically because its variance is
    not positive there. Empty where determinism was asked for (`ode`, eta = 0). Meant to
    be reported once.
    """

    def __post_init__(self) -> None:
        columns = [self.a, self.b, self.std, self.gain, self.scale]
        if self.extrapolation is not None:
            columns.append(self.extrapolation)
        for column in columns:
            assert column.shape == (self.num_steps,)
            assert column.isfinite().all()

    @property
    def num_steps(self) -> int:
        """Number of steps T."""
        return self.sigmas.numel() - 1

    def restrict(self, steps: Sequence[int]) -> "TransitionTable":
        """Keep the noise of `steps` only (an SDE window); the others become
        deterministic `ode` steps.

        The gain and the scale of a kept step stay those of the full table, so its loss
        does not depend on the window. A step that was already deterministic stays so.

        Args:
            steps: step indices in [0, T); order and repetition do not matter.

        Raises:
            ValueError: for an index out of range.
        """
        # A negative one would count from the end.
        if wrong := [step for step in steps if not 0 <= step < self.num_steps]:
            raise ValueError(
                f"steps {wrong} are not in the table; allowed are 0 to "
                f"{self.num_steps - 1}"
            )
        kept = torch.zeros(self.num_steps, dtype=torch.bool)
        kept[list(steps)] = True
        kept &= self.trainable
        zero = torch.zeros_like(self.a)
        return replace(
            self,
            a=torch.where(kept, self.a, zero + 1),
            b=torch.where(kept, self.b, self.sigmas.diff()),
            std=torch.where(kept, self.std, zero),
            gain=torch.where(kept, self.gain, zero),
            scale=torch.where(kept, self.scale, zero),
            trainable=kept,
        )

    def second_order(self) -> "TransitionTable":
        """Take the steps without noise by the Adams-Bashforth method of second order.

        Step i follows v_i + D_i / (2 D_{i-1}) (v_i - v_{i-1}) and costs one velocity,
        as before. The first step and those next to a noisy one stay Euler steps: noise
        between two velocities is not the flow's own change.
        """
        step = -self.sigmas.diff()
        still = self.std == 0
        led = still[1:] & still[:-1]
        extrapolation = torch.zeros_like(step)
        extrapolation[1:] = torch.where(led, step[1:] / (2 * step[:-1]), 0.0)
        return replace(self, extrapolation=extrapolation)


def transition_table(
    sde_type: str, sigmas: Tensor, eta: float, *, sage_margin: float = SAGE_SIGMA_MARGIN
) -> TransitionTable:
    """Coefficients of a sampler on given noise levels.

    `sage_grpo`, `dance_grpo`, `flow_grpo` and `flow_grpo_wan` share  a = 1 - V/(2s),  b
    = -D - V(1-s)/(2s)  and differ in V; `cps` and `sage_exact` have  a = (1-n) + q,  b =
    -s(1-n) + (1-s)q  with q = sqrt(n^2 - V), which is n cos(eta pi/2) and n rho,  rho =
    exp(-eta^2/2 (logit s - logit n));  `ode` is a = 1, b = -D, V = 0. A step with V <=
    0 is taken as the `ode` step and is not trainable.

    Args:
        sde_type: one of SDE_TYPES, or `package.module:function` of the user's own,
            which is called with it, `sigmas` and `eta` and returns the table.
        sigmas: (T + 1,) floating point, strictly decreasing inside [0, 1], usually from
            `sigma_schedule`.
        eta: noise level, finite and not negative; at most 1 for `cps`; 1 for
            `flow_grpo_wan` to be flow_grpo's code for Wan, which has no noise level.
            `ode` draws no noise whatever eta is.
        sage_margin: `sage_grpo` takes the variance of a step from 1 as if it began at
            1 - sage_margin.

    Raises:
        ValueError: for an unknown sampler, levels that do not decrease inside [0, 1],
            an eta out of range.
    """
    if sde_type not in SDE_TYPES:
        own = resolve(sde_type, SAMPLERS, "rollout.sde_type")
        table: TransitionTable = own(sde_type, sigmas, eta)
        return table
    if not math.isfinite(eta) or eta < 0:
        raise ValueError(
            f"eta is {eta!r}; it must be finite and at least 0 (0.3 to 0.7 is usual)"
        )
    if sde_type == "cps" and eta > 1:
        raise ValueError(
            f"eta is {eta} for cps, whose noise is n sin(eta pi/2); choose eta "
            "between 0 and 1"
        )
    sigmas = sigmas.detach().to(device="cpu", dtype=torch.float64, copy=True)
    if (
        not bool((sigmas.diff() < 0).all())
        or not 0 <= float(sigmas[-1]) < float(sigmas[0]) <= 1
    ):
        raise ValueError(
            "sigmas must decrease strictly from at most 1 to at least 0 (noise to "
            f"data); given {[round(value, 6) for value in sigmas.tolist()[:8]]}"
        )

    s = sigmas[:-1]
    n = sigmas[1:]
    step = s - n
    # V may be zero or negative where the sampler is degenerate. q is what is kept of
    # the noise that x is made of.
    variance = torch.zeros_like(step)
    q: Tensor | None = None
    if sde_type == "sage_grpo":
        # eta^2 times the integral of sigma / (1 - sigma) from n to s. log1p keeps the
        # small difference of the two logarithms exact near sigma = 0, where log((1 - n)
        # / (1 - s)) loses half of its digits.
        clamped = s.clamp(max=1 - sage_margin)
        variance = eta**2 * (torch.log1p(-n) - torch.log1p(-clamped) - step)
    elif sde_type == "sage_exact":
        # Without noise rho is 1; at sigma = 1, whose logit is infinite, it would be 0
        # times infinity.
        log_rho = torch.zeros_like(step)
        if eta:
            log_rho = eta**2 / 2 * (sigmas.log() - torch.log1p(-sigmas)).diff()
        variance = n.square() * -torch.expm1(2 * log_rho)
        q = n * log_rho.exp()
    elif sde_type == "dance_grpo":
        variance = eta**2 * step
    elif sde_type == "flow_grpo":
        # At s = 1 the variance would be infinite: there the next level is taken, as in
        # FlowGRPO's code.
        guarded = torch.where(s == 1, n, s)
        variance = eta**2 * step * s / (1 - guarded)
    elif sde_type == "flow_grpo_wan":
        # From the last level to the second one, linear in sigma (flow_grpo's
        # `wan_pipeline_with_logprob.py`: sde_step_with_logprob). It has no noise level.
        rate = sigmas[-1] + (sigmas[1] - sigmas[-1]) * s
        variance = (eta * rate) ** 2 * step
    elif sde_type == "cps":
        variance = (n * math.sin(eta * math.pi / 2)) ** 2
        q = n * math.cos(eta * math.pi / 2)
    return table_of_variance(sde_type, sigmas, eta, variance, q)


def table_of_variance(
    sde_type: str, sigmas: Tensor, eta: float, variance: Tensor, q: Tensor | None = None
) -> TransitionTable:
    """Coefficients of a sampler with these variances of its steps.

    Args:
        sde_type, sigmas, eta: as `transition_table` was called, in float64.
        variance: (T,) V of each step; one with V <= 0 is taken as the `ode` step.
        q: (T,) what is kept of the estimated noise; None takes the Euler step of the
            flow with the drift that compensates for the noise, as `sage_grpo` does.

    Raises:
        ValueError: for variances that are not (T,) and finite.
    """
    s = sigmas[:-1]
    n = sigmas[1:]
    step = s - n
    if variance.shape != step.shape or not variance.isfinite().all():
        raise ValueError(
            f"rollout.sde_type {sde_type} has the variances {variance.tolist()}; it "
            f"must be one finite number for each of the {len(step)} steps"
        )
    trainable = variance > 0
    variance = torch.where(trainable, variance, torch.zeros_like(variance))
    if q is not None:
        a = (1 - n) + q
        b = -s * (1 - n) + (1 - s) * q
    else:
        a = 1 - variance / (2 * s)
        b = -step - variance * (1 - s) / (2 * s)
    a = torch.where(trainable, a, torch.ones_like(a))
    b = torch.where(trainable, b, -step)
    std = variance.sqrt()

    gain = torch.zeros_like(b)
    gain[trainable] = b[trainable] / std[trainable]
    scale = torch.zeros_like(b)
    if bool(trainable.any()):
        magnitude = gain[trainable].abs()
        # torch.median takes the lower of the two middle values, as the reference
        # implementation does.
        scale[trainable] = magnitude.median() / magnitude
    asked_for_noise = sde_type != "ode" and eta > 0
    still = (~trainable).nonzero()[:, 0].tolist()
    return TransitionTable(
        sde_type=sde_type,
        eta=float(eta),
        sigmas=sigmas,
        a=a,
        b=b,
        std=std,
        gain=gain,
        scale=scale,
        trainable=trainable,
        degenerate=tuple(still) if asked_for_noise else (),
    )
