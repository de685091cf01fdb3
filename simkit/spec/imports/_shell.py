"""Reads the arguments of a training program out of a shell script, without running it.

Understood: line continuations, comments, assignments of scalars and arrays, ``$NAME ${NAME} ${NAME:-default}``,
``$((integer arithmetic))``, ``--flag value`` and ``--flag=value``. A variable that is set to different values in the
branches of an ``if`` or ``case``, or nowhere in the file, stays unresolved.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

_TOKEN = re.compile(
    r"""(?:"(?:[^"\\]|\\.)*"|'[^']*'|\$\(\([^)]*\)\)|\$\{[^}]*\}|\\.|[^\s"'();&|<>])+|\(|\)|&&|\|\||[;&|<>]|\n""",
    re.DOTALL,
)
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?=)(.*)", re.DOTALL)
_VARIABLE = re.compile(r"\$(?:\{([A-Za-z_]\w*)(?::?[-=]([^}]*))?\}|([A-Za-z_]\w*))")
_UNRESOLVED = re.compile(r"\$(?:\{[^}]*\}|\w+|[@*#?!]|\()")
_FLAG = re.compile(r"--[A-Za-z][\w-]*")
_OPENERS, _CLOSERS = frozenset({"if", "case", "for", "while", "until"}), frozenset({"fi", "esac", "done"})
_ARITHMETIC: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
LONGEST = 300
"""Longer values are lists of arguments, read where they are assigned; they are not put in where they are used."""


@dataclass(slots=True)
class Arguments:
    """What a script passes on: {flag with dashes: its value, None for none}, the last one winning as in argparse;
    names of the variables that stay open; the bare words (programs, positional arguments)."""

    flags: dict[str, str | None] = field(default_factory=dict)
    open: list[str] = field(default_factory=list)
    words: list[str] = field(default_factory=list)


def arguments(text: str) -> Arguments:
    """The Arguments of a script."""
    found, variables, ambiguous = Arguments(), {}, set()  # type: Arguments, dict[str, str], set[str]
    depth, waiting = 0, ""
    for raw in _tokens(_uncommented(text)):
        word = _unquoted(raw)
        if raw in _OPENERS or raw in _CLOSERS:
            depth = max(depth + (1 if raw in _OPENERS else -1), 0)
        assigned = _ASSIGNMENT.fullmatch(raw)
        if assigned and not raw.startswith("-"):
            waiting = ""
            _assign(assigned, variables, ambiguous, depth)
            inner = _unquoted(assigned[3])
            if "--" in inner:
                for part in _tokens(inner):
                    waiting = _take(_unquoted(part), waiting, found, variables, ambiguous)
                waiting = ""
            continue
        if raw in ("(", ")", ";", "&", "|", "<", ">", "&&", "||", "\n"):
            waiting = ""
            continue
        if raw[:1] in "\"'" and re.search(r"\s--[A-Za-z]|^--[A-Za-z][\w-]*\s", word):
            for part in _tokens(word):
                waiting = _take(_unquoted(part), waiting, found, variables, ambiguous)
            continue
        waiting = _take(word, waiting, found, variables, ambiguous)
    found.open = list(dict.fromkeys(found.open))
    return found


def _take(word: str, waiting: str, found: Arguments, variables: Mapping[str, str], ambiguous: set[str]) -> str:
    """Adds one word; returns the flag that still waits for its value."""
    name, equals, value = word.partition("=")
    if _FLAG.fullmatch(name):
        flag = name.replace("_", "-")
        found.flags[flag] = _resolved(value, variables, ambiguous, found) if equals else None
        return "" if equals else flag
    resolved = _resolved(word, variables, ambiguous, found)
    if waiting and not resolved.startswith("--"):
        found.flags[waiting] = resolved
    else:
        found.words.append(resolved)
    return ""


def _uncommented(text: str) -> str:
    """Continuations joined, comments gone (a # at the start of a word)."""
    joined = re.sub(r"\\[ \t]*\r?\n", " ", text)
    return re.sub(r"(?m)(^|[ \t])#.*$", r"\1", joined)


def _tokens(text: str) -> Iterator[str]:
    return (m[0] for m in _TOKEN.finditer(text))


def _unquoted(word: str) -> str:
    return re.sub(r"\"((?:[^\"\\]|\\.)*)\"|'([^']*)'", lambda m: m[1] if m[1] is not None else m[2], word)


def _assign(match: re.Match[str], variables: dict[str, str], ambiguous: set[str], depth: int) -> None:
    """Outside of branches the last value holds; within them two different values leave the variable open."""
    name, value = match[1], _substituted(_unquoted(match[3]), variables, ambiguous)
    if match[2] == "+=":
        return
    if depth and variables.get(name, value) != value:
        ambiguous.add(name)
    elif not depth:
        ambiguous.discard(name)
    variables[name] = value


def _substituted(text: str, variables: Mapping[str, str], ambiguous: set[str]) -> str:
    def value(match: re.Match[str]) -> str:
        name, default = match[1] or match[3], match[2]
        if name in ambiguous:
            return match[0]
        known = variables.get(name, default if default is not None else match[0])
        return known if len(known) <= LONGEST else match[0]

    for _ in range(4):
        new = _VARIABLE.sub(value, text)
        if new == text:
            break
        text = new
    return re.sub(r"\$\(\(([^)]*)\)\)", lambda m: _computed(m, variables), text)


def _computed(match: re.Match[str], variables: Mapping[str, str]) -> str:
    """Integer arithmetic, in which bash reads bare names as variables; the text itself where it is none."""
    body = re.sub(r"[A-Za-z_]\w*", lambda m: variables.get(m[0], m[0]), match[1])
    try:
        tree = ast.parse(body.replace("/", "//").strip(), mode="eval")
        return str(_evaluated(tree.body))
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return match[0]


def _evaluated(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
        found = _ARITHMETIC[type(node.op)](_evaluated(node.left), _evaluated(node.right))
        if abs(found) < 10**18:
            return found
    raise ValueError


def _resolved(text: str, variables: Mapping[str, str], ambiguous: set[str], found: Arguments) -> str:
    """The text with its variables put in; what stays open is noted."""
    value = _substituted(text, variables, ambiguous)
    for match in _UNRESOLVED.finditer(value):
        name = match[0].strip("${}").removesuffix("[@]").removesuffix("[*]")
        if name not in variables or name in ambiguous:
            found.open.append(match[0])
    return value
