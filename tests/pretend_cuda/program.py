"""Work on the pretend device: python -m tests.pretend_cuda.program

Each line `WORK FOLDER` of its input runs in a process that is forked from this one,
which has imported everything. It writes FOLDER/found.json, which
tests/pretend_cuda/test_pretend_cuda.py judges, and FOLDER/output. The answer is a line.
"""

import importlib
import json
import os
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests import pretend_cuda
from tests.pretend_cuda import compiled, launches, races, waits

TRAINED = "--optimizer.learning_rate=0.01"
UNEVALUATED = "--evaluation.every=0"
MODES: dict[str, list[str]] = {
    "lora": [
        TRAINED,
        "--objective.kl_mode=moving",
        "--training.anchor_interval=1",
        "--training.ema_decay=0.9",
    ],
    "split": [
        TRAINED,
        UNEVALUATED,
        "--training.guidance=split",
        "--model.adaln=offload",
    ],
    "single_pass": [
        TRAINED,
        UNEVALUATED,
        "--training.update=single_pass",
        "--rollout.micro_batch_size=1",
    ],
    "full": [
        UNEVALUATED,
        "--optimizer.learning_rate=0.001",
        "--training.mode=full",
        "--objective.kl_mode=dual",
    ],
    "muon": [
        TRAINED,
        UNEVALUATED,
        "--optimizer.name=muon",
        "--model.checkpointing=selective",
    ],
    "stock": [
        TRAINED,
        UNEVALUATED,
        "--model.forward=stock",
        "--model.checkpointing=full",
    ],
    "bfloat16": [TRAINED, UNEVALUATED, "--model.dtype=bfloat16"],
    "several_updates": [TRAINED, UNEVALUATED, "--training.updates_per_rollout=2"],
}
"""Training modes that are compared with the CPU."""


def numbers(tensors: Iterable[Any]) -> list[float]:
    """Tensors as JSON, of sharded ones this rank's part."""
    parts = (
        getattr(tensor, "to_local", lambda tensor=tensor: tensor)()
        for tensor in tensors
    )
    return [
        number
        for part in parts
        for number in part.detach().double().cpu().flatten().tolist()
    ]


def write_run(folder: Path, **model: Any) -> Path:
    """A run of a tiny random model, whose heads the attention kernels take."""
    from sage_fast.models.toy.components import TRANSFORMER_CONFIG
    from tests.conftest import TINY, TINY_RUN, write_tiny_model

    (folder / "model").mkdir(parents=True)
    heads = {"attention_head_dim": 16, "rope_axes_dim": [4, 6, 6]}
    write_tiny_model(folder / "model", TRANSFORMER_CONFIG | TINY | heads)
    tree = TINY_RUN | {
        "output_dir": str(folder / "run"),
        "model": {"path": str(folder / "model")} | model,
    }
    tree["rollout"] = TINY_RUN["rollout"] | {"num_steps": 2}
    (folder / "run.yaml").write_text(json.dumps(tree))
    return folder / "run.yaml"


def train(file: Path, *words: str) -> dict[str, Any]:
    """Weights before and after a run, the deviation of its first ratios from 1, where
    its videos are, its attention.
    """
    import torch

    from sage_fast.config.load import load_config, to_dict
    from sage_fast.distributed.start import rank_device, start_world
    from sage_fast.run.directory import read_metrics
    from sage_fast.run.run import Run

    config = load_config(file, words)
    device = rank_device(config.model.device)
    run = Run(
        config,
        start_world(config.distributed, config.training.mode, device, to_dict(config)),
    )
    before = numbers(run.trainer.parameters.values())
    run.train()
    rows = read_metrics(file.parent / "run/metrics.jsonl")
    first = [row["ratio/first_max_deviation"] for row in rows if row["update"]]
    decoder = run.trainer.decoder
    latents = torch.zeros(1, *decoder.latent_shape(4, 16, 16), device=device)
    return {
        "before": before,
        "after": numbers(run.trainer.parameters.values()),
        "first_ratio": first,
        "attention": run.trainer.config.model.attention,
        "videos_on": decoder.decode(latents).device.type,
    }


