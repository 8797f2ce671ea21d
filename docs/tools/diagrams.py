"""Draws the diagrams of the documentation: `python -m docs.tools.diagrams` writes docs/images/*.svg.

An SVG file carries its own colours for light and dark pages, so a page includes it as it includes any picture. What a
diagram says of the code comes from the code where it can: the house is the list in CONTRIBUTING.md, the ranks are those
of a preset.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from xml.sax.saxutils import escape

from sage_fast.config.load import read_config_file

ROOT = Path(__file__).resolve().parents[2]
IMAGES = ROOT / "docs/images"
RANKS_OF = "configs/hv15_480p_full_64gpu.yaml"

STYLE = """
text { font: 13px system-ui, "Segoe UI", Helvetica, Arial, sans-serif; fill: #1f2933; }
.title { font-weight: 600; }
.small { font-size: 11.5px; fill: #52606d; }
.box { stroke: #52606d; stroke-width: 1.2; fill: #52606d; fill-opacity: 0.07; }
.blue { stroke: #2563ab; fill: #3b82c4; fill-opacity: 0.16; }
.orange { stroke: #b45f06; fill: #e08a2c; fill-opacity: 0.18; }
.green { stroke: #2f7d4f; fill: #3da268; fill-opacity: 0.16; }
.dashed { stroke-dasharray: 5 4; }
.frame { stroke: #7b8794; fill: none; stroke-dasharray: 3 3; }
.arrow { stroke: #52606d; stroke-width: 1.5; fill: none; }
.head { fill: #52606d; }
@media (prefers-color-scheme: dark) {
  text { fill: #e4e7eb; }
  .small { fill: #b8c2cc; }
  .box { stroke: #9aa5b1; fill: #9aa5b1; }
  .blue { stroke: #6cb0ee; fill: #3b82c4; fill-opacity: 0.3; }
  .orange { stroke: #f0a955; fill: #e08a2c; fill-opacity: 0.28; }
  .green { stroke: #6fce97; fill: #3da268; fill-opacity: 0.26; }
  .frame { stroke: #9aa5b1; }
  .arrow { stroke: #b8c2cc; }
  .head { fill: #b8c2cc; }
}
"""


class Drawing:
    """Shapes on a canvas, in pixels from the upper left corner."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self.size, self.title = (width, height), title
        self.parts: list[str] = []

    def text(self, x: float, y: float, text: str, style: str = "", anchor: str = "start") -> None:
        """One line whose base line is at y."""
        self.parts.append(f'<text x="{x:g}" y="{y:g}" class="{style}" text-anchor="{anchor}">{escape(text)}</text>')

    def box(self, x: float, y: float, width: float, height: float, lines: Sequence[str] = (), style: str = "") -> None:
        """A box with a title and smaller lines below it."""
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="6" class="box {style}"/>'
        )
        top = y + (height - 17 * len(lines)) / 2 + 13
        for number, line in enumerate(lines):
            self.text(x + width / 2, top + 17 * number, line, "small" if number else "title", "middle")

    def arrow(self, *points: tuple[float, float], style: str = "") -> None:
        """A line through points with a head at the last."""
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        self.parts.append(f'<polyline points="{path}" class="arrow {style}" marker-end="url(#head)"/>')

    def svg(self) -> str:
        """The file."""
        width, height = self.size
        head = (
            '<defs><marker id="head" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" '
            'orient="auto-start-reverse"><path class="head" d="M0,0 L10,5 L0,10 z"/></marker></defs>'
        )
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
            f'height="{height}" role="img" aria-label="{escape(self.title)}">\n<title>{escape(self.title)}</title>\n'
            f"<style>{STYLE}</style>\n{head}\n" + "\n".join(self.parts) + "\n</svg>\n"
        )


def iteration() -> Drawing:
    """One iteration: from prompts to an optimizer step."""
    d = Drawing(1000, 470, "One iteration: prompts, rollout, decoding, reward, advantages, anchor, update, optimizer")
    top, height = 30, 112
    d.box(20, top, 130, height, ["prompts", "the next P prompts,", "G videos of each:", "P groups"])
    d.box(
        190,
        top,
        220,
        height,
        [
            "rollout",
            "T steps x' = a x + b v + std ε",
            "keeps every latent and velocity;",
            "the noise ε is a function of",
            "(seed, update, prompt, video)",
        ],
        "green",
    )
    d.box(450, top, 130, height, ["decode", "latents to frames", "by the VAE"])
    d.box(620, top, 150, height, ["reward", "frozen; scores such", "as VQ, MQ, TA per", "video"])
    d.box(810, top, 170, height, ["advantages", "reward minus the", "mean of its group,", "over its deviation"])
    for left, right in ((150, 190), (410, 450), (580, 620), (770, 810)):
        d.arrow((left, top + height / 2), (right, top + height / 2))
    d.box(190, 195, 220, 62, ["policy", "the transformer with its", "trained weights"], "blue")
    d.arrow((300, 195), (300, 142))
    d.text(308, 176, "velocity v", "small")
    low = 320
    d.box(190, low, 220, height, ["optimizer", "clip the gradient norm,", "one step of Muon or AdamW"])
    d.box(
        450,
        low,
        290,
        height,
        [
            "update",
            "velocity again, with a gradient, at every",
            "kept latent; ε drawn again from its key;",
            "ratio, clipping, KL terms; gradients summed",
            "over all videos and steps",
        ],
        "green",
    )
    d.box(
        780,
        low,
        200,
        height,
        [
            "anchor",
            "velocities of older weights",
            "at the same latents,",
            "for the KL term;",
            "skipped right after a refresh",
        ],
        "orange",
    )
    d.arrow((895, 142), (895, low))
    d.arrow((780, low + 56), (740, low + 56))
    d.arrow((450, low + 56), (410, low + 56))
    d.arrow((300, low), (300, 257))
    d.text(308, 295, "new weights", "small")
    d.arrow((410, 226), (595, 226), (595, low))
    d.text(425, 219, "velocity v", "small")
    d.arrow((385, 142), (385, 168), (680, 168), (680, low), style="dashed")
    d.text(690, 219, "latents, velocities, noise keys", "small")
    d.text(
        20,
        458,
        "With training.update: single_pass the rollout takes the gradients itself; the advantages then weigh them.",
        "small",
    )
    return d


STAGES = (
    ("y = LayerNorm(x) (1 + scale) + shift", "adaln", "x", "1 S", "none selective full", "adaln_backward: dx", ""),
    (
        "q, k, v = y W_qkv",
        "one product",
        "q k v, as projected",
        "3 S",
        "none",
        "dy = dq W_q + dk W_k + dv W_v",
        "product",
    ),
    ("RMSNorm and rotation of q, k", "qk_norm_rope", "", "", "", "qk_norm_rope_backward", "always"),
    (
        "o = attention(q, k, v)",
        "video and text together",
        "o, log-sum-exp",
        "1 S",
        "none selective",
        "attention's own backward: dq, dk, dv",
        "full",
    ),
    ("o W_o", "product", "o W_o", "1 S", "none", "product with W_oᵀ", "product"),
    (
        "x1 = x + gate (o W_o); LayerNorm",
        "gated_residual_adaln",
        "",
        "",
        "",
        "gated_residual_adaln_backward",
        "always",
    ),
    ("y2 W_1", "product", "y2 W_1", "4 S", "none", "product with W_1ᵀ", "product"),
    ("h = GELU(y2 W_1)", "linear_gelu_tanh, gelu_tanh", "", "", "", "gelu_tanh_backward; gives h as well", "always"),
    ("h W_2", "product", "", "", "", "product with W_2ᵀ", "never"),
    ("x2 = x1 + gate (h W_2)", "gated_residual", "", "", "", "gated_residual_backward", ""),
)
"""Of a block: formula, operator, what may be kept, its size, the modes that keep it, backward, what runs again."""

AGAIN = {
    "product": "forward product again, unless kept",
    "full": "forward again in mode full alone",
    "always": "forward again: it is elementwise",
    "never": "no forward again, if modulation is frozen",
}


def block() -> Drawing:
    """A block of the transformer: forward, what is kept, and the hand-written backward."""
    row, first = 62, 62
    d = Drawing(
        1000, first + row * len(STAGES) + 72, "A transformer block: forward, what is kept, hand-written backward"
    )
    for x, heading in ((160, "forward"), (490, "kept for the backward"), (810, "backward")):
        d.text(x, 24, heading, "title", "middle")
    d.text(490, 43, "S = one tensor of all tokens", "small", "middle")
    for number, (formula, operator, kept, size, modes, backward, again) in enumerate(STAGES):
        y = first + row * number
        is_product = "product" in operator or operator.startswith("video")
        d.box(20, y, 280, 46, [formula, operator], "blue" if is_product else "")
        if kept:
            d.box(
                370,
                y,
                240,
                46,
                [f"{kept}: {size}", f"mode{'s' * (' ' in modes)} " + ", ".join(modes.split())],
                "orange",
            )
            d.arrow((300, y + 23), (370, y + 23))
            d.arrow((610, y + 23), (670, y + 23))
        d.box(670, y, 300, 46, [backward, *([AGAIN[again]] if again else [])], "blue" if is_product else "")
        if number:
            d.arrow((160, y - 16), (160, y))
            d.arrow((820, y), (820, y - 16))
    bottom = first + row * len(STAGES)
    d.text(
        490,
        bottom + 12,
        "Modes are those of model.checkpointing: per block none keeps 10 S, selective 2 S, full 1 S",
        "title",
        "middle",
    )
    d.text(
        490,
        bottom + 34,
        "Blue: matrix products and attention. The others are elementwise kernels, each with a plain PyTorch twin.",
        "small",
        "middle",
    )
    d.text(
        490,
        bottom + 54,
        "Both streams, video and text, go through all of it. In the last block the text has keys and values only.",
        "small",
        "middle",
    )
    return d


def ranks() -> Drawing:
    """The ranks of the preset for 64 GPUs."""
    config = read_config_file(ROOT / RANKS_OF)
    degrees, rollout = config["distributed"], config["rollout"]
    replicas, shards, sp = (degrees[name] for name in ("dp_replicate", "dp_shard", "sp"))
    own, group = rollout["batch_size"], rollout["num_generations"]
    videos = replicas * shards * own
    d = Drawing(1000, 560, f"The ranks of {RANKS_OF}")
    left, top, cell, row = 92, 66, 48, 50
    gap = 22
    for shard in range(shards):
        x = left + shard * (sp * cell + gap)
        d.text(x + sp * cell / 2, top - 14, f"dp_shard {shard}", "small", "middle")
    for replica in range(replicas):
        y = top + replica * row
        d.text(left - 16, y + 23, f"node {replica}", "", "end")
        d.box(left - 8, y - 2, shards * (sp * cell + gap) - gap + 16, 42, style="frame")
        for shard in range(shards):
            x = left + shard * (sp * cell + gap)
            d.box(x, y + 3, sp * cell, 32, style="green")
            for part in range(sp):
                d.text(x + (part + 0.5) * cell, y + 24, str((replica * shards + shard) * sp + part), "", "middle")
    right = left + shards * (sp * cell + gap) + 16
    notes = (
        (
            "green",
            "A pair shares a video (sp)",
            (f"each rank holds 1/{sp} of its tokens", "all-to-all in every layer, over NVLink"),
        ),
        (
            "frame",
            "A node shares the weights (dp_shard x sp)",
            (
                f"one replica in {shards * sp} parts",
                "gathered once per rollout, block by block",
                "in the update; gradients summed into parts",
            ),
        ),
        (
            "",
            "Nodes are replicas (dp_replicate)",
            ("they meet once per update: each part of the", "gradient is summed over the nodes, over the", "network"),
        ),
        (
            "",
            "What a rank samples",
            (
                f"{own} videos per pair, {videos} per update, of {videos // group} prompts",
                f"a group of {group} videos spans {group // own} pairs",
            ),
        ),
    )
    y = top
    for style, title, lines in notes:
        if style:
            d.box(right, y, 22, 18, style=style)
        d.text(right + 32, y + 14, title, "title")
        for number, line in enumerate(lines):
            d.text(right + 32, y + 33 + 17 * number, line, "small")
        y += 54 + 17 * len(lines)
    bottom = top + replicas * row
    d.arrow((left + 60, bottom + 4), (left + 60, bottom + 34))
    d.arrow((left + 60, bottom + 34), (left + 60, bottom + 4))
    d.text(left + 76, bottom + 25, "the same column of all nodes sums its part of the gradient", "small")
    d.text(
        left,
        bottom + 62,
        f"{RANKS_OF}: dp_replicate {replicas} x dp_shard {shards} x sp {sp} = {replicas * shards * sp} ranks",
        "small",
    )
    return d


def house() -> Drawing:
    """The packages, in the order in which they may import each other: the list in CONTRIBUTING.md."""
    text = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    found = re.search(r"reads this list\.\n\n((?:    .*\n)+)", text)
    if found is None:
        raise ValueError("CONTRIBUTING.md has no list of modules after the line that ends with 'reads this list.'")
    layers = [line.split() for line in found[1].splitlines()]
    purposes = dict(re.findall(r"^\| `sage_fast/(\w+)/` \| (.*?) \|$", text, re.M))
    row, left, top, whole = 44, 60, 40, 880
    d = Drawing(1000, top + row * (len(layers) + 1) + 56, "The house: packages in the order of their imports")
    d.text(left, 22, "sage_fast: a module imports from its own line and from the lines below", "title")
    for number, names in enumerate(layers):
        x, y = float(left), top + number * row
        folder = names[0].partition(".")[0]
        labels = [name.removeprefix(f"{folder}.") if number else name for number, name in enumerate(names)]
        for name, label in zip(names, labels, strict=True):
            width = whole * (len(label) + 6) / sum(len(other) + 6 for other in labels)
            is_algorithm = (ROOT / f"sage_fast/{name}.py").exists()  # at the top level of the package
            purpose = purposes.get(name, "").partition(";")[0] if len(names) == 1 else ""
            d.box(x, y, width - 8, 34, [] if purpose else [label], "green" if is_algorithm else "")
            if purpose:
                d.text(x + 14, y + 22, name, "title")
                d.text(x + 110, y + 22, purpose.replace("`", ""), "small")
            x += width
    y = top + len(layers) * row
    d.box(left, y, whole - 8, 34, ["sage_kernels: Triton kernels, each with its plain PyTorch twin"], "blue")
    d.arrow((32, top), (32, y + 34))
    legend = "Green: the algorithm. It names no model and no reward; config.registry does."
    d.text(left, y + 62, legend, "small")
    return d


DIAGRAMS = {"iteration": iteration, "block": block, "ranks": ranks, "house": house}


def main() -> None:
    """Write every diagram."""
    for name, draw in DIAGRAMS.items():
        (IMAGES / f"{name}.svg").write_text(draw().svg(), "utf-8")


if __name__ == "__main__":
    main()
