"""`export`: what becomes of the model when the job has succeeded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import AfterValidator, Field, PositiveInt

from trainer.spec.base import SpecModel
from trainer.spec.problems import problem

if TYPE_CHECKING:
    from trainer.spec.job import JobSpec

Quantization = Literal["int8", "fp16", "none"]
CheckpointChoice = Literal["newest", "best"]


def _one_shard(shards: int) -> int:
    if shards > 1:
        raise problem(
            "not_exportable",
            "exports are not sharded: TorchRec's inference sharding spreads tables over the GPUs "
            "of one process; on the CPU its shards share one memory, and torch.export cannot trace "
            "its kernels. Use 1, and quantize: int8 where memory is short",
        )
    return shards


class ExportSpec(SpecModel):
    """With `on_success` the job ends by exporting the model of one of its checkpoints.

    `quantize` is the precision of the tables in the export, row-wise scaled for `int8`; the dense
    part stays float32.
    """

    on_success: bool = False
    checkpoint: Annotated[
        CheckpointChoice, Field(description="`best` falls back on the newest where none is best.")
    ] = "newest"
    quantize: Quantization = "int8"
    shards: Annotated[PositiveInt, AfterValidator(_one_shard)] = 1


def check_export(spec: JobSpec) -> None:
    """What has no exported form is refused with the spec where the job shall export at its end."""
    if not (spec.export and spec.export.on_success):
        return
    for index, table in enumerate(spec.embedding_tables):
        if table.dynamic:
            raise problem(
                "not_exportable",
                f"table '{table.name}' is dynamic, and torch.export cannot trace the module that "
                "knows which id has which row; set export.on_success: false",
                f"embedding_tables[{index}].dynamic",
            )