def modes(folder: Path, device: str) -> dict[str, Any]:
    """Trainings in every mode on the device or on the CPU."""
    return {
        name: train(write_run(folder / name, device=device), *words)
        for name, words in MODES.items()
    }


def on_cuda(folder: Path) -> dict[str, Any]:
    """All modes, and whether what a checkpoint is written from has arrived when it is
    handed to the writing thread.
    """
    from sage_fast.checkpoint.writer import CheckpointWriter

    copy = CheckpointWriter._copy
    finite = []

    def copied(self: Any, tensors: Any) -> Any:
        found = copy(self, tensors)
        finite.append(
            all(tensor.double().isfinite().all().item() for tensor in found.values())
        )
        return found

    CheckpointWriter._copy = copied  # type: ignore[method-assign]
    return {"modes": modes(folder, "cuda"), "saved_finite": finite}


def sharded(folder: Path) -> dict[str, Any]:
    """Trainings by FSDP2 on one rank, with a fake NCCL: weights in CPU memory with
    anchors and averages; explicit backends. True for each that has moved its weights.
    """
    from torch import distributed
    from torch.testing._internal.distributed import fake_pg  # noqa: F401  registers the backend

    start = distributed.init_process_group

    def init(backend: str | None = None, **options: Any) -> None:
        start(
            backend.replace("cuda:nccl", "cuda:fake") if backend else backend, **options
        )

    distributed.init_process_group = init
    rank = {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
    }
    os.environ |= rank | {"MASTER_PORT": str(20000 + os.getpid() % 20000)}
    offloaded = ["--distributed.cpu_offload=true"]
    half = [UNEVALUATED, "--distributed.param_dtype=bfloat16"]
    runs = {
        "fixed": [*offloaded, UNEVALUATED, "--objective.kl_mode=fixed"],
        "ema": [*offloaded, "--objective.kl_mode=dual", "--training.ema_decay=0.5"],
        "sdpa": [*half, "--model.attention=sdpa"],
        "triton": [*half, "--model.attention=cudnn", "--model.kernels=triton"],
    }
    found = {}
    for name, words in runs.items():
        full = ["--training.mode=full", "--optimizer.learning_rate=0.001"]
        trained = train(write_run(folder / name, device="cuda"), *full, *words)
        distributed.destroy_process_group()
        found[name] = trained["before"] != trained["after"]
    return found


def two_devices(folder: Path) -> dict[str, Any]:
    """A gradient on cuda:1 while cuda:0 is the current device, against the CPU's."""
    import torch

    from sage_fast import accelerate
    from sage_fast.models.hunyuan15.backbone import velocity
    from sage_fast.models.toy.components import TRANSFORMER_CONFIG, build_transformer
    from sage_fast.records import PromptEmbeds
    from tests.conftest import TINY

    torch.manual_seed(0)
    model = build_transformer(TRANSFORMER_CONFIG | TINY)
    x = torch.randn(1, TRANSFORMER_CONFIG["out_channels"], 2, 4, 4)
    prompt = [
        torch.randn(3, TRANSFORMER_CONFIG[f"text_embed{n}_dim"]) for n in ("", "_2")
    ]
    found = {}
    for device in ("cpu", "cuda:1"):
        model.zero_grad(set_to_none=True)
        with accelerate(model.to(device), adaln="weights"):
            given = PromptEmbeds(text=prompt[0].to(device), glyph=prompt[1].to(device))
            velocity(
                model, x.to(device), torch.tensor([0.5]), [given]
            ).square().mean().backward()
        found[device] = numbers(
            p.grad for p in model.parameters() if p.grad is not None
        )
    assert torch.cuda.current_device() == 0
    return found


