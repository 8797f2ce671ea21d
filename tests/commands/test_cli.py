"""The commands as a user types them: words, help, generate and what it keeps."""

import json
import logging
import os
import re
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from sage_fast import __version__
from sage_fast.commands.cli import COMMANDS, main, parse
from sage_fast.commands.common import load_run_config, prompt_words
from sage_fast.config.load import load_config
from sage_fast.models import media_files
from sage_fast.models.toy.components import ASSETS, WEIGHTS_NAME
from sage_fast.run.provenance import git_commit
from sage_fast.sde import SDE_TYPES

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "mine.txt"
    file.write_text(
        "a blue square moving up\na red circle moving left\na green triangle moving "
        "down\n"
    )
    return file


# --------------------------------------------------------------------------------------
# words


def test_files_options_and_overrides_are_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    more = [
        "--reward.rewards+=mine",
        "--reward.weights",
        "{VQ: 1, MQ: 2}",
        "--reward.weights={VQ: 1, MQ: 2}",
    ]
    options, overrides = parse(
        ["train", "a.yaml", "seed=1", more[0], "--print_config", *more[1:], "b.yaml"]
    )
    assert options.config == ["a.yaml", "b.yaml"] and options.print_config
    assert overrides == ["--seed=1", more[0], more[3], more[3]]
    for word in ("--output-dir=a_b", "--output_dir=a_b", "--output_dir=a b"):
        assert (
            parse(["train", "toy_cpu", word])[1] == parse(["train", word, "toy_cpu"])[1]
        )
        assert parse(["train", "toy_cpu", *word.split("=")])[1] == [
            f"--output_dir={word.partition('=')[2]}"
        ]
    for command in ("train", "plan"):  # the value is not taken for a file
        words = ["--rollout.eta", "0.3", "--seed", "3", "toy_cpu", "--lora.alpha", "-2"]
        options, overrides = parse([command, *words])
        assert options.config == ["toy_cpu"]
        assert overrides == ["--rollout.eta=0.3", "--seed=3", "--lora.alpha=-2"]
    Path("seed=1").write_text("seed: 2\n")
    # A file may have an equals sign in its name; a word processor makes one dash of two.
    words = ["seed=1", "seed=2", "\u2014rollout.eta=0.3", "-seed=4"]
    options, overrides = parse(["train", *words])
    assert options.config == ["seed=1"]
    assert overrides == ["--seed=2", "--rollout.eta=0.3", "--seed=4"]


