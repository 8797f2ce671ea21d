"""The modulation of frozen weights as a table by noise level: what it follows, and
what it leaves to the weights.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from peft import LoraConfig

from sage_fast import accelerate
from tests.models.hunyuan15.oracle import (
    latents,
    padded_arguments,
    tiny_transformer,
    widened,
)
from tests.models.hunyuan15.test_fused import packed, prompts_of, with_lora


@pytest.mark.parametrize("adaln", ["auto", "table", "offload"])
def test_modulation_of_frozen_weights_is_a_table(adaln: Any) -> None:
    model = with_lora(tiny_transformer(dtype=torch.float64))
    prompts = prompts_of("glyph", torch.float64)
    x = latents(2)
    arguments = [
        (x, torch.tensor(t), prompts)
        for t in ([300.0, 700.0], [700.0, 300.0], [300.0, 300.0])
    ]
    acceleration = accelerate(model, adaln="weights")
    expected = [packed(model, *a).detach() for a in arguments]
    acceleration.undo()
    acceleration = accelerate(model, adaln=adaln)
    for a, wanted in zip(arguments, expected, strict=True):
        torch.testing.assert_close(
            packed(model, *a).detach(), wanted, rtol=1e-12, atol=1e-12
        )
    assert acceleration.table is not None
    assert len(acceleration.table.rows) == 2


def test_a_table_of_trained_weights_is_refused() -> None:
    for model in (tiny_transformer(), with_lora(tiny_transformer(), ["norm1.linear"])):
        for adaln in ("table", "offload"):
            with pytest.raises(ValueError, match="Freeze them first, or choose auto"):
                accelerate(model, adaln=adaln)  # type: ignore[arg-type]
        acceleration = accelerate(model)
        packed(
            model, latents(1), torch.tensor([300.0]), prompts_of("one", torch.float32)
        )
        assert acceleration.table is None


def test_the_table_follows_the_weights_it_depends_on() -> None:
    """The output is what it is after `forget`, which a change through `.data` needs, as
    that leaves no trace.
    """
    model = tiny_transformer().requires_grad_(False)
    other = tiny_transformer(seed=3).state_dict()
    layer = model.transformer_blocks[1].norm1.linear
    embedder = model.time_embed.timestep_embedder.linear_2
    changes: dict[str, Callable[[], object]] = {
        "weight": lambda: layer.weight.mul_(1.5),
        "time embedding": lambda: embedder.weight.mul_(1.5),
        "assigned": lambda: model.load_state_dict(other, assign=True),
    }
    forward = partial(
        packed,
        model,
        latents(1),
        torch.tensor([300.0]),
        prompts_of("one", torch.float32),
    )
    acceleration = accelerate(model)
    output = forward()
    assert acceleration.table is not None
    for name, change in changes.items():
        with torch.no_grad():
            change()
        model.requires_grad_(False)
        before = output
        output = forward()
        acceleration.forget()
        assert torch.equal(output, forward()), name
        assert not torch.allclose(output, before), name


def test_what_the_table_cannot_follow_is_computed_by_the_weights() -> None:
    """The scale of an adapter, one that was merged, and the gradient of the timestep."""
    x = latents(1)
    timestep = torch.tensor([300.0])
    prompts = prompts_of("one", torch.float64)
    scaled = tiny_transformer(dtype=torch.float64)
    adapter = LoraConfig(
        r=2,
        target_modules=["time_embed.timestep_embedder.linear_1"],
        init_lora_weights=False,
    )
    scaled.add_adapter(adapter)
    arguments = padded_arguments(x, timestep, prompts, torch.float64)
    with accelerate(scaled.requires_grad_(False).double()):
        packed(scaled, x, timestep, prompts)
        scaled.set_adapters("default", 0.5)
        given = scaled(**arguments)[0]
    with widened():
        expected = scaled(**arguments)[0]
    torch.testing.assert_close(given, expected, rtol=1e-9, atol=1e-9)

    merged = with_lora(
        tiny_transformer(dtype=torch.float64).requires_grad_(False), ["norm1.linear"]
    )
    accelerate(merged.requires_grad_(False))
    merged.disable_adapters()
    base = packed(merged, x, timestep, prompts)
    merged.enable_adapters()
    expected = packed(merged, x, timestep, prompts)
    merged.fuse_lora()
    merged.unload_lora()
    torch.testing.assert_close(
        packed(merged, x, timestep, prompts), expected, rtol=1e-9, atol=1e-9
    )
    assert not torch.allclose(base, expected)

    model = tiny_transformer(dtype=torch.float64).requires_grad_(False)
    found = []
    for adaln in ("weights", "auto"):
        with accelerate(model, adaln=adaln):  # type: ignore[arg-type]
            asked = timestep.clone().requires_grad_()
            packed(model, x, asked, prompts).square().sum().backward()
            found.append(asked.grad)
    torch.testing.assert_close(found[1], found[0])


def test_rows_of_the_table_do_not_depend_on_the_batch_that_met_them_first() -> None:
    table = accelerate(tiny_transformer().requires_grad_(False), adaln="offload").table
    assert table is not None
    alone = table.lookup([300.0], torch.device("cpu"))
    table.rows.clear()
    assert torch.equal(
        table.lookup([700.0, 300.0, 20.0], torch.device("cpu"))[:, 1:2], alone
    )
