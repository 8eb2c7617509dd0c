"""FSSDP for Megatron-Bridge: one line or an override per recipe, and metrics in Bridge's loggers.

    from megatron_hecate import bridge

    bridge.enable(cfg, slots=2)                                  # in a recipe that has its model
    pretrain(cfg, forward_step, callbacks=[bridge.Metrics()])

The overrides ``+model.moe_fssdp=true +model.moe_fssdp_slots=2`` also work once this module is
imported, or if our launcher runs the script: Bridge's models get attributes of the same names.
The settings of a recipe become final in one function of Bridge's ``pretrain``. This module wraps
that function to check them all before the job starts; `entry` converts the model where DDP wraps
it.
"""

from __future__ import annotations

import re
import sys
from collections import deque
from collections.abc import Callable
from itertools import chain
from typing import Any

from megatron.bridge import package_info
from megatron.bridge.models import common
from megatron.bridge.models.model_provider import ModelProviderMixin
from megatron.bridge.training import callbacks, pretrain
from torch.nn import Module

from megatron_hecate.comm.agreement import refuse
from megatron_hecate.config import HecateConfig, fssdp_arguments
from megatron_hecate.enable import wrap
from megatron_hecate.megatron import assumptions
from megatron_hecate.record.job_metrics import PATIENCE, JobMetrics, log_scalars
from megatron_hecate.record.layer_recorder import LayerRecorder
from megatron_hecate.record.metrics import summarize
from megatron_hecate.record.observe import Observer
from megatron_hecate.switch_on import unsupported
from megatron_hecate.switch_on.request import REQUEST

VERSION = f"Megatron-Bridge {package_info.__version__}"
# of Bridge itself in 0.4; later Megatron's, from which Bridge's is derived
ModelConfig = common.ModelConfig.__mro__[-2]
NAMES = HecateConfig().as_arguments()
# an override of ours on a command line
OVERRIDE = re.compile(r"\+*(?P<part>[\w.]*)\b(?P<name>moe_fssdp\w*)=")


def enable(config: Any, **settings: Any) -> None:
    """Train the MoE layers of a recipe with FSSDP.

    The recipe is validated when ``pretrain`` starts: overrides, mixed precision and overlaps change
    it until then.

    Args:
        config: a recipe, which is a ``ConfigContainer`` with a model.
        settings: fields of `HecateConfig`, such as ``slots=2``. Overrides on the command line take
            precedence.

    Raises:
        ValueError: for settings out of range, or different from earlier ones.
        TypeError: for a ``config`` without a model.
    """
    if not hasattr(config, "model"):
        raise TypeError(
            f"bridge.enable takes a recipe, a ConfigContainer, got a {type(config).__name__}"
        )
    # A framework may never call ``pretrain``: then `entry` reads the settings off the model when
    # DDP wraps it, or refuses the first step.
    _ask(config, HecateConfig(**settings).as_arguments())


class Metrics(callbacks.Callback):
    """Callback that logs the metrics of docs/observe.md to a recipe's loggers.

    The loggers are TensorBoard, Weights & Biases, MLflow and Comet. Bridge logs on the last rank.
    The metrics cover the expert-parallel groups of that rank on all pipeline stages, every
    ``logger.tensorboard_log_interval`` iterations. They are logged after all stages have sent their
    part, one or a few iterations later, under the iteration they belong to. With the model's
    ``moe_per_layer_logging`` each layer is logged, too.

    Raises:
        ImportError: for a version of Bridge that lacks a logger or a callback.
    """

    def __init__(self) -> None:
        assumptions.require(assumptions.BRIDGE_METRICS, module=f"{__name__}.Metrics", by=VERSION)
        # A thread receives the metrics. This queue passes each one to the main thread, because
        # MLflow finds its run only there.
        self._arrived: deque[tuple] = deque()

    def on_train_start(self, context: callbacks.CallbackContext) -> None:
        # metrics of an earlier attempt of a job that restarted in this process
        self._arrived.clear()
        if (metrics := JobMetrics.newest) is not None:
            metrics.log = lambda *step, ended: self._arrived.append(step)
            metrics.interval = context.state.cfg.logger.tensorboard_log_interval

    def on_train_step_start(self, context: callbacks.CallbackContext) -> None:
        if (model := _recorded(context.model)) is not None:
            # number of finished iterations, which only this callback can see
            model.clock.log_number = context.state.train_state.step

    def on_train_step_end(self, context: callbacks.CallbackContext) -> None:
        state = context.state
        model = context.model[0]
        per_layer = bool(getattr(getattr(model, "config", None), "moe_per_layer_logging", False))
        while self._arrived:
            step, layers, layer_values = self._arrived.popleft()
            values = summarize(layers, layer_values, per_layer=per_layer)
            log_scalars(values, step, board=state.tensorboard_logger, wandb=state.wandb_logger)
            for logger in filter(None, (state.mlflow_logger, state.comet_logger)):
                logger.log_metrics(values, step=step)

    def on_train_end(self, context: callbacks.CallbackContext) -> None:
        if (model := _recorded(context.model)) is not None:
            model.stage.close()
        if (metrics := JobMetrics.newest) is not None:
            metrics.stop(PATIENCE)
        self.on_train_step_end(context)


