"""The one settings tree, read from `clusters/*.yaml`; command-line flags override it.

An unknown key, a wrong type or an impossible combination raises `ConfigError`, which names the key, the value and what
is allowed, before anything starts.
"""

from pdserve.config.deployment import PRESETS, DeploymentSettings, NodeSettings
from pdserve.config.load import load_settings, parse_override
from pdserve.config.settings import (
    EMBEDDED_MODEL,
    EngineSettings,
    HandoffSettings,
    HttpSettings,
    ModelSettings,
    Settings,
    TransportSettings,
)

__all__ = [
    "EMBEDDED_MODEL",
    "PRESETS",
    "DeploymentSettings",
    "EngineSettings",
    "HandoffSettings",
    "HttpSettings",
    "ModelSettings",
    "NodeSettings",
    "Settings",
    "TransportSettings",
    "load_settings",
    "parse_override",
]
