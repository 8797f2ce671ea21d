"""HunyuanVideo-1.5's latents to pixels, a latent frame at a time, with the modules of
diffusers' `AutoencoderKLHunyuanVideo15`.

The published decoder is causal in time: a convolution sees the two frames before its
own, and the middle block's attention the keys of all frames so far. So latent frames
are decoded in order and as whole pictures, without tiles, where each convolution keeps
the last two frames that it has read and the attention its keys and values.

81 frames of 480x832 are 811e12 FLOPs, against 813e12 by the class, whose attention also
multiplies what its mask hides, and 1,341e12 in the class's tiles, whose overlaps are
decoded twice. In float16 the activations take 4.4e9 bytes, against 60e9 (traced).

Facts of the autoencoder used here (diffusers 0.36 - 0.42):
* 16 x spatial and 4 x temporal compression: F latent frames are 4F - 3 frames, one of
  the first latent frame and four of each other;
* a convolution pads by repeating the edges, and in time the first frame;
* where an upsampler doubles the frames, the first frame stays one, made of the first
  half of the channels;
* latents are divided by `scaling_factor` once, and have no shift;
* the attention of the class gets a dense causal mask of (F H W)^2 entries, which it
  fills by a Python loop over its rows in every call.

Shapes: B batch, C channels, F frames, H rows, W columns, N = H W.
"""

from collections.abc import Iterator, Sequence

import torch
from diffusers import AutoencoderKLHunyuanVideo15
from diffusers.models.autoencoders.autoencoder_kl_hunyuanvideo15 import (
    HunyuanVideo15AttnBlock,
    HunyuanVideo15CausalConv3d,
    HunyuanVideo15Decoder3D,
    HunyuanVideo15ResnetBlock,
    HunyuanVideo15Upsample,
)
from torch import Tensor, nn
from torch.nn import functional

from sage_fast.models.family import Decoding
from sage_fast.models.video_decoding import AutoencoderDecoder, counted

BEFORE = 2
"""Frames before its own that a convolution sees."""


