"""Exports: what diffusers loads computes exactly what was trained."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import HunyuanVideo15Transformer3DModel
from safetensors.torch import load_file
from torch import Tensor

from sage_fast.checkpoint import CheckpointData, CheckpointWriter
from sage_fast.commands.cli import main
from sage_fast.config.errors import ConfigError
from sage_fast.config.schema import RunConfig, to_dict
from sage_fast.models.hunyuan15.velocity import velocity
from sage_fast.models.toy.components import load_components
from sage_fast.policy.lora import ADAPTER_FILE, cast_weights
from sage_fast.policy.trained import whole_parameters
from sage_fast.run.run import Run
from sage_fast.tools.exporting import export
from tests.tiny.checkpoints import build_pipeline, save_diffusers_layout, save_official_layout

MakeRun = Callable[..., RunConfig]


def probe(run: Run, transformer: Any) -> Tensor:
    """Velocity of a transformer at a fixed state."""
    x = torch.randn(1, *run.trainer.latent_shape, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return velocity(transformer, x, torch.tensor([0.7]), [run.trainer.embed(run.trainer.eval_prompts[0].text)])


def trained(run: Run) -> Tensor:
    with run.trainer.evaluated_weights():
        return probe(run, run.trainer.policy.transformer)


def trained_run(make: MakeRun, *overrides: str) -> Run:
    # The forward that the exports are run by, so that nothing but the weights can differ.
    run = Run(make("--model.forward=stock", "--optimizer.learning_rate=0.05", "--evaluation.every=0", *overrides))
    run.train()
    return run


def code_of(folder: Path) -> str:
    match = re.search(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)
    assert match
    return match[1]


def run_readme(folder: Path) -> Any:
    """Executes what the README tells the user to do."""
    names: dict[str, Any] = {}
    exec(code_of(folder), names)
    return names["transformer"]


@pytest.mark.parametrize(
    "overrides",
    [(), ("--training.ema_decay=0.5",), ("--lora.alpha=8",)],
    ids=["plain", "averaged", "alpha"],
)
def test_the_readme_of_an_adapter_loads_what_was_trained(
    tiny_run: MakeRun, tmp_path: Path, overrides: tuple[str, ...]
) -> None:
    run = trained_run(tiny_run, *overrides)
    folder = tmp_path / "exported"
    assert main(["export", str(run.directory), "--output", str(folder)]) == 0
    loaded = probe(run, run_readme(folder))
    base = probe(run, load_components(run.config.model).transformer)
    assert (base - loaded).abs().max() > 1e-2, "the adapter does nothing"
    torch.testing.assert_close(loaded, trained(run), rtol=0, atol=0)
    record = json.loads((folder / "export.json").read_text())
    assert record["averaged"] == ("--training.ema_decay=0.5" in overrides) and record["update"] == 2
    assert record["lora"]["alpha"] == (8 if "--lora.alpha=8" in overrides else 2)
    assert sorted(p.name for p in folder.iterdir()) == ["README.md", "export.json", ADAPTER_FILE]


def test_a_merged_export_is_one_plain_transformer(tiny_run: MakeRun, tmp_path: Path) -> None:
    run = trained_run(tiny_run, "--training.ema_decay=0.5")
    folder = tmp_path / "merged"
    assert main(["export", str(run.directory), "--output", str(folder), "--format", "full"]) == 0
    loaded = run_readme(folder)
    assert isinstance(loaded, HunyuanVideo15Transformer3DModel)
    assert not any("lora" in name for name in loaded.state_dict())
    # W x + B A x in one product instead of two: equal up to rounding.
    torch.testing.assert_close(probe(run, loaded), trained(run), rtol=1e-4, atol=1e-4)
    base = probe(run, load_components(run.config.model).transformer)
    assert (base - probe(run, loaded)).abs().max() > 1e-2
    assert "merged" in (folder / "README.md").read_text()


@pytest.mark.parametrize("overrides", [(), ("--training.ema_decay=0.5",)], ids=["plain", "averaged"])
def test_a_full_run_exports_its_transformer_bit_for_bit(
    tiny_run: MakeRun, tmp_path: Path, overrides: tuple[str, ...]
) -> None:
    run = trained_run(tiny_run, "--training.mode=full", "--optimizer.learning_rate=1e-3", *overrides)
    folder = tmp_path / "full"
    checkpoint = run.checkpoints / "update-000002"
    assert main(["export", str(checkpoint), "--output", str(folder)]) == 0
    assert torch.equal(probe(run, run_readme(folder)), trained(run))
    assert json.loads((folder / "export.json").read_text())["format"] == "full"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_full_run_of_a_public_model_is_exported_from_disk(
    tiny_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    """Neither the base model nor the checkpoint is loaded; what cannot be trained is the base model's."""
    base = save_diffusers_layout(tmp_path / "model").transformer.float()
    config = tiny_run("--model.family=hunyuan15", f"--model.path={tmp_path / 'model'}", "--training.mode=full")
    trained = {name: torch.randn(p.shape) for name, p in whole_parameters(base).items()}
    data = CheckpointData(tensors={"weights": trained}, state={"trainer": {"update": 3}, "config": to_dict(config)})
    with CheckpointWriter(tmp_path / "checkpoints", keep_last=1) as writer:
        folder = writer.save(3, data)
    with monkeypatch.context() as patch:
        patch.setattr(HunyuanVideo15Transformer3DModel, "from_pretrained", None)
        result = export(folder, tmp_path / "o", dtype=dtype)
    assert result.update == 3 and result.format == "full"
    exported = HunyuanVideo15Transformer3DModel.from_pretrained(tmp_path / "o", torch_dtype=dtype).state_dict()
    untrained = base.state_dict().keys() - trained.keys()
    assert exported.keys() == base.state_dict().keys() and len(untrained) > 10
    for name, value in (base.state_dict() | trained).items():
        assert torch.equal(exported[name], value.to(dtype)), name


