"""From prompt to pixels, this project against diffusers' `HunyuanVideo15Pipeline` on
the same tiny checkpoint.
"""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from diffusers import HunyuanVideo15Pipeline
from torch import Tensor

from sage_fast.config.sections import ModelConfig
from sage_fast.models.family import Components, load_components
from sage_fast.policy.guidance import GuidedPolicy
from sage_fast.records import Prompt, Sample, Trajectory
from sage_fast.rollout import (
    initial_latents,
    noise_keys,
    policy_velocity,
    sample_trajectory,
)
from sage_fast.sde import sigma_schedule, transition_table
from tests.tiny.checkpoints import save_diffusers_layout

PROMPTS = [
    "a cat walks on the grass",
    'a neon sign that says "open" at night',
    "“late” and “early”",
]
STEPS = 3
SHIFT = 5.0
GUIDANCE = 6.0
FRAMES = 9
HEIGHT = 64
WIDTH = 64
"""From 16 latents of a frame on, products of one frame have the bits of all frames."""


@dataclass(frozen=True)
class Model:
    """A checkpoint as each side reads it."""

    stock: HunyuanVideo15Pipeline
    ours: Components


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder: Path = tmp_path_factory.mktemp("checkpoint")
    save_diffusers_layout(folder, shift=SHIFT, guidance_scale=GUIDANCE)
    stock = HunyuanVideo15Pipeline.from_pretrained(folder)
    stock.set_progress_bar_config(disable=True)
    return Model(
        stock,
        load_components(
            ModelConfig(family="hunyuan15", path=str(folder), device="cpu")
        ),
    )


def sample(model: Model, prompt: str, guidance_scale: float) -> Trajectory:
    """Our ODE rollout of one prompt."""
    embeds, unconditional = model.ours.prompt_encoder.encode([prompt, ""])
    samples = [Sample(prompt=Prompt(text=prompt, index=0), embeds=embeds, member=0)]
    keys = noise_keys(samples, seed=0, update=0)
    policy = GuidedPolicy(model.ours.transformer, unconditional, guidance_scale)
    return sample_trajectory(
        policy_velocity(policy, samples),
        samples,
        keys,
        transition_table("ode", sigma_schedule(STEPS, SHIFT), 0.0),
        initial_latents(
            keys, model.ours.video_decoder.latent_shape(FRAMES, HEIGHT, WIDTH)
        ),
    )


def run_stock(
    stock: HunyuanVideo15Pipeline,
    prompt: str,
    latents: Tensor,
    monkeypatch: pytest.MonkeyPatch,
) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """Guided velocities, latents after every step, and the frames (F, H, W, 3) in [0,
    1] of a stock call.
    """
    velocities = []
    states = []
    step = stock.scheduler.step

    def recorded(
        velocity: Tensor, t: Tensor, x: Tensor, **options: bool
    ) -> tuple[Tensor]:
        result = step(velocity, t, x, **options)
        velocities.append(velocity.clone())
        states.append(result[0].clone())
        return result

    with monkeypatch.context() as context:
        # The pipeline has no callback: its scheduler sees every velocity and every
        # state.
        context.setattr(stock.scheduler, "step", recorded)
        frames = stock(
            prompt,
            latents=latents.clone(),
            num_frames=FRAMES,
            height=HEIGHT,
            width=WIDTH,
            num_inference_steps=STEPS,
            output_type="pt",
        ).frames
    return velocities, states, frames[0]


@pytest.mark.parametrize("prompt", ["", PROMPTS[2]])
def test_conditioning_is_the_valid_part_of_the_stock_one(
    model: Model, prompt: str
) -> None:
    with torch.no_grad():
        text, text_mask, glyph, glyph_mask = model.stock.encode_prompt(prompt)
    ours = model.ours.prompt_encoder.encode([prompt])[0]
    # The stock pipeline pads to 1,108 tokens, which moves no more than the last digit.
    expected = text[text_mask.bool()]
    assert (
        ours.text.shape == expected.shape
        and (ours.text - expected).norm() <= 1e-6 * expected.norm()
    )
    assert torch.equal(ours.glyph, glyph[glyph_mask.bool()])
    assert (len(ours.glyph) > 0) == ('"' in prompt or "“" in prompt)


# A model with distilled guidance runs at scale 1, where the stock guider makes the
# conditional forward alone.
@pytest.mark.parametrize(
    ("prompt", "scale"),
    [(PROMPTS[0], GUIDANCE), (PROMPTS[1], 1.0), (PROMPTS[2], GUIDANCE)],
)
def test_every_step_and_the_frames(
    model: Model, prompt: str, scale: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stock pipeline rounds timesteps and latents to the model's dtype, which in
    float32 loses nothing.
    """
    ours = sample(model, prompt, scale)
    monkeypatch.setattr(model.stock.guider, "guidance_scale", scale)
    velocities, states, frames = run_stock(
        model.stock, prompt, ours.latents[0], monkeypatch
    )
    assert len(velocities) == STEPS
    for step, state in enumerate([*ours.latents[1:], ours.final]):
        torch.testing.assert_close(
            ours.velocities[step], velocities[step], rtol=1e-4, atol=2e-5
        )
        torch.testing.assert_close(state, states[step], rtol=1e-4, atol=2e-5)
    assert (ours.final - ours.latents[0]).abs().mean() > 0.1, (
        "the comparison is of something that moves"
    )
    expected = (frames * 255).round().to(torch.uint8)
    assert expected.float().std() > 20
    assert torch.equal(model.ours.video_decoder.decode(states[-1])[0], expected)
    # From our own final latents a pixel near a tie may round the other way.
    video = model.ours.video_decoder.decode(ours.final)[0]
    assert (video.int() - expected.int()).abs().max() <= 1
