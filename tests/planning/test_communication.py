"""Many GPUs in the plan: who talks to whom, bytes against counting by hand, memory of
shards.
"""

import json
from dataclasses import replace
from math import ceil
from pathlib import Path

import pytest

from sage_fast.commands.cli import main
from sage_fast.config.errors import ConfigError
from sage_fast.config.load import load_config
from sage_fast.config.schema import RunConfig
from sage_fast.models.hunyuan15.backbone import forward_work
from sage_fast.planning import estimate
from sage_fast.planning.devices import DEVICES, waiting
from sage_fast.planning.estimate import Plan, longest_prompt
from sage_fast.planning.work import Group, Layout, plan_layout
from tests.planning.small import small_plan

pytestmark = pytest.mark.usefixtures("in_the_repository")
H100 = DEVICES["h100"]
WIDTH = 256
LAYERS = 3
TOKENS = 72
TEXT = 250
FULL = [
    "--training.mode=full",
    "--model.dtype=float32",
    "--model.adaln=auto",
    "--distributed.param_dtype=bfloat16",
]


def small(*overrides: str, gpus: int) -> Plan:
    """Three narrow blocks, 72 video tokens, two videos of two steps per rank; every
    step's anchor lies behind.
    """
    words = [
        "--evaluation.num_steps=2",
        "--rollout.num_steps=2",
        "--rollout.batch_size=4",
    ]
    return small_plan(*words, *overrides, gpus=gpus)


# --------------------------------------------------------------------------------------
# who talks to whom


def test_the_ranks_of_a_video_lie_on_a_node_where_they_fit() -> None:
    whole = Layout(replicate=4, shard=8, sp=2).videos
    assert whole == Group(ranks=2, nodes=1, local=2)
    parted = Layout(replicate=4, sp=3).videos
    assert parted == Group(ranks=3, nodes=2, local=1), "ranks 6, 7 | 8"


@pytest.mark.parametrize("checkpointing", ["selective", "full"])
def test_tokens_and_heads_are_swapped_twice_per_layer_and_pass(
    checkpointing: str,
) -> None:
    """72 tokens; 2 + 2 all-to-alls per layer, without the text of the last one."""
    sp = 2
    plan = small(
        f"--distributed.sp={sp}", f"--model.checkpointing={checkpointing}", gpus=sp
    )
    share = ceil(TOKENS / sp)
    away = (sp - 1) / sp
    forward = 2 * away * WIDTH * (LAYERS * 4 * share + (LAYERS - 1) * TEXT)
    backward = 2 * away * WIDTH * (LAYERS * 8 * share + (LAYERS - 1) * TEXT)
    assert plan.waits["rollout"] == pytest.approx(16 * forward / (H100.link * 1e9))
    # Blocks that keep nothing but their input exchange again.
    repeated = LAYERS if checkpointing == "full" else 0
    again = 2 * away * WIDTH * (repeated * 4 * share + min(repeated, LAYERS - 1) * TEXT)
    assert plan.waits["update"] == pytest.approx(
        16 * (forward + backward + again) / (H100.link * 1e9)
    )
    assert small(gpus=8).waits == {}, "nothing else is waited for"
    apart = replace(plan, layout=replace(plan.layout, node=1))
    far = waiting(apart, plan.visits, H100, evaluation_tokens=TOKENS, eval_batches=0)[
        "rollout"
    ]
    assert far == pytest.approx(16 * forward / (H100.network * 1e9)), (
        "ranks on two nodes"
    )


# --------------------------------------------------------------------------------------
# work, memory, time


def test_shards_of_all_weights_and_what_stays_whole() -> None:
    plan = small(*FULL, "--optimizer.name=adamw", "--training.ema_decay=0.9", gpus=8)
    update = plan.memory.phases["update"].parts()
    weights = plan.weights
    assert update["transformer"] == 4 * weights.total / 8
    for name in ("gradients", "anchor", "average (EMA)"):
        assert update[name] == 4 * weights.trained / 8
    assert update["optimizer state"] == 8 * weights.trained / 8
    # Gathered through the rollout in bfloat16; in the update a few blocks, and
    # gradients of two in float32.
    assert plan.memory.phases["rollout"].gathered_weights == 2 * weights.total
    rest = weights.total - LAYERS * weights.block
    assert (
        update["weights in flight"]
        == 2 * (3 * weights.block + rest) + 4 * 2 * weights.block
    )
    assert update["gathered weights"] == 0
    offloaded = (
        small(*FULL, "--distributed.cpu_offload=true", gpus=8)
        .memory.phases["update"]
        .parts()
    )
    assert (
        offloaded["transformer"]
        == offloaded["gradients"]
        == offloaded["optimizer state"]
        == 0
    )


