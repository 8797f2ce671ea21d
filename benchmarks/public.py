"""One update of public trainers by their own code, which a folder of checkouts holds:
nothing of it is copied here.

flow_grpo and DiffusionNFT compute inside scripts. The functions and lines that make an
update are cut out of these and run around diffusers' transformer with peft's LoRA,
HunyuanVideo-1.5's class behind the arguments of theirs. UniRL knows that class itself,
and checkpoints activations, as its recipe does.

Letters: B videos, C channels, F frames, H height, W width, T steps, L text tokens.
"""

import ast
import contextlib
import importlib.util
import math
import subprocess
import sys
import textwrap
import typing
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import CodeType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.utils.torch_utils import randn_tensor
from peft import LoraConfig
from torch import Tensor, nn

from benchmarks import workload

KNOWN = {
    "flow_grpo": ("https://github.com/yifan123/flow_grpo", "ac4c86e"),
    "DiffusionNFT": ("https://github.com/NVlabs/DiffusionNFT", "24af555"),
    "UniRL": ("https://github.com/Tencent-Hunyuan/UniRL", "1a7b501"),
}
"""Folder of a checkout -> where it is from, and the commit whose code this module
knows.
"""
TARGETS = [
    "attn.to_q",
    "attn.to_k",
    "attn.to_v",
    "attn.to_out.0",
    "attn.add_q_proj",
    "attn.add_k_proj",
    "attn.add_v_proj",
    "attn.to_add_out",
    "ff.net.0.proj",
    "ff.net.2",
    "ff_context.net.0.proj",
    "ff_context.net.2",
]
"""Layers with an adapter of rank 16, here and in ours."""
SHIFT = 3.0
LEVELS = 2
"""Of the noise levels; how many of them the forward process trains of a video."""

Update = Callable[[], None]


@dataclass(frozen=True, kw_only=True)
class Task:
    """Work of one update, the same for every trainer.

    Attributes:
        config: of the transformer.
        latent: (C, F, H, W).
        text: (B, L, D) float32, all valid.
        advantages: (B,).
        num_steps: T; GRPO does not train the last one.
    """

    config: Mapping[str, Any]
    latent: tuple[int, int, int, int]
    text: Tensor
    advantages: Tensor
    num_steps: int

    @property
    def sigmas(self) -> Tensor:
        """(T + 1,) noise levels from 1 to 0."""
        s = torch.linspace(1, 0, self.num_steps + 1)
        return SHIFT * s / (1 + (SHIFT - 1) * s)

    def noise(self) -> Tensor:
        """(B, C, F, H, W)."""
        return torch.randn(len(self.text), *self.latent)


class Network(nn.Module):
    """diffusers' transformer with peft's LoRA, called as image models are.

    checkpointing: of diffusers. It has a second adapter, `old`, for the forward
    process.
    """

    def __init__(self, task: Task, *, checkpointing: bool) -> None:
        super().__init__()
        self.task = task
        self.model: Any = workload.random_transformer(
            task.config, torch.device("cpu"), torch.float32
        )
        for name in ("default", "old"):
            self.model.add_adapter(
                LoraConfig(r=16, lora_alpha=16, target_modules=TARGETS),
                adapter_name=name,
            )
        if checkpointing:
            self.model.enable_gradient_checkpointing()
        self.set_adapter("default")
        self.trained = [
            parameter
            for parameter in self.model.parameters()
            if parameter.requires_grad
        ]
        self.optimizer = torch.optim.AdamW(self.trained, lr=1e-6)

    def forward(
        self,
        hidden_states: Tensor,
        timestep: Tensor,
        encoder_hidden_states: Tensor,
        **others: Any,
    ) -> tuple[Tensor]:
        """Velocity of (B, C, F, H, W), also where frames are folded into another
        dimension.
        """
        latents = hidden_states.reshape(-1, *self.task.latent)
        batch = len(latents)
        config = self.task.config
        text = encoder_hidden_states
        velocity = self.model(
            hidden_states=torch.cat(
                [latents, torch.zeros_like(latents), torch.zeros_like(latents[:, :1])],
                1,
            ),
            timestep=timestep.float(),
            encoder_hidden_states=text,
            encoder_attention_mask=torch.ones(text.shape[:2], dtype=torch.bool),
            encoder_hidden_states_2=text.new_zeros(
                batch, 1, config["text_embed_2_dim"]
            ),
            encoder_attention_mask_2=torch.zeros(batch, 1, dtype=torch.bool),
            image_embeds=text.new_zeros(batch, 1, config["image_embed_dim"]),
            return_dict=False,
        )[0]
        return (velocity.reshape(hidden_states.shape),)

    def set_adapter(self, name: str) -> None:
        """Compute with an adapter; `old` is not trained."""
        self.model.set_adapter(name)
        for key, parameter in self.model.named_parameters():
            parameter.requires_grad_(".lora_" in key and ".default." in key)

    @contextlib.contextmanager
    def use_shadow(self) -> Iterator[None]:
        """Compute with the old adapter."""
        self.set_adapter("old")
        yield
        self.set_adapter("default")

    @contextlib.contextmanager
    def disable_adapter(self) -> Iterator[None]:
        """Compute without one."""
        self.model.disable_adapters()
        yield
        self.model.enable_adapters()

    def finish(self) -> None:
        """Update the weights. ValueError where the code of the peer has left no
        gradient.
        """
        norm = torch.nn.utils.clip_grad_norm_(self.trained, 1.0)
        if not 0 < float(norm) < math.inf:
            raise ValueError(f"its gradient has the norm {float(norm)}")
        self.optimizer.step()
        self.optimizer.zero_grad()


