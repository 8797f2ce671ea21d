"""What the planner reckons that levers keep of the signal, composed from measured factors."""

import pytest

from sage_fast.config.load import load_config
from sage_fast.planning.signal import KEPT, is_measured, relative_signal


def kept(*overrides: str) -> float:
    return relative_signal(load_config("hv15_480p_lora_8gpu", [f"--{text}" for text in overrides]))


def test_the_measured_settings_give_the_measured_factors() -> None:
    assert kept() == kept("training.update=single_pass") == 1
    quarter_kl = kept("objective.kl_position_fraction=0.25")
    assert quarter_kl == pytest.approx(KEPT["KL at a quarter of the steps"])
    weighted = kept("training.pairs=weighted")
    assert weighted == pytest.approx(KEPT["weighted pairs"])
    assert kept("training.pairs=weighted", "objective.kl_position_fraction=0.25") == pytest.approx(
        weighted * quarter_kl
    )
    assert kept("training.pairs=uniform") == kept("training.timestep_fraction=0.5")
    assert kept("training.pairs=uniform") == pytest.approx(KEPT["uniform pairs"])
    window = kept("rollout.sde_window.size=5")
    assert window == kept("rollout.sde_window.steps=[0,1,2,3,4]") == pytest.approx(KEPT["SDE window"])


def test_other_settings_lie_beside_them() -> None:
    half, quarter, most = (kept("training.pairs=uniform", f"training.pair_fraction={f}") for f in (0.5, 0.25, 0.9))
    assert quarter < half < most < 1
    # Three times the noise of what is left out.
    assert 1 / quarter - 1 == pytest.approx(3 * (1 / half - 1))


@pytest.mark.parametrize(
    "option",
    [
        None,
        "training.train_on.best=1",
        "rollout.shared_initial_noise=true",
        "rollout.cache_threshold=0.1",
        "model.fp8=true",
    ],
)
def test_what_has_no_factor_is_not_measured(option: str | None) -> None:
    words = ["--rollout.sde_window.size=5", *([f"--{option}"] if option else [])]
    assert is_measured(load_config("hv15_480p_lora_8gpu", words)) == (option is None)
