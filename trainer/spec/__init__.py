"""The job spec: what a user writes in YAML or JSON, checked before anything runs.

`load_spec` is the front door: it parses text, applies `--set` overrides and returns a
frozen `JobSpec`, or raises `SpecError` whose problems each name the path of the field.
What cannot be done is refused, never silently ignored. Pydantic only: the control plane and the
client import this.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic_core import PydanticSerializationError

from trainer.spec.base import FieldProblem, SpecError
from trainer.spec.job import JobSpec
from trainer.spec.parse import MAX_TEXT_CHARS, apply_overrides, check_depth, parse_document

# The control plane reads the specs of all jobs that have not ended at once. JSON has more quotes
# and brackets than YAML.
MAX_JSON_CHARS = 2 * MAX_TEXT_CHARS


def validate_spec(document: Any) -> JobSpec:
    """Check a parsed document; raises `SpecError` that names the path of every faulty field."""
    check_depth(document, "spec")
    spec = JobSpec.checked(document)
    try:
        num_chars = len(spec.model_dump_json(exclude_defaults=True))
    except PydanticSerializationError:
        message = "has a text with half of a surrogate pair (\\ud800 to \\udfff), which is no UTF-8"
        raise SpecError([FieldProblem("spec", "text", message)]) from None
    if num_chars > MAX_JSON_CHARS:
        message = (
            f"has {num_chars} characters as JSON, more than the {MAX_JSON_CHARS} of any spec; what "
            "is large in model.options belongs in a file beside the code of model.module"
        )
        raise SpecError([FieldProblem("spec", "size", message)])
    return spec


def load_spec(text: str, overrides: Sequence[str] = ()) -> JobSpec:
    """Parse, override and check a spec in YAML or JSON; raises `SpecError`."""
    return validate_spec(apply_overrides(parse_document(text), overrides))


def json_schema() -> dict[str, Any]:
    """JSON Schema of the spec, for editors (`shardloom spec schema`)."""
    schema = JobSpec.model_json_schema()
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}
