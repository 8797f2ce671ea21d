"""DeepSpeed ZeRO-2 and ZeRO-3 on two gloo processes against plain torch on one that has both ranks' videos."""

import importlib.util
import sys
from collections.abc import Mapping
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
from sage_fast.optim import OptimizerSet
from sage_fast.policy.guidance import VJP, GuidedPolicy, vjp_into_grad
from sage_fast.policy.lora import ADAPTER_FILE, add_lora, cast_weights, copy_lora, train_all, trainable_parameters
from tests.distributed.ranks import run_ranks
from tests.models.hunyuan15.oracle import latents, prompt, tiny_transformer

# Not importorskip: it would import the package into every process, before the engine has settled what it may print.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("deepspeed") is None,
        reason="DeepSpeed is not installed: pip install 'sage-fast[deepspeed]'",
    ),
]

RANKS = 2
STAGES: tuple[Literal[2, 3], ...] = (2, 3)
UPDATES = 3
MODES: tuple[Literal["lora", "full"], ...] = ("lora", "full")
CONFIG = OptimizerConfig(
    name="adamw", learning_rate=3e-3, warmup_updates=2, max_grad_norm=0.5, weight_decay=0.1, eps=1e-6
)
# eps: weights whose gradient is zero but for rounding, as the bias of keys, do not step by it.


# ---------------------------------------------------------------------------------------------------- the same run


def make_policy(mode: str, *, bf16: bool = False, forward: str = "fused") -> GuidedPolicy:
    transformer = tiny_transformer(layers=2)
    if bf16 and mode == "lora":
        cast_weights(transformer, torch.bfloat16)
    if mode == "lora":
        add_lora(transformer, rank=2, alpha=None, target_modules=["attn.to_q", "attn.add_k_proj", "ff.net.2"], seed=0)
        for name, parameter in trainable_parameters(transformer).items():
            nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(len(name)))
    else:
        train_all(transformer)
    if forward == "fused":
        accelerate(transformer, checkpointing="selective", kernels="reference")
    return GuidedPolicy(transformer, prompt(3, 0, seed=9), 3.0)


def differentiate_video(policy: GuidedPolicy, update: int, video: int, vjp: VJP, scale: float = 1.0) -> Tensor:
    """One video's part of an update's gradient. Of both ranks' first videos one has glyph tokens, and of their second
    ones. Videos of even number have both branches at once; in the others the branches are split, with a forward without
    a graph between one's forward and its backward.
    """
    cotangent = scale * torch.randn(1, 4, 2, 3, 4, generator=torch.Generator().manual_seed(100 * update + video))
    split = bool(video % 2)
    return policy.velocity_and_gradient(
        latents(1, seed=10 * update + video),
        torch.tensor([0.7017 - 0.1 * video]),
        [prompt(5, 2 if video in (1, 2) else 0, seed=video)],
        lambda velocity: [cotangent],
        split=split,
        vjp=vjp,
    )


class Plain:
    """The run on one process."""

    def __init__(self, mode: str) -> None:
        self.policy = make_policy(mode)
        self.parameters = trainable_parameters(self.policy.transformer)
        self.optimizer = OptimizerSet(self.parameters, CONFIG)

    def update(self, number: int) -> float:
        for video in range(2 * RANKS):
            differentiate_video(self.policy, number, video, vjp_into_grad)
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


def engine_of(policy: GuidedPolicy, mode: Any, world: World, stage: Literal[2, 3], kind: str = "") -> Any:
    """An engine with buckets that a pull fills several of, and few weights that stay whole; for `stock` none."""
    from sage_fast.distributed import zero

    zero.REDUCE_BUCKET, zero.KEPT_WHOLE = 20_000, 0 if kind == "stock" else 40
    settings = DistributedConfig(zero_stage=stage, param_dtype="bfloat16" if kind == "bf16" else "float32")
    return zero.DeepSpeedEngine(policy.transformer, CONFIG, settings, world, mode=mode)


