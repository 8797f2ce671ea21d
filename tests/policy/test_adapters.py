"""Adapters of others: every layout that people have is the model that was trained, or
an error of one line.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.loaders import HunyuanVideoLoraLoaderMixin
from diffusers.loaders.lora_base import LORA_ADAPTER_METADATA_KEY
from peft import LoraConfig, PeftModel, get_peft_model_state_dict
from safetensors.torch import save_file
from torch import Tensor

from sage_fast.models.hunyuan15.backbone import NAMES, HunyuanTransformer, velocity
from sage_fast.policy.adapters import load_adapter, use_adapter, weights_digest
from sage_fast.policy.layouts import adapter_files, read_adapter
from sage_fast.policy.lora import ADAPTER_FILE, add_lora
from tests.models.hunyuan15.oracle import latents, prompt, tiny_transformer

Tensors = dict[str, Tensor]


def probe(transformer: Any) -> Tensor:
    with torch.no_grad():
        return velocity(transformer, latents(1), torch.tensor([0.7]), [prompt(5, 3)])


class Trained:
    """A model with adapters of rank 2 and alpha 4 on every kind of layer; all of them
    matter.
    """

    def __init__(self, **fields: Any) -> None:
        self.transformer = tiny_transformer(layers=2)
        targets = [
            f"transformer_blocks.{i}.{layer}" for i in range(2) for layer in NAMES
        ]
        self.config = LoraConfig(
            **{"r": 2, "lora_alpha": 4, "target_modules": targets} | fields
        )
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(0)
            self.transformer.add_adapter(self.config)
            self.transformer.eval()
            for name, parameter in self.transformer.named_parameters():
                if ".lora_B." in name:
                    parameter.normal_(0, 0.2)
        self.weights: Tensors = get_peft_model_state_dict(self.transformer)
        self.expected = probe(self.transformer)


@pytest.fixture(scope="module")
def plain() -> Trained:
    return Trained()


def described(trained: Trained, prefix: str = "") -> dict[str, str]:
    fields = {
        prefix + key: sorted(v) if isinstance(v, set) else v
        for key, v in trained.config.to_dict().items()
    }
    return {LORA_ADAPTER_METADATA_KEY: json.dumps(fields)}


def save_by_diffusers(trained: Trained, folder: Path) -> None:
    trained.transformer.save_lora_adapter(folder, weight_name=ADAPTER_FILE)


def save_by_a_pipeline(trained: Trained, folder: Path) -> None:
    HunyuanVideoLoraLoaderMixin.save_lora_weights(
        folder,
        trained.weights,
        transformer_lora_adapter_metadata=trained.config.to_dict(),
    )


def save_by_peft(trained: Trained, folder: Path) -> None:
    model = PeftModel(tiny_transformer(layers=2), trained.config)
    model.load_state_dict(
        {
            f"base_model.model.{k}".replace(".weight", ".default.weight"): v
            for k, v in trained.weights.items()
        },
        strict=False,
    )
    model.save_pretrained(folder)


def renamed(
    trained: Trained, rename: Callable[[str, str], str], alpha: float | None
) -> Tensors:
    """Tensors by other names, of (block's number, layer in diffusers); with or without
    a key for alpha.
    """
    scale = 1.0 if alpha else 2.0
    found: Tensors = {}
    for key, value in trained.weights.items():
        _, number, rest = key.split(".", 2)
        layer, half, _ = rest.rsplit(".", 2)
        name = rename(number, layer)
        word = {"lora_A": "lora_down", "lora_B": "lora_up"}[half] if alpha else half
        found[f"{name}.{word}.weight"] = value * (scale if half == "lora_B" else 1)
        if alpha:
            found[f"{name}.alpha"] = torch.tensor(alpha)
    return found


def joined(tensors: Tensors) -> Tensors:
    """q, k and v in one layer, as musubi-tuner's script and ComfyUI's trainers have
    them.
    """
    down = "lora_A"
    up = "lora_B"
    if any("lora_down" in key for key in tensors):
        down = "lora_down"
        up = "lora_up"
    found = dict(tensors)
    for key in tensors:
        if match := re.fullmatch(rf"(.+(?:img|txt)_attn[_.])q\.{down}\.weight", key):
            downs, ups = (
                [found.pop(f"{match[1]}{p}.{half}.weight") for p in "qkv"]
                for half in (down, up)
            )
            found |= {
                f"{match[1]}qkv.{down}.weight": torch.cat(downs),
                f"{match[1]}qkv.{up}.weight": torch.block_diag(*ups),
            }
            for part in "qkv":
                alpha = found.pop(f"{match[1]}{part}.alpha", None)
                if alpha is not None:
                    found[f"{match[1]}qkv.alpha"] = 3 * alpha
    return found


def official(number: str, layer: str) -> str:
    return f"double_blocks.{number}.{NAMES[layer][0]}"


def comfyui(number: str, layer: str) -> str:
    name = (
        official(number, layer)
        .replace("attn_", "attn.")
        .replace("mod.linear", "mod.lin")
    )
    return "diffusion_model." + name.replace("mlp.fc1", "mlp.0").replace(
        "mlp.fc2", "mlp.2"
    )


def musubi(number: str, layer: str) -> str:
    return "lora_unet_" + official(number, layer).replace(".", "_")


def musubi_to_comfyui(number: str, layer: str) -> str:
    return "lora_unet_" + comfyui(number, layer).removeprefix(
        "diffusion_model."
    ).replace(".", "_")


SAVED: dict[str, Callable[[Trained, Path], object]] = {
    "diffusers": save_by_diffusers,
    "pipeline": save_by_a_pipeline,
    "peft": save_by_peft,
    "official": lambda t, f: save_file(renamed(t, official, None), f / "a.safetensors"),
    "comfyui": lambda t, f: save_file(
        joined(renamed(t, comfyui, None)), f / "a.safetensors"
    ),
    "musubi": lambda t, f: save_file(renamed(t, musubi, 4.0), f / "a.safetensors"),
    "musubi-comfyui": lambda t, f: save_file(
        joined(renamed(t, musubi_to_comfyui, 4.0)), f / "a.safetensors"
    ),
    "peft-file": lambda t, f: save_file(
        {f"base_model.model.{k}": v for k, v in t.weights.items()},
        f / "a.safetensors",
        metadata=described(t),
    ),
}


@pytest.mark.parametrize("layout", SAVED)
def test_every_layout_is_the_model_that_was_trained(
    plain: Trained, tmp_path: Path, layout: str
) -> None:
    SAVED[layout](plain, tmp_path)
    used = tiny_transformer(layers=2)
    started = tiny_transformer(layers=2)
    assert (probe(used) - plain.expected).abs().max() > 0.1, "the adapter does nothing"
    use_adapter(used, tmp_path)
    torch.testing.assert_close(probe(used), plain.expected, rtol=1e-5, atol=1e-5)
    add_lora(started, rank=2, alpha=3, target_modules=list(NAMES), seed=5)
    load_adapter(started, tmp_path)
    torch.testing.assert_close(probe(started), plain.expected, rtol=1e-5, atol=1e-5)


ALL_RULES = {
    "rank_pattern": {"to_k": 3},
    "alpha_pattern": {"add_v_proj": 9},
    "use_rslora": True,
}


@pytest.mark.parametrize(
    ("fields", "save"),
    [
        (ALL_RULES, save_by_a_pipeline),
        (
            {"alpha_pattern": {"attn.to_q": 7, "^transformer_blocks.1.ff.net.2": 1}},
            save_by_peft,
        ),
        ({"init_lora_weights": "gaussian", "lora_dropout": 0.1}, save_by_peft),
    ],
)
def test_every_layer_has_its_own_scale(
    tmp_path: Path, fields: dict[str, Any], save: Callable[..., object]
) -> None:
    trained = Trained(**fields)
    used = tiny_transformer(layers=2)
    save(trained, tmp_path)
    use_adapter(used, tmp_path)
    torch.testing.assert_close(probe(used), trained.expected, rtol=1e-5, atol=1e-5)


def test_a_joined_layer_of_one_rank_is_split_by_rows(
    plain: Trained, tmp_path: Path
) -> None:
    """As ComfyUI's own trainers write it: q, k and v share lora_A."""
    a = torch.randn(2, 32)
    b = torch.randn(96, 2)
    name = "diffusion_model.double_blocks.0.img_attn.qkv"
    save_file(
        {f"{name}.lora_A.weight": a, f"{name}.lora_B.weight": b},
        tmp_path / "a.safetensors",
    )
    pairs = read_adapter(tmp_path, HunyuanTransformer)
    assert [*pairs] == [f"transformer_blocks.0.attn.to_{part}" for part in "qkv"]
    torch.testing.assert_close(
        torch.cat([pair.b @ pair.a for pair in pairs.values()]), b @ a
    )


FIRST = "transformer_blocks.0.attn.to_q"


def field(**fields: Any) -> Callable[[Tensors, dict[str, Any]], None]:
    return lambda tensors, config: config.update(fields)


def extra(name: str, *shape: int) -> Callable[[Tensors, dict[str, Any]], None]:
    return lambda tensors, config: tensors.update({name: torch.ones(shape)})


def filled(name: str, value: float) -> Callable[[Tensors, dict[str, Any]], None]:
    """One number of a tensor that is there."""
    return lambda tensors, config: tensors.update(
        {name: tensors[name].clone().index_fill_(0, torch.tensor(1), value)}
    )


def alpha(*values: float) -> Callable[[Tensors, dict[str, Any]], None]:
    """A key of one layer beside a file without a description."""
    number = torch.tensor(values if len(values) > 1 else values[0])
    return lambda tensors, config: (
        tensors.update({f"{FIRST}.alpha": number}) or config.clear()
    )


REFUSED: dict[str, tuple[Callable[[Tensors, dict[str, Any]], object], str]] = {
    "no-b": (lambda t, c: t.pop(f"{FIRST}.lora_B.weight"), rf"'{FIRST}' has no lora_B"),
    "only-alpha": (extra("double_blocks.0.img_attn_q.alpha"), "has no lora_A"),
    "ranks": (extra(f"{FIRST}.lora_B.weight", 32, 3), r"\(2, 32\) and lora_B of shape \(32, 3\)"),
    "other-rank": (field(r=3), "says rank 3"),
    "no-pattern": (field(alpha_pattern={"(": 3}), "unterminated subpattern"),
    "dora": (field(use_dora=True), "use_dora = True, which is not understood"),
    "bias": (field(bias="all"), "bias = 'all'"),
    "bias-key": (extra(f"{FIRST}.lora_B.bias", 32), "not a part"),
    "pissa": (field(init_lora_weights="pissa_niter_4"), "init_lora_weights = 'pissa_niter_4'"),
    "unknown": (field(lora_gamma=0), "lora_gamma = 0"),
    "encoder": (field(**{"text_encoder.r": 2}), r"text_encoder\.r"),
    "no-rows": (lambda t, c: t.update({f"{FIRST}.lora_A.weight": torch.ones(0, 32),
                                       f"{FIRST}.lora_B.weight": torch.ones(32, 0)}), r"\(0, 32\)"),
    "no-number": (field(lora_alpha=None), "is not a number"),
    "difference": (extra("diffusion_model.double_blocks.0.img_attn.qkv.diff", 2, 2), "not a part .*Merge it"),
    "te": (extra("lora_te1_layers_0.lora_down.weight", 2, 2), "of a text encoder"),
    "stranger": (extra("iteration", 1), "'iteration' is not a part"),
    "twice": (extra(f"transformer.{FIRST}.lora_A.weight", 2, 32), "two different A"),
    "two-names": (lambda t, c: [t.update({f"double_blocks.0.img_attn_q.{h}.weight": t[f"{FIRST}.{h}.weight"].clone()})
                                for h in ("lora_A", "lora_B")] and c.clear(), f"two adapters of {FIRST}"),
    "two-scales": (extra(f"{FIRST}.alpha"), "two scales"),
    "empty": (lambda t, c: t.clear(), "is empty"),
    "nan": (filled(f"{FIRST}.lora_A.weight", torch.nan), rf"'{FIRST}.lora_A.weight' holds nan"),
    "beyond-float16": (filled(f"{FIRST}.lora_A.weight", 65536), "holds 65536"),
    "alpha-zero": (alpha(0), rf"the scale of '{FIRST}', alpha / rank, is 0"),
    "alpha-two": (alpha(2, 3), "element"),
    "peft-alpha-zero": (field(alpha_pattern={"to_q": 0}), "alpha / rank, is 0"),
    "peft-alpha-infinite": (field(lora_alpha=torch.inf), "alpha / rank, is inf"),
}  # fmt: skip


@pytest.mark.parametrize("fault", REFUSED)
def test_what_is_not_understood_is_one_line(
    plain: Trained, tmp_path: Path, fault: str
) -> None:
    change, message = REFUSED[fault]
    tensors = dict(plain.weights)
    config = json.loads(described(plain)[LORA_ADAPTER_METADATA_KEY])
    change(tensors, config)
    save_file(
        tensors,
        tmp_path / "a.safetensors",
        metadata={LORA_ADAPTER_METADATA_KEY: json.dumps(config)},
    )
    with pytest.raises(ValueError, match=message) as error:
        read_adapter(tmp_path, HunyuanTransformer)
    assert "\n" not in str(error.value) and str(tmp_path) in str(error.value)


def test_a_scale_may_be_negative_and_alpha_a_whole_number(
    plain: Trained, tmp_path: Path
) -> None:
    for number, scale in (
        (torch.tensor(4), 2.0),
        (torch.tensor(-1.0), -0.5),
        (torch.tensor([4.0]).half(), 2.0),
    ):
        save_file(
            {**plain.weights, f"{FIRST}.alpha": number}, tmp_path / "a.safetensors"
        )
        pairs = read_adapter(tmp_path, HunyuanTransformer)
        assert pairs[FIRST].scale == scale


def test_what_is_beside_the_matrices_and_zero_changes_nothing(
    plain: Trained, tmp_path: Path
) -> None:
    zeros = {
        "img_attn_q.diff_b": (32,),
        "img_attn_q_norm.diff": (8,),
        "diff_m": (1, 6, 2),
        "img_attn_q.lora_B.bias": (32,),
    }
    tensors = {
        f"double_blocks.0.{name}": torch.zeros(shape) for name, shape in zeros.items()
    }
    save_file(renamed(plain, official, None) | tensors, tmp_path / "a.safetensors")
    used = tiny_transformer(layers=2)
    use_adapter(used, tmp_path)
    torch.testing.assert_close(probe(used), plain.expected, rtol=1e-5, atol=1e-5)


def test_quantised_matrices_are_refused(plain: Trained, tmp_path: Path) -> None:
    save_file(
        {name: value.to(torch.int8) for name, value in plain.weights.items()},
        tmp_path / "a.safetensors",
    )
    with pytest.raises(
        ValueError, match=r"a.safetensors is quantised: .*lora_A.weight is stored as"
    ):
        read_adapter(tmp_path, HunyuanTransformer)


@pytest.mark.parametrize(
    ("architecture", "base", "refused"),
    [
        ("hunyuan-video-1.5/lora", "hunyuan_video_1_5", False),
        ("", "hv15", False),
        ("hunyuan-video/lora", "", True),
        ("hunyuan-video-1.5/lora", "wan", True),
    ],
)
def test_the_model_that_metadata_names_is_this_one(
    plain: Trained, tmp_path: Path, architecture: str, base: str, refused: bool
) -> None:
    named = {"modelspec.architecture": architecture, "ss_base_model_version": base}
    save_file(renamed(plain, official, 4.0), tmp_path / "a.safetensors", metadata=named)
    if not refused:
        assert read_adapter(tmp_path, HunyuanTransformer)
        return
    with pytest.raises(ValueError, match="its metadata has .*, which is another model"):
        read_adapter(tmp_path, HunyuanTransformer)


def save_pickled(trained: Trained, file: Path) -> None:
    torch.save(trained.weights, file.with_suffix(".bin"))


def save_alpha_that_nobody_reads(trained: Trained, file: Path) -> None:
    save_file(trained.weights, file, metadata={"alpha": "4", "rank": "2"})


def save_without_description(trained: Trained, file: Path) -> None:
    save_file({f"base_model.model.{k}": v for k, v in trained.weights.items()}, file)


def save_two(trained: Trained, file: Path) -> None:
    for name in ("a", "b"):
        save_file(trained.weights, file.with_stem(name))


@pytest.mark.parametrize(
    ("save", "message"),
    [
        (
            save_pickled,
            "ends in '.bin', and adapters are read from .safetensors alone.*Convert it",
        ),
        (lambda trained, file: file.write_bytes(b"no header"), "damaged or was not"),
        (save_alpha_that_nobody_reads, "alpha = 4 for rank 2.*Give each layer a key"),
        (save_without_description, "adapter_config.json, which is not beside it"),
        (save_two, r"2 files of adapters \(a\.safetensors, b\.safetensors\)"),
    ],
)
def test_a_folder_without_an_adapter_says_what_it_has(
    plain: Trained,
    tmp_path: Path,
    save: Callable[[Trained, Path], object],
    message: str,
) -> None:
    save(plain, tmp_path / "a.safetensors")
    with pytest.raises(ValueError, match=message):
        read_adapter(tmp_path, HunyuanTransformer)


def test_a_scale_beside_the_weights_is_part_of_the_digest(
    plain: Trained, tmp_path: Path
) -> None:
    save_by_peft(plain, tmp_path)
    before = weights_digest(tmp_path)
    assert weights_digest(adapter_files(tmp_path)[0]) == before
    config = tmp_path / "adapter_config.json"
    config.write_text(config.read_text().replace('"lora_alpha": 4', '"lora_alpha": 8'))
    assert weights_digest(tmp_path) != before
    assert read_adapter(tmp_path, HunyuanTransformer)[FIRST].scale == 4.0


def test_an_adapter_of_other_layers_says_which_keys_to_set(
    plain: Trained, tmp_path: Path
) -> None:
    save_by_peft(plain, tmp_path)
    transformer = tiny_transformer(layers=2)
    add_lora(transformer, rank=2, alpha=None, target_modules=None, seed=0)
    with pytest.raises(
        ValueError, match=r"model\.adapter.*Set lora\.rank and lora\.target_modules"
    ):
        load_adapter(transformer, tmp_path)
