"""Exported adapters in the layouts of other programs: names, and the way back."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch
from diffusers import HunyuanVideo15Transformer3DModel
from peft import PeftModel
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from sage_fast.commands import export as export_command
from sage_fast.config.load import load_config
from sage_fast.models.hunyuan15.hunyuan15 import HunyuanVideo15
from sage_fast.policy.adapters import load_model
from sage_fast.policy.layouts import Layout
from sage_fast.policy.lora import ADAPTER_FILE, base_digest
from sage_fast.run.run import Run
from sage_fast.tools.exporting import export
from tests.conftest import TINY_RUN
from tests.policy.test_adapters import comfyui, joined, musubi, official, renamed
from tests.tiny.checkpoints import save_diffusers_layout
from tests.tools.test_exporting import code_of, probe, trained

pytestmark = pytest.mark.usefixtures("nothing_drawn")

LAYERS = [
    *("attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0"),
    *("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj", "attn.to_add_out"),
    *("ff.net.0.proj", "ff_context.net.2", "norm1.linear"),
]


@pytest.fixture(scope="module")
def public_run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Adapters of every kind of layer, trained for two updates on the tiny public
    model, their scale not 1.
    """
    folder = tmp_path_factory.mktemp("public")
    save_diffusers_layout(folder / "model")
    tree = TINY_RUN | {
        "data": {"prompts": ["a red circle moving left", "a green square moving up"]},
        "output_dir": str(folder / "run"),
        "model": {
            "family": "hunyuan15",
            "path": str(folder / "model"),
            "device": "cpu",
            "forward": "stock",
        },
        "video": {"num_frames": 5, "height": 32, "width": 32, "fps": 4},
        "lora": {"rank": 2, "alpha": 3, "target_modules": LAYERS},
        "optimizer": {"name": "adamw", "learning_rate": 0.05},
        "training": {"num_updates": 2},
        "evaluation": {"every": 0},
    }
    (folder / "run.yaml").write_text(json.dumps(tree))
    run = Run(load_config(folder / "run.yaml"))
    run.train()
    return run


def public_transformer(run: Run) -> HunyuanVideo15Transformer3DModel:
    return HunyuanVideo15Transformer3DModel.from_pretrained(
        Path(str(run.config.model.path)) / "transformer"
    )


def close_to_trained(run: Run, transformer: Any) -> None:
    base = probe(run, public_transformer(run))
    expected = trained(run)
    assert (base - expected).abs().max() > 1e-2, "the adapter does nothing"
    torch.testing.assert_close(probe(run, transformer), expected, rtol=1e-6, atol=1e-6)


def test_diffusers_loads_an_adapter_by_both_prefixes(
    public_run: Run, tmp_path: Path
) -> None:
    export(public_run.directory, tmp_path / "o")
    for prefix in ("transformer", None):
        transformer = public_transformer(public_run)
        transformer.load_lora_adapter(
            str(tmp_path / "o"), prefix=prefix, weight_name=ADAPTER_FILE
        )
        close_to_trained(public_run, transformer)


PROGRAMS: dict[Layout, Callable[[Any], dict[str, Tensor]]] = {
    "official": lambda trained: renamed(trained, official, None),
    "comfyui": lambda trained: joined(renamed(trained, comfyui, None)),
    "musubi": lambda trained: renamed(trained, musubi, 2.0),
}


@pytest.mark.parametrize("layout", PROGRAMS)
def test_an_adapter_has_the_names_of_its_program(
    public_run: Run, tmp_path: Path, layout: Layout
) -> None:
    """That they are its names is known by `tests/policy/test_adapters.py`, and that
    the matrices are those that were trained by the next test.
    """
    export(public_run.directory, tmp_path / "plain")
    weights = {
        name.removeprefix("transformer."): value
        for name, value in load_file(tmp_path / "plain" / ADAPTER_FILE).items()
    }
    expected = PROGRAMS[layout](SimpleNamespace(weights=weights))
    result = export(public_run.directory, tmp_path / "o", layout=layout)
    found = load_file(tmp_path / "o" / result.adapter_file)
    # The last block's texts have k and v alone, which only the next test looks at.
    kept, shapes = (
        {name: value.shape for name, value in tensors.items() if "1.txt" not in name}
        for tensors in (found, expected)
    )
    assert kept == shapes


def test_peft_loads_an_adapter_as_its_readme_says(
    public_run: Run, tmp_path: Path
) -> None:
    export(public_run.directory, tmp_path / "o", layout="peft")
    assert {"adapter_config.json", "adapter_model.safetensors"} < {
        path.name for path in (tmp_path / "o").iterdir()
    }
    assert "PeftModel.from_pretrained(transformer, " in code_of(tmp_path / "o")
    transformer = PeftModel.from_pretrained(
        public_transformer(public_run), str(tmp_path / "o")
    )
    close_to_trained(public_run, transformer.get_base_model())


@pytest.mark.parametrize("layout", get_args(Layout))
def test_an_adapter_of_any_layout_comes_back(
    public_run: Run, tmp_path: Path, layout: Layout
) -> None:
    """By model.adapter into a run of any alpha; `generate --lora` loads it by the same
    function.
    """
    result = export(public_run.directory, tmp_path / "o", layout=layout)
    config = public_run.config
    file = tmp_path / "o" / result.adapter_file
    with safe_open(file, "pt") as opened:
        about = opened.metadata()
    assert about == {
        "format": "pt",
        "rank": "2",
        "alpha": "2",
        "base_model": config.model.path,
    }
    plain = tmp_path / "plain"
    plain.touch()
    files = [plain, *(tmp_path / "o").iterdir()]
    assert len({path.stat().st_mode for path in files}) == 1
    card = (tmp_path / "o/README.md").read_text()
    programs = HunyuanVideo15.clients[layout].programs
    assert (
        export_command.__doc__
        and programs in card
        and programs in export_command.__doc__
    )
    assert all(f"{name} for" in card or name == layout for name in get_args(Layout))
    model = replace(config.model, adapter=str(tmp_path / "o"))
    lora = replace(config.lora, alpha=8)
    transformer = load_model(model, lora).transformer
    opened_models = [
        load_model(section, lora, read=False) for section in (model, config.model)
    ]
    assert (
        len({base_digest(parts.transformer, parts.weights) for parts in opened_models})
        == 1
    )
    torch.testing.assert_close(
        probe(public_run, transformer), trained(public_run), rtol=1e-5, atol=1e-6
    )
