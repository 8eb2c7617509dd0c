"""What stock Megatron's dispatchers are given while a model is observed, counted in plain Python beside the run."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np
import tiny_gpt
import torch
import torch.distributed as dist

from megatron_hecate import HecateConfig, fssdp
from megatron_hecate.record.run_folder import read


class RoutedTokens:
    """A hook that observes into ``folder``, and counts tokens by step, layer, forward and expert."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self._steps: list = [defaultdict(list)]

    def __call__(self, chunks: list) -> list:
        self._layers = tiny_gpt.moe_layers(chunks)
        for index, layer in enumerate(self._layers):
            original = layer.token_dispatcher.dispatch_preprocess
            layer.token_dispatcher.dispatch_preprocess = lambda *a, i=index, o=original: (
                self._count(i, o, *a)
            )
        return fssdp(HecateConfig(observe=True, record=self.folder))(chunks)

    def _count(self, layer: int, original: Any, hidden: Any, routing_map: Any, *rest: Any) -> Any:
        if torch._C._current_graph_task_id() == -1:  # not recomputed
            self._steps[-1][layer].append(np.array(routing_map.int().sum(dim=0).tolist()))
        return original(hidden, routing_map, *rest)

    def end_step(self, *_: object) -> None:
        self._steps.append(defaultdict(list))

    def loads(self, steps: int) -> torch.Tensor:
        """[steps, layers, forwards, experts] of the ranks that are recorded together."""
        layers = range(len(self._layers))
        loads = torch.tensor(np.array([[s[i] for i in layers] for s in self._steps[:steps]]))
        dist.all_reduce(loads, group=self._layers[0].token_dispatcher.tp_ep_group)
        return loads


def recorded_run(chunks: list, folder: str) -> Any:
    """What was recorded of a model, observed or with FSSDP, once training has ended on all ranks."""
    layer = tiny_gpt.moe_layers(chunks)[0]
    is_converted = hasattr(layer, "fssdp")
    recorder = layer.prefetcher.monitor.recorder if is_converted else layer.router.observer
    recorder.stage.close()
    dist.barrier()
    return read(folder)
