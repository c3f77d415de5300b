"""What every section of a run's settings is: frozen, without unknown keys, and without numbers that are none.

No setting means anything by infinity: "no limit" is None where there is such a thing.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

_BOUNDS = {"gt": "above", "ge": "at least", "lt": "below", "le": "at most"}


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @field_validator("*", mode="wrap")
    @classmethod
    def _finite(cls, value: Any, check: Any, about: ValidationInfo) -> Any:
        """Says of an infinity, or of what is no number, what is allowed instead."""
        try:
            return check(value)
        except ValidationError as error:
            if not any(problem["type"] == "finite_number" and not problem["loc"] for problem in error.errors()):
                raise
        limits = [
            f"{words} {getattr(bound, name):g}"
            for bound in cls.model_fields[about.field_name or ""].metadata
            for name, words in _BOUNDS.items()
            if hasattr(bound, name)
        ]
        allowed = f"a finite number {' and '.join(limits)}".strip()
        raise PydanticCustomError("finite_number", "must be {allowed}, not {value}", {"allowed": allowed, "value": repr(value)})
