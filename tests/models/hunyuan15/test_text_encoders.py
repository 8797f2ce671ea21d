"""The prompt encoder and its cache. What it computes is held against the stock pipeline
in tests/invariants.
"""

import json
import os
import signal
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import HunyuanVideo15Pipeline
from safetensors.torch import load_file, save_file

from sage_fast.config.sections import DistributedConfig
from sage_fast.distributed.start import start_world
from sage_fast.models.hunyuan15 import components as conditioning
from sage_fast.models.hunyuan15.components import HunyuanPromptEncoder
from sage_fast.records import PromptEmbeds
from tests.distributed.ranks import run_ranks, try_ranks
from tests.tiny.checkpoints import GLYPH_DIM, TEXT_DIM, copy_tree

QUOTING = 'a sign that says "open" and “late”'


def encoder_of(checkpoint: Path, cache: Path, **options: Any) -> HunyuanPromptEncoder:
    return HunyuanPromptEncoder(root=checkpoint, cache=cache, **options)


@pytest.fixture
def encoder(diffusers_checkpoint: Path, tmp_path: Path) -> HunyuanPromptEncoder:
    return encoder_of(diffusers_checkpoint, tmp_path / "cache")


def assert_same(one: PromptEmbeds, other: PromptEmbeds) -> None:
    assert torch.equal(one.text, other.text) and torch.equal(one.glyph, other.glyph)


def test_records_hold_the_valid_tokens_alone(
    encoder: HunyuanPromptEncoder, caplog: pytest.LogCaptureFixture
) -> None:
    short, longer, quoting, empty = encoder.encode(
        ["a cat", "a cat a cat", QUOTING, ""]
    )
    # After the user's text follow <|im_end|>, a newline, <|im_start|>, assistant, a
    # newline.
    assert empty.text.shape == (1 + 5, TEXT_DIM), (
        "the empty prompt is encoded as one space"
    )
    assert short.text.shape[1:] == longer.text.shape[1:] == (TEXT_DIM,)
    assert len(empty.text) < len(short.text) < len(longer.text) < 40, "no padding"
    assert quoting.glyph.shape == (len('Text "open". Text "late". ') + 1, GLYPH_DIM), (
        "a byte a token, and the end token"
    )
    for record in (short, longer, empty):
        assert record.glyph.shape == (0, GLYPH_DIM)
    assert all(
        t.dtype == torch.float32 and t.device.type == "cpu"
        for t in (short.text, short.glyph, quoting.glyph)
    )
    assert "The median prompt has 3 words" in caplog.text
    assert encoder.encode(["cat " * 1000])[0].text.shape == (1000, TEXT_DIM)
    assert "cut off after 1000 tokens" in caplog.text


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_without_padding_the_valid_tokens_are_those_of_the_padded_prompt(
    encoder: HunyuanPromptEncoder, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    """Attention is causal and the padding is on the right: to the last digit of
    float32, and within the rounding of bfloat16, whose matrices of another height some
    processors multiply in another order.
    """
    load = HunyuanPromptEncoder._load
    called = []
    monkeypatch.setattr(
        HunyuanPromptEncoder, "_load", lambda *arguments: load(*arguments).to(dtype)
    )
    padded = HunyuanVideo15Pipeline._get_mllm_prompt_embeds

    def spy(*arguments: Any, **options: Any) -> Any:
        called.append(padded(*arguments, **options)[0].shape[1])
        return padded(*arguments, **options)

    monkeypatch.setattr(HunyuanVideo15Pipeline, "_get_mllm_prompt_embeds", spy)
    texts = [
        "",
        "a cat",
        QUOTING,
        "A red fox runs through deep snow. " * 12,
        "cat " * 1000,
    ]
    model, tokenizer = encoder._load_text_encoder()
    bound = 1e-6 if dtype is torch.float32 else 1e-3
    for text, ours in zip(texts, encoder.encode(texts), strict=True):
        with torch.no_grad():
            (states,), (mask,) = padded(model, tokenizer, text, torch.device("cpu"))
        expected = states[mask.bool()]
        assert (ours.text - expected).norm() <= bound * expected.norm()
        assert called.pop(0) == len(ours.text) == len(expected), "nothing is padded"


def test_what_is_not_seen_is_said_of_new_and_of_cached_prompts(
    encoder: HunyuanPromptEncoder, caplog: pytest.LogCaptureFixture
) -> None:
    """A prompt that just fits is not among them."""
    fitting = "a" * (1000 - 5)
    long = f"long {fitting}"
    sign = f'a sign with a long text, "{"late " * 60}", {"and more " * 60}'
    whole = '"a cat in the snow"'
    inches = '24" screen and a 27" monitor'
    for _ in range(2):
        lengths = encoder.prepare(["", fitting, long, sign, whole, inches])
        assert [length[0] for length in lengths[1:3]] == [1000, 1000] and lengths[3][
            1
        ] == 256
        cut, glyphs, quoted = [
            r.getMessage() for r in caplog.records if r.levelname == "WARNING"
        ][-3:]
        assert cut.startswith(
            "1 of 6 prompts are cut off after 1000 tokens, of which the language "
            "model sees no more"
        )
        assert "'long aaa" in cut and " has 100" in cut
        assert glyphs.startswith(
            "1 of 6 prompts are cut off after 256 tokens, of which the glyph encoder"
        )
        assert "'a sign with" in glyphs and " has 31" in glyphs
        assert (
            quoted.startswith("2 of 6 prompts are mostly in quotation marks")
            and whole in quoted
        )
        caplog.clear()
    encoder.prepare(["", fitting, QUOTING])
    assert not [
        r
        for r in caplog.records
        if "cut off" in r.getMessage() or "quotation" in r.getMessage()
    ]


def test_order_repetition_and_other_prompts_do_not_matter(
    diffusers_checkpoint: Path, tmp_path: Path
) -> None:
    texts = ["a cat", QUOTING, "", "a dog", "a cat"]
    together = encoder_of(diffusers_checkpoint, tmp_path / "one").encode(texts)
    turned = encoder_of(diffusers_checkpoint, tmp_path / "two").encode(texts[::-1])
    (alone,) = encoder_of(diffusers_checkpoint, tmp_path / "three").encode(["a dog"])
    for one, other in zip(
        [*together, alone], [*reversed(turned), turned[1]], strict=True
    ):
        assert_same(one, other)
    assert len(list((tmp_path / "two").glob("*/*.safetensors"))) == 4


def test_encoders_are_loaded_once_and_released_and_not_needed_for_what_is_cached(
    encoder: HunyuanPromptEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[weakref.ref[Any]] = []
    load = HunyuanPromptEncoder._load

    def spy(*arguments: Any) -> Any:
        model = load(*arguments)
        loaded.append(weakref.ref(model))
        return model

    monkeypatch.setattr(HunyuanPromptEncoder, "_load", spy)
    first = encoder.encode(["a cat", QUOTING, ""])
    again = encoder_of(encoder.root, encoder.cache).encode(["a cat", QUOTING, ""])
    assert [reference() for reference in loaded] == [None, None]
    for one, other in zip(first, again, strict=True):
        assert_same(one, other)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-10])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-20] ^= 1
    path.write_bytes(bytes(content))


