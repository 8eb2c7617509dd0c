"""Models and machines by name. Oracles: what model cards say; the tables themselves, and a file written for this."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_hecate.plan import H100
from megatron_hecate.tools.presets import CLUSTERS, MODELS, Cluster, Model

pytestmark = pytest.mark.fast


def test_presets_have_the_published_number_of_parameters() -> None:
    """Oracle: what the names and model cards say, in billions, all parameters."""
    published = {
        "qwen3-30b-a3b": 30.5,
        "qwen3-235b-a22b": 235,
        "deepseek-v3": 671,
        "mixtral-8x7b": 46.7,
    }
    published |= {"mixtral-8x22b": 141, "olmoe": 6.9, "gpt-oss-120b": 116.8, "gpt-oss-20b": 20.9}
    assert set(published) == set(MODELS)
    for name, billions in published.items():
        m = MODELS[name]
        layer = m.attention + 3 * m.hidden * (m.experts * m.ffn + m.shared)
        plain = m.attention + 3 * m.hidden * m.plain_ffn
        total = m.layers * layer + m.plain * plain + 2 * m.vocab * m.hidden
        assert total / 1e9 == pytest.approx(billions, rel=0.01), name


def test_a_cluster_is_a_name_or_a_measured_file(tmp_path: Path) -> None:
    H100.save(tmp_path / "speeds.json", origin="here")
    measured = Cluster.named(str(tmp_path / "speeds.json"), per_node=4)
    assert measured.speeds == H100 and measured.per_node == 4 and measured.memory == 0
    assert Cluster.named("gb200x72") is CLUSTERS["gb200x72"]
    assert Model.named("olmoe,layers=3").layers == 3 and Model.named("olmoe,shared=0").shared == 0
