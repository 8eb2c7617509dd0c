"""What FSSDP says when it cannot be switched on, and snapshots of models, to see that one is then as it was."""

from __future__ import annotations

from typing import Any

import pytest
import tiny_gpt


def refusal(chunks: list, **settings: Any) -> str:
    with pytest.raises(ValueError, match="FSSDP cannot be switched on") as error:
        tiny_gpt.fssdp_hook(**settings)(chunks)
    return str(error.value)


def snapshot(chunks: list) -> list:
    modules = [(name, module) for chunk in chunks for name, module in chunk.named_modules()]
    return [
        (name, id(m), type(m), sorted(vars(m)), len(m._load_state_dict_post_hooks))
        for name, m in modules
    ]
