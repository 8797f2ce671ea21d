"""Doctor: its findings, their remedies, and the configurations that it lets pass."""

import json
import re
import shutil
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sage_fast.commands.cli import main
from sage_fast.config.errors import ConfigError
from sage_fast.config.load import dump_config, load_config
from sage_fast.config.schema import RunConfig
from sage_fast.models.hunyuan15.hunyuan15 import load_components
from sage_fast.rewards.composite import CompositeReward
from sage_fast.tools import diagnosis as doctor
from sage_fast.tools.diagnosis import can_run
from tests.commands.programs import check_command
from tests.tiny.checkpoints import save_diffusers_layout

MakeRun = Callable[..., RunConfig]
ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.usefixtures("in_the_repository")
PRESET = ROOT / "configs/hv15_480p_lora_1gpu.yaml"


def by_name(checks: list[doctor.Check]) -> dict[str, doctor.Check]:
    return {check.name: check for check in checks}


def preset(tmp_path: Path, *overrides: str) -> RunConfig:
    return load_config(PRESET, [f"--output_dir={tmp_path / 'run'}", *overrides])


# --------------------------------------------------------------------------------------
# machine


def test_a_machine_alone(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["doctor", "--json"]) == 0
    tree = json.loads(capsys.readouterr().out)
    assert tree["can_run"] is True and {"software", "hardware", "attention"} == {
        c["section"] for c in tree["checks"]
    }
    monkeypatch.setattr(doctor.av, "codecs_available", set())
    assert main(["doctor"]) == 1
    text = capsys.readouterr().out
    assert (
        f"torch {version('torch')}" in text
        and "-> pip install --force-reinstall av" in text
    )
    assert "This machine is not ready: see the 1 marked missing." in text


def test_a_gpu_that_torch_cannot_use_is_missing_and_one_in_use_a_warning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    on_gpu(monkeypatch, 80)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(
        torch.cuda, "mem_get_info", lambda index: ((79e9, 80e9), (40e9, 80e9))[index]
    )
    monkeypatch.setattr(doctor.shutil, "which", lambda name: "/usr/bin/nvidia-smi")
    for available, expected in (
        (True, {"cuda:0": "ok", "cuda:1": "warning"}),
        (False, {"cuda": "missing"}),
    ):
        monkeypatch.setattr(
            torch.cuda, "is_available", lambda available=available: available
        )
        found = by_name(list(doctor.hardware()))
        assert {name: found[name].status for name in expected} == expected


def test_attention_backends_and_the_one_that_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    report = {"flash3": "flash_attn_interface is not installed", "sdpa": None}
    monkeypatch.setattr(doctor, "backend_report", lambda device, dtype: report)
    chosen = by_name(
        list(doctor.attention(preset(tmp_path, "--model.attention=flash3")))
    )
    assert (
        chosen["flash3"].status == "missing"
        and "not installed" in chosen["flash3"].detail
    )
    automatic = by_name(list(doctor.attention(preset(tmp_path))))
    assert (automatic["flash3"].status, automatic["sdpa"].status) == ("info", "ok")


# --------------------------------------------------------------------------------------
# configuration


def test_doctor_says_how_far_a_preset_was_tried(
    capsys: pytest.CaptureFixture[str],
) -> None:
    main(["doctor", "toy_cpu", "ablations/kl_none"])
    text = capsys.readouterr().out
    assert re.search(r"preset toy_cpu +one or more updates on a GPU", text)
    assert re.search(r"preset ablations/kl_none +planned alone", text)


