"""Doctor: what it finds, what it says to do, and when it lets a configuration pass."""

import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub.constants
import pytest
import torch

from sage_fast.commands.cli import main
from sage_fast.config.load import dump_config, load_config
from sage_fast.config.schema import RunConfig
from sage_fast.models.family import model_family
from sage_fast.models.hub import is_repository
from sage_fast.models.hunyuan15.loading import load_components
from sage_fast.planning.estimate import make_memory_plan
from sage_fast.planning.text import summary
from sage_fast.planning.weights import count_weights
from sage_fast.rewards.base import reward_requirements
from sage_fast.rewards.clip import PROCESSOR
from sage_fast.tools import diagnosis as doctor
from sage_fast.tools import machine
from sage_fast.tools.diagnosis import can_run, examine, to_text
from sage_fast.tools.machine import Check
from tests.commands.programs import check_command
from tests.tiny.checkpoints import copy_tree, save_diffusers_layout

MakeRun = Callable[..., RunConfig]
ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.usefixtures("in_the_repository")
PRESET = ROOT / "configs/hv15_480p_lora_1gpu.yaml"


def by_name(checks: list[Check]) -> dict[str, Check]:
    return {check.name: check for check in checks}


def preset(tmp_path: Path, *overrides: str) -> RunConfig:
    return load_config(PRESET, [f"--output_dir={tmp_path / 'run'}", *overrides])


# ------------------------------------------------------------------------------------------ machine


def test_a_machine_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert re.search(rf"ok +torch +{re.escape(torch.__version__)}", text)
    assert "libx264" in text and "This machine is ready." in text
    rows = [line for line in text.splitlines() if re.match(r"  (ok|warning|missing) ", line)]
    starts = {re.match(r"  \w+ +\S.*?  +", line).end() for line in rows if "  " in line.strip()}  # type: ignore[union-attr]
    assert max(starts) - min(starts) <= 1, "details stand in one column"


def test_a_missing_package_is_named_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    version = machine.version_of
    monkeypatch.setattr(machine, "version_of", lambda name: None if name in ("peft", "xformers") else version(name))
    checks = by_name(list(machine.software()))
    assert (checks["peft"].status, checks["peft"].fix) == ("missing", "pip install peft")
    assert checks["xformers"].status == "info" and "attention" in checks["xformers"].detail
    assert not can_run(list(checks.values()))


def test_a_version_that_was_not_tested_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.metadata, "requires", lambda name: ["torch<2,>=1", "diffusers>=0.36"])
    checks = by_name(examine(None))
    assert checks["torch"].status == "warning" and "<2" in checks["torch"].fix
    assert checks["diffusers"].status == "ok"


def fake_driver(used: float) -> SimpleNamespace:
    """The part of pynvml that is used, for one GPU of 80 GiB."""
    memory = SimpleNamespace(total=80 * 2**30, used=int(used * 80 * 2**30), free=int((1 - used) * 80 * 2**30))
    return SimpleNamespace(
        NVMLError=RuntimeError,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetCount=lambda: 1,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetMemoryInfo=lambda handle: memory,
        nvmlSystemGetDriverVersion=lambda: b"580.1",
    )


