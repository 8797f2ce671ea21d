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
from huggingface_hub import ModelCard
from huggingface_hub.errors import LocalTokenNotFoundError
from safetensors.torch import load_file
from torch import Tensor

from sage_fast.checkpoint.writer import CheckpointData, CheckpointWriter
from sage_fast.commands.cli import main
from sage_fast.config.errors import CheckpointError, ConfigError
from sage_fast.config.schema import RunConfig, to_dict
from sage_fast.evaluation import Evaluation
from sage_fast.models.hunyuan15.backbone import velocity
from sage_fast.models.toy.components import Toy
from sage_fast.policy.lora import ADAPTER_FILE, train_all, trainable_parameters
from sage_fast.run.run import Run
from sage_fast.tools import exporting
from sage_fast.tools.exporting import export
from tests.tiny.checkpoints import save_diffusers_layout

MakeRun = Callable[..., RunConfig]
pytestmark = pytest.mark.usefixtures("nothing_drawn")


def probe(run: Run, transformer: Any) -> Tensor:
    """Velocity of a transformer at a fixed state."""
    x = torch.randn(
        1, *run.trainer.latent_shape, generator=torch.Generator().manual_seed(0)
    )
    with torch.no_grad():
        return velocity(
            transformer,
            x,
            torch.tensor([0.7]),
            [run.trainer.embed(run.trainer.eval_prompts[0].text)],
        )


def trained(run: Run) -> Tensor:
    with run.trainer.evaluated_weights():
        return probe(run, run.trainer.policy.transformer)


def trained_run(make: MakeRun, *overrides: str) -> Run:
    # The forward that the exports are run by, so that nothing but the weights can
    # differ.
    run = Run(
        make(
            "--model.forward=stock",
            "--optimizer.learning_rate=0.05",
            "--evaluation.every=0",
            "--training.num_updates=1",
            *overrides,
        )
    )
    run.train()
    return run


def code_of(folder: Path) -> str:
    match = re.search(
        r"```python\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL
    )
    assert match
    return match[1]


def run_readme(folder: Path) -> Any:
    """Executes what the README tells the user to do."""
    names: dict[str, Any] = {}
    exec(code_of(folder), names)
    return names["transformer"]


def test_the_readme_of_an_adapter_loads_what_was_trained(
    tiny_run: MakeRun, tmp_path: Path
) -> None:
    run = trained_run(tiny_run, "--training.ema_decay=0.5", "--lora.alpha=8")
    folder = tmp_path / "exported"
    assert main(["export", str(run.directory), "--output_dir", str(folder)]) == 0
    loaded = probe(run, run_readme(folder))
    base = probe(run, Toy().load(run.config.model).transformer)
    assert (base - loaded).abs().max() > 1e-2, "the adapter does nothing"
    torch.testing.assert_close(loaded, trained(run), rtol=0, atol=0)
    record = json.loads((folder / "export.json").read_text())
    assert (record["averaged"], record["update"], record["dtype"]) == (
        True,
        1,
        "float32",
    )


def test_a_merged_export_is_one_plain_transformer_and_rounds_once(
    tiny_run: MakeRun, tmp_path: Path
) -> None:
    run = trained_run(tiny_run, "--model.dtype=bfloat16", "--training.ema_decay=0.5")
    coarse = tmp_path / "coarse"
    fine = tmp_path / "fine"
    export(run.directory, coarse, format="full")
    export(run.directory, fine, format="full", overrides=["--model.dtype=float32"])
    rounded, exact = (
        load_file(folder / "diffusion_pytorch_model.safetensors")
        for folder in (coarse, fine)
    )
    assert {t.dtype for t in rounded.values()} == {torch.bfloat16} and not any(
        "lora" in name for name in rounded
    )
    base = Toy().load(run.config.model).transformer.state_dict()
    adapted = 0
    for name, value in exact.items():
        # The run's model is the base in bfloat16 and an adapter in float32: their sum,
        # to the bit.
        change = (value.double() - base[name].double()).float()
        adapted += int(change.any())
        once = base[name].bfloat16().float() + change
        differ = rounded[name] != once.bfloat16()
        assert differ.float().mean() <= 1e-4, (
            f"{name}: {int(differ.sum())} of {differ.numel()} are rounded otherwise"
        )
    assert adapted > 4
    loaded = run_readme(fine)
    assert {p.dtype for p in loaded.parameters()} == {torch.float32}, (
        "README.md would round again"
    )


