"""A stock pipeline, saved and loaded from disk, with and without the fused forward of
its transformer.
"""

from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import DDPMPipeline, HunyuanVideo15Pipeline

from sage_fast import accelerate


def test_a_stock_pipeline_generates_the_same_video_up_to_rounding(
    diffusers_checkpoint: Path,
) -> None:
    pipeline = HunyuanVideo15Pipeline.from_pretrained(diffusers_checkpoint)
    pipeline.set_progress_bar_config(disable=True)

    def generate() -> np.ndarray:
        generator = torch.Generator().manual_seed(7)
        size = {"num_frames": 9, "height": 48, "width": 32}
        return pipeline(
            'a sign that says "open"',
            **size,
            num_inference_steps=4,
            generator=generator,
            output_type="np",
        ).frames[0]

    stock = generate()
    with accelerate(pipeline):
        fused = generate()
    restored = generate()
    np.testing.assert_allclose(fused, stock, atol=1e-4)
    assert not np.array_equal(fused, stock)  # it is another computation
    np.testing.assert_array_equal(restored, stock)
    assert stock.std() > 0.01


def test_a_pipeline_of_another_model_is_refused() -> None:
    with pytest.raises(ValueError, match="The transformer is a DDPMPipeline"):
        accelerate(DDPMPipeline(unet=None, scheduler=None))