# --------------------------------------------------------------------------------------
# code of a checkout


def definitions(file: Path, *names: str, **known: Any) -> dict[str, Any]:
    """Functions and classes of a file (all, without names), compiled without the rest
    of it and what that imports.
    """
    tree = ast.parse(file.read_text("utf-8"))
    kept: list[ast.stmt] = [
        n
        for n in tree.body
        if isinstance(n, ast.FunctionDef | ast.ClassDef)
        and (not names or n.name in names)
    ]
    if missing := set(names) - {getattr(node, "name", "") for node in kept}:
        raise ValueError(f"{file} has no {', '.join(sorted(missing))}")
    space = vars(typing) | {
        "FlowMatchEulerDiscreteScheduler": FlowMatchEulerDiscreteScheduler,
        "__name__": file.stem,
        "dataclass": dataclass,
        "dist": MagicMock(),
        "math": math,
        "randn_tensor": randn_tensor,
        "torch": torch,
        "tqdm": lambda steps, **_: steps,
        **known,
    }
    exec(compile(ast.Module(kept, []), str(file), "exec"), space)
    return space


def lines(file: Path, first: str, last: str) -> CodeType:
    """The lines of a file from one that holds `first` to the next one that holds
    `last`, compiled.
    """
    text = file.read_text("utf-8")
    before, found, rest = text.partition(first)
    inside, end, _ = rest.partition(last)
    if not found or not end:
        raise ValueError(f"{file} has no lines from {first!r} to {last!r}")
    return compile(
        textwrap.dedent(before.rpartition("\n")[2] + first + inside + last),
        str(file),
        "exec",
    )


# --------------------------------------------------------------------------------------
# the trainers


