"""Code blocks and inline commands of the documentation, and the words of their commands."""

from __future__ import annotations

import ast
import dataclasses
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# In fences, or indented by four spaces.
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$|(?<=\n\n)((?: {4}[^\n]*\n)+)", re.M | re.S)
STARTS = r"python|pytest|make|megatron-hecate|torchrun|srun|pip"
INLINE = re.compile(rf"`((?:[A-Z_]+=[^\s`]* )*(?:\.venv/bin/)?(?:{STARTS})(?: [^`]*)?)`")
# What a reader fills in. Of torchrun and srun nothing is needed here.
PLACEHOLDERS = {
    r"((?:torchrun|srun)(?: -\S+ \d+)?) \.\.\.": r"\1",
    r"<your usual arguments>|<Megatron's arguments>": "--bf16",
    r"<Megatron-LM>": "checkout",
    r"\[(-[^]]*)\]": r"\1",
    r"(?<!\S)\.\.\.": "FILLED",
}


@dataclasses.dataclass(frozen=True)
class Page:
    """Page of the documentation, or the usage in an example.

    Args:
        name: path in the checkout.
        text: its text; of an example the docstring, or the comments.
    """

    name: str
    text: str

    def blocks(self) -> list[tuple[str, str]]:
        """Return language and text of each code block, in order."""
        return [(m[1] or "", m[2] or m[3]) for m in BLOCK.finditer(self.text)]

    def inline(self) -> list[str]:
        """Return the commands inside of sentences and tables."""
        return [" ".join(found.split()) for found in INLINE.findall(BLOCK.sub("", self.text))]


def pages() -> Iterator[Page]:
    """Read all pages but the changelog, which is about the past."""
    folders = ("", "docs", "kernels", "patches", "tests", "tests/data", "bench/data")
    for path in sorted(path for folder in folders for path in (ROOT / folder).glob("*.md")):
        if path.name != "CHANGELOG.md":
            yield Page(str(path.relative_to(ROOT)), path.read_text())
    for path in sorted((ROOT / "examples").iterdir()):
        if path.suffix == ".py":
            text = ast.get_docstring(ast.parse(path.read_text())) or ""
            yield Page(f"examples/{path.name}", f"{text}\n")
        elif path.suffix in (".sh", ".yaml"):
            lines = re.findall(r"^#   (.*)\n", path.read_text(), re.M)
            yield Page(f"examples/{path.name}", "\n\n" + "".join(f"    {x}\n" for x in lines))


def block(page: str, index: int) -> str:
    """Return the text of a page's block."""
    (found,) = (found for found in pages() if found.name == page)
    return found.blocks()[index][1]


def commands(text: str) -> Iterator[list[str]]:
    """Return the words of each command, without its variables and with placeholders filled."""
    for pattern, value in PLACEHOLDERS.items():
        text = re.sub(pattern, value, text)
    for line in text.replace("\\\n", " ").splitlines():
        words = shlex.split(line.partition(" > ")[0], comments=True)
        while words and re.match(r"[A-Z_]+=", words[0]):
            del words[0]
        if words:
            yield [words[0].removeprefix(".venv/bin/"), *words[1:]]
