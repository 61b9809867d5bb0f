"""The job spec: what a user writes in YAML or JSON, checked before anything runs.

`load_spec` is the front door: it parses text, applies `--set` overrides and returns a
frozen `JobSpec`, or raises `SpecError` whose problems each name the path of the field.
What cannot be done is refused, never silently ignored. Pydantic only: the control plane and the
client import this.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trainer.spec.job import JobSpec
from trainer.spec.parse import apply_overrides, parse_document


def validate_spec(document: Any) -> JobSpec:
    """Check a parsed document; raises `SpecError` that names the path of every faulty field."""
    return JobSpec.checked(document)


def load_spec(text: str, overrides: Sequence[str] = ()) -> JobSpec:
    """Parse, override and check a spec in YAML or JSON; raises `SpecError`."""
    return validate_spec(apply_overrides(parse_document(text), overrides))


def json_schema() -> dict[str, Any]:
    """JSON Schema of the spec, for editors (`shardloom spec schema`)."""
    schema = JobSpec.model_json_schema()
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}
