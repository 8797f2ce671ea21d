"""The Python API: train, and what one does with a run afterwards. The command line is
built on it.

    import sage_fast

    run = sage_fast.train("toy_cpu", reward=[my_reward, "toy"], callbacks=[Mine()])
    run.metrics[-1]["reward/mean"]
    print(run.evaluate())
    sage_fast.generate("runs/toy_cpu", ["a red circle moving left"])

A run is given as what `train` has returned, as its directory, or as a configuration
whose `output_dir` it is. Each failure is an exception:
`sage_fast.config.errors.SageError` is the base class of those whose message says what
to change. docs/how_to/python.md has examples.
"""

import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from sage_fast.checkpoint.folder import list_checkpoints, update_of
from sage_fast.config.errors import ConfigError
from sage_fast.config.files import loads
from sage_fast.config.load import check_trust, check_values, load_config, with_overrides
from sage_fast.config.registry import REGISTERED, register
from sage_fast.config.schema import RunConfig, to_dict
from sage_fast.distributed.start import rank_device, world_size
from sage_fast.evaluation import REWARD, PairedTest, headline
from sage_fast.models.family import describe_model, model_family
from sage_fast.planning.estimate import settle_memory
from sage_fast.planning.work import count_weights
from sage_fast.policy.adapters import weights_digest
from sage_fast.policy.layouts import adapter_files, read_adapter
from sage_fast.records import Prompt
from sage_fast.rewards.base import Reward
from sage_fast.rewards.server import function_score, lasting_streams, takes_samples
from sage_fast.run import run as training
from sage_fast.run.directory import RunDirectory, read_metrics
from sage_fast.run.prompt_files import load_eval_prompts
from sage_fast.run.resume import check_same_run
from sage_fast.run.run_status import Callback
from sage_fast.sde import SDE_TYPES
from sage_fast.tools.exporting import Export, export
from sage_fast.tools.generation import (
    TRAINED_MODEL,
    choose_checkpoint,
    initial_weights,
    load_generator,
    write_videos,
)
from sage_fast.tools.paired import PairedEvaluation, Report, write_report

FILE = re.compile(r"\S+\.(csv|jsonl?|txt)", re.IGNORECASE)
"""A text that is the name of a prompt file."""

MOST_ON_CPU = 1_000_000_000
"""Parameters from which a model is refused on a CPU: one video of HunyuanVideo-1.5,
with 8.3e9, takes hours there.
"""

Prompts = str | Prompt | Sequence[str | Prompt]

RewardLike = Reward | type[Reward] | Callable[..., Any] | str

_REWARDS: dict[Path, dict[str, Any]] = {}
"""Objects that score the runs of this process, by directory and name: those of a later
run may have the same names.
"""