def pull_update(policy: GuidedPolicy, engine: Any, number: int, scale: float = 1.0) -> float:
    rank = engine.world.rank
    for video in (2 * rank, 2 * rank + 1):
        differentiate_video(policy, number, video, engine.vjp, scale)
    return float(engine.clip_gradients())


@torch.no_grad()
def sample(policy: GuidedPolicy) -> Tensor:
    return policy.velocity(latents(1, seed=77), torch.tensor([0.4]), [prompt(4, 1, seed=5)])


def follow(folder: str) -> None:
    """Everything that needs two ranks, in one pair of processes: starting them costs more than their work."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (1, RANKS, 1), mesh_dim_names=("dp_replicate", "dp_shard", "sp"))
    world, linear = World(rank=dist.get_rank(), size=RANKS, dp_shard=RANKS, mesh=mesh), nn.functional.linear
    number = world.rank
    for stage in STAGES:
        for mode in MODES:
            torch.save(follow_run(world, folder, stage, mode), f"{folder}/zero{stage}-{mode}-{number}.pt")
        torch.save(follow_bf16(world, folder, stage), f"{folder}/zero{stage}-bf16-{number}.pt")
    torch.save(follow_stock(world, folder), f"{folder}/zero3-stock-{number}.pt")
    assert nn.functional.linear is linear, "DeepSpeed has replaced torch's linear layers"


def follow_run(world: World, folder: str, stage: Literal[2, 3], mode: str) -> dict[str, Any]:
    policy = make_policy(mode)
    engine = engine_of(policy, mode, world, stage)
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
    with anchor.applied(), engine.whole():
        if mode == "lora":
            copy_lora(policy.transformer, Path(f"{folder}/zero{stage}-adapter-{world.rank}"))()
    found["velocity"].append(sample(policy))
    # Weights that a rank still has whole.
    found["whole"] = sum(p.numel() for p in policy.transformer.transformer_blocks.parameters())

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
    return found


def follow_bf16(world: World, folder: str, stage: Literal[2, 3]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for mode in MODES:
        policy = make_policy(mode, bf16=True)
        engine = engine_of(policy, mode, world, stage, "bf16")
        found[mode] = {"start": engine.tensors()["weights"], "velocity": sample(policy)}
        found[mode]["norm"] = pull_update(policy, engine, 0)
        engine.step()
        found[mode]["end"] = engine.tensors()["weights"]
        found[mode]["types"] = {p.dtype for p in policy.transformer.parameters()}
    return found


def follow_stock(world: World, folder: str) -> list[float]:
    """Norms of two updates of ZeRO-3 with diffusers' own forward, which calls every module, without and with its
    checkpointing, which calls blocks during the backward pass.
    """
    norms = []
    for checkpointing in (False, True):
        policy = make_policy("full", forward="stock")
        if checkpointing:
            policy.transformer.enable_gradient_checkpointing()
            policy.transformer.train()
        engine = engine_of(policy, "full", world, 3, "stock")
        for update in range(2):
            norms.append(pull_update(policy, engine, update))
            engine.step()
    return norms


# ---------------------------------------------------------------------------------------------------------- the tests


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("zero")


@pytest.fixture(scope="module")
def plain(folder: Path) -> dict[str, dict[str, Any]]:
    """The plain run by mode; its checkpoint after three updates is in the folder."""
    records: dict[str, dict[str, Any]] = {}
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
        records[mode] = record
    return records


@pytest.fixture(scope="module")
def children(folder: Path, plain: dict[str, dict[str, Any]]) -> Path:
    """The folder with all that two ranks have found."""
    run_ranks(follow, RANKS, str(folder), timeout=400)
    return folder


class Run:
    """Findings of the ranks of one run."""

    def __init__(self, folder: Path, stage: int, mode: str) -> None:
        self.ranks = [torch.load(folder / f"zero{stage}-{mode}-{number}.pt") for number in range(RANKS)]

    def __getitem__(self, key: str) -> Any:
        return self.ranks[0][key]

    def whole(self, key: str, group: str | None = "weights") -> dict[str, Tensor]:
        """A checkpoint's tensors, of which every rank has its own."""
        parts = [rank[key] if group is None else rank[key][group] for rank in self.ranks]
        assert all(parts) and len({name for part in parts for name in part}) == sum(map(len, parts))
        return {name: value for part in parts for name, value in part.items()}


