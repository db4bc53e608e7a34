"""What an engine can take: the geometry of its pages, its context, and the requests that fit."""

from __future__ import annotations

from pdserve.config import EngineSettings
from pdserve.errors import ConfigError, ContextLengthError, RequestError
from pdserve.models.api import ModelConfig
from pdserve.types import GenerationRequest
from policies.layout import KvLayout, PageGeometry
from policies.sharding import heads_per_rank

_ELEMENT_BYTES = {"bf16": 2, "fp32": 4}


def page_geometry(config: ModelConfig, settings: EngineSettings, tp: int = 1) -> PageGeometry:
    """The region of one of `tp` ranks that share the cache. Raises ShardingError."""
    return PageGeometry(
        layers=config.layers,
        kv_heads=None if config.kv_heads is None else heads_per_rank(config.kv_heads, tp),
        head_dim=config.head_dim,
        page_size=settings.page_size,
        element_bytes=_ELEMENT_BYTES[settings.dtype],
        pages=settings.pages,
        layout=KvLayout(settings.kv_layout),
    )


def context_tokens(config: ModelConfig, settings: EngineSettings) -> int:
    """Tokens that a request and its answer may have together: what the settings allow, the model's context by default.

    Raises ConfigError where the settings ask for more than the model has.
    """
    if settings.max_model_len is None:
        return config.context
    if settings.max_model_len > config.context:
        raise ConfigError(
            f"engine.max_model_len ({settings.max_model_len}) is beyond the context of {config.name}: "
            f"at most {config.context} tokens"
        )
    return settings.max_model_len


def check_request(request: GenerationRequest, config: ModelConfig, max_model_len: int, pool_tokens: int) -> None:
    """Refuses what could never run: `pool_tokens` is what all pages of the pool hold together.

    Raises ContextLengthError, RequestError.
    """
    prompt_tokens = len(request.prompt)
    if not prompt_tokens:
        raise RequestError("the prompt has no tokens; it must have at least one", "prompt")
    if request.sampling.max_tokens < 1:
        raise RequestError(f"max_tokens must be at least 1, not {request.sampling.max_tokens}", "max_tokens")
    if prompt_tokens + 1 > max_model_len:
        raise ContextLengthError(
            f"the prompt has {prompt_tokens} tokens; with at least one token of answer that is more than the context"
            f" of {max_model_len} tokens",
            "prompt",
        )
    if prompt_tokens + 1 > pool_tokens:
        raise RequestError(
            f"the prompt has {prompt_tokens} tokens; this node's page pool holds {pool_tokens} in all."
            " Raise engine.kv_cache_tokens or shorten the prompt",
            "prompt",
        )
    lowest, highest = min(request.prompt), max(request.prompt)
    if lowest < 0 or highest >= config.vocab:
        outside = lowest if lowest < 0 else highest
        raise RequestError(f"token id {outside} is outside the vocabulary of {config.vocab} tokens", "prompt")
