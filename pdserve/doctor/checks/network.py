"""IPv6, TCP's congestion control, and the ports that will be listened on."""

from __future__ import annotations

from collections.abc import Iterator

from pdserve.doctor.report import Check, fail, ok, warn
from pdserve.doctor.system import System

RAY_PORTS = {"ray": 6379, "ray-dashboard": 8265}
"""Of `ray start --head`; the Ray that pdserve starts by itself takes free ones."""


def ipv6(system: System) -> Check:
    on = bool(system.proc("net/if_inet6")) and system.proc("sys/net/ipv6/conf/all/disable_ipv6") != "1"
    host = system.settings.http.host
    if on:
        return ok("ipv6", "on")
    if ":" in host:
        return fail("ipv6", "off", f"http.host is {host}: sysctl net.ipv6.conf.all.disable_ipv6=0, or an IPv4 address")
    return ok("ipv6", "off; IPv4 is used")


def congestion_control(system: System) -> Check:
    """Of the `tcp` wire. BBR measures a path and then paces: over loopback it was seen to halve the bandwidth."""
    used = system.proc("sys/net/ipv4/tcp_congestion_control")
    if used != "bbr":
        return ok("tcp-congestion", used or "not said")
    advice = (
        "it paces what it sends, which costs pages over tcp up to half of their bandwidth within a host or a rack: "
        "sysctl net.ipv4.tcp_congestion_control=cubic, or `congctl cubic` on the routes between the nodes"
    )
    return warn("tcp-congestion", used, advice)


def ports(system: System) -> Iterator[Check]:
    http = system.settings.http
    if http.port == 0:
        yield ok("port http", "any free one")
    else:
        yield _port(system, "http", http.host, http.port, "another pdserve may be running; else choose with --port")
    if system.settings.ray_address is not None:
        yield ok("port ray", f"not needed: the nodes join the cluster at {system.settings.ray_address}")
        return
    for name, port in RAY_PORTS.items():
        advice = (
            "a Ray cluster may be running; pdserve starts one of its own on free ports, unless ray_address names it"
        )
        yield _port(system, name, "127.0.0.1", port, advice)


def _port(system: System, name: str, host: str, port: int, advice: str) -> Check:
    fault = system.port_fault(host, port)
    if fault:
        return warn(f"port {name}", f"{host} port {port}: {fault}", advice)
    return ok(f"port {name}", f"{port} is free on {host}")
