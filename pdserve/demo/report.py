"""The demo's report, for a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from pdserve.demo.record import RequestRecord

LAYERS_SHOWN = 30


def print_report(records: Sequence[RequestRecord]) -> None:
    print("\nHandoffs (times in ms; exposed: end of prefill compute → all pages counted in at the decode node)\n")
    header = (
        f"{'request':<8} {'prompt':>6} {'queue':>7} {'chunks':>6} {'compute':>8} {'a layer':>8} {'MiB':>6} "
        f"{'writes':>7} {'counted':>8} {'before end':>10} {'exposed':>8} {'TTFT':>7} {'ITL':>6}  equal to colocated"
    )
    print(header)
    print("-" * len(header))
    for record in records:
        print(_row(record))
    longest = max(records, key=lambda record: len(record.prompt.tokens))
    _print_layers(longest)


def _row(record: RequestRecord) -> str:
    row = record.as_json()
    share = row["bytes_completed_before_prefill_end"] / row["bytes"]
    return (
        f"{record.prompt.name:<8} {row['prompt_tokens']:>6} {row['prefill_queue_s'] * 1e3:>7.0f} "
        f"{len(row['chunks']):>6} {row['prefill_compute_s'] * 1e3:>8.0f} {row['layer_compute_s'] * 1e3:>8.1f} "
        f"{row['bytes'] / 2**20:>6.1f} {row['writes_expected']:>7} {row['writes_counted']:>8} {share:>10.1%} "
        f"{row['exposed_transfer_s'] * 1e3:>8.1f} {row['ttft_s'] * 1e3:>7.0f} {row['itl_s'] * 1e3:>6.1f}  "
        f"{'yes' if record.equal else 'NO'}"
    )


def _print_layers(record: RequestRecord) -> None:
    """Each layer of the last chunk: when its compute ended, when its writes were posted and had completed."""
    timings = record.timings
    last = len(timings.chunks) - 1
    layers = [layer for layer in timings.layers if layer.chunk == last]
    start, end = timings.chunks[last]
    print(f"\nRequest {record.prompt.name}, last chunk (tokens {start}–{end}), ms after its prefill began:")
    print(f"{'layer':>5} {'computed':>10} {'posted':>10} {'completed':>10} {'writes':>7}")
    for layer in layers[:LAYERS_SHOWN]:
        times = (layer.computed_at, layer.posted_at, layer.completed_at)
        cells = " ".join(f"{(at - timings.started_at) * 1e3:>10.2f}" for at in times)
        print(f"{layer.layer:>5} {cells} {layer.writes:>7}")
    print(f"      last forward pass ended at {(timings.computed_at - timings.started_at) * 1e3:.2f}")
    lags = [layer.posted_at - layer.computed_at for layer in timings.layers]
    ends = [layer.completed_at - layer.computed_at for layer in timings.layers]
    print(
        f"over all {len(timings.chunks)} chunks: posted {median(lags) * 1e3:.2f} ms (median) after a layer was seen "
        f"computed, completed after {median(ends) * 1e3:.2f} ms"
    )
