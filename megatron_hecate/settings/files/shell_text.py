"""Text of shell scripts, made simple enough to be split into words."""

from __future__ import annotations

import re

from megatron_hecate.settings.files.variables import arithmetic

COMMAND = "a_command"  # the name of the variable that stands for the output of a command
HERE_DOCUMENT = re.compile(
    r"(?<!<)<<(?!<)(?P<tabs>-?)[ \t]*(?:(?P<quote>['\"])(?P<quoted>.*?)(?P=quote)|(?P<plain>[\w.-]+))"
)


def simplified(text: str) -> str:
    """Join continued lines, drop comments and here-documents, and put variables in the place of the output of commands
    and of arithmetic."""
    result: list[str] = []
    at, quote, start = 0, "", True
    # here-documents that the running line opens: whether tabs are stripped, and the last line
    documents: list[tuple[bool, str]] = []
    while at < len(text):
        char = text[at]
        if char == "\\" and quote != "'":
            if text[at + 1 : at + 2] != "\n":
                result.append(text[at : at + 2])
            at += 2
            continue
        if char == "#" and not quote and start:
            at = text.find("\n", at) if "\n" in text[at:] else len(text)
            continue
        if quote != "'" and (text.startswith("$(", at) or char == "`"):
            after = _after_substitution(text, at)
            result.append(arithmetic(text[at:after]) or f"${{{COMMAND}}}")
            at = after
            start = False
            continue
        if char in "\"'" and quote in ("", char):
            quote = "" if quote else char
        if not quote and (opened := HERE_DOCUMENT.match(text, at)) is not None:
            documents.append((opened["tabs"] == "-", opened["quoted"] or opened["plain"] or ""))
            at = opened.end()
            continue
        if char == "\n" and not quote and documents:
            for strips_tabs, end in documents:
                at = _after_document(text, at, end, strips_tabs=strips_tabs)
            documents = []
            result.append("\n")
            start = True
            continue
        if start and char in "12" and not quote and text[at + 1 : at + 2] == ">":
            at += 1  # the number of a stream
            continue
        start = char in " \t\n;|&("
        result.append(char)
        at += 1
    return "".join(result)


def _after_document(text: str, at: int, end: str, *, strips_tabs: bool) -> int:
    """Return the position of the line break after the here-document that begins behind the line break at ``at``.

    Args:
        text: of the script.
        at: position of a line break.
        end: the line that ends the document.
        strips_tabs: whether tabs may stand before it.
    """
    while 0 <= at < len(text):
        begin = at + 1
        at = text.find("\n", begin)
        line = text[begin:] if at < 0 else text[begin:at]
        if (line.lstrip("\t") if strips_tabs else line) == end:
            return len(text) if at < 0 else at
    return len(text)


def _after_substitution(text: str, at: int) -> int:
    """Return the position after ``$(...)`` or backticks that begin at ``at``."""
    if text[at] == "`":
        end = text.find("`", at + 1)
        return len(text) if end < 0 else end + 1
    depth, at = 1, at + 2
    while at < len(text) and depth:
        depth += {"(": 1, ")": -1}.get(text[at], 0)
        at += 1
    return at