def test_the_toy_configuration_can_run(
    tiny_run: MakeRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "new.yaml"
    # which needs no trace
    file.write_text(dump_config(tiny_run("--model.forward=stock")))
    assert main(["doctor", str(file)]) == 0
    assert "This configuration can run." in capsys.readouterr().out
    assert not (tmp_path / "run").exists(), "doctor leaves nothing behind"


PROBLEMS: dict[str, tuple[str, str, str, str]] = {
    "family": ("--model.family=hunyuan99", "model weights", "hunyuan99", ""),
    "reward-option": (
        "--reward.options.toy.size=3",
        "reward toy",
        "size",
        "reward.options.toy",
    ),
    "prompts": ("--data.prompts=gone.csv", "prompts", "gone.csv", ""),
    "output": (
        "--output_dir=/dev/null/run",
        "output_dir",
        "cannot be written",
        "--output_dir=FOLDER",
    ),
    "long-output": (
        f"--output_dir={'x' * 300}",
        "output_dir",
        "File name too long",
        "--output_dir=FOLDER",
    ),
    "adapter": ("--model.adapter=gone", "model.adapter", "no adapter gone", "see"),
    "wandb": (
        "--logging.report_to=[wandb]",
        "logging.report_to",
        "wandb",
        "pip install wandb",
    ),
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_a_problem_is_named_and_the_rest_is_still_checked(
    tiny_run: MakeRun, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    override, key, detail, fix = PROBLEMS[name]
    version = doctor.version_of
    monkeypatch.setattr(
        doctor,
        "version_of",
        lambda package: None if package == "wandb" else version(package),
    )
    # Machine and memory are the same for all.
    checks = [
        *doctor.settings(tiny_run(override), 1),
        *doctor.files(tiny_run(override)),
    ]
    found = by_name(checks)[key]
    assert found.status == "missing" and detail in found.detail and fix in found.fix
    assert [c.name for c in checks if c.status == "missing"] == [key] and len(
        checks
    ) > 3


def backwards(prompts: list[str], videos: Any) -> Any:
    """In TRL's order."""


def plain(videos: Any, prompts: list[str], radius: float = 1.0) -> Any:
    """A function with an option."""


def maker(radius: float) -> Any:
    """A function that makes a reward."""


class Standing:
    def score(self, videos: Any, prompts: list[str]) -> Any: ...


standing = Standing()


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (
            "backwards",
            {},
            "takes (prompts, videos), but a reward is called as f(videos, prompts)",
        ),
        ("plain", {"raduis": 2}, "got an unexpected keyword argument 'raduis'"),
        ("maker", {}, "missing a required argument: 'radius'"),
        ("standing", {"radius": 2}, "is an object and takes no options"),
        ("absent", {}, "has no attribute 'absent'"),
    ],
)
def test_doctor_refuses_the_rewards_that_train_refuses(
    tiny_run: MakeRun, name: str, options: dict[str, Any], message: str
) -> None:
    target = f"{__name__}:{name}"
    words = [f"--reward.rewards=['{target}']", f"--reward.weights.{name}=1"]
    words += [
        f"--reward.options.{target}.{key}={value}" for key, value in options.items()
    ]
    found = by_name([*doctor.settings(tiny_run(*words), 1)])[f"reward {target}"]
    assert found.status == "missing" and message in found.detail
    with pytest.raises(ConfigError, match=re.escape(message)):
        CompositeReward.from_config(tiny_run(*words).reward)


def test_a_frame_rate_that_is_not_the_rewards_is_a_warning(tmp_path: Path) -> None:
    checks = doctor.settings(preset(tmp_path, "--reward.options.videoalign.fps=16"), 1)
    found = by_name(list(checks))["reward videoalign"]
    assert found.status == "warning" and "fps is 16, but" in found.detail and found.fix


def test_a_rate_of_whole_weights_for_adapters_is_a_warning(
    tmp_path: Path, tiny_run: MakeRun
) -> None:
    words = ["--optimizer.name=muon", "--optimizer.learning_rate=1e-5"]
    found = by_name(list(doctor.settings(preset(tmp_path, *words), 1)))[
        "optimizer.learning_rate"
    ]
    assert (found.status, found.fix) == ("warning", "--optimizer.learning_rate=0.0008")
    for config in (preset(tmp_path), tiny_run("--optimizer.learning_rate=0.1")):
        assert "optimizer.learning_rate" not in by_name(
            list(doctor.settings(config, 1))
        )


def test_an_output_directory_in_use_is_a_warning(finished_run: Path) -> None:
    config = load_config(finished_run / "config.yaml", [f"--output_dir={finished_run}"])
    checks = list(doctor.settings(config, 1))
    assert by_name(checks)["output_dir"].status == "warning" and can_run(checks)


# --------------------------------------------------------------------------------------
# files


def test_missing_weights_come_with_their_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    words = [
        "--reward.rewards=[videoalign, clip_score, pick_score]",
        "--reward.options.clip_score.path=models/clip",
    ]
    config = load_config(PRESET, words)
    needed = doctor.needed_files(config.model, config.reward)
    for requirement in needed:
        assert requirement.missing
        check_command(requirement.fetch)
    fetched = {r.name: r.fetch for r in needed}
    assert len(fetched) == 6 and fetched["VideoAlign"].endswith(
        "--local-dir models/VideoReward"
    )


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A whole checkpoint in diffusers' layout."""
    save_diffusers_layout(tmp_path / "model")
    return tmp_path / "model"


def test_a_download_that_was_interrupted_names_the_shard(
    model: Path, tmp_path: Path
) -> None:
    whole = model / "transformer/diffusion_pytorch_model.safetensors"
    first, second = (whole.with_stem(f"{whole.stem}-{n:05d}-of-00002") for n in (1, 2))
    whole.rename(first)
    shards = {"weight_map": {"a": first.name, "b": second.name}}
    whole.with_name(f"{whole.name}.index.json").write_text(json.dumps(shards))
    config = preset(tmp_path, f"--model.path={model}")
    found = by_name(list(doctor.files(config)))["HunyuanVideo-1.5"]
    assert found.status == "missing" and f"transformer/{second.name}" in found.detail
    assert found.fix.endswith(f"--local-dir {model}")
    shutil.copyfile(first, second)
    checks = by_name(list(doctor.files(config)))
    assert checks["HunyuanVideo-1.5"].status == checks["model weights"].status == "ok"
    assert "rollout.shift" not in checks


def edit_json(path: Path, **entries: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | entries))


