"""Packaging of SAGE-Fast: every dependency is named here; constraints.txt has the
releases that tests run with.
"""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).resolve().parent
VERSION = re.search(
    r'^__version__ = "([^"]+)"',
    (ROOT / "sage_fast/__init__.py").read_text("utf-8"),
    re.M,
)
README = ROOT / "README.md"

# Import packages whose folder is not named after them, as {package: folder}.
PACKAGE_DIR: dict[str, str] = {
    "sage_kernels": "kernels/sage_kernels",
    "sage_kernels.ops": "kernels/sage_kernels/ops",
    "sage_kernels.reference": "kernels/sage_kernels/reference",
    # Presets and prompts, no code; in the repository `sage_fast/config/load.py`
    # finds them where they are.
    "sage_fast.configs": "configs",
}

INSTALL_REQUIRES = [
    # From the lowest release that the tests have passed on: `make test-lowest` installs
    # these, beside the torch of constraints.txt, which names the releases that all
    # tests run with.
    "torch>=2.11,<2.16",
    # Torch's CUDA wheels pin their own Triton; the CPU wheels bring none, and the
    # interpreter tests need it.
    'triton>=3.6; platform_system == "Linux"',
    # Before 0.38 decoding takes other memory than is planned. Parameter names are our
    # checkpoint format, so the cap is the newest minor release that the parity tests
    # have run with.
    "diffusers>=0.38,<0.43",
    # 5.0 to 5.2 lack the word embeddings of Wan's text encoder as it is published.
    "transformers>=5.3,<6",
    # Cleans the prompts of Wan: diffusers leaves that out where it is missing.
    "ftfy>=6.1.1",
    # LoRA. It requires accelerate itself, so accelerate is not listed.
    "peft>=0.18",
    "safetensors>=0.8",
    # Weights from the hub and the card of an export; comparing releases of DeepSpeed.
    "huggingface_hub>=1.3",
    "packaging>=23",
    # Types and ranges of the configuration, and the docstring below each field for
    # --keys.
    "pydantic>=2.10,<3",
    # YAML 1.2: yes, on and 1:30 are words, and 1e-5 is a number.
    "ruamel.yaml>=0.19.1",
    "numpy>=1.26",
    # Student's t of `compare` and `evaluate`.
    "scipy>=1.11.1",
    "tqdm>=4.66",
    # Pages, contact sheets, reward curves, mp4 files and event files of a run.
    "jinja2>=3.1",
    "pillow>=10.4",
    "matplotlib>=3.8",
    # 17 converts colours on several threads by default, and is the first that can be
    # limited to one.
    "av>=17",
    "tensorboard>=2.16",
    # Driver, clocks and power for `doctor` and the benchmarks; pure Python, silent
    # where there is no GPU.
    "nvidia-ml-py>=12.535.77",
]

EXTRAS_REQUIRE = {
    # Optional attention backends; torch's own is the default. flash-attn compiles
    # against the installed torch: install the project first, then `pip install
    # --no-build-isolation -e ".[gpu]"`.
    "gpu": ["flash-attn>=2.7", "xformers>=0.0.33"],
    "deepspeed": ["deepspeed>=0.19.8,<0.20"],
    # The reward `ocr`: rapidocr's wheel holds the weights of PP-OCRv6 since 3.10. It
    # brings OpenCV, 280 MB in all.
    "ocr": ["rapidocr>=3.10,<4", "onnxruntime>=1.20"],
    # Words, files and presets completed by the shell; `sage-fast --help` ends with how.
    "completion": ["argcomplete>=3.5"],
    # metrics.jsonl and TensorBoard need nothing extra; Weights & Biases only where
    # `logging.report_to` has it.
    "logging": ["wandb>=0.19"],
    # Prompts by `data.prompts: hf:NAME`.
    "datasets": ["datasets>=3"],
    # The documentation as a site (`make docs`). MkDocs 2 has another configuration.
    "docs": [
        "mkdocs>=1.6,<2",
        "mkdocs-material>=9.6,<10",
        "mkdocstrings[python]>=0.29,<2",
    ],
    "dev": [
        "pytest>=8.2",
        "pytest-benchmark>=5.1",
        "pytest-timeout>=2.3.1",
        "pytest-xdist>=3.6.1",
        # The tests compare DeepSpeed's engine with torch's; its wheel is built in
        # seconds, without operators.
        "deepspeed>=0.19.8,<0.20",
        # They read drawn text, whose reader brings its weights.
        "rapidocr>=3.10,<4",
        "onnxruntime>=1.20",
        "ruff>=0.12",
        "mypy>=1.16",
        "PyYAML>=6.0",
        "types-PyYAML",
        "types-tqdm",
    ],
}

if VERSION is None:
    raise RuntimeError(
        'sage_fast/__init__.py holds no line of the form __version__ = "x.y.z"'
    )

setup(
    name="sage-fast",
    version=VERSION.group(1),
    description=(
        "Fast GRPO post-training of HunyuanVideo-1.5 and Wan 2.1 (SAGE-GRPO, DanceGRPO, "
        "FlowGRPO, CPS, DiffusionNFT, AWM)"
    ),
    long_description=README.read_text("utf-8") if README.exists() else "",
    long_description_content_type="text/markdown",
    author="The SAGE-Fast authors",
    project_urls={"Paper": "https://arxiv.org/abs/2603.21872"},
    license="Apache-2.0",
    license_files=["LICENSE", "NOTICE"],
    python_requires=">=3.11",
    packages=find_packages(include=["sage_fast", "sage_fast.*"]) + list(PACKAGE_DIR),
    package_dir=PACKAGE_DIR,
    package_data={
        "sage_fast": [
            "py.typed",
            "config/*.yaml",
            "models/toy/assets/*",
            "models/toy/assets/words/*",
            "tools/*.md",
            "rewards/videoalign.txt",
            "run/templates/*",
        ],
        "sage_fast.configs": ["*.yaml", "*/*"],
        "sage_kernels": ["py.typed"],
    },
    install_requires=INSTALL_REQUIRES,
    extras_require=EXTRAS_REQUIRE,
    entry_points={"console_scripts": ["sage-fast = sage_fast.commands.cli:main"]},
    classifiers=[
        "Operating System :: POSIX",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
