"""Where numba keeps the compiled planner while tests run."""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path

# Numba looks at a function's own file only to see whether what it cached is stale, but compiled functions contain those
# that they call. So every state of the planner has a cache of its own, which ranks of tests inherit.
_SOURCES = sorted((Path(__file__).resolve().parent.parent / "megatron_hecate" / "plan").glob("*.py"))
_STATE = hashlib.blake2b(b"".join(path.read_bytes() for path in _SOURCES), digest_size=8).hexdigest()
os.environ["NUMBA_CACHE_DIR"] = str(Path(tempfile.gettempdir()) / f"hecate-numba-{os.getuid()}" / _STATE)
