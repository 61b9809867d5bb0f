"""`python -m trainer.driver`: the entry point of the Ray job."""

from __future__ import annotations

import os
import sys

from trainer.driver.main import main

if __name__ == "__main__":
    code = main()
    # Non-daemon threads of Ray and of libraries must not keep the process alive.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
