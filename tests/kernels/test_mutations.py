"""Deliberate mistakes in the kernels, each of which the tests of its op must notice.

A run takes the mistakes of one op, another one every day, because the interpreter is slow; SAGE_MUTATED_OP names it
instead. Where kernels are compiled, so are the mistakes.
"""

import datetime
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from sage_kernels.registry import OPS

ROOT = Path(__file__).resolve().parents[2]


class Mutation(NamedTuple):
    """Everywhere in the op's file, `old` becomes `new`; the op's tests that `killer` selects (as `-k`) must fail."""

    old: str
    new: str
    killer: str


FAR = "two_to_the_31"
PARITY = "as_close_to_float64 and odd and float32"
SAMPLES_IN_32_BITS = Mutation("tl.program_id(1).to(tl.int64)", "tl.program_id(1)", FAR)
TOKENS_IN_32_BITS = Mutation("tl.program_id(0).to(tl.int64)", "tl.program_id(0)", FAR)
MUTATIONS = {
    "adaln": [
        SAMPLES_IN_32_BITS,
        TOKENS_IN_32_BITS,
        Mutation("/ WIDTH + eps)", "/ WIDTH + 1e-6)", "eps_is_the_one_given"),
        Mutation("tl.where(m_d, x - mean, 0.0)", "x - mean", PARITY),
        Mutation("dscale += grad * normed", "dscale = grad * normed", PARITY),
        Mutation("sums_ptr is not None", "sums_ptr is None", PARITY),
    ],
    "gated_residual": [
        SAMPLES_IN_32_BITS,
        TOKENS_IN_32_BITS,
        Mutation("dgate += grad * y", "dgate = grad * y", PARITY),
        Mutation("x + gate * y", "gate + x * y", PARITY),
    ],
    "gated_residual_adaln": [
        SAMPLES_IN_32_BITS,
        TOKENS_IN_32_BITS,
        Mutation("dgate += dx * y", "dgate += grad * y", PARITY),
        Mutation("normed * scale + shift", "normed * scale - shift", PARITY),
    ],
    "qk_norm_rope": [
        Mutation("tl.join(-odd, even)", "tl.join(odd, even)", PARITY),
        Mutation("/ HEAD_DIM + eps)", "/ HEAD_DIM + 1e-6)", "eps_is_the_one_given"),
        Mutation("o_out = (o_sample + num_video + i_l)", "o_out = (o_sample + i_l)", PARITY),
        Mutation("o_grad_k = (num_video + i_l)", "o_grad_k = i_l", PARITY),
    ],
    "gelu_tanh": [
        TOKENS_IN_32_BITS,
        Mutation("* 0.044715)", "* 0.0447)", PARITY),
        Mutation("m_e = o_e < size", "m_e = o_e < size - 1", PARITY),
    ],
    "sde_step": [
        Mutation("b_next += std * b_noise", "b_next += b_noise", PARITY),
        Mutation("tl.where(m, b_noise * b_noise, 0.0)", "b_noise * b_noise", PARITY),
        Mutation("- log_normalizer", "+ log_normalizer", PARITY),
    ],
    "policy_loss": [
        Mutation("b_noise - 0.5 * b_shift", "b_noise - b_shift", PARITY),
        Mutation("(advantage < 0) & (ratio < clip_low)", "(advantage > 0) & (ratio < clip_low)", "policy_loss"),
        Mutation("of_old = -slope", "of_old = slope", PARITY),
        Mutation("of_anchor += position_weight", "of_anchor -= position_weight", PARITY),
    ],
}
MUTATED = os.environ.get("SAGE_MUTATED_OP") or OPS[datetime.datetime.now(datetime.UTC).toordinal() % len(OPS)]


def test_every_op_has_mutations_that_apply() -> None:
    assert MUTATIONS.keys() == set(OPS)
    for op, mutations in MUTATIONS.items():
        code = (ROOT / f"kernels/sage_kernels/ops/{op}.py").read_text("utf-8")
        assert [mutation.old for mutation in mutations if mutation.old not in code] == []


@pytest.mark.slow
@pytest.mark.parametrize("mutation", MUTATIONS[MUTATED], ids=lambda mutation: f"{MUTATED}: {mutation.new}")
def test_a_mistake_in_a_kernel_is_noticed(mutation: Mutation, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "kernels", tmp_path / "kernels", ignore=shutil.ignore_patterns("__pycache__"))
    file = tmp_path / f"kernels/sage_kernels/ops/{MUTATED}.py"
    file.write_text(file.read_text("utf-8").replace(mutation.old, mutation.new))
    path = os.pathsep.join([str(tmp_path / "kernels"), str(ROOT)])
    selected = f"({mutation.killer}) and (test_{MUTATED} or ops) and ({MUTATED}- or {MUTATED}] or test_{MUTATED})"
    files = [f"tests/kernels/test_{name}.py" for name in (MUTATED, "ops")]
    files = [file for file in files if (ROOT / file).exists()]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *files, "-x", "-q", "-k", selected, "-p", "no:cacheprovider"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    # 1: a test failed. 5 would be: no test was selected.
    assert done.returncode == 1, done.stdout[-3000:] + done.stderr[-3000:]