def _recorded(chunks: list[Module]) -> LayerRecorder | Observer | None:
    """Return the recorder of this rank's layers, or ``None`` without MoE layers."""
    for module in chain.from_iterable(chunk.modules() for chunk in chunks):
        if hasattr(module, "fssdp"):
            return module.prefetcher.monitor.recorder
        if hasattr(module, "observer"):
            return module.observer
    return None


def _ask(config: Any, request: dict[str, Any]) -> None:
    """Store settings, by argparse's names, in the recipe and its model; refuse a change of them.

    Overrides are attributes of the model already, and take precedence.
    """
    earlier = vars(config).setdefault("_moe_fssdp", {})
    refuse(
        f"FSSDP was asked for with {name}={earlier[name]!r} before, now with {name}={value!r}; "
        "set it in one place"
        for name, value in request.items()
        if earlier.get(name, value) != value
    )
    earlier.update(request)
    values = {**earlier, **fssdp_arguments(config.model)}
    for model in _models(config):
        REQUEST.add(model, values)


def _models(config: Any) -> tuple[Any, Any]:
    """Return the model of a recipe, and its ``TransformerConfig``, which may be the same object."""
    return config.model, getattr(config.model, "transformer", config.model)


def _check(config: Any, settings: HecateConfig) -> None:
    """Raise a ValueError that lists all settings of a recipe that do not combine with FSSDP."""
    # observing combines with all settings
    if settings.observe:
        return
    parts = (
        *_models(config),
        config.ddp,
        config.dist,
        config.checkpoint,
        config.optimizer,
        config,
        settings.as_arguments(),
    )
    problems = unsupported.find(*parts, slots=settings.slots)
    if isinstance(config.model, ModelConfig):
        # this kind of configuration holds the fields of TransformerConfig in model.transformer
        own_names = "|".join(vars(config.model))
        override = rf"\bmodel\.(?!({own_names})=)(?=\w+=)"
        problems = [re.sub(override, "model.transformer.", problem) for problem in problems]
    refuse(problems)


def _with_fssdp(runtime_config_update: Callable) -> Callable:
    def update(cfg: Any) -> None:
        runtime_config_update(cfg)
        _find_lost_overrides(cfg.model)
        _ask(cfg, REQUEST.flags)
        if (settings := REQUEST.settings(cfg.model)) is not None:
            _check(cfg, settings)

    return update


def _find_lost_overrides(model: Any) -> None:
    """Raise an error for an override of ours that did not reach the model.

    Bridge drops overrides of unknown names with only a warning.
    """
    overrides = filter(None, map(OVERRIDE.match, sys.argv[1:]))
    refuse(
        f"the override {override.string!r} did not reach the model; known are "
        f"+model.{', +model.'.join(NAMES)}. Import megatron_hecate.bridge before overrides are "
        "applied, or start the script with our launcher"
        for override in overrides
        if override["part"] != "model." or override["name"] not in vars(model)
    )


assumptions.require(assumptions.BRIDGE_ASSUMPTIONS, module=__name__, by=VERSION)
# Bridge applies overrides only to attributes that exist
for _name, _value in {**NAMES, "moe_fssdp": False}.items():
    for _class in (ModelProviderMixin, ModelConfig):
        setattr(_class, _name, _value)
wrap(pretrain, "runtime_config_update", _with_fssdp)
