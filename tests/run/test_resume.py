"""Where a run begins: what may change on a resume, what is moved aside, and what is never started over."""

import re

from sage_fast.config.resumable import FIXED, FREE, marked_keys
from sage_fast.config.schema import RunConfig, by_dotted_key, to_dict

FREE_KEYS = re.compile(
    r"output_dir|resume|num_threads|distributed\..*|rollout\.(micro_)?batch_size|training\.(num_updates|guidance|update)"
    r"|model\.(path|device|cache_dir|decode_memory_gib|vae_dtype|forward|kernels|attention|deterministic|checkpointing"
    r"|offload_activations|adaln|compile)"
    r"|checkpoint\..*|logging\..*|evaluation\.(every|num_samples|batch_size)"
    r"|reward\.(placement|device|queue_size|timeout_seconds|on_failure)"
)


def test_the_keys_that_are_free_on_resume() -> None:
    whole = ("reward.weights", "reward.options")
    keys = by_dotted_key(to_dict(RunConfig(output_dir="x", data={"prompts": "y"})), whole)  # type: ignore[arg-type]
    assert set(marked_keys(RunConfig, FREE)) == {key for key in keys if FREE_KEYS.fullmatch(key)}
    assert set(marked_keys(RunConfig, FIXED)) < keys.keys() - marked_keys(RunConfig, FREE).keys()
