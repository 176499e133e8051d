"""The base of all config sections: frozen; unknown keys and values of another type are refused (for a float, an int will do)."""

from __future__ import annotations

from typing import Annotated, Any, get_origin

from pydantic import BaseModel, ConfigDict, Field, model_validator

Seed = Annotated[int, Field(ge=0, lt=1 << 63)]
"""What every generator takes, and MessagePack too."""


class Section(BaseModel):
    """A table of the TOML file."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True)

    @model_validator(mode="before")
    @classmethod
    def _arrays(cls, data: Any) -> Any:
        """TOML has arrays where we keep tuples."""
        if not isinstance(data, dict):
            return data
        tuples = {name for name, field in cls.model_fields.items() if get_origin(field.annotation) is tuple}
        return {key: tuple(value) if key in tuples and isinstance(value, list) else value for key, value in data.items()}
