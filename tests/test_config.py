"""Settings and flags. Oracle: literal lists; a new flag is added here on purpose (13 are the limit for the project)."""

from __future__ import annotations

import argparse
import dataclasses
import pydoc
from pathlib import Path
from typing import Any

import pytest

from megatron_hecate import HecateConfig, fssdp

pytestmark = pytest.mark.fast

SPEEDS = str(Path(__file__).parent / "data" / "free_copies.json")
FLAGS = {
    "--moe-fssdp",
    "--moe-fssdp-slots",
    "--moe-fssdp-lifetime",
    "--moe-fssdp-transport",
    "--moe-fssdp-overlap-degree",
    "--moe-fssdp-late-replicas",
    "--moe-fssdp-rehome",
    "--moe-fssdp-speeds",
    "--moe-fssdp-nccl-ctas",
    "--moe-fssdp-timeout",
    "--moe-fssdp-observe",
    "--moe-fssdp-record",
}
# The least and the greatest number.
LIMITS = {
    "slots": (0, 4096),
    "overlap_degree": (0, 4096),
    "late_replicas": (0, 1048576),
    "rehome": (0, 1000000000),
    "nccl_ctas": (0, 64),
    "timeout": (0.001, 1e8),
}


def _parse(*argv: str) -> HecateConfig | None:
    return HecateConfig.from_arguments(
        HecateConfig.add_arguments(argparse.ArgumentParser()).parse_args(argv)
    )


def test_the_flags_are_these() -> None:
    parser = HecateConfig.add_arguments(argparse.ArgumentParser(add_help=False))
    assert {option for action in parser._actions for option in action.option_strings} == FLAGS
    assert len(FLAGS) <= 13


def test_flags_become_settings() -> None:
    assert _parse() is None
    message = "--moe-fssdp-slots, --moe-fssdp-record without --moe-fssdp: FSSDP is off"
    with pytest.warns(UserWarning, match=message):
        assert _parse(*"--moe-fssdp-slots 4 --moe-fssdp-record run".split()) is None
    assert _parse("--moe-fssdp") == HecateConfig()
    assert _parse("--moe-fssdp-observe") == HecateConfig(observe=True)
    flags = "--moe-fssdp --moe-fssdp-slots 4 --moe-fssdp-overlap-degree 3 --moe-fssdp-timeout 7.5"
    flags += " --moe-fssdp-lifetime layer --moe-fssdp-transport p2p --moe-fssdp-late-replicas 6"
    settings = dict(slots=4, overlap_degree=3, timeout=7.5, lifetime="layer", transport="p2p")
    expected = HecateConfig(**settings, late_replicas=6, speeds=SPEEDS)
    assert _parse(*flags.split(), "--moe-fssdp-speeds", SPEEDS) == expected


@pytest.mark.parametrize("text", ["off", "false", "true", 2])
def test_a_text_is_no_switch(text: Any) -> None:
    """Overrides of Megatron-Bridge may bring any text; ``"off"`` must not switch FSSDP on."""
    for name in ("moe_fssdp", "moe_fssdp_observe"):
        with pytest.raises(ValueError, match=f"{name}={text!r} must be true or false"):
            HecateConfig.from_arguments(argparse.Namespace(**{name: text}))
    assert HecateConfig.from_arguments(argparse.Namespace(moe_fssdp=None)) is None


@pytest.mark.parametrize("name", LIMITS)
def test_limits_are_checked_and_stated(name: str) -> None:
    least, most = LIMITS[name]
    for value in (least, most):
        HecateConfig(**{name: value})
    for wrong in (least - 1, 1.1 * most, float("nan"), True, "2", []):
        with pytest.raises(ValueError, match=f"{name}=.* must be a "):
            HecateConfig(**{name: wrong})
    text = HecateConfig.__dataclass_fields__[name].metadata["allowed"]
    assert f"from {least:g} to {most:.10g}" in text.replace("1e+08", "100000000")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(slots=None), "slots=None must be a whole number"),
        (dict(timeout=float("inf")), "timeout=inf must be a number of seconds from 0.001 to 1e.08"),
        (dict(late_replicas=2, slots=0), "late_replicas=2 needs slots for them, got slots=0"),
        (dict(observe="true"), "observe='true' must be True or False"),
        (dict(lifetime=None), "lifetime=None must be auto, iteration or layer"),
        (dict(transport=["p2p"]), r"transport=\['p2p'\] must be auto, p2p or nvlink"),
        (dict(speeds="no/such.json"), "speeds='no/such.json' must be the name of a file that .* measure FILE has written"),
        (dict(speeds=b"x"), "speeds=b'x' must be the name of a file"),
        (dict(record=""), "record='' must be the name of a folder, which need not exist, or None"),
        (dict(record=SPEEDS), "record='.*free_copies.json' must be the name of a folder"),
        (dict(slots=-1, timeout=0, lifetime="x"), "slots=-1 must .*; lifetime='x' must .*; timeout=0 must "),
    ],
)  # fmt: skip
def test_bad_settings_say_what_to_do(settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        HecateConfig(**settings)


def test_paths_may_be_objects(tmp_path: Path) -> None:
    paths = HecateConfig(speeds=Path(SPEEDS), record=tmp_path)
    assert paths == HecateConfig(speeds=SPEEDS, record=str(tmp_path))


@pytest.mark.parametrize("wrong", [2, [], HecateConfig, argparse.Namespace(slots=2)])
def test_the_hook_is_made_of_settings(wrong: Any) -> None:
    """Not of the model, say, which would make a hook that nobody calls."""
    message = (
        rf"got a value of type {type(wrong).__name__}; write fssdp\(HecateConfig\(slots=2\)\)\(mod"
    )
    with pytest.raises(TypeError, match=message):
        fssdp(wrong)


def test_help_explains_every_field() -> None:
    """Meaning and unit as the flag has them; the default; what is allowed."""
    shown = " ".join(pydoc.plain(pydoc.render_doc(HecateConfig)).replace("|", " ").split())
    for field in dataclasses.fields(HecateConfig):
        flag = f"--moe-fssdp-{field.name.replace('_', '-')}"
        text = f"{field.metadata['help']} Default {field.default!r}; {field.metadata['allowed']}"
        assert f"{field.name}: {text}; {flag}." in shown and flag in FLAGS
