"""The example's script in a framework that makes Megatron's arguments itself, as Primus does.

``parse_args`` of Megatron only returns them. The first argument of the script says what they hold: ``defaults`` of all
flags of Megatron's parser, ``no flags`` of ours, or the framework's own ``settings``, which ask for FSSDP.
"""

import os
import sys
from argparse import ArgumentParser
from types import SimpleNamespace

import pretrain_gpt
from megatron.training import arguments


def make(holds: str, words: list[str]) -> SimpleNamespace:
    """Make arguments of Megatron from ``words``, which stand for a framework's settings."""
    add_arguments = arguments.add_megatron_arguments
    if holds == "no flags":
        # the function without what `megatron_hecate.enable` adds to it
        add_arguments = getattr(add_arguments, "__wrapped__", add_arguments)
    parser = add_arguments(ArgumentParser(allow_abbrev=False))
    ready = SimpleNamespace(**vars(parser.parse_args(words)))
    ready._is_global_batch_size_explicitly_specified = True
    ready.rank, ready.world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if holds == "settings":
        ready.moe_fssdp, ready.moe_fssdp_slots = True, 3
    return ready


if __name__ == "__main__":
    ready = make(sys.argv[1], sys.argv[2:])
    arguments.parse_args = lambda *_, **__: ready
    pretrain_gpt.main()
