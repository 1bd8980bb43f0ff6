"""The command line: sparring train | evaluate | compare | reproduce | diagnose | cluster | recommend | index | export | recipes | ..."""

from __future__ import annotations

import argparse
import importlib
import os
import re
import sys
import time
from collections.abc import Callable, Sequence

from sparring.core.errors import UserError, disk_full

__all__ = ["main"]

# Command -> module of this package and function in it, imported when it is called.
_OWN = (
    "prepare",
    "train",
    "evaluate",
    "compare",
    "diagnose",
    "reproduce",
    "cluster",
    "recommend",
    "index",
    "serve",
    "export",
    "demo",
)
COMMANDS = {name: f"{name}:{name}" for name in (*_OWN, "bench")} | {"recipes": "listing:recipes"}
COMMANDS |= {f"data {what}": f"listing:data_{what}" for what in ("list", "get", "show")}

DISK_SECONDS = int(
    os.environ.get("SPARRING_DISK_SECONDS", "60")
)  # that someone has to free a full disk before a restart
# Read when torch is first imported. Threads that spin while they wait are many times slower as soon as a core is shared.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code. Bad input is one line on stderr and code 2; SPARRING_DEBUG=1 shows where it came from.

    main(["recipes", "xir"])
    """
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        return execute(words)
    except KeyboardInterrupt as stop:
        hint = (
            "the same command goes on" if words and words[0] in ("compare", "reproduce") else str(stop)
        )  # train says what it has saved
        return _say(f"interrupted{f': {hint}' if hint else ''}", 130)
    except BrokenPipeError:  # `sparring recipes | head`: the reader has gone, and so must the flush at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except Exception as error:
        line = explanation(error)
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            return _say_for_many(error, line)
        if line is None or os.environ.get("SPARRING_DEBUG", "") not in ("", "0"):
            raise
        return _say(f"error: {line}", 2)


def explanation(error: Exception) -> str | None:
    """What to tell the user about an error that is theirs or their machine's to fix; None for a fault of ours."""
    text = " ".join(str(error).split()) or type(error).__name__
    if disk_full(error):
        saved = "" if "untouched" in text else "; what was saved before is untouched"
        return f"no space left on the disk: {text}{saved}; free some, then use --resume"
    if isinstance(error, UserError):
        from sparring.cli.inputs import COLUMNS

        # the library names its own arguments; here they are options
        return re.sub(rf"\b({'|'.join(COLUMNS)})=(\.\.\.|\"\")", r"--\1-column \2", text)
    if isinstance(error, OSError):
        return f"{error.strerror or text}{f': {error.filename}' if error.filename else ''}"
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return "out of memory: lower --set batch_size, or the number of negatives"
    return None


def execute(words: list[str]) -> int:
    """Run one command; errors are raised, not told."""
    from sparring.cli.arguments import parser

    root, named = parser()
    args, rest = root.parse_known_args(words)
    if args.version:
        from sparring import __version__

        print(f"sparring {__version__}")
        return 0
    if args.command is None:
        root.print_help()
        return 0
    if rest:
        named[args.key].unknown(rest)
    args.words = words
    module, _, function = COMMANDS[args.key].partition(":")
    run: Callable[[argparse.Namespace], int] = getattr(importlib.import_module(f"sparring.cli.{module}"), function)
    return run(args)


def _say_for_many(error: Exception, line: str | None) -> int:
    """One of several processes has failed: what all of them meet is told once on each machine, and not by those that only lost another."""
    rank, first = os.environ.get("RANK", "0"), os.environ.get("LOCAL_RANK", "0") == "0"
    if os.environ.get("SPARRING_DEBUG", "") not in ("", "0"):
        raise error
    if (
        line is None
        and type(error) is RuntimeError
        and re.search(r"[Cc]onnection (closed|reset)|gloo|NCCL|Broken pipe", str(error))
    ):
        return _say(f"rank {rank} lost another rank", 1) if first and rank != "0" else 1
    if line is None:
        raise error
    if disk_full(error) and os.environ.get("TORCHELASTIC_RESTART_COUNT") != os.environ.get("TORCHELASTIC_MAX_RESTARTS"):
        _say(f"error: {line}; trying again in {DISK_SECONDS} s", 2)
        time.sleep(DISK_SECONDS)
        return 2
    return _say(f"error: {line}", 2) if first or not isinstance(error, UserError) else 2


def _say(line: str, code: int) -> int:
    print(f"sparring: {line}", file=sys.stderr)
    return code