def test_a_model_that_is_not_finite_is_not_exported_whole(
    tiny_run: MakeRun, tmp_path: Path
) -> None:
    run = Run(tiny_run("--evaluation.every=0"))
    tensors = {name: p.detach() for name, p in run.trainer.parameters.items()}
    tensors[next(reversed(tensors))][0] = torch.nan
    state = {"trainer": {"update": 1}, "config": to_dict(run.config)}
    data = CheckpointData(tensors={"weights": tensors}, state=state)
    with CheckpointWriter(tmp_path / "checkpoints", keep_last=1) as writer:
        folder = writer.save(1, data)
    with pytest.raises(
        ConfigError,
        match="is not finite in the exported model. Choose an earlier --checkpoint",
    ):
        export(folder, tmp_path / "o", format="full")
    assert not list((tmp_path / "o").glob("*.safetensors"))


def test_a_full_run_exports_its_transformer_bit_for_bit(
    tiny_run: MakeRun, tmp_path: Path
) -> None:
    run = trained_run(
        tiny_run,
        "--training.mode=full",
        "--optimizer.learning_rate=1e-3",
        "--training.ema_decay=0.5",
    )
    folder = tmp_path / "full"
    export(run.checkpoints / "update-000001", folder)
    assert torch.equal(probe(run, run_readme(folder)), trained(run))
    assert json.loads((folder / "export.json").read_text())["format"] == "full"
    with pytest.raises(ConfigError, match="--format full"):
        export(run.directory, tmp_path / "o", format="lora")
    save_diffusers_layout(tmp_path / "model")
    with pytest.raises(ConfigError, match="needs the base model of the run"):
        export(
            run.directory,
            tmp_path / "o",
            overrides=[f"--model.path={tmp_path / 'model'}"],
        )
    assert not list((tmp_path / "o").glob("*.safetensors"))


def test_weights_that_cannot_be_trained_are_the_base_models(
    tiny_run: MakeRun, tmp_path: Path
) -> None:
    base = save_diffusers_layout(tmp_path / "model").transformer.float()
    config = tiny_run(
        "--model.family=hunyuan15",
        f"--model.path={tmp_path / 'model'}",
        "--training.mode=full",
    )
    train_all(base)
    trained = {
        name: torch.randn(p.shape) for name, p in trainable_parameters(base).items()
    }
    data = CheckpointData(
        tensors={"weights": trained},
        state={"trainer": {"update": 3}, "config": to_dict(config)},
    )
    with CheckpointWriter(tmp_path / "checkpoints", keep_last=1) as writer:
        folder = writer.save(3, data)
    export(folder, tmp_path / "o")
    exported = HunyuanVideo15Transformer3DModel.from_pretrained(
        tmp_path / "o"
    ).state_dict()
    assert (
        exported.keys() == base.state_dict().keys()
        and len(exported) > len(trained) + 10
    )
    for name, value in (base.state_dict() | trained).items():
        assert torch.equal(exported[name], value), name


