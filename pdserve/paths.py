"""Where this project keeps files between runs."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """`$PDSERVE_CACHE`, else `$XDG_CACHE_HOME/pdserve`, else `~/.cache/pdserve`. It may not exist yet."""
    own = os.environ.get("PDSERVE_CACHE")
    if own:
        return Path(own)
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path.home() / ".cache") / "pdserve"
