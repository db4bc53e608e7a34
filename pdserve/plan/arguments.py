"""The options of `pdserve plan transfer`, apart from what they do: building `--help` must import nothing heavy."""

from __future__ import annotations

import argparse


def add_transfer_arguments(parser: argparse.ArgumentParser) -> None:
    """One for every field of `TransferOptions`."""
    add = parser.add_argument
    add("--model", required=True, help="qwen3-coder-480b, qwen3-235b, deepseek-r1, or a Hugging Face directory")
    add("--prefill", required=True, metavar="LAYOUT", help="of a prefill node: tp8, dp8, tp2dp4, tp8ep8")
    add("--decode", required=True, metavar="LAYOUT", help="of a decode node")
    add("--prompt", required=True, type=int, metavar="TOKENS", help="length of the prompt")
    add("--page", type=int, default=64, metavar="TOKENS", help="page size (default: %(default)s)")
    add("--layout", choices=("hnd", "nhd"), default="hnd", help="order in a page block (default: %(default)s)")
    add("--dtype", choices=("bf16", "fp32"), default="bf16", help="of the cache (default: %(default)s)")
    add("--present", type=int, default=0, metavar="PAGES", help="pages that the decode side has already")
    add("--drafter", action="store_true", help="with the cache of the model's drafter layers")
    add("--tail", action="store_true", help="with the tail: hidden states or logits")
    add("--nics-prefill", type=int, default=1, metavar="N", help="NICs of a prefill rank (default: %(default)s)")
    add("--nics-decode", type=int, default=1, metavar="N", help="NICs of a decode rank (default: %(default)s)")
    add("--sources", choices=("random", "rail"), default="random", help="how replicas of the cache are chosen")
    add("--seed", type=int, default=0, help="of that choice (default: %(default)s)")
    add("--json", action="store_true", help="print the plan as JSON")
