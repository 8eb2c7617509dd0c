"""Split the text of a shell script into commands."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator

from megatron_hecate.tools.files.variables import arithmetic

# name of the variable that stands for the output of a command
COMMAND = "a_command"
HERE_DOCUMENT = re.compile(
    r"(?<!<)<<(?!<)(?P<tabs>-?)[ \t]*"
    r"(?:(?P<quote>['\"])(?P<quoted>.*?)(?P=quote)|(?P<plain>[\w.-]+))"
)
PUNCTUATION = "\n;|&()<>"


def looks_like_script(text: str, suffix: str) -> bool:
    """Return whether a file is a shell script, by its suffix, its first line or its flags."""
    if suffix in (".sh", ".bash", ".slurm", ".sbatch", ".zsh", ".job"):
        return True
    if suffix in (".json", ".yaml", ".yml"):
        return False
    first = text.partition("\n")[0]
    is_shell = re.fullmatch(r"#!.*\b(ba|z|da|k)?sh\b.*", first) is not None
    return is_shell or re.search(r"\s--[a-z][\w-]+", text) is not None


def split_commands(text: str) -> Iterator[tuple[str, list[str]]]:
    """Yield the connector in front of each command (``&&``, ``||`` or nothing), and its words.

    The assignment of an array is one word. Comments and redirections are left out.
    """
    words: list[str] = []
    # elements of an array that is open
    array: list[str] | None = None
    connector = ""
    for token in _tokens(text):
        if not _is_punctuation(token):
            if array is None:
                words.append(token)
            else:
                array.append(token)
            continue
        for mark in token:
            if mark == "(" and words and words[-1].endswith("=") and array is None:
                array = []
            elif mark == ")" and array is not None:
                words[-1] += _joined(array)
                array = None
            elif mark in "\n;|&()" and array is None and words:
                yield connector, words
                words = []
                connector = ""
        if array is None and not words:
            connector = next((mark for mark in ("&&", "||") if mark in token), connector)
    if words:
        yield connector, words


def _simplify(text: str) -> str:
    """Return the text of a script without what a lexer of words cannot read.

    Continued lines are joined, comments and here-documents are dropped, and variables replace the
    output of commands and arithmetic.
    """
    result: list[str] = []
    at = 0
    # open quote, or nothing
    quote = ""
    # whether a word may begin here
    start = True
    # here-documents that the current line opens: whether tabs are stripped, and the last line
    documents: list[tuple[bool, str]] = []
    while at < len(text):
        char = text[at]
        if char == "\\" and quote != "'":
            if text[at + 1 : at + 2] != "\n":
                result.append(text[at : at + 2])
            at += 2
            continue
        if char == "#" and not quote and start:
            at = _end_of_line(text, at)
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
        # drop the number of the stream in ``2>file``
        if start and char in "12" and not quote and text[at + 1 : at + 2] == ">":
            at += 1
            continue
        start = char in " \t\n;|&("
        result.append(char)
        at += 1
    return "".join(result)


def _tokens(text: str) -> Iterator[str]:
    """Yield words and runs of punctuation, without redirections."""
    lexer = shlex.shlex(_simplify(text), posix=True, punctuation_chars=PUNCTUATION)
    lexer.whitespace = " \t\r"
    lexer.whitespace_split = True
    lexer.commenters = ""
    is_target = False
    try:
        for token in lexer:
            if not _is_punctuation(token):
                if not is_target:
                    yield token
                is_target = False
                continue
            if token[0] in "<>":
                # the next word is the target, unless the line ends
                is_target = "\n" not in token
                if is_target:
                    continue
            yield token
    except ValueError:
        # a quote stays open to the end of the script: the commands before it are still right
        return


def _is_punctuation(token: str) -> bool:
    return token != "" and set(token) <= set(PUNCTUATION)


def _joined(array: list[str]) -> str:
    """Return the elements of an array as one text, quoted unless variables must be expanded."""
    if any("$" in element for element in array):
        return " ".join(array)
    return shlex.join(array)


def _end_of_line(text: str, at: int) -> int:
    end = text.find("\n", at)
    if end < 0:
        return len(text)
    return end


def _after_document(text: str, at: int, end: str, *, strips_tabs: bool) -> int:
    """Return the position of the line break after a here-document.

    Args:
        text: text of the script.
        at: position of the line break before the document.
        end: line that ends the document.
        strips_tabs: whether tabs may precede ``end``.
    """
    while at < len(text):
        begin = at + 1
        at = _end_of_line(text, begin)
        line = text[begin:at]
        if strips_tabs:
            line = line.lstrip("\t")
        if line == end:
            return at
    return len(text)


def _after_substitution(text: str, at: int) -> int:
    """Return the position after ``$(...)`` or backticks that begin at ``at``."""
    if text[at] == "`":
        end = text.find("`", at + 1)
        return len(text) if end < 0 else end + 1
    depth = 1
    at += 2
    while at < len(text) and depth:
        depth += {"(": 1, ")": -1}.get(text[at], 0)
        at += 1
    return at
