"""Published recipes: every preset names the one that it follows, its first update moves
the weights about as far, and the table of docs/real_model.md is the file.
"""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks import recipes
from sage_fast.config.load import load_config, preset_names
from sage_fast.config.schema import RunConfig
from sage_fast.optim import (
    GRPO_RECIPES,
    LARGE_MODEL,
    NFT_RECIPES,
    Recipe,
    published_recipe,
    unusual_movement,
)

ROOT = Path(__file__).resolve().parents[2]
RECIPES: dict[str, dict[str, Any]] = yaml.safe_load(
    (ROOT / "sage_fast/config/published_recipes.yaml").read_text("utf-8")
)
LARGE = [name for name in preset_names() if re.match(r"(hv15|wan\d*)_", name)]
"""Presets of published weights. A new family's are added by the start of its name."""


def own_movement(config: RunConfig) -> float:
    """`first_movement` of a configuration."""
    lora = config.lora
    given = {"name": "", "optimizer": config.optimizer.name}
    adapters = {"rank": lora.rank, "alpha": lora.alpha}
    return Recipe(
        **given,  # type: ignore[arg-type]
        learning_rate=config.optimizer.learning_rate,
        **(adapters if config.training.mode == "lora" else {}),  # type: ignore[arg-type]
    ).movement


@pytest.mark.parametrize("preset", LARGE)
def test_a_first_update_moves_the_weights_as_far_as_in_the_recipe_that_is_named(
    preset: str,
) -> None:
    config = load_config(preset)
    recipe = published_recipe(recipes.named_recipe(preset))
    assert 1 / 2 <= own_movement(config) / recipe.movement <= 2
    assert recipe.optimizer == config.optimizer.name
    if preset.startswith("wan22_5b"):
        # Adapters, where its only recipe trains all weights.
        assert recipe.rank is None and config.training.mode == "lora"
        return
    assert (recipe.rank is None) == (config.training.mode == "full")
    for compared in (GRPO_RECIPES, NFT_RECIPES):
        assert {*compared.values()} <= RECIPES.keys()
    if "wan" in preset:
        # All that decides how far, not its product alone.
        assert (
            config.optimizer.learning_rate,
            config.lora.rank,
            config.lora.alpha,
        ) == (recipe.learning_rate, recipe.rank, recipe.alpha)


def test_every_value_has_its_place_and_can_be_compared() -> None:
    for key, quoted in RECIPES.items():
        assert {"source", "commit", "file", "title"} <= quoted.keys(), key
        decides = {"learning_rate", "rank", "alpha"} & quoted.keys()
        assert decides <= quoted["at"].keys(), key
        assert re.fullmatch("[0-9a-f]{7}", quoted["commit"]), key
        assert ("rank" in quoted) == ("alpha" in quoted), key
        assert published_recipe(key).movement > 0
    # Read from the files: alpha is 2 rank in all but these.
    same = {key for key, quoted in RECIPES.items() if published_recipe(key).scale == 1}
    whole = {key for key, quoted in RECIPES.items() if "rank" not in quoted}
    assert same - whole == {
        "unirl_hv15",
        "flow_factory_wan21_nft",
        "flow_factory_wan22_nft",
    }
    with pytest.raises(KeyError):
        published_recipe("none")


def test_a_small_model_is_compared_with_no_recipe() -> None:
    config = load_config("toy_cpu")
    assert (
        unusual_movement(config.optimizer, config.lora, "none", LARGE_MODEL - 1) is None
    )


def test_the_documented_table_is_the_file() -> None:
    """With the presets below it; `python -m benchmarks report --write` writes it."""
    page = (ROOT / "docs/real_model.md").read_text("utf-8")
    table = recipes.table()
    assert table in page and len(table.splitlines()) == 2 + len(RECIPES) + 5
    assert "| LoRA 64, alpha 128 | U: `examples/diffusion/wan21_t2v.yaml` |" in table
    assert "| 1e-5, Muon | 1e-4 | 1e-7 to 1e-5 | all | S: " in table
    sources = page.split("\nSources: ")[1].split("\n\n")[0]
    for quoted in RECIPES.values():
        assert quoted["commit"] in sources, quoted["title"]