@pytest.mark.parametrize(("batch_size", "groups"), [(3, 2), (4, 1), (6, 2)])
def test_a_rank_accumulates_for_all_groups_that_its_videos_are_of(
    batch_size: int, groups: int
) -> None:
    """Groups of four on four ranks: with three videos each, the second has one of the
    first group, two of the next.
    """
    plan = small(
        "--training.update=single_pass", f"--rollout.batch_size={batch_size}", gpus=4
    )
    accumulators = plan.memory.phases["rollout"].gradient_accumulators
    assert accumulators == 4 * plan.weights.trained * (batch_size + groups)


def test_adapters_are_whole_beside_sharded_weights() -> None:
    one = small(gpus=1).memory.phases["update"].parts()
    # base weights that stay gathered are not sharded
    for keep, parts in (("never", 2), ("always", 1)):
        overrides = ("--distributed.sp=2", f"--distributed.keep_gathered={keep}")
        two = small(*overrides, gpus=2).memory.phases["update"].parts()
        for name in ("adapters", "gradients", "optimizer state", "anchor"):
            assert two[name] == one[name] > 0
        assert (
            two["transformer"] == one["transformer"] / parts
            and two["gathered weights"] == 0
        )


def test_waiting_is_in_the_seconds() -> None:
    plan = small(*FULL, "--distributed.sp=2", "--distributed.dp_shard=4", gpus=8)
    exchanged = (
        sum(s for phase, s in plan.waits.items() if phase != "evaluation")
        / plan.config.rollout.batch_size
    )
    shape = plan.description.transformer
    longer = (
        forward_work(shape, TOKENS, round(plan.longest * TEXT)).total
        / forward_work(shape, TOKENS, TEXT).total
        - 1
    )
    computed = sum(
        p.predicted - p.waiting
        for p in plan.phases
        if p.name in ("rollout", "anchor", "update")
    )
    assert plan.longest > 1 and plan.waiting == pytest.approx(
        exchanged + longer * computed
    )
    assert plan.videos_per_gpu_hour == pytest.approx(
        3600 / (2 * plan.seconds_per_video)
    )


def test_ranks_wait_for_the_longest_of_their_prompts(tmp_path: Path) -> None:
    """Of prompts of 1, 2 and 3 words two groups draw 3 with chance 5/9, 2 with 3/9, 1
    with 1/9.
    """
    prompts = tmp_path / "prompts.csv"
    prompts.write_text("prompt\none\none two\none two three\n")
    config = load_config(
        "configs/hv15_480p_lora_8gpu.yaml", [f"--data.prompts={prompts}"]
    )
    batch = config.rollout.batch_size
    group = config.rollout.num_generations
    assert longest_prompt(config, 2 * group // batch) == pytest.approx(
        (3 * 5 + 2 * 3 + 1) / 9 / 2
    )
    assert longest_prompt(config, group // batch) == longest_prompt(config, 1) == 1, (
        "one prompt, or one rank"
    )
    missing = replace(config, data=replace(config.data, prompts="nowhere.csv"))
    assert longest_prompt(missing, 8) == 1


MIB = 2**20
RING_AND_TREE = 2 * 32 * 12 * MIB
"""Two neighbours, 32 channels, 10 MiB to receive and 2 MiB to send."""


def test_communication_buffers_are_on_every_gpu_once_ranks_communicate() -> None:
    """Reported, each with what else the first call takes: 0.7 GB for a group of A100s,
    3.3 GB for eight H100s' all-to-all.
    """
    assert 688e6 < Layout(replicate=4).communication_buffers / 2 < 1.5 * 688e6
    eight = Layout(sp=8).communication_buffers - 2 * RING_AND_TREE
    assert eight == pytest.approx(3.28e9, rel=0.15)
    alone = small(gpus=1)
    several = small("--distributed.sp=2", gpus=4)
    for name, phase in several.memory.phases.items():
        assert phase.communication_buffers == (
            0 if name == "encode" else several.layout.communication_buffers
        )
        assert phase.communication_buffers <= phase.total
    assert not any(
        phase.communication_buffers for phase in alone.memory.phases.values()
    )


# --------------------------------------------------------------------------------------
# degrees, command, advice


def test_a_video_has_a_token_for_every_rank() -> None:
    config: RunConfig = load_config(
        "configs/hv15_480p_lora_1gpu.yaml", ["--distributed.sp=16"]
    )
    with pytest.raises(ConfigError, match="a video has 12 tokens"):
        plan_layout(config, 16, heads=16, tokens=12)


def test_the_command_takes_the_degrees_of_the_configuration_and_says_whether_it_fits(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(estimate, "find_options", lambda *arguments: [])
    words = ["plan", "configs/toy_cpu.yaml", "--device", "h100", "--distributed.sp=2"]
    assert main([*words, "--json"]) == 0
    tree = json.loads(capsys.readouterr().out)
    assert tree["fits"] and tree["weights"]["total"] == 9_533_120
    assert tree["layout"] == {"replicate": 1, "shard": 1, "sp": 2, "node": 8}
    assert 0 < tree["waiting"] < tree["seconds_per_video"]
    assert tree["waits"].keys() == {"rollout", "anchor", "update", "evaluation"}
    assert main([*words, "--memory", "0.001", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["fits"] is False
