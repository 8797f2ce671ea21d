"""Weights that are read after the transformer has been sharded: the same numbers, in
memory once per node.
"""

import hashlib
import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from diffusers import HunyuanVideo15Transformer3DModel
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from sage_fast.config.load import load_config
from sage_fast.config.sections import ModelConfig
from sage_fast.models.family import load_components, model_family, open_components
from sage_fast.models.stored import StoredWeights
from sage_fast.models.toy.components import ASSETS, WEIGHTS_NAME
from sage_fast.policy.lora import add_lora, base_digest
from sage_fast.run.run import build_trainer
from tests.distributed.ranks import join, peak_bytes, run_ranks, try_ranks
from tests.models.runs import run_file
from tests.tiny.checkpoints import copy_tree

WIDE = {
    "num_attention_heads": 8,
    "attention_head_dim": 128,
    "rope_axes_dim": [16, 56, 56],
    "num_layers": 3,
}
"""Entries of a tiny transformer's configuration with which its float32 weights take
half a GB.
"""


def write_wide_model(tiny: Path, folder: Path) -> Path:
    """A tiny checkpoint with a transformer of half a GB, in files of up to 150 MB."""
    copy_tree(tiny, folder)
    config = folder / "transformer" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | WIDE))
    transformer = HunyuanVideo15Transformer3DModel.from_config(
        HunyuanVideo15Transformer3DModel.load_config(folder / "transformer")
    )
    shutil.rmtree(folder / "transformer")
    transformer.save_pretrained(folder / "transformer", max_shard_size="150MB")
    return folder


def write_run(model: Path, folder: Path) -> str:
    """A LoRA run whose frozen weights are in shards."""
    folder.mkdir()
    return run_file(
        folder,
        data={"prompts": ["a cat", "a dog"]},
        model={"family": "hunyuan15", "path": str(model)},
        video={"num_frames": 5, "height": 16, "width": 32},
    )


def weights_digest(weights: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(weights):
        digest.update(
            name.encode()
            + weights[name].detach().contiguous().view(torch.uint8).numpy().tobytes()
        )
    return digest.hexdigest()


def load(small: str, large: str, words: list[str]) -> tuple[int, str]:
    """By how many bytes building the trainer of `large` raised this rank's resident
    memory at most, and a digest of the base weights that it then has. A trainer of
    `small` has imported and joined everything before.
    """
    config = load_config(small, words)
    world = join(config)
    build_trainer(config, world)
    before = peak_bytes(anew=True)
    trainer = build_trainer(load_config(large, words), world)
    peak = peak_bytes() - before
    named = [
        (n, p)
        for n, p in trainer.policy.transformer.named_parameters()
        if ".lora_" not in n
    ]
    whole = {
        # collective
        n.replace(".base_layer", ""): p.full_tensor() if isinstance(p, DTensor) else p
        for n, p in named
    }
    return peak, weights_digest(whole)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "keep"), [(4, "rollout"), (1, "auto")], ids=["shards", "whole"]
)
def test_a_node_holds_the_weights_once_while_it_loads_them(
    ranks: int, keep: str, diffusers_checkpoint: Path, tmp_path: Path
) -> None:
    """The sum of what each rank's resident memory, mapped files included, rises by at
    its own peak.
    """
    small = write_run(diffusers_checkpoint, tmp_path / "small")
    model = write_wide_model(diffusers_checkpoint, tmp_path / "model")
    large = write_run(model, tmp_path / "large")
    words = [
        f"--distributed.dp_shard={ranks}",
        f"--distributed.keep_gathered={keep}",
        "--rollout.micro_batch_size=2",
    ]
    results = run_ranks(load, ranks, small, large, words)
    stored = StoredWeights(model / "transformer")
    size = sum(weight.nbytes for weight in stored.values())
    assert (
        0.5e9 < size < 0.55e9
        and len(list((model / "transformer").glob("*.safetensors"))) > 3
    )
    assert {digest for _, digest in results} == {weights_digest(stored)}
    peaks = [peak for peak, _ in results]
    assert 0.9 * size < sum(peaks) < 1.65 * size, peaks


FROZEN_SHARDS = ["--distributed.dp_shard=2", "--distributed.keep_gathered=rollout"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        (
            3,
            [
                "--training.mode=full",
                "--distributed.dp_shard=3",
                "--rollout.batch_size=2",
            ],
        ),
        (2, [*FROZEN_SHARDS, "--model.adaln=offload"]),
        (2, ["--distributed.dp_replicate=2", "--model.adaln=offload"]),
    ],
    ids=["uneven", "offload", "whole"],
)
def test_all_ranks_have_the_weights_of_the_files(
    ranks: int, words: list[str], diffusers_checkpoint: Path, tmp_path: Path
) -> None:
    run = write_run(diffusers_checkpoint, tmp_path / "run")
    results = run_ranks(load, ranks, run, run, [*words, "--rollout.micro_batch_size=2"])
    expected = weights_digest(StoredWeights(diffusers_checkpoint / "transformer"))
    assert [digest for _, digest in results] == [expected] * ranks