def test_a_checkpoint_of_another_model_is_not_exported(tiny_run: MakeRun, tmp_path: Path) -> None:
    run = trained_run(tiny_run, "--training.mode=full")
    save_diffusers_layout(tmp_path / "model")
    with pytest.raises(ConfigError, match="does not fit its base model"):
        export(
            run.directory,
            tmp_path / "o",
            overrides=["--model.family=hunyuan15", f"--model.path={tmp_path / 'model'}"],
        )
    assert not list((tmp_path / "o").glob("*.safetensors"))


def test_a_full_export_in_another_dtype_rounds_once(tiny_run: MakeRun, tmp_path: Path) -> None:
    run = trained_run(tiny_run, "--model.dtype=bfloat16")
    coarse, fine = tmp_path / "coarse", tmp_path / "fine"
    export(run.directory, coarse, format="full")
    export(run.directory, fine, format="full", dtype=torch.float32)
    names = ("diffusion_pytorch_model.safetensors",)
    rounded, exact = (load_file(folder / names[0]) for folder in (coarse, fine))
    assert {t.dtype for t in rounded.values()} == {torch.bfloat16}
    assert {t.dtype for t in exact.values()} == {torch.float32}
    for name, value in exact.items():
        torch.testing.assert_close(rounded[name], value.bfloat16(), rtol=2**-7, atol=1e-3)
    assert {p.dtype for p in run_readme(fine).parameters()} == {torch.float32}, "README.md would round again"
    assert json.loads((fine / "export.json").read_text())["dtype"] == "float32"
    stock = HunyuanVideo15Transformer3DModel.from_pretrained(coarse, torch_dtype=torch.bfloat16)
    cast_weights(stock, torch.bfloat16)
    torch.testing.assert_close(probe(run, stock), trained(run), rtol=0.05, atol=0.05)


def test_generate_takes_the_export(tiny_run: MakeRun, tmp_path: Path) -> None:
    run = trained_run(tiny_run)
    folder = tmp_path / "exported"
    export(run.directory, folder)
    words = ["--lora", str(folder), "--output", str(tmp_path / "videos"), "--evaluation.num_prompts=2"]
    assert main(["generate", str(run.directory), *words]) == 0
    assert len(list((tmp_path / "videos").glob("*.mp4"))) == 2


def test_the_newest_complete_checkpoint_of_a_run_is_taken(finished_run: Path, tmp_path: Path) -> None:
    run = shutil.copytree(finished_run, tmp_path / "run")
    assert export(run, tmp_path / "newest").update == 2
    (run / "checkpoints/update-000002/manifest.json").unlink()
    assert export(run, tmp_path / "older").update == 1
    assert export(run / "checkpoints/update-000001", tmp_path / "named").update == 1


