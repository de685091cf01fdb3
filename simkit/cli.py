"""The command line: `simkit COMMAND …`. A command is a file of `simkit/commands/`, imported when it is asked for.

Exit codes: 0 answered (also "does not fit"), 1 internal fault, 2 bad input, 3 does not fit and `--fail-if-unfit` was
given, 130 interrupted. What went wrong is one line on standard error, never a traceback unless `--debug` is given.
"""

from __future__ import annotations

import os
import sys

from simkit.errors import InputError, RefusedError, unknown

OK, FAULT, BAD_INPUT, UNFIT, INTERRUPTED = 0, 1, 2, 3, 130
COMMANDS = "simkit.commands"


def main(argv: list[str] | None = None) -> int:
    """Runs one command and returns its exit code; `argv` defaults to the arguments of the process."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in arguments
    try:
        code = _run([a for a in arguments if a != "--debug"])
        sys.stdout.flush()
        return code
    except (InputError, RefusedError) as error:
        if debug:
            raise
        return _complain(" ".join(str(error).split()), BAD_INPUT)
    except KeyboardInterrupt:
        return _complain("interrupted", INTERRUPTED)
    except BrokenPipeError:
        # The reader (head, less) has gone; Python would complain once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else OK
    except Exception as error:  # the last line of defence: a user never sees a traceback unasked
        if debug:
            raise
        what = " ".join(str(error).split())[:200]
        return _complain(
            f"internal fault ({type(error).__name__}: {what}); please report it, --debug shows the traceback", FAULT
        )


def _run(arguments: list[str]) -> int:
    from simkit import plugins

    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        sys.stdout.write(overview())
        return OK
    if arguments[0] in ("-V", "--version"):
        from simkit import __version__

        sys.stdout.write(f"simkit {__version__}\n")
        return OK
    name, *rest = arguments
    if name.startswith("-"):
        raise InputError(
            "comes before the command",
            value=name,
            hint="write `simkit COMMAND FLAGS`; `simkit --help` lists the commands",
        )
    if name not in plugins.names(COMMANDS):
        raise unknown("command", name, plugins.names(COMMANDS), see="simkit --help")
    command = plugins.get(COMMANDS, name)
    code: int = command.run(_parse(name, rest))
    return code


def _parse(name: str, rest: list[str]):  # type: ignore[no-untyped-def]
    from simkit import plugins
    from simkit.commands import _flags

    command = plugins.get(COMMANDS, name)
    parser = _flags.Parser(prog=f"simkit {name}", description=command.__doc__)
    command.configure(parser)
    _flags.add_general(parser)
    return _flags.parse(parser, rest)


def overview() -> str:
    """The text of `simkit --help`: one line a command."""
    from simkit import plugins

    names = plugins.names(COMMANDS)
    summaries = {name: (plugins.get(COMMANDS, name).__doc__ or "").strip().splitlines()[0] for name in names}
    lines = [f"  {name:<10} {summary}" for name, summary in summaries.items()]
    return "\n".join(
        [
            "simkit predicts how deep-learning work runs on given hardware.",
            "",
            "usage: simkit COMMAND [FLAGS]      `simkit COMMAND --help` lists the flags of a command",
            "",
            *lines,
            "",
            "examples:",
            "  simkit predict --cluster 50x3080",
            "  simkit predict --cluster 8x4x2080ti --inter 10gbe --model bert-large --method acp-sgd --rank 32",
            "  simkit compare --cluster 50x3080 --cluster 4xH100-PCIe",
            "",
            "exit codes: 0 answered, 1 internal fault, 2 bad input, 3 does not fit and --fail-if-unfit was given",
            "",
        ]
    )


def _complain(line: str, code: int) -> int:
    # A name may hold anything; escape what would move the cursor or start a new line.
    shown = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in line)
    try:
        sys.stderr.write(f"simkit: {shown}\n")
        sys.stderr.flush()
    except OSError:
        pass
    return code


if __name__ == "__main__":
    sys.exit(main())
