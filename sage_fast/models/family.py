"""Interface of a model family: the parts of a video model, facts about them before it
is loaded, and its transformer.

Shapes: B batch, C channels, F frames, H, W.
"""

import logging
import math
import tempfile
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from operator import attrgetter
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from sage_fast.config.errors import ConfigError
from sage_fast.config.registry import MODEL_FAMILIES, TRANSFORMERS, describe, resolve
from sage_fast.config.sections import Guidance, ModelConfig
from sage_fast.distributed.world import SINGLE_PROCESS, World
from sage_fast.models import hub
from sage_fast.models.stored import FusedForward, StoredWeights, in_parts
from sage_fast.records import Prompt, PromptEmbeds

logger = logging.getLogger(__name__)

Latent = tuple[int, int, int, int]
"""Shape (C, F, H, W) of the latents of one video."""


class PromptEncoder(Protocol):
    """Turns texts into conditioning, and for weights that animate pictures
    (`WeightFacts.pictures`) `Pictured` texts.

    For `doctor --deep` it may have a method `encode_plainly(text) -> Tensor`: the
    tokens `PromptEmbeds.text` of one prompt, computed without its own shortcuts.
    """

    def prepare(
        self,
        texts: Sequence[Any],
        world: World = SINGLE_PROCESS,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> Sequence[int | tuple[int, ...]]:
        """Have what `encode` will be asked for at hand, such as on disk, and return the
        number of tokens of every text: of several kinds of tokens a tuple. Collective.

        A run calls it once, with all its texts, before the transformer is on the GPU:
        an encoder may load large models for the call and release them after. A call
        that takes long says at intervals, by `progress`, how many texts are done of how
        many, and lets no rank wait for the whole of another's work: a start is given up
        after some time without progress.
        """
        ...

    def encode(self, texts: Sequence[Any]) -> list[PromptEmbeds]:
        """One record per text, on the CPU; the empty string is the unconditional prompt
        of classifier-free guidance.

        A run calls it in every rollout, with the texts of the videos of this rank.
        """
        ...


class VideoDecoder(Protocol):
    """Turns latents into pixels.

    For `doctor --deep` it may have a method `decode_plainly(latents) -> Tensor`: what
    `decode` gives, computed by the stock class.
    """

    def latent_shape(self, num_frames: int, height: int, width: int) -> Latent:
        """(C, F, H, W) of one video's latents. ValueError when the size cannot be
        encoded.
        """
        ...

    def decode(self, latents: Tensor) -> Tensor:
        """(B, C, F, H, W) float32 latents to (B, frames, 3, height, width) uint8 RGB
        videos on the CPU.

        A function of each sample by itself, so that a batch may be split over
        processes.
        """
        ...


@dataclass(kw_only=True)
class WeightFacts:
    """Facts that weights on this machine state."""

    guidance_distilled: str | None = None
    """File that says that guidance is distilled into the weights; None for a model that
    is guided by two forwards.
    """
    shift: float | None = None
    """Timestep shift that the model was published with; None where nothing says."""
    least_steps: int | None = None
    """Fewest denoising steps with which its owners say that it draws correctly; None
    where they say nothing.
    """
    experts: int = 1
    """Transformers that take turns by the noise level."""
    pictures: bool | None = False
    """True for weights that animate the picture of a prompt: each prompt needs one
    then, and has none otherwise. None for weights that take prompts with and without.
    """

    def check_pictures(self, prompts: Sequence[Prompt]) -> None:
        """ValueError where prompts lack the picture that the model animates, or have
        one that it would not read.
        """
        wrong = [
            prompt
            for prompt in prompts
            if (prompt.image is not None) is not self.pictures
        ]
        if not wrong or self.pictures is None:
            return
        those = (
            f"{len(wrong)} of {len(prompts)} prompts have "
            f"{'no' if self.pictures else 'a'} picture"
        )
        kind, other = ("image", "text") if self.pictures else ("text", "image")
        if self.pictures:
            fix = "Name one in the column 'image' of the prompt file or by --image"
        else:
            fix = "Leave the column 'image' or --image out"
        raise ValueError(
            f"{those}, the first is {wrong[0].text[:60]!r}, but these weights are "
            f"{kind}-to-video. {fix}, or set "
            f"model.path to {other}-to-video weights."
        )

    def check_guidance(
        self, guidance_scale: Guidance, key: str = "rollout.guidance_scale"
    ) -> None:
        """ValueError where guidance is distilled into weights that would be guided once
        more, or where a scale is for an expert that is not there.
        """
        if isinstance(guidance_scale, tuple) and len(guidance_scale) != self.experts:
            raise ConfigError(
                f"{key} is {list(guidance_scale)}, for two experts, but these weights "
                "are one transformer. Give one number."
            )
        if self.guidance_distilled is not None and guidance_scale != 1.0:
            raise ValueError(
                f"{key} is {guidance_scale}, but guidance is distilled into these "
                "weights "
                f"({self.guidance_distilled} says so), and guiding twice distorts the "
                "video. Set "
                f"{key} to 1, or use weights without distillation, such as 480p_t2v."
            )

    def shift_difference(self, shift: float) -> str | None:
        """Warning where a run's timestep shift differs from the one that the model was
        published with; None else.

        A warning and no error: another shift samples other noise levels of the same
        flow, which may be meant.
        """
        if self.shift is None or self.shift == shift:
            return None
        return (
            f"rollout.shift is {shift:g}, but these weights were published with a "
            f"shift of {self.shift:g}. Set "
            f"rollout.shift to {self.shift:g}, unless you mean to sample and train at "
            "other noise levels."
        )

    def few_steps(self, steps: Mapping[str, int]) -> dict[str, str]:
        """Warnings by key for the keys with fewer steps than `least_steps`; a rollout
        may be meant to be cheaper.
        """
        least = self.least_steps or 0
        return {
            key: f"{key} is {count}, but the owners of these weights say that they must "
            f"have {least} steps to draw "
            f"correctly. Set it to {least}, unless cheaper videos are meant."
            for key, count in steps.items()
            if count < least
        }

    def warn(self, shift: float, steps: Mapping[str, int]) -> None:
        """Log `shift_difference` and `few_steps` where there are any."""
        if (text := self.shift_difference(shift)) is not None:
            logger.warning("%s", text)
        for text in self.few_steps(steps).values():
            logger.warning("%s", text)


@dataclass(kw_only=True)
class Components(WeightFacts):
    """The three parts of a video model that a run is made of, and facts about its
    weights.

    The transformer is on the CPU, in `model.dtype` or in float32 (the run casts it
    then), in evaluation mode.
    """

    transformer: Any
    weights: StoredWeights | None = None
    """Where its weights are. It lacks them until `weights.read_into(transformer)`;
    None: it has them.
    """
    prompt_encoder: PromptEncoder
    video_decoder: VideoDecoder


@dataclass(frozen=True, kw_only=True)
class Decoding:
    """How some videos are decoded at once, and the activations that takes.

    Example: one video of 81 frames of 480x832 takes 4.4e9 bytes in float16.
    """

    peak_bytes: float = 0.0
    tiled: bool = False
    limited: bool = False
    """True if `model.decode_memory_gib` decides how."""
    dtype: str | None = None
    """Name of a type of torch; None means that of `model.vae_dtype`."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """Floating-point operations of a call: what must be computed, nothing recomputed,
    nothing for padding.

    Example: a forward of HunyuanVideo-1.5 at 480x832x81 is `Work(linear=179.5e12,
    attention=482.0e12)`.
    """

    linear: float
    attention: float

    @property
    def total(self) -> float:
        return self.linear + self.attention

    def times(self, linear: float, attention: float) -> "Work":
        return Work(linear=self.linear * linear, attention=self.attention * attention)


@dataclass(frozen=True, kw_only=True)
class ModelDescription:
    """A model before it is loaded, as the planner sees it.

    Attributes:
        transformer: `config.json` of its class.
        latent_shape: (frames, height, width) -> (C, F, H, W); ValueError for sizes the
            decoder does not have.
        decoding: (latent shape, videos at once, model section, whether on a GPU) -> how
            that is decoded.
        decode_work: (latent shape, whether in tiles, data type) -> FLOPs of one video,
            and bytes moved outside products. Without these two decoding counts as free.
        forward_work: (transformer, video tokens, text tokens) -> what one forward
            computes; None: it is traced.
        text_tokens: of a prompt and of the empty prompt alike, image_tokens among them,
            those of a picture.
        modulation: numbers that a table of the modulation holds per noise level; 0
            where the family has no such table.
        decoder_gb, encoder_gb: weights of the video decoder and of the prompt encoders,
            in 1e9 bytes.
        encoding: words of a prompt -> FLOPs of encoding it, and bytes of its
            conditioning on disk.

    Example: `describe_model(ModelConfig(family="..."))`
    """

    transformer: Mapping[str, Any]
    latent_shape: Callable[[int, int, int], Latent]
    decoding: Callable[[Latent, int, ModelConfig, bool], Decoding] = lambda *_: (
        Decoding()
    )
    decode_work: Callable[[Latent, bool, str], tuple[float, float]] = lambda *_: (0, 0)
    forward_work: Callable[[Mapping[str, Any], int, int], Work] | None = None
    text_tokens: int = 250
    image_tokens: int = 0
    modulation: int = 0
    decoder_gb: float = 0.0
    encoder_gb: float = 0.0
    encoding: Callable[[float], tuple[float, float]] = lambda words: (0.0, 0.0)

    @property
    def width(self) -> int:
        """Hidden size D."""
        return int(
            self.transformer["num_attention_heads"]
            * self.transformer["attention_head_dim"]
        )

    @property
    def num_layers(self) -> int:
        return int(self.transformer["num_layers"])

    @property
    def num_blocks(self) -> int:
        """Of all experts."""
        return self.num_layers * len(
            family_of(name=self.transformer.get("_class_name")).experts
        )

    @property
    def patch(self) -> tuple[int, int, int]:
        """Frames, rows and columns of a latent that are one video token."""
        size = self.transformer.get("patch_size", 1)
        frames, rows, columns = (
            (self.transformer.get("patch_size_t", 1), size, size)
            if isinstance(size, int)
            else size
        )
        return int(frames), int(rows), int(columns)

    def tokens(self, latent: Latent) -> int:
        """Video tokens of latents (C, F, H, W)."""
        return math.prod(latent[1:]) // math.prod(self.patch)


class Client(NamedTuple):
    """The programs that load an adapter of a layout, and how: lines of a shell, where
    it is not by Python.

    In the lines `{folder}`, `{file}` and `{resolution}` stand for those of an export.
    """

    programs: str
    command: str = ""


class ModelFamily(ABC):
    """A model family: it loads its models, says before that what is known of them, and
    computes with its transformers.

    `model.family` names one, by its short name in `sage_fast/config/registry.py` or as
    `package.module:Class`. A family of your own has `load`, `velocity`,
    `transformer_class` and `lora_targets`, and `decoder` for `plan` and `doctor`, as in
    `examples/qwen_image.py`; the rest has defaults for classes of diffusers.
    Transformers of a class that the registry knows are computed with by that family's
    code, whoever loaded them. Import what takes long inside the methods.

    Attributes:
        repository: of its weights on the hub, which `model.path` may leave out.
        transformer_class: of its transformers.
        decoder: the `AutoencoderDecoder` whose costs `describe` counts, if it has one.
        text_width: key of the transformer's config with the width of its text tokens.
        blocks: attribute of the transformer with the list of its blocks, which are
            fused, sharded and given adapters one by one.
        experts: how names of weights and of an adapter's file begin for each of several
            transformers that take turns.
        lora_targets: linear layers of a block that get an adapter by default.
        adaln_targets: those that compute the modulation, which `model.adaln` may
            replace by a table.
        time_embedding: names of modules that compute the input of `adaln_layers`.
        in_float32: parts of the names of weights that stay float32 in a 16-bit model.
        plans_stock: whether diffusers' own forward runs on tensors without memory, as a
            plan runs it.
        names: linear layers of a block in diffusers -> in its official class and in
            ComfyUI, where layers of one name stand below each other in the order of the
            table.
        official_blocks: the attribute with the blocks there.
        outer_names: linear layers outside the blocks in diffusers -> in the official
            class.
        architectures: pattern of the model's names in the metadata of adapters, in
            small letters and digits alone.
        pipeline: diffusers' class that its weights are published for.
        task: the tag of such pipelines on the hub.
        scheduler: the sampler's class there, and the options of its `from_config` up to
            the name of the time shift.
        licence: name and address of that of its weights, which binds what is trained
            from them.
        clients: layouts that an adapter is exported in.
    """

    repository: str = ""
    transformer_class: str = ""
    decoder: Any = None
    text_width: str = "joint_attention_dim"
    blocks: str = "transformer_blocks"
    experts: tuple[str, ...] = ("",)
    lora_targets: tuple[str, ...] = ()
    adaln_targets: tuple[str, ...] = ()
    time_embedding: tuple[str, ...] = ()
    in_float32: tuple[str, ...] = ()
    plans_stock: bool = True
    names: ClassVar[Mapping[str, tuple[str, str]]] = {}
    official_blocks: str = ""
    outer_names: ClassVar[Mapping[str, str]] = {}
    architectures: str = ".*"
    licence: tuple[str, str] | None = None
    pipeline: str = "DiffusionPipeline"
    task: str = "text-to-video"
    scheduler: tuple[str, str] = ("FlowMatchEulerDiscreteScheduler", "shift")
    clients: ClassVar[Mapping[str, Client]] = {
        "diffusers": Client("diffusers"),
        "peft": Client("peft"),
    }

    @abstractmethod
    def load(self, model: ModelConfig) -> Components:
        """Load the model; the transformer's weights may be left on disk
        (`Components.weights`).

        ValueError, OSError: files are missing or do not fit; the message says what to
        do.
        """

    def describe(self, model: ModelConfig) -> ModelDescription:
        """The model before it is loaded. ValueError, OSError where that cannot be said.

        By default it is counted: on the meta device, from the transformer's and the
        autoencoder's `config.json`, and from the sizes of the files.
        """
        if self.decoder is None:
            raise ValueError(
                f"model.family is {model.family!r}, which says nothing of its model "
                "before it is loaded. Give it a `decoder`, or a method "
                "describe(model: ModelConfig) -> ModelDescription "
                "(sage_fast/models/family.py)."
            )
        path = model.path or self.repository
        hub.check_known(path, self.repository, ())
        folder = hub.local_folder(path) or Path()
        named = {"_class_name": self.transformer_class}
        autoencoder = hub.stored_config(folder, "vae", {}, self.decoder.kind)
        encoders = map(str, folder.glob("text_encoder*"))
        return ModelDescription(
            transformer=hub.stored_config(folder, "transformer", named, self.kind()),
            decoder_gb=hub.stored_bytes(str(folder / "vae")) / 1e9,
            encoder_gb=sum(map(hub.stored_bytes, encoders)) / 1e9,
            **self.decoder.description(autoencoder),
        )

    def requirements(self, model: ModelConfig) -> list[hub.Requirement]:
        """The files it loads."""
        if not self.repository:
            return []
        path = model.path or self.repository
        parts = "transformer", "vae"
        return [
            hub.requirement(
                path,
                path,
                parts,
                self.repository,
                kind=self.transformer_class,
                gigabytes=0.0,
            )
        ]

    def inspect(self, model: ModelConfig) -> WeightFacts | None:
        """Facts that the weights state; nothing is loaded or downloaded. None where
        nothing is stated.

        ValueError, OSError: weights that `load` would refuse, and why.
        """
        return None

    def pipeline_of(self, model: ModelConfig) -> tuple[str, str]:
        """diffusers' class of pipelines with these weights, and its tag on the hub."""
        return self.pipeline, self.task

    def pipeline_base(self, model: ModelConfig) -> str | None:
        """Base model as a stock diffusers pipeline loads it, a folder or a repository;
        None where none does.
        """
        path = model.path or self.repository
        folder = hub.local_folder(path) if path else None
        return path if folder and (folder / "model_index.json").exists() else None

    # ----------------------------------------------------------------------------------
    # the transformer

    @classmethod
    def kind(cls) -> Any:
        """Class of the transformer; by default that of diffusers."""
        return getattr(import_module("diffusers"), cls.transformer_class)

    @classmethod
    def build(cls, config: Mapping[str, Any]) -> Any:
        """A transformer with random weights from its `config.json`, on the current
        default device.
        """
        return cls.kind()(**{k: v for k, v in config.items() if not k.startswith("_")})

    @staticmethod
    def velocity(
        transformer: Any,
        latents: Tensor,
        sigma: Tensor,
        prompts: Sequence[PromptEmbeds],
    ) -> Tensor:
        """Velocity dx/dsigma (noise minus data) of the model at noise level sigma.

        Args:
            latents: (B, C, F, H, W) float32.
            sigma: (B,) float32 in [0, 1], one noise level per sample, on the CPU or the
                GPU.
            prompts: B records.

        Returns:
            (B, C, F, H, W) in `velocity_dtype`: float32 whatever 16-bit type the model
            has.
        """
        raise NotImplementedError

    @classmethod
    def choose_forward(
        cls,
        transformer: Any,
        model: ModelConfig,
        computes_in: tuple[torch.device, torch.dtype] | None = None,
    ) -> FusedForward | None:
        """Give the transformer the fused forward, or leave it diffusers' own
        (`model.forward: stock`).

        Args:
            computes_in: device and type of its inputs, where that is not the weights'
                yet.

        Returns:
            The handle whose `undo()` restores diffusers' forward, which adding an
            adapter requires; None for stock.

        Raises:
            ConfigError: an attention backend that cannot run. ValueError: options or a
                variant that the fused forward does not support.
        """
        if model.forward == "fused":
            return cls.fuse(transformer, model, computes_in)
        # diffusers' own checkpointing has no other kind.
        if model.checkpointing == "full":
            transformer.enable_gradient_checkpointing()
        return None

    @staticmethod
    def fuse(
        transformer: Any,
        model: ModelConfig,
        computes_in: tuple[torch.device, torch.dtype] | None = None,
    ) -> FusedForward:
        """The fused forward of `choose_forward`."""
        raise ConfigError(
            "model.forward is fused, which this family lacks: give stock."
        )

    @staticmethod
    def dead_modules(transformer: Any) -> tuple[str, ...]:
        """Modules that cannot influence the velocity: their gradient is None or exactly
        zero.

        Training them would mean weight decay without a gradient, and LoRA on them would
        be memory for nothing.
        """
        return ()

    @staticmethod
    def adaln_layers(transformer: Any) -> list[nn.Module]:
        """Layers of all blocks whose output is a function of the noise level alone."""
        return []

    def cast(self, transformer: Any, dtype: torch.dtype) -> None:
        """Cast weights that are not in `in_float32`; the time embedding still takes an
        exact timestep.
        """
        for name, parameter in transformer.named_parameters():
            if parameter.dtype != dtype and not in_parts(name, self.in_float32):
                parameter.data = parameter.data.to(dtype)

    @staticmethod
    def always_read(transformer: Any) -> None:
        """Give trained weights that only some prompts read a gradient of zero in all
        other backward passes.

        Weight decay and moments then do not depend on which rank has which prompts, or
        on whether an update has such a prompt at all. FSDP2 and ZeRO sum gradients in
        buckets: a weight that has a gradient on some ranks only would shift the others
        (from torch 2.13 on FSDP2 has an option), and in ZeRO one without a gradient in
        the first backward would add to the last update's.
        """
        return

    @classmethod
    def empty_prompt(
        cls, config: Mapping[str, Any], tokens: int, dtype: torch.dtype
    ) -> PromptEmbeds:
        """A prompt without values on the meta device, for traces."""
        width = config[cls.text_width]
        return PromptEmbeds(text=torch.empty(tokens, width, dtype=dtype, device="meta"))


def model_family(name: str) -> ModelFamily:
    """The family that `model.family` names. ConfigError where there is none of that
    name.
    """
    found = resolve(name, MODEL_FAMILIES, "model.family")
    if isinstance(found, type) and issubclass(found, ModelFamily):
        family = found()
        # `family_of` finds it here by the class of its transformer.
        _OUTSIDE.setdefault(family.transformer_class, family)
        return family
    if not callable(found) or isinstance(found, type):
        raise ConfigError(
            f"model.family is {name!r}, which is neither a ModelFamily "
            "(sage_fast/models/family.py) nor a function "
            "that returns Components."
        )
    # A family that says nothing else.
    return type("Function", (ModelFamily,), {"load": staticmethod(found)})()


_OUTSIDE: dict[str, ModelFamily] = {}
"""Class of a transformer -> a family of the user's own that this process has used; the
registry's come first.
"""


def family_of(
    transformer: nn.Module | None = None, *, name: str | None = None
) -> ModelFamily:
    """The family whose code computes with a transformer, or with a class by its name;
    for neither the registry's first.

    ValueError for a class that no family has.
    """
    names = [name or next(iter(TRANSFORMERS))]
    if transformer is not None:
        # FSDP2 replaces the class by a subclass.
        names = [kind.__name__ for kind in type(transformer).__mro__]
    for known in names:
        if known in TRANSFORMERS:
            family: ModelFamily = resolve(
                TRANSFORMERS[known], MODEL_FAMILIES, "_class_name"
            )()
            return family
        if known in _OUTSIDE:
            return _OUTSIDE[known]
    raise ValueError(
        f"The transformer is a {names[0]}, and only {', '.join(TRANSFORMERS)} are "
        "known. Another class needs a "
        "ModelFamily (sage_fast/models/family.py) with that transformer_class."
    )


def transformer_blocks(transformer: nn.Module) -> list[Any]:
    """The blocks of a transformer, in their order; of one expert after the other."""
    family = family_of(transformer)
    find = (attrgetter(f"{expert}{family.blocks}") for expert in family.experts)
    return [block for blocks in find for block in blocks(transformer)]


def describe_model(model: ModelConfig) -> ModelDescription:
    """Description of a model by its family. ConfigError where it has none, or its files
    do not give one.
    """
    try:
        return model_family(model.family).describe(model)
    except (ValueError, OSError) as error:
        raise ConfigError(str(error)) from error


def load_components(model: ModelConfig) -> Components:
    """Load the model that a configuration names, through its family, with all of its
    weights in CPU memory.

    Raises as `open_components`.
    """
    components = open_components(model)
    if components.weights is not None:
        components.weights.read_into(components.transformer)
    return components


def open_components(model: ModelConfig) -> Components:
    """As `load_components`, but the family may leave the transformer's weights on disk
    (`Components.weights`).

    Raises:
        ConfigError: no such family, or one of the user's own failed or gave no
            `Components`. Else what the family raises: ValueError and OSError for files
            and settings that do not fit.
    """
    family = model_family(model.family)
    if model.family in MODEL_FAMILIES:
        return family.load(model)
    try:
        components = family.load(model)
    # Such an error says by itself what to do. Any other is one of the user's code,
    # which needs a traceback.
    except (ValueError, OSError, MemoryError):
        raise
    except (Exception, SystemExit) as error:
        log = Path(tempfile.mkdtemp(prefix="sage-fast-")) / "traceback.txt"
        log.write_text("".join(traceback.format_exception(error)), encoding="utf-8")
        raise ConfigError(
            f"model.family is {model.family!r}, but calling it failed: "
            f"{describe(error)}. The traceback is in {log}."
        ) from error
    if not isinstance(components, Components):
        raise ConfigError(
            f"model.family is {model.family!r}, which gave a "
            f"{type(components).__name__} where "
            "sage_fast.models.family.Components is expected."
        )
    return components
