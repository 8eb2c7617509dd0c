"""Snapshots of models, to see that switching on has left one as it was."""

from __future__ import annotations


def snapshot(chunks: list) -> list:
    modules = [(name, module) for chunk in chunks for name, module in chunk.named_modules()]
    return [
        (
            name,
            id(m),
            type(m),
            sorted(k for k in vars(m) if k not in ("training",)),
            len(m._load_state_dict_post_hooks),
        )
        for name, m in modules
    ]