@pytest.mark.parametrize(("used", "status"), [(0.01, "ok"), (0.5, "warning")], ids=["free", "in-use"])
def test_a_gpu_is_described_by_its_driver(monkeypatch: pytest.MonkeyPatch, used: float, status: str) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", fake_driver(used))  # type: ignore[arg-type]
    monkeypatch.setattr(machine.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    checks = by_name(list(machine.hardware()))
    assert checks["gpu 0"].status == status and "580.1" in checks["gpu 0"].detail
    # A GPU that torch cannot use is what to mend first.
    assert checks["cuda"].status == "missing" and "pytorch.org" in checks["cuda"].fix


def test_attention_backends_and_the_one_that_is_asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    report = {"flash3": "flash_attn_interface is not installed", "sdpa": None}
    monkeypatch.setattr(doctor, "backend_report", lambda device, dtype: report)
    chosen = by_name(list(doctor._attention(preset(tmp_path, "--model.attention=flash3"))))
    assert chosen["flash3"].status == "missing" and "not installed" in chosen["flash3"].detail
    automatic = by_name(list(doctor._attention(preset(tmp_path))))
    assert (automatic["flash3"].status, automatic["sdpa"].status) == ("info", "ok")


# ------------------------------------------------------------------------------------------ configuration


def test_the_toy_configuration_can_run(tiny_run: MakeRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "new.yaml"
    file.write_text(dump_config(tiny_run()))
    assert main(["doctor", str(file)]) == 0
    assert "This configuration can run." in capsys.readouterr().out
    assert not (tmp_path / "run").exists(), "doctor leaves nothing behind"


PROBLEMS: dict[str, tuple[list[str], str, str, str]] = {
    "device": (["--model.device=tpu7"], "model.device", "tpu7", "--model.device=auto"),
    "family": (["--model.family=hunyuan99"], "model.family", "hunyuan99", ""),
    "reward": (["--reward.rewards=[beauty]"], "reward beauty", "beauty", ""),
    "reward-option": (["--reward.options.toy.size=3"], "reward toy", "size", "reward.options.toy"),
    "prompts": (["--data.prompts=gone.csv"], "prompts", "gone.csv", ""),
    "output": (["--output_dir=/dev/null/run"], "output_dir", "cannot be written", "--output_dir=FOLDER"),
    "wandb": (["--logging.wandb_project=p"], "logging.wandb_project", "wandb", "pip install wandb"),
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_a_problem_is_named_and_the_rest_is_still_checked(tiny_run: MakeRun, name: str) -> None:
    overrides, key, detail, fix = PROBLEMS[name]
    checks = examine(tiny_run(*overrides))
    found = by_name(checks)[key]
    assert found.status == "missing" and detail in found.detail and fix in found.fix
    assert [c.name for c in checks if c.status == "missing"] == [key]


@pytest.mark.parametrize(
    ("overrides", "name", "status", "detail"),
    [
        (["--reward.options.videoalign.fps=null"], "reward videoalign", "missing", "fps is not set"),
        (["--reward.options.videoalign.fps=16"], "reward videoalign", "warning", "fps is 16, but video.fps is 24"),
        (["--video.num_frames=80"], "video", "missing", "80 frames"),
        (["--video.height=470"], "video", "missing", "470x832"),
    ],
    ids=["no-fps", "other-fps", "frames", "height"],
)
def test_what_the_real_model_cannot_do(
    tmp_path: Path, overrides: list[str], name: str, status: str, detail: str
) -> None:
    found = by_name(examine(preset(tmp_path, *overrides)))[name]
    assert found.status == status and detail in found.detail and found.fix


def test_an_output_directory_in_use_is_a_warning(finished_run: Path) -> None:
    config = load_config(finished_run / "config.yaml", [f"--output_dir={finished_run}"])
    checks = examine(config)
    assert by_name(checks)["output_dir"].status == "warning" and can_run(checks)


# ------------------------------------------------------------------------------------------ files


def test_missing_weights_come_with_their_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    config = load_config(
        PRESET,
        ["--reward.rewards=[videoalign, clip_score, pick_score]", "--reward.options.clip_score.path=models/clip"],
    )
    needed = model_family(config.model.family).requirements(config.model)
    for name in config.reward.rewards:
        needed = [*needed, *reward_requirements(name, config.reward.options.get(name, {}))]
    found = {r.name: r for r in needed}
    assert all(r.missing for r in found.values())
    for requirement in found.values():
        check_command(requirement.fetch)
    assert {name: r.fetch for name, r in found.items()} == {
        "HunyuanVideo-1.5": "hf download hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_t2v",
        "VideoAlign": "hf download KwaiVGI/VideoReward --local-dir models/VideoReward",
        "VideoAlign's base model": "hf download Qwen/Qwen2-VL-2B-Instruct",
        "CLIPScore": "hf download openai/clip-vit-large-patch14 --local-dir models/clip",
        "PickScore": "hf download yuvalkirstain/PickScore_v1",
        "PickScore's processor": f"hf download {PROCESSOR} --include '*.json' --include '*.txt'",
    }


@pytest.fixture(scope="module")
def whole_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "model"
    save_diffusers_layout(folder)
    return folder


@pytest.fixture
def model(whole_model: Path, tmp_path: Path) -> Path:
    """A whole checkpoint in diffusers' layout that a test may change."""
    return copy_tree(whole_model, tmp_path / "model")


def test_a_download_that_was_interrupted_names_the_shard(model: Path, tmp_path: Path) -> None:
    whole = model / "transformer/diffusion_pytorch_model.safetensors"
    first, second = (whole.with_stem(f"{whole.stem}-{n:05d}-of-00002") for n in (1, 2))
    whole.rename(first)
    shards = {"weight_map": {"a": first.name, "b": second.name}}
    whole.with_name(f"{whole.name}.index.json").write_text(json.dumps(shards))
    config = preset(tmp_path, f"--model.path={model}")
    found = by_name(examine(config))["HunyuanVideo-1.5"]
    assert found.status == "missing" and f"transformer/{second.name}" in found.detail
    assert found.fix.endswith(f"--local-dir {model}")
    shutil.copyfile(first, second)
    checks = by_name(examine(config))
    assert checks["HunyuanVideo-1.5"].status == checks["model weights"].status == "ok"
    assert "rollout.shift" not in checks


def edit_json(path: Path, **entries: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | entries))


def image_to_video(model: Path) -> None:
    edit_json(model / "model_index.json", _class_name="HunyuanVideo15ImageToVideoPipeline")


def step_distilled(model: Path) -> None:
    edit_json(model / "transformer/config.json", use_meanflow=True)


def guidance_distilled(model: Path) -> None:
    edit_json(model / "guider/guider_config.json", guidance_scale=1.0)


def truncated(model: Path) -> None:
    file = model / "vae/diffusion_pytorch_model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def not_json(model: Path) -> None:
    (model / "transformer/config.json").write_text("{")


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (image_to_video, "HunyuanVideo15ImageToVideoPipeline"),
        (step_distilled, "use_meanflow"),
        (guidance_distilled, "rollout.guidance_scale is 6.0"),
        (truncated, "not downloaded to its end"),
        (not_json, "is not JSON"),
    ],
)
def test_doctor_refuses_the_weights_that_the_loader_refuses(
    model: Path, tmp_path: Path, damage: Callable[[Path], None], words: str
) -> None:
    damage(model)
    config = preset(tmp_path, f"--model.path={model}")
    found = by_name(examine(config))["model weights"]
    assert found.status == "missing" and words in found.detail and found.fix
    with pytest.raises(ValueError) as error:
        load_components(config.model).check_guidance(config.rollout.guidance_scale)
    assert str(error.value) == found.detail


