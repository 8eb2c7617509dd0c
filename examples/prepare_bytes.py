"""Write text files as a Megatron dataset of bytes: ``python prepare_bytes.py FOLDER PREFIX``.

``PREFIX.bin`` and ``PREFIX.idx`` have one document per file and one token per byte; token 256 ends
a document. Train with ``--tokenizer-type NullTokenizer --vocab-size 257``.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch

# suffixes of text files
SUFFIXES = {
    ".py",
    ".md",
    ".txt",
    ".rst",
    ".c",
    ".h",
    ".cpp",
    ".cu",
    ".rs",
    ".go",
    ".js",
    ".ts",
    ".tex",
    ".json",
}
END_OF_DOCUMENT = 256


def text_files(folder: Path) -> list[Path]:
    """List all text files below ``folder``, sorted, without installed packages and caches."""
    skipped = {"site-packages", "__pycache__", ".git"}
    files = (p for p in folder.rglob("*") if p.suffix in SUFFIXES and not skipped & set(p.parts))
    return sorted(p for p in files if p.is_file())


def prepare(folder: Path, prefix: Path, *, limit: int = 32 << 20) -> tuple[int, int]:
    """Write the dataset of ``folder`` to ``prefix``.

    Args:
        folder: folder of text files, read recursively.
        prefix: path of the dataset without suffix.
        limit: number of tokens after which no further file is read.

    Returns:
        Numbers of documents and of tokens.

    Raises:
        ValueError: when there is no text.
    """
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    documents = 0
    tokens = 0
    for path in text_files(folder):
        data = path.read_bytes()
        if not data:
            continue
        # The token that ends a document does not fit into a byte.
        document = np.frombuffer(data, dtype=np.uint8).astype(np.int32)
        document = np.append(document, END_OF_DOCUMENT)
        builder.add_document(torch.from_numpy(document), [len(document)])
        documents += 1
        tokens += len(document)
        if tokens >= limit:
            break
    if not documents:
        raise ValueError(
            f"no text in {folder}: looked for files that end in {', '.join(sorted(SUFFIXES))}"
        )
    builder.finalize(f"{prefix}.idx")
    return documents, tokens


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("prefix", type=Path)
    arguments = parser.parse_args()
    print("{} documents, {} tokens".format(*prepare(arguments.folder, arguments.prefix)))