def test_an_export_may_be_repeated_but_nothing_else_is_overwritten(finished_run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "exported"
    export(finished_run, folder)
    export(finished_run, folder)
    other = tmp_path / "other"
    other.mkdir()
    (other / "thesis.tex").write_text("years of work")
    with pytest.raises(ConfigError, match="holds other files"):
        export(finished_run, other)
    with pytest.raises(ConfigError, match="is a file"):
        export(finished_run, other / "thesis.tex")
    assert [p.name for p in other.iterdir()] == ["thesis.tex"]


HUB = "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-"


@pytest.mark.parametrize(
    ("path", "variant", "base", "recorded"),
    [
        (None, None, f"{HUB}480p_t2v", None),
        (f"{HUB}720p_t2v", None, f"{HUB}720p_t2v", None),
        ("someone/tuned", None, "someone/tuned", None),
        ("/gone/ckpts", "720p_t2v", f"{HUB}720p_t2v", "720p_t2v"),
        ("/gone/ckpts/transformer/720p_t2v_distilled", None, f"{HUB}720p_t2v_distilled", "720p_t2v_distilled"),
        ("/gone/model", None, "/gone/model", None),
    ],
    ids=["default", "hub", "hub-of-another", "variant", "path-of-a-transformer", "gone"],
)
def test_the_readme_names_the_base_model_of_the_run(
    finished_run: Path, tmp_path: Path, path: str | None, variant: str | None, base: str, recorded: str | None
) -> None:
    words = [f"--model.path={path or 'null'}", f"--model.variant={variant or 'null'}", "--rollout.shift=9"]
    export(finished_run, tmp_path / "o", overrides=["--model.family=hunyuan15", *words])
    code = code_of(tmp_path / "o")
    assert f"HunyuanVideo15Pipeline.from_pretrained({base!r}, " in code and "shift=9.0" in code
    record = json.loads((tmp_path / "o/export.json").read_text())["base_model"]
    assert record == {"family": "hunyuan15", "path": path, "variant": recorded}


def test_the_only_transformer_of_an_official_folder_is_recorded(finished_run: Path, tmp_path: Path) -> None:
    ckpts = tmp_path / "ckpts"
    save_official_layout(ckpts, build_pipeline(), "720p_t2v")
    export(finished_run, tmp_path / "o", overrides=["--model.family=hunyuan15", f"--model.path={ckpts}"])
    assert f"{HUB}720p_t2v" in code_of(tmp_path / "o")
    assert json.loads((tmp_path / "o/export.json").read_text())["base_model"]["variant"] == "720p_t2v"
    assert not (ckpts / ".sage_fast").exists(), "nothing is converted for a README"


def test_a_transformer_without_its_pipeline_is_known_by_its_size(finished_run: Path, tmp_path: Path) -> None:
    (tmp_path / "model/transformer").mkdir(parents=True)
    (tmp_path / "model/transformer/config.json").write_text('{"target_size": 960}')
    export(finished_run, tmp_path / "o", overrides=["--model.family=hunyuan15", f"--model.path={tmp_path / 'model'}"])
    assert f"{HUB}720p_t2v" in code_of(tmp_path / "o")


@pytest.mark.parametrize(
    ("source", "more", "status", "expected"),
    [
        ("", ["--dtype", "bfloat16"], 2, "--dtype is for --format full"),
        ("", ["--format", "full", "--model.path=/moved"], 2, "--model.path=FOLDER"),
        ("checkpoints", [], 2, "such as"),
        ("samples", [], 2, "no checkpoint and no run"),
        ("nowhere", [], 2, "no checkpoint and no run"),
    ],
    ids=["dtype-of-an-adapter", "model-moved", "one-level-too-high", "no-checkpoint", "missing"],
)
def test_a_wrong_request_is_told(
    finished_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], source: str, more: list[str], status: int,
    expected: str,
) -> None:  # fmt: skip
    assert main(["export", str(finished_run / source), "--output", str(tmp_path / "o"), *more]) == status
    errors = capsys.readouterr().err
    assert expected in errors and "Traceback" not in errors
    assert not (tmp_path / "o/export.json").exists()


def test_a_run_that_trained_every_weight_has_no_adapter(tiny_run: MakeRun, tmp_path: Path) -> None:
    run = trained_run(tiny_run, "--training.mode=full")
    with pytest.raises(ConfigError, match="--format full"):
        export(run.directory, tmp_path / "o", format="lora")


def test_a_damaged_checkpoint_is_not_exported(
    finished_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = shutil.copytree(finished_run, tmp_path / "run")
    adapter = run / "checkpoints/update-000002/lora" / ADAPTER_FILE
    adapter.write_bytes(adapter.read_bytes()[:-1])
    assert main(["export", str(run / "checkpoints/update-000002"), "--output", str(tmp_path / "o")]) == 1
    assert "missing, truncated or altered" in capsys.readouterr().err
