"""Parts of the user's own, as docs/how_to/own_parts.md has them: trained with, recorded,
and held by a resume.
"""

import linecache
import os
import re
import signal
import sys
from pathlib import Path

import pytest

from sage_fast import Callback, UpdateRecord, train
from sage_fast.commands.cli import main
from sage_fast.config.errors import ConfigError
from sage_fast.config.load import load_config
from sage_fast.config.registry import PARTS
from sage_fast.config.schema import RunConfig
from sage_fast.run import resume
from sage_fast.sde import sigma_schedule, transition_table
from tests.made_runs import numbers
from tests.run.test_run import MakeRun, with_output

pytestmark = pytest.mark.usefixtures("nothing_drawn")
ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/how_to/own_parts.md").read_text("utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
WORDS = re.findall(r"--\S+=\S*my_parts:\S+", PAGE)
LAST = 3


@pytest.fixture
def parts_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The page's file, as a module that can be imported."""
    (tmp_path / "code").mkdir()
    monkeypatch.syspath_prepend(tmp_path / "code")
    monkeypatch.delitem(sys.modules, "my_parts", raising=False)
    # Bytecode is known by size and second: a file changed twice would be the first.
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    file = tmp_path / "code/my_parts.py"
    file.write_text("\n\n".join(BLOCKS))
    return file


class CtrlC(Callback):
    def on_update(self, record: UpdateRecord) -> None:
        if record.update == 1:
            os.kill(os.getpid(), signal.SIGINT)


def own_run(tiny_run: MakeRun, folder: Path, *words: str) -> RunConfig:
    given = (f"--training.num_updates={LAST}", "--evaluation.every=0")
    return with_output(tiny_run(*WORDS, *given, *words), folder)


def start_anew(file: Path, source: str) -> None:
    """As a process that starts now finds the file."""
    file.write_text(source)
    del sys.modules["my_parts"]


def test_own_parts_train_and_resume_to_the_same_numbers_unless_they_changed(
    parts_file: Path, tiny_run: MakeRun, tmp_path: Path
) -> None:
    whole = train(own_run(tiny_run, tmp_path / "whole"))
    assert whole.finished
    builtin = tiny_run("--training.num_updates=1", "--evaluation.every=0")
    train(with_output(builtin, tmp_path / "builtin"))
    assert numbers(tmp_path / "builtin") != numbers(tmp_path / "whole")[:1]
    assert len((tmp_path / "whole/rewards.txt").read_text().splitlines()) == LAST
    recorded = load_config(tmp_path / "whole/config.yaml")
    assert recorded.training.update == "my_parts:EarlySteps"

    stopped = train(own_run(tiny_run, tmp_path / "parts"), callbacks=CtrlC())
    assert (stopped.update, stopped.finished) == (1, False)
    again = own_run(tiny_run, tmp_path / "parts", "--resume=auto")
    source = parts_file.read_text()
    start_anew(parts_file, source.replace("2 * self.sigma", "3 * self.sigma"))
    with pytest.raises(
        ConfigError, match=r"training.update: 'my_parts:EarlySteps \(source \w{12}\)'"
    ):
        train(again)
    start_anew(parts_file, source)
    with pytest.raises(ConfigError, match=r"--allow-changes rollout.sde_type\."):
        train(again, rollout={"sde_type": "cps"})
    assert train(again).finished
    assert numbers(tmp_path / "parts") == numbers(tmp_path / "whole")


def test_a_changed_part_goes_on_where_that_is_allowed_and_on_record(
    parts_file: Path, tiny_run: MakeRun, tmp_path: Path
) -> None:
    train(own_run(tiny_run, tmp_path / "run"), callbacks=CtrlC())
    start_anew(parts_file, parts_file.read_text() + "\n")
    allowed = [key for key in PARTS if any(key in word for word in WORDS)][:-1]
    again = own_run(tiny_run, tmp_path / "run", "--resume=auto")
    run = train(again, allow_changes=allowed)
    (said,) = [row for row in run.metrics if "config/changes" in row]
    assert all(key in said["config/changes"] for key in allowed)