@pytest.mark.parametrize("damage", [cut, flip], ids=lambda f: f.__name__)
def test_a_damaged_entry_is_encoded_again(
    encoder: HunyuanPromptEncoder,
    damage: Callable[[Path], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    before = encoder.encode(["a cat", "a dog"])
    damage(encoder.path_of("a cat"))
    after = encoder.encode(["a cat", "a dog"])
    for one, other in zip(before, after, strict=True):
        torch.testing.assert_close(one.text, other.text)
    (warning,) = (r.getMessage() for r in caplog.records if r.levelname == "WARNING")
    assert str(encoder.path_of("a cat")) in warning
    caplog.clear()
    encoder.encode(["a cat"])
    assert not caplog.records


def test_the_key_depends_on_all_that_matters(
    encoder: HunyuanPromptEncoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = encoder.root
    key = encoder.path_of("a cat").name
    assert encoder.path_of("a cat ").name != key
    moved = copy_tree(checkpoint, tmp_path / "moved")
    assert encoder_of(moved, encoder.cache).path_of("a cat").name == key, (
        "a copy is the same model"
    )
    for part in ("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2"):
        changed = copy_tree(checkpoint, tmp_path / part)
        flip(max((changed / part).iterdir(), key=lambda p: p.stat().st_size))
        assert encoder_of(changed, encoder.cache).path_of("a cat").name != key, part
    monkeypatch.setitem(conditioning._TEMPLATE, "system_message", "Describe the video.")
    assert encoder_of(checkpoint, encoder.cache).path_of("a cat").name != key


def test_another_chat_template_is_refused_and_another_padding_side_does_not_matter(
    diffusers_checkpoint: Path, tmp_path: Path
) -> None:
    """The crop is by position: another prefix would cut into the prompt, and so would
    Qwen's padding on the left.
    """
    changed = copy_tree(diffusers_checkpoint, tmp_path / "changed")
    file = changed / "tokenizer" / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"padding_side": "left"}))
    expected = encoder_of(diffusers_checkpoint, tmp_path / "one").encode(["a cat"])
    assert_same(encoder_of(changed, tmp_path / "two").encode(["a cat"])[0], expected[0])
    template = changed / "tokenizer" / "chat_template.jinja"
    template.write_text("<|im_start|>" + template.read_text())
    with pytest.raises(
        ValueError, match="puts 109 tokens before the prompt.*trained with 108"
    ):
        encoder_of(changed, tmp_path / "cache").encode(["a cat"])


