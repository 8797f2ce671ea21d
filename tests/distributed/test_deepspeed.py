"""DeepSpeed ZeRO-2 on two gloo processes against plain torch on one that has both
ranks' videos.
"""

import importlib.util
import sys
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from sage_fast import accelerate
from sage_fast.config.errors import ConfigError
from sage_fast.config.sections import DistributedConfig, OptimizerConfig
from sage_fast.distributed.world import World
from sage_fast.models.family import family_of
from sage_fast.policy.guidance import VJP, GuidedPolicy
from sage_fast.policy.lora import (
    ADAPTER_FILE,
    add_lora,
    copy_lora,
    train_all,
    trainable_parameters,
)
from sage_fast.sharding.parallelize import TorchEngine
from tests.distributed.ranks import run_ranks
from tests.models.hunyuan15.oracle import latents, prompt, tiny_transformer

# Not importorskip: it would import the package into every process, before the engine
# has settled what it may print.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("deepspeed") is None,
        reason="DeepSpeed is not installed: pip install 'sage-fast[deepspeed]'",
    ),
]

RANKS = 2
UPDATES = 2
MODES: tuple[Literal["lora", "full"], ...] = ("lora", "full")
CONFIG = OptimizerConfig(
    name="adamw",
    learning_rate=3e-3,
    warmup_updates=2,
    max_grad_norm=0.5,
    weight_decay=0.1,
    eps=1e-6,
)
# eps: weights whose gradient is zero but for rounding, as the bias of keys, do not step
# by it.


# --------------------------------------------------------------------------------------
# the same run


def make_policy(mode: str, *, bf16: bool = False) -> GuidedPolicy:
    transformer = tiny_transformer(layers=2)
    if bf16 and mode == "lora":
        family_of(transformer).cast(transformer, torch.bfloat16)
    if mode == "lora":
        add_lora(
            transformer,
            rank=2,
            alpha=None,
            target_modules=["attn.to_q", "attn.add_k_proj", "ff.net.2"],
            seed=0,
        )
        for name, parameter in trainable_parameters(transformer).items():
            nn.init.normal_(
                parameter, std=0.1, generator=torch.Generator().manual_seed(len(name))
            )
    else:
        train_all(transformer)
    accelerate(transformer, checkpointing="selective", kernels="reference")
    return GuidedPolicy(transformer, prompt(3, 0, seed=9), 3.0)


def differentiate_video(
    policy: GuidedPolicy, update: int, video: int, vjp: VJP
) -> Tensor:
    """One video's part of an update's gradient. Of both ranks' first videos one has
    glyph tokens, and of their second ones. Videos of even number have both branches at
    once; in the others the branches are split, with a forward without a graph between
    one's forward and its backward.
    """
    cotangent = torch.randn(
        1, 4, 2, 3, 4, generator=torch.Generator().manual_seed(100 * update + video)
    )
    split = bool(video % 2)
    return policy.velocity_and_gradient(
        latents(1, seed=10 * update + video),
        torch.tensor([0.7017 - 0.1 * video]),
        [prompt(5, 2 if video in (1, 2) else 0, seed=video)],
        lambda velocity: [cotangent],
        split=split,
        vjp=vjp,
    )


class Source:
    """A checkpoint in memory."""

    def __init__(self, tensors: Mapping[str, Mapping[str, Tensor]]) -> None:
        self.tensors = tensors

    def load_into(self, tensors: Mapping[str, Mapping[str, Tensor]]) -> None:
        for group, named in tensors.items():
            for name, tensor in named.items():
                tensor.copy_(self.tensors[group][name])

    def read(self, group: str, name: str) -> Tensor:
        return self.tensors[group][name]


def make_engine(
    policy: GuidedPolicy, mode: Any, world: World, param_dtype: Any = "float32"
) -> Any:
    """Plain torch on one process, else ZeRO with buckets that an update fills several
    of.
    """
    if world.size == 1:
        return TorchEngine(
            trainable_parameters(policy.transformer),
            CONFIG,
            world,
            policy.transformer,
            "never",
        )
    from sage_fast.sharding import zero

    zero.REDUCE_BUCKET = 20_000
    settings = DistributedConfig(zero_stage=2, param_dtype=param_dtype)
    return zero.DeepSpeedEngine(policy.transformer, CONFIG, settings, world, mode=mode)


def make_gradient(policy: GuidedPolicy, engine: Any, update: int) -> float:
    """The gradient of this rank's videos, summed and clipped. Returns its norm."""
    share = 2 * RANKS // engine.world.size
    for video in range(share * engine.world.rank, share * (engine.world.rank + 1)):
        differentiate_video(policy, update, video, engine.vjp)
    return float(engine.clip_gradients())


@torch.no_grad()
def sample(policy: GuidedPolicy) -> Tensor:
    return policy.velocity(
        latents(1, seed=77), torch.tensor([0.4]), [prompt(4, 1, seed=5)]
    )


