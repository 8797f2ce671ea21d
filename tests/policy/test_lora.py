"""The adapter's file is the one that diffusers writes, and can be written later."""

import json
from pathlib import Path

import torch
from diffusers.loaders.lora_base import LORA_ADAPTER_METADATA_KEY
from safetensors import safe_open
from safetensors.torch import load_file

from sage_fast.policy.lora import (
    ADAPTER_FILE,
    add_lora,
    base_digest,
    copy_lora,
    trainable_parameters,
)
from tests.models.hunyuan15.oracle import tiny_transformer


def test_an_adapter_is_written_as_diffusers_writes_it_and_as_it_was(
    tmp_path: Path,
) -> None:
    transformer = tiny_transformer()
    add_lora(
        transformer, rank=3, alpha=5, target_modules=["attn.to_q", "ff.net.2"], seed=0
    )
    parameters = trainable_parameters(transformer)
    with torch.no_grad():
        for number, parameter in enumerate(parameters.values()):
            parameter.fill_(number + 1)
    transformer.save_lora_adapter(tmp_path / "theirs", weight_name=ADAPTER_FILE)
    write = copy_lora(transformer, tmp_path / "ours")
    with torch.no_grad():
        for parameter in parameters.values():
            parameter.zero_()
    write()
    expected, found = (
        load_file(tmp_path / folder / ADAPTER_FILE) for folder in ("theirs", "ours")
    )
    assert len(expected) == len(parameters) and found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert described(tmp_path / "ours") == described(tmp_path / "theirs")


def described(folder: Path) -> dict[str, object]:
    """The adapter's configuration as diffusers reads it: rank, alpha and layers,
    whatever their order.
    """
    with safe_open(folder / ADAPTER_FILE, framework="pt") as file:
        metadata = dict(file.metadata())
    config = json.loads(metadata.pop(LORA_ADAPTER_METADATA_KEY))
    assert metadata == {"format": "pt"}
    return config | {"target_modules": sorted(config["target_modules"])}


def test_adapters_alone_train_in_float32_scaled_by_alpha_and_leave_the_base_as_it_was() -> (
    None
):
    transformer = tiny_transformer().bfloat16()
    before = base_digest(transformer, None)
    add_lora(transformer, rank=2, alpha=6, target_modules=["attn.to_q"], seed=0)
    trained = {
        name: p.dtype for name, p in transformer.named_parameters() if p.requires_grad
    }
    assert (
        trained
        and all(".lora_" in name for name in trained)
        and set(trained.values()) == {torch.float32}
    )
    assert transformer.transformer_blocks[0].attn.to_q.scaling["default"] == 3.0
    assert base_digest(transformer, None) == before
