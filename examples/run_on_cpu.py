"""Run a Megatron script on a CPU that knows nothing of it.

torchrun ... run_on_cpu.py pretrain_gpt.py ...                      stock Megatron
torchrun ... run_on_cpu.py -m megatron_hecate pretrain_gpt.py ...   with our launcher
"""

from __future__ import annotations

import megatron_on_cpu
from run_script import run_script


def main() -> None:
    """Put the CPU behind ``torch.cuda``, then run the script or ``-m module`` on the command line as ``__main__``."""
    megatron_on_cpu.install()
    import megatron.training.training  # noqa: F401
    import torch

    torch.set_num_threads(1)
    megatron_on_cpu.for_training()
    run_script()


if __name__ == "__main__":
    main()
