"""docs/rewards.md does what it says: its example runs, its tables are those of the
code.
"""

import inspect
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from sage_fast.config.load import dump_config, load_config
from sage_fast.config.registry import REWARDS, resolve
from sage_fast.config.schema import RunConfig
from sage_fast.rewards.server import RewardServer, read_spec
from sage_fast.run.run import build_trainer

DOCS = Path(__file__).resolve().parents[2] / "docs"
TEXT = (DOCS / "rewards.md").read_text(encoding="utf-8")
TUTORIAL = (DOCS / "tutorials/own_reward.md").read_text(encoding="utf-8")
MakeRun = Callable[..., RunConfig]


def block(language: str, text: str) -> str:
    found = re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)
    assert len(found) == 1
    return found[0]


def table_below(heading: str) -> list[list[str]]:
    """The cells of the first table after a line, without its head."""
    table = re.search(r"(^\|.*\n)+", TEXT.partition(heading)[2], re.MULTILINE)
    assert table is not None
    return [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in table[0].splitlines()[2:]
    ]


@pytest.mark.parametrize(
    ("module", "score", "text"),
    [("my_rewards", "steadiness", TEXT), ("brightness", "brightness", TUTORIAL)],
)
def test_the_example_trains(
    module: str,
    score: str,
    text: str,
    tiny_run: MakeRun,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / f"{module}.py").write_text(block("python", text))
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "toy.yaml").write_text(dump_config(tiny_run()))
    (tmp_path / "own.yaml").write_text(block("yaml", text))
    trainer = build_trainer(load_config([tmp_path / "toy.yaml", tmp_path / "own.yaml"]))
    record = trainer.iterate()
    total = 0.0
    for name, weight in trainer.reward.weights.items():
        total += weight * record[f"reward/{name}_mean"]
    assert record["reward/mean"] == pytest.approx(total, abs=1e-9)
    assert score in trainer.reward.weights and 0 < record[f"reward/{score}_mean"] < 1


def test_the_server_takes_the_overlay_of_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_rewards.py").write_text(block("python", TEXT))
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "my.yaml").write_text(block("yaml", TEXT))
    spec = read_spec([str(tmp_path / "my.yaml")], ["--video.fps=16"])
    assert spec["fps"] == 16
    with RewardServer(spec) as server:
        toy, steadiness, colours = server.served
        assert (toy, steadiness) == ("toy", "my_rewards:steadiness")
        assert server.served[colours]["options"] == {"num_frames": 2}


@pytest.mark.parametrize("name", ["videoalign", "clip_score", "pick_score", "ocr"])
def test_every_option_is_documented(name: str) -> None:
    table = table_below(f"### {name}\n")
    documented = {row[0].strip("`"): row[1].strip("`") for row in table}
    parameters = inspect.signature(resolve(name, REWARDS, "")).parameters
    words = {None: "null", False: "false", True: "true"}
    defaults = {
        option: words.get(parameter.default, str(parameter.default))
        for option, parameter in parameters.items()
    }
    if "fps" in defaults:  # which a run fills in: tests/tools/test_paired.py
        assert defaults["fps"] == "null"
        defaults["fps"] = "video.fps"
    assert list(documented.items()) == list(defaults.items())


def test_every_reward_is_listed() -> None:
    assert {row[0].strip("`") for row in table_below("## What ships")} == set(REWARDS)