def test_doctor_says_of_the_weights_what_the_loader_says(
    model: Path, tmp_path: Path
) -> None:
    edit_json(model / "scheduler/scheduler_config.json", shift=9.0)
    config = preset(tmp_path, f"--model.path={model}")
    checks = by_name(list(doctor.files(config)))
    found = checks["rollout.shift"]
    assert (found.status, found.fix) == (
        "warning",
        "--rollout.shift=9",
    ) and "shift is 5" in found.detail
    assert checks["model weights"].status == "ok"
    same = preset(tmp_path, f"--model.path={model}", "--rollout.shift=9")
    assert "rollout.shift" not in by_name(list(doctor.files(same)))
    guider = model / "guider/guider_config.json"
    guidance = json.loads(guider.read_text())["guidance_scale"]
    edit_json(guider, guidance_scale=1.0)
    distilled = preset(
        tmp_path,
        f"--model.path={model}",
        "--rollout.guidance_scale=1",
        "--evaluation.num_steps=50",
    )
    found = by_name(list(doctor.files(distilled)))
    assert "evaluation.num_steps" not in found and found["model weights"].status == "ok"
    steps = found["rollout.num_steps"]
    assert (steps.status, steps.fix) == (
        "warning",
        "--rollout.num_steps=50",
    ) and "is 20, but the owners" in steps.detail
    forward = [
        "--training.update=forward_process",
        "--objective.kl_mode=none",
        "--forward_process.sampling_guidance=5",
    ]
    guided = preset(
        tmp_path, f"--model.path={model}", "--rollout.guidance_scale=1", *forward
    )
    found = by_name(list(doctor.files(guided)))["model weights"]
    assert (
        found.status == "missing"
        and "sampling_guidance is 5.0, but guidance is distilled" in found.detail
    )
    assert found.fix == "--forward_process.sampling_guidance=null"
    edit_json(guider, guidance_scale=guidance)
    edit_json(model / "transformer/config.json", use_meanflow=True)
    found = by_name(list(doctor.files(config)))["model weights"]
    assert found.status == "missing" and "use_meanflow" in found.detail and found.fix
    with pytest.raises(ValueError) as error:
        load_components(config.model)
    assert str(error.value) == found.detail


# --------------------------------------------------------------------------------------
# memory, disk


def on_gpu(monkeypatch: pytest.MonkeyPatch, gigabytes: float) -> None:
    properties: Any = SimpleNamespace(
        total_memory=gigabytes * 1e9, name="a GPU", major=9, minor=0
    )
    monkeypatch.setattr(doctor, "rank_device", lambda name: "cuda")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("gigabytes", "status"), [(85, "ok"), (48, "warning"), (24, "missing")]
)
def test_memory_of_the_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gigabytes: float, status: str
) -> None:
    on_gpu(monkeypatch, gigabytes)
    found = by_name(list(doctor.memory(preset(tmp_path), 1)))["training"]
    assert (found.status, bool(found.fix)) == (status, status != "ok"), found


def test_a_layer_that_is_not_there_does_not_end_the_checks(tiny_run: MakeRun) -> None:
    """It was a traceback without one finding."""
    checks = doctor.examine(tiny_run("--lora.target_modules=[attn9.to_q]"))
    (found,) = (check for check in checks if check.status == "missing")
    assert found.name == "training" and "has 'attn9.to_q'" in found.detail
    assert "Choose from" in found.detail


def test_memory_of_a_model_of_unknown_size_is_not_guessed(tmp_path: Path) -> None:
    (found,) = doctor.memory(preset(tmp_path, "--model.path=somebody/tuned"), 1)
    assert (
        found.status == "info"
        and "not predicted: model.path is 'somebody/tuned'" in found.detail
    )
    check_command(found.detail.partition(" with: ")[2])


def test_loading_needs_cpu_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU's part of the transformer never lies in CPU memory whole: the process and
    the reward's weights count.
    """
    on_gpu(monkeypatch, 80)
    for gigabytes, status in ((8, "missing"), (16, "ok")):
        monkeypatch.setattr(
            doctor, "host_memory", lambda size=gigabytes: int(size * 1e9)
        )
        assert (
            by_name(list(doctor.memory(preset(tmp_path), 1)))["CPU memory"].status
            == status
        )


def test_room_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_existing", lambda path: tmp_path)
    full = ["--training.mode=full", "--model.dtype=float32"]
    for free, words, status in (
        (300, [], "ok"),
        # 52.4 GB of the model and 5 GB of VideoAlign must be fetched
        (50, [], "missing"),
        (300, full, "missing"),  # five checkpoints of 8.3e9 weights
    ):
        monkeypatch.setattr(
            doctor.shutil,
            "disk_usage",
            lambda path, size=free: SimpleNamespace(free=size * 1e9),
        )
        (found,) = doctor.disk(preset(tmp_path, *words))
        assert (found.status, bool(found.fix)) == (status, status != "ok"), found
