"""OpenTelemetry's providers get our gauges and spans where the job has configured them.

Oracle: readers of opentelemetry-sdk in memory; what TensorBoard's writer is given; a `SpanRecorder` beside the run; the
same run without a provider.
"""

from __future__ import annotations

import subprocess
import sys
import types
from typing import Any

import pytest
from ranks import ranks


def _script(**arguments: Any) -> dict[int, dict[str, float]]:
    """As in a script of ``megatron.training`` without loggers: its arguments; what a writer would be given."""
    given: dict[int, dict[str, float]] = {}
    names = types.ModuleType("megatron.training.global_vars")
    names._GLOBAL_ARGS = types.SimpleNamespace(
        tensorboard_dir=None, wandb_project=None, moe_per_layer_logging=True, **arguments
    )
    writer = types.SimpleNamespace(flush=lambda: None)
    writer.add_scalar = lambda name, value, at: given.setdefault(at, {}).update({name: value})
    names.get_tensorboard_writer = lambda: writer
    names.get_wandb_writer = lambda: None
    sys.modules[names.__name__] = names
    return given


def _metered() -> Any:
    """A reader of this process's meter provider."""
    from opentelemetry import metrics
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader

    reader = InMemoryMetricReader()
    metrics.set_meter_provider(MeterProvider([reader]))
    return reader


def _gauges(reader: Any) -> dict[str, float]:
    (of_resource,) = reader.get_metrics_data().resource_metrics
    (scope,) = of_resource.scope_metrics
    assert scope.scope.name == "megatron_hecate"
    found = {}
    for metric in scope.metrics:
        (point,) = metric.data.data_points
        found[metric.name] = point.value
    return found


def _close(run: Any) -> None:
    import tiny_gpt

    from megatron_hecate.record.recorder import JobMetrics

    tiny_gpt.moe_layers(run.chunks)[0].prefetcher.monitor.recorder.stage.close()
    JobMetrics.newest.stop(20)
    assert not JobMetrics.newest.is_alive()


@ranks(4)
def test_gauges_are_of_all_stages_though_one_rank_has_a_meter() -> None:
    """No other logger is configured: the first stage learns from the last rank which iterations are wanted."""
    import torch.distributed as dist

    case = _tiny_case(pp=2)
    given = _script(log_interval=2)
    reader = _metered() if dist.get_rank() == 3 else None
    import tiny_gpt

    run = tiny_gpt.train(case, steps=5, hook=tiny_gpt.fssdp_hook())
    _close(run)
    if reader is None:
        assert not given
        return
    assert list(given) == [2, 4]
    found = _gauges(reader)
    assert found.pop("fssdp.iteration") == 4
    assert found == {name.replace("/", "."): value for name, value in given[4].items()}
    assert {"moe.max_vio_layer_0", "moe.max_vio_layer_1"} <= set(found), "one of each stage"


@ranks(2)
def test_a_loop_without_megatrons_arguments_has_gauges_of_each_iteration() -> None:
    import torch.distributed as dist

    case = _tiny_case()
    reader = _metered() if dist.get_rank() == 1 else None
    import tiny_gpt

    run = tiny_gpt.train(case, steps=3, hook=tiny_gpt.fssdp_hook())
    _close(run)
    if reader is not None:
        found = _gauges(reader)
        assert found["fssdp.iteration"] == 3 and found["moe.max_overload_factor"] >= 1


@ranks(4)
def test_without_a_provider_no_iteration_is_sent() -> None:
    """Also where the API is imported, and where a process has switched it off."""
    import tiny_gpt
    import torch.distributed as dist
    from opentelemetry import metrics, trace

    from megatron_hecate.record import telemetry
    from megatron_hecate.record.recorder import JobMetrics

    if dist.get_rank():
        metrics.set_meter_provider(metrics.NoOpMeterProvider())
        trace.set_tracer_provider(trace.NoOpTracerProvider())
    case = _tiny_case(pp=2)
    _script(log_interval=1)
    run = tiny_gpt.train(case, steps=2, hook=tiny_gpt.fssdp_hook())
    assert telemetry.interval() == 0 and telemetry.iteration_listeners(lambda: 1) == []
    _close(run)
    # the pipeline of the rank that logs sends the last message only
    assert JobMetrics.newest._sent == (1 if JobMetrics.newest._stages else 0)


