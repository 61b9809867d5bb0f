"""The whole job spec: its sections, checked together."""

from __future__ import annotations

from typing import Any, Self

from pydantic import ValidationError, ValidationInfo, model_validator

from trainer.spec import validation
from trainer.spec.base import SpecError, is_laid_out, is_stored, problems_of
from trainer.spec.parallelism import ParallelismSpec
from trainer.spec.sections import JobSections


class JobSpec(JobSections):
    """A whole training job.

    Jobs of a higher `priority` start first, within the quotas of their `project`; a `preemptible`
    one may be paused for them.
    """

    def with_layout(self, shard_group_size: int, placement: str) -> JobSpec:
        """This spec with L and the placement; bounds of workers stay bounds.

        What could not be checked while L was `auto` is checked now: raises `SpecError`.
        """
        parallelism = self.parallelism.resolved(shard_group_size, placement)
        return self._with_parallelism(parallelism, is_new=True)

    def with_workers(self, num_workers: int) -> JobSpec:
        """This spec with a fixed number of workers, a multiple of L; raises `SpecError`.

        Fewer than its most are what it was accepted for.
        """
        parallelism = self.parallelism.model_copy(update={"workers": num_workers})
        is_new = num_workers > self.parallelism.world_size
        return self._with_parallelism(parallelism, is_new=is_new)

    def _with_parallelism(self, parallelism: ParallelismSpec, *, is_new: bool) -> JobSpec:
        document = {**self.model_dump(), "parallelism": parallelism.model_dump()}
        return JobSpec.checked(document, {"stored": True, "laid_out": is_new})

    @classmethod
    def checked(cls, document: Any, context: dict[str, bool] | None = None) -> JobSpec:
        """The spec that a document holds; raises `SpecError`."""
        try:
            return cls.model_validate(document, context=context)
        except ValidationError as error:
            raise SpecError(problems_of(error.errors(include_url=False), cls)) from None

    @model_validator(mode="after")
    def _check_sections_together(self, info: ValidationInfo) -> Self:
        # A stored spec was accepted once; what newer versions refuse must not make it unreadable.
        accepted = () if is_stored(info) else validation.ALL
        for check in validation.OF_LAYOUT if is_laid_out(info) else accepted:
            check(self)
        return self
