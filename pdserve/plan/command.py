"""What `pdserve plan transfer` does with its arguments: from options to a plan with its NICs. Starts nothing."""

from __future__ import annotations

import re
from dataclasses import dataclass
from random import Random

from pdserve.errors import ConfigError
from pdserve.plan.report import Planned, as_json, render
from pdserve.plan.shapes import CacheShape, cache_shape
from policies.layout import KvLayout
from policies.nics import assign_nics, even_nics, rails_of
from policies.plan import GroupPages, PlanRequest, make_plan, prompt_pages
from policies.sharding import ParallelLayout, ShardingError, pages_sent
from policies.sources import SourcePolicy, draw_sources

_ELEMENT_BYTES = {"bf16": 2, "fp32": 4}
_PARALLEL = re.compile(r"(tp|dp|ep)(\d{1,6})")


@dataclass(frozen=True, slots=True)
class TransferOptions:
    """Named as on the command line. `prompt`, `page` in tokens; `present` in pages; NICs per rank."""

    model: str
    prefill: str
    decode: str
    prompt: int
    layout: str = "hnd"
    page: int = 64
    dtype: str = "bf16"
    present: int = 0
    drafter: bool = False
    tail: bool = False
    nics_prefill: int = 1
    nics_decode: int = 1
    sources: str = "random"
    seed: int = 0
    json: bool = False


def run(options: TransferOptions) -> int:
    """Prints the plan; the exit status. Raises ConfigError."""
    planned = plan_transfer(options)
    print(as_json(planned) if options.json else render(planned))
    return 0


def plan_transfer(options: TransferOptions) -> Planned:
    """Raises ConfigError."""
    _check_numbers(options)
    shape = cache_shape(options.model)
    layout = KvLayout(options.layout)
    prefill, decode = (parse_parallel(f"--{side}", getattr(options, side), layout) for side in ("prefill", "decode"))
    request = _request(options, shape, prefill, decode)
    nics = even_nics(prefill.tp, options.nics_prefill), even_nics(decode.tp, options.nics_decode)
    by_rail = SourcePolicy(options.sources) is SourcePolicy.RAIL
    rails = (rails_of(nics[0]), rails_of(nics[1])) if by_rail else None
    try:
        groups = [part.group for part in request.groups]
        plan = make_plan(request, draw_sources(groups, (prefill.tp, decode.tp), Random(options.seed), rails))
    except ShardingError as error:
        raise ConfigError(str(error)) from error
    return Planned(options, shape, plan, nics, assign_nics(plan, *nics))


def parse_parallel(flag: str, text: str, layout: KvLayout) -> ParallelLayout:
    """`tp8`, `dp8`, `tp2dp4`, `tp8-ep8`: ranks of a replica, and replicas of a node. Raises ConfigError.

    Expert parallelism is taken and left aside: how experts are shared does not touch the cache.
    """
    parts = re.split(r"[-,+x]", text.lower())
    found = [match for part in parts for match in _PARALLEL.findall(part)]
    sizes = {name: int(number) for name, number in found}
    spelled = "".join(name + number for name, number in found) == "".join(parts)
    if not spelled or not {"tp", "dp"} & sizes.keys() or len(sizes) < len(found) or 0 in sizes.values():
        raise ConfigError(
            f"{flag}: got {text!r}, allowed: tp, dp, ep with their sizes, such as tp8, dp8, tp2dp4, tp8ep8"
        )
    return ParallelLayout(sizes.get("tp", 1), layout, sizes.get("dp", 1))


def _check_numbers(options: TransferOptions) -> None:
    least = {"prompt": 1, "page": 1, "present": 0, "nics_prefill": 1, "nics_decode": 1}
    for name, smallest in least.items():
        if getattr(options, name) < smallest:
            flag = "--" + name.replace("_", "-")
            raise ConfigError(f"{flag}: got {getattr(options, name)}, allowed: a whole number, at least {smallest}")
    filled = pages_sent(options.prompt - 1, options.page)
    if options.present > filled:
        raise ConfigError(
            f"--present: got {options.present}, allowed: at most {filled}; "
            f"the prompt's tokens without its last one fill that many pages"
        )


def _request(
    options: TransferOptions, shape: CacheShape, prefill: ParallelLayout, decode: ParallelLayout
) -> PlanRequest:
    if options.drafter and not shape.drafter_layers:
        raise ConfigError(f"--drafter: {shape.name} has no drafter layers of its own; leave it out")
    target, drafter = prompt_pages(options.prompt, options.page, options.present)
    element_bytes = _ELEMENT_BYTES[options.dtype]
    parts = [GroupPages(shape.target, shape.head_dim, element_bytes, target)]
    if options.drafter:
        parts.append(GroupPages(shape.drafter, shape.head_dim, element_bytes, drafter))
    return PlanRequest(tuple(parts), prefill, decode, options.page, tail=options.tail and target > 0)
