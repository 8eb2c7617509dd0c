"""Run an unmodified Megatron script on a CPU.

torchrun ... run_on_cpu.py pretrain_gpt.py ...                      stock Megatron
torchrun ... run_on_cpu.py -m megatron_hecate run -- pretrain_gpt.py ...   with our launcher
"""

from __future__ import annotations

import megatron_on_cpu
from run_script import run_script


def main() -> None:
    """Put the CPU behind ``torch.cuda`` and run the script of the command line."""
    megatron_on_cpu.install()
    # Imported before `for_training`: on import, Megatron probes for a real GPU.
    import megatron.training.training  # noqa: F401
    import torch

    # Ranks share the cores.
    torch.set_num_threads(1)
    megatron_on_cpu.for_training()
    run_script()


if __name__ == "__main__":
    main()
