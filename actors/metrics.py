"""Nodes' metrics in Prometheus' text format."""

from __future__ import annotations

from collections.abc import Mapping

from pdserve.types import NodeId


def labelled(name: str, **labels: str) -> str:
    """The key of a metric that has labels of its own, beside `node`."""
    return f"{name}{{{','.join(f'{key}={_quoted(value)}' for key, value in labels.items())}}}"


def node_metrics_text(per_node: Mapping[NodeId, Mapping[str, float]]) -> str:
    """One family per metric, a sample per node and labels; names end in `_total` where they count."""
    families: dict[str, list[str]] = {}
    for node, values in sorted(per_node.items()):
        for key, value in values.items():
            name, _, labels = key.rstrip("}").partition("{")
            more = f",{labels}" if labels else ""
            families.setdefault(name, []).append(f"pdserve:{name}{{node={_quoted(node)}{more}}} {value:g}\n")
    types = {name: "counter" if name.endswith("_total") else "gauge" for name in families}
    return "".join(f"# TYPE pdserve:{name} {types[name]}\n{''.join(families[name])}" for name in sorted(families))


def _quoted(value: str) -> str:
    escaped = value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
    return f'"{escaped}"'
