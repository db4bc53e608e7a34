"""The Ray that nodes are started in: one of our own on this host, or a cluster that is there already."""

from __future__ import annotations

import contextlib
import math
import socket
import time
from collections.abc import Iterator

import ray

from actors.local_ray import start_local_ray
from actors.names import NAMESPACE, SCHEDULER
from pdserve.errors import ConfigError
from policies.placement import Deployment, Host, assign_hosts
from transport.topology import read_topology

ENDED_S = 3.0
"""For the actors of a cluster that was closed a moment ago to be gone."""


def check_fits_here(deployment: Deployment) -> None:
    """Before Ray is started for it on this host. Raises ClusterTooSmall.

    CPUs of a Ray of our own are but numbers, as many as are asked for; whether GPUs are of the right type, and
    whatever else Ray counts, shows only later.
    """
    asked = {name for kind in deployment.kinds for name in kind.rank.bundle()}
    there = {name: deployment.amount(name) for name in asked} | {"GPU": len(read_topology().gpus)}
    assign_hosts(deployment, [Host("this host", there)])


@contextlib.contextmanager
def own_ray(deployment: Deployment) -> Iterator[None]:
    """With room for a deployment: its GPUs are this host's, its CPUs need not be."""
    cpus = max(1, math.ceil(deployment.amount("CPU")))
    with start_local_ray(NAMESPACE, cpus, gpus=deployment.amount("GPU") > 0):
        yield


@contextlib.contextmanager
def joined_ray(address: str) -> Iterator[None]:
    """Raises ConfigError."""
    _check_reachable(address)
    try:
        ray.init(address=address, namespace=NAMESPACE, log_to_driver=False)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise ConfigError(f"ray_address: cannot join a cluster at {address!r}: {error}") from error
    try:
        _check_alone(address)
        yield
    finally:
        ray.shutdown()


def _check_reachable(address: str) -> None:
    """Ray would retry for minutes. Raises ConfigError."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not port.isdigit():
        return  # "auto" and the like
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()
    except OSError as error:
        raise ConfigError(
            f"ray_address: nobody answers at {address} ({error.strerror or error}); "
            "start a cluster with `ray start --head`, or leave ray_address out for a local one"
        ) from error


def _check_alone(address: str) -> None:
    """Nodes are found by name: two deployments in one cluster would take each other's. Raises ConfigError."""
    until = time.monotonic() + ENDED_S
    while True:
        try:
            ray.get_actor(SCHEDULER, namespace=NAMESPACE)
        except ValueError:
            return
        if time.monotonic() > until:
            raise ConfigError(
                f"ray_address: pdserve is being served in the cluster at {address} already; end that first"
            )
        time.sleep(0.1)
