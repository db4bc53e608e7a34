"""Nodes' metrics in Prometheus' text format."""

from __future__ import annotations

from collections.abc import Mapping

from pdserve.types import NodeId


def node_metrics_text(per_node: Mapping[NodeId, Mapping[str, float]]) -> str:
    """One family per metric, one sample per node; names end in `_total` where they count."""
    names = sorted({name for values in per_node.values() for name in values})
    lines: list[str] = []
    for name in names:
        lines.append(f"# TYPE pdserve:{name} {'counter' if name.endswith('_total') else 'gauge'}")
        lines += [f'pdserve:{name}{{node="{node}"}} {v[name]:g}' for node, v in sorted(per_node.items()) if name in v]
    return "".join(f"{line}\n" for line in lines)
