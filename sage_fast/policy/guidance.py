"""The policy: the transformer's velocity under classifier-free guidance, and its
gradient.

    v = v_u + g (v_c - v_u)             dL/dv_c = g dL/dv,    dL/dv_u = (1 - g) dL/dv

v_c is the velocity of the prompt, v_u that of the empty prompt, beside the same picture
where there is one. The branches are two dense calls because their text lengths differ;
at g = 1 only the conditional one exists. The gradient is a vector-Jacobian product
(VJP) with the cotangent dL/dv, so it splits exactly: the branches can be differentiated
together, or one after the other with only one branch's activations alive at a time.

Shapes: B batch, C channels, F frames, H, W.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sage_fast.config.sections import Guidance
from sage_fast.models.family import family_of
from sage_fast.records import PromptEmbeds

Cotangents = Sequence[Tensor] | Callable[[Tensor], Sequence[Tensor]]
"""dL/dv, like the velocity, of every quantity L to differentiate: tensors if they are
known before the forward, or a function of the detached guided velocity.
"""

VJP = Callable[[Tensor, Sequence[Tensor]], None]
"""Called as vjp(output, cotangents) with an output that has a graph: adds the product
of each cotangent with the Jacobian to wherever gradients are collected.
"""


def vjp_into_grad(output: Tensor, cotangents: Sequence[Tensor]) -> None:
    """The `VJP` of a single cotangent into `.grad` of the parameters: every engine's
    but DeepSpeed's.
    """
    (cotangent,) = cotangents
    output.backward(cotangent)


def model_velocity(
    transformer: nn.Module,
    latents: Tensor,
    sigma: Tensor,
    prompts: Sequence[PromptEmbeds],
) -> Tensor:
    """Velocity of one branch; arguments and result as in `GuidedPolicy.velocity`."""
    return family_of(transformer).velocity(transformer, latents, sigma, prompts)


class GuidedPolicy:
    """The policy of a run: the transformer's guided velocity as a function of its
    trained weights.

    It stays in eval mode throughout. Rollout and update then compute the very same
    function, which makes the ratio of the first update exactly 1.

    Args:
        uncond: the empty prompt.
    """

    def __init__(
        self, transformer: Any, uncond: PromptEmbeds, guidance_scale: Guidance
    ) -> None:
        self.transformer = transformer.eval()
        self.uncond = uncond
        self.guidance_scale = guidance_scale

    def velocity(
        self, latents: Tensor, sigma: Tensor, prompts: Sequence[PromptEmbeds]
    ) -> Tensor:
        """Guided velocity; gradients flow through both branches.

        Args:
            latents: (B, C, F, H, W) float32.
            sigma: (B,) float32 in [0, 1], one noise level per sample.
            prompts: B records.

        Returns:
            (B, C, F, H, W) float32 (float64 of a float64 transformer).
        """
        conditional = model_velocity(self.transformer, latents, sigma, prompts)
        if self.guidance_scale == 1.0:
            return conditional
        uncond = self._uncond_velocity(latents, sigma, prompts)
        return self._guided(conditional, uncond, self._scale(conditional, sigma))

    def velocity_and_gradient(
        self,
        latents: Tensor,
        sigma: Tensor,
        prompts: Sequence[PromptEmbeds],
        cotangents: Cotangents,
        *,
        split: bool = False,
        vjp: VJP = vjp_into_grad,
    ) -> Tensor:
        """Guided velocity, and the gradient dL/dweights of every cotangent dL/dv.

        Args:
            latents, sigma, prompts: as in `velocity`.
            cotangents: see `Cotangents`.
            split: differentiate one branch after the other instead of both at once.
                This halves the activations. If the cotangents depend on the velocity,
                it costs one more forward of the unconditional branch.
            vjp: collects the gradients, which are complete when this method returns;
                with `split` it is called once per branch.

        Returns:
            The guided velocity, detached, bit for bit that of `velocity`: the same
            expression of the outputs that were differentiated.
        """
        if not split or self.guidance_scale == 1.0:
            with torch.enable_grad():
                output = self.velocity(latents, sigma, prompts)
            vjp(
                output,
                cotangents(output.detach()) if callable(cotangents) else cotangents,
            )
            return output.detach()

        with torch.enable_grad():
            output = model_velocity(self.transformer, latents, sigma, prompts)
        conditional = output.detach()
        scale = self._scale(conditional, sigma)
        if callable(cotangents):
            with torch.no_grad():
                uncond = self._uncond_velocity(latents, sigma, prompts)
            cotangents = cotangents(self._guided(conditional, uncond, scale))
        vjp(output, [scale * cotangent for cotangent in cotangents])
        # The VJP has released the first branch's activations before the second branch
        # makes its own.
        with torch.enable_grad():
            output = self._uncond_velocity(latents, sigma, prompts)
        vjp(output, [(1.0 - scale) * cotangent for cotangent in cotangents])
        return self._guided(conditional, output.detach(), scale)

    def _uncond_velocity(
        self, latents: Tensor, sigma: Tensor, prompts: Sequence[PromptEmbeds]
    ) -> Tensor:
        """Velocity of the empty prompt, beside the pictures of the prompts."""
        return model_velocity(
            self.transformer,
            latents,
            sigma,
            [self.uncond.beside(prompt) for prompt in prompts],
        )

    def _scale(self, velocity: Tensor, sigma: Tensor) -> float | Tensor:
        """Guidance scale; of two experts, that of each row's (B, 1, 1, 1, 1)."""
        if not isinstance(self.guidance_scale, tuple):
            return self.guidance_scale
        experts = self.transformer.experts_at(sigma)
        scales = [self.guidance_scale[expert] for expert in experts]
        return velocity.new_tensor(scales).view(-1, *[1] * (velocity.ndim - 1))

    @staticmethod
    def _guided(conditional: Tensor, uncond: Tensor, scale: float | Tensor) -> Tensor:
        # One expression for rollout and update: another order of its operations has
        # other last bits.
        return uncond + scale * (conditional - uncond)