def follow(
    mode: str, world: World, folder: Path, source: Source | None = None
) -> dict[str, Any]:
    """Two updates, then a third one from the checkpoint of the source; without one,
    from its own.
    """
    policy = make_policy(mode)
    engine = make_engine(policy, mode, world)
    anchor = engine.snapshot()
    average = engine.snapshot()
    found: dict[str, Any] = {
        "start": deepcopy(engine.tensors()),
        "rates": [],
        "norms": [],
    }
    found["velocity"] = [sample(policy)]
    for update in range(UPDATES):
        found["rates"].append(engine.learning_rate)
        found["norms"].append(make_gradient(policy, engine, update))
        engine.step()
        average.average(0.75)
    found |= {
        "end": deepcopy(engine.tensors()),
        "average": {"weights": average.tensors()},
    }
    found["velocity"].append(sample(policy))
    with anchor.applied():
        found["velocity"].append(sample(policy))
    found["velocity"].append(sample(policy))
    found["after anchor"] = deepcopy(engine.tensors())
    with anchor.applied(), engine.whole():
        if mode == "lora":
            copy_lora(
                policy.transformer, folder / f"adapter-{world.rank}-of-{world.size}"
            )()

    source = source or Source(found["end"])
    engine.load_tensors(source)
    found["loaded"] = deepcopy(engine.tensors())
    found["norms"].append(make_gradient(policy, engine, UPDATES))
    engine.step()
    found["resumed"] = deepcopy(engine.tensors())
    anchor.load_tensors(source, "weights")
    found["loaded anchor"] = {"weights": deepcopy(anchor.tensors())}
    anchor.refresh()
    found["refreshed"] = {"weights": anchor.tensors()}
    return found


def follow_bf16(mode: str, world: World) -> dict[str, Any]:
    policy = make_policy(mode, bf16=True)
    engine = make_engine(
        policy, mode, world, "bfloat16" if mode == "full" else "float32"
    )
    found = {"bf16 start": engine.tensors(), "bf16 velocity": sample(policy)}
    found["bf16 norm"] = make_gradient(policy, engine, 0)
    engine.step()
    return found | {
        "bf16 end": engine.tensors(),
        "types": {p.dtype for p in policy.transformer.parameters()},
    }


def follow_on_ranks(folder: Path) -> dict[str, dict[str, Any]]:
    """Everything that needs two ranks, in one pair of processes: starting them costs
    more than their work.
    """
    dist.init_process_group("gloo")
    mesh = init_device_mesh(
        "cpu", (1, RANKS, 1), mesh_dim_names=("dp_replicate", "dp_shard", "sp")
    )
    world = World(rank=dist.get_rank(), size=RANKS, dp_shard=RANKS, mesh=mesh)
    return {
        mode: follow(mode, world, folder, Source(torch.load(folder / f"{mode}.pt")))
        | follow_bf16(mode, world)
        for mode in MODES
    }


# --------------------------------------------------------------------------------------
# the tests


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("zero")


@pytest.fixture(scope="module")
def plain(folder: Path) -> dict[str, dict[str, Any]]:
    """Findings of the plain run by mode; its checkpoint after the updates is in the
    folder.
    """
    found = {mode: follow(mode, World(), folder) for mode in MODES}
    for mode in MODES:
        torch.save(found[mode]["end"], folder / f"{mode}.pt")
    return found


class Run:
    """Findings of the ranks of one mode."""

    def __init__(self, ranks: list[dict[str, Any]]) -> None:
        self.ranks = ranks

    def __getitem__(self, key: str) -> Any:
        return self.ranks[0][key]

    def whole(self, key: str, group: str = "weights") -> dict[str, Tensor]:
        """A checkpoint's tensors, of which every rank has its own."""
        parts = [rank[key][group] for rank in self.ranks]
        assert all(parts) and len({name for part in parts for name in part}) == sum(
            map(len, parts)
        )
        return {name: value for part in parts for name, value in part.items()}


@pytest.fixture(scope="module")
def runs(folder: Path, plain: dict[str, dict[str, Any]]) -> dict[str, Run]:
    """The runs of two ranks by mode."""
    ranks = run_ranks(follow_on_ranks, RANKS, folder, timeout=400)
    return {mode: Run([rank[mode] for rank in ranks]) for mode in MODES}


def assert_close(
    found: Mapping[str, Tensor], expected: Mapping[str, Tensor], tolerance: float = 1e-5
) -> None:
    """Relative to each tensor's norm; where that is nothing but rounding, to the
    largest one's.
    """
    assert set(found) == set(expected)
    floor = 1e-6 * max(float(value.norm()) for value in expected.values())
    for name, value in expected.items():
        assert found[name].shape == value.shape, name
        error = float((found[name] - value).norm()) / max(float(value.norm()), floor)
        assert error <= tolerance, (name, error)


