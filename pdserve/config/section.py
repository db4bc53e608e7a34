"""What every section of the settings is."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    # Strict: YAML has types of its own, so `port: "8000"` or `port: true` is a mistake and not a number.
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)
