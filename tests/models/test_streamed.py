"""Writing a transformer tensor by tensor leaves the files that `save_pretrained` leaves."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from diffusers import HunyuanVideo15Transformer3DModel
from safetensors.torch import load_file
from torch import Tensor

from sage_fast.checkpoint import CheckpointData, CheckpointWriter
from sage_fast.config.model_sections import ModelConfig
from sage_fast.models.family import model_family
from sage_fast.models.stored import StoredWeights
from sage_fast.models.streamed import save_transformer
from tests.models.hunyuan15.oracle import tiny_transformer
from tests.tiny.checkpoints import build_pipeline, save_diffusers_layout, save_official_layout

ROOT = Path(__file__).resolve().parents[2]


def tensors_of(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("max_shard_size", ["10GB", "30KB"])
def test_the_files_are_those_of_save_pretrained(tmp_path: Path, max_shard_size: str, dtype: torch.dtype) -> None:
    transformer = tiny_transformer()
    weights = transformer.state_dict()
    looked_up: list[str] = []

    def read(name: str) -> Tensor:
        looked_up.append(name)
        return weights[name]

    save_transformer(transformer, read, tmp_path / "ours", dtype, max_shard_size=max_shard_size)
    transformer.to(dtype).save_pretrained(tmp_path / "theirs", max_shard_size=max_shard_size)
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    assert sorted(p.name for p in ours.iterdir()) == sorted(p.name for p in theirs.iterdir())
    assert len(list(ours.iterdir())) > 2 or max_shard_size == "10GB"
    for path in theirs.glob("*.json"):
        assert json.loads((ours / path.name).read_text()) == json.loads(path.read_text())
    for path in theirs.glob("*.safetensors"):
        mine, expected = load_file(ours / path.name), load_file(path)
        assert mine.keys() == expected.keys()
        assert all(torch.equal(mine[name], value) and mine[name].dtype == dtype for name, value in expected.items())
    assert sorted(looked_up) == sorted(weights)
    loaded = HunyuanVideo15Transformer3DModel.from_pretrained(ours, torch_dtype=dtype)
    assert all(torch.equal(p, weights[name].to(dtype)) for name, p in loaded.state_dict().items())


def test_tensors_begin_at_aligned_addresses(tmp_path: Path) -> None:
    """A file is mapped into memory; products at odd addresses are rounded differently."""
    transformer = tiny_transformer()
    save_transformer(transformer, transformer.state_dict().__getitem__, tmp_path, torch.float32)
    data = (tmp_path / "diffusion_pytorch_model.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    entries = json.loads(data[8 : 8 + length])
    assert entries.pop("__metadata__") == {"format": "pt"}
    starts = {name: 8 + length + entry["data_offsets"][0] for name, entry in entries.items()}
    sizes = {name: entry["data_offsets"][1] - entry["data_offsets"][0] for name, entry in entries.items()}
    assert sum(size % 64 == 0 for size in sizes.values()) > 10
    assert all(starts[name] % 64 == 0 for name, size in sizes.items() if size % 64 == 0)


def test_nothing_of_an_earlier_export_stays(tmp_path: Path) -> None:
    transformer = tiny_transformer()
    read = transformer.state_dict().__getitem__
    save_transformer(transformer, read, tmp_path, torch.float32, max_shard_size="30KB")
    save_transformer(transformer, read, tmp_path, torch.float32)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json", "diffusion_pytorch_model.safetensors"]


@pytest.mark.parametrize("layout", ["diffusers", "official"])
def test_public_weights_stay_on_disk(tmp_path: Path, layout: str) -> None:
    if layout == "diffusers":
        expected = save_diffusers_layout(tmp_path / "model").transformer.state_dict()
    else:
        pipeline = build_pipeline()
        save_official_layout(tmp_path / "model", pipeline, "480p_t2v")
        expected = pipeline.transformer.state_dict()
    transformer, weights = model_family("hunyuan15").open_transformer(
        ModelConfig(family="hunyuan15", path=str(tmp_path / "model"))
    )
    assert isinstance(weights, StoredWeights) and {p.device.type for p in transformer.parameters()} == {"meta"}
    assert set(weights) == set(expected) and len(weights) == len(expected)
    for name, value in expected.items():
        assert transformer.state_dict()[name].shape == value.shape
        torch.testing.assert_close(weights[name].float(), value.float(), rtol=0, atol=0)


CHILD = """
import re, sys
from pathlib import Path
import torch
from sage_fast.checkpoint import open_checkpoint
from sage_fast.models.streamed import save_transformer
from tests.models.hunyuan15.oracle import tiny_transformer
from tests.models.test_streamed import wide_transformer
def peak(): return int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) / 1024
folder = Path(sys.argv[1])
saved = open_checkpoint(folder / "checkpoints/update-000001").tensors["weights"]
with torch.device("meta"):
    transformer = wide_transformer()
small = tiny_transformer()
save_transformer(small, small.state_dict().__getitem__, folder / "small", torch.bfloat16)  # whatever loads itself late
before = peak()
save_transformer(transformer, saved.__getitem__, folder / "exported", torch.bfloat16, max_shard_size="10MB")
print(peak() - before)
"""


def wide_transformer() -> HunyuanVideo15Transformer3DModel:
    """34 M weights; the largest tensor is a ninth of them."""
    return tiny_transformer(num_attention_heads=4, attention_head_dim=64, num_layers=12)


@pytest.mark.slow
def test_an_export_takes_a_tensor_of_memory(tmp_path: Path) -> None:
    with torch.device("meta"):
        shapes = {name: t.shape for name, t in wide_transformer().state_dict().items()}
    generator = torch.Generator().manual_seed(0)
    weights = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    with CheckpointWriter(tmp_path / "checkpoints", keep_last=1) as saver:
        saver.save(1, CheckpointData(tensors={"weights": weights}, state={}))
    output = subprocess.run(
        [sys.executable, "-c", CHILD, str(tmp_path)],
        env=os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"},  # what is freed goes back to the system at once
        cwd=ROOT, capture_output=True, text=True, check=True, timeout=100,
    ).stdout  # fmt: skip
    sizes = [t.nbytes / 2**20 for t in weights.values()]
    assert max(sizes) < sum(sizes) / 8
    assert float(output) < 2.5 * max(sizes), "the tensor, and what of it is being read or rounded"
    exported = tensors_of(tmp_path / "exported")
    assert all(torch.equal(exported[name], value.bfloat16()) for name, value in weights.items())
