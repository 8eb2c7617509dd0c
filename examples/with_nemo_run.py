"""Start an unmodified Megatron script with FSSDP by NeMo-Run.

    pip install nemo-run
    MEGATRON=~/Megatron-LM python examples/with_nemo_run.py <Megatron's arguments>

The one line of FSSDP is `script`: the launcher in front of the script, with NeMo-Run's own
launcher ``torchrun``. Any other executor of NeMo-Run, such as Slurm's, runs the same line. A recipe
of Megatron-Bridge needs no launcher: call `bridge.enable` in it (bridge_recipe.py).
"""

from __future__ import annotations

import os
import sys
from typing import Any


def script(run: Any, megatron: str, arguments: list[str]) -> Any:
    """Return the script to run.

    Args:
        run: the module ``nemo_run``.
        megatron: checkout of Megatron-LM.
        arguments: Megatron's arguments.
    """
    ours = ["run", "--moe-fssdp", "--moe-fssdp-slots", "2", "--", f"{megatron}/pretrain_gpt.py"]
    return run.Script(path="megatron_hecate", m=True, entrypoint="python", args=[*ours, *arguments])


def main() -> None:
    """Run on the GPUs of this machine."""
    import nemo_run

    executor = nemo_run.LocalExecutor(ntasks_per_node=8, launcher="torchrun")
    nemo_run.run(script(nemo_run, os.environ["MEGATRON"], sys.argv[1:]), executor=executor)


if __name__ == "__main__":
    main()