@pytest.fixture(
    params=[(stage, mode) for stage in (2, 3) for mode in ("lora", "full")], ids=lambda p: f"zero{p[0]}-{p[1]}"
)
def case(request: pytest.FixtureRequest, children: Path, plain: dict[str, Any]) -> tuple[Run, dict[str, Any]]:
    """A run of the ranks, and the plain one."""
    stage, mode = request.param
    return Run(children, stage, mode), plain[mode]


def assert_close(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], tolerance: float = 1e-5) -> None:
    """Relative to each tensor's norm; where that is nothing but rounding, to the largest one's."""
    assert set(found) == set(expected)
    floor = 1e-6 * max(float(value.norm()) for value in expected.values())
    for name, value in expected.items():
        assert found[name].shape == value.shape, name
        error = float((found[name] - value).norm()) / max(float(value.norm()), floor)
        assert error <= tolerance, (name, error)


def assert_same(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert_close(found, expected, 0.0)


def test_updates_are_those_of_one_process(case: tuple[Run, dict[str, Any]]) -> None:
    run, plain = case
    assert_same(run.whole("start"), plain["start"])
    assert run["norms"][:UPDATES] == pytest.approx(plain["norms"][:UPDATES], rel=1e-5)
    assert min(plain["norms"]) > 10 * CONFIG.max_grad_norm  # all are clipped
    assert run["rates"] == pytest.approx([0.5 * CONFIG.learning_rate, CONFIG.learning_rate, CONFIG.learning_rate])
    assert_close(run.whole("end"), plain["end"])
    assert not any(torch.equal(plain["end"][name], value) for name, value in plain["start"].items())


def test_the_model_computes_with_what_was_trained(case: tuple[Run, dict[str, Any]]) -> None:
    run, plain = case
    for rank in run.ranks:
        for found, expected in zip(rank["velocity"][:2], plain["velocity"], strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_the_anchor_comes_and_goes_bit_for_bit(case: tuple[Run, dict[str, Any]]) -> None:
    run, _ = case
    for rank in run.ranks:
        first, trained, anchor, again, _ = rank["velocity"]
        assert torch.equal(anchor, first) and torch.equal(again, trained) and not torch.equal(first, trained)
    for group in ("weights", "optimizer"):
        assert_same(run.whole("after anchor", group), run.whole("end", group))


def test_average_follows_the_masters(case: tuple[Run, dict[str, Any]]) -> None:
    run, plain = case
    assert_close(run.whole("average", None), plain["average"])


def test_a_gradient_that_is_not_finite_changes_nothing(case: tuple[Run, dict[str, Any]]) -> None:
    run, plain = case
    assert all(rank["nan"] != rank["nan"] for rank in run.ranks)
    for group in ("weights", "optimizer"):
        assert_same(run.whole("after nan", group), run.whole("end", group))
    assert run["norms"][UPDATES] == pytest.approx(plain["norms"][UPDATES], rel=1e-5)
    assert_close(run.whole("next"), plain["next"], 2e-5)


def test_a_checkpoint_of_one_process_is_taken_over(case: tuple[Run, dict[str, Any]]) -> None:
    run, plain = case
    assert_same(run.whole("loaded"), plain["end"])
    assert_same(run.whole("loaded", "optimizer"), plain["state"])
    assert run["norms"][UPDATES + 1] == pytest.approx(plain["norms"][UPDATES], rel=1e-6)
    assert_close(run.whole("resumed"), plain["next"])
    assert_same(run.whole("loaded anchor", None), plain["end"])
    assert_same(run.whole("refreshed", None), run.whole("resumed"))


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("mode", MODES)
def test_one_process_takes_over_a_checkpoint(stage: int, mode: str, children: Path) -> None:
    run, plain = Run(children, stage, mode), Plain(mode)
    assert_close(run.whole("end", "optimizer"), torch.load(children / f"{mode}.pt")["optimizer"], 1e-4)
    plain.load({group: run.whole("end", group) for group in ("weights", "optimizer")})
    plain.optimizer.schedulers[0].optimizer.param_groups[0]["lr"] = CONFIG.learning_rate
    plain.update(UPDATES)
    assert_close(plain.weights(), run.whole("next"))


@pytest.mark.parametrize("stage", STAGES)
def test_an_adapter_is_saved_whole(stage: int, children: Path) -> None:
    for number in range(RANKS):
        saved = load_file(children / f"zero{stage}-adapter-{number}" / ADAPTER_FILE)
        start = {name.replace(".default.", "."): value for name, value in Plain("lora").weights().items()}
        assert_same(saved, start)
        velocities = Run(children, stage, "lora").ranks[number]["velocity"]
        assert not torch.equal(velocities[-1], velocities[0])


def test_zero3_gives_weights_back(children: Path) -> None:
    for mode in MODES:
        total = sum(p.numel() for p in make_policy(mode).transformer.transformer_blocks.parameters())
        assert Run(children, 2, mode)["whole"] == total
        assert 0 < Run(children, 3, mode)["whole"] < 0.05 * total


def test_bf16_keeps_float32_masters_and_timesteps(children: Path) -> None:
    for mode in MODES:
        start = Plain(mode).weights()
        norms, ends = [], []
        for stage in STAGES:
            run = [torch.load(children / f"zero{stage}-bf16-{number}.pt")[mode] for number in range(RANKS)]
            assert_same({**run[0]["start"], **run[1]["start"]}, start)
            reference = make_policy(mode, bf16=True)
            if mode == "full":
                cast_weights(reference.transformer, torch.bfloat16)
            else:
                for parameter in trainable_parameters(reference.transformer).values():
                    parameter.data = parameter.data.bfloat16().float()
            # Bit for bit: no rounded timestep, no other rounding than the weights'.
            assert torch.equal(run[0]["velocity"], sample(reference))
            assert run[0]["types"] == {torch.bfloat16}
            norms.append(run[0]["norm"])
            ends.append({**run[0]["end"], **run[1]["end"]})
            # Steps smaller than bfloat16 can hold are kept.
            moved = [name for name, value in ends[-1].items() if not torch.equal(value, value.bfloat16().float())]
            assert len(moved) == len(start)
        assert norms[0] == pytest.approx(norms[1], rel=1e-2)
        assert norms[0] == pytest.approx(Plain(mode).update(0), rel=0.1)


def test_zero3_with_the_stock_forward(children: Path, plain: dict[str, Any]) -> None:
    for number in range(RANKS):
        norms = torch.load(children / f"zero3-stock-{number}.pt")
        assert norms == pytest.approx(2 * plain["full"]["norms"][:2], rel=1e-4)


def test_what_it_needs_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    from sage_fast.distributed import zero

    settings = DistributedConfig(zero_stage=2)
    with pytest.raises(ConfigError, match="torchrun"):
        zero.DeepSpeedEngine(make_policy("lora").transformer, CONFIG, settings, World(), mode="lora")
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    with pytest.raises(ConfigError, match=r"pip install 'sage-fast\[deepspeed\]'"):
        zero._import_deepspeed(torch.device("cpu"))
    monkeypatch.setitem(sys.modules, "deepspeed", SimpleNamespace(__version__="0.15.0"))
    with pytest.raises(ConfigError, match=rf"needs DeepSpeed {zero.OLDEST}, and 0.15.0 is installed"):
        zero._import_deepspeed(torch.device("cpu"))
