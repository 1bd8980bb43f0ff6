"""The entry point: parses the words, runs the command, and turns errors into one line and an exit code."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Sequence
from functools import partial

from sparring.cli.bench import add_bench
from sparring.cli.book import add_book
from sparring.cli.check import add_check
from sparring.cli.cluster import add_cluster
from sparring.cli.compare import add_compare
from sparring.cli.completion import add_completion
from sparring.cli.config import expanded
from sparring.cli.data import add_data
from sparring.cli.demo import add_demo
from sparring.cli.diagnose import add_diagnose
from sparring.cli.doctor import add_doctor
from sparring.cli.evaluate import add_evaluate
from sparring.cli.export import add_export
from sparring.cli.fuse import add_fuse
from sparring.cli.index import add_index
from sparring.cli.inputs import message
from sparring.cli.mine import add_mine
from sparring.cli.models import add_models
from sparring.cli.parsing import Commands, Parser, name_users, pull_runs
from sparring.cli.prepare import add_prepare
from sparring.cli.push import add_push
from sparring.cli.recipes import add_recipes
from sparring.cli.recommend import add_recommend
from sparring.cli.reproduce import add_reproduce
from sparring.cli.screen import logged, quiet
from sparring.cli.serve import add_serve
from sparring.cli.train import add_train
from sparring.core.errors import UserError, disk_full, out_of_memory
from sparring.core.processes import Terminated, raise_on_termination

DISK_SECONDS = int(os.environ.get("SPARRING_DISK_SECONDS", "60"))  # to free a full disk before a restart


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code. Bad input is one line on stderr and code 2; SPARRING_DEBUG=1 shows the traceback.

    main(["recipes", "xir"])
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if argv is None:  # this process is the command's own
        raise_on_termination()
    try:
        return execute(words)
    except KeyboardInterrupt as stop:  # `train` supplies the hint
        repeat = (
            "run the same command again to continue"
            if words[:1] in (["compare"], ["reproduce"], ["book"], ["mine"])
            else ""
        )
        hint = str(stop) or repeat
        what, code = ("terminated", 143) if isinstance(stop, Terminated) else ("interrupted", 130)
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:  # the launcher reports it, once for all ranks
            if argv is None:  # the library that connects ranks aborts in an orderly exit while it waits for another
                os._exit(code)
            return code
        return _fail(f"{what}{'; ' if hint else ''}{hint}", code)
    except BrokenPipeError:  # `sparring recipes | head`: the reader has gone, and so must the flush at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except Exception as error:
        line = explanation(error)
        if _debug():
            raise
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            return _fail_on_rank(error, line)
        if line is None:
            raise
        return _fail(f"error: {line}", 2)
    finally:
        if argv is None:  # all is cleaned up: the exit of the interpreter may be cut short
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def execute(words: list[str]) -> int:
    """Run one command and raise its errors; the exit code."""
    words = expanded(words, lambda: parser()[1])
    root, _ = parser()
    args, rest = root.parse_known_args(words)
    if args.version:
        from sparring import __version__

        print(f"sparring {__version__}")
        return 0
    if args.command is None:
        root.print_help()
        return 0
    if rest:
        args.parser.unknown(rest)
    args.words = words
    with logged(quiet(args)):
        pull_runs(args)
        code: int = args.command(args)
    return code


def parser() -> tuple[Parser, dict[str, Parser]]:
    """The parser of `sparring`, and those of its commands by name ("train", "data show", ...)."""
    root = Parser(
        prog="sparring",
        description="Train, evaluate, compare, index and serve retrievers, with any choice of negatives.",
        example="sparring train --data demo --recipe ssl_pop --epochs 3 --out runs/first",
    )
    root.add_argument("--version", action="store_true", help="print the version and exit")
    root.set_defaults(command=None)
    commands = Commands(root)
    for add in (
        add_prepare,
        add_train,
        add_evaluate,
        add_fuse,
        add_compare,
        add_book,
        add_reproduce,
        add_diagnose,
        add_mine,
        add_cluster,
        add_recommend,
        add_index,
        add_serve,
        add_export,
        add_push,
        add_check,
        add_recipes,
        add_models,
        add_data,
        add_bench,
        add_doctor,
        partial(add_demo, execute=execute),
        partial(add_completion, parser=lambda: parser()[0]),
    ):
        add(commands)
    for each in commands.named.values():
        name_users(each)
    return root, commands.named


def explanation(error: Exception) -> str | None:
    """The line for an error that the user can fix; None for a bug."""
    text = " ".join(str(error).split()) or type(error).__name__
    if disk_full(error):
        saved = "" if "untouched" in text else "; files saved before are untouched"
        return f"no space left on the disk: {text}{saved}; free some space, then use --resume"
    if isinstance(error, UserError):
        return message(error)
    if isinstance(error, OSError):
        return f"{error.strerror or text}{f': {error.filename}' if error.filename else ''}"
    if out_of_memory(error):
        return "out of memory: lower --set batch_size, or the number of negatives (--set n)"
    return None


def _fail_on_rank(error: Exception, line: str | None) -> int:
    """Report the error of one of several processes once per machine; a rank that only lost another says so."""
    rank, first = os.environ.get("RANK", "0"), os.environ.get("LOCAL_RANK", "0") == "0"
    lost = r"[Cc]onnection (closed|reset)|gloo|NCCL|Broken pipe"
    if line is None and type(error) is RuntimeError and re.search(lost, str(error)):
        return _fail(f"rank {rank} lost another rank", 1) if first and rank != "0" else 1
    if line is None:
        raise error
    if disk_full(error) and os.environ.get("TORCHELASTIC_RESTART_COUNT") != os.environ.get("TORCHELASTIC_MAX_RESTARTS"):
        _fail(f"error: {line}; retrying in {DISK_SECONDS} s", 2)
        time.sleep(DISK_SECONDS)
        return 2
    return _fail(f"error: {line}", 2) if first or not isinstance(error, UserError) else 2


def _debug() -> bool:
    return os.environ.get("SPARRING_DEBUG", "") not in ("", "0")


def _fail(line: str, code: int) -> int:
    print(f"sparring: {line}", file=sys.stderr)
    return code
