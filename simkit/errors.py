"""What can go wrong on the user's side, said in one line that names the way out."""

from __future__ import annotations

from collections.abc import Iterable


class SimkitError(Exception):
    """Base of everything simkit raises on purpose."""


class InputError(SimkitError):
    """Malformed input: prints as ``file: key = value what; hint`` on one line, exit code 2."""

    def __init__(self, what: str, *, file: str = "", key: str = "", value: object = None, hint: str = "") -> None:
        self.what, self.file, self.key, self.value, self.hint = what, file, key, value, hint
        super().__init__(self.line())

    def line(self) -> str:
        head = f"{self.file}: " if self.file else ""
        subject = ""
        if self.key and self.value is not None:
            subject = f"{self.key} = {_short(self.value)} "
        elif self.key:
            subject = f"{self.key} "
        elif self.value is not None:
            subject = f"{_short(self.value)} "
        tail = f"; {self.hint}" if self.hint else ""
        return " ".join(f"{head}{subject}{self.what}{tail}".split())


class RefusedError(SimkitError):
    """A well-formed scenario that simkit cannot predict; `validate` counts it with its reason."""


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:76] + "...'"


def nearest(name: str, known: Iterable[str], *, count: int = 3) -> list[str]:
    """The known names that look most like `name`, best first."""
    import difflib

    names = list(known)
    folded = {n.lower(): n for n in names}
    hits = difflib.get_close_matches(str(name).lower(), list(folded), n=count, cutoff=0.5)
    return [folded[h] for h in hits]


def unknown(
    kind: str, name: object, known: Iterable[str], *, file: str = "", key: str = "", see: str = ""
) -> InputError:
    """The InputError for a name that is none of the known ones, with the nearest of them."""
    names = list(known)
    close = nearest(str(name), names)
    if close:
        hint = f"did you mean {' or '.join(repr(c) for c in close)}?"
    elif len(names) <= 12:
        hint = f"one of {', '.join(sorted(names))}"
    else:
        hint = f"`{see}` lists them" if see else f"one of {len(names)} known names"
    return InputError(f"is no known {kind}", file=file, key=key or kind, value=name, hint=hint)
