"""Flags made from the vocabulary, and a parser whose every complaint is one line with the way out."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

from simkit.errors import InputError, unknown
from simkit.spec.scenario import FIELDS, FieldSpec, Scenario

TRUTH = ("true", "false", "yes", "no", "on", "off", "1", "0")
GROUP_TITLES = {"job": "the job", "cost": "money, length and the rest"}


class Parser(argparse.ArgumentParser):
    """argparse without abbreviations, whose errors are InputError."""

    def __init__(self, **options: Any) -> None:
        options.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(allow_abbrev=False, **options)
        self.usage = "%(prog)s [FLAGS]"

    def error(self, message: str) -> NoReturn:
        message = re.sub(r"^argument ([^:]+): ", r"\1 ", message)
        raise InputError(message, hint=f"`{self.prog} --help` lists the flags")

    def flags(self) -> list[str]:
        return [o for action in self._actions for o in action.option_strings if o.startswith("--")]


def parse(parser: Parser, arguments: list[str]) -> argparse.Namespace:
    """The namespace of `arguments`. Raises InputError, with the nearest flag, for a flag the command does not know."""
    flags = parser.flags()
    cleaned = list(_normal(arguments, set(flags)))
    for token in cleaned:
        if token == "--":
            break
        name = token.partition("=")[0]
        if token.startswith("--") and name not in flags:
            raise unknown("flag", name, flags, key="flag", see=f"{parser.prog} --help")
    args, extra = parser.parse_known_args(cleaned)
    if extra:
        hint = f"`{parser.prog} --help` lists the flags"
        if re.fullmatch(r"(\d+x)+\w[\w.+-]*", extra[0]):
            hint = f"write --cluster {extra[0]}"
        raise InputError("is not expected here", key="argument", value=extra[0], hint=hint)
    return args


def _normal(arguments: list[str], flags: set[str]) -> Iterator[str]:
    """``--micro_batch`` as ``--micro-batch``; a bare Boolean flag as ``=true``, ``--no-NAME`` as ``=false``."""
    booleans = {f"--{name.replace('_', '-')}" for name, spec in FIELDS.items() if spec.kind == "bool"} & flags
    tokens = iter(range(len(arguments)))
    for i in tokens:
        token = arguments[i]
        if token == "--":
            yield from arguments[i:]
            return
        if token.startswith("--"):
            name, equals, value = token.partition("=")
            name = name.replace("_", "-")
            if name.startswith("--no-") and f"--{name[5:]}" in booleans and not equals:
                yield f"--{name[5:]}=false"
                continue
            if name in booleans and not equals:
                given = i + 1 < len(arguments) and arguments[i + 1].lower() in TRUTH
                yield f"{name}={arguments[next(tokens)] if given else 'true'}"
                continue
            token = f"{name}{equals}{value}"
        yield token


def add_fields(parser: Parser, *, several: bool = False, skip: tuple[str, ...] = ()) -> None:
    """One flag a field of the vocabulary, by group. several: a flag may be repeated and may hold a comma list."""
    groups: dict[str, Any] = {}
    for spec in FIELDS.values():
        if spec.name in skip:
            continue
        title = GROUP_TITLES.get(spec.group, spec.group)
        group = groups.setdefault(title, None) or parser.add_argument_group(title)
        groups[title] = group
        action = "append" if several else "store"
        group.add_argument(
            f"--{spec.name.replace('_', '-')}",
            dest=f"field_{spec.name}",
            action=action,
            metavar=_metavar(spec),
            help=_help(spec),
        )


def _metavar(spec: FieldSpec) -> str:
    if spec.kind == "bool":
        return "BOOL"
    return {"int": "N", "float": "X"}.get(spec.kind, "NAME")


def _help(spec: FieldSpec) -> str:
    text = spec.help
    if spec.choices:
        text += f": {', '.join(spec.choices)}"
    if spec.kind == "bool":
        text += f" (also --no-{spec.name.replace('_', '-')})"
    return text.replace("%", "%%")


def add_scenario(parser: Parser, *, several: bool = False) -> None:
    """What names a scenario: FILE, --set, the fields, --profiles and --models."""
    parser.usage = "%(prog)s [FILE] [FLAGS]"
    parser.add_argument("file", nargs="?", metavar="FILE", help="scenario file (.yaml .toml .json); flags win over it")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="one key of the scenario; repeatable, wins over FILE",
    )
    parser.add_argument(
        "--from",
        dest="sources",
        action="append",
        default=[],
        metavar="FILE",
        help="settings of Megatron-LM (a script), DeepSpeed, accelerate or torchtitan; repeatable, all else wins",
    )
    add_fields(parser, several=several)
    add_profiles(parser)
    parser.add_argument(
        "--models", action="append", default=[], metavar="FILE.csv", help="table of further architectures; repeatable"
    )


def add_profiles(parser: Parser) -> None:
    parser.add_argument(
        "--profiles",
        action="append",
        default=[],
        metavar="DIR",
        help="folder of your own profiles; repeatable, SIMKIT_PROFILES too",
    )


def add_forms(parser: Parser, *forms: str, html: str = "") -> None:
    """Output forms, one at a time: ``json markdown csv``; html: what its picture shows."""
    group = parser.add_argument_group("output")
    one = group.add_mutually_exclusive_group()
    texts = {"json": "print one JSON object and nothing else", "markdown": "print Markdown", "csv": "print CSV"}
    for form in forms:
        one.add_argument(f"--{form}", action="store_true", help=texts[form])
    if html:
        group.add_argument("--html", metavar="FILE", help=f"also write a self-contained page: {html} (extra `plot`)")


def add_general(parser: Parser) -> None:
    parser.add_argument("--quiet", action="store_true", help="head lines only, no remarks on standard error")
    parser.add_argument("--debug", action="store_true", help="show the traceback of a fault")


def given(args: argparse.Namespace) -> dict[str, Any]:
    """{field: text or list of texts} of the flags that were given."""
    fields = {name: getattr(args, f"field_{name}", None) for name in FIELDS}
    return {name: value for name, value in fields.items() if value is not None}


def values(name: str, texts: list[str]) -> list[Any]:
    """The entries of a flag that may be repeated and may hold comma lists."""
    found = [part.strip() for text in texts for part in text.split(",")]
    if not all(found):
        raise InputError("holds an empty entry", key=name, value=",".join(texts), hint="separate values by one comma")
    return found


def profiles(args: argparse.Namespace) -> tuple[str, ...]:
    """The folders of --profiles; those of SIMKIT_PROFILES are added where profiles are looked up."""
    for folder in args.profiles:
        if not os.path.isdir(folder):
            raise InputError(
                "is no folder", key="--profiles", value=folder, hint="give a folder of profile files (.toml)"
            )
    return tuple(args.profiles)


def base_values(args: argparse.Namespace) -> dict[str, Any]:
    """The values of FILE with --set put in."""
    from simkit.spec.files import apply_set, read_scenario

    if args.file and not os.path.exists(args.file) and re.fullmatch(r"(\d+x)+\w[\w.+-]*", args.file):
        raise InputError("does not exist", file=args.file, hint=f"for a cluster write --cluster {args.file}")
    values: dict[str, Any] = read_scenario(args.file) if args.file else {}
    return apply_set(values, args.set)


def base(args: argparse.Namespace, values: Mapping[str, Any] | None = None) -> Scenario:
    """The scenario of --from, FILE and --set, over which `values` win."""
    fields = base_values(args) | dict(values or {})
    if not args.sources:
        return Scenario.of(fields, profiles=profiles(args), models=tuple(args.models))
    from simkit.spec.imports import scenario as imported

    return imported(args.sources, fields, profiles=profiles(args), models=tuple(args.models))


def scenario(args: argparse.Namespace, **fields: Any) -> Scenario:
    """The scenario of one command line: --from, then FILE, then --set, then flags."""
    return base(args, given(args) | fields)
