"""Settings and flags. Oracle: literal lists; a new flag is added here on purpose (13 are the limit for the project)."""

from __future__ import annotations

import argparse
import dataclasses
import pydoc
import re
from pathlib import Path
from typing import Any

import pytest

import megatron_hecate
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
    with pytest.warns(
        UserWarning,
        match="--moe-fssdp-slots, --moe-fssdp-lifetime without --moe-fssdp: FSSDP is off",
    ):
        assert _parse(*"--moe-fssdp-slots 4 --moe-fssdp-lifetime layer".split()) is None
    assert _parse("--moe-fssdp") == HecateConfig()
    assert _parse(
        *"--moe-fssdp --moe-fssdp-slots 4 --moe-fssdp-overlap-degree 3 --moe-fssdp-timeout 7.5".split(),
        *"--moe-fssdp-lifetime layer --moe-fssdp-transport p2p".split(),
        *f"--moe-fssdp-late-replicas 6 --moe-fssdp-speeds {SPEEDS}".split(),
    ) == HecateConfig(
        slots=4,
        overlap_degree=3,
        timeout=7.5,
        lifetime="layer",
        transport="p2p",
        late_replicas=6,
        speeds=SPEEDS,
    )


def test_observing_needs_no_other_flag() -> None:
    assert _parse("--moe-fssdp-observe") == HecateConfig(observe=True)
    assert _parse(*"--moe-fssdp --moe-fssdp-record run".split()) == HecateConfig(record="run")
    assert _parse(*"--moe-fssdp --moe-fssdp-observe".split()) == HecateConfig(observe=True)
    with pytest.warns(UserWarning, match="--moe-fssdp-record without --moe-fssdp: FSSDP is off"):
        assert _parse(*"--moe-fssdp-record run".split()) is None
    with pytest.raises(
        ValueError, match="record='' must be the name of a folder, which need not exist, or None"
    ):
        HecateConfig(record="")
    with pytest.raises(ValueError, match="moe_fssdp_observe='off' must be true or false"):
        HecateConfig.from_arguments(argparse.Namespace(moe_fssdp_observe="off"))


@pytest.mark.parametrize("text", ["off", "no", "false", "true", 2])
def test_a_text_is_no_switch(text: Any) -> None:
    """Overrides of Megatron-Bridge may bring any text; ``"off"`` must not switch FSSDP on."""
    with pytest.raises(ValueError, match=f"moe_fssdp={text!r} must be true or false"):
        HecateConfig.from_arguments(argparse.Namespace(moe_fssdp=text))
    assert HecateConfig.from_arguments(argparse.Namespace(moe_fssdp=None)) is None


def test_lifetimes_are_those_of_the_buffers() -> None:
    from megatron_hecate.replicas.buffers import LIFETIMES

    assert HecateConfig().lifetime == "iteration"
    for lifetime in ("auto", *LIFETIMES):
        assert _parse("--moe-fssdp", "--moe-fssdp-lifetime", lifetime) == HecateConfig(
            lifetime=lifetime
        )


