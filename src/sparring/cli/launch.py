"""sparring train --nproc N: the same command in N processes that train as one, started by torchrun."""

from __future__ import annotations

import logging
import os
from argparse import ArgumentParser

from sparring.cli.values import count, number, whole
from sparring.core.errors import UserError

OWN = {
    "--nproc": 1,
    "--restarts": 1,
    "--overwrite": 0,
    "--resume": 0,
}  # options that the processes do not get, and their values
SHUTDOWN_SECONDS = 5  # that processes have to end once another has failed


def add_launch(parser: ArgumentParser) -> None:
    group = parser.add_argument_group(
        "several processes (or start each machine's with torchrun: see docs/guide/scale.md)"
    )
    group.add_argument(
        "--nproc",
        type=count,
        metavar="N",
        help="train in N processes on this machine, with a GPU each where there are any",
    )
    group.add_argument(
        "--shard-tables",
        action="store_true",
        help="the same as --set tables=sharded: each process holds some of the rows",
    )
    group.add_argument(
        "--save-seconds",
        type=number,
        metavar="S",
        help="save a checkpoint this often (default: 600, after an epoch 10)",
    )
    group.add_argument(
        "--restarts",
        type=whole,
        default=0,
        metavar="N",
        help="with --nproc: when one dies, all go on from the last checkpoint, N times",
    )


def launched() -> bool:
    """Whether this is one of the processes that a launcher started."""
    return "TORCHELASTIC_RUN_ID" in os.environ or int(os.environ.get("WORLD_SIZE", "1")) > 1


def launch(words: list[str], nproc: int, restarts: int) -> int:
    """Run `sparring WORDS` in `nproc` processes; the exit code."""
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    if launched():
        raise UserError(
            "--nproc starts processes itself: leave it out under torchrun, or use torchrun --nproc-per-node"
        )
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // nproc)))
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(SHUTDOWN_SECONDS))
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")  # each restart meets in a place of its own
    if os.environ.get("SPARRING_DEBUG", "") in ("", "0"):
        logging.getLogger("torch.distributed.elastic").setLevel(
            logging.CRITICAL
        )  # the process that failed has said why
    options = ["--standalone", f"--nproc-per-node={nproc}", f"--max-restarts={restarts}", "--monitor-interval=0.2"]
    try:
        run.main([*options, "-m", "sparring", *without(words), "--resume"])
    except ChildFailedError as error:
        code = error.get_first_failure()[1].exitcode
        return code if code > 0 else 128 - code
    return 0


def without(words: list[str]) -> list[str]:
    """The words of the command without the launcher's own; the processes always go on with what there is."""
    kept, skip = [], 0
    for word in words:
        name = word.split("=")[0]
        if skip:
            skip -= 1
        elif name in OWN:
            skip = OWN[name] if "=" not in word else 0
        else:
            kept.append(word)
    return kept
