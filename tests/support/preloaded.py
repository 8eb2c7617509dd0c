"""Imported once by each process that ranks are forked from (`ranks.ranks`), with the packages named in ``PRELOADED``.

Otherwise every rank of every test imports Megatron and loads the compiled planner again, which is most of a small
test's time. The planner is compiled here when it must be, before any rank waits for another one. That process knows no
path of pytest's, so the module is ``tests.support.preloaded`` to it, and finds its neighbours itself.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import sys
from pathlib import Path

import pytest  # noqa: F401

# What trainings and checkpoints import when they need it; some versions of Megatron lack some of it.
LATE = (
    "megatron.core.dist_checkpointing.strategies.fully_parallel",
    "megatron.core.models.common.model_chunk_schedule_plan",
    "megatron.core.models.mimo.optimizer",
)
SUPPORT = Path(__file__).resolve().parent
ROOT = SUPPORT.parents[1]
sys.path[:0] = map(str, [ROOT, SUPPORT, *SUPPORT.glob("*/"), ROOT / "examples", ROOT / "bench"])

# in an environment without them, ranks say what they miss
with contextlib.suppress(ImportError, FileNotFoundError):
    if (packages := os.environ["PRELOADED"]) != "megatron":
        import te_on_cpu

        te_on_cpu.install(packages=packages)
    import tiny_gpt  # noqa: F401

    import megatron_hecate.switch_on.convert  # noqa: F401
    from megatron_hecate.homes.planner import compile_home_planner
    from megatron_hecate.plan import compile_planner

    compile_planner()
    compile_home_planner()
    for name in LATE:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)

# Ranks never free what they are forked with: their garbage collections need not look at it.
gc.collect()
gc.freeze()
