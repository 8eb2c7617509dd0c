"""Metrics and spans for OpenTelemetry, by the providers that the process has configured.

Providers and exporters belong to Megatron (``--otel-enabled`` of its development branch) or to the
training script. The package ``opentelemetry`` is not imported here: where nothing else has imported
it, no provider is configured, and nothing is done.

| signal | on | when |
|---|---|---|
| gauges: names of docs/observe.md with ``.`` for ``/`` | the rank that logs | logged iterations |
| span ``fssdp.iteration`` | ranks with a tracer | iterations that the tracer samples |
| spans ``fssdp.plan``, ``fssdp.spAG``, ``fssdp.spRS wait``, ... | the same | as in `trace` |
"""

from __future__ import annotations

import atexit
import sys
import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from megatron_hecate import trace
from megatron_hecate.faults.attempt import Attempt
from megatron_hecate.megatron.training_globals import report_interval

NAME = "megatron_hecate"
# Gauges by name, of each meter provider: a second instrument of the same name causes a warning.
_gauges: weakref.WeakKeyDictionary[Any, dict[str, Any]] = weakref.WeakKeyDictionary()


def _provider(signal: str, read: str) -> Any | None:
    """Return the configured provider of a signal; ``None`` if there is none.

    Args:
        signal: module of the API, ``metrics`` or ``trace``.
        read: name of the module's function that returns the provider.
    """
    module = sys.modules.get(f"opentelemetry.{signal}")
    if module is None:
        return None
    provider = getattr(module, read)()
    # The API's own providers, a proxy and one without effect, record nothing.
    own = type(provider).__module__.startswith(f"opentelemetry.{signal}")
    return None if own else provider


def interval() -> int:
    """Return the iterations between two settings of gauges; 0 without a configured meter."""
    if _provider("metrics", "get_meter_provider") is None:
        return 0
    return report_interval()


def set_gauges(values: Mapping[str, float], iteration: int) -> None:
    """Set one gauge per number of a finished iteration, and ``fssdp.iteration``.

    Args:
        values: numbers by name.
        iteration: number of the iteration.
    """
    provider = _provider("metrics", "get_meter_provider")
    if provider is None:
        return
    gauges = _gauges.setdefault(provider, {})
    for name, value in {**values, "fssdp/iteration": iteration}.items():
        if name not in gauges:
            meter = provider.get_meter(NAME)
            gauges[name] = meter.create_gauge(name.replace("/", "."))
        gauges[name].set(value)


class SpanExporter(trace.SpanRecorder):
    """Recorder that turns the spans of iterations, plans and transfers into OpenTelemetry's.

    An iteration is a child of the span in which it begins, such as Megatron's, and goes on until
    the next one begins. Iterations that the tracer does not sample have no spans.

    Args:
        tracer: tracer of the configured provider.
        number: returns the number of the running iteration, ``None`` if Megatron has none.
    """

    def __init__(self, tracer: Any, number: Callable[[], int | None]) -> None:
        super().__init__()
        self._tracer = tracer
        self._number = number
        self._begun = 0
        self._iteration: Any = None
        # Nanoseconds from the clock of spans here to unix time.
        self._shift = 0
        atexit.register(self.close)

    def begin(self) -> None:
        """Begin an iteration and end the previous one."""
        self._end()
        self._begun += 1
        number = self._number() or self._begun
        self._shift = time.time_ns() - time.perf_counter_ns()
        self._iteration = self._tracer.start_span(
            "fssdp.iteration", attributes={"fssdp.iteration": number}
        )
        trace.export_to(self if self._iteration.is_recording() else None)

    def add(self, what: str, layer: str, begin: float, end: float) -> None:
        iteration = self._iteration
        if iteration is None:
            return
        api = sys.modules["opentelemetry.trace"]
        span = self._tracer.start_span(
            f"fssdp.{what}",
            context=api.set_span_in_context(iteration),
            attributes={"fssdp.layer": layer},
            start_time=self._unix(begin),
        )
        span.end(end_time=self._unix(end))

    def close(self) -> None:
        """End the last iteration."""
        self._end()
        atexit.unregister(self.close)

    def _end(self) -> None:
        """End the running iteration, with the transfers that have ended since the last check."""
        if self._iteration is None:
            return
        self.look()
        trace.export_to(None)
        self._iteration.end()
        self._iteration = None

    def _unix(self, seconds: float) -> int:
        """Convert ``time.perf_counter()`` to unix nanoseconds."""
        return round(seconds * 1e9) + self._shift


def iteration_listeners(number: Callable[[], int | None]) -> list[Callable[[], None]]:
    """Return the listener that exports spans, if a tracer is configured when the model is built.

    Args:
        number: returns the number of the running iteration, ``None`` if Megatron has none.
    """
    provider = _provider("trace", "get_tracer_provider")
    if provider is None:
        return []
    exporter = SpanExporter(provider.get_tracer(NAME), number)
    Attempt.current().at_end(exporter.close)
    return [exporter.begin]