def test_a_run_with_own_parts_can_be_planned(
    parts_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "toy_cpu", "--device", "h100", *WORDS]) == 0
    assert "update" in capsys.readouterr().out
    # what its class refuses is refused, though not where the file is read
    assert main(["plan", "toy_cpu", "--rollout.eta=0", *WORDS]) == 2
    assert "draws no noise" in capsys.readouterr().err


REWARD = """
def reward(videos, prompts):
    return {"VQ": videos.float().mean((1, 2, 3, 4))}
"""


def test_a_resume_warns_of_a_reward_whose_source_has_changed(
    tiny_run: MakeRun,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    file = tmp_path / "judges/edited_reward.py"
    file.parent.mkdir()
    file.write_text(REWARD)
    words = (
        "--reward.rewards=[judges.edited_reward:reward]",
        "--reward.weights={VQ: 1}",
        "--evaluation.every=0",
    )
    run = with_output(tiny_run(*words, "--training.num_updates=2"), tmp_path / "run")
    train(run, callbacks=CtrlC())
    file.write_text(REWARD.replace("mean", "amax"))
    # as a process that starts now
    resume.file_digest.cache_clear()
    train(run, resume="auto", callbacks=CtrlC())
    assert "The source of judges.edited_reward:reward is not the one" in caplog.text
    caplog.clear()
    train(run, resume="auto")
    assert "The source of" not in caplog.text


def test_a_part_without_source_is_refused_in_a_line(
    parts_file: Path, tiny_run: MakeRun, tmp_path: Path
) -> None:
    """As one that was typed into an interpreter."""
    __import__("my_parts")
    parts_file.unlink()
    linecache.clearcache()
    with pytest.raises(ConfigError, match="'my_parts:EarlySteps', whose source is not"):
        train(own_run(tiny_run, tmp_path / "run"))


def test_an_update_that_is_no_objective_is_refused_in_a_line(
    parts_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # a function, as a loss of other trainers
    assert main(["plan", "toy_cpu", "--training.update=my_parts:wins"]) == 2
    assert "training.update is 'my_parts:wins'" in capsys.readouterr().err


def test_a_single_pass_refuses_a_loss_of_its_own_which_it_would_not_take(
    parts_file: Path, tiny_run: MakeRun, tmp_path: Path
) -> None:
    source = parts_file.read_text()
    parts_file.write_text(
        "from sage_fast.objectives.single_pass import SinglePass\n"
        + source.replace("(TwoPhase)", "(SinglePass)")
    )
    with pytest.raises(ConfigError, match=r"EarlySteps has a step_loss.*TwoPhase"):
        train(own_run(tiny_run, tmp_path / "run"))
    assert main(["plan", "toy_cpu", "--training.update=my_parts:EarlySteps"]) == 2


def test_the_table_of_a_variance_is_that_of_the_sampler_which_has_it() -> None:
    sigmas = sigma_schedule(8, 5.0)
    table = transition_table("dance_grpo", sigmas, 0.5)
    (parts,) = [block for block in BLOCKS if "def fading" in block]
    names: dict[str, object] = {}
    exec(parts.replace("sigmas[:-1] * ", ""), names)
    own = names["fading"]("mine", sigmas, 0.5)  # type: ignore[operator]
    for column in ("a", "b", "std", "gain", "scale"):
        assert getattr(own, column).equal(getattr(table, column))


@pytest.mark.parametrize(
    "key", sorted(key for key in PARTS if not key.startswith(("model.", "reward.")))
)
def test_a_typing_error_in_the_name_of_a_part_shows_the_names_there_are(
    key: str,
) -> None:
    value = "[twofase]" if key == "logging.report_to" else "twofase"
    with pytest.raises(ConfigError, match=f"{key} is 'twofase'.*package.module") as no:
        load_config("toy_cpu", [f"--{key}={value}"])
    assert all(name in str(no.value) for name in PARTS[key])