def assert_same(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert_close(found, expected, 0.0)


@pytest.mark.parametrize("mode", MODES)
def test_updates_and_average_are_those_of_one_process(
    mode: str, runs: dict[str, Run], plain: dict[str, Any]
) -> None:
    run = runs[mode]
    expected = plain[mode]
    assert_same(run.whole("start"), expected["start"]["weights"])
    assert run["norms"] == pytest.approx(expected["norms"], rel=1e-5)
    assert min(expected["norms"]) > 10 * CONFIG.max_grad_norm  # all are clipped
    assert (
        run["rates"]
        == expected["rates"]
        == pytest.approx([0.5 * CONFIG.learning_rate, CONFIG.learning_rate])
    )
    for key in ("end", "average"):
        assert_close(run.whole(key), expected[key]["weights"])
    for name, value in expected["start"]["weights"].items():
        assert not torch.equal(expected["end"]["weights"][name], value)
    for rank in run.ranks:
        for found, velocity in zip(rank["velocity"], expected["velocity"], strict=True):
            torch.testing.assert_close(found, velocity, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("mode", MODES)
def test_the_anchor_comes_and_goes_bit_for_bit(mode: str, runs: dict[str, Run]) -> None:
    run = runs[mode]
    for rank in run.ranks:
        first, trained, anchor, again = rank["velocity"]
        assert (
            torch.equal(anchor, first)
            and torch.equal(again, trained)
            and not torch.equal(first, trained)
        )
    for group in ("weights", "optimizer"):
        assert_same(run.whole("after anchor", group), run.whole("end", group))


@pytest.mark.parametrize("mode", MODES)
def test_checkpoints_of_one_process_and_of_ranks_are_interchangeable(
    mode: str, runs: dict[str, Run], plain: dict[str, Any]
) -> None:
    run = runs[mode]
    expected = plain[mode]
    for group in ("weights", "optimizer"):
        assert_same(run.whole("loaded", group), expected["end"][group])
    assert run["norms"][UPDATES] == pytest.approx(expected["norms"][UPDATES], rel=1e-6)
    assert_close(run.whole("resumed"), expected["resumed"]["weights"])
    assert_same(run.whole("loaded anchor"), expected["end"]["weights"])
    assert_same(run.whole("refreshed"), run.whole("resumed"))
    # The other way: the ranks' checkpoint gives one process its next update.
    assert_close(run.whole("end", "optimizer"), expected["end"]["optimizer"], 1e-4)
    policy = make_policy(mode)
    engine = make_engine(policy, mode, World())
    engine.load_tensors(
        Source({group: run.whole("end", group) for group in ("weights", "optimizer")})
    )
    engine.updates = UPDATES
    make_gradient(policy, engine, UPDATES)
    engine.step()
    assert_close(engine.tensors()["weights"], expected["resumed"]["weights"], 2e-5)


def test_an_adapter_is_saved_whole(runs: dict[str, Run], folder: Path) -> None:
    expected = load_file(folder / "adapter-0-of-1" / ADAPTER_FILE)
    for number in range(RANKS):
        assert_same(
            load_file(folder / f"adapter-{number}-of-{RANKS}" / ADAPTER_FILE), expected
        )


@pytest.mark.parametrize("mode", MODES)
def test_bf16_keeps_float32_masters_and_timesteps(
    mode: str, runs: dict[str, Run], plain: dict[str, Any]
) -> None:
    run = runs[mode]
    assert_same(run.whole("bf16 start"), plain[mode]["start"]["weights"])
    reference = make_policy(mode, bf16=True)
    if mode == "full":
        family_of(reference.transformer).cast(reference.transformer, torch.bfloat16)
    else:
        for parameter in trainable_parameters(reference.transformer).values():
            parameter.data = parameter.data.bfloat16().float()
    # Bit for bit: no rounded timestep, no other rounding than the weights'.
    assert torch.equal(run["bf16 velocity"], sample(reference))
    assert run["types"] == {torch.bfloat16}
    # Steps smaller than bfloat16 can hold are kept.
    assert not any(
        torch.equal(value, value.bfloat16().float())
        for value in run.whole("bf16 end").values()
    )
    assert run["bf16 norm"] == pytest.approx(plain[mode]["norms"][0], rel=0.1)


def test_what_it_needs_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    from sage_fast.sharding import zero

    settings = DistributedConfig(zero_stage=2)
    with pytest.raises(ConfigError, match="torchrun"):
        zero.DeepSpeedEngine(
            make_policy("lora").transformer, CONFIG, settings, World(), mode="lora"
        )
    for installed, message in (
        (None, r"pip install 'sage-fast\[deepspeed\]'"),
        (
            SimpleNamespace(__version__="0.15.0"),
            rf"needs DeepSpeed {zero.OLDEST}, and 0.15.0 is installed",
        ),
    ):
        monkeypatch.setitem(sys.modules, "deepspeed", installed)
        with pytest.raises(ConfigError, match=message):
            zero._import_deepspeed(torch.device("cpu"))
