"""DeepSpeed ZeRO-2 and ZeRO-3 on two gloo processes against plain torch on one that has both ranks' videos."""

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

from sage_fast.config import ConfigError, OptimizerConfig
from sage_fast.distributed.settings import DistributedSettings
from sage_fast.distributed.world import World
from sage_fast.optim import OptimizerSet
from sage_fast.policy import accelerate
from sage_fast.policy.guidance import GuidedPolicy, Pull
from sage_fast.policy.lora import add_lora, train_all, trainable_parameters
from tests.policy.oracle import latents, prompt, tiny_transformer

# Not importorskip: it would import the package into every process, before the engine has settled what it may print.
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed: pip install 'sage-fast[deepspeed]'"
)

RANKS = 2
UPDATES = 3
MODES: tuple[Literal["lora", "full"], ...] = ("lora", "full")
CONFIG = OptimizerConfig(name="adamw", learning_rate=3e-3, warmup_updates=2, max_grad_norm=0.5, weight_decay=0.1)
ROOT = Path(__file__).resolve().parents[2]


# ---------------------------------------------------------------------------------------------------- the same run


def make_policy(mode: str, *, bf16: bool = False) -> GuidedPolicy:
    transformer = tiny_transformer(layers=3, dtype=torch.bfloat16 if bf16 and mode == "lora" else torch.float32)
    if mode == "lora":
        add_lora(transformer, rank=2, alpha=None, target_modules=["attn.to_q", "attn.add_k_proj", "ff.net.2"], seed=0)
        for name, parameter in trainable_parameters(transformer).items():
            nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(len(name)))
    else:
        train_all(transformer)
    accelerate(transformer, checkpointing="selective", kernels="reference")
    return GuidedPolicy(transformer, prompt(3, 0, seed=9), 3.0)


def pull_video(policy: GuidedPolicy, update: int, video: int, pull: Pull, scale: float = 1.0) -> Tensor:
    """One video's part of an update's gradient. Videos of even number have glyph tokens and both branches at once; in
    the others the branches are split, with a forward without a graph between one's forward and its backward.
    """
    cotangent = scale * torch.randn(1, 4, 2, 3, 4, generator=torch.Generator().manual_seed(100 * update + video))
    split = bool(video % 2)
    return policy.velocity_and_gradient(
        latents(1, seed=10 * update + video),
        torch.tensor([0.7017 - 0.1 * video]),
        [prompt(5, 0 if split else 2, seed=video)],
        lambda velocity: [cotangent],
        split=split,
        pull=pull,
    )


def plain_pull(output: Tensor, cotangents: Any) -> None:
    output.backward(cotangents[0])


class Plain:
    """The run on one process."""

    def __init__(self, mode: str) -> None:
        self.policy = make_policy(mode)
        self.parameters = trainable_parameters(self.policy.transformer)
        self.optimizer = OptimizerSet(self.parameters, CONFIG)

    def update(self, number: int) -> float:
        for video in range(2 * RANKS):
            pull_video(self.policy, number, video, plain_pull)
        norm = self.optimizer.clip_gradients()
        self.optimizer.step()
        return norm

    def weights(self) -> dict[str, Tensor]:
        return {name: p.detach().clone() for name, p in self.parameters.items()}

    def state(self) -> dict[str, Tensor]:
        (adamw,) = self.optimizer.optimizers
        return {f"{n}.{k}": v.clone() for n, p in self.parameters.items() for k, v in adamw.state[p].items()}

    def load(self, tensors: Mapping[str, Mapping[str, Tensor]]) -> None:
        (adamw,) = self.optimizer.optimizers
        for name, parameter in self.parameters.items():
            parameter.data.copy_(tensors["weights"][name])
            adamw.state[parameter] = {
                key: tensors["optimizer"][f"{name}.{key}"].clone() for key in ("step", "exp_avg", "exp_avg_sq")
            }


class Source:
    """A checkpoint in memory."""

    def __init__(self, tensors: Mapping[str, Mapping[str, Tensor]]) -> None:
        self.tensors = tensors

    def load_into(self, tensors: Mapping[str, Mapping[str, Tensor]]) -> None:
        raise AssertionError("shards are read tensor by tensor")

    def read(self, group: str, name: str) -> Tensor:
        return self.tensors[group][name]


# ------------------------------------------------------------------------------------------------------ the children


def start(number: int, folder: str) -> World:
    torch.set_num_threads(1)
    os.environ["LOCAL_RANK"] = str(number)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=number, world_size=RANKS)
    mesh = dist.init_device_mesh("cpu", (1, RANKS, 1), mesh_dim_names=("dp_replicate", "dp_shard", "sp"))
    return World(rank=number, size=RANKS, local_rank=number, dp_shard=RANKS, mesh=mesh)


def finish() -> None:
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may abort an orderly exit


def engine_of(policy: GuidedPolicy, mode: Any, world: World, file: str) -> Any:
    from sage_fast.distributed.deepspeed import DeepSpeedEngine

    settings = DistributedSettings(engine="deepspeed", deepspeed_config=file)
    return DeepSpeedEngine(policy.transformer, CONFIG, settings, world, mode=mode)


