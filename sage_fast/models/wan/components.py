"""Wan's text encoder, UMT5, and the decoder of its latents, diffusers'
`AutoencoderKLWan`.

Facts used here (diffusers 0.36 - 0.42, `WanPipeline`):
* a prompt's characters are repaired by ftfy, which changes typographic quotes, its HTML
  entities are resolved, and its whitespace is joined. Without the package ftfy the
  pipeline leaves the first out: the model was trained with it;
* the pipeline's call takes 512 tokens, its `encode_prompt` alone 226;
* only the valid tokens are read; the transformer's call fills them up with zeros;
* the autoencoder of Wan 2.1 has 8 x spatial and 4 x temporal compression, causal in
  time, that of Wan 2.2 5B 16 x spatial, the last 2 x by patches of pixels; the
  transformer's patches double the spatial step;
* a picture that a video continues is the autoencoder's mean of it, normalised by
  channel; the pipeline stretches a picture to the video's size, here it is cropped;
* latents are normalised by channel: z / (1 / latents_std) + latents_mean is decoded, in
  this order of operations;
* it decodes one latent frame at a time with a cache, one video per call, and clamps to
  [-1, 1] itself, which makes an infinite pixel look like any other: what is decoded in
  a type that can overflow cannot be checked afterwards.
"""

from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from diffusers import AutoencoderKLWan
from diffusers.pipelines.wan.pipeline_wan import prompt_clean
from torch import Tensor

from sage_fast.models.family import Decoding
from sage_fast.models.hub import load_vae
from sage_fast.models.media_files import check_pictures, read_picture
from sage_fast.models.prompt_cache import CachedPromptEncoder
from sage_fast.models.video_decoding import AutoencoderDecoder, counted
from sage_fast.models.wan.block import TEXT_TOKENS
from sage_fast.records import Pictured, PromptEmbeds, text_of

ENCODERS = ("text_encoder", "tokenizer")
"""Folders of what reads a prompt's words."""


@dataclass(kw_only=True)
class WanPromptEncoder(CachedPromptEncoder):
    """Encodes prompts, or finds them in its cache: text (L, 4096), L <= 512, and where
    the prompt has a picture what is made of it.

    The encoder computes in the data type that its weights are stored in.
    """

    @property
    def reads_pictures(self) -> bool:
        """True for CLIP beside it: the picture is then read, and not kept."""
        return "image_encoder" in self.parts

    def extent(self, asked: Pictured) -> str:
        size = super().extent(asked)
        return f"{size}x{asked.num_frames}" if self.reads_pictures else size

    # Entries of a version that ran without ftfy too have False.
    template = ("wan", "ftfy", True)
    limits = TEXT_TOKENS
    usual = ("Wan", "80 to 100")

    def encode_each(
        self, texts: Sequence[str | Pictured]
    ) -> Generator[tuple[PromptEmbeds, int | tuple[int, ...]], None, None]:
        check_pictures(texts)  # before the encoder is loaded, which takes minutes
        if all(isinstance(text, str) for text in texts):
            encode_picture = None
        else:
            encode_picture = self._load_vision()
        encoder, tokenizer = self._load_encoder()
        try:
            for asked in texts:
                clean = prompt_clean(text_of(asked))
                cut = tokenizer(
                    clean, return_tensors="pt", truncation=True, max_length=TEXT_TOKENS
                )
                ids = cut.input_ids.to(self.device)
                with torch.no_grad():
                    states = (
                        encoder(ids, torch.ones_like(ids)).last_hidden_state[0].cpu()
                    )
                # Uncut, so that `prepare` can tell what the encoder does not see.
                embeds = PromptEmbeds(text=states)
                if encode_picture is not None and isinstance(asked, Pictured):
                    embeds = replace(embeds, **encode_picture(asked))
                yield embeds, len(tokenizer(clean).input_ids)
        finally:
            del encoder, encode_picture
            self._release()

    def _load_vision(self) -> Callable[[Pictured], dict[str, Tensor]]:
        """Function from a picture to fields of `PromptEmbeds`, by the pipeline's own
        methods: what videos keep, (C, 1, H, W), or CLIP's tokens (257, 1280) and the
        channels (20, F, H, W) of a mask and of the picture before grey frames.

        The autoencoder computes in float32.
        """
        from diffusers import WanImageToVideoPipeline

        reads = self.reads_pictures
        vae = load_vae(AutoencoderKLWan, self.root / "vae", "float32").to(self.device)
        plain = WanImageToVideoPipeline(
            *(None, None), vae, scheduler=None, expand_timesteps=not reads
        )
        if reads:
            from transformers import CLIPImageProcessor, CLIPVisionModel

            folder = self.root / "image_processor"
            plain.image_processor = CLIPImageProcessor.from_pretrained(folder)
            plain.image_encoder = self._load(CLIPVisionModel, "image_encoder")
        device = torch.device(self.device)

        @torch.no_grad()
        def encode(asked: Pictured) -> dict[str, Tensor]:
            size = {"height": asked.height, "width": asked.width}
            picture = plain.video_processor.resize(
                read_picture(asked.image), **size, resize_mode="crop"
            )
            pixels = plain.video_processor.preprocess(picture, **size).to(device)
            # Given latents, it draws none.
            _, made, *_ = plain.prepare_latents(
                *(pixels, 1, vae.config["z_dim"], asked.height, asked.width),
                *(asked.num_frames, torch.float32, device, None, pixels),
            )
            if not reads:
                return {"kept": made[0]}
            tokens = plain.encode_image(picture, device)
            return {"image": tokens[0], "frame": made[0]}

        return encode

    def _load_encoder(self) -> tuple[Any, Any]:
        from transformers import AutoTokenizer, UMT5EncoderModel

        tokenizer = AutoTokenizer.from_pretrained(self.root / "tokenizer")
        return self._load(UMT5EncoderModel, "text_encoder"), tokenizer

    @torch.no_grad()
    def encode_plainly(self, text: str) -> Tensor:
        """The text tokens (L, 4096) of one prompt, by the pipeline's own method; what
        `encode` is held against.
        """
        from diffusers import WanPipeline

        encoder, tokenizer = self._load_encoder()
        try:
            plain = WanPipeline(
                tokenizer=tokenizer, text_encoder=encoder, vae=None, scheduler=None
            )
            (states,) = plain._get_t5_prompt_embeds(
                text, max_sequence_length=TEXT_TOKENS, device=self.device
            )
            # The method fills up with zeros to 512 again.
            cut = tokenizer(prompt_clean(text), truncation=True, max_length=TEXT_TOKENS)
            return states[: len(cut.input_ids)].cpu()
        finally:
            del encoder
            self._release()