class FramewiseDecoder:
    """The published decoder on the parts of one video, in order: each call takes the
    next latent frames (1, C, F, H, W), any number of them, and gives their pixels.

    The weights are those of `decoder`, which stays as it is.

    Example: `decode = FramewiseDecoder(vae.decoder); pixels = [decode(part) for part in
    latents.split(1, dim=2)]`
    """

    def __init__(self, decoder: HunyuanVideo15Decoder3D) -> None:
        self.decoder = decoder
        self.begun = False
        self.read: dict[nn.Module, Tensor] = {}
        """Last frames that a convolution has read, padded: (1, C, 2, H + 2, W + 2)."""
        self.attended: dict[nn.Module, tuple[Tensor, Tensor]] = {}
        """Keys and values (1, F, N, C) of the frames so far."""

    def __call__(self, latents: Tensor) -> Tensor:
        decoder = self.decoder
        middle = decoder.mid_block
        x = self._convolve(decoder.conv_in, latents)
        x = x + latents.repeat_interleave(decoder.repeat, dim=1)
        x = self._resnet(middle.resnets[0], x)
        for attention, resnet in zip(
            middle.attentions, middle.resnets[1:], strict=True
        ):
            x = self._attend(attention, x)
            x = self._resnet(resnet, x)
        for block in decoder.up_blocks:
            for resnet in block.resnets:
                x = self._resnet(resnet, x)
            for upsampler in block.upsamplers or ():
                x = self._upsample(upsampler, x)
        self.begun = True
        return self._convolve(decoder.conv_out, x, decoder.norm_out, decoder.conv_act)

    def _read(
        self, module: HunyuanVideo15CausalConv3d, x: Tensor, *before: nn.Module
    ) -> Tensor:
        """Input of a convolution, padded: what `before`, which do not look beyond a
        frame, make of x, after the frames that it has read last.
        """
        padded = _padded(x, self.read.pop(module, None), before)
        self.read[module] = padded[:, :, -BEFORE:].clone()
        return padded

    def _convolve(
        self, module: HunyuanVideo15CausalConv3d, x: Tensor, *before: nn.Module
    ) -> Tensor:
        out: Tensor = module.conv(self._read(module, x, *before))
        return out

    def _resnet(self, block: HunyuanVideo15ResnetBlock, x: Tensor) -> Tensor:
        # Frees what is read before the next result is made.
        h = self._convolve(block.conv1, x, block.norm1, block.nonlinearity)
        for frame in h.split(1, dim=2):
            frame.copy_(block.nonlinearity(block.norm2(frame)))
        padded = self._read(block.conv2, h)
        del frame, h
        h = block.conv2.conv(padded)
        del padded
        if block.conv_shortcut is not None:
            x = block.conv_shortcut(x)
        out: Tensor = h.add_(x)
        return out

    def _attend(self, block: HunyuanVideo15AttnBlock, x: Tensor) -> Tensor:
        normed = block.norm(x)
        query, key, value = (
            project(normed).flatten(3).permute(0, 2, 3, 1).contiguous()
            for project in (block.to_q, block.to_k, block.to_v)
        )
        if block in self.attended:
            keys, values = self.attended[block]
            key = torch.cat([keys, key], dim=1)
            value = torch.cat([values, value], dim=1)
        self.attended[block] = key, value
        _, frames, tokens, _ = query.shape
        results = []
        for i in range(frames):
            seen = key.shape[1] - frames + i + 1
            # The mask hides nothing. With one of three dimensions, which the class
            # gives too, SDPA takes the same way on a CPU: the bits are equal.
            results.append(
                functional.scaled_dot_product_attention(
                    query[:, i : i + 1],
                    key[:, :seen].flatten(1, 2)[:, None],
                    value[:, :seen].flatten(1, 2)[:, None],
                    attn_mask=query.new_zeros(1, 1, seen * tokens),
                )
            )
        out = torch.cat(results, dim=1).permute(0, 3, 1, 2).unflatten(3, x.shape[3:])
        return block.proj_out(out) + x

    def _upsample(self, module: HunyuanVideo15Upsample, x: Tensor) -> Tensor:
        h = self._convolve(module.conv, x)
        arrange = module._dcae_upsample_rearrange
        if not module.add_temporal_upsample:
            out: Tensor = arrange(h)
            del h
            return out.add_(arrange(x.repeat_interleave(module.repeats, dim=1)))
        parts = []
        if not self.begun:
            first = arrange(h[:, :, :1])
            first = first[:, : first.shape[1] // 2]
            shortcut = arrange(x[:, :, :1])
            shortcut = shortcut.repeat_interleave(module.repeats // 2, dim=1)
            parts.append(first + shortcut)
            h = h[:, :, 1:]
            x = x[:, :, 1:]
        if h.shape[2]:
            shortcut = arrange(x, r1=2).repeat_interleave(module.repeats, dim=1)
            parts.append(arrange(h, r1=2) + shortcut)
        return torch.cat(parts, dim=2)


def _padded(x: Tensor, read: Tensor | None, before: Sequence[nn.Module]) -> Tensor:
    """(1, C, F + 2, H + 2, W + 2): the frames that were read last, or the first one
    repeated, then what `before` makes of those of x; edges are repeated.

    A frame at a time, because normalisation in 16 bits makes float32 copies.
    """
    batch, channels, frames, height, width = x.shape
    padded = x.new_empty(batch, channels, BEFORE + frames, height + 2, width + 2)
    own = padded[:, :, BEFORE:]
    for i, frame in enumerate(x.split(1, dim=2)):
        for module in before:
            frame = module(frame)
        own[:, :, i : i + 1, 1:-1, 1:-1] = frame
    own[..., 1:-1, 0] = own[..., 1:-1, 1]
    own[..., 1:-1, -1] = own[..., 1:-1, -2]
    own[..., 0, :] = own[..., 1, :]
    own[..., -1, :] = own[..., -2, :]
    padded[:, :, :BEFORE] = own[:, :, :1] if read is None else read
    return padded


class VAEDecoder(AutoencoderDecoder):
    """Latents (B, C, F, H, W) to videos uint8 (B, 4F-3, 3, 16H, 16W), on the CPU.

    81 frames of 480 x 832 have latents of (32, 21, 30, 52). Every call of the modules
    has one latent frame, whatever memory there is: a convolution of other sizes may add
    up in another order, so that pixels would depend on the GPU's memory.
    """

    kind = AutoencoderKLHunyuanVideo15

    def __init__(self, vae: AutoencoderKLHunyuanVideo15) -> None:
        super().__init__(vae)
        self.channels = vae.config["latent_channels"]
        self.time = vae.temporal_compression_ratio
        self.space = self.step = vae.spatial_compression_ratio

    def scaled(self, latents: Tensor) -> Tensor:
        return (latents.float() / self.vae.config["scaling_factor"]).to(self.vae.dtype)

    def parts(self, latents: Tensor) -> Iterator[Tensor]:
        decode = FramewiseDecoder(self.vae.decoder)
        for frame in latents.split(1, dim=2):
            yield decode(frame)

    def decoding(
        self, latent: tuple[int, int, int, int], memory_gib: float | None
    ) -> Decoding:
        """See `AutoencoderDecoder`; the same within every limit."""
        return Decoding(
            peak_bytes=float(self.peak_bytes(*latent[1:])),
            dtype=str(self.vae.dtype).removeprefix("torch."),
        )

    def peak_bytes(self, frames: int, height: int, width: int) -> int:
        """Bound of the activations of a decode of latents (F, H, W), in bytes.

        The peak is in the last, widest blocks, with the frames of one latent frame:
        traced through the published modules 3.5 tensors of their size, beside what is
        kept. At sizes beyond 720p it may be in SDPA's plain path, which makes a float32
        score of every query of a frame and every key, twice, and float32 copies of keys
        and values.
        """
        item = self.vae.dtype.itemsize
        pixels = (self.space * height + 2) * (self.space * width + 2)  # with edges
        channels = int(self.vae.config["block_out_channels"][0])
        widest = 3.6 * item * self.time * pixels * channels
        width_of_keys = self.vae.decoder.conv_in.conv.out_channels
        tokens = height * width
        keys = 2 * item * frames * tokens * width_of_keys
        copies = 3.2 if item < 4 else 1.1
        scores = 2 * 4 * frames * tokens**2
        # and queries and results of a frame in float32
        attention = scores + copies * keys + 4 * 4 * tokens * width_of_keys
        kept = item * sum(
            BEFORE * inputs * (scale * height + 2) * (scale * width + 2)
            for scale, inputs in self._inputs()
        )
        return int(max(widest, attention) + kept + keys)

    def _inputs(self) -> Iterator[tuple[int, int]]:
        """(scale of the picture over the latents, channels) of what each convolution in
        time reads.
        """
        decoder = self.vae.decoder
        scale = 1
        places: list[tuple[int, Sequence[nn.Module]]] = [
            (1, [decoder.conv_in, decoder.mid_block])
        ]
        for block in decoder.up_blocks:
            places.append((scale, [block]))
            scale *= 2 if block.upsamplers else 1
        places.append((scale, [decoder.conv_out]))
        for scale, modules in places:
            for part in modules:
                for module in part.modules():
                    if isinstance(module, HunyuanVideo15CausalConv3d):
                        yield scale, module.conv.in_channels

    def work_of(self, frames: int, height: int, width: int) -> tuple[int, int]:
        # From the second on, latent frames differ by their attention alone, which grows
        # by as much from frame to frame: a quadratic, of which three values are counted.
        if frames <= 4:
            return super().work_of(frames, height, width)
        two, three, four = (counted(self, n, height, width) for n in (2, 3, 4))
        more = frames - 2
        flops, moved = (
            a + more * (b - a) + more * (more - 1) // 2 * (c - 2 * b + a)
            for a, b, c in zip(two, three, four, strict=True)
        )
        return flops, moved
