"""Exports a checkpoint as files that serve without Shardloom.

python -m trainer.export --run-dir DIR --to DIR [--checkpoint newest|best|STEP] [--quantize ...]
python -m trainer.export --request RUN_DIR/exports/x-ID [--no-user-code] [--places SHA256]

Exits with 0 when the export is there, 1 when it was refused (the reason is the last line), 75 when
another process makes it (with --places; without, it waits for that one).
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import signal
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, get_args

from trainer.checkpoint.save_load import CheckpointError
from trainer.errors import DataError
from trainer.export.artifact import ExportError
from trainer.export.exporter import Tell, export
from trainer.export.requests import HELD, ExportFolder
from trainer.failures import UserCodeError
from trainer.protocol.run_dir import RunDir
from trainer.spec.training import DEFAULT_QUANTIZATION, Quantization

_REFUSALS = (
    ExportError,
    CheckpointError,
    DataError,
    UserCodeError,
    OSError,
    MemoryError,
)
_POLL_S = 1.0
_print = partial(print, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m trainer.export", description=__doc__)
    parser.add_argument("--request", type=Path, help="folder of an export that was asked for")
    parser.add_argument("--run-dir", type=Path, help="folder of the job")
    parser.add_argument("--to", type=Path, help="folder to write; must not exist")
    parser.add_argument("--checkpoint", default="newest", help="newest, best, a step, or a folder")
    parser.add_argument("--quantize", choices=get_args(Quantization), default=DEFAULT_QUANTIZATION)
    parser.add_argument(
        "--no-user-code", action="store_true", help="refuse a model that is a module of the user"
    )
    parser.add_argument(
        "--places", metavar="SHA256", help="refuse a spec that names other paths (places_digest)"
    )
    options = parser.parse_args(arguments)
    # The tracer's warnings are about its own work.
    warnings.simplefilter("ignore")
    logging.basicConfig(level=logging.ERROR)
    for name in ("torch.fx", "torch.export", "torch._export", "torch"):
        logging.getLogger(name).setLevel(logging.ERROR)
    if options.request:
        try:
            return _run_requested(
                ExportFolder(options.request),
                may_run_code=not options.no_user_code,
                places=options.places,
            )
        except BlockingIOError:
            return HELD
    if not (options.run_dir and options.to):
        parser.error("give --run-dir and --to, or --request")
    failure = _attempt(
        _print,
        options.run_dir,
        options.to,
        options.checkpoint,
        options.quantize,
        may_run_code=not options.no_user_code,
        places=options.places,
    )
    if failure is not None:
        _print(f"export failed: {failure}")
    return 0 if failure is None else 1


def _run_requested(folder: ExportFolder, places: str | None, **options: Any) -> int:
    """Run the export of a request folder, unless it is done or deleted.

    Raises BlockingIOError where another process does, and a service asks.
    """
    if folder.is_deleted:
        return 1
    with folder.hold(waits=places is None) as is_open, _ended_when_deleted(folder):
        if is_open:
            wanted = folder.wanted
            failure = _attempt(
                folder.tell,
                folder.run_dir,
                folder.artifact,
                wanted.checkpoint,
                wanted.quantize,
                places=places,
                **options,
            )
            if failure is not None:
                folder.fail(failure)
    return 0 if folder.status == "succeeded" else 1


@contextlib.contextmanager
def _ended_when_deleted(folder: ExportFolder) -> Iterator[None]:
    """Interrupt the body, as Ctrl-C would, once the export is deleted."""
    done, worker = threading.Event(), threading.get_ident()

    def watch() -> None:
        while not done.wait(_POLL_S):
            if folder.is_deleted:
                # A real signal: it ends a wait at once.
                signal.pthread_kill(worker, signal.SIGINT)
                return

    threading.Thread(target=watch, name="deleted", daemon=True).start()
    try:
        yield
    except KeyboardInterrupt:
        if not folder.is_deleted:
            raise
    finally:
        done.set()


def _attempt(tell: Tell, run_dir: Path, to: Path, *wanted: Any, **options: Any) -> str | None:
    """`export`; returns the error, None if there is none."""
    try:
        report = export(RunDir(run_dir), to, *wanted, **options, tell=tell)
    except _REFUSALS as error:
        return str(error) or type(error).__name__
    except Exception as error:  # the message goes to whoever waits for the export
        logging.getLogger(__name__).exception("the export failed")
        return f"{type(error).__name__}: {error}"
    tell(report.text)
    tell(f"exported to {to} ({report.program_bytes / 1e6:.1f} MB program)")
    return None


if __name__ == "__main__":
    sys.exit(main())
