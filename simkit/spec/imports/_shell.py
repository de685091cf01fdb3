"""Reads the arguments of a training program out of a shell script, without running it.

Understood: line continuations, comments, assignments of scalars and arrays, ``$NAME ${NAME} ${NAME:-default}``,
``$((integer arithmetic))``, ``--flag value`` and ``--flag=value``. A variable that is set to different values in the
branches of an ``if`` or ``case``, or nowhere in the file, stays unresolved, and so does a flag of that kind.
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
_OPENERS, _CLOSERS = frozenset({"if", "case"}), frozenset({"fi", "esac"})
_SEPARATORS = frozenset({"(", ")", ";", "&", "|", "<", ">", "&&", "||", "\n"})
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
    """What a script passes on.

    flags: {flag with dashes: its value, None for none}, the last one winning as in argparse. unsure: flags that get
    different values in the branches of the script; branched: those that only a branch gives. open: variables without
    a value, as they are written.
    """

    flags: dict[str, str | None] = field(default_factory=dict)
    unsure: set[str] = field(default_factory=set)
    branched: set[str] = field(default_factory=set)
    open: list[str] = field(default_factory=list)


def arguments(text: str) -> Arguments:
    """The Arguments of a script."""
    reader = _Reader()
    for raw in _tokens(_uncommented(text)):
        reader.token(raw)
    reader.close()
    reader.found.open = list(dict.fromkeys(reader.found.open))
    return reader.found


class _Reader:
    """Goes through the tokens once; `depth` counts the branches (if, case) around them."""

    def __init__(self) -> None:
        self.found = Arguments()
        self.variables: dict[str, str] = {}
        self.ambiguous: set[str] = set()
        self.depth = 0
        self.waiting = ""

    def token(self, raw: str) -> None:
        if raw in _SEPARATORS:
            self.close()
            return
        if raw in _OPENERS or raw in _CLOSERS:
            self.close()
            self.depth = max(self.depth + (1 if raw in _OPENERS else -1), 0)
            return
        assigned = _ASSIGNMENT.fullmatch(raw)
        if assigned:
            self.close()
            self._assign(assigned[1], assigned[2], _unquoted(assigned[3]))
            if "--" in assigned[3]:
                self._several(_unquoted(assigned[3]))
        elif raw[:1] in "\"'" and re.search(r"\s--[A-Za-z]|^--[A-Za-z][\w-]*\s", _unquoted(raw)):
            self._several(_unquoted(raw))
        else:
            self._word(_unquoted(raw))

    def _several(self, text: str) -> None:
        """A quoted list of arguments."""
        for raw in _tokens(text):
            self._word(_unquoted(raw))
        self.close()

    def _word(self, word: str) -> None:
        name, equals, value = word.partition("=")
        if _FLAG.fullmatch(name):
            self.close()
            self.waiting = name.replace("_", "-")
            if equals:
                self._set(self._resolved(value))
            return
        resolved = self._resolved(word)
        if self.waiting:
            self._set(resolved)

    def close(self) -> None:
        """No value follows any more."""
        if self.waiting:
            self._set(None)

    def _set(self, value: str | None) -> None:
        flag, found = self.waiting, self.found
        self.waiting = ""
        if not self.depth:
            found.unsure.discard(flag)
            found.branched.discard(flag)
        elif flag not in found.flags:
            found.branched.add(flag)
        elif found.flags[flag] != value:
            found.unsure.add(flag)
        found.flags[flag] = value

    def _assign(self, name: str, sign: str, text: str) -> None:
        """Outside of branches the last value holds; within them two different values leave the variable open."""
        if sign == "+=":
            return
        value = self._substituted(text)
        if self.depth and self.variables.get(name, value) != value:
            self.ambiguous.add(name)
        elif not self.depth:
            self.ambiguous.discard(name)
        self.variables[name] = value

    def _substituted(self, text: str) -> str:
        def value(match: re.Match[str]) -> str:
            name, default = match[1] or match[3], match[2]
            if name in self.ambiguous:
                return match[0]
            known = self.variables.get(name, default if default is not None else match[0])
            return known if len(known) <= LONGEST else match[0]

        for _ in range(4):
            new = _VARIABLE.sub(value, text)
            if new == text:
                break
            text = new
        return re.sub(r"\$\(\(([^)]*)\)\)", self._computed, text)

    def _computed(self, match: re.Match[str]) -> str:
        """Integer arithmetic, in which bash reads bare names as variables; the text itself where it is none."""
        body = re.sub(r"[A-Za-z_]\w*", lambda m: self.variables.get(m[0], m[0]), match[1])
        try:
            return str(_evaluated(ast.parse(body.replace("/", "//").strip(), mode="eval").body))
        except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
            return match[0]

    def _resolved(self, text: str) -> str:
        """The text with its variables put in; what stays open is noted."""
        value = self._substituted(text)
        for match in _UNRESOLVED.finditer(value):
            name = match[0].strip("${}").removesuffix("[@]").removesuffix("[*]")
            if name not in self.variables or name in self.ambiguous:
                self.found.open.append(match[0])
        return value


def _evaluated(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
        found = _ARITHMETIC[type(node.op)](_evaluated(node.left), _evaluated(node.right))
        if abs(found) < 10**18:
            return found
    raise ValueError


def _uncommented(text: str) -> str:
    """Comments gone (a # at the start of a word), continuations joined."""
    bare = re.sub(r"(?m)(^|[ \t])#.*$", r"\1", text)
    return re.sub(r"\\[ \t]*\r?\n", " ", bare)


def _tokens(text: str) -> Iterator[str]:
    return (m[0] for m in _TOKEN.finditer(text))


def _unquoted(word: str) -> str:
    return re.sub(r"\"((?:[^\"\\]|\\.)*)\"|'([^']*)'", lambda m: m[1] if m[1] is not None else m[2], word)
