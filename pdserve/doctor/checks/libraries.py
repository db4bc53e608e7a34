"""libfabric, its providers, and libucp."""

from __future__ import annotations

from pdserve.doctor.libraries import Library
from pdserve.doctor.report import Check, fail, ok, warn
from pdserve.doctor.system import System
from transport.dll import ADVICE
from transport.topology import Nic, fabric_nics
from transport.ucx.dll import ADVICE as UCX_ADVICE

OLD_FABRIC = (1, 18)


def libfabric(system: System) -> Check:
    """The one that is taken, and what else there is."""
    found = system.libraries.fabric
    if found.error:
        return fail("libfabric", found.error.removesuffix(f"; {ADVICE}"), f"no transfer without it: {ADVICE}")
    text = _with_others(found, system.libraries.other_fabrics)
    if tuple(map(int, found.version.split("."))) < OLD_FABRIC:
        return warn("libfabric", text, f"versions before 1.18 lack repairs that transfers rely on: {ADVICE}")
    return ok("libfabric", text)


def providers(system: System) -> Check:
    """Those that open here; and whether the one that is configured, or that the NICs need, is among them."""
    library, wanted = system.libraries.fabric, system.settings.transport.provider
    found = ", ".join(library.providers) or "none"
    name = "providers"
    if not library.providers:
        return fail(name, found, _why_none(system))
    if wanted == "ucx" and system.libraries.ucp.error:
        return fail(name, found, f"transport.provider is ucx, and there is no libucp: {UCX_ADVICE}")
    if wanted not in ("auto", "ucx", *library.providers):
        return fail(
            name,
            found,
            f"transport.provider is {wanted}, which does not open here: choose of {found}, or auto" + _filter(system),
        )
    nics = fabric_nics(system.topology)
    needed = provider_for(nics[0]) if nics else None
    if needed is not None and needed not in library.providers:
        advice = (
            f"{nics[0].name} needs the provider {needed}, which this libfabric does not open: {_source(needed)}; until "
            "then nothing goes by RDMA" + _filter(system)
        )
        return (warn if nics[0].is_software else fail)(name, found, advice)
    return ok(name, found)


def libucp(system: System) -> Check:
    found = system.libraries.ucp
    if found.error:
        return warn(
            "libucp",
            found.error.removesuffix(f"; {UCX_ADVICE}"),
            f"only the fallback to UCX needs it: {UCX_ADVICE}",
        )
    return ok("libucp", _with_others(found, system.libraries.other_ucps))


def provider_for(nic: Nic) -> str:
    """The provider that drives it."""
    return "efa" if nic.link_layer == "EFA" else "verbs;ofi_rxm"


def _with_others(taken: Library, others: tuple[Library, ...]) -> str:
    return f"{taken}; not taken: {', '.join(map(str, others))}" if others else str(taken)


def _why_none(system: System) -> str:
    if system.libraries.fabric.error:
        return "install libfabric first (see libfabric above)"
    return "this libfabric opens no provider that pdserve knows; install another one" + _filter(system)


def _source(provider: str) -> str:
    if provider == "efa":
        return "install Amazon's (aws-efa-installer brings /opt/amazon/efa/lib/libfabric.so.1) and name it by --library"
    return (
        "install librdmacm1, libibverbs1 and ibverbs-providers (or the NIC vendor's rdma-core), and a libfabric with "
        "verbs: the distribution's libfabric1, or the mpich wheel's"
    )


def _filter(system: System) -> str:
    """Variables that hide providers are easily forgotten."""
    names = [name for name in ("FI_PROVIDER", "FI_PROVIDER_PATH") if system.environment.get(name)]
    told = ", ".join(f"{name}={system.environment[name]}" for name in names)
    return f". The environment has {told}, which leaves others out: unset it" if names else ""
