"""python -m trainer.export.serve DIR [--host 127.0.0.1] [--port 8800] [--threads 1]

Serves the export in DIR until SIGINT or SIGTERM; exits with 1 where it cannot start.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
import uvicorn

from trainer.export.errors import ExportError
from trainer.export.scorer import create_scorer

DEFAULT_PORT = 8800


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve; the exit code."""
    options = _parser().parse_args(arguments)
    for name in ("torch", "torch._export"):
        logging.getLogger(name).setLevel(logging.ERROR)
    torch.set_num_threads(options.threads)
    try:
        app = create_scorer(options.folder)
    except ExportError as error:
        print(f"cannot serve: {error}", file=sys.stderr, flush=True)
        return 1
    uvicorn.run(app, host=options.host, port=options.port, log_level="info")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m trainer.export.serve", description=__doc__)
    parser.add_argument("folder", type=Path, help="folder of the export")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=DEFAULT_PORT)
    parser.add_argument("--threads", type=int, default=1, help="threads of one prediction")
    return parser


if __name__ == "__main__":
    sys.exit(main())