def test_a_dry_run_checks_and_writes_nothing(
    config_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", str(config_file), "--dry-run"]) == 0
    assert "This configuration can run." in capsys.readouterr().out
    for command in (["train", "--dry-run"], ["doctor"]):
        assert main([*command, str(config_file), "--gpus", "2"]) == 0
        assert "2, started by torchrun" in capsys.readouterr().out
    assert (
        main(["train", str(config_file), "--dry-run", "--data.prompts=gone.csv"]) == 1
    )
    assert not (tmp_path / "run").exists()


def test_gpus_start_torchrun(
    config_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[list[str]] = []

    def replaced(program: str, words: list[str]) -> None:
        started.append(words)
        raise KeyboardInterrupt

    monkeypatch.setattr("os.execv", replaced)
    main(["train", "--gpus=2", str(config_file), "--seed=3"])
    assert started[0][1:] == [
        *("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"),
        *("-m", "sage_fast", "train", str(config_file), "--seed=3"),
    ]
    # Refused here, in a line: the launcher would add the traceback of every rank.
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(["train", "--gpus=2", "hv15_quick_lora_8gpu"]) == 2
    assert len(started) == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "trian toy_cpu",
            "sage-fast: error: argument COMMAND: invalid choice: 'trian'",
        ),
        (
            "plan toy_cpu --memory abc",
            "sage-fast plan: error: argument --memory: invalid float value: 'abc'",
        ),
    ],
)
def test_a_usage_error_is_the_usage_on_rank_0_and_a_line_of_its_command(
    words: str,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for rank, usages in (("0", 1), ("1", 0)):
        monkeypatch.setenv("RANK", rank)
        with pytest.raises(SystemExit, match="2"):
            main(words.split())
        *usage, line = capsys.readouterr().err.splitlines()
        assert (
            line.startswith(message)
            and len(usage) == usages
            and line.count("sage-fast") == 1
        )
        assert line.endswith("Did you mean train?") is words.startswith("trian")


def test_the_version_names_commit_and_torch_without_loading_it() -> None:
    code = (
        "import sys\nfrom sage_fast.commands.cli import main\n"
        "try:\n    main(['--version'])\nexcept SystemExit as end:\n    assert not "
        "end.code\n"
        "assert not {'torch', 'numpy'} & set(sys.modules)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    commit = f"commit {found}, " if (found := git_commit(ROOT)) else ""
    # as pip names it
    assert (
        result.stdout == f"sage-fast {__version__} ({commit}torch {version('torch')})\n"
    )


@pytest.mark.parametrize("said", [None, "active"])
def test_openmp_reads_a_policy_that_the_user_may_set(said: str | None) -> None:
    """torch's OpenMP reads the environment once, so it is set before the first import
    of torch.
    """
    environment = {
        key: value for key, value in os.environ.items() if key != "OMP_WAIT_POLICY"
    }
    code = (
        "import os, sys, sage_fast; print(os.environ['OMP_WAIT_POLICY'], 'torch' in "
        "sys.modules)"
    )
    environment |= {"OMP_WAIT_POLICY": said} if said else {}
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert result.stdout == f"{said or 'passive'} False\n"


@pytest.mark.parametrize(
    ("rank", "level", "shown"),
    [
        ("0", "", "INFO ERROR"),
        ("1", "", "ERROR"),
        ("1", "DEBUG", "DEBUG INFO ERROR"),
    ],
)
def test_log_lines_have_the_time_the_rank_and_the_level_that_was_asked_for(
    rank: str, level: str, shown: str
) -> None:
    code = (
        "import logging\nfrom sage_fast.distributed.start import "
        "configure_logging\nconfigure_logging()\n"
        "for level in 'debug', 'info', 'error': getattr(logging.getLogger('x'), "
        "level)('word')\n"
    )
    environment = {"RANK": rank, "LOGLEVEL": level, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    who = "" if rank == "0" else r"\[rank 1\] "
    lines = "".join(
        rf"\d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d {who}{name} word\n"
        for name in shown.split()
    )
    assert re.fullmatch(lines, result.stderr), result.stderr


def test_a_level_that_torch_would_not_take_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LOGLEVEL", "debug")
    assert main(["configs"]) == 2
    assert "LOGLEVEL is 'debug'" in capsys.readouterr().err


def test_every_command_explains_itself_without_loading_torch() -> None:
    code = (
        "import sys\nfrom sage_fast.commands.cli import COMMANDS, main\n"
        "for command in COMMANDS:\n"
        "    try:\n        main([command, '--help'])\n"
        "    except SystemExit as end:\n        assert not end.code\n"
        "assert not {'torch', 'diffusers', 'transformers', 'numpy'} & "
        "set(sys.modules)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    _, *helps = result.stdout.split("usage: sage-fast ")
    assert [text.split()[0] for text in helps] == [*COMMANDS]
    assert all("examples:" in text for text in helps)
    assert "{" + ",".join(SDE_TYPES) + "}" in result.stdout


def test_the_presets_are_listed_and_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["configs"]) == 0
    lines = dict(
        line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines() if line
    )
    assert (
        lines["toy_cpu"].startswith("GPU   The main job")
        and "ablations/kl_none" in lines
        and len(lines) > 25
    )
    # A copy is whole and works wherever it lies: its prompts are those that ship.
    for name in ("toy_cpu", "hv15_480p_full_64gpu"):
        assert main(["configs", "show", name]) == 0
        text = capsys.readouterr().out
        Path("mine.yaml").write_text(text)
        assert load_config("mine.yaml") == load_config(name)
        assert "extends" not in text and text.startswith(
            (ROOT / f"configs/{name}.yaml").read_text().split("\n")[0]
        )
    assert main(["configs", "show", "prompts/toy_train.csv"]) == 0
    assert capsys.readouterr().out.startswith("prompt,")
    assert main(["configs", "show", "../setup.py"]) == 2


# --------------------------------------------------------------------------------------
# generate


def generate(config: Path, prompts: Path, output: Path, *more: str) -> int:
    return main(
        [
            "generate",
            str(config),
            "--prompts",
            str(prompts),
            "--output_dir",
            str(output),
            *more,
        ]
    )


def test_a_base_model_generates_texts_without_a_run_and_without_its_rewards(
    config_file: Path, tmp_path: Path
) -> None:
    output = tmp_path / "v"
    # Neither the training prompts nor the reward is there: they are not needed.
    gone = [
        "--checkpoint",
        "none",
        "--data.prompts=gone.csv",
        "--reward.rewards=[no_such_reward]",
    ]
    texts = [
        "--prompt",
        " a blue square moving up ",
        "--prompt=a red circle moving left",
    ]
    words = ["--seed", "3", "--num-videos", "2", "--output_dir", str(output)]
    assert main(["generate", str(config_file), *gone, *texts, *words]) == 0
    videos = ("00-a-blue-square-moving-up", "01-a-red-circle-moving-left")
    names = [f"{video}-{i}.mp4" for video in videos for i in (0, 1)]
    assert sorted(path.name for path in output.iterdir()) == [
        *names,
        "contact_sheet.png",
        "generation.json",
    ]
    assert media_files.read_video(output / names[0]).shape == (4, 3, 128, 128)
    record = json.loads((output / "generation.json").read_text())[names[1]]
    assert (
        record["weights"],
        record["sampler"],
        record["num_steps"],
        record["noise_seed"],
    ) == ("base", "ode", 4, 3)
    assert record["prompt"]["text"] == "a blue square moving up"


def test_a_prompt_file_is_a_default_that_the_words_of_the_user_change(
    config_file: Path, tmp_path: Path
) -> None:
    """And it may be one that ships, as under `evaluation.prompts`; the run's own
    num_prompts is not for it.
    """
    words = [
        "--checkpoint",
        "none",
        "--evaluation.num_prompts=2",
        "--seed",
        "3",
        "--evaluation.seed=4",
    ]
    assert (
        generate(config_file, Path("prompts/toy_eval.csv"), tmp_path / "v", *words) == 0
    )
    record = json.loads((tmp_path / "v/generation.json").read_text())
    assert [entry["noise_seed"] for entry in record.values()] == [4, 4]
    options, _ = parse(
        ["generate", str(config_file), "--prompts=a.txt", "--output_dir=~/v"]
    )
    assert (
        load_run_config(options, prompt_words(options)).evaluation.num_prompts is None
    )
    assert options.output_dir == Path.home() / "v"


def test_two_seeds_are_two_videos_of_a_prompt_that_has_its_own_and_the_record_says_which(
    config_file: Path, tmp_path: Path
) -> None:
    prompts = tmp_path / "own.json"
    prompts.write_text(
        '[{"caption": "a red circle moving left", "seed": 7}, {"caption": "a blue '
        'square moving up"}]'
    )
    found = {}
    for words in ([], ["--seed", "0"]):
        output = tmp_path / "_".join(["v", *words])
        words = [*words, "--checkpoint", "none", "--data.prompt_key=caption"]
        assert generate(config_file, prompts, output, *words) == 0
        record = json.loads((output / "generation.json").read_text())
        assert [entry["prompt"]["seed"] for entry in record.values()] == [7, None]
        for name, entry in record.items():
            found[(output / name).read_bytes()] = entry["noise_seed"]
    assert len(found) == 4, "every one is another video"
    seeds = list(found.values())
    assert seeds[:2] == [7, 1_000_003] and seeds[3] == 0 and seeds[2] not in (0, 7)
    # The seed of the record, put where a file has it, gives the video.
    prompts.write_text(
        f'[{{"caption": "a red circle moving left", "seed": {seeds[2]}}}]'
    )
    words = ["--checkpoint", "none", "--data.prompt_key=caption"]
    assert generate(config_file, prompts, tmp_path / "again", *words) == 0
    assert found[next((tmp_path / "again").glob("*.mp4")).read_bytes()] == seeds[2]


def test_an_interrupted_call_goes_on_and_what_is_there_is_kept(
    config_file: Path,
    prompts: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    words = ["--checkpoint", "none", "--evaluation.batch_size=1"]
    output = tmp_path / "videos"
    write = media_files.write_video

    def interrupted(path: Path, *rest: object) -> None:
        if list(output.glob("*.mp4")):
            raise KeyboardInterrupt
        write(path, *rest)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr("sage_fast.models.media_files.write_video", interrupted)
        assert generate(config_file, prompts, output, *words) == 130
    (first,) = output.glob("*.mp4")
    kept = first.stat().st_mtime_ns
    assert generate(config_file, prompts, output, *words) == 0
    assert "Keeping 1 of 3 videos" in caplog.text
    assert first.stat().st_mtime_ns == kept
    # A lost video is made again, and more of the same kind are added.
    second = sorted(output.glob("*.mp4"))[1]
    content = second.read_bytes()
    second.unlink()
    prompts.write_text(prompts.read_text() + "a red square moving up\n")
    assert generate(config_file, prompts, output, *words) == 0
    assert "Keeping 2 of 4 videos" in caplog.text and second.read_bytes() == content
    caplog.clear()
    assert generate(config_file, prompts, output, *words, "--overwrite") == 0
    assert "Keeping" not in caplog.text and first.stat().st_mtime_ns > kept


def test_a_video_of_other_settings_is_not_touched(
    config_file: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "videos"
    output.mkdir()
    (output / "00-a-blue-square-moving-up.mp4").write_text("somebody's")
    assert generate(config_file, prompts, output, "--checkpoint", "none") == 2
    assert (
        "is in the way" in capsys.readouterr().err and len(list(output.iterdir())) == 1
    )
    assert (
        generate(config_file, prompts, output, "--checkpoint", "none", "--overwrite")
        == 0
    )
    before = {p: p.read_bytes() for p in output.iterdir()}
    more = ["--sampler", "sage_grpo", "--seed", "3"]
    assert generate(config_file, prompts, output, "--checkpoint", "none", *more) == 2
    errors = capsys.readouterr().err
    assert "is in the way" in errors and "--overwrite" in errors
    assert (
        "sampler: 'ode' there, 'sage_grpo' now" in errors
        and "noise_seed: 1000003 there, 3 now" in errors
    )
    assert {p: p.read_bytes() for p in output.iterdir()} == before


def test_an_adapter_generates_the_videos_of_its_checkpoint_and_is_known_by_its_weights(
    finished_run: Path,
    prompts: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    adapter = shutil.copytree(
        finished_run / "checkpoints/update-000002/lora", tmp_path / "adapter"
    )
    assert generate(finished_run, prompts, tmp_path / "by_run") == 0
    assert (
        generate(finished_run, prompts, tmp_path / "by_lora", "--lora", str(adapter))
        == 0
    )
    one = "01-a-red-circle-moving-left.mp4"
    first, second = (
        media_files.read_video(tmp_path / name / one) for name in ("by_run", "by_lora")
    )
    assert torch.equal(first, second)
    record = json.loads((tmp_path / "by_lora/generation.json").read_text())[one]
    assert "adapter/pytorch_lora_weights.safetensors (" in record["weights"]
    file = adapter / "pytorch_lora_weights.safetensors"
    save_file({name: 2 * value for name, value in load_file(file).items()}, file)
    assert (
        generate(finished_run, prompts, tmp_path / "by_lora", "--lora", str(adapter))
        == 2
    )
    assert "weights: " in capsys.readouterr().err


def test_a_model_that_computes_no_numbers_makes_no_videos(
    config_file: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The codec of the toy would clip them to pixels, and exit with 0."""
    model = Path(
        shutil.copytree(
            load_config(config_file).model.path or ASSETS, tmp_path / "ruined"
        )
    )
    weights = load_file(model / WEIGHTS_NAME)
    weights["proj_out.bias"].fill_(torch.nan)
    save_file(weights, model / WEIGHTS_NAME)
    output = tmp_path / "v"
    assert (
        generate(
            config_file,
            prompts,
            output,
            "--checkpoint",
            "none",
            f"--model.path={model}",
        )
        == 1
    )
    assert "Sampled latents are not finite" in capsys.readouterr().err and not list(
        output.glob("*.mp4")
    )


def test_an_adapter_whose_training_broke_is_refused_before_anything_is_loaded(
    finished_run: Path,
    prompts: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    tensors = load_file(
        finished_run / "checkpoints/update-000002/lora/pytorch_lora_weights.safetensors"
    )
    next(iter(tensors.values()))[0, 0] = torch.nan
    save_file(tensors, file := tmp_path / "broken.safetensors")
    assert generate(finished_run, prompts, tmp_path / "v", "--lora", str(file)) == 2
    assert (
        main(
            [
                "train",
                str(finished_run),
                f"--output_dir={tmp_path / 'r'}",
                f"--model.adapter={file}",
            ]
        )
        == 2
    )
    errors = capsys.readouterr().err
    assert (
        errors.count("holds nan, as after a training that diverged") == 2
        and "--lora: " in errors
    )
    assert not (tmp_path / "v").exists()