def test_a_shift_that_is_not_the_checkpoints_is_a_warning(model: Path, tmp_path: Path) -> None:
    edit_json(model / "scheduler/scheduler_config.json", shift=9.0)
    checks = by_name(list(doctor._files(preset(tmp_path, f"--model.path={model}"))))
    found = checks["rollout.shift"]
    assert (found.status, found.fix) == ("warning", "--rollout.shift=9") and "shift is 5" in found.detail
    assert checks["model weights"].status == "ok"
    same = preset(tmp_path, f"--model.path={model}", "--rollout.shift=9")
    assert "rollout.shift" not in by_name(list(doctor._files(same)))


@pytest.mark.parametrize(
    ("path", "expected"),
    [("owner/name", True), ("models/name", False), ("/abs/name", False), ("./name", False), ("name", False)],
)
def test_a_repository_and_a_folder_to_be_are_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, expected: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    assert is_repository(path) is expected


# ------------------------------------------------------------------------------------------ memory, disk


def free_space(monkeypatch: pytest.MonkeyPatch, gigabytes: float) -> None:
    usage: Any = SimpleNamespace(free=gigabytes * 1e9)
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda folder: usage)


@pytest.mark.parametrize(("gigabytes", "status"), [(300, "ok"), (50, "missing")])
def test_what_has_to_be_fetched_needs_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gigabytes: float, status: str
) -> None:
    free_space(monkeypatch, gigabytes)
    config = preset(tmp_path, f"--reward.options.videoalign.path={tmp_path / 'VideoReward'}")
    checks = {c.detail.split("into ")[-1].split(",")[0]: c for c in doctor._downloads(config)}
    cache = checks[huggingface_hub.constants.HF_HUB_CACHE]
    assert cache.status == status and "about 57.9 GB" in cache.detail  # the model, and Qwen2-VL in case it is needed
    assert checks[str(tmp_path / "VideoReward")].status == "ok"