def flow_grpo(folder: Path, task: Task) -> Update:
    """Its SDE step, and the body of the training loop of scripts/train_sd3.py."""
    script = folder / "scripts/train_sd3.py"
    name = "sde_step_with_logprob"
    sde = definitions(
        folder / "flow_grpo/diffusers_patch/sd3_sde_with_logprob.py", name
    )[name]
    space = definitions(script, "compute_log_prob", sde_step_with_logprob=sde)
    body = lines(
        script, "with accelerator.accumulate(transformer)", "optimizer.zero_grad()"
    )
    scheduler = FlowMatchEulerDiscreteScheduler(shift=SHIFT)
    scheduler.set_timesteps(task.num_steps)
    net = Network(task, checkpointing=False)
    trained = task.num_steps - 1
    train = SimpleNamespace(cfg=False, beta=0.0, adv_clip_max=5, clip_range=1e-4)
    accelerator = SimpleNamespace(
        accumulate=contextlib.nullcontext, sync_gradients=False
    )
    accelerator.backward = lambda loss: (loss / trained).backward()
    space |= {
        "accelerator": accelerator,
        "autocast": contextlib.nullcontext,
        "config": SimpleNamespace(train=train, sample=SimpleNamespace(noise_level=0.7)),
        "embeds": task.text,
        "info": defaultdict(list),
        "optimizer": MagicMock(),
        "pipeline": SimpleNamespace(scheduler=scheduler),
        "pooled_embeds": None,
        "transformer": net,
    }

    def update() -> None:
        net.eval()
        x = task.noise().flatten(2, 3)  # its tensors are those of images
        latents = [x]
        log_probs = list[Tensor]()
        with torch.no_grad():
            for t in scheduler.timesteps:
                v = net(x, t.expand(len(x)), task.text)[0]
                x, log_prob, *_ = sde(scheduler, v, t.unsqueeze(0), x, noise_level=0.7)
                latents.append(x)
                log_probs.append(log_prob)
        states = torch.stack(latents, 1)
        sample = {
            "latents": states[:, :-1],
            "next_latents": states[:, 1:],
            "timesteps": scheduler.timesteps.repeat(len(x), 1),
            "log_probs": torch.stack(log_probs, 1),
            "advantages": task.advantages[:, None].expand(-1, trained),
        }
        net.train()
        for j in range(trained):
            exec(body, space | {"sample": sample, "j": j})
        net.finish()

    return update


def diffusion_nft(folder: Path, task: Task) -> Update:
    """Its second-order solver, and the body of the training loop of
    scripts/train_nft_sd3.py.
    """
    solver = definitions(folder / "flow_grpo/diffusers_patch/solver.py")["run_sampling"]
    script = folder / "scripts/train_nft_sd3.py"
    body = lines(
        script, 'x0 = train_sample_batch["latents_clean"]', "scaled_loss.backward()"
    )
    net = Network(task, checkpointing=False)
    train = SimpleNamespace(adv_clip_max=5, adv_mode="all", beta=1e-4)
    space = {
        "config": SimpleNamespace(use_lora=True, beta=0.1, train=train),
        "effective_grad_accum_steps": LEVELS,
        "embeds": task.text,
        "enable_amp": False,
        "mixed_precision_dtype": torch.float32,
        "pooled_embeds": None,
        "torch": torch,
        "torch_autocast": lambda **_: contextlib.nullcontext(),
        "transformer_ddp": MagicMock(side_effect=net.__call__, module=net),
    }

    def velocity(z: Tensor, sigma: Tensor) -> Tensor:
        return net(z, (sigma * 1000).expand(len(z)), task.text)[0]

    def update() -> None:
        net.eval()
        with net.use_shadow(), torch.no_grad():
            x, *_ = solver(velocity, task.noise(), task.sigmas, "dpm2", True, 0.7)
        net.train()
        timesteps = 1000 * task.sigmas[:-1][torch.randperm(task.num_steps)].repeat(
            len(x), 1
        )
        batch = {
            "latents_clean": x,
            "timesteps": timesteps,
            "advantages": task.advantages[:, None].expand(-1, LEVELS),
        }
        for level in range(LEVELS):
            exec(body, space | {"train_sample_batch": batch, "j_idx": level})
        net.finish()

    return update


