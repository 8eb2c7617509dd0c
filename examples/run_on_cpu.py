"""Run a Megatron script on a CPU that knows nothing of it.

torchrun ... run_on_cpu.py pretrain_gpt.py ...                      stock Megatron
torchrun ... run_on_cpu.py -m megatron_hecate pretrain_gpt.py ...   with our launcher
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import megatron_on_cpu


def main() -> None:
    """Put the CPU behind ``torch.cuda``, then run the script or ``-m module`` on the command line as ``__main__``."""
    megatron_on_cpu.install()
    import megatron.training.training  # noqa: F401
    import torch

    torch.set_num_threads(1)
    megatron_on_cpu.for_training()
    if sys.argv[1] == "-m":
        sys.argv = sys.argv[2:]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = sys.argv[1:]
        sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
        runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