def test_the_cache_needs_room_for_prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free_space(monkeypatch, 30)
    written = by_name(list(doctor._disk(preset(tmp_path, "--model.cache_dir=/dev/null/cache"))))["model.cache_dir"]
    assert written.status == "missing" and "cannot be created" in written.detail
    # 536 texts of 250 tokens, 3,584 numbers each, in 16 bits.
    plain = by_name(list(doctor._disk(preset(tmp_path, f"--model.cache_dir={tmp_path}"))))["model.cache_dir"]
    assert plain.status == "ok" and plain.detail.startswith("about 1.0 GB for 536 prompts, 30 GB free")


@pytest.mark.parametrize(("limit", "status"), [(1024, "warning"), (65536, "ok"), (-1, "ok")])
def test_a_low_limit_of_open_files_is_a_warning(monkeypatch: pytest.MonkeyPatch, limit: int, status: str) -> None:
    monkeypatch.setattr(machine.resource, "getrlimit", lambda which: (limit, limit))
    found = by_name(list(machine.hardware()))["open files"]
    assert found.status == status and bool(found.fix) == (status == "warning")


@pytest.mark.parametrize(("gigabytes", "status"), [(8, "missing"), (16, "ok")])
def test_loading_needs_cpu_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gigabytes: float, status: str
) -> None:
    """A GPU's part of the transformer never lies in CPU memory whole: the process and the reward's weights count."""
    on_gpu(monkeypatch, 80)
    monkeypatch.setattr(doctor, "host_memory", lambda: int(gigabytes * 1e9))
    assert by_name(list(doctor._memory(preset(tmp_path))))["CPU memory while loading"].status == status


def on_gpu(monkeypatch: pytest.MonkeyPatch, gigabytes: float) -> None:
    properties: Any = SimpleNamespace(total_memory=gigabytes * 1e9, name="a GPU")
    monkeypatch.setattr(doctor, "rank_device", lambda name: "cuda")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("gigabytes", "overrides", "status", "fix"),
    [
        (85, [], "ok", ""),
        (48, [], "warning", "--model.checkpointing=full"),
        (60, ["--training.guidance=paired"], "missing", "--training.guidance=split"),
        (60, ["--model.checkpointing=none"], "missing", "--model.checkpointing=selective"),
        (85, ["--rollout.micro_batch_size=4"], "missing", "--rollout.micro_batch_size=1"),
        (85, ["--model.dtype=float32", "--training.guidance=paired"], "missing", "--model.dtype=bfloat16"),
        (85, ["--training.mode=full", "--model.dtype=float32"], "missing", "--training.mode=lora"),
        (24, [], "missing", "a GPU with more memory"),
    ],
    ids=["fits", "tight", "split", "checkpointing", "micro-batch", "dtype", "full", "hopeless"],
)
def test_what_does_not_fit_comes_with_the_setting_that_helps_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gigabytes: float, overrides: list[str], status: str, fix: str
) -> None:
    on_gpu(monkeypatch, gigabytes)
    found = by_name(list(doctor._memory(preset(tmp_path, *overrides))))["training"]
    assert (found.status, bool(found.fix)) == (status, bool(fix)), found
    assert fix in found.fix


