"""A run directory from elsewhere runs no code of its own unless the user says so."""

import shutil
import sys
from pathlib import Path

import pytest

from sage_fast import open_run
from sage_fast.commands.cli import main, parse
from sage_fast.commands.common import load_run_config
from sage_fast.config.errors import ConfigError
from sage_fast.config.load import check_trust, load_config, named_code
from sage_fast.config.registry import PARTS
from sage_fast.tools.exporting import export


@pytest.fixture
def foreign_run(
    finished_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """A run whose configuration names a reward of a module that must not be imported."""
    (tmp_path / "downloaded_code.py").write_text("raise SystemExit('this has run')")
    monkeypatch.syspath_prepend(tmp_path)
    run = shutil.copytree(finished_run, tmp_path / "downloaded")
    file = run / "config.yaml"
    text = file.read_text().replace(
        "  rewards:\n  - toy\n", "  rewards:\n  - downloaded_code:score\n"
    )
    assert "downloaded_code" in text
    file.write_text(text)
    return run


@pytest.mark.parametrize("command", ["evaluate", "plan", "doctor", "profile", "train"])
def test_code_that_a_run_directory_names_is_not_imported(
    command: str, foreign_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = (
        [f"--output_dir={tmp_path / 'out'}"]
        if command in ("evaluate", "profile")
        else []
    )
    assert main([command, str(foreign_run), *output]) == 2
    errors = capsys.readouterr().err
    assert (
        "'downloaded_code:score' under reward.rewards" in errors
        and "--trust-config" in errors
    )
    assert "downloaded_code" not in sys.modules and not (tmp_path / "out").exists()


def test_trust_is_given_by_the_option_or_by_naming_the_code(
    foreign_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text("reward: {rewards: ['downloaded_code:score']}\n")
    for words in (
        ["--trust-config"],
        ["--reward.rewards=['downloaded_code:score']"],
        ["--reward.rewards", "[downloaded_code:score]"],
        ["--reward={rewards: ['downloaded_code:score']}"],
        [str(mine)],
    ):
        assert (
            main(
                [
                    "evaluate",
                    str(foreign_run),
                    f"--output_dir={tmp_path / 'out'}",
                    *words,
                ]
            )
            == 2
        )
        assert "SystemExit: this has run" in capsys.readouterr().err, words
    options, overrides = parse(
        ["train", str(foreign_run), "--reward.rewards+=other:score"]
    )
    with pytest.raises(ConfigError, match="names 'downloaded_code:score'"):
        load_run_config(options, overrides)


def test_a_file_that_the_user_names_is_trusted_and_videos_need_no_reward(
    foreign_run: Path, tmp_path: Path
) -> None:
    options, overrides = parse(["train", str(foreign_run / "config.yaml")])
    assert load_run_config(options, overrides).reward.rewards == [
        "downloaded_code:score"
    ]
    prompts = tmp_path / "one.txt"
    prompts.write_text("a red circle moving left\n")
    assert (
        main(
            [
                "generate",
                str(foreign_run),
                f"--output_dir={tmp_path / 'videos'}",
                f"--prompts={prompts}",
            ]
        )
        == 0
    )


def test_the_python_api_asks_for_trust_too(foreign_run: Path) -> None:
    with pytest.raises(ConfigError, match="downloaded_code:score"):
        open_run(foreign_run)
    assert open_run(foreign_run, trust_config=True).config.reward.rewards == [
        "downloaded_code:score"
    ]


def test_a_model_family_needs_trust_for_every_command(
    foreign_run: Path, tmp_path: Path
) -> None:
    config = load_config(
        foreign_run / "config.yaml",
        ["--model.family=downloaded_code:load", "--reward.rewards=[toy]"],
    )
    with pytest.raises(ConfigError, match="'downloaded_code:load' under model.family"):
        check_trust(config, foreign_run, (), rewards=False)
    check_trust(config, foreign_run, {"downloaded_code:load"})


@pytest.mark.parametrize("key", PARTS)
def test_every_key_that_may_name_code_needs_trust_and_is_not_imported_before(
    key: str, foreign_run: Path
) -> None:
    name = "downloaded_code:part"
    lists = ("reward.rewards", "reward.evaluation", "logging.report_to")
    value = f"[{name}]" if key in lists else name
    words = ["--reward.rewards=[toy]", f"--{key}={value}", "--reward.weights.VQ=1"]
    config = load_config(foreign_run / "config.yaml", words)
    with pytest.raises(ConfigError, match=f"'{name}' under {key}"):
        check_trust(config, foreign_run, ())
    check_trust(config, foreign_run, named_code([], [f"--{key}={value}"]))
    assert "downloaded_code" not in sys.modules


def test_no_check_of_a_configuration_imports_its_family(foreign_run: Path) -> None:
    """The AdaLN layers of a family, which a table needs frozen, are asked for once it
    is trusted.
    """
    words = [
        "--model.family=downloaded_code:load",
        "--model.adaln=table",
        "--lora.target_modules=[attn.to_q]",
    ]
    load_config(foreign_run / "config.yaml", words)
    assert "downloaded_code" not in sys.modules


def test_a_checkpoint_is_exported_by_no_code_of_its_own(
    finished_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sage_fast.tools.exporting as exporting

    read = exporting.load_config
    words = ["--model.family=downloaded_code:load"]
    monkeypatch.setattr(
        exporting,
        "load_config",
        lambda file, overrides: read(file, [*overrides, *words]),
    )
    # as if the checkpoint held these words
    monkeypatch.setattr(exporting, "check_same_run", lambda *runs, only: {})
    for chosen in ("lora", "full"):
        with pytest.raises(ConfigError, match="--trust-config"):
            export(finished_run, tmp_path / "out", format=chosen)  # type: ignore[arg-type]
    # With trust it is imported, and found missing.
    with pytest.raises(ConfigError, match="importing 'downloaded_code' failed"):
        export(finished_run, tmp_path / "out", format="lora", trust_config=True)
