"""A transformer whose weights are on disk: read whole or, where it is sharded, only
this rank's part of each; and the facts about a transformer that its family computes
with.

Every rank of a node building the whole transformer would take its size in host memory
as often as there are GPUs. So a transformer is built without weights, adapters are
added, it is sharded, and only then it is given weights, a slice at a time from
memory-mapped files, straight to where they belong. What the ranks of a node read they
share in the kernel's cache of files, which gives way to anything that needs the memory.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from sage_fast.config.files import loads
from sage_fast.models.attention.joint import SequenceLayout

Checkpointing = Literal["none", "feed_forward", "selective", "full"]
"""Activations that a block keeps for its backward pass."""

MAX_LEVELS = 512
"""Most noise levels in a table of modulation; beyond them it is emptied."""


class FusedForward:
    """The handle of a transformer that runs a fused forward instead of the stock one."""

    transformer: Any
    adaln: str
    """Source of the modulation, see `ModelConfig.adaln`."""
    sequence: SequenceLayout | None = None
    """Layout of the video tokens that are computed here; None for all of them."""

    def forget(self) -> None:
        """Forget what was computed from the weights, after they have changed behind its
        back.
        """

    def undo(self) -> None:
        """Restore the transformer's own forward."""
        raise NotImplementedError


def velocity_dtype(transformer: Any) -> torch.dtype:
    """Type of the velocities: float32, or float64 of a float64 model (an oracle in
    tests).
    """
    # `transformer.dtype` of diffusers visits all modules, 15 ms of every forward of the
    # real model.
    return torch.promote_types(next(transformer.parameters()).dtype, torch.float32)


def is_dead(name: str, dead: Sequence[str]) -> bool:
    """Tell whether a module's or parameter's qualified name lies in one of the `dead`
    modules.
    """
    return any(name == module or name.startswith(module + ".") for module in dead)


def in_parts(name: str, parts: Collection[str]) -> bool:
    """Tell whether one of `parts` is a part, between dots, of a qualified name."""
    return not set(parts).isdisjoint(name.split("."))


_MAPPED_BYTES = 2**25
"""Read from files that stay open. An open file keeps what was read of it in the memory
of the process.
"""

NUMBERS = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F64": torch.float64,
    "I64": torch.int64,
}
"""Types that are read, by their names in .safetensors. Whole numbers are an adapter's
alpha, and positions in CLIP.
"""


STEMS = {"diffusers": "diffusion_pytorch_model", "transformers": "model"}
"""Library -> how the names of its files of weights begin."""


