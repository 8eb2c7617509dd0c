"""Sizes of published models, and speeds of machines from public measurements, for `what_if`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

from megatron_hecate.plan import H100, LayerShape, Link, Speeds

# Seconds of the quotas' kernel, by ranks, and of all other parts of routing to replicas: see
# `plan.H100`.
QUOTA_RANKS: tuple[int, int] = (8, 64)
QUOTA_SECONDS: tuple[float, float] = (20e-6, 78e-6)
OTHER_ROUTING: float = 75e-6


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
    """Sizes of a model; by default with gated experts (three matrices) and bf16 weights.

    Args:
        layers: number of layers with experts.
        hidden, ffn: sizes of an expert.
        experts, top_k: experts of a layer, and experts per token.
        attention: parameters of one layer's attention.
        width: heads times head dimension of queries and keys; the mean with the values' width
            where that differs.
        vocab, seq: tokens of the vocabulary and of a sequence.
        shared: ffn size of a layer's shared experts together.
        plain, plain_ffn: number of layers without experts, and their ffn size.
        matrices: hidden x ffn matrices of an expert.
        weight_bytes: bytes of one parameter of an expert.
        grad_bytes: bytes of one element of main gradients, and of replicas' gradients.
    """

    layers: int
    hidden: int
    ffn: int
    experts: int
    top_k: int
    attention: int
    width: int
    vocab: int
    seq: int = 4096
    shared: int = 0
    plain: int = 0
    plain_ffn: int = 0
    matrices: int = 3
    weight_bytes: int = 2
    grad_bytes: int = 4

    @classmethod
    def named(cls, text: str) -> Model:
        """Parse ``NAME[,field=value...]``, such as ``olmoe,layers=8``.

        Raises:
            ValueError: for an unknown name or field, with the known ones.
        """
        name, *changes = text.split(",")
        fields = [field.name for field in dataclasses.fields(cls)]
        may_be_zero = ("shared", "plain", "plain_ffn")
        values = {}
        for change in changes:
            field, _, value = change.partition("=")
            is_known = field in fields and value.isdecimal()
            if not is_known or (int(value) == 0 and field not in may_be_zero):
                raise ValueError(
                    f"{change!r} in model {text!r} must be FIELD=NUMBER, "
                    f"with a field of {', '.join(fields)}"
                )
            values[field] = int(value)
        if name not in MODELS:
            raise ValueError(
                f"no model is named {name!r}; there are {', '.join(MODELS)}; "
                "change sizes as in olmoe,layers=8"
            )
        return dataclasses.replace(MODELS[name], **values)

    @property
    def expert_elements(self) -> int:
        """Number of parameters of one expert."""
        return self.matrices * self.hidden * self.ffn

    def dense_flops(self) -> float:
        """Count the forward FLOPs of a token in a layer outside its experts.

        FLOPs of the layers without experts are spread evenly over the layers with experts.
        """
        # Causal attention computes half of all scores: 2 instead of 4 FLOPs per score element.
        attention = 2.0 * self.attention + 2.0 * self.seq * self.width
        plain = self.plain * (attention + 6.0 * self.hidden * self.plain_ffn)
        return attention + 6.0 * self.hidden * self.shared + plain / self.layers

    def shape(self, **options: float) -> LayerShape:
        """Return the shape of one layer; ``options``: further fields of `LayerShape`."""
        elements = self.expert_elements
        width = self.weight_bytes
        sizes = dict(
            expert_bytes=width * elements,
            grad_bytes=self.grad_bytes * elements,
            token_bytes=width * self.hidden,
        )
        return LayerShape(**sizes, token_flops=2.0 * elements, **options)


def _heads(hidden: int, heads: int, groups: int, width: int = 128) -> dict[str, int]:
    """Return the sizes of attention with ``groups`` key-value heads, as fields of `Model`."""
    return dict(attention=2 * hidden * width * (heads + groups), width=heads * width)


# Sizes: each model's published config.json; a test compares the number of parameters. DeepSeek's
# attention: q_lora 1536, kv_lora 512, 128 heads of 128 + 64 (values 128). The windows of GPT-OSS's
# attention and multi-token prediction are not modelled.
_QWEN3 = dict(experts=128, top_k=8, vocab=151936)
_GPT_OSS = dict(hidden=2880, ffn=2880, top_k=4, vocab=201088, **_heads(2880, 64, 8, 64))
MODELS: Mapping[str, Model] = {
    "qwen3-30b-a3b": Model(layers=48, hidden=2048, ffn=768, **_QWEN3, **_heads(2048, 32, 4)),
    "qwen3-235b-a22b": Model(layers=94, hidden=4096, ffn=1536, **_QWEN3, **_heads(4096, 64, 4)),
    "deepseek-v3": Model(
        **dict(layers=58, hidden=7168, ffn=2048, experts=256, top_k=8, vocab=129280, shared=2048),
        **dict(attention=187_107_328, width=20480, plain=3, plain_ffn=18432),
    ),
    "mixtral-8x7b": Model(
        layers=32, hidden=4096, ffn=14336, experts=8, top_k=2, vocab=32000, **_heads(4096, 32, 8)
    ),
    "mixtral-8x22b": Model(
        layers=56, hidden=6144, ffn=16384, experts=8, top_k=2, vocab=32000, **_heads(6144, 48, 8)
    ),
    "olmoe": Model(
        layers=16, hidden=2048, ffn=1024, experts=64, top_k=8, vocab=50304, **_heads(2048, 16, 16)
    ),
    "gpt-oss-120b": Model(layers=36, experts=128, **_GPT_OSS),
    "gpt-oss-20b": Model(layers=24, experts=32, **_GPT_OSS),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cluster:
    """Speeds and memory of a machine.

    Args:
        per_node: number of ranks that share the fast link.
        speeds: bandwidths and latencies of links, FLOP/s of experts.
        dense: FLOP/s of a rank outside experts; time outside GEMMs counts, too.
        memory: bytes of a rank; 0 if unknown.
    """

    per_node: int
    speeds: Speeds
    dense: float
    memory: float

    @classmethod
    def named(cls, name: str, *, per_node: int = 8) -> Cluster:
        """Look up a cluster of the table, or load a file from ``megatron-hecate measure``.

        Args:
            name: name in `CLUSTERS`, or path of a file.
            per_node: ranks per node with a file, which does not hold it.

        Raises:
            ValueError: if there is neither, with the known names.
        """
        if name in CLUSTERS:
            return CLUSTERS[name]
        if not Path(name).is_file():
            is_known = ", ".join(CLUSTERS)
            raise ValueError(
                f"no cluster and no file is named {name!r}; "
                f"there are {is_known}, and files from megatron-hecate measure"
            )
        speeds = Speeds.load(name)
        return cls(per_node=per_node, speeds=speeds, dense=speeds.flops, memory=0.0)

    def for_group(self, ranks: int) -> Cluster:
        """Return the cluster with the cost of routing to replicas in a group of ``ranks``.

        Of the parts behind `plan.H100`, quotas grow with the group: from 20 us with 8 ranks to 78
        with 64, with two slots on an H200 (docs/gpu-results.md). Outside this range the nearest
        measured value is used. Contention does not grow: a transfer has the same number of thread
        blocks in any group.
        """
        few, many = QUOTA_RANKS
        shortest, longest = QUOTA_SECONDS
        share = (min(max(ranks, few), many) - few) / (many - few)
        routing = OTHER_ROUTING + shortest + share * (longest - shortest)
        return dataclasses.replace(self, speeds=dataclasses.replace(self.speeds, routing=routing))


def _cluster(
    per_node: int, intra: float, inter: float, flops: tuple[float, float], memory: tuple[int, float]
) -> Cluster:
    """Build a cluster from GB/s (intra, inter), TFLOP/s (experts, all else), GB and their TB/s."""
    links = dict(intra=Link(intra * 1e9, 12e-6), inter=Link(inter * 1e9, 25e-6))
    size, rate = memory
    speeds = dataclasses.replace(H100, **links, flops=flops[0] * 1e12, memory=rate * 1e12)
    return Cluster(per_node=per_node, speeds=speeds, dense=flops[1] * 1e12, memory=size * 1e9)


# intra: bus bandwidth of NCCL's all-to-all at 512 MiB, and latency of small ones (NVIDIA's
# AIConfigurator at 095f58a, Apache-2.0; GB200 on 4 GPUs). inter: 90 % of the adapter's rate
# (datasheets); its latency is an assumption. Memory: datasheets, A100 of 80 GB. Experts: 45 % of
# dense bf16, as in `plan.H100`. All else: H100 and GB200 are fitted to one published row each
# (docs/what-if-checks.md), H200 equals H100, B200 and A100 are scaled by their peaks.
CLUSTERS: Mapping[str, Cluster] = {
    "a100x8": _cluster(8, 203, 22.5, (140, 75), (80, 2.0)),
    "h100x8": _cluster(8, 320, 45, (445, 237), (80, 3.35)),
    "h200x8": _cluster(8, 321, 45, (445, 237), (141, 4.8)),
    "b200x8": _cluster(8, 565, 45, (1010, 856), (180, 8.0)),
    "gb200x72": _cluster(72, 508, 45, (1100, 935), (186, 8.0)),
}
