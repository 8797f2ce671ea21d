"""The checks at the start of a run: silent on a sound world, and each fails where its fault is put in."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import distributed as dist

from sage_fast.config.distributed import DistributedConfig
from sage_fast.config.errors import ConfigError
from sage_fast.config.rollout_sections import DataConfig
from sage_fast.config.schema import RunConfig, to_dict
from sage_fast.distributed import launch
from sage_fast.distributed.failure import selfcheck
from sage_fast.distributed.world import ALONE, World
from sage_fast.noise import NoiseKey
from sage_fast.run import run
from tests.distributed.ranks import join, run_ranks
from tests.run.test_run import MakeRun

CPU = torch.device("cpu")


def config(folder: Path) -> RunConfig:
    degrees = DistributedConfig(dp_replicate=1, dp_shard=2, sp=2, startup_timeout_seconds=77.0)
    return RunConfig(output_dir=str(folder / "run"), data=DataConfig(prompts="prompts.csv"), distributed=degrees)


def keys(world: World, per_rank: int = 2) -> list[NoiseKey]:
    first = world.dp_rank * per_rank
    videos = range(first, first + per_rank)
    return [NoiseKey(seed=0, update=0, prompt_index=video // 2, sample_index=video % 2) for video in videos]


def message(check: Callable[[], None]) -> str:
    try:
        check()
    except ConfigError as error:
        return str(error)
    return ""


def all_checks(folder: Path) -> dict[str, str]:
    """What every check says on this rank, sound and with its fault, all in one start of the processes."""
    rank = launch.rank()
    sound = config(folder)
    world = join(sound)
    groups = list(dist.distributed_c10d._world.pg_map)
    timeouts = {group._get_backend(CPU).options._timeout.total_seconds() for group in groups}
    assert len(groups) > 1 and timeouts == {sound.distributed.startup_timeout_seconds}
    results = {
        "sound": message(lambda: selfcheck.check_world(world, folder, CPU, selfcheck.noise_digests(keys(world))))
    }

    odd = replace(sound, seed=1, data=replace(sound.data, shuffle=False)) if rank == 3 else sound
    results["config"] = message(lambda: selfcheck.check_identities(to_dict(odd), CPU))

    with pytest.MonkeyPatch.context() as patch:
        version = "2.11.0" if rank in (0, 1) else "2.13.0"
        patch.setattr(selfcheck, "package_versions", lambda: {"torch": version})
        results["software"] = message(lambda: selfcheck.check_identities(to_dict(sound), CPU))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(selfcheck, "device_identity", lambda device: f"GPU-{rank % 3}")
        results["device"] = message(lambda: selfcheck.check_identities(to_dict(sound), CPU))

    for name in ("all_reduce", "all_to_all_single", "all_gather_into_tensor", "reduce_scatter_tensor"):
        with pytest.MonkeyPatch.context() as patch:
            true = getattr(dist, name)

            def faulty(output: torch.Tensor, *rest: object, true: Callable[..., None] = true, **words: object) -> None:
                # The result of one GPU has a wrong bit; the small talk of integers, which goes over the CPU, is sound.
                true(output, *rest, **words)
                if rank == 2 and output.is_floating_point():
                    output.add_(1)

            patch.setattr(dist, name, faulty)
            results[name] = message(lambda: selfcheck.check_collectives(world, CPU))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(selfcheck, "SECONDS_TO_SEE_A_FILE", 0.1)
        own = folder / "node1" if rank >= 2 else folder / "node0"
        results["folder"] = message(lambda: selfcheck.check_shared_folder(world, own))
    (folder / "file").touch()
    results["unwritable"] = message(lambda: selfcheck.check_shared_folder(world, folder / "file" / "run"))

    digests = {"model.path": "0" * 64, "prompts": ("1" if rank == 1 else "2") * 64}
    results["inputs"] = message(lambda: selfcheck.check_world(world, folder, CPU, inputs=digests))

    same = [NoiseKey(seed=0, update=0, prompt_index=0, sample_index=i) for i in range(2)]
    results["noise of one seed per video"] = message(
        lambda: selfcheck.check_noise(world, selfcheck.noise_digests(same))
    )
    part = [replace(key, seed=rank) for key in keys(world)]
    results["noise of one seed per rank"] = message(lambda: selfcheck.check_noise(world, selfcheck.noise_digests(part)))
    return results


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, str]]]:
    folder = tmp_path_factory.mktemp("selfcheck")
    return folder, run_ranks(all_checks, 4, folder)


def test_a_sound_world_passes_and_leaves_nothing_behind(answers: tuple[Path, list[dict[str, str]]]) -> None:
    folder, results = answers
    assert [r["sound"] for r in results] == [""] * 4
    assert sorted(path.name for path in folder.rglob("*")) == ["file"]


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("config", ["seed: 0 (ranks 0-2), 1 (rank 3)", "data.shuffle: True (ranks 0-2), False (rank 3)", "same files"]),
        ("software", ["torch: 2.11.0 (ranks 0-1), 2.13.0 (ranks 2-3)", "one environment"]),
        ("device", ["Ranks 0, 3 share one GPU", "CUDA_VISIBLE_DEVICES"]),
        ("all_reduce", ["sums over all ranks", "sums over the replicas of the weights", "rank 2"]),
        ("all_to_all_single", ["exchanges over the ranks of a video (sp)", "rank 2"]),
        (
            "all_gather_into_tensor",
            ["gathers over the shards of the weights", "gathers over the ranks of a video (sp)", "rank 2"],
        ),
        ("reduce_scatter_tensor", ["scatters sums over the shards of the weights", "rank 2"]),
        ("folder", ["node0' is not the same folder", "ranks 2-3", "file system that all nodes share"]),
        ("unwritable", ["cannot be written by rank 0", "another folder"]),
        ("inputs", ["digests): prompts: 222222222222 (ranks 0, 2-3), 111111111111 (rank 1). Put"]),
        ("noise of one seed per video", ["2 video(s)", "ranks 0, 2", "same index"]),
        ("noise of one seed per rank", ["Ranks 0-1 share the tokens", "different noise"]),
    ],
)
def test_a_fault_is_named(answers: tuple[Path, list[dict[str, str]]], fault: str, said: list[str]) -> None:
    texts = [result[fault] for result in answers[1]]
    if fault != "folder":  # every rank has asked for a folder of its own there
        assert len(set(texts)) == 1
    for part in said:
        assert part in texts[0]


def test_one_process_is_not_checked(tmp_path: Path) -> None:
    selfcheck.check_world(ALONE, tmp_path, CPU)
    selfcheck.check_identities(to_dict(config(tmp_path)), CPU)
    assert not list(tmp_path.iterdir())


def test_a_run_has_its_weights_and_prompts_compared(tiny_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    compared: dict[str, str] = {}
    monkeypatch.setattr(run, "check_world", lambda *_, noise, inputs: compared.update(inputs))
    trainer = run.Run(tiny_run()).trainer
    prompts = run.prompts_digest(trainer.schedule.prompts, trainer.eval_prompts)
    assert compared == {"model.path": trainer.model_digest, "prompts": prompts}


def test_the_digest_of_the_source_sees_a_changed_line_and_no_changed_place(tmp_path: Path) -> None:
    for place in ("a", "b"):
        (tmp_path / place / "package" / "inner").mkdir(parents=True)
        (tmp_path / place / "package" / "inner" / "one.py").write_text("x = 1\n")
    digests = [selfcheck.source_digest([tmp_path / place / "package"]) for place in ("a", "b")]
    assert digests[0] == digests[1]
    (tmp_path / "b" / "package" / "inner" / "one.py").write_text("x = 2\n")
    assert selfcheck.source_digest([tmp_path / "b" / "package"]) != digests[0]


def test_many_differences_are_counted() -> None:
    left, right = {f"key{i}": "1" for i in range(9)}, {f"key{i}": "2" for i in range(8)}
    lines = selfcheck.compare([left, right])
    assert lines[-1] == "and 5 more" and len(lines) == selfcheck.MOST_SHOWN + 1
    assert selfcheck.compare([{"a": "1"}, {}]) == ["a: 1 (rank 0), missing (rank 1)"]