def test_what_an_interrupted_export_has_left_is_to_be_deleted(
    finished_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing tells its files from the user's own, so the export does not."""
    with monkeypatch.context() as patch:

        def interrupted(*arguments: object) -> None:
            raise KeyboardInterrupt

        patch.setattr("sage_fast.tools.exporting.write_text", interrupted)
        with pytest.raises(KeyboardInterrupt):
            export(finished_run, tmp_path / "exported")
    with pytest.raises(ConfigError, match="export that was interrupted, delete them"):
        export(finished_run, tmp_path / "exported")


def test_nothing_but_an_export_of_the_same_run_is_replaced_unasked(
    finished_run: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "exported"
    export(finished_run, folder, layout="peft")
    (folder / "mine.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"holds other files, such as mine\.json"):
        export(finished_run, folder, overwrite=True)
    (folder / "mine.json").unlink()
    with pytest.raises(
        ConfigError, match="by --format lora --layout peft. Give another folder"
    ):
        export(finished_run, folder)
    assert (folder / "adapter_config.json").exists()
    export(finished_run, folder, overwrite=True)
    assert not (folder / "adapter_config.json").exists(), "nothing of it is left"
    with pytest.raises(ConfigError, match="--layout diffusers. Give another"):
        export(finished_run, folder, format="full")
    other = shutil.copytree(finished_run, tmp_path / "other")
    with pytest.raises(ConfigError, match="holds an export of "):
        export(other, folder)
    assert json.loads((folder / "export.json").read_text())["checkpoint"].startswith(
        str(finished_run)
    )
    words = ["export", str(other), "--output_dir", str(folder)]
    assert main([*words, "--overwrite"]) == main(words) == 0
    # A record that names files elsewhere deletes none of them.
    thesis = tmp_path / "thesis.tex"
    thesis.write_text("years of work")
    (tmp_path / "crafted").mkdir()
    (tmp_path / "crafted/export.json").write_text(
        '{"files": ["../thesis.tex", "/thesis.tex"], "checkpoint": "a/b",'
        ' "format": "lora", "layout": "diffusers"}'
    )
    export(finished_run, tmp_path / "crafted", overwrite=True)
    assert thesis.read_text() == "years of work"


def test_neither_a_damaged_checkpoint_nor_a_moved_model_is_exported(
    finished_run: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="--model.path=FOLDER"):
        export(
            finished_run,
            tmp_path / "o",
            format="full",
            overrides=["--model.path=/moved"],
        )
    checkpoint = shutil.copytree(
        finished_run / "checkpoints/update-000002", tmp_path / "checkpoint"
    )
    adapter = checkpoint / "lora" / ADAPTER_FILE
    adapter.write_bytes(adapter.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="missing, truncated or altered"):
        export(checkpoint, tmp_path / "o")


@pytest.mark.parametrize(
    "words",
    [
        ("--format=full", "--lora.alpha=64"),
        ("--layout=peft", "--lora.rank=3"),
        ("--seed=1",),
    ],
)
def test_an_export_is_of_the_model_that_was_trained(
    finished_run: Path,
    tmp_path: Path,
    words: tuple[str, ...],
    capsys: pytest.CaptureFixture[str],
) -> None:
    changes = words != ("--seed=1",)
    assert (
        main(["export", str(finished_run), "--output_dir", str(tmp_path / "o"), *words])
        == 2 * changes
    )
    assert (
        f"{words[-1][2:].partition('=')[0]}: " in capsys.readouterr().err
    ) is changes
    assert (tmp_path / "o").exists() is not changes


def test_a_format_is_checked_in_python_too(finished_run: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="format is 'Lora'; choose lora or full"):
        export(finished_run, tmp_path / "o", format="Lora")  # type: ignore[arg-type]


def test_the_card_has_the_evaluation_of_its_update_and_says_of_how_many_videos(
    finished_run: Path, tmp_path: Path
) -> None:
    run = shutil.copytree(finished_run, tmp_path / "run")
    for update, gain in ((0, 0.0), (1, 0.5), (2, 0.25)):
        file = run / f"evaluation/update-{update:06d}.json"
        Evaluation(
            prompts=["a", "b"],
            scores={"VQ": [gain, gain]},
            reward=[gain, gain],
            noises=3,
        ).save(file)
    (run / "checkpoints/best.json").write_text('{"update": 1, "score": 0.5}')
    for checkpoint, told, gain, pictured in (
        ("best", "against update 1 of", "0.5", False),
        ("auto", "update 2 of", "0.25", True),
    ):
        folder = export(run, tmp_path / checkpoint, checkpoint=checkpoint).folder
        card = (folder / "README.md").read_text()
        assert (
            "2 prompts, 3 videos each from the same noise: update 0 against" in card
            and told in card
        )
        assert f"| {gain} |" in card and ("before_after.png" in card) is pictured
        assert (folder / "before_after.png").exists() is pictured
    # one that cannot be read, and checkpoints alone
    file.write_text("{")
    shutil.copytree(run / "checkpoints", tmp_path / "alone/checkpoints")
    for source in (run, tmp_path / "alone"):
        folder = export(source, tmp_path / "o", overwrite=True).folder
        assert "## Before and after" not in (folder / "README.md").read_text()


def test_the_card_leads_from_the_base_model_to_the_result(
    finished_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A run of the public model needs a GPU; this one passes for it.
    monkeypatch.setattr(exporting, "check_same_run", lambda *runs, only: {})
    words = ["--model.family=hunyuan15", "--model.path=null", "--rollout.shift=9"]
    export(finished_run, tmp_path / "o", overrides=words)
    card = ModelCard.load(tmp_path / "o/README.md")
    base = "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_t2v"
    assert (
        card.data.base_model == base
        and card.data.license_name == "tencent-hunyuan-community"
    )
    code = code_of(tmp_path / "o")
    assert (
        f"HunyuanVideo15Pipeline.from_pretrained(\n    {base!r}, " in code
        and "shift=9.0" in code
    )
    assert "update 0 against update 2" in card.text
    for name in re.findall(r"\]\(([\w.]+)\)", card.text):
        assert (tmp_path / "o" / name).is_file(), name


def test_the_best_checkpoint_is_exported_and_a_worse_newest_one_is_said(
    finished_run: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    run = shutil.copytree(finished_run, tmp_path / "run")
    metrics = run / "metrics.jsonl"
    best = run / "checkpoints/best.json"
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    words = ["export", str(run), "--overwrite", "--output_dir"]

    def said(gain: float, *more: str) -> str:
        rows[-1] |= {"eval/paired_gain": gain, "eval/paired_gain_stderr": 0.1}
        metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
        caplog.clear()
        assert main([*words, str(tmp_path / "o"), *more]) == 0
        return "\n".join(
            record.getMessage()
            for record in caplog.records
            if record.levelname == "WARNING"
        )

    best.write_text('{"update": 2, "score": -0.2}')
    assert "worse" not in said(-0.2)
    assert "worse than at update 0 since update 2" in said(-0.31)
    best.write_text('{"update": 1, "score": 0.25}')
    assert "is worse than update 1, whose gain was +0.25; --checkpoint best" in said(
        0.1
    )
    assert "worse" not in said(0.1, "--checkpoint", "best")
    assert json.loads((tmp_path / "o/export.json").read_text())["update"] == 1
    best.unlink()
    assert main([*words, str(tmp_path / "o"), "--checkpoint", "best"]) == 2
    assert main([*words, str(tmp_path / "o"), "--checkpoint", "none"]) == 2
    words[1] = str(run / "checkpoints/update-000001")
    assert main([*words, str(tmp_path / "o"), "--checkpoint", "best"]) == 2
    errors = capsys.readouterr().err
    assert (
        "no checkpoint that an evaluation found best" in errors
        and "exports nothing" in errors
    )
    assert "is a checkpoint, and --checkpoint best is for a run" in errors


def test_the_adapter_that_a_run_began_with_is_exported_once(
    finished_run: Path, tiny_run: MakeRun, tmp_path: Path
) -> None:
    adapter = shutil.copytree(
        finished_run / "checkpoints/update-000002/lora", tmp_path / "adapter"
    )
    run = trained_run(tiny_run, f"--model.adapter={adapter}")
    shutil.rmtree(adapter)
    export(run.directory, tmp_path / "full", format="full")
    torch.testing.assert_close(
        probe(run, run_readme(tmp_path / "full")), trained(run), rtol=1e-5, atol=1e-5
    )


def test_an_export_goes_to_the_hub_and_stays_where_that_fails(
    finished_run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    uploaded: list[tuple[str, set[str]]] = []

    class Hub:
        def create_repo(self, repository: str, *, exist_ok: bool) -> None:
            if repository == "me/nowhere":
                raise LocalTokenNotFoundError("Token is required.")

        def upload_folder(self, *, repo_id: str, folder_path: Path) -> None:
            names = {file.name for file in folder_path.iterdir()}
            uploaded.append((repo_id, names))

    monkeypatch.setattr(exporting, "HfApi", Hub)
    folder = tmp_path / "o"
    words = ["export", str(finished_run), "--output_dir", str(folder)]
    assert main([*words, "--push_to_hub", "me/mine"]) == 0
    assert uploaded == [("me/mine", {file.name for file in folder.iterdir()})]
    assert "https://huggingface.co/me/mine" in capsys.readouterr().out
    assert main([*words, "--push_to_hub", "me/nowhere"]) == 2
    said = capsys.readouterr().err
    assert f"Token is required. Try again by `hf upload me/nowhere {folder}`" in said
    assert (folder / "export.json").is_file()
