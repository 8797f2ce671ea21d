"""Operators that are known give what they give when they run, and count the same."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from sage_fast.models.counting import CountingMode
from sage_kernels.tracer import count


class Recorded(CountingMode):
    moved = 0

    def count(self, name: str, args: Any, result: Any, moved: int) -> None:
        self.moved += moved


def operators(device: str) -> list[Any]:
    """Results of operators of every kind, some in two forms that are alike."""
    x = torch.zeros(4, 6, device=device)
    y = torch.zeros(4, 6, device=device, dtype=torch.bfloat16)
    grown = torch.zeros(2, device=device)
    return [
        x @ x.t(), x.t() @ x, x + x, x + torch.zeros_like(x), x + y, x * 2, x.t().contiguous().t() * 2, x[1:] + x[:-1],
        torch.arange(3, device=device) + 1, torch.arange(3, device=device) + 1.0, x.add_(1), x.unfold(1, 3, 1),
        x[:, 2], y.view(torch.int16), torch.var_mean(x, dim=1), x.split(2), grown.resize_(8), grown + 1, x.sum(),
        x.expand(2, 4, 6),
    ]  # fmt: skip


def described(results: list[Any]) -> list[Any]:
    parts = [
        part
        for result in results
        for part in (result if isinstance(result, tuple | list) else [result])
    ]
    storages: dict[int, int] = {}
    found = []
    for t in parts:
        memory = t.untyped_storage()
        shared = storages.setdefault(memory._cdata, len(storages))
        found.append(
            (t.dtype, t.shape, t.stride(), t.storage_offset(), memory.nbytes(), shared)
        )
    return found


def test_what_is_known_is_what_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CountingMode, "known", {})
    with FlopCounterMode(display=False) as flops:
        expected = described(operators("meta"))
    traffic = count(lambda: operators("meta")).total
    for _ in range(2):
        with Recorded() as counted:
            assert described(operators("meta")) == expected
        assert (counted.flops.total(), counted.moved) == (
            flops.get_total_flops(),
            traffic,
        )


def test_an_operator_runs_once_for_a_form(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CountingMode, "known", {})
    with CountingMode():
        operators("meta")
    known = len(CountingMode.known)
    assert known > 15 and all(isinstance(key, tuple) for key in CountingMode.known)
    with CountingMode():
        operators("meta")
    assert len(CountingMode.known) == known


def test_tensors_with_values_are_computed() -> None:
    x = torch.arange(3.0)
    for _ in range(2):
        with CountingMode():
            y: Tensor = x * 2
        assert y.tolist() == [0, 2, 4]
