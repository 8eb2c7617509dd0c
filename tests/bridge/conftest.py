"""These tests need Megatron-Bridge: ``make test-bridge``. Elsewhere they are not collected."""

from __future__ import annotations

import importlib.util
import sys

import rank_modules
import ranks

# Ranks import Bridge, not the process of pytest.
sys.modules.setdefault("bridge_on_cpu", rank_modules.LazyModule("bridge_on_cpu"))
if importlib.util.find_spec("megatron.bridge") is None:
    collect_ignore_glob = ["test_*.py"]
else:  # forked with Bridge imported, ranks start at once
    ranks.preloaded = "tests.bridge.bridge_on_cpu"
