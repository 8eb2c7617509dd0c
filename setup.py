"""Packaging. Nothing is compiled; Megatron-Core is an extra, because users run their own checkout."""

from pathlib import Path

from setuptools import find_packages, setup

MEGATRON = "megatron-core>=0.16.1,<0.21"
PINNED = ["megatron-core==0.19.2; python_version>='3.12'", "megatron-core==0.16.1; python_version<'3.12'"]
TRAINING = [
    "einops",
    "omegaconf",
    "psutil",
    "pybind11",
    "pydantic",
    "pyyaml",
    "regex",
    "sentencepiece",
    "six",
    "tiktoken",
]

setup(
    name="megatron-hecate",
    version="0.1.0",
    description="Fully sharded sparse data parallelism (FSSDP) for Megatron-LM's mixture-of-experts models",
    long_description=Path("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    packages=[*find_packages(include=["megatron_hecate", "megatron_hecate.*"]), "megatron_hecate.kernels"],
    package_dir={"megatron_hecate.kernels": "kernels"},  # sources, compiled at first use
    package_data={"megatron_hecate.kernels": ["*.cuh", "*.cu", "*.cpp"]},
    python_requires=">=3.11",
    install_requires=["torch>=2.11", "numba", "numpy", "packaging"],
    extras_require={
        "megatron": [MEGATRON],
        "demo": [*PINNED, *TRAINING, "matplotlib", "tqdm", "transformers"],
        "dev": [*PINNED, *TRAINING, "hypothesis", "pytest", "ruff==0.17.5", "scipy", "tqdm", "transformers"],
    },
)
