"""The plan of a configuration: seconds, what makes it fit, and the command."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from sage_fast.commands import plan as plan_command
from sage_fast.commands.cli import main
from sage_fast.config.errors import ConfigError
from sage_fast.config.load import load_config
from sage_fast.config.schema import RunConfig
from sage_fast.models.family import describe_model
from sage_fast.planning.devices import DEVICES
from sage_fast.planning.estimate import find_options, make_plan, possible_changes
from sage_fast.planning.text import to_text
from sage_fast.planning.work import count_weights
from sage_fast.rewards.base import RewardCosts
from sage_fast.run.prompt_files import load_eval_prompts
from tests.commands.programs import check_command
from tests.planning.small import FORWARD, ROOT, B, plan, small_plan

MakeRun = Callable[..., RunConfig]
pytestmark = pytest.mark.usefixtures("in_the_repository")


@pytest.mark.slow
def test_an_evaluation_of_its_own_size_costs_what_it_costs() -> None:
    same = small_plan()
    large = small_plan("--evaluation.height=128", "--evaluation.width=192")
    # Scoring takes as long whatever the size.
    scoring = len(load_eval_prompts(same.config)) * same.phases[2].predicted
    seconds, larger_seconds = (
        plan.seconds_per_evaluation or 0.0 for plan in (same, large)
    )
    assert larger_seconds - scoring > 2 * (seconds - scoring) > 0
    assert large.phases == same.phases and large.latent == same.latent
    memory = same.memory.phases["evaluation"]
    larger = large.memory.phases["evaluation"]
    assert larger.working_set > memory.working_set
    assert larger.trajectories == pytest.approx(4 * memory.trajectories)


def test_seconds_are_work_over_ceilings() -> None:
    found = small_plan()
    by_name = {phase.name: phase for phase in found.phases}
    assert found.seconds_per_video == pytest.approx(
        sum(p.predicted for p in found.phases)
    )
    assert all(phase.predicted >= phase.bound >= 0 for phase in found.phases)
    rollout = by_name["rollout"].cost
    seconds = (
        rollout.linear / 798e12
        + rollout.attention / 595e12
        + rollout.elementwise / 3.0e12
    )
    assert by_name["rollout"].bound == pytest.approx(seconds)
    assert found.videos_per_gpu_hour == pytest.approx(3600 / found.seconds_per_video)
    # Convolutions at half of the products' ceiling.
    decoded = by_name["decode"].cost
    seconds = decoded.linear / 798e12 / 0.5 + decoded.elementwise / 3.0e12 / 0.8
    assert by_name["decode"].predicted == pytest.approx(seconds)
    assert found.seconds_per_evaluation is not None
    between = found.config.evaluation.every * found.config.rollout.batch_size
    assert found.evaluation_per_video == pytest.approx(
        found.seconds_per_evaluation / between
    )
    # Updates are counted between two evaluations, and of a rollout there may be
    # several.
    twice = small_plan(
        *FORWARD, "--training.updates_per_rollout=2", "--rollout.micro_batch_size=1"
    )
    assert twice.seconds_per_evaluation is not None
    videos = twice.config.evaluation.every / 2 * twice.config.rollout.batch_size
    assert twice.evaluation_per_video == pytest.approx(
        twice.seconds_per_evaluation / videos
    )
    # The anchor is behind in nine of ten rollouts.
    assert by_name["anchor"].predicted == pytest.approx(
        0.9 * by_name["rollout"].predicted
    )


def test_an_evaluation_scores_its_videos(monkeypatch: pytest.MonkeyPatch) -> None:
    free = small_plan()
    costs = {"videoalign": RewardCosts(seconds=2.0)}
    monkeypatch.setattr(
        "sage_fast.planning.estimate.reward_costs", lambda *arguments: costs
    )
    paid = small_plan("--seed=9")
    prompts = len(load_eval_prompts(free.config))
    assert (
        free.seconds_per_evaluation is not None
        and paid.seconds_per_evaluation is not None
    )
    # the reward's own figure is in the first plan
    scoring = 2.0 - free.phases[2].predicted
    assert paid.seconds_per_evaluation - free.seconds_per_evaluation == pytest.approx(
        prompts * scoring
    )


OFFLOAD = ("distributed.cpu_offload", True)


def test_nothing_is_offered_that_a_run_would_refuse() -> None:
    """Of weights that must stay gathered, and of a single pass whose ranks differ in
    their steps.
    """
    full = small_plan(
        "--training.mode=full",
        "--distributed.keep_gathered=rollout",
        "--model.dtype=float32",
        gpus=2,
    )
    (offloaded,) = [
        option for option in find_options(full) if OFFLOAD in option.changes
    ]
    assert offloaded.changes == (OFFLOAD, ("distributed.keep_gathered", "auto"))
    words = (
        "--training.update=single_pass",
        "--objective.kl_position_fraction=0.05",
        "--distributed.dp_shard=2",
    )
    single = small_plan(*words, "--distributed.keep_gathered=rollout", gpus=2)
    assert "distributed" not in str([option.changes for option in find_options(single)])
    with pytest.raises(
        ConfigError, match="single_pass takes gradients at different steps"
    ):
        small_plan(*words, "--distributed.keep_gathered=never", gpus=2)


@pytest.mark.slow
def test_what_does_not_fit_comes_with_the_smallest_changes() -> None:
    words = ["--training.guidance=paired", "--model.checkpointing=none"]
    whole = small_plan(*words)
    assert whole.fits and whole.memory.peak_phase == "update"
    one_is_not_enough = 0.99 * min(
        option.plan.memory.peak for option in find_options(whole)
    )
    tight = small_plan(*words, memory_gb=one_is_not_enough / 1e9)
    assert not tight.fits
    found = find_options(tight)
    (first,) = found
    assert first.plan.fits and len(first.changes) == 2
    again = small_plan(
        *words, *first.overrides.split(), memory_gb=tight.memory_limit / 1e9
    )
    assert again.memory.peak == first.plan.memory.peak, (
        "the words that are printed do what is said"
    )


@pytest.mark.slow
def test_what_never_fits_says_what_needs_least() -> None:
    hopeless = small_plan(memory_gb=1e-3)
    (least,) = find_options(hopeless)
    assert not least.plan.fits and least.plan.memory.peak < hopeless.memory.peak
    text = to_text(hopeless, [least])
    assert "no change that keeps the result makes it fit" in text and text.endswith(
        "of the memory."
    )


def test_a_preset_of_a_small_card_is_planned_for_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["plan", "wan_quick_lora_24gb", "--json"]
    assert main(words) == 0
    assert json.loads(capsys.readouterr().out)["device"]["name"] == "RTX 4090"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--gpus", "2"], "2 processes and a CPU"),
        (
            ["--gpus", "3", "--device", "h100", "--distributed.sp=2"],
            "do not fit 3 process(es)",
        ),
        (
            ["--device", "h100", "--distributed.sp=4"],
            "does not divide the model's 6 attention heads",
        ),
        (["--model.family=json:loads"], "describe(model: ModelConfig)"),
        (["--model.forward=stock"], "give --model.forward=fused"),
        (
            ["--distributed.zero_stage=2", "--optimizer.name=adamw"],
            "--distributed.zero_stage=null",
        ),
    ],
    ids=["cpus", "ranks", "heads", "family", "stock", "deepspeed"],
)
def test_what_cannot_be_planned(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "configs/toy_cpu.yaml", *words]) == 2
    assert message in capsys.readouterr().err


WAN = "Wan-AI/Wan2.1-T2V"
HUNYUAN = "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers"
SIZES = {
    ("wan", f"{WAN}-1.3B-Diffusers"): 1_418_996_800,
    ("wan", f"{WAN}-14B-Diffusers"): 14_288_491_584,
    ("hunyuan15", f"{HUNYUAN}-720p_i2v_distilled"): 8_326_608_160,
}


@pytest.mark.parametrize(("family", "path"), SIZES)
def test_a_published_repository_is_planned_by_its_name(family: str, path: str) -> None:
    config = load_config(B, [f"--model.family={family}", f"--model.path={path}"])
    assert (
        count_weights(config, describe_model(config.model).transformer).total
        == SIZES[family, path]
    )


@pytest.mark.parametrize(
    "path",
    ["somebody/wan-14b-tuned", "models/wan-14b", f"{WAN}-14B", f"{HUNYUAN}-480p_t2v"],
)
def test_a_model_of_unknown_size_asks_for_its_configuration(
    path: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    (tmp_path / "models").mkdir()
    words = [
        "plan",
        str(ROOT / "configs/wan_480p_lora_1gpu.yaml"),
        f"--model.path={path}",
    ]
    assert main(words) == 2
    command = capsys.readouterr().err.partition("Get it (2 KB) with: ")[2].strip()
    check_command(command)
    repository = f"{WAN}-14B-Diffusers" if path.startswith("models/") else path
    assert command.startswith(
        f"hf download {repository} --include transformer/config.json"
    )
    assert command.endswith(" --local-dir models/wan-14b") == path.startswith("models/")
    folder = tmp_path / path
    if not path.startswith("models/"):
        entry = tmp_path / f"hub/models--{path.replace('/', '--')}"
        (entry / "refs").mkdir(parents=True)
        (entry / "refs/main").write_text("0" * 40)
        folder = entry / "snapshots" / ("0" * 40)
    # What that command leaves.
    (folder / "transformer").mkdir(parents=True)
    (folder / "transformer/config.json").write_text(
        json.dumps({"num_layers": 40, "num_attention_heads": 7})
    )
    described = describe_model(load_config(words[1], words[2:]).model)
    assert (described.num_layers, described.width) == (40, 7 * 128)


@pytest.mark.slow
def test_the_page_shows_what_the_command_prints() -> None:
    """Without weights on this machine, whose sizes would replace the published ones.
    The page leaves out time and assumptions, whose lines are too long for it.
    """
    page = (ROOT / "docs/planning.md").read_text(encoding="utf-8")
    example = page.split("```text\n")[1].split("\n```")[0]
    found = plan("--training.guidance=paired", memory_gb=48)
    parts = to_text(found, find_options(found)).split("\n\n")
    assert example.split("\n\n") == [*parts[:2], parts[3], parts[5]]


@pytest.mark.slow
def test_the_page_of_memory_has_the_plans_seconds_and_gigabytes() -> None:
    """Of an anchor that is older than the rollout in every rollout, as `fixed` is."""
    page = " ".join((ROOT / "docs/memory.md").read_text("utf-8").split())

    def of(kl: str, guidance: str, *more: str) -> tuple[float, float]:
        given = (f"--objective.kl_mode={kl}", f"--training.guidance={guidance}")
        found = plan(*given, *more)
        apart = ("decode", "reward")
        seconds = sum(p.predicted for p in found.phases if p.name not in apart)
        return seconds, found.memory.peak / 1e9

    single = "--training.update=single_pass"
    for name, kl, more in (
        ("none, step-wise, or a fresh anchor", "none", ""),
        ("position KL to an older anchor", "fixed", "; `split`: {:.0f}"),
    ):
        two, one = of(kl, "paired")[0], of(kl, "paired", single)[0]
        more = more.format(of(kl, "split", single)[0])
        assert f"| {name} | {two:.0f} | {one:.0f}{more} |" in page
        assert of(kl, "split")[0] == pytest.approx(two, rel=1e-3)
    kept, whole = (
        of("fixed", "split", f"--model.checkpointing={way}")
        for way in ("selective", "full")
    )
    saved = f"saves {whole[0] - kept[0]:.0f} of {whole[0]:.0f} s per video"
    assert f"{saved} and costs {kept[1] - whole[1]:.1f} GB" in page


def test_the_command_knows_every_device() -> None:
    assert {*plan_command.DEVICES} == {*DEVICES, "cpu"}


def test_a_limit_that_changes_nothing_is_said() -> None:
    """The toy's codec has no tiles."""
    words = "model.decode_memory_gib changes nothing"
    found, given = (
        make_plan(load_config("toy_cpu", more), DEVICES["h100"], sizes={})
        for more in ([], ["--model.decode_memory_gib=1"])
    )
    assert words not in to_text(found, []) and words in to_text(given, [])
    assert found.memory == given.memory and not given.decoding.tiled
    assert "model.decode_memory_gib" not in dict(possible_changes(found))
    wan = load_config("wan_quick_lora_24gb")
    tiled = make_plan(wan, DEVICES["rtx4090"], sizes={})
    assert tiled.decoding.tiled and words not in to_text(tiled, [])


def test_a_small_update_of_wan_is_not_sent_to_another_model() -> None:
    """HunyuanVideo-1.5 is four times as large, and not licensed everywhere."""
    config = load_config("wan_quick_lora_24gb", ["--rollout.batch_size=8"])
    text = to_text(make_plan(config, DEVICES["rtx4090"], sizes={}), [])
    assert "a curve may stay flat" in text and "hv15" not in text


@pytest.mark.slow
def test_the_other_update_of_the_same_gradient_is_what_makes_it_fit() -> None:
    config = load_config("hv15_quick_lora_1gpu")
    found = make_plan(config, DEVICES["h100"], memory_gb=40, sizes={})
    assert not found.fits and found.memory.peak > 47e9
    (only,) = find_options(found)
    assert (
        only.overrides == "--training.update=two_phase"
        and only.plan.memory.peak == pytest.approx(32.2e9, abs=5e7)
    )
