"""What numba keeps compiled is never that of other sources. Oracle: the edited source itself.

Numba looks at a function's own file only. Were the others forgotten, ranks with other caches would plan differently.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import megatron_hecate

PLAN = """
import numpy as np
from megatron_hecate.plan import CopyCost, Placement, World, add_late_replicas
homes = Placement.initial(4, 2, num_slots=1)
late = add_late_replicas(np.array([90, 10, 5, 5]), homes, World((0, 0)), cost=CopyCost(), most=1, across_nodes=False)
print(late.num_replicas)
"""


@pytest.mark.slow
def test_a_change_in_a_file_that_is_called_is_seen(tmp_path: Path) -> None:
    shutil.copytree(Path(megatron_hecate.__file__).parent, tmp_path / "megatron_hecate")
    settings = os.environ | {"PYTHONPATH": str(tmp_path), "NUMBA_CACHE_DIR": str(tmp_path / "cache")}

    def plan() -> str:
        command = [sys.executable, "-c", PLAN]
        return subprocess.run(command, env=settings, cwd=tmp_path, check=True, capture_output=True, text=True).stdout

    assert plan() == "1\n"
    called = tmp_path / "megatron_hecate" / "plan" / "maxflow.py"
    line = "    blocked = _augment(begin, rank, share, load, mean + slack, True)\n"
    assert called.read_text().count(line) == 1
    called.write_text(called.read_text().replace(line, f"{line}    load -= load\n"))
    assert plan() == "0\n", "the old code ran"