def _tiny_case(**fields: Any) -> Any:
    import tiny_gpt

    case = tiny_gpt.Case(skew=3, **fields)
    tiny_gpt.initialize(case)
    return case


def _traced(sampler: Any = None) -> Any:
    """An exporter of this process's tracer provider."""
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter = InMemorySpanExporter()
    provider = TracerProvider(sampler=sampler)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    return exporter


@ranks(2)
def test_spans_of_plans_and_transfers_lie_in_their_iterations() -> None:
    """In the span in which the forward begins, as Megatron's of a training step; the run is that without a tracer."""
    import tiny_gpt
    from opentelemetry import trace as api

    from megatron_hecate import trace
    from megatron_hecate.record import telemetry

    case = _tiny_case()
    plain = tiny_gpt.train(case, steps=3, hook=tiny_gpt.fssdp_hook(slots=2))
    exporter = _traced()
    tracer = api.get_tracer("megatron")
    with trace.SpanRecorder() as recorder:
        run = tiny_gpt.train(case, steps=0, hook=tiny_gpt.fssdp_hook(slots=2))
        for step in range(3):
            with tracer.start_as_current_span("megatron.train_step"):
                run.step(step)
    run.read_params()
    tiny_gpt.assert_trained_alike(plain, run)
    listeners = tiny_gpt.moe_layers(run.chunks)[0].prefetcher.tracker.listeners
    owners = [getattr(listener, "__self__", None) for listener in listeners]
    (ours,) = (owner for owner in owners if isinstance(owner, telemetry.SpanExporter))
    ours.close()
    spans = exporter.get_finished_spans()
    steps = [span for span in spans if span.name == "megatron.train_step"]
    iterations = [span for span in spans if span.name == "fssdp.iteration"]
    assert [span.attributes["fssdp.iteration"] for span in iterations] == [1, 2, 3]
    assert [span.parent.span_id for span in iterations] == [s.context.span_id for s in steps]
    parts = [span for span in spans if span not in (*steps, *iterations)]
    by_id = {span.context.span_id: span for span in iterations}
    for span in parts:
        iteration = by_id[span.parent.span_id]
        assert iteration.start_time - 1_000_000 <= span.start_time <= span.end_time
    seen = sorted(
        (f"fssdp.{what}", layer) for what, layer, *_ in recorder.spans if what in trace.EXPORTED
    )
    assert sorted((span.name, span.attributes["fssdp.layer"]) for span in parts) == seen
    assert {"fssdp.plan", "fssdp.spAG", "fssdp.spRS", "fssdp.spAG wait"} <= {s.name for s in parts}


@ranks(2)
def test_an_iteration_that_is_not_sampled_has_no_spans() -> None:
    import tiny_gpt
    from opentelemetry.sdk.trace.sampling import ALWAYS_OFF

    from megatron_hecate import trace

    exporter = _traced(ALWAYS_OFF)
    run = tiny_gpt.train(_tiny_case(), steps=2, hook=tiny_gpt.fssdp_hook(slots=2))
    assert run.replicas and exporter.get_finished_spans() == ()
    assert trace.span("plan", "layer 1") is trace.span("experts", "layer 2")
    assert not trace.follows_transfers()


@pytest.mark.fast
def test_the_package_does_not_import_opentelemetry() -> None:
    code = """
import sys
from megatron_hecate.record import recorder, telemetry, tracing
assert telemetry.interval() == 0 and telemetry.iteration_listeners(lambda: 1) == []
telemetry.set_gauges({"moe/max_vio": 1.0}, 1)
assert not [name for name in sys.modules if name.startswith("opentelemetry")]
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