@pytest.mark.slow
def test_the_estimate_moves_as_it_should(tmp_path: Path) -> None:
    def parts(*overrides: str) -> dict[str, float]:
        plan = make_memory_plan(preset(tmp_path, *overrides), on_gpu=True, gpus=1, memory_gb=80, sizes={})
        assert plan.video_tokens == 32_760
        return summary(plan.memory)

    plain = parts()
    assert plain["weights"] == pytest.approx(16.65, abs=0.01)
    assert parts("--model.adaln=offload")["weights"] == pytest.approx(16.65 - 5.44, abs=0.01)
    assert parts("--model.dtype=float32")["weights"] == 2 * plain["weights"]
    assert parts("--model.checkpointing=full")["activations"] == pytest.approx(plain["activations"] / 2.0, rel=0.02)
    one_branch = parts("--rollout.guidance_scale=1", "--training.guidance=paired")["activations"]
    assert one_branch == pytest.approx(plain["activations"], rel=0.01)
    adapter = "gradients, optimizer, anchor"
    assert parts("--lora.rank=64")[adapter] == pytest.approx(2 * plain[adapter])
    # Weight, gradient, one moment, anchor; then one moment more, and no anchor.
    assert parts("--optimizer.name=adamw")[adapter] == pytest.approx(5 / 4 * plain[adapter])
    assert parts("--objective.kl_mode=none")[adapter] == pytest.approx(3 / 4 * plain[adapter])
    assert parts("--reward.device=cuda:1")["rewards"] == 0 < plain["rewards"]


def test_adapter_parameters_are_counted_as_peft_makes_them(tiny_run: MakeRun) -> None:
    """On a model small enough to build."""
    from sage_fast.run.run import build_trainer

    config = tiny_run()
    trainer = build_trainer(config)
    made = sum(p.numel() for p in trainer.parameters.values())
    assert count_weights(config, dict(trainer.policy.transformer.config)).trained == made


def test_a_disk_that_is_too_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: SimpleNamespace(free=200e9))
    lora, full = (by_name(list(doctor._disk(preset(tmp_path, *words))))["checkpoints"] for words in (
        (), ("--training.mode=full", "--model.dtype=float32"),
    ))  # fmt: skip
    assert lora.status == "ok" and full.status == "missing" and "keep_last" in full.fix


def test_json_has_what_the_text_has(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Looked at once: free memory and disk are others a second later.
    checks = examine(preset(tmp_path))
    monkeypatch.setattr(doctor, "examine", lambda config: checks)
    words = [str(PRESET), f"--output_dir={tmp_path / 'run'}"]
    assert main(["doctor", "--json", *words]) == 1
    tree = json.loads(capsys.readouterr().out)
    assert tree["can_run"] is False and {c["status"] for c in tree["checks"]} <= {"ok", "info", "warning", "missing"}
    assert main(["doctor", *words]) == 1
    text = capsys.readouterr().out
    assert all(check["detail"] in text for check in tree["checks"])
    missing = sum(check["status"] == "missing" for check in tree["checks"])
    assert f"cannot run: see the {missing} marked missing" in text


def test_the_verdict_of_a_machine() -> None:
    check = Check("software", "torch", "missing", "not installed", fix="pip install torch")
    assert "This machine is not ready: see the 1 marked missing." in to_text([check], config_given=False)
    assert "-> pip install torch" in to_text([check], config_given=False)
