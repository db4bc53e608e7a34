"""The OpenAI HTTP surface over any backend that generates tokens. Knows nothing of Ray, of nodes or of KV caches."""

from pdserve.openai.app import build_app
from pdserve.openai.backend import Backend, Health
from pdserve.openai.http_metrics import HttpMetrics

__all__ = ["Backend", "Health", "HttpMetrics", "build_app"]
