"""Flags of public launch scripts, as quoted and as a few CPU ranks train them in seconds."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

SCRIPTS = Path(__file__).resolve().parents[1] / "data" / "launch_scripts.json"
# data, learning rates and lengths of a test
TRAINING = """
    --seq-length 64 --max-position-embeddings 64 --micro-batch-size 1 --train-iters 5
    --lr 3e-3 --min-lr 3e-4 --lr-decay-style cosine --lr-decay-iters 5 --clip-grad 1.0 --weight-decay 0.1 --seed 1234 --init-method-std 0.1
    --attention-dropout 0 --hidden-dropout 0 --position-embedding-type rope --distributed-backend gloo
    --tokenizer-type NullTokenizer --vocab-size 257 --split 100,0,0 --eval-iters 0 --eval-interval 1000000
    --log-interval 1 --num-workers 0 --no-rope-fusion --no-create-attention-mask-in-dataloader
"""


@dataclasses.dataclass(frozen=True)
class Script:
    """The flags of a public launch script.

    Args:
        settings: settings that distinguish it, for a table.
        licence: of the files that the flags come from.
        flags: flags and their values, as quoted.
        ranks: processes that train it in a test.
        trained: the flags of that training, beside `TRAINING`.
    """

    settings: str
    licence: str
    flags: str
    ranks: int
    trained: str


def read() -> dict[str, Script]:
    """Return the public scripts by name."""
    return {
        row["name"]: Script(
            licence=row["sources"][0]["licence"],
            **{name: row[name] for name in ("settings", "flags", "ranks", "trained")},
        )
        for row in json.loads(SCRIPTS.read_text())
    }