def test_settings_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        HecateConfig().slots = 3


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        (dict(slots=-1), ValueError, "slots=-1 must be a whole number from 0 to"),
        (dict(overlap_degree=-2), ValueError, "overlap_degree=-2 must be a whole number from 0 to"),
        (dict(slots="2"), ValueError, "slots='2' must be a whole number"),
        (dict(slots=True), ValueError, "slots=True must be a whole number"),
        (
            dict(overlap_degree=1.5),
            ValueError,
            "overlap_degree=1.5 must be a whole number from 0 to 4096, or None",
        ),
        (dict(late_replicas=-1), ValueError, "late_replicas=-1 must be a whole number from 0 to"),
        (dict(late_replicas=1.5), ValueError, "late_replicas=1.5 must be a whole number"),
        (
            dict(late_replicas=2, slots=0),
            ValueError,
            "late_replicas=2 needs slots for them, got slots=0",
        ),
        (
            dict(timeout=0.0),
            ValueError,
            "timeout=0.0 must be a number of seconds from 0.001 to 1e.08",
        ),
        (dict(timeout=float("inf")), ValueError, "timeout=inf must be"),
        (dict(timeout=float("nan")), ValueError, "timeout=nan must be"),
        (dict(timeout="30"), ValueError, "timeout='30' must be"),
        (dict(timeout=True), ValueError, "timeout=True must be"),
        (dict(speeds=5), ValueError, "speeds=5 must be the name of a file"),
        (dict(slots=10**9), ValueError, "slots=1000000000 must be a whole number from 0 to 4096"),
        (dict(slots=float("nan")), ValueError, "slots=nan must be a whole number"),
        (dict(slots=None), ValueError, "slots=None must be a whole number"),
        (
            dict(overlap_degree=10**9),
            ValueError,
            "overlap_degree=1000000000 must be a whole number from 0 to 4096",
        ),
        (
            dict(overlap_degree=True),
            ValueError,
            "overlap_degree=True must be a whole number from 0 to 4096, or None",
        ),
        (
            dict(late_replicas=10**9),
            ValueError,
            "late_replicas=1000000000 must be a whole number from 0 to 1048576",
        ),
        (dict(late_replicas="1"), ValueError, "late_replicas='1' must be a whole number"),
        (dict(rehome=-1), ValueError, "rehome=-1 must be a whole number from 0 to"),
        (
            dict(rehome=10**10),
            ValueError,
            "rehome=10000000000 must be a whole number from 0 to 1000000000",
        ),
        (dict(rehome=True), ValueError, "rehome=True must be a whole number"),
        (dict(timeout=-5), ValueError, "timeout=-5 must be"),
        (dict(timeout=None), ValueError, "timeout=None must be"),
        (dict(observe=1), ValueError, "observe=1 must be True or False"),
        (dict(observe="true"), ValueError, "observe='true' must be True or False"),
        (
            dict(lifetime=None),
            ValueError,
            "lifetime=None must be auto, iteration or layer",
        ),
        (dict(transport=["p2p"]), ValueError, r"transport=\['p2p'\] must be auto, p2p or nvlink"),
        (
            dict(speeds="no/such.json"),
            ValueError,
            "speeds='no/such.json' must be the name of a file that .* measure FILE has written",
        ),
        (
            dict(speeds=Path("no/such.json")),
            ValueError,
            "speeds='no/such.json' must be the name of a file",
        ),
        (dict(speeds=""), ValueError, "speeds='' must be the name of a file"),
        (dict(speeds=b"x"), ValueError, "speeds=b'x' must be the name of a file"),
        (dict(record=3), ValueError, "record=3 must be the name of a folder"),
        (
            dict(record=SPEEDS),
            ValueError,
            "record='.*free_copies.json' must be the name of a folder",
        ),
        (
            dict(slots=-1, timeout=0, lifetime="x"),
            ValueError,
            "slots=-1 must .*; lifetime='x' must .*; timeout=0 must ",
        ),
        (dict(transport="sm"), ValueError, "transport='sm' must be auto, p2p or nvlink"),
    ],
)
def test_bad_settings_say_what_to_do(settings: dict, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        HecateConfig(**settings)


def test_paths_may_be_objects(tmp_path: Path) -> None:
    assert HecateConfig(speeds=Path(SPEEDS), record=tmp_path) == HecateConfig(
        speeds=SPEEDS, record=str(tmp_path)
    )


@pytest.mark.parametrize(
    ("wrong", "shown"),
    [
        (2, "int"),
        ([], "list"),
        (HecateConfig, "type"),
        (argparse.Namespace(slots=2), "Namespace"),
    ],
)
def test_the_hook_is_made_of_settings(wrong: Any, shown: str) -> None:
    """Not of the model, say, which would make a hook that nobody calls."""
    with pytest.raises(TypeError, match="fssdp takes a HecateConfig, or nothing, got ") as error:
        fssdp(wrong)
    assert f"got a value of type {shown}; write fssdp(HecateConfig(slots=2))(model_chunks)" in str(
        error.value
    )


def _help(thing: Any) -> str:
    """What ``help(thing)`` shows, in one line."""
    return " ".join(pydoc.plain(pydoc.render_doc(thing)).replace("|", " ").split())


@pytest.mark.parametrize("field", dataclasses.fields(HecateConfig), ids=lambda field: field.name)
def test_help_explains_every_field(field: dataclasses.Field) -> None:
    """Meaning and unit as the flag has them; the default; what is allowed."""
    text, allowed = field.metadata["help"], field.metadata["allowed"]
    flag = f"--moe-fssdp-{field.name.replace('_', '-')}"
    expected = f"{field.name}: {text} Default {field.default!r}; {allowed}; {flag}."
    assert expected in _help(HecateConfig) and flag in FLAGS
    assert len(text) > 50 and "\n" not in text
    HecateConfig(**{field.name: field.default})


@pytest.mark.parametrize(
    ("name", "lowest", "highest", "wrong"),
    [
        ("slots", 0, 4096, 4097),
        ("overlap_degree", 0, 4096, 4097),
        ("late_replicas", 0, 1048576, 1048577),
        ("rehome", 0, 1000000000, 1000000001),
        ("nccl_ctas", 0, 64, 65),
        ("timeout", 0.001, 1e8, 1.1e8),
    ],
)
def test_help_states_the_limits_that_are_checked(
    name: str, lowest: float, highest: float, wrong: float
) -> None:
    (text,) = re.findall(
        rf"{name}: .*? --moe-fssdp-{name.replace('_', '-')}\.", _help(HecateConfig)
    )
    assert f"from {lowest:g} to {highest:.10g}" in text.replace("1e+08", "100000000")
    for value in (lowest, highest):
        HecateConfig(**{name: value})
    for value in (lowest - 1, wrong):
        with pytest.raises(ValueError, match=f"{name}="):
            HecateConfig(**{name: value})


def test_help_names_the_choices_that_are_checked() -> None:
    for name in ("lifetime", "transport"):
        (field,) = [field for field in dataclasses.fields(HecateConfig) if field.name == name]
        for value in re.split(", | or ", field.metadata["allowed"]):
            HecateConfig(**{name: value})
            assert value == "auto" or f"{value}: " in field.metadata["help"]


def test_help_explains_the_hook() -> None:
    shown = _help(megatron_hecate.fssdp)
    assert "fssdp(config: 'HecateConfig" in shown
    for fact in (
        "before DDP wraps it", "fssdp(HecateConfig(slots=2))(model_chunks)", "Args: config: ", "help(HecateConfig)",
        "Returns: The hook: a function of a list of model chunks, or of one model", "Raises: TypeError",
        "``ValueError`` for", "``TimeoutError`` if", "leaves the model unchanged",
    ):  # fmt: skip
        assert fact in shown, fact