def budget(folder: Path) -> dict[str, Any]:
    """Waits by phase of one iteration, and kernels that a second one compiles."""
    from benchmarks.counts.iteration import toy_trainer

    found: dict[str, Any] = {}
    for update in ("two_phase", "single_pass"):
        trainer: Any = toy_trainer(update, 6.0, "cuda")
        trainer.iterate()
        within = Counter[str]()
        enter = trainer._phase
        first = len(compiled)

        @contextmanager
        def phase(
            name: str, within: Any = within, enter: Callable[[str], Any] = enter
        ) -> Iterator[None]:
            with enter(name):
                before = waits.total()
                yield
                within[name] += waits.total() - before

        trainer._phase = phase
        waits.clear()
        trainer.iterate()
        places = [f"{count} {what} {place}" for (what, place), count in waits.items()]
        found[update] = {
            "waits": dict(within),
            "compiled": first,
            "again": compiled[first:],
            "places": places,
        }
    return found


def commands(folder: Path) -> dict[str, Any]:
    """The commands over a tiny model in the layout of the real one."""
    from sage_fast.commands.cli import main
    from tests.conftest import TINY_RUN
    from tests.rewards import support
    from tests.tiny.checkpoints import save_diffusers_layout

    save_diffusers_layout(folder / "model")
    (folder / "prompts.txt").write_text("a red cat\na blue dog\n")
    tree = TINY_RUN | {
        "data": {"prompts": str(folder / "prompts.txt")},
        "output_dir": str(folder / "run"),
        "model": {"family": "hunyuan15", "path": str(folder / "model")},
        "video": {"num_frames": 5, "height": 32, "width": 32, "fps": 4},
        "reward": {
            "rewards": [f"{support.__name__}:brightness"],
            "weights": {"brightness": 1.0},
        },
        "training": {"num_updates": 1},
        "evaluation": {"every": 0},
    }
    (folder / "run.yaml").write_text(json.dumps(tree))
    run = str(folder / "run")
    status = {
        "doctor": main(["doctor", str(folder / "run.yaml")]),
        "train": main(["train", str(folder / "run.yaml")]),
        "generate": main(["generate", run, "--output_dir", str(folder / "videos")]),
        "export": main(["export", run, "--output_dir", str(folder / "exported")]),
    }
    return {"status": status, "videos": len(list((folder / "videos").glob("*.mp4")))}


def benchmarks(folder: Path) -> dict[str, Any]:
    """Cells of a smoke run."""
    from benchmarks import session

    session.main("device", ["--smoke", "--output_file", str(folder / "smoke.json")])
    return json.loads((folder / "smoke.json").read_text())["cells"]


WORK = {
    work.__name__: work
    for work in (on_cuda, sharded, two_devices, budget, commands, benchmarks)
}


def run(work: str, folder: Path) -> None:
    """Work, write, end this process."""
    import torch

    for number, target in (
        (0, os.devnull),
        (1, folder / "output"),
        (2, folder / "output"),
    ):
        os.dup2(os.open(target, os.O_RDWR | os.O_CREAT | os.O_APPEND), number)
    pretend_cuda.choose_machine(2 if work == "two_devices" else 1, jit=work == "budget")
    try:
        found = WORK[work](folder)
        cudnn = torch.backends.cuda.cudnn_sdp_enabled()
        report = {
            "found": found,
            "races": races,
            "launches": dict(launches),
            "cudnn_by_choice": cudnn,
        }
        (folder / "found.json").write_text(json.dumps(report))
    except Exception:  # noqa: BLE001  the test judges it
        traceback.print_exc()
    sys.stdout.flush()
    # threads of rewards and of the device's generators do not hold the process up
    os._exit(0)


def main() -> None:
    """Install the device, import what every work needs, and work by the lines of the
    input.
    """
    pretend_cuda.install()
    import torch

    torch.set_num_threads(1)
    for name in (
        "sage_fast.run.run",
        "sage_fast.models.toy.components",
        "sage_fast.rewards.toy",
        "tests.conftest",
    ):
        importlib.import_module(name)
    for line in sys.stdin:
        work, folder = line.split(maxsplit=1)
        if (child := os.fork()) == 0:
            run(work, Path(folder.rstrip("\n")))
        os.waitpid(child, 0)
        print("done", flush=True)


if __name__ == "__main__":
    main()
