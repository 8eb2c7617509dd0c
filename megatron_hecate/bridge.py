"""FSSDP for Megatron-Bridge's recipes: one line, or an override, and our metrics in Bridge's own loggers.

    from megatron_hecate import bridge

    bridge.enable(cfg, slots=2)                                  # in a recipe, once cfg.model is there
    pretrain(cfg, forward_step, callbacks=[bridge.Metrics()])

Once this module is imported, or our launcher runs the script, the overrides ``+model.moe_fssdp=true
+model.moe_fssdp_slots=2`` work too: models of Bridge have attributes of these names. Bridge's ``pretrain`` settles a
recipe's settings in one function: it is wrapped, because only then it is known what the job will run with.
"""

from __future__ import annotations

import argparse
import functools
import re
import sys
from collections import deque
from collections.abc import Callable
from typing import Any

from megatron.bridge.models.conversion.model_bridge import MegatronModelBridge
from megatron.bridge.models.model_provider import ModelProviderMixin
from megatron.bridge.training import callbacks, pretrain
from megatron.training.models.base import ModelConfig
from torch.nn import Module

from megatron_hecate import HecateConfig, fssdp, restore_homes
from megatron_hecate import enable as launcher
from megatron_hecate.job.agreement import SwitchOnError, refuse
from megatron_hecate.record.loggers import log_scalars
from megatron_hecate.record.metrics import summarize
from megatron_hecate.record.recorder import PATIENCE, JobMetrics, StageRecorder
from megatron_hecate.settings import assumptions, unsupported

NAMES = HecateConfig().as_arguments()
OVERRIDE = re.compile(r"\+*(?P<at>[\w.]*)\b(?P<name>moe_fssdp\w*)=")  # on a command line


def enable(config: Any, **settings: Any) -> None:
    """Train the MoE layers of a recipe with FSSDP.

    The recipe is checked when `pretrain` starts: overrides, mixed precision and overlaps change it until then.

    Args:
        config: the recipe, a ``ConfigContainer`` whose model is set.
        settings: fields of `HecateConfig`, such as ``slots=2``. Overrides on the command line take precedence.

    Raises:
        ValueError: for settings out of range, or when other settings were asked for before.
        TypeError: where ``config`` is no recipe.
    """
    if not hasattr(config, "model"):
        raise TypeError(
            f"bridge.enable takes a recipe, a ConfigContainer, got a {type(config).__name__}"
        )
    _ask(config, HecateConfig(**settings).as_arguments())
    _register(config)


class Metrics(callbacks.Callback):
    """Log the metrics of docs/observe.md to the loggers a recipe uses: TensorBoard, Weights & Biases, MLflow, Comet.

    They are of the expert-parallel groups of Bridge's logging rank, the last one, on all pipeline stages, every
    ``logger.tensorboard_log_interval`` iterations. They are logged when they have arrived from all stages: one or a few
    iterations later, as of the iteration they belong to. Each layer is logged with the model's
    ``moe_per_layer_logging``.
    """

    def __init__(self) -> None:
        self._arrived: deque[tuple] = (
            deque()
        )  # from a thread; MLflow would not know which run that logs to

    def on_train_start(self, context: callbacks.CallbackContext) -> None:
        self._arrived.clear()  # of an attempt before, in this process
        if (metrics := JobMetrics.newest) is not None:
            metrics.log = lambda *step, ended: self._arrived.append(step)
            metrics.interval = context.state.cfg.logger.tensorboard_log_interval

    def on_train_step_start(self, context: callbacks.CallbackContext) -> None:
        if (recorder := _recorder(context.model)) is not None:
            recorder.running = (
                context.state.train_state.step
            )  # finished so far, which nobody else tells

    def on_train_step_end(self, context: callbacks.CallbackContext) -> None:
        state, model = context.state, context.model[0]
        per_layer = bool(getattr(getattr(model, "config", None), "moe_per_layer_logging", False))
        while self._arrived:
            step, layers, of_layers = self._arrived.popleft()
            values = summarize(layers, of_layers, per_layer=per_layer)
            log_scalars(values, step, board=state.tensorboard_logger, wandb=state.wandb_logger)
            for logger in filter(None, (state.mlflow_logger, state.comet_logger)):
                logger.log_metrics(values, step=step)

    def on_train_end(self, context: callbacks.CallbackContext) -> None:
        if (recorder := _recorder(context.model)) is not None:
            recorder.close()
        if (metrics := JobMetrics.newest) is not None:
            metrics.stop(PATIENCE)
        self.on_train_step_end(context)


def _recorder(chunks: list[Module]) -> StageRecorder | None:
    """Of this rank's stage, if it has MoE layers."""
    for module in (module for chunk in chunks for module in chunk.modules()):
        if hasattr(module, "fssdp"):
            return module.prefetcher.monitor.recorder.stage
        if hasattr(module, "observer"):
            return module.observer.stage
    return None


