"""Read the jobs of a YAML or JSON file."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_hecate.files import read_file
from megatron_hecate.tools.files import jobs

# Values of a document with aliases, at most.
LARGEST: int = 100_000
SHELLS = (".sh", ".bash", ".zsh", ".slurm", ".sbatch", ".job")
SCRIPT = (
    "is a shell script, which only a shell can read; write megatron-hecate check -- in front of "
    "its training command and start it, or check that: "
    "megatron-hecate check -- pretrain_gpt.py ARGUMENTS"
)


def read_jobs(path: Path) -> list[jobs.Job]:
    """Return the jobs of a file.

    Raises:
        ValueError: for a file that cannot be read, or without settings.
    """
    try:
        text = read_file(path).decode("utf-8-sig")
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot be read: {error}") from None
    suffix = path.suffix.lower()
    if suffix in SHELLS or re.match(r"#!.*\b(ba|z|da|k)?sh\b", text):
        raise ValueError(SCRIPT)
    data = _parse(text, suffix)
    if not data or not isinstance(data, Mapping | list):
        raise ValueError(f"holds {data!r}, not a mapping of settings or a list of such")
    if isinstance(data, Mapping):
        return jobs.find_jobs(data)
    return _find_jobs(data)


def _find_jobs(entries: list) -> list[jobs.Job]:
    listed_jobs = []
    for number, entry in enumerate(entries, start=1):
        if not isinstance(entry, Mapping):
            raise ValueError(f"entry {number} is {entry!r}, not a mapping of settings")
        name = entry.get("name") or entry.get("case") or f"entry {number}"
        for job in jobs.find_jobs(entry):
            role = f", {job.name}" if job.name else ""
            listed_jobs.append(dataclasses.replace(job, name=f"{name}{role}", is_listed=True))
    return listed_jobs


def _parse(text: str, suffix: str) -> Any:
    if suffix not in (".yaml", ".yml"):
        try:
            return json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"is not JSON: {error}") from None
    try:
        import yaml
    except ImportError:
        raise ValueError("needs PyYAML (pip install pyyaml), which JSON does not") from None
    # A class of our own, because constructors are added to the class. Tags of frameworks, such as
    # !override, change no setting's value, so they are ignored.
    kind = type("Loader", (yaml.SafeLoader,), {})
    kind.add_multi_constructor("", _construct)
    try:
        loader = kind(text)
        node = loader.get_single_node()
        if node is None:
            return None
        _check_size(node)
        return loader.construct_document(node)
    # Constructors raise errors of their own, such as for dates.
    except (yaml.YAMLError, AttributeError, TypeError) as error:
        raise ValueError(f"is not YAML: {error}") from None


def _check_size(document: Any) -> None:
    """Raise a ValueError for a YAML document whose aliases stand for more than `LARGEST` values.

    Args:
        document: node of the document, in which aliases are the nodes that they refer to.
    """
    # By id of the node: each node is counted once, and summed as often as it is referred to.
    sizes: dict[int, int] = {}

    def size(node: Any) -> int:
        if id(node) not in sizes:
            sizes[id(node)] = 1
            for part in node.value if isinstance(node.value, list) else ():
                # a mapping has pairs of nodes
                sizes[id(node)] += sum(map(size, part if isinstance(part, tuple) else (part,)))
        return sizes[id(node)]

    # A document without aliases may be as large as it is.
    if size(document) > max(LARGEST, len(sizes)):
        raise ValueError(
            f"holds more than {LARGEST} values once its aliases (*NAME) are replaced; write out "
            "the settings of the job"
        )


def _construct(loader: Any, _: str, node: Any) -> Any:
    """Construct the value of a YAML node as if it had no tag."""
    kind = type(node).__name__.removesuffix("Node").lower()
    deep = {} if kind == "scalar" else {"deep": True}
    return getattr(loader, f"construct_{kind}")(node, **deep)
