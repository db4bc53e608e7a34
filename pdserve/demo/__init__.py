"""`pdserve demo`: the whole path once, with a report of what happened on it."""

from pdserve.demo.run import run

__all__ = ["run"]