class WanDecoder(AutoencoderDecoder):
    """Latents (B, 16, F, H, W) to videos uint8 (B, 4F-3, 3, 8H, 8W), on the CPU; of Wan
    2.2 5B (B, 48, F, H, W) to (B, 4F-3, 3, 16H, 16W).

    81 frames of 480 x 832 have latents of (16, 21, 60, 104).

    Args:
        vae: see `AutoencoderDecoder`.
        memory_gib: what the activations of a decode may take, in GiB. A video that does
            not fit is decoded in diffusers' overlapping tiles of 256 pixels. None
            decodes every video whole.
    """

    kind = AutoencoderKLWan

    def __init__(
        self, vae: AutoencoderKLWan, *, memory_gib: float | None = None
    ) -> None:
        super().__init__(vae)
        self.memory_gib = memory_gib
        self.channels = vae.config["z_dim"]
        self.time = vae.config["scale_factor_temporal"]
        self.space = vae.config["scale_factor_spatial"]
        self.step = 2 * self.space

    def parts(self, latents: Tensor) -> Iterator[Tensor]:
        _, _, frames, height, width = latents.shape
        self.vae.use_tiling = not self.fits(frames, height, width, self.memory_gib)
        yield self.vae.decode(latents, return_dict=False)[0]

    def fits(
        self, frames: int, height: int, width: int, memory_gib: float | None
    ) -> bool:
        """True if one video of latents (F, H, W) is decoded whole within a limit."""
        return (
            memory_gib is None
            or self.peak_bytes(frames, height, width) <= memory_gib * 2**30
        )

    def peak_bytes(self, frames: int, height: int, width: int) -> int:
        """Bound of the activations of one video of latents (F, H, W) decoded whole:
        those of its widest layers, which hold the four frames of one latent frame,
        beside the decoded frames. Traced on the meta device.
        """
        config = self.vae.config
        if config["is_residual"]:
            widest = 21.2 * config["decoder_base_dim"]
        else:
            widest = 51 * config["base_dim"]
        pixels = height * width * int(self.space) ** 2
        return int(pixels * (widest + 3 * self.time * frames) * self.vae.dtype.itemsize)

    def tiles(self) -> tuple[int, int, int, int]:
        """Rows and columns of a tile, and between the beginnings of two, in latents."""
        vae = self.vae
        space = self.space
        rows = vae.tile_sample_min_height // space
        columns = vae.tile_sample_min_width // space
        return (
            rows,
            columns,
            vae.tile_sample_stride_height // space,
            vae.tile_sample_stride_width // space,
        )

    def decoding(
        self, latent: tuple[int, int, int, int], memory_gib: float | None
    ) -> Decoding:
        _, frames, height, width = latent
        tiled = not self.fits(frames, height, width, memory_gib)
        peak = float(self.peak_bytes(frames, height, width))
        if tiled:
            rows, columns, row_step, column_step = self.tiles()
            peak = self.peak_bytes(frames, min(height, rows), min(width, columns))
            # Beside one tile those that are decoded, which overlap.
            video = 3 * self.time * frames * height * width * int(self.space) ** 2
            share = rows * columns / (row_step * column_step)
            peak += share * video * self.vae.dtype.itemsize
        return Decoding(
            peak_bytes=peak,
            tiled=tiled,
            limited=True,
            dtype=str(self.vae.dtype).removeprefix("torch."),
        )

    def work(
        self, latent: tuple[int, int, int, int], tiled: bool
    ) -> tuple[float, float]:
        """See `AutoencoderDecoder`. Blending the tiles, less than a part in a thousand,
        is not counted.
        """
        _, frames, height, width = latent
        rows, columns, row_step, column_step = (
            self.tiles() if tiled else (height, width, height, width)
        )
        # Tiles begin where `tiled_decode` of diffusers begins them; those at the end
        # are smaller.
        parts = Counter(
            (frames, min(rows, height - top), min(columns, width - left))
            for top in range(0, height, row_step)
            for left in range(0, width, column_step)
        )
        works = [(count, *self.work_of(*part)) for part, count in parts.items()]
        return float(sum(n * flops for n, flops, _ in works)), float(
            sum(n * moved for n, _, moved in works)
        )

    def work_of(self, frames: int, height: int, width: int) -> tuple[int, int]:
        # The first latent frame is one of pixels, and all others cost the same.
        if frames <= 3:
            return super().work_of(frames, height, width)
        two, three = (counted(self, count, height, width) for count in (2, 3))
        flops, moved = (
            b + (frames - 3) * (b - a) for a, b in zip(two, three, strict=True)
        )
        return flops, moved
