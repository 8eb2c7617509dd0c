"""Copies of modules that share settings with the original: what twins are made of."""

from __future__ import annotations

import copy

from torch.nn import Module


def copy_module(module: Module, *, with_parameters: bool) -> Module:
    """A shallow copy that can get submodules of its own and has no hooks: a user's hook on ``module`` fires there, once
    per forward.

    Args:
        with_parameters: whether it shares parameters and submodules; else submodules are copied too, and every
            parameter is missing, to be given in each call.
    """
    twin = copy.copy(module)
    for name, value in vars(module).items():
        if "_hooks" in name and isinstance(value, dict | list):
            twin.__dict__[name] = type(value)()
    if with_parameters:
        twin._parameters, twin._modules = dict(module._parameters), dict(module._modules)
        return twin
    twin._parameters = dict.fromkeys(module._parameters)
    twin._modules = {
        name: None if child is None else copy_module(child, with_parameters=False)
        for name, child in module._modules.items()
    }
    return twin
