"""Name the packages, one of which lies outside of their folder; all else is in pyproject.toml."""

from setuptools import find_packages, setup

setup(
    packages=[
        *find_packages(include=["megatron_hecate", "megatron_hecate.*"]),
        "megatron_hecate.kernels",
    ],
    package_dir={"megatron_hecate.kernels": "kernels"},  # sources, compiled at first use
    # package_data alone decides: MANIFEST.in has more files, for the sdist
    include_package_data=False,
    package_data={
        "megatron_hecate": ["py.typed", "tools/page/*"],
        "megatron_hecate.kernels": ["*.cuh", "*.cu", "*.cpp"],
    },
)