def test_weights_that_lack_a_tensor_are_refused(
    diffusers_checkpoint: Path, tmp_path: Path
) -> None:
    damaged = copy_tree(diffusers_checkpoint, tmp_path / "damaged")
    file = damaged / "text_encoder" / "model.safetensors"
    weights = load_file(file)
    del weights["layers.0.mlp.up_proj.weight"]
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(
        ValueError,
        match=r"text_encoder do not fit.*1 missing keys.*layers.0.mlp.up_proj.weight",
    ):
        encoder_of(damaged, tmp_path / "cache").encode(["a cat"])


@pytest.mark.parametrize(
    ("part", "change", "kind"),
    [
        ("text_encoder", {"num_hidden_layers": 1, "layer_types": None}, "unexpected"),
        ("text_encoder", {"intermediate_size": 24}, "mismatched"),
        ("text_encoder_2", {"num_layers": 1}, "unexpected"),
        ("text_encoder_2", {"d_ff": 24}, "mismatched"),
    ],
)
def test_a_configuration_of_another_encoder_is_refused(
    part: str,
    change: dict[str, Any],
    kind: str,
    diffusers_checkpoint: Path,
    tmp_path: Path,
) -> None:
    other = copy_tree(diffusers_checkpoint, tmp_path / "other")
    config = other / part / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | change))
    with pytest.raises(
        ValueError, match=rf"{part} do not fit its config.json: \d+ {kind} keys"
    ):
        encoder_of(other, tmp_path / "cache").encode(['a cat says "miau"'])
    if "layer_types" in change:
        config.write_text(
            json.dumps(
                json.loads(config.read_text()) | {"layer_types": ["full_attention"] * 4}
            )
        )
        with pytest.raises(
            ValueError,
            match=r"text_encoder/config.json contradicts itself: .*num_hidden_layers",
        ):
            encoder_of(other, tmp_path / "cache").encode(["a cat"])


def test_weights_of_another_model_beside_an_encoders_are_not_read(
    diffusers_checkpoint: Path, tmp_path: Path
) -> None:
    """Such as the head of a language model, or the decoder of a T5."""
    larger = copy_tree(diffusers_checkpoint, tmp_path / "larger")
    text = 'a cat says "miau"'
    beside = {
        "text_encoder": "lm_head.weight",
        "text_encoder_2": "decoder.block.0.layer.0.layer_norm.weight",
    }
    for part, name in beside.items():
        file = larger / part / "model.safetensors"
        save_file(
            load_file(file) | {name: torch.ones(3)}, file, metadata={"format": "pt"}
        )
    (plain,), (found,) = (
        encoder_of(folder, tmp_path / folder.name).encode([text])
        for folder in (diffusers_checkpoint, larger)
    )
    assert torch.equal(plain.text, found.text) and torch.equal(plain.glyph, found.glyph)


# --------------------------------------------------------------------------------------
# many prompts and ranks


def encode_on_a_rank(
    checkpoint: str, cache: str, texts: list[str], dies_after: int | None
) -> tuple[list[str], list[tuple[int, int]]]:
    """Texts that this rank has encoded, and the lengths it got. Rank 1 is killed when
    it has written some.
    """
    world = start_world(DistributedConfig(), "lora", torch.device("cpu"), {})
    encoder = encoder_of(Path(checkpoint), Path(cache))
    encoded = []
    write = encoder._write

    def observed(text: str, embeds: PromptEmbeds, count: tuple[int, int]) -> None:
        if world.rank == 1 and len(encoded) == dies_after:
            os.kill(os.getpid(), signal.SIGKILL)
        write(text, embeds, count)
        encoded.append(text)

    encoder._write = observed  # type: ignore[method-assign]
    conditioning.ROUND_SECONDS = 0.2
    return encoded, encoder.prepare(texts, world)


@pytest.mark.slow
def test_ranks_share_the_encoding_and_go_on_after_a_kill(
    diffusers_checkpoint: Path, tmp_path: Path
) -> None:
    texts = ["", *(f"a cat says {'“miau” ' * (n % 2)}{'and ' * n}" for n in range(9))]
    arguments = str(diffusers_checkpoint), str(tmp_path / "cache"), texts
    (first, _), (second, _) = try_ranks(encode_on_a_rank, 2, *arguments, 2)
    assert (first, second) == ("error", "gone")
    cached = {path.name for path in (tmp_path / "cache").glob("*/*.safetensors")}
    assert 2 <= len(cached) <= 7
    (one, lengths), (other, same) = run_ranks(encode_on_a_rank, 2, *arguments, None)
    encoder = encoder_of(diffusers_checkpoint, tmp_path / "cache")
    assert (
        one
        and other
        and len(one + other) == len({*one, *other}) == len(texts) - len(cached)
    )
    assert not cached & {encoder.path_of(text).name for text in one + other}
    alone = encoder_of(diffusers_checkpoint, tmp_path / "alone").encode(texts)
    assert lengths == same == [embeds.lengths[:2] for embeds in alone]
    for ours, expected in zip(encoder.encode(texts), alone, strict=True):
        assert_same(ours, expected)
