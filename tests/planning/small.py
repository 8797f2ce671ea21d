"""Plans of a model of three narrow blocks, which is traced quickly."""

from functools import cache
from pathlib import Path

from sage_fast.config.load import load_config
from sage_fast.models.family import Decoding
from sage_fast.models.hunyuan15.hunyuan15 import HUNYUAN_VIDEO_15, published_model
from sage_fast.planning.devices import DEVICES
from sage_fast.planning.estimate import Plan, make_plan

ROOT = Path(__file__).resolve().parents[2]


B = "configs/hv15_480p_lora_1gpu.yaml"


SMALL = HUNYUAN_VIDEO_15 | {
    "num_attention_heads": 2,
    "num_layers": 3,
    "text_embed_dim": 64,
    "text_embed_2_dim": 32,
    "num_refiner_layers": 1,
}


@cache
def plan(*overrides: str, memory_gb: float | None = None) -> Plan:
    config = load_config(B, overrides)
    return make_plan(config, DEVICES["h100"], memory_gb=memory_gb, sizes={})


@cache
def small_plan(*overrides: str, memory_gb: float | None = None, gpus: int = 1) -> Plan:
    """Of a model of three narrow blocks, which is traced quickly; decoding and rewards
    take nothing.
    """
    size = ["--video.height=64", "--video.width=96", "--video.num_frames=9"]
    config = load_config(
        B, [*size, "--reward.options.videoalign.device=cuda:1", *overrides]
    )
    return make_plan(
        config,
        DEVICES["h100"],
        memory_gb=memory_gb,
        gpus=gpus,
        runtime=0.0,
        description=published_model(
            transformer=SMALL,
            decoding=lambda latent, videos, model, on_gpu: Decoding(peak_bytes=0.0),
            decoder_gb=0.0,
            encoder_gb=0.0,
        ),
        sizes={},
    )


FORWARD = [
    "--training.update=forward_process",
    "--rollout.sde_type=ode",
    "--objective.kl_mode=none",
]
FORWARD.append("--rollout.guidance_scale=1")
