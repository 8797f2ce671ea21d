"""Evaluations by UniPC: the latents are those of the stock scheduler, in `WanPipeline`
and by hand, of any batch, on any number of ranks, and never paired with Euler's.
"""

import json
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from diffusers import (
    FlowMatchEulerDiscreteScheduler,
    UniPCMultistepScheduler,
    WanPipeline,
)
from torch import Tensor

from sage_fast.commands.cli import main
from sage_fast.config.errors import ConfigError
from sage_fast.config.load import load_config
from sage_fast.config.schema import RunConfig, to_dict
from sage_fast.config.sections import EvaluationConfig, ModelConfig, RolloutConfig
from sage_fast.evaluation import Evaluation, scored_in_both
from sage_fast.models.family import Components, load_components
from sage_fast.policy.guidance import GuidedPolicy
from sage_fast.records import Prompt
from sage_fast.rollout import (
    Sampler,
    evaluation_sampler,
    initial_latents,
    solve_by_unipc,
)
from sage_fast.run.directory import RunDirectory
from sage_fast.run.resume import check_same_run
from sage_fast.run.run import Run, build_trainer
from sage_fast.tools import exporting
from sage_fast.tools.exporting import export
from tests.tiny.wan import save_wan

UNIPC = "--evaluation.solver=unipc"
TEXTS = ["a red circle moving left", "a fox in the snow"]
SHIFT = 3.0

MakeRun = Callable[..., RunConfig]


def sampler_of(
    components: Components,
    scale: float,
    steps: int,
    size: tuple[int, int, int],
    solver: str = "unipc",
) -> Sampler:
    """The sampler of evaluations."""
    encode = components.prompt_encoder.encode
    policy = GuidedPolicy(components.transformer, encode([""])[0], scale)
    return evaluation_sampler(
        RolloutConfig(num_steps=steps, shift=SHIFT),
        EvaluationConfig(solver=solver),  # type: ignore[arg-type]
        policy,
        lambda prompt: encode([prompt.text])[0],
        partial(initial_latents, shape=components.video_decoder.latent_shape(*size)),
    )


def prepared(folder: Path, family: str) -> Components:
    components = load_components(
        ModelConfig(family=family, path=str(folder), device="cpu")
    )
    components.prompt_encoder.prepare(["", *TEXTS])
    if components.weights is not None:
        components.weights.read_into(components.transformer, torch.device("cpu"))
    return components


def members(count: int = 1) -> list[tuple[Prompt, int]]:
    return [(Prompt(text=text, index=i), 0) for i, text in enumerate(TEXTS[:count])]


