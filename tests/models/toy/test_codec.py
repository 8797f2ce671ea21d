"""The codec loses nothing and gives latents of unit variance."""

import pytest
import torch

from sage_fast.models.toy.codec import PatchCodec
from sage_fast.models.toy.renderer import manifold_for


@pytest.mark.parametrize("size", [(8, 16, 16), (2, 4, 8), (6, 12, 4)], ids=str)
def test_round_trip_is_exact_for_any_bytes(size):
    frames, height, width = size
    generator = torch.Generator().manual_seed(0)
    videos = torch.randint(0, 256, (3, frames, 3, height, width), generator=generator, dtype=torch.uint8)
    codec = PatchCodec()
    latents = codec.encode(videos)
    assert latents.dtype == torch.float32 and latents.shape == (3, *codec.latent_shape(*size))
    assert torch.equal(codec.decode(latents), videos)


def test_latents_of_the_manifold_have_zero_mean_and_unit_variance():
    latents = PatchCodec().encode(manifold_for(8, 16, 16).videos)
    assert latents.shape[1:] == (96, 4, 4, 4)
    assert latents.mean().abs() < 0.05
    assert 0.9 < latents.std() < 1.1


def test_locality_of_a_patch():
    video = torch.zeros(1, 8, 3, 16, 16, dtype=torch.uint8)
    touched = video.clone()
    touched[0, 3, 1, 9, 6] = 255
    codec = PatchCodec()
    changed = (codec.encode(video) != codec.encode(touched)).any(1)[0].nonzero()
    assert changed.tolist() == [[1, 2, 1]]


def test_errors_name_the_size():
    codec = PatchCodec()
    with pytest.raises(ValueError, match="height that is a positive multiple of 4, not 18"):
        codec.latent_shape(8, 18, 16)
    with pytest.raises(ValueError, match="frames that is a positive multiple of 2, not 7"):
        codec.latent_shape(7, 16, 16)
    with pytest.raises(ValueError, match="uint8"):
        codec.encode(torch.zeros(1, 8, 3, 16, 16))
    with pytest.raises(ValueError, match=r"latents \(B, 96"):
        codec.decode(torch.zeros(1, 32, 4, 4, 4))
