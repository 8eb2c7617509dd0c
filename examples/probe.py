"""Record losses, tokens per expert, tokens per rank and step times of a run, stock or FSSDP.

The probe observes from outside: forward hooks on Megatron's routers and expert modules, and the
time of the microbatches. It uses no figure of FSSDP itself, except the bytes of its replicas.
"""

from __future__ import annotations

import json
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.transformer.moe.moe_layer import MoELayer
from torch import Tensor
from torch.nn import Module
from turns import Turns


class Probe:
    """Recorder of one JSON line per training step in ``FOLDER/rank<r>.jsonl``.

    A line has: ``loss`` and ``tokens``, sums over this rank's microbatches; ``seconds`` of the
    step; ``experts`` [L][E], tokens of this rank routed to each expert; ``computed`` [L], tokens
    that this rank's expert modules computed; and ``replica_bytes`` at the end of the step's last
    forward. Where two jobs take turns (`turns`), no step includes time of the other job.

    Args:
        folder: folder of the records.
        skew: constant added to router logits to make routing uneven, see `_skew`.
    """

    def __init__(self, folder: str, *, skew: float = 0.0) -> None:
        Path(folder).mkdir(parents=True, exist_ok=True)
        self.skew = skew
        self.turns = Turns.of()
        self.steps = 0
        self.folder = Path(folder)
        self.file = None
        self.layers: list[MoELayer] = []
        self.microbatch = 0
        self.began = 0.0
        self.step: dict[str, Any] | None = None

    def watch(self, chunks: list[Module]) -> list[Module]:
        """Attach to every MoE layer of this rank, as a pre-wrap hook of Megatron."""
        self.layers = []
        for chunk in chunks:
            self.layers += [m for m in chunk.modules() if isinstance(m, MoELayer)]
        # Default arguments bind the index of the loop's current layer.
        for index, layer in enumerate(self.layers):
            if self.skew:
                _skew(layer, self.skew)
            layer.router.register_forward_hook(
                lambda module, args, out, i=index: self._routed(module, i, out[1])
            )
            layer.experts.register_forward_pre_hook(
                lambda module, args, i=index: self._computed(module, i, args[1])
            )
        self.file = (self.folder / f"rank{dist.get_rank()}.jsonl").open("w")
        return chunks

    def _routed(self, router: Module, layer: int, routing_map: Tensor) -> None:
        """Count the tokens routed to each expert; ``routing_map``: [tokens, E] bool."""
        if router.training and self.step is not None:
            # Sums stay on the device until the step ends, so that the host does not wait for it.
            self.step["experts"][layer] += routing_map.sum(dim=0)

    def _computed(self, experts: Module, layer: int, tokens_per_expert: Tensor) -> None:
        """Count the tokens that this rank computes."""
        if experts.training and self.step is not None:
            self.step["computed"][layer] += tokens_per_expert.sum()

    def microbatch_begins(self, *, training: bool) -> None:
        """Finish the last step and begin a new one with the first microbatch of a step."""
        if not training:
            return
        if self.microbatch % get_num_microbatches() == 0:
            self._finish_step()
            if self.turns is not None:
                self.turns.before_step(self.steps)
            self.steps += 1
            num = len(self.layers)
            self.step = {
                "loss": 0.0,
                "tokens": 0,
                "experts": [0] * num,
                "computed": [0] * num,
                "replica_bytes": 0,
            }
            self.began = time.perf_counter()
        self.microbatch += 1

    def losses(self, loss_func: Callable, *, training: bool) -> Callable:
        """Wrap ``loss_func`` so that its result is recorded."""

        def recorded(output: Tensor) -> tuple:
            loss, tokens, report = loss_func(output)
            if training:
                self.step["loss"] += loss.detach()
                self.step["tokens"] += tokens
                self.step["replica_bytes"] = sum(_replica_bytes(layer) for layer in self.layers)
            return loss, tokens, report

        return recorded

    def _finish_step(self) -> None:
        """Write the line of the last step."""
        if self.step is not None:
            # Reading the sums waits for the device, so it precedes the end of the time.
            values = {key: _numbers(value) for key, value in self.step.items()}
            values["seconds"] = time.perf_counter() - self.began
            self.file.write(json.dumps(values) + "\n")
            # A job that is killed leaves complete lines.
            self.file.flush()

    def close(self) -> None:
        """Write the last step and the process's peak memory; call it after training."""
        if self.file is None:
            return
        self._finish_step()
        if self.turns is not None:
            self.turns.end()
        # 0 on a CPU. Linux gives ru_maxrss in KiB.
        peak = torch.cuda.max_memory_allocated()
        peak = peak or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        homes = 0
        for layer in self.layers:
            homes += sum(p.numel() * p.element_size() for p in layer.experts.parameters())
        self.file.write(json.dumps({"peak_memory": peak, "home_bytes": homes}) + "\n")
        self.file.close()


def _numbers(value: Any) -> Any:
    """Convert a tensor, or a list of tensors, to numbers."""
    if isinstance(value, list):
        return [_numbers(item) for item in value]
    return value.tolist() if isinstance(value, Tensor) else value


def _skew(layer: MoELayer, skew: float) -> None:
    """Add ``skew`` to the router's logits of one expert, and half of it to the next.

    Every layer has different hot experts.
    """
    experts = layer.config.num_moe_experts
    hot = 4 * (layer.layer_number - 1) % experts
    bias = torch.zeros(experts)
    bias[hot] = skew
    bias[(hot + 1) % experts] = skew / 2
    gating = layer.router.gating

    def skewed(hidden: Tensor) -> Tensor:
        logits = gating(hidden)
        return logits + bias.to(logits)

    layer.router.gating = skewed


def _replica_bytes(layer: MoELayer) -> int:
    """Count the bytes in use for replica weights and their fp32 gradients."""
    if not hasattr(layer, "fssdp") or layer.fssdp.current.replicas is None:
        return 0
    replicas = layer.fssdp.current.replicas
    sizes = replicas.slots.sizes
    return len(replicas.transfers.slots) * (sizes.weight_bytes + sizes.grad_bytes) // sizes.slots
