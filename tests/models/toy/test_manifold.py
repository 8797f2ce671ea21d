"""The distance is zero on the manifold, positive off it, and the nearest scene is the right one."""

import pytest
import torch

from sage_fast.models.toy.renderer import manifold_for, render_batch, to_uint8

MANIFOLD = manifold_for(8, 16, 16)


def test_legal_videos_have_no_distance_and_find_themselves():
    rows = torch.arange(0, len(MANIFOLD.scenes), 37)
    videos = MANIFOLD.videos[rows]
    assert torch.equal(MANIFOLD.distance(videos), torch.zeros(len(rows)))
    assert torch.equal(MANIFOLD.squared_distances(MANIFOLD.flatten(videos)).argmin(1), rows)


def test_the_table_is_what_the_renderer_draws():
    for row in (0, 611, 1799):
        assert torch.equal(MANIFOLD.videos[row], to_uint8(render_batch([MANIFOLD.scenes[row]])[0]))


def test_distance_against_brute_force():
    generator = torch.Generator().manual_seed(0)
    videos = torch.randint(0, 256, (4, 8, 3, 16, 16), generator=generator, dtype=torch.uint8)
    videos[1] = MANIFOLD.videos[5] // 2
    legal = MANIFOLD.videos.double() / 255
    brute = [((video.double() / 255 - legal) ** 2).flatten(1).mean(1).sqrt().min() for video in videos]
    assert torch.allclose(MANIFOLD.distance(videos).double(), torch.stack(brute), atol=1e-6)


def test_empty_batch_and_wrong_size():
    assert MANIFOLD.distance(MANIFOLD.videos[:0]).shape == (0,)
    with pytest.raises(ValueError, match=r"Expected uint8 videos \(B, 8, 3, 16, 16\)"):
        MANIFOLD.distance(torch.zeros(1, 4, 3, 16, 16, dtype=torch.uint8))
    with pytest.raises(ValueError, match="Expected uint8"):
        MANIFOLD.distance(MANIFOLD.videos[:1].float())