def weight_files(folder: Path, stem: str = STEMS["diffusers"]) -> list[Path]:
    """Files of the weights in a folder, there or not: those that its index names, or
    the one without an index.

    ValueError names an index that is damaged.
    """
    index = folder / f"{stem}.safetensors.index.json"
    if not index.is_file():
        return [folder / f"{stem}.safetensors"]
    return [
        folder / name for name in sorted(set(read_json(index)["weight_map"].values()))
    ]


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file of a checkpoint. ValueError names one that is damaged."""
    try:
        return dict(loads(path.read_text(encoding="utf-8")))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}. Download it again.") from error


def open_weights(path: Path) -> Any:
    """An opened .safetensors file. Whatever reads weights opens their files here.

    ValueError names one that is damaged or quantised; FileNotFoundError one that is
    missing.
    """
    try:
        file = safe_open(path, framework="pt")
    except SafetensorError as error:
        raise ValueError(
            f"{path} is damaged or was not downloaded to its end ({error})."
        ) from error
    check_types(path, {name: file.get_slice(name).get_dtype() for name in file.keys()})  # noqa: SIM118  no mapping
    return file


def check_types(path: Path, types: Mapping[str, str | torch.dtype]) -> None:
    """ValueError unless the weights of a file are stored as numbers; `types`: by name,
    of .safetensors or of torch.
    """
    for name, stored in types.items():
        if stored not in NUMBERS and stored not in NUMBERS.values():
            raise ValueError(
                f"{path} is quantised: {name} is stored as {stored}, which is rounded "
                "and often scaled by other keys. "
                "Take the file that was published in float32, bfloat16 or float16."
            )


def load_pretrained(kind: Any, folder: Path, **options: Any) -> Any:
    """A model of diffusers or transformers from a folder, in evaluation mode; `options`
    are those of `from_pretrained`.

    ValueError: a file is damaged or quantised, or config.json describes another model
    than the files hold.
    """
    library = kind.__module__.partition(".")[0]
    for file in weight_files(folder, STEMS[library]):
        if file.is_file():
            open_weights(file)
    log = import_module(f"{library}.utils.logging")
    verbosity = log.get_verbosity()
    # Weights that do not fit are reported below.
    log.set_verbosity_error()
    try:
        model, info = kind.from_pretrained(
            folder,
            local_files_only=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            **options,
        )
    except StrictDataclassError as error:
        raise ValueError(
            f"{folder / 'config.json'} contradicts itself: "
            f"{' '.join(str(error).split())}"
        ) from error
    finally:
        log.set_verbosity(verbosity)
    unexpected = info["unexpected_keys"]
    if library == "transformers":
        # Its files may hold other models beside this one, such as a decoder, but no
        # more layers of this one.
        own = {re.sub(r"\d+", "N", name) for name in model.state_dict()}
        unexpected = [name for name in unexpected if re.sub(r"\d+", "N", name) in own]
    # Names, or in other releases names with both shapes.
    mismatched = list(map(str, info["mismatched_keys"]))
    check_fit(
        folder,
        missing=info["missing_keys"],
        unexpected=unexpected,
        mismatched=mismatched,
    )
    return model.eval()


def misfits(
    described: Mapping[str, torch.Size], stored: Mapping[str, torch.Size]
) -> dict[str, set[str]]:
    """Names of weights by kind, for `check_fit`: those of a configuration and of its
    files that are not the same.
    """
    return {
        "missing": described.keys() - stored.keys(),
        "unexpected": stored.keys() - described.keys(),
        "mismatched": {
            name
            for name in described.keys() & stored.keys()
            if described[name] != stored[name]
        },
    }


def check_fit(folder: Path, **wrong: Collection[str]) -> None:
    """ValueError unless the weights of a folder are those that its configuration
    describes; `wrong`: names by kind.
    """
    for kind, names in wrong.items():
        if names:
            raise ValueError(
                f"The weights in {folder} do not fit its config.json: {len(names)} "
                f"{kind} keys, among them "
                f"{min(names)}. Download the folder again."
            )


class StoredWeights(Mapping[str, Tensor]):
    """The weights in a folder of a diffusers model: each look-up maps one into memory
    and keeps nothing.

    Args:
        folder: of the model.
        parts: how names of weights begin -> the folder in it that has them.

    ValueError names a file that is damaged or quantised; OSError for one that is
    missing.
    """

    def __init__(self, folder: Path, parts: Mapping[str, str] = {"": ""}) -> None:
        self._opened: dict[Path, Any] = {}
        self._files: dict[str, tuple[Path, str]] = {}
        self.shapes: dict[str, torch.Size] = {}
        for prefix, part in parts.items():
            for path in weight_files(folder / part):
                file = self._open(path)
                for own in file.keys():  # noqa: SIM118  no mapping
                    name = f"{prefix}{own}"
                    self._files[name] = path, own
                    self.shapes[name] = torch.Size(file.get_slice(own).get_shape())

    def __getitem__(self, name: str) -> Tensor:
        path, own = self._files[name]
        return self._open(path).get_tensor(own)

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)

    @torch.no_grad()
    def read_into(
        self, transformer: nn.Module, device: torch.device | None = None
    ) -> None:
        """Give a transformer its weights, in its data type, of a DTensor this rank's
        part. Adapters stay as they are. Each rank reads by itself.

        Args:
            device: of weights that have no memory yet; None leaves them where they are.

        ValueError, OSError: a file is damaged or gone.
        """
        # A second and more of imports, which reading a configuration need not pay.
        from torch.distributed.tensor import DTensor
        from torch.distributed.tensor._utils import (
            compute_local_shape_and_global_offset,
        )

        self._opened = {}
        mapped = 0
        for qualified, parameter in transformer.named_parameters():
            if ".lora_" in qualified:
                continue
            # peft's wrapper puts a layer's own weights one level deeper.
            name = qualified.replace(".base_layer", "")
            path, own = self._files[name]
            part = self._open(path).get_slice(own)
            if isinstance(parameter, DTensor):
                target = parameter.to_local()
                shape, start = compute_local_shape_and_global_offset(
                    parameter.shape, parameter.device_mesh, parameter.placements
                )
                # Only the slice that is asked for is read from the file.
                part = part[
                    tuple(
                        slice(first, first + size)
                        for first, size in zip(start, shape, strict=True)
                    )
                ]
            else:
                allocate([parameter], device or parameter.device)
                target = parameter
                part = part[:]
            target.copy_(part)
            mapped += part.nbytes
            if mapped > _MAPPED_BYTES:
                self._opened = {}
                mapped = 0
        self._opened = {}

    def _open(self, path: Path) -> Any:
        if path not in self._opened:
            self._opened[path] = open_weights(path)
        return self._opened[path]


def open_transformer(
    kind: Any, folder: Path, dtype: torch.dtype, *, buffers: Sequence[str] = ()
) -> tuple[Any, StoredWeights]:
    """The transformer of a folder in diffusers' layout, without memory, in evaluation
    mode, and its weights.

    Args:
        kind: diffusers' class. Weights that it keeps in float32 are.
        buffers: submodules whose buffers are computed when they are built, and are not
            in the files.

    ValueError: they do not fit each other, or a file is damaged.
    """
    config = kind.load_config(folder, local_files_only=True)
    with torch.device("meta"):
        transformer = kind.from_config(config)
    if buffers:
        # Of one block: on the meta device its buffers would have no values.
        small = kind.from_config({**config, "num_layers": 1})
        for name in buffers:
            setattr(transformer, name, getattr(small, name))
    weights = StoredWeights(folder)
    described = {name: value.shape for name, value in transformer.state_dict().items()}
    check_fit(folder, **misfits(described, weights.shapes))
    without_memory(transformer, dtype, kind._keep_in_fp32_modules or ())
    return transformer.eval(), weights


def without_memory(
    transformer: nn.Module, dtype: torch.dtype, in_float32: Collection[str] = ()
) -> None:
    """Move a transformer from the meta device to the CPU, where the elements of each
    weight are all the same zero.

    Unlike on the meta device, adapters that are added get values.

    Args:
        in_float32: parts of the names of weights that stay float32.
    """
    for prefix, module in transformer.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            kept = in_parts(f"{prefix}.{name}", in_float32)
            zero = torch.zeros((), dtype=torch.float32 if kept else dtype)
            # Strides of 0: the shape of the weight, and the memory of one number.
            setattr(module, name, nn.Parameter(zero.expand(parameter.shape)))


def allocate(parameters: Iterable[nn.Parameter], device: torch.device) -> None:
    """Give parameters without memory (`without_memory`) some, not yet written to, on a
    device.
    """
    from torch.distributed.tensor import DTensor

    for parameter in parameters:
        if (
            not isinstance(parameter, DTensor)
            and parameter.untyped_storage().nbytes() < parameter.nbytes
        ):
            parameter.data = torch.empty(
                parameter.shape, dtype=parameter.dtype, device=device
            )
