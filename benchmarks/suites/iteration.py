"""One whole GRPO iteration of the true model: rollout, decoding, reward, anchor and
update, by the trainer of a run.

    python -m benchmarks iteration            8.3 B random weights on one GPU, 480x832, 81 frames
    python -m benchmarks iteration --smoke    the same code anywhere on a tiny model; the numbers mean nothing

The settings are those of `configs/hv15_480p_lora_1gpu.yaml`, with two videos of two
steps. The reward is a picture's brightness, so that nothing but the model takes time.
Parity comes first: at the first update the policy is the one that made the rollout, so
every ratio is 1. That iteration is `cold`: libraries plan their calls in it, and its
anchor is the policy. The second one is what a run repeats; its peak memory stands
beside the planner's.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from benchmarks import contenders, harness, shapes, workload
from benchmarks.errors import verdict
from benchmarks.harness import quantiles
from benchmarks.results import LATE, Record
from benchmarks.session import Cell, Session, timing
from benchmarks.suites import attention, decode, kernels
from sage_fast.models.family import Components
from sage_fast.models.hunyuan15.video_vae import VAEDecoder
from sage_fast.objectives.grpo import RATIO_TOLERANCE
from sage_fast.planning.estimate import make_memory_plan, settle_memory
from sage_fast.records import Prompt, PromptEmbeds
from sage_fast.rewards.composite import CompositeReward
from sage_fast.trainer import Trainer

SUITE = "iteration"
RECIPE = "hv15_480p_lora_1gpu"
PROMPTS = [
    Prompt(text=text, index=index)
    for index, text in enumerate(("a red ball", "a blue cube"))
]
REWARD = f"{__name__}:Brightness"
CHANGES: dict[str, Any] = {
    "rollout.num_steps": 2,
    "rollout.num_generations": 2,
    "rollout.batch_size": 2,
    "rollout.micro_batch_size": 1,
    "reward.rewards": [REWARD],
    "reward.options": {},
    "reward.weights": {"brightness": 1.0},
}
"""Two videos of two steps."""
STEP = "2 videos of 2 steps"


class Brightness:
    """A reward that costs nothing: the mean of all pixels."""

    def score(self, videos: Tensor, prompts: Sequence[str]) -> Mapping[str, Tensor]:
        """As `sage_fast.rewards.base.Reward`."""
        return {"brightness": videos.float().flatten(1).mean(1).cpu() / 255}


class RandomPrompts:
    """Embeddings of random values, as long as a prompt's."""

    def __init__(self, config: Mapping[str, Any], text_tokens: int) -> None:
        self.config = config
        self.text_tokens = text_tokens

    def prepare(self, texts: Sequence[str], *collective: Any) -> list[tuple[int, int]]:
        """As `sage_fast.models.family.PromptEncoder`."""
        return [(self.text_tokens, 0)] * len(texts)

    def encode(self, texts: Sequence[str]) -> list[PromptEmbeds]:
        """As `sage_fast.models.family.PromptEncoder`."""
        generator = torch.Generator().manual_seed(0)
        size = self.text_tokens, self.config["text_embed_dim"]
        glyph = torch.empty(0, self.config["text_embed_2_dim"])
        return [
            PromptEmbeds(text=torch.randn(size, generator=generator), glyph=glyph)
            for _ in texts
        ]


class Iteration:
    """A trainer of the recipe over random weights, after its first iteration."""

    def __init__(self, session: Session) -> None:
        self.session = session
        device = session.device
        smoke = session.smoke
        model = workload.TINY if smoke else workload.HUNYUAN_VIDEO_15
        # its library may not be on a bare machine
        from sage_fast.config.load import load_config

        changes = CHANGES | {
            "model.device": device.type,
            "model.attention": attention.choose(session),
        }
        self.config = load_config(RECIPE, changes)
        vae: dict[str, Any] = {}
        if smoke:
            vae = decode.TINY | {
                "latent_channels": 32,
                "block_out_channels": [8, 8, 16, 16, 32],
            }
            self.config = replace(
                self.config,
                video=replace(self.config.video, num_frames=9, height=48, width=64),
            )
        self.config = settle_memory(self.config)
        decoder = VAEDecoder(
            decode.random_vae(
                vae, device, torch.float32 if device.type == "cpu" else torch.float16
            )
        )
        components = Components(
            transformer=workload.random_transformer(model, device, torch.bfloat16),
            prompt_encoder=RandomPrompts(
                model, (shapes.SMOKE if smoke else shapes.SHAPES)[0].text_tokens
            ),
            video_decoder=decoder,
        )
        reward = CompositeReward.from_config(
            self.config.reward, [prompt.text for prompt in PROMPTS]
        )
        self.trainer = Trainer(self.config, components, reward, PROMPTS, PROMPTS)
        self.reference_ops = kernels.red_ops(session.result)
        harness.forget_peak(device)
        self.first = self.iterate()

    def iterate(self) -> dict[str, float]:
        """The metrics of an iteration, without kernels that are wrong on this device."""
        with contenders.plain_ops(self.reference_ops):
            return self.trainer.iterate()

    def measure(self, step: str, metrics: Mapping[str, float]) -> Record:
        """The row of an iteration."""
        phases = {
            name.removeprefix("time/"): value
            for name, value in metrics.items()
            if name.startswith("time/")
        }
        total = phases.pop("iteration")
        peak = harness.peak_memory_gb(self.session.device)
        planned = None
        if not self.session.smoke:  # the model of a smoke run is not a published one
            memory_gb = (
                torch.cuda.get_device_properties(self.session.device).total_memory / 1e9
            )
            plan = make_memory_plan(
                self.config,
                on_gpu=True,
                gpus=1,
                memory_gb=memory_gb,
                runtime=0.0,
                sizes={},
            )
            planned = (
                max(
                    held.total
                    for phase, held in plan.memory.phases.items()
                    if phase != "evaluation"
                )
                / 1e9
            )
        note = ", ".join(
            f"{phase} {seconds:.1f} s" for phase, seconds in phases.items()
        )
        if planned is not None:
            note += f"; planned {planned:.1f} GB"
        if self.reference_ops:
            note += f"; without the kernels of {', '.join(self.reference_ops)}"
        row = timing(
            step,
            "B",
            "ours",
            quantiles([total]),
            peak_memory_gb=peak,
            note=note,
            videos=2,
            phases=phases,
            planned_memory_gb=planned,
        )
        return {"rows": [row]}


def cells(session: Session) -> Iterator[Cell]:
    """The first iteration, of which the ratio's distance from 1 is the parity check,
    and the seconds of two.
    """
    iteration = cache(lambda: Iteration(session))

    def check() -> Record:
        return verdict(
            {"ratio": iteration().first["ratio/first_max_deviation"]}, RATIO_TOLERANCE
        )

    def cold() -> Record:
        return iteration().measure(f"{STEP}, cold", iteration().first)

    def warm() -> Record:
        if iteration().first["time/iteration"] > session.left:
            return {"status": LATE}
        return iteration().measure(STEP, iteration().iterate())

    needs = (f"{SUITE} parity",)
    yield Cell(suite=SUITE, name="parity", work=check)
    yield Cell(suite=SUITE, name="B cold", work=cold, needs=needs)
    yield Cell(suite=SUITE, name="B", work=warm, needs=needs)
