"""The sections `model` and `lora` of a configuration: what is trained, and how its forward is computed.

Each field has its meaning below it. Checks of one section live in its `__post_init__`.
"""

from dataclasses import dataclass, field
from typing import Literal

from sage_fast.config.limits import require
from sage_fast.config.resumable import MACHINE, PAIRS, PLACE, SHAPES, fixed, free


@dataclass(kw_only=True)
class ModelConfig:
    """Which text-to-video model is trained."""

    family: str = fixed("toy", SHAPES)
    """Short name of a model family, or `package.module:Class` of a `ModelFamily` or of a function that returns
    `Components`."""
    path: str | None = free(None, PLACE)
    """Folder of the weights, or the id of a repository on the Hugging Face hub; null takes the family's own default."""
    cache_dir: str | None = free(None, PLACE)
    """Where prompt embeddings are kept; null keeps them in `.sage_fast` inside `path`, or in
    ~/.cache/sage_fast where `path` is not a folder that can be written to."""
    dtype: Literal["float32", "bfloat16"] = fixed("float32", SHAPES)
    """Data type of the frozen transformer weights. Trained weights are always float32."""
    adapter: str | None = fixed(None, SHAPES)
    """LoRA adapter to start from: the folder or .safetensors file of another run's export, or the lora/ folder of a
    checkpoint. It is loaded before training (training.mode lora; lora.rank and
    target_modules must fit), and is part of what the run calls its initial weights: the fixed anchor, and "before" in
    the paired evaluation."""
    text_encoder_dtype: Literal["auto", "float32", "bfloat16", "float16"] = fixed("auto", PAIRS)
    """Data type in which the language model encodes prompts: `auto` is that of its files, bfloat16 as published; the
    official code's is float16. Encoded prompts are kept apart by it."""
    vae_dtype: Literal["auto", "float32", "bfloat16", "float16"] = free("auto", MACHINE)
    """Data type in which videos are decoded; `auto` is float16 on a GPU, like the official code's, and float32 on a
    CPU."""
    decode_memory_gib: float | Literal["auto"] | None = free("auto", MACHINE)
    """Memory that decoding may take for activations. As many videos as fit are decoded at once; one that does not fit
    is decoded in overlapping tiles, which is more work. `auto` decodes a video whole where the plan has room for it on
    the GPU beside all else, and is 16 elsewhere; null decodes every video whole."""
    device: str = free("auto", MACHINE)
    """`auto`, `cpu`, `cuda` or `cuda:N`."""
    kernels: Literal["auto", "reference", "triton"] = free("auto", MACHINE)
    """How the steps of a rollout and the loss are computed: `triton` by the kernels of sage_kernels, `reference` by
    plain PyTorch, `auto` by Triton on a GPU and PyTorch elsewhere."""
    forward: Literal["fused", "stock"] = free("fused", MACHINE)
    """`fused` computes diffusers' transformer with packed tokens and the kernels of sage_kernels; `stock` is diffusers'
    own forward, the reference."""
    attention: Literal["auto", "cudnn", "flash2", "flash3", "flash4", "xformers", "sdpa", "reference"] = free(
        "auto", MACHINE
    )
    """Attention backend of the fused forward. `auto` takes the fastest one that is installed and says which; one named
    here that cannot run is an error."""
    deterministic: bool = free(False, MACHINE)
    """Only attention backends whose backward pass gives the same bits every time."""
    checkpointing: Literal["none", "feed_forward", "selective", "full", "auto"] = free("none", MACHINE)
    """What a transformer block keeps for its backward pass: `none` recomputes elementwise work only, `feed_forward`
    also the first product of the feed-forward, `selective` keeps attention's result and recomputes the rest, `full`
    recomputes everything. `none` takes 73 GB per guidance branch of HunyuanVideo-1.5 at 480x832. `auto` takes the first
    of the other three that fits the GPU by the plan; it is `selective` on a CPU."""
    adaln: Literal["auto", "weights", "table", "offload"] = free("auto", MACHINE)
    """Where the timestep modulation comes from: `weights` computes it in every forward; `table` computes it once per
    noise level, which needs frozen AdaLN weights; `offload` is `table` with those weights in CPU memory. `auto` is
    `table` where the AdaLN weights are frozen and `weights` elsewhere."""

    def __post_init__(self) -> None:
        limit = self.decode_limit_gib
        require(limit is None or limit > 0, "model.decode_memory_gib", limit, "auto, null or positive")
        if self.forward == "stock":
            require(self.attention == "auto", "model.attention", self.attention, "auto with model.forward stock")
            require(
                self.checkpointing in ("none", "full"),
                "model.checkpointing",
                self.checkpointing,
                "none or full with model.forward stock",
            )
            require(not self.deterministic, "model.deterministic", True, "false with model.forward stock")
            require(self.adaln in ("auto", "weights"), "model.adaln", self.adaln, "auto with model.forward stock")

    @property
    def settled_checkpointing(self) -> Literal["none", "feed_forward", "selective", "full"]:
        """`checkpointing` as one of a block's, which it is for `auto` too where no plan has settled it."""
        return "selective" if self.checkpointing == "auto" else self.checkpointing

    @property
    def decode_limit_gib(self) -> float | None:
        """`decode_memory_gib` as a number, which it is for `auto` too where no plan has settled it."""
        return 16.0 if self.decode_memory_gib == "auto" else self.decode_memory_gib

    def decode_dtype(self, on_gpu: bool) -> str:
        """`vae_dtype` as the name of a type of torch, which it is for `auto` too."""
        return ("float16" if on_gpu else "float32") if self.vae_dtype == "auto" else self.vae_dtype


@dataclass(kw_only=True)
class LoraConfig:
    """Low-rank adapters on the transformer blocks."""

    rank: int = 32
    """Rank of the adapters."""
    alpha: float | None = None
    """Scale numerator (scale = alpha / rank); null means alpha = rank."""
    target_modules: list[str] = field(
        default_factory=lambda: [
            "attn.to_q",
            "attn.to_k",
            "attn.to_v",
            "attn.to_out.0",
            "attn.add_q_proj",
            "attn.add_k_proj",
            "attn.add_v_proj",
            "attn.to_add_out",
        ]
    )
    """Names of the linear layers inside each transformer block that get an adapter. Layers that cannot influence the
    video (the last block's text output) are left out by themselves."""

    def __post_init__(self) -> None:
        require(self.rank >= 1, "lora.rank", self.rank, "at least 1")
        require(self.alpha is None or self.alpha > 0, "lora.alpha", self.alpha, "null or positive")
        require(bool(self.target_modules), "lora.target_modules", self.target_modules, "a non-empty list")