def _hook(config: Any, chunks: list[Module]) -> list[Module]:
    """Runs when the model is built, also where a script goes round `pretrain`."""
    settings = _settings(config)
    if settings is None:  # an override has switched it off
        return chunks
    _check(config, settings)
    return fssdp(settings)(chunks)


def _ask(config: Any, asked: dict[str, Any]) -> None:
    """Keep settings, by argparse's names, with the recipe, which must not hold others."""
    held = vars(config).setdefault("_moe_fssdp", {})
    if others := [name for name in asked if held.get(name, asked[name]) != asked[name]]:
        before, now = (
            ", ".join(f"{name}={values[name]!r}" for name in others) for values in (held, asked)
        )
        raise SwitchOnError(
            [f"FSSDP was asked for with {before} before, now with {now}; say it in one place"]
        )
    held.update(asked)


def _settings(config: Any) -> HecateConfig | None:
    """What a recipe and overrides ask for."""
    overrides = {name: value for name, value in vars(config.model).items() if name in NAMES}
    asked = {**vars(config).get("_moe_fssdp", {}), **overrides}
    try:
        return HecateConfig.from_arguments(argparse.Namespace(**asked))
    except ValueError as error:
        raise SwitchOnError([str(error)]) from None


def _register(config: Any) -> None:
    """Have the hook run, once, when the model is built, whichever kind of configuration it has."""
    model = config.model
    if isinstance(model, ModelConfig):  # whose list overrides empty
        hooks, register = model.pre_wrap_hooks, model.pre_wrap_hooks.append
    else:
        hooks, register = getattr(model, "_pre_wrap_hooks", ()), model.register_pre_wrap_hook
    if not any(getattr(hook, "func", None) is _hook for hook in hooks):
        register(functools.partial(_hook, config))


def _check(config: Any, settings: HecateConfig) -> None:
    """Raise a ValueError that lists all settings of a recipe that do not combine with FSSDP; all do with observing."""
    if settings.observe:
        return
    parts = (config.model, getattr(config.model, "transformer", None), config.ddp, config.dist)
    parts += (config.checkpoint, config.optimizer, config, settings.as_arguments())
    problems = unsupported.find(*parts, slots=settings.slots)
    if isinstance(config.model, ModelConfig):  # which keeps what is not its own one level deeper

        def deeper(override: re.Match) -> str:
            return (
                override[0]
                if override["name"] in vars(config.model)
                else f"model.transformer.{override['name']}="
            )

        problems = [re.sub(r"\bmodel\.(?P<name>\w+)=", deeper, problem) for problem in problems]
    refuse(problems)


def _with_fssdp(runtime_config_update: Callable) -> Callable:
    def update(cfg: Any) -> None:
        runtime_config_update(cfg)
        _ask(cfg, launcher.launched)
        _find_lost_overrides(cfg.model)
        if (settings := _settings(cfg)) is not None:
            _check(cfg, settings)
            _register(cfg)
            # a caller's own ``pre_wrap_hook`` replaces all that are registered: `entry` finds these where DDP wraps
            vars(cfg.model).update(settings.as_arguments())

    return update


def _where_megatron_built_them(convert: Callable) -> Callable:
    def conversion(*args: Any, **kwargs: Any) -> Any:
        for value in (*args, *kwargs.values()):
            if isinstance(value, Module) or (
                isinstance(value, list) and value and isinstance(value[0], Module)
            ):
                restore_homes(value)
        return convert(*args, **kwargs)

    return conversion


def _find_lost_overrides(model: Any) -> None:
    """Bridge drops overrides of names that it does not know, and only warns."""
    for argument in sys.argv[1:]:
        found = OVERRIDE.match(argument)
        if found and (found["at"] != "model." or found["name"] not in vars(model)):
            known = f"known are +model.{', +model.'.join(NAMES)}"
            way = "Import megatron_hecate.bridge before overrides are applied, or start the script with our launcher"
            raise SwitchOnError(
                [f"the override {argument!r} did not reach the model; {known}. {way}"]
            )


_problems = assumptions.broken_assumptions(assumptions.BRIDGE_ASSUMPTIONS)
if _problems:
    raise ImportError(
        "megatron_hecate.bridge does not fit this Bridge:\n"
        + "\n".join(f"  - {p}" for p in _problems)
    )
for _name, _value in {
    **NAMES,
    "moe_fssdp": False,
}.items():  # Bridge applies overrides to attributes that exist
    for _class in (ModelProviderMixin, ModelConfig):
        setattr(_class, _name, _value)
launcher.wrap(pretrain, "runtime_config_update", _with_fssdp)
for _name in assumptions.BRIDGE_CONVERSIONS:
    launcher.wrap(MegatronModelBridge, _name, _where_megatron_built_them)