def apart(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.fixture(scope="module")
def wan(tmp_path_factory: pytest.TempPathFactory) -> tuple[WanPipeline, Components]:
    folder = save_wan(tmp_path_factory.mktemp("wan"))
    stock = WanPipeline.from_pretrained(folder)
    stock.set_progress_bar_config(disable=True)
    return stock, prepared(folder, "wan")


@pytest.mark.parametrize(("steps", "scale"), [(1, 5.0), (6, 1.0), (6, 5.0)])
def test_latents_are_those_of_the_stock_pipeline(
    wan: tuple[WanPipeline, Components], steps: int, scale: float
) -> None:
    stock, ours = wan
    assert isinstance(stock.scheduler, UniPCMultistepScheduler)
    sampler = sampler_of(ours, scale, steps, (9, 32, 48))
    trajectory = sampler(sampler.samples(members()))
    start = sampler.initial(trajectory.keys)
    expected = stock(
        TEXTS[0],
        negative_prompt="",
        guidance_scale=scale,
        num_inference_steps=steps,
        num_frames=9,
        height=32,
        width=48,
        latents=start.clone(),
        output_type="latent",
    ).frames
    assert trajectory.final.dtype == torch.float32
    assert apart(trajectory.final, expected) <= 1e-6
    by_euler = sampler_of(ours, scale, steps, (9, 32, 48), "euler")
    assert apart(by_euler(trajectory.samples).final, expected) > 1e-3
    assert apart(start, expected) > 0.1, "the comparison is of something that moves"


def test_no_coefficient_depends_on_the_batch(
    wan: tuple[WanPipeline, Components],
) -> None:
    """To the bit, for a velocity that does not either; one solver per batch."""
    _, ours = wan
    sampler = sampler_of(ours, 1.0, 7, (9, 32, 48))
    assert sampler.solve is not None
    start = torch.randn(3, 4, 3, 4, 6, generator=torch.Generator().manual_seed(0))
    asked: list[Tensor] = []

    def velocity(step: int, x: Tensor, sigma: Tensor) -> Tensor:
        asked.append(sigma)
        return (x * 1.7 + step) * sigma.view(-1, 1, 1, 1, 1)

    whole = sampler.solve(velocity, start)
    assert [len(sigma) for sigma in asked] == [3] * 7
    assert [float(sigma[0]) for sigma in asked][:1] == [pytest.approx(0.999)]
    for row in range(3):
        alone = sampler.solve(velocity, start[row : row + 1])
        assert torch.equal(alone, whole[row : row + 1])


def test_a_noisy_sampler_has_steps_of_its_own(tiny_run: MakeRun) -> None:
    config = tiny_run(UNIPC)
    trainer = build_trainer(config)
    for name in ("ode", "sage_grpo"):
        sampler = evaluation_sampler(
            config.rollout,
            config.evaluation,
            trainer.policy,
            lambda prompt: trainer.embed(prompt.text),
            partial(initial_latents, shape=trainer.evaluation_latent_shape),
            sde_type=name,
        )
        assert (sampler.solve is None) is (name != "ode")


# --------------------------------------------------------------------------------------
# a run


@pytest.mark.usefixtures("nothing_drawn")
def test_a_run_is_evaluated_by_it(tiny_run: MakeRun) -> None:
    config = tiny_run(UNIPC, "--training.num_updates=1")
    Run(config).train()
    euler = build_trainer(tiny_run()).evaluate()
    base = Evaluation.load(RunDirectory(Path(config.output_dir)).evaluation(0))
    assert (base.solver, euler.solver) == ("unipc", "euler")
    assert base.reward != euler.reward
    assert base == build_trainer(config).evaluate()
    with pytest.raises(ValueError, match="by the same evaluation.solver"):
        scored_in_both(base, euler)


def test_a_resume_keeps_the_solver_also_of_a_run_that_did_not_know_the_key(
    finished_run: Path, tmp_path: Path
) -> None:
    words = [UNIPC, f"--output_dir={tmp_path}/run", "--resume=auto"]
    shutil.copytree(finished_run, tmp_path / "run")
    said = "evaluation.solver: 'euler' in the checkpoint, 'unipc' now"
    config = load_config(finished_run / "config.yaml", words)
    with pytest.raises(ConfigError, match=said):
        Run(config).train()
    saved = to_dict(load_config(finished_run / "config.yaml"))
    del saved["evaluation"]["solver"]
    with pytest.raises(ConfigError, match=said):
        check_same_run(saved, to_dict(config), tmp_path)
    with pytest.raises(ConfigError, match="evaluation.solver cannot change within"):
        Run(config, allow_changes=["evaluation.solver"])


# --------------------------------------------------------------------------------------
# generate


def test_videos_are_made_by_the_solver_that_is_asked_for(
    finished_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def made(name: str, *words: str) -> bytes:
        folder = tmp_path / name
        prompt = ["--prompt", "a red circle moving left"]
        place = ["--output_dir", str(folder)]
        assert main(["generate", str(finished_run), *prompt, *place, *words]) == 0
        (record,) = json.loads((folder / "generation.json").read_text()).values()
        assert record["sampler"] == ("ode" if name == "euler" else "unipc")
        (video,) = folder.glob("*.mp4")
        return video.read_bytes()

    euler = made("euler", "--solver", "euler", UNIPC)
    assert made("unipc", "--solver", "unipc") == made("key", UNIPC) != euler
    # A video of the other solver is not kept for one of this.
    words = ["--output_dir", str(tmp_path / "euler"), "--solver=unipc"]
    prompt = ["--prompt", "a red circle moving left"]
    assert main(["generate", str(finished_run), *prompt, *words]) == 2
    assert "sampler: 'ode' there, 'unipc' now" in capsys.readouterr().err


def test_a_solver_of_a_noisy_sampler_is_one_line(
    finished_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--solver=unipc", "--sampler=cps", "--output_dir", str(tmp_path / "v")]
    assert main(["generate", str(finished_run), *words]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert "but --sampler cps draws noise" in line
    assert not (tmp_path / "v").exists()


# --------------------------------------------------------------------------------------
# the card of an export


@pytest.mark.parametrize(
    ("family", "solver"),
    [("hunyuan15", "euler"), ("hunyuan15", "unipc"), ("wan", "euler")],
)
def test_the_card_names_the_scheduler_of_the_evaluation(
    family: str,
    solver: str,
    finished_run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # A run of a public model needs a GPU; this one passes for it.
    monkeypatch.setattr(exporting, "check_same_run", lambda *runs, only: {})
    words = [f"--model.family={family}", "--model.path=null", "--rollout.shift=7"]
    words += [f"--evaluation.solver={solver}", "--lora.target_modules=null"]
    export(finished_run, tmp_path / "o", overrides=words)
    card = (tmp_path / "o/README.md").read_text("utf-8")
    assert card.startswith("---\n")
    said = {"euler": "Euler", "unipc": "UniPC"}[solver]
    assert f"4 steps; evaluated in 4 by {said}\n" in card
    assert ("was evaluated by Euler's steps" in card) is (
        (family, solver) == ("wan", "euler")
    )
    (code,) = re.findall(r"^pipeline\.scheduler = .*?^\)$", card, re.DOTALL | re.M)
    name = code.split(" = ")[1].partition(".")[0]
    assert f"from diffusers import {name}, " in card
    assert (name == "FlowMatchEulerDiscreteScheduler") is (
        (family, solver) == ("hunyuan15", "euler")
    )
    if solver == "euler":
        return
    stock = FlowMatchEulerDiscreteScheduler(shift=5.0)
    pipeline = SimpleNamespace(scheduler=stock)
    exec(code, {"pipeline": pipeline, name: UniPCMultistepScheduler})
    asked = []
    start = torch.randn(1, 2, 1, 2, 2)

    def velocity(step: int, x: Tensor, sigma: Tensor) -> Tensor:
        asked.append(round(1000 * float(sigma)))
        return x.tanh() * (1 + sigma)

    expected = solve_by_unipc(velocity, start, 6, 7.0)
    x = start
    pipeline.scheduler.set_timesteps(6)
    assert pipeline.scheduler.timesteps.tolist() == asked
    for timestep in pipeline.scheduler.timesteps:
        v = x.tanh() * (1 + timestep / 1000)
        x = pipeline.scheduler.step(v, timestep, x).prev_sample
    torch.testing.assert_close(x, expected, rtol=1e-6, atol=1e-6)
