"""Composed captions, what `prompts check` says of a file, and rewriting with a tiny chat model."""

from pathlib import Path

import pytest

from sage_fast.commands.cli import main
from sage_fast.config.errors import ConfigError
from sage_fast.records import Prompt, word_count
from sage_fast.run.prompt_files import read_prompts
from sage_fast.tools import composer, rewriting

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = {"general_train": (512, 0, 0), "general_eval": (64, 1, 100_000)}


@pytest.mark.parametrize("name", SHIPPED)
def test_the_shipped_captions_are_what_the_command_composes(name: str, tmp_path: Path) -> None:
    count, seed, first = SHIPPED[name]
    words = [f"--count={count}", f"--seed={seed}", f"--first-index={first}", f"--output={tmp_path / 'out.csv'}"]
    if name == "general_eval":
        words.append(f"--without={ROOT / 'configs/prompts/general_train.csv'}")
    assert main(["prompts", "compose", *words]) == 0
    assert (tmp_path / "out.csv").read_bytes() == (ROOT / f"configs/prompts/{name}.csv").read_bytes()


def test_the_shipped_captions_fit_the_model() -> None:
    prompts = [p for name in SHIPPED for p in read_prompts(ROOT / f"configs/prompts/{name}.csv")]
    assert len({p.text for p in prompts}) == len(prompts) == 576
    assert all(60 <= word_count(p.text) <= 150 for p in prompts)
    assert sum("\u4e00" <= p.text[0] <= "\u9fff" for p in prompts) == 36
    assert sum('"' in p.text or "\u201c" in p.text for p in prompts) == 72


def test_every_scene_is_text() -> None:
    def leaves(node: object) -> list[object]:
        children = node.values() if isinstance(node, dict) else node if isinstance(node, list) else None
        return [node] if children is None else [leaf for child in children for leaf in leaves(child)]

    assert all(isinstance(leaf, str) and leaf for leaf in leaves(composer.scenes()))


def test_more_captions_than_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(composer, "_caption", lambda *_, **__: "always the same")
    with pytest.raises(ConfigError, match="count is 2"):
        composer.compose(2, 0)


@pytest.mark.parametrize(
    ("text", "words"),
    [("", 0), ("a red fox", 3), ("a fox - and an owl", 5), ("红狐狸", 2), ("一只 fox 在跑", 4)],
)
def test_words_of_a_prompt(text: str, words: int) -> None:
    assert word_count(text) == words


def test_a_short_file_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "short.txt"
    file.write_text('a red fox\na red fox\na sign reads "OPEN"\n一只红狐狸\n', encoding="utf-8")
    assert main(["prompts", "check", str(file)]) == 0
    told = capsys.readouterr().out
    assert "4 prompts, 3 to 4 words" in told
    assert "1 with Chinese, 1 with text in quotes" in told
    assert "1 repeated" in told and "Short for HunyuanVideo-1.5" in told
    assert main(["prompts", "check", str(ROOT / "configs/prompts/general_train.csv")]) == 0
    assert "Short" not in capsys.readouterr().out


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random chat model of transformers on disk."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("chat")
    letters = {chr(i): i - 31 for i in range(32, 127)} | {"<end>": 0}
    tokenizer = Tokenizer(models.BPE(vocab=letters, merges=[], unk_token="<end>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<end>")
    fast.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    fast.save_pretrained(folder)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=len(letters), max_position_embeddings=4096, eos_token_id=0, pad_token_id=0, **sizes)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def test_a_local_chat_model_rewrites(chat_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rewriting, "MAX_NEW_TOKENS", 8)
    rewriter = rewriting.Rewriter(str(chat_model), "cpu")
    once, again = (rewriter.rewrite([Prompt(text="a fox", index=3, seed=5)]) for _ in range(2))
    assert once == again and (once[0].index, once[0].seed) == (3, 5)


def test_a_lost_quotation_is_an_error(chat_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rewriter = rewriting.Rewriter(str(chat_model), "cpu")
    monkeypatch.setattr(rewriter.tokenizer, "decode", lambda *_, **__: "thinking</think> a  sign")
    assert rewriter.rewrite([Prompt(text="a sign", index=0)])[0].text == "a sign"
    with pytest.raises(ConfigError, match=r"left out 'OPEN' when it rewrote 'a sign \"OPEN\"'"):
        rewriter.rewrite([Prompt(text='a sign "OPEN"', index=0)])


def test_a_model_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "p.txt").write_text("a fox\n")
    words = ["prompts", "rewrite", str(tmp_path / "p.txt"), "--model", str(tmp_path / "none"), "--output", "out.csv"]
    assert main(words) == 2
    assert "--model" in capsys.readouterr().err