def pull_update(policy: GuidedPolicy, engine: Any, number: int, scale: float = 1.0) -> float:
    rank = engine.world.rank
    for video in (2 * rank, 2 * rank + 1):
        pull_video(policy, number, video, engine.pull, scale)
    return float(engine.clip_gradients())


@torch.no_grad()
def sample(policy: GuidedPolicy) -> Tensor:
    return policy.velocity(latents(1, seed=77), torch.tensor([0.4]), [prompt(4, 1, seed=5)])


def follow(number: int, folder: str, stage: int) -> None:
    world = start(number, folder)
    for mode in MODES:
        policy = make_policy(mode)
        engine = engine_of(policy, mode, world, f"{folder}/zero{stage}.json")
        found: dict[str, Any] = {"start": engine.tensors(), "rates": [], "norms": []}
        anchor, average = engine.snapshot(), engine.snapshot()
        found["velocity"] = [sample(policy)]
        for update in range(UPDATES):
            found["rates"].append(engine.learning_rate)
            found["norms"].append(pull_update(policy, engine, update))
            engine.step()
            average.average(0.75)
        found["end"], found["average"] = engine.tensors(), average.tensors()
        found["velocity"].append(sample(policy))
        with anchor.applied():
            found["velocity"].append(sample(policy))
        found["velocity"].append(sample(policy))
        found["after anchor"] = engine.tensors()

        # A gradient that is not finite is refused: nothing changes, and the next update is as if it had not been.
        found["nan"] = pull_update(policy, engine, UPDATES, float("nan"))
        engine.zero_grad()
        found["after nan"] = engine.tensors()
        state = engine.state()
        found["norms"].append(pull_update(policy, engine, UPDATES))
        engine.step()
        found["next"] = engine.tensors()

        # The plain run's checkpoint, taken over, gives its next update.
        source = Source(torch.load(f"{folder}/{mode}.pt"))
        engine.load_tensors(source)
        engine.load_state(state)
        found["loaded"] = engine.tensors()
        found["norms"].append(pull_update(policy, engine, UPDATES))
        engine.step()
        found["resumed"] = engine.tensors()
        anchor.load_tensors(source, "weights")
        found["loaded anchor"] = anchor.tensors()
        anchor.refresh()
        found["refreshed"] = anchor.tensors()
        found["gathered"] = sum(p.numel() for p in policy.transformer.transformer_blocks.parameters())
        torch.save(found, f"{folder}/{mode}-{number}.pt")
        del policy, engine, anchor, average
    finish()


# ---------------------------------------------------------------------------------------------------------- the tests


def write(folder: Path, stage: int, *, bf16: bool = False) -> Path:
    """A configuration with small buckets, so that a pull fills several, and no persistent weights but the smallest."""
    import json

    section: dict[str, Any] = {"stage": stage, "reduce_bucket_size": 3000}
    if stage == 3:
        section["stage3_param_persistence_threshold"] = 40
    path = folder / f"zero{stage}.json"
    path.write_text(json.dumps({"zero_optimization": section, "bf16": {"enabled": bf16}}))
    return path


def merged(folder: Path, mode: str, key: str, group: str | None = None) -> dict[str, Tensor]:
    """What the ranks hold of a checkpoint, together."""
    result: dict[str, Tensor] = {}
    for number in range(RANKS):
        part = torch.load(folder / f"{mode}-{number}.pt")[key]
        part = part if group is None else part[group]
        assert part and not set(part) & set(result)
        result |= part
    return result


def close(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], tolerance: float = 1e-5) -> None:
    assert set(found) == set(expected)
    for name, value in expected.items():
        assert found[name].shape == value.shape, name
        error = float((found[name] - value).norm() / value.norm().clamp_min(1e-12))
        assert error <= tolerance, (name, error)


def same(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    close(found, expected, 0.0)


@pytest.fixture(scope="module", params=[2, 3], ids=["zero2", "zero3"])
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The folder with what the children found, and the plain run by mode."""
    folder = tmp_path_factory.mktemp(f"zero{request.param}")
    write(folder, request.param)
    plain: dict[str, Any] = {}
    for mode in MODES:
        run = Plain(mode)
        record: dict[str, Any] = {"start": run.weights(), "velocity": [sample(run.policy)], "norms": []}
        average = run.weights()
        for update in range(UPDATES):
            record["norms"].append(run.update(update))
            for name, value in run.weights().items():
                average[name].lerp_(value, 0.25)
        record["velocity"].append(sample(run.policy))
        record |= {"end": run.weights(), "average": average, "state": run.state()}
        torch.save({"weights": record["end"], "optimizer": record["state"]}, folder / f"{mode}.pt")
        record["norms"].append(run.update(UPDATES))
        record["next"] = run.weights()
        plain[mode] = record
    mp.spawn(follow, (str(folder), request.param), nprocs=RANKS, join=True)
    return folder, plain
