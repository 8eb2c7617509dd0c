"""Keep one GPU architecture's machine code in a shared library, so that it compresses to a tenth.

    python bench/prune_fatbin.py libtransformer_engine.so 90 pruned.so

The machine code of other architectures, and PTX, is overwritten by zeros; headers and offsets stay, so the driver
finds what it looks for. TransformerEngine 2.20.2 for CUDA 13 has 343 MB; for sm_90 alone `xz` packs it into 25 MB.
The format is not documented by NVIDIA: a library is loaded and used on a GPU before anything is concluded from it.
"""

from __future__ import annotations

import re
import struct
import subprocess
import sys
from collections import Counter
from pathlib import Path

MAGIC = 0xBA55ED50  # of a fat binary: magic, version (2 bytes), bytes of this header (2), bytes of all entries (8)
PTX = 1  # kind of an entry: kind (2 bytes), version (2), bytes of this header (4), bytes of its payload (8)
ARCHITECTURE_AT = 28  # in an entry's header


def section(library: Path) -> tuple[int, int]:
    """Find the fat binaries of ``library``; returns where they begin and end in the file.

    Raises:
        ValueError: when the library has no device code.
    """
    headers = subprocess.run(
        ["readelf", "-SW", library], capture_output=True, text=True, check=True
    )
    found = re.search(r"\.nv_fatbin\s+\S+\s+\S+\s+(\S+)\s+(\S+)", headers.stdout)
    if found is None:
        raise ValueError(f"{library} has no section .nv_fatbin")
    begin = int(found[1], 16)
    return begin, begin + int(found[2], 16)


def prune(data: bytearray, begin: int, end: int, keep: int) -> Counter[int]:
    """Zero the payloads of all architectures but ``keep``, in place; returns bytes by architecture."""
    sizes: Counter[int] = Counter()
    at = begin
    while at < end:
        magic, _, header, size = struct.unpack_from("<IHHQ", data, at)
        if magic != MAGIC:
            at += 8  # padding between fat binaries
            continue
        entry = at + header
        at = entry + size
        while entry < at:
            kind, _, header, size = struct.unpack_from("<HHIQ", data, entry)
            (architecture,) = struct.unpack_from("<I", data, entry + ARCHITECTURE_AT)
            payload = entry + header
            sizes[architecture] += size
            if architecture != keep or kind == PTX:
                data[payload : payload + size] = bytes(size)
            entry = payload + size
    return sizes


def main() -> None:
    """Read, prune and write the library on the command line."""
    library, keep, out = Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    data = bytearray(library.read_bytes())
    sizes = prune(data, *section(library), keep)
    if not sizes[keep]:
        raise SystemExit(f"{library} has no code for sm_{keep}; it has {sorted(sizes)}")
    out.write_bytes(data)
    print(", ".join(f"sm_{name}: {size / 1e6:.0f} MB" for name, size in sorted(sizes.items())))


if __name__ == "__main__":
    main()