@pytest.mark.slow
def test_every_rank_names_a_damaged_file(
    diffusers_checkpoint: Path, tmp_path: Path
) -> None:
    model = copy_tree(diffusers_checkpoint, tmp_path / "model")
    transformer = HunyuanVideo15Transformer3DModel.from_pretrained(
        model / "transformer"
    )
    shutil.rmtree(model / "transformer")
    transformer.save_pretrained(model / "transformer", max_shard_size="90KB")
    *_, damaged = sorted((model / "transformer").glob("*-of-*.safetensors"))
    damaged.write_bytes(damaged.read_bytes()[:-10])
    run = write_run(model, tmp_path / "run")
    for kind, text in try_ranks(
        load,
        2,
        run,
        run,
        ["--distributed.dp_shard=2", "--distributed.keep_gathered=rollout"],
    ):
        assert kind == "error" and f"{damaged} is damaged" in text


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_are_those_of_from_pretrained(
    diffusers_checkpoint: Path, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under adapters too, which stay as they are; the digest of a model does not depend
    on whether it was read. In the data type from the first byte: a float32 copy of 8.3
    B parameters would be 33 GB.
    """
    monkeypatch.setattr(
        HunyuanVideo15Transformer3DModel,
        "to",
        lambda self, *a, **k: pytest.fail("cast after loading"),
    )
    model = ModelConfig(family="hunyuan15", path=str(diffusers_checkpoint), dtype=dtype)
    components = open_components(model)
    transformer = components.transformer
    weights = components.weights
    assert weights is not None and transformer.dtype == getattr(torch, dtype)
    digest = base_digest(transformer, weights)
    adapter = {"rank": 2, "alpha": None, "target_modules": ["attn.to_q"], "seed": 3}
    add_lora(transformer, **adapter)
    weights.read_into(transformer)
    monkeypatch.undo()
    expected = type(transformer).from_pretrained(
        diffusers_checkpoint / "transformer", torch_dtype=getattr(torch, dtype)
    )
    assert digest == base_digest(transformer) == base_digest(expected)
    add_lora(expected, **adapter)
    given = transformer.state_dict()
    wanted = expected.state_dict()
    assert given.keys() == wanted.keys() and all(
        torch.equal(given[n], wanted[n]) for n in wanted
    )
    assert (
        transformer.state_dict()["transformer_blocks.0.attn.to_q.lora_A.default.weight"]
        .abs()
        .sum()
        > 0
    )


def test_files_that_the_index_does_not_name_are_left_alone(
    diffusers_checkpoint: Path, tmp_path: Path
) -> None:
    """A repository may hold the weights in several precisions."""
    model = copy_tree(diffusers_checkpoint, tmp_path / "model")
    file = model / "transformer" / "diffusion_pytorch_model.safetensors"
    with safe_open(file, framework="pt") as opened:
        name = opened.keys()[0]
    (file.parent / "diffusion_pytorch_model.fp16.safetensors").write_bytes(
        file.read_bytes()[:100]
    )
    loaded = load_components(
        ModelConfig(family="hunyuan15", path=str(model))
    ).transformer
    assert torch.equal(loaded.state_dict()[name], StoredWeights(file.parent)[name])


def store(file: Path, dtype: torch.dtype) -> None:
    """Store the matrices of a file in another type, as programs do that quantise them."""
    weights = load_file(file)
    save_file(
        {n: v.to(dtype) if v.ndim == 2 else v for n, v in weights.items()},
        file,
        metadata={"format": "pt"},
    )


@pytest.mark.parametrize(
    ("part", "dtype", "name"),
    [
        ("transformer", torch.float8_e4m3fn, "F8_E4M3"),
        ("vae", torch.float8_e5m2, "F8_E5M2"),
        ("text_encoder", torch.int8, "I8"),
        ("text_encoder_2", torch.uint8, "U8"),  # two numbers of 4 bits
        ("transformer", torch.int32, "I32"),  # eight of them
    ],
)
def test_quantised_weights_are_refused_before_anything_is_loaded(
    part: str, dtype: torch.dtype, name: str, diffusers_checkpoint: Path, tmp_path: Path
) -> None:
    model = copy_tree(diffusers_checkpoint, tmp_path / "model")
    (file,) = (model / part).glob("*.safetensors")
    # The tiny autoencoder has no matrices.
    save_file(
        load_file(file) | {"a.weight": torch.ones(2, 2)},
        file,
        metadata={"format": "pt"},
    )
    store(file, dtype)
    section = ModelConfig(family="hunyuan15", path=str(model))
    for use in (open_components, model_family("hunyuan15").inspect):
        with pytest.raises(
            ValueError,
            match=rf"{file} is quantised: .* stored as {name}.*bfloat16.*hf download",
        ):
            use(section)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_types_of_numbers_are_read(
    dtype: torch.dtype, diffusers_checkpoint: Path, tmp_path: Path
) -> None:
    model = copy_tree(diffusers_checkpoint, tmp_path / "model")
    file = model / "transformer" / "diffusion_pytorch_model.safetensors"
    store(file, dtype)
    loaded = load_components(
        ModelConfig(family="hunyuan15", path=str(model))
    ).transformer.state_dict()
    assert all(
        torch.equal(loaded[name], value.float())
        for name, value in load_file(file).items()
    )


def test_a_folder_of_plain_files_is_no_exception(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(ASSETS, tmp_path / "toy"))
    store(folder / WEIGHTS_NAME, torch.int8)
    with pytest.raises(ValueError, match=r"is quantised: .* stored as I8"):
        load_components(ModelConfig(family="toy", path=str(folder)))