@dataclass(frozen=True, kw_only=True, repr=False)
class TrainedRun:
    """A run in its directory: what it has measured, and what can be done with its
    newest checkpoint.

    Attributes:
        config: of the run.
        update: optimizer updates done.
        finished: False where it was stopped before its last one.
        test: the last evaluation against the first one; None where there are no two.
        stop_reason: what the callback that stopped it has said.

    Example: `train(load_config("toy_cpu"))`, or `open_run("runs/toy_cpu")`
    """

    config: RunConfig
    update: int
    finished: bool
    test: PairedTest | None = None
    stop_reason: str | None = None

    def __repr__(self) -> str:
        end = "finished" if self.finished else "stopped"
        if self.stop_reason:
            end += f": {self.stop_reason}"
        gain = "The reward is not compared: there are no two evaluations."
        if self.test is not None:
            gain = headline({REWARD: self.test})
        directory = RunDirectory(self.output_dir)
        updates = self.config.training.num_updates
        return (
            f"TrainedRun in {directory}: update {self.update} of {updates}, "
            f"{end}\n{gain}\nlook at {directory.page}"
        )

    @property
    def output_dir(self) -> Path:
        """The run's directory."""
        return Path(self.config.output_dir)

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The rows of metrics.jsonl as they are now, oldest first; docs/real_model.md
        says what the names mean.
        """
        return read_metrics(RunDirectory(self.output_dir).metrics)

    def evaluate(self, output_dir: str | Path | None = None, **options: Any) -> Report:
        """Compare the trained model with its base model; see `evaluate`."""
        return evaluate(self, output_dir, **options)

    def generate(
        self,
        prompts: Prompts,
        output_dir: str | Path | None = None,
        **options: Any,
    ) -> list[Path]:
        """Write videos of prompts with the trained model, and return their files; see
        `generate`.
        """
        return generate(self, prompts, output_dir, **options)

    def export(self, output_dir: str | Path | None = None, **options: Any) -> Export:
        """Write the trained weights for other programs; see `export`."""
        return export(self, output_dir, **options)


RunLike = TrainedRun | RunConfig | str | Path


def train(
    config: RunLike | Sequence[str | Path],
    *,
    prompts: Prompts | None = None,
    reward: RewardLike | Sequence[RewardLike] | None = None,
    reward_weights: Mapping[str, float] | None = None,
    callbacks: Callback | Sequence[Callback] = (),
    allow_changes: str | Collection[str] = (),
    allow_cpu: bool = False,
    **overrides: Any,
) -> TrainedRun:
    """Train in this process, or in the processes that a launcher has started.

    Args:
        config: a configuration, a preset, a YAML file or several, or a run.
        prompts: one or more, used instead of `data.prompts`: texts, or with pictures
            `Prompt(text=..., image="a.png", index=0)`, whose places in the list number
            them.
        reward: replaces `reward.rewards`: a function `f(videos, prompts)`, where videos
            are (B, F, 3, H, W) uint8 and the result is B numbers or {score name: B
            numbers}; or a class or an object with such a method `score`, or with
            `score_samples`; or a name as in `reward.rewards`; or a list of these.
            Higher is better.
        reward_weights: score name -> weight. None: the score of a function is named
            after it (`lambda` without a name) and has weight 1; others have the weights
            of `reward.weights`.
        callbacks: called on rank 0 at every rollout, update, evaluation and save; each
            may stop the run.
        allow_changes: dotted keys that may differ from those of the checkpoint which
            `config.resume` goes on from.
        allow_cpu: train a model of more than 1e9 parameters on a CPU.
        overrides: values of the configuration by key: `output_dir="runs/mine"`,
            `training={"num_updates": 3}`, or `**{"training.num_updates": 3}`.

    Raises:
        ConfigError: the configuration cannot run; nothing was changed.
        CallbackError: a callback raised; the run was saved.
        TrainingError, RewardError, CheckpointError, RunDirectoryError, OSError: the
            message says what to do, and what was saved before is intact. RankFailure:
            another rank has died, failed or hung.
    """
    config = _config_of(config, overrides)
    if prompts is not None:
        config = replace(config, data=replace(config.data, prompts=_rows(prompts)))
    if reward is not None:
        config = _with_reward(config, reward, reward_weights)
    elif reward_weights is not None:
        raise ConfigError(
            "reward_weights belongs to reward=; without it, set reward.weights of the "
            "configuration."
        )
    refuse_cpu(config, allow_cpu)
    # A lone word would be taken for a list of its letters.
    allowed = [allow_changes] if isinstance(allow_changes, str) else allow_changes
    told = callbacks if isinstance(callbacks, Sequence) else [callbacks]
    _REWARDS[Path(config.output_dir).absolute()] = {
        name: REGISTERED[name] for name in config.reward.rewards if name in REGISTERED
    }
    with lasting_streams():
        result = training.train(
            settle_memory(config), allow_changes=allowed, callbacks=told
        )
    return TrainedRun(
        config=replace(config, output_dir=str(result.output_dir)),
        update=result.update,
        finished=result.finished,
        test=result.test,
        stop_reason=result.stop_reason,
    )


def open_run(directory: str | Path, *, trust_config: bool = False) -> TrainedRun:
    """A run that was trained before, wherever its directory lies now.

    Args:
        trust_config: import and call code of other packages that its configuration
            names. Rewards that this process has given to `train` need no trust.

    Raises:
        ConfigError: the directory holds no run, or one that names code which is not
            trusted.
    """
    run = RunDirectory(directory)
    if not run.is_run:
        raise ConfigError(f"{run} holds no config.yaml: it is not a run directory.")
    # The directory may have been moved since it was trained in.
    config = load_config(run.config, {"output_dir": str(run)})
    if not trust_config:
        check_trust(config, run.path, REGISTERED)
    update = max(map(update_of, list_checkpoints(run.checkpoints)), default=0)
    test = None
    if run.result.is_file():
        test = PairedTest(**loads(run.result.read_text("utf-8"))["reward"])
    return TrainedRun(
        config=config,
        update=update,
        finished=update >= config.training.num_updates,
        test=test,
    )


def evaluate(
    run: RunLike,
    output_dir: str | Path | None = None,
    *,
    checkpoint: str = "auto",
    lora: str | Path | None = None,
    num_videos: int = 8,
    resamples: int = 10_000,
    overwrite: bool = False,
    allow_cpu: bool = False,
) -> Report:
    """Score a trained model and its base model on the evaluation prompts, in pairs, and
    write a report.

    The base model is the one that the run starts from: `model.adapter` is part of it.

    Args:
        output_dir: a folder; None means `scores` in the run's directory.
        checkpoint: `auto` (newest of the run), `best` (by its evaluations) or a
            checkpoint folder.
        lora: an adapter instead.
        num_videos: prompts whose videos the report shows.
        resamples: of the bootstrap.
        overwrite: evaluate again what has been evaluated in `output_dir`.

    Raises:
        ConfigError, CheckpointError, RewardError, OSError: each says what to do; a
            model that was finished stays so.
    """
    if num_videos < 0:
        raise ConfigError(f"--num-videos is {num_videos}; it must be at least 0.")
    if resamples < 100:
        raise ConfigError(
            f"--resamples is {resamples}; percentiles need at least 100, and 10000 "
            "are usual."
        )
    _one_process()
    config = _config_of(run, {})
    output_dir = Path(output_dir or RunDirectory(config.output_dir).scores).expanduser()
    refuse_cpu(config, allow_cpu)
    config = settle_memory(config)
    prompts = load_eval_prompts(config)
    if len(prompts) < 2:
        file = config.evaluation.prompts or config.data.prompts
        raise ConfigError(
            f"A paired evaluation needs at least 2 prompts, and {file} holds one."
        )
    chosen = _choose_weights(config, checkpoint, lora)
    if chosen is None:
        raise ConfigError(
            "evaluate compares a trained model with the base model: give --checkpoint "
            "auto or a folder, or --lora."
        )
    trained, weights = chosen
    report = PairedEvaluation(
        config=config,
        prompts=prompts,
        folder=output_dir,
        trained=trained,
        weights=weights,
        overwrite=overwrite,
    ).report(num_videos=num_videos, resamples=resamples)
    write_report(output_dir, report)
    return report


def generate(
    run: RunLike,
    prompts: Prompts | None,
    output_dir: str | Path | None = None,
    *,
    checkpoint: str = "auto",
    lora: str | Path | None = None,
    sampler: str = "ode",
    solver: str | None = None,
    num_videos: int = 1,
    seed: int | None = None,
    overwrite: bool = False,
    allow_cpu: bool = False,
) -> list[Path]:
    """Write videos and a contact sheet into `output_dir`, and return the files of the
    videos.

    A video that is there already, made alike, is kept.

    Args:
        prompts: one text or several, or with pictures `Prompt(text=...,
            image="file.png", index=0)`, whose places in the list number them; None
            takes the run's evaluation prompts.
        output_dir: a folder; None means `generated` in the run's directory.
        checkpoint: `auto` (newest of the run), `best` (by its evaluations), `none` (the
            model that the run starts from) or a checkpoint folder.
        lora: an adapter instead, also of `model.adapter`.
        sampler: `ode`, or an SDE type.
        solver: of the `ode`; None takes `evaluation.solver`.
        num_videos: per prompt.
        seed: of the noise; None takes `evaluation.seed`.
        overwrite: make videos again that exist already.

    Raises:
        ConfigError, CheckpointError, OSError: each says what to do.
    """
    # Before the model is loaded, so that a mistake is reported within a second.
    if sampler not in SDE_TYPES:
        raise ConfigError(
            f"--sampler is {sampler!r}; choose one of {', '.join(SDE_TYPES)}."
        )
    if solver is not None and sampler != "ode":
        raise ConfigError(
            f"--solver is {solver!r}, but --sampler {sampler} draws noise in its own "
            "steps. Leave one of them out."
        )
    if num_videos < 1:
        raise ConfigError(f"--num-videos is {num_videos}; it must be at least 1.")
    _one_process()
    config = _config_of(run, {})
    # refuses what the sampler cannot have
    replace(config.rollout, sde_type=sampler)
    refuse_cpu(config, allow_cpu)
    given = {"evaluation.seed": seed, "evaluation.solver": solver}
    given = {key: value for key, value in given.items() if value is not None}
    evaluation = with_overrides(config, given).evaluation
    if prompts is not None:
        evaluation = replace(evaluation, prompts=_rows(prompts), num_prompts=None)
    config = replace(config, evaluation=evaluation)
    records = load_eval_prompts(config)
    chosen = _choose_weights(config, checkpoint, lora)
    if chosen is not None:
        # other weights take its place
        config = replace(config, model=replace(config.model, adapter=None))
    generator = load_generator(config, records)
    name = initial_weights(config.model)
    if chosen is not None:
        path, weights = chosen
        generator.use_trained(weights)
        # with a digest: other weights may lie at the same path
        name = f"{path} ({weights_digest(path)[:12]})"
    return write_videos(
        generator,
        Path(output_dir or RunDirectory(config.output_dir).generated).expanduser(),
        weights=name,
        sampler=sampler,
        num_videos=num_videos,
        overwrite=overwrite,
    )


# --------------------------------------------------------------------------------------
# parts


def _config_of(
    run: RunLike | Sequence[str | Path], overrides: Mapping[str, Any]
) -> RunConfig:
    """The configuration of a run, which may be given by its directory; else that of a
    preset or of files.
    """
    if isinstance(run, str | Path) and RunDirectory(run).is_run:
        run = open_run(run)
    if isinstance(run, TrainedRun):
        run = run.config
    if isinstance(run, RunConfig):
        # One that was put together in Python has had no range checked yet.
        check_values(to_dict(run))
        config = with_overrides(run, overrides) if overrides else run
    else:
        config = load_config(run, overrides)
    REGISTERED.update(_REWARDS.get(Path(config.output_dir).absolute(), {}))
    return config


def _rows(prompts: Prompts) -> list[str | dict[str, str | int]]:
    """The prompts as the configuration lists them, which a saved one can be used with
    from any directory. ConfigError for the name of a file.
    """
    given: Any = prompts
    if isinstance(prompts, str | Prompt | Path | Mapping):
        given = [prompts]
    rows: list[Any] = []
    for prompt in given:
        if isinstance(prompt, Prompt):
            row: dict[str, str | int] = {"prompt": prompt.text}
            if prompt.seed is not None:
                row["seed"] = prompt.seed
            if prompt.image is not None:
                row["image"] = os.path.abspath(prompt.image)
            rows.append(row)
        elif isinstance(prompt, str | Path):
            if FILE.fullmatch(str(prompt)):
                raise ConfigError(
                    f"prompts is {str(prompt)!r}, a file, but it must be a text or a "
                    "list of them. A file goes into the configuration, as "
                    "data.prompts (train) or evaluation.prompts (generate)."
                )
            # YAML does not know numpy's texts
            rows.append(str(prompt))
        else:
            rows.append(prompt)
    return rows


def _one_process() -> None:
    if world_size() > 1:
        raise ConfigError(
            f"This is for one process, but {world_size()} were started (WORLD_SIZE), "
            "and each would do the same."
        )


def _choose_weights(
    config: RunConfig, checkpoint: str, lora: str | Path | None
) -> tuple[Path, Mapping[str, Tensor] | Path] | None:
    """The checkpoint or adapter that is meant, and its weights, averaged where the run
    kept an average.

    None for the base model. Tensors are read one at a time, and an adapter when it is
    used.

    Raises:
        ConfigError: nothing to choose from, or a checkpoint of another model.
            CheckpointError: a damaged one.
    """
    if lora is not None:
        try:
            file, *others = adapter_files(Path(lora))
            if others and others[0].suffix == file.suffix:  # the other expert's
                file = Path(lora)
            # For what is wrong with it, before anything is computed.
            read_adapter(file, model_family(config.model.family))
        except ValueError as error:
            raise ConfigError(f"--lora: {error}") from error
        return file, file
    found = choose_checkpoint(checkpoint, RunDirectory(config.output_dir))
    if found is None:
        return None
    check_same_run(
        found.state["config"], to_dict(config), found.folder, only=TRAINED_MODEL
    )
    return found.folder, found.tensors.get("ema", found.tensors["weights"])


def _with_reward(
    config: RunConfig,
    given: RewardLike | Sequence[RewardLike],
    weights: Mapping[str, float] | None,
) -> RunConfig:
    """The configuration with rewards of this process's, or some by name, instead of
    those that it names.
    """
    if weights is not None and not (
        isinstance(weights, Mapping)
        and all(isinstance(value, int | float) for value in weights.values())
    ):
        raise ConfigError(
            f"reward_weights is {weights!r}, but it must be {{score name: number}}."
        )
    rewards = given if isinstance(given, list | tuple) else [given]
    names = list[str]()
    own = dict[str, float]()
    for reward in rewards:
        scores = hasattr(reward, "score") or takes_samples(reward)
        is_function = not isinstance(reward, str) and not scores
        if is_function and not callable(reward):
            raise ConfigError(
                f"reward is {reward!r}. Give a function f(videos, prompts), an object "
                "with `score`, or a name; keys of "
                'the section `reward` are given as **{"reward.KEY": value}.'
            )
        names.append(reward if isinstance(reward, str) else register(reward, names))
        if is_function:
            own[function_score(names[-1])] = 1.0
    if weights is None:
        # Where all are functions, the weights of the configuration name scores that
        # nothing returns.
        weights = own if len(own) == len(rewards) else {**config.reward.weights, **own}
    options = {
        name: chosen
        for name, chosen in config.reward.options.items()
        if name in (*names, *config.reward.evaluation)
    }
    return replace(
        config,
        reward=replace(
            config.reward, rewards=names, options=options, weights=dict(weights)
        ),
    )


def refuse_cpu(config: RunConfig, allowed: bool) -> None:
    """ConfigError for a large model on a CPU, where one video takes hours, unless that
    is allowed.
    """
    if allowed or rank_device(config.model.device).type != "cpu":
        return
    try:
        count = count_weights(config, describe_model(config.model).transformer).total
    except ValueError:  # ConfigError among them
        return  # what is wrong with the model or its adapters is said when it is loaded
    if count > MOST_ON_CPU:
        raise ConfigError(
            f"The model has {count / 1e9:.1f} billion parameters and would run on a "
            "CPU (model.device is "
            f"{config.model.device!r}, and no GPU is used): one video takes hours. "
            "Use a GPU (`sage-fast plan` says how much memory it needs), try things out "
            "with the preset toy_cpu, or add --allow-cpu if you mean it."
        )
