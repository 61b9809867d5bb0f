"""What can go wrong with an export. Every message names the cause and what to change.

ExportError
├── NoCheckpoint       the run has no checkpoint as asked for, or it is damaged
├── NotExportable      the model, or a part of the spec, has no form outside of the trainer
├── NotEnoughMemory    the unsharded tables do not fit into this process
├── ArtifactError      a folder is no whole export, or holds one already
└── BadRow             a row to score lacks a value or has a wrong one
"""

from __future__ import annotations


class ExportError(Exception):
    """Base of every fault of exporting and of what was exported."""


class NoCheckpoint(ExportError):
    """The run has no checkpoint as asked for, or it is damaged."""


class NotExportable(ExportError):
    """The model, or a part of the spec, has no form outside of the trainer."""


class NotEnoughMemory(ExportError):
    """The unsharded tables do not fit into this process."""


class ArtifactError(ExportError):
    """A folder is no whole export, or holds one already."""


class BadRow(ExportError):
    """Row number `row` to score lacks a value in `column`, or has a wrong one.

    `problem` says what is wrong without saying where.
    """

    def __init__(self, row: int, column: str, problem: str) -> None:
        self.row = row
        self.column = column
        self.problem = problem
        super().__init__(f"row {row}, '{column}': {problem}")
