"""The layer that `bench/step.py` measures. Oracle: a dense layer in fp64, token by token, of torch's own operators.

On a CPU, by the host build of the kernels; what would make the benchmark say that wrong values are right is planted.
"""

from __future__ import annotations

import pytest
import step
import torch
from step_layer import Layer, Sizes, Weights
from torch import Tensor

pytestmark = pytest.mark.fast
SIZES = Sizes(ranks=4, homes=3, hidden=24, ffn=16, tokens=40, top=2, slots=2)
CPU = torch.device("cpu")


def _dense(weights: Weights) -> dict[str, Tensor]:
    """Every expert on every token, of which the router's choice counts."""
    s = weights.sizes
    x = torch.cat([part.detach() for part in weights.inputs]).double().requires_grad_()
    router = weights.router.detach().double().requires_grad_()
    kinds = ("first", "second")
    first, second = (
        torch.cat([part.detach()[: s.homes] for part in getattr(weights, kind)])
        .double()
        .requires_grad_()
        for kind in kinds
    )
    scores = torch.softmax(x @ router.t() + weights.bias.double(), dim=-1)
    probs = scores * torch.zeros_like(scores).scatter(1, scores.topk(s.top, dim=-1).indices, 1.0)
    output = torch.zeros_like(x)
    for expert in range(s.experts):
        gate, up = (x @ first[expert]).chunk(2, dim=-1)
        output = (
            output
            + (torch.nn.functional.silu(gate) * up @ second[expert]) * probs[:, expert : expert + 1]
        )
    output.backward(torch.cat(weights.grads).double())
    grads = [grad.reshape(s.ranks, s.homes, *grad.shape[1:]) for grad in (first.grad, second.grad)]
    names = (
        "outputs",
        "gradients of inputs",
        "gradient of the router",
        "gradients of w1",
        "gradients of w2",
    )
    return dict(zip(names, (output.detach(), x.grad, router.grad, *grads), strict=True))


@pytest.mark.parametrize("replicas", [False, True])
@pytest.mark.parametrize("seed", [0, 1])
def test_values_are_those_of_a_dense_layer(replicas: bool, seed: int) -> None:
    weights = Weights(SIZES, CPU, torch.float32, seed=seed)
    layer = Layer(weights, replicas=replicas)
    for _ in range(2):  # a second step over the memory of the first
        found = step.differences(step.values(layer), _dense(weights))
        assert all(difference < 1e-5 for difference in found.values()), found
    in_replicas = layer.computed.max() < Layer(weights, replicas=False).computed.max()
    assert bool(in_replicas) == replicas, "tokens must be split, or the replicas show nothing"


def test_a_wrong_value_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients of replicas that do not return, and replicas that are not fetched."""
    table = step.Table("values")
    weights = Weights(SIZES, CPU, torch.float32)
    assert step.compare("right", weights, table)
    transfers = type(Layer(weights, replicas=True).transfers)
    for name in ("give_back", "fetch"):
        with monkeypatch.context() as patch:
            patch.setattr(transfers, name, lambda transfers: None)
            assert not step.compare(f"without {name}", Weights(SIZES, CPU, torch.float32), table)
