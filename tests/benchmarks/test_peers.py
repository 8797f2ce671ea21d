"""Public trainers beside ours: a stand-in for a checkout of flow_grpo, and messages
about one that does not work.
"""

from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks import device, public, results
from benchmarks.session import Session
from benchmarks.suites import cpu, peers

MakeSession = Callable[..., Session]

SDE = """
import a_library_that_is_not_there

def sde_step_with_logprob(scheduler, velocity, timestep, x, noise_level=0.7, prev_sample=None):
    mean = x + velocity
    next_x = mean + 1 if prev_sample is None else prev_sample
    return next_x, -((next_x - mean) ** 2).mean(dim=(1, 2, 3)), mean
"""
SCRIPT = """
import another_library

def compute_log_prob(transformer, pipeline, sample, j, embeds):
    velocity = transformer(sample["latents"][:, j], sample["timesteps"][:, j], embeds)[0]
    x, after = sample["latents"][:, j], sample["next_latents"][:, j]
    return sde_step_with_logprob(pipeline.scheduler, velocity, None, x, prev_sample=after)[1]

def main():
    for j in range(99):
        with accelerator.accumulate(transformer):
            log_prob = compute_log_prob(transformer, pipeline, sample, j, embeds)
            accelerator.backward(-(sample["advantages"][:, j] * log_prob).mean())
            optimizer.zero_grad()
        raise SystemExit
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Checkouts of which one works, on a network of one layer."""
    monkeypatch.setattr(cpu, "UPDATES", {"toy": (1, 1, 2, 1)})
    monkeypatch.setattr(
        public,
        "TRAINERS",
        {"grpo": public.TRAINERS["forward_process"] | public.TRAINERS["grpo"]},
    )
    for name, text in (
        ("flow_grpo/diffusers_patch/sd3_sde_with_logprob.py", SDE),
        ("scripts/train_sd3.py", SCRIPT),
    ):
        file = tmp_path / "flow_grpo" / name
        file.parent.mkdir(parents=True)
        file.write_text(text, "utf-8")
    (tmp_path / "UniRL").mkdir()
    return tmp_path


def test_trainers_that_work_take_turns_with_ours_and_the_others_are_named(
    folder: Path, session: MakeSession
) -> None:
    run = session(public=folder)
    run.run(device.SUITES["peers"])
    (grpo,) = results.rows(run.result).values()
    assert list(grpo) == ["ours", "ours, single pass", "flow_grpo"]
    assert list(grpo["ours"]["over"]) == ["ours, single pass", "flow_grpo"]
    assert grpo["flow_grpo"]["flop"] > 1e6 and grpo["flow_grpo"]["note"].endswith(
        " MB, no commit"
    )
    said = "\n".join(results.problems(run.result))
    assert (
        "DiffusionNFT is not there: git clone "
        f"https://github.com/NVlabs/DiffusionNFT {folder}/DiffusionNFT"
    ) in said
    assert (
        f"No module named 'unirl'. {folder}/UniRL is at no commit, known is "
        f"1a7b501: git -C {folder}/UniRL"
    ) in said
    assert not results.succeeded(run.result)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (
            "def compute_log_prob",
            "def log_prob_of",
            "train_sd3.py has no compute_log_prob. ",
        ),
        (
            "optimizer.zero_grad()",
            "pass",
            "has no lines from 'with accelerator.accumulate",
        ),
        (
            "embeds)\n            acc",
            "embeds, 1)\n            acc",
            "TypeError: compute_log_prob() takes 5 ",
        ),
        ('sample["advantages"][:, j]', "0", "its gradient has the norm 0.0. "),
    ],
    ids=["function", "lines", "arguments", "gradient"],
)
def test_code_that_has_changed_is_named(
    old: str, new: str, said: str, folder: Path
) -> None:
    script = folder / "flow_grpo/scripts/train_sd3.py"
    script.write_text(SCRIPT.replace(old, new), "utf-8")
    with pytest.raises(
        ValueError, match=r"git -C .*/flow_grpo checkout ac4c86e$"
    ) as error:
        public.ready("grpo", "flow_grpo", folder, peers.task_of("toy"))
    assert said in str(error.value)
