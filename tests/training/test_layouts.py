"""FSSDP trains the model stock Megatron trains. Oracle: the same model, not converted, on the same ranks and data.

Each layout is trained in one set of processes: stock once, then every variant of FSSDP (`variants` says what is
compared, and how closely). Those without replicas are stock's bit for bit; with replicas only the order of sums
differs, in the same way whenever a run is repeated. What is compiled in TransformerEngine is torch here
(`quantizers_on_cpu`), and of layouts in fp8 and fp4 only weights are quantized, so that results agree as without.
"""

from __future__ import annotations

import pytest
import torch.distributed as dist
import variants
from layout_tables import LAYOUTS
from quick import quick
from ranks import ranks


@pytest.fixture
def chosen(name: str, request: pytest.FixtureRequest) -> list[str]:
    """The variants that run: ``make test`` leaves slow ones out, and other versions of Megatron further ones."""
    layout, marks = LAYOUTS[name], request.config.option.markexpr
    of_layout = layout.names
    if "not slow" in marks:
        of_layout = [variant for variant in of_layout if variant in layout.quick.split()]
    if "not newest" in marks:
        of_layout = [variant for variant in of_layout if variant in ("none", "replicas")]
    return of_layout


LAYOUT_PARAMETERS = quick(
    LAYOUTS,
    [name for name, layout in LAYOUTS.items() if layout.quick],
    oldest=[name for name, layout in LAYOUTS.items() if layout.is_for_oldest],
)


@pytest.mark.parametrize("name", LAYOUT_PARAMETERS)
@ranks(
    lambda name, chosen: LAYOUTS[name].num_ranks,
    timeout=600,
    preload=lambda name, chosen: LAYOUTS[name].packages,
)
def test_layout(name: str, chosen: list[str]) -> None:
    for variant, worst in variants.compare(name, LAYOUTS[name], chosen).items():
        if dist.get_rank() == 0:
            print(
                f"\n| {name} | {variant} | {worst['loss']:.1e} | {worst['grad']:.1e} |", flush=True
            )