def unirl(folder: Path, task: Task, objective: str) -> Update:
    """Its stage of HunyuanVideo-1.5, and its FlowGRPO, one backward pass for all steps,
    or DiffusionNFT.
    """
    sys.path[:] = [str(folder), *(path for path in sys.path if path != str(folder))]
    names = (
        "unirl.models.hunyuan_video15.diffusion",
        "unirl.models.hunyuan_video15.conditions",
        "unirl.types.conditions",
        "unirl.types.sampling",
        "unirl.sde.kernels",
        "unirl.algorithms.flowgrpo",
        "unirl.algorithms.diffusionnft",
    )
    # It imports ray, which nothing here calls.
    stand_in = {} if importlib.util.find_spec("ray") else {"ray": MagicMock()}
    sys.modules |= stand_in
    try:
        diffusion, conditions, types, sampling, kernels, grpo, nft = map(
            importlib.import_module, names
        )
    finally:
        for name in stand_in:
            del sys.modules[name]
    net = Network(task, checkpointing=True)
    channels, frames, height, width = task.latent
    vae = SimpleNamespace(spatial_compression_ratio=1, temporal_compression_ratio=1)
    vae.config = SimpleNamespace(latent_channels=channels)
    stage = diffusion.HunyuanVideo15DiffusionStage(
        model=SimpleNamespace(transformer=net.model, vae=vae),
        step=diffusion.HunyuanVideo15DiffusionStep(),
        strategy=kernels.FlowSDEStrategy(),
        vision_num_semantic_tokens=1,
        vision_states_dim=task.config["image_embed_dim"],
        autocast_precision="fp32",
        trajectory_precision="fp32",
    )
    params = sampling.DiffusionSamplingParams(
        num_inference_steps=task.num_steps,
        height=height,
        width=width,
        num_frames=frames,
        guidance_scale=0.0,
        eta=0.25,
        samples_per_prompt=1,
        seed=1,
        sde_indices=list(range(task.num_steps - 1)) if objective == "grpo" else [],
    )
    cls = conditions.HunyuanVideo15Conditions
    valid = torch.ones(task.text.shape[:2], dtype=torch.bool)
    glyph = torch.zeros(len(task.text), 1, task.config["text_embed_2_dim"])
    given = {
        "text_mllm": types.TextEmbedCondition(embeds=task.text, attn_mask=valid),
        "text_glyph": types.TextEmbedCondition(embeds=glyph, attn_mask=~valid[:, :1]),
    }
    if objective == "grpo":
        algorithm = grpo.FlowGRPO(params=params, stage=stage, conditions_cls=cls)
    else:
        algorithm = nft.DiffusionNFT(
            params=params,
            stage=stage,
            conditions_cls=cls,
            nft_lora_policy=net,
            training_timestep_fraction=LEVELS / task.num_steps,
        )
    loss = {"advantages": task.advantages, "training_progress": 0.0, "loss_scale": 1.0}

    def update() -> None:
        net.eval()
        with contextlib.nullcontext() if objective == "grpo" else net.use_shadow():
            segment = stage.diffuse(
                cls.from_dict(given), schedule=task.sigmas, params=params
            )
        net.train()
        algorithm.compute_loss_and_backward(conditions=given, segment=segment, **loss)
        net.finish()

    return update


TRAINERS: dict[str, dict[str, Callable[[Path, Task], Update]]] = {
    "grpo": {"flow_grpo": flow_grpo, "UniRL": partial(unirl, objective="grpo")},
    "forward_process": {
        "DiffusionNFT": diffusion_nft,
        "UniRL": partial(unirl, objective="forward_process"),
    },
}
"""Objective -> folder of a checkout -> what makes its update ready."""


def ready(objective: str, peer: str, public: Path, task: Task) -> Update:
    """The update of a trainer, after one.

    Raises:
        ValueError: it is not there, or this module does not know its code; the message
            says what to do.
    """
    source, commit = KNOWN[peer]
    folder = public / peer
    if not folder.is_dir():
        raise ValueError(f"{folder} is not there: git clone {source} {folder}")
    try:
        with warnings.catch_warnings(action="ignore"):
            update = TRAINERS[objective][peer](folder, task)
            update()
    except Exception as error:
        told = f"{type(error).__name__}: {error}".partition("\n")[0]
        if isinstance(error, ModuleNotFoundError) and not str(error.name).startswith(
            "unirl"
        ):
            raise ValueError(
                f"{peer} needs another package: pip install {error.name}"
            ) from error
        known = f"known is {commit}: git -C {folder} checkout {commit}"
        raise ValueError(
            f"{told}. {folder} is at {commit_of(folder)}, {known}"
        ) from error
    return update


def commit_of(checkout: Path) -> str:
    """Short commit of a checkout; "no commit" of a folder without git."""
    asked = ["git", f"--git-dir={checkout / '.git'}", "rev-parse", "--short=7", "HEAD"]
    return (
        subprocess.run(
            asked, capture_output=True, text=True, check=False
        ).stdout.strip()
        or "no commit"
    )
