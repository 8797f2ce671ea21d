"""The toy family's parts: a tiny transformer of HunyuanVideo-1.5's class, the word
encoder, and the codec, blocks of pixels in a cosine basis, without loss.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sage_fast.config.files import loads
from sage_fast.config.sections import ModelConfig
from sage_fast.distributed.world import SINGLE_PROCESS, World
from sage_fast.models.family import Components, Decoding, ModelDescription
from sage_fast.models.hunyuan15.backbone import (
    HunyuanTransformer,
    forward_work,
    modulation,
)
from sage_fast.models.stored import check_fit, misfits, open_weights
from sage_fast.models.toy.renderer import to_uint8, tokenize
from sage_fast.records import PromptEmbeds

PATCH_FRAMES = 2
PATCH_HEIGHT = 4
PATCH_WIDTH = 4
LATENT_CHANNELS = 3 * PATCH_FRAMES * PATCH_HEIGHT * PATCH_WIDTH


def _cosine_basis(size: int) -> Tensor:
    """Orthonormal DCT-II matrix, float64 (size, size), one basis vector per row."""
    index = torch.arange(size, dtype=torch.float64)
    basis = torch.cos(
        math.pi / size * (index[None] + 0.5) * index[:, None]
    ) * math.sqrt(2 / size)
    # The constant vector is longer than the others by this.
    basis[0] /= math.sqrt(2)
    return basis


class PatchCodec:
    """Videos uint8 (B, F, 3, H, W) <-> latents float32 (B, 96, F/2, H/4, W/4).

    Pixels in [0, 1] are centred on the `mean` colour of the toy videos and divided by
    their standard deviation `std`, then each block of 2 x 4 x 4 RGB pixels is rotated
    into the cosine basis. The rotation is orthonormal, so a distance between latents is
    `1 / std` times the distance between pixels, and latents of the toy videos have unit
    variance on average. `decode(encode(videos))` gives back every byte.

    With a `mean` of one number videos are grey: encoded by the mean of their colours,
    in a third of the channels.
    """

    mean: tuple[float, ...] = (0.13, 0.12, 0.13)
    std = 0.19

    def __init__(self) -> None:
        sizes = (PATCH_FRAMES, len(self.mean), PATCH_HEIGHT, PATCH_WIDTH)
        self._basis = reduce(torch.kron, map(_cosine_basis, sizes)).float()
        self._mean = torch.tensor(self.mean).view(-1, 1, 1)

    def latent_shape(
        self, num_frames: int, height: int, width: int
    ) -> tuple[int, int, int, int]:
        """(C, F, H, W) of the latents of a video; ValueError unless the sizes are
        multiples of 2, 4 and 4.
        """
        patches = {"frames": PATCH_FRAMES, "height": PATCH_HEIGHT, "width": PATCH_WIDTH}
        for (name, patch), size in zip(
            patches.items(), (num_frames, height, width), strict=True
        ):
            if size <= 0 or size % patch:
                raise ValueError(
                    f"The toy codec needs a {name} that is a positive multiple of "
                    f"{patch}, not {size}."
                )
        return (
            len(self._basis),
            num_frames // PATCH_FRAMES,
            height // PATCH_HEIGHT,
            width // PATCH_WIDTH,
        )

    def encode(self, videos: Tensor) -> Tensor:
        """uint8 (B, F, 3, H, W) -> float32 (B, 96, F/2, H/4, W/4)."""
        batch, frames, _, height, width = videos.shape
        channels, f, h, w = self.latent_shape(frames, height, width)
        colours = len(self._mean)
        if colours == 3:
            pixels = videos.float() / 255
        else:
            pixels = videos.float().mean(2, keepdim=True) / 255
        pixels = (pixels - self._mean.to(videos.device)) / self.std
        blocks = pixels.view(
            batch, f, PATCH_FRAMES, colours, h, PATCH_HEIGHT, w, PATCH_WIDTH
        )
        # Frames, colours, rows and columns of a block become one axis, in the order of
        # the basis.
        blocks = blocks.permute(0, 1, 4, 6, 2, 3, 5, 7).reshape(
            batch, f, h, w, channels
        )
        return (
            (blocks @ self._basis.T.to(videos.device))
            .permute(0, 4, 1, 2, 3)
            .contiguous()
        )

    def decode(self, latents: Tensor) -> Tensor:
        """float (B, 96 or 32, F, H, W) -> uint8 (B, 2F, 3, 4H, 4W) on the CPU, clipped."""
        batch, _, f, h, w = latents.shape
        blocks = latents.float().permute(0, 2, 3, 4, 1) @ self._basis.to(latents.device)
        blocks = blocks.view(
            batch, f, h, w, PATCH_FRAMES, len(self._mean), PATCH_HEIGHT, PATCH_WIDTH
        )
        pixels = blocks.permute(0, 1, 4, 5, 2, 6, 3, 7).reshape(
            batch, f * PATCH_FRAMES, len(self._mean), h * PATCH_HEIGHT, w * PATCH_WIDTH
        )
        # A grey video gets three equal colours; one with colours stays as it is.
        return (
            to_uint8(pixels * self.std + self._mean.to(latents.device))
            .cpu()
            .expand(-1, -1, 3, -1, -1)
        )


ASSETS = Path(__file__).parent / "assets"
CONFIG_NAME = "config.json"
WEIGHTS_NAME = "weights.safetensors"

EMBED_DIM = 24
GLYPH_DIM = 32

# The class creates these whatever the task. Without glyph and image tokens they never
# act, and their hidden layer of fixed width 2048 would be two thirds of the file: they
# are not stored, not trained, and loaded as zeros.
UNUSED_MODULES = ("context_embedder_2", "image_embedder")

TRANSFORMER_CONFIG: dict[str, Any] = {
    "in_channels": 2 * LATENT_CHANNELS + 1,
    "out_channels": LATENT_CHANNELS,
    "num_attention_heads": 6,
    "attention_head_dim": 32,
    "num_layers": 3,
    "num_refiner_layers": 1,
    "mlp_ratio": 4.0,
    "patch_size": 1,
    "patch_size_t": 1,
    "qk_norm": "rms_norm",
    "text_embed_dim": EMBED_DIM,
    "text_embed_2_dim": GLYPH_DIM,
    "image_embed_dim": 32,
    "rope_theta": 256.0,
    "rope_axes_dim": [8, 12, 12],
    "target_size": 16,
    "task_type": "t2v",
    "use_meanflow": False,
}


class WordEncoder:
    """Prompt encoder of the toy world: one fixed one-hot vector per word, scaled to
    unit root mean square.

    The vectors are as wide as the vocabulary padded to a multiple of 8 (`EMBED_DIM`).
    It has no glyph branch.
    """

    def __init__(self) -> None:
        self._table = torch.eye(EMBED_DIM) * EMBED_DIM**0.5

    def prepare(
        self,
        texts: Sequence[str],
        world: World = SINGLE_PROCESS,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> list[tuple[int, ...]]:
        """(L, Lg) of every text. ValueError as `encode`."""
        return [embeds.lengths for embeds in self.encode(texts)]

    def encode(self, texts: Sequence[str]) -> list[PromptEmbeds]:
        """One record per text: `text` float32 (L, 24), L words (1 for the empty text);
        `glyph` float32 (0, 32).

        ValueError names an unknown word. A sentence of known words that describes no
        scene is allowed.
        """
        return [
            PromptEmbeds(text=self.features(text), glyph=torch.zeros(0, GLYPH_DIM))
            for text in texts
        ]

    def features(self, text: str) -> Tensor:
        """The words of one text, (L, width)."""
        return self._table[tokenize(text)].clone()


def is_unused(name: str) -> bool:
    """Tell whether a parameter (by its qualified name) belongs to a module that the toy
    world never uses.
    """
    return name.split(".", 1)[0] in UNUSED_MODULES


def build_transformer(config: Mapping[str, Any]) -> Any:
    """A freshly initialised float32 transformer in training mode, its unused modules
    zero.
    """
    transformer = HunyuanTransformer.build(config)
    # No caption quotes a text, and Muon's products of the glyph projection's 2048 x
    # 2048 matrices take minutes.
    transformer.unread_modules = UNUSED_MODULES
    with torch.no_grad():
        for name, parameter in transformer.named_parameters():
            if is_unused(name):
                parameter.zero_()
    return transformer


def stored_parameters(transformer: Any) -> dict[str, Tensor]:
    """The parameters that a toy checkpoint holds: all but the unused modules."""
    return {
        name: value
        for name, value in transformer.state_dict().items()
        if not is_unused(name)
    }


def _open(model: ModelConfig, shipped: Path) -> tuple[Path, dict[str, Any]]:
    """Folder of a toy model, and its configuration. ValueError where a file is missing."""
    directory = shipped if model.path is None else Path(model.path)
    for name in (CONFIG_NAME, WEIGHTS_NAME):
        if not (directory / name).is_file():
            raise ValueError(
                f"{directory} has no {name}. Give a folder written by 'python -m "
                "experiments.pretrain "
                "--output_dir FOLDER', or no path for the model that ships with the "
                "project."
            )
    return directory, dict(loads((directory / CONFIG_NAME).read_text(encoding="utf-8")))


class Toy(HunyuanTransformer):
    """The model family `toy`, see `ModelFamily`. It needs no files but those of the
    package.
    """

    shipped = ASSETS
    text_tokens = len(["a", "red", "circle", "moving", "left"])
    encoder: type[WordEncoder] = WordEncoder
    codec: type[PatchCodec] = PatchCodec

    def load(self, model: ModelConfig) -> Components:
        """Load a toy model from plain files; the transformer is float32, on the CPU, in
        evaluation mode.

        Args:
            model: its `path` is a folder with `config.json` and `weights.safetensors`,
                as
                `python -m experiments.pretrain` writes it; None means the base model
                that ships with the project.

        ValueError when a file is missing or the weights do not fit the config.
        """
        directory, config = _open(model, self.shipped)
        transformer = build_transformer(config)
        file = open_weights(directory / WEIGHTS_NAME)
        weights = {name: file.get_tensor(name).float() for name in file.keys()}  # noqa: SIM118
        described, stored = (
            {name: value.shape for name, value in values.items()}
            for values in (stored_parameters(transformer), weights)
        )
        check_fit(directory, **misfits(described, stored))
        # Not strict, because the unused modules are not stored; `check_fit` has been
        # strict about the others.
        transformer.load_state_dict(weights, strict=False)
        return Components(
            transformer=transformer.eval(),
            prompt_encoder=self.encoder(),
            video_decoder=self.codec(),
        )

    def describe(self, model: ModelConfig) -> ModelDescription:
        transformer = _open(model, self.shipped)[1] | {"unread_modules": UNUSED_MODULES}
        codec = self.codec()
        return ModelDescription(
            transformer=transformer,
            text_tokens=self.text_tokens,
            latent_shape=codec.latent_shape,
            # A product with the codec's basis; its result, a reordered copy and two
            # rescaled ones are alive at once.
            decoding=lambda latent, videos, section, on_gpu: Decoding(
                peak_bytes=16.0 * videos * math.prod(latent)
            ),
            decode_work=lambda latent, tiled, dtype: (
                2.0 * math.prod(latent) * latent[0],
                0.0,
            ),
            forward_work=forward_work,
            modulation=modulation(transformer),
        )
