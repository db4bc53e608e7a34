"""Profiles, the choice of NICs, and registration, with the libraries of this machine."""

from __future__ import annotations

import ctypes
import mmap

import pytest

from transport.descriptors import Device, Memory
from transport.dll import load_libfabric
from transport.errors import LibraryMissing, ProviderUnavailable
from transport.fabric import abi, group, info, registration
from transport.fabric.domain import Domain
from transport.fabric.endpoint import Endpoint
from transport.fabric.group import open_domains, rdma_nics
from transport.fabric.profiles import PROFILES, library_name, profile_named
from transport.messages import BUFFERS
from transport.topology import Nic, Topology

HERE = ("tcp", "tcp;ofi_rxm", "sockets", "shm")
BY_ADDRESS = ("tcp", "tcp;ofi_rxm", "sockets")


@pytest.fixture(scope="module")
def library():
    try:
        return load_libfabric()
    except LibraryMissing as error:
        pytest.skip(str(error))


@pytest.fixture
def opened(library):
    """Opens domains and closes them after the test; skips what this library does not have."""
    domains = []

    def open_(provider, nics=None):
        if provider not in info.available(library):
            pytest.skip(f"{library} has no {provider} here")
        domains.extend(new := open_domains(library, profile_named(provider), nics))
        return new

    yield open_
    for domain in domains:
        domain.close()


@pytest.fixture
def memory():
    buffer = mmap.mmap(-1, 1 << 20)
    first = ctypes.c_char.from_buffer(buffer)
    yield Memory(ctypes.addressof(first), 1 << 20)
    del first
    buffer.close()


# Profiles


def test_available_are_profiles_in_the_order_of_preference(library):
    available = info.available(library)
    assert {"tcp", "shm"} <= set(available)
    assert list(available) == [name for name in PROFILES if name in available]


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("cxi", "FI_MR_ENDPOINT"),
        ("verbs", "choose 'verbs;ofi_rxm'"),
        ("efa-direct", "choose 'efa'"),
        ("net", "calls it 'tcp'|called 'tcp'"),
    ],
)
def test_what_is_left_out_says_why_and_what_there_is(name, why):
    with pytest.raises(ProviderUnavailable, match=rf"'{name}' is not supported: .*({why}).*Supported: efa, "):
        profile_named(name)


def test_unknown_provider_names_the_known():
    with pytest.raises(ProviderUnavailable, match="unknown provider 'pigeon'; choose of: efa, verbs;ofi_rxm, tcp"):
        profile_named("pigeon")


@pytest.mark.parametrize("profile", PROFILES.values(), ids=list(PROFILES))
def test_a_window_leaves_room_for_our_own_completions(profile):
    for own in (1, 256, profile.cq_depth // 2 + BUFFERS):
        window = profile.max_window(own)
        assert window > 0 and window + own <= profile.cq_depth


def test_what_was_not_shown_is_not_promised():
    assert not PROFILES["efa"].revokes
    assert all(profile.mr_modes & abi.FI_MR_ENDPOINT == 0 for profile in PROFILES.values())
    assert all(profile.linger_s > 0 for profile in PROFILES.values() if profile.receiver_pulls)


@pytest.mark.parametrize("provider", HERE)
def test_offers_carry_our_immediates_and_say_what_they_are(library, provider):
    profile = profile_named(provider)
    if provider not in info.available(library):
        pytest.skip(f"{library} has no {provider} here")
    found = info.offers(library, info.Query(profile))
    assert found and len({(offer.device, offer.nic) for offer in found}) == len(found)
    for offer in found:
        assert offer.contents.domain_attr.contents.cq_data_size >= 4
        assert offer.nic and not offer.down and offer.speed_gbps >= 0
        assert bool(offer.address) == (profile.reach == "network")
        offer.close()
        offer.close()


@pytest.mark.parametrize("provider", ["efa", "verbs;ofi_rxm"])
def test_rdma_without_a_device_says_so(library, provider):
    if provider in info.available(library):
        pytest.skip(f"{provider} opens here")
    with pytest.raises(
        ProviderUnavailable, match=rf"offers no provider '{provider}' here: .*(RDMA device|needs|has it)"
    ):
        open_domains(library, profile_named(provider))


# NICs


@pytest.mark.parametrize("provider", BY_ADDRESS)
def test_nics_by_address_are_rails_in_their_order(opened, provider):
    addresses = ("127.0.0.3", "127.0.0.1", "127.0.0.2")
    domains = opened(provider, addresses)
    assert tuple(domain.nic for domain in domains) == addresses
    assert [domain.rail for domain in domains] == [0, 1, 2]
    for domain, address in zip(domains, addresses, strict=True):
        endpoint = Endpoint(domain)
        assert endpoint.name[4:8] == bytes(map(int, address.split(".")))
        endpoint.close()


def test_a_nic_by_the_name_of_its_interface(opened):
    (domain,) = opened("tcp", ("lo",))
    assert domain.offer.device == "lo" and domain.nic == "127.0.0.1"


def test_by_default_one_interface_and_no_loopback_if_there_is_another(opened):
    (domain,) = opened("tcp")
    others = info.offers(domain.library, info.Query(domain.profile))
    ipv4 = [offer.address for offer in others if "." in offer.address and not offer.address.startswith("127.")]
    for offer in others:
        offer.close()
    assert not ipv4 or domain.nic in ipv4


@pytest.mark.parametrize(
    ("provider", "nics", "why"),
    [
        ("tcp", ("pigeon0",), "no NIC 'pigeon0' on this machine; it has: .*lo"),
        ("tcp", ("127.0.0.1", "203.0.113.9"), r"no interface .* 203\.0\.113\.9"),
        ("tcp", ("127.0.0.1", "lo"), "'lo' is named twice"),
        ("tcp", (), "empty list"),
        ("shm", ("lo",), "shm works within one host"),
    ],
)
def test_nics_that_cannot_be(library, provider, nics, why):
    with pytest.raises(ProviderUnavailable, match=why):
        open_domains(library, profile_named(provider), nics)


class Port:
    """An offer of a device that this machine has not: names and state only."""

    def __init__(self, nic, down=False):
        self.nic = self.device = nic
        self.down, self.closed = down, False

    def close(self):
        self.closed = True


def _topology(*names, software=()):
    nics = tuple(
        Nic(name, None, -1, 100.0, "Ethernet", "rxe" if name in software else "mlx5_core", True, rail)
        for rail, name in enumerate(names)
    )
    return Topology((), nics, {}, ((0,),))


@pytest.fixture
def ports(monkeypatch):
    def set_(*ports, topology):
        monkeypatch.setattr(group, "_offers", lambda library, profile, address="": list(ports))
        monkeypatch.setattr(group, "read_topology", lambda: topology)

    return set_


def test_rdma_takes_all_ports_that_are_up_with_the_rails_of_the_node(library, ports):
    up, down, also = Port("mlx5_0"), Port("mlx5_1", down=True), Port("mlx5_2")
    topology = _topology("mlx5_0", "mlx5_1", "mlx5_2")
    ports(up, down, also, topology=topology)
    profile = profile_named("verbs;ofi_rxm")
    chosen = group._best(library, profile, topology)
    assert chosen == [up, also] and group._rails(chosen, profile, topology) == [0, 2]
    assert down.closed and not up.closed


def test_rdma_with_every_port_down_names_them(library, ports):
    topology = _topology()
    ports(Port("mlx5_0", down=True), topology=topology)
    with pytest.raises(ProviderUnavailable, match="no port of any RDMA device is up; there are: mlx5_0"):
        open_domains(library, profile_named("verbs;ofi_rxm"))


def test_rdma_done_in_software_is_never_chosen_by_itself(library, ports):
    ports(Port("rxe0"), topology=_topology("rxe0", software={"rxe0"}))
    assert rdma_nics(library) == {}
    ports(Port("mlx5_0"), topology=_topology("mlx5_0"))
    assert rdma_nics(library) == {"efa": ("mlx5_0",), "verbs;ofi_rxm": ("mlx5_0",)}


# Registration


@pytest.mark.parametrize("provider", HERE)
def test_exposed_memory_has_a_key_of_its_own_each_time(opened, memory, provider):
    (domain,) = opened(provider)
    regions = [domain.expose(memory) for _ in range(3)]
    assert len({region.key for region in regions}) == 3 and all(len(region.key) == 8 for region in regions)
    expected = memory.address if domain.mr_mode & abi.FI_MR_VIRT_ADDR else 0
    assert {region.base for region in regions} == {expected}
    domain.release(regions[0])
    domain.release(regions[0])
    assert regions[0].handle == 0 and regions[1].handle


@pytest.mark.parametrize("provider", HERE)
def test_sources_are_registered_only_where_that_is_asked_for(opened, memory, provider):
    (domain,) = opened(provider)
    for region in (domain.register_source(memory), domain.register_buffers(memory)):
        assert bool(region.handle) == domain.local_registration


@pytest.mark.parametrize(
    ("memory", "why"),
    [
        (Memory(0, 4096), "needs an address"),
        (Memory(1 << 40, 0), "positive length"),
        (Memory(1 << 12, 4096), "not all of it is mapped"),
        (Memory((1 << 64) - 4096, 8192), "beyond the address space"),
    ],
)
def test_memory_that_cannot_be(opened, memory, why):
    (domain,) = opened("tcp")
    with pytest.raises(ValueError, match=why):
        domain.expose(memory)


def test_memory_with_a_hole_in_it(opened):
    (domain,) = opened("tcp")
    page, libc = mmap.PAGESIZE, ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    how = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    start = libc.mmap(None, ctypes.c_size_t(4 * page), mmap.PROT_READ | mmap.PROT_WRITE, how, -1, ctypes.c_size_t(0))

    def unmap(first, count):
        assert libc.munmap(ctypes.c_void_p(start + first * page), ctypes.c_size_t(count * page)) == 0

    unmap(2, 1)
    with pytest.raises(ValueError, match="not all of it is mapped"):
        domain.expose(Memory(start, 4 * page))
    domain.release(domain.expose(Memory(start + 7, 2 * page - 7)))
    unmap(0, 2)
    unmap(3, 1)


@pytest.mark.parametrize("memory", [Memory(1 << 40, 4096, Device("cuda", 1)), Memory(1 << 40, 64, Device("cuda"), 3)])
def test_device_memory_without_support_for_it(opened, memory):
    (domain,) = opened("tcp")
    if domain.offer.device_memory:
        pytest.skip("this library registers device memory")
    for register in (domain.expose, domain.register_source):
        with pytest.raises(ProviderUnavailable, match=r"cannot register .* of cuda:[01] memory.*FI_HMEM"):
            register(memory)


def test_what_is_passed_for_device_memory():
    attr, flags, kept = registration._attributes(Memory(1 << 40, 4096, Device("cuda", 3)), abi.FI_WRITE)
    assert (attr.iface, attr.device, attr.access, flags) == (abi.FI_HMEM_CUDA, 3, abi.FI_WRITE, 0)
    assert (attr.mr_iov, kept.iov_base, kept.iov_len) == (ctypes.addressof(kept), 1 << 40, 4096)
    through = Memory((1 << 40) + 64, 4096, Device("cuda", 3), dmabuf_fd=7, dmabuf_offset_bytes=64)
    attr, flags, kept = registration._attributes(through, abi.FI_WRITE)
    assert flags == abi.FI_MR_DMABUF and attr.mr_iov == ctypes.addressof(kept)
    assert (kept.fd, kept.offset, kept.len, kept.base_addr) == (7, 64, 4096, 1 << 40)


def test_a_closed_domain_is_closed_for_good(opened, memory):
    (domain,) = opened("tcp")
    region = domain.expose(memory)
    domain.close()
    domain.close()
    assert isinstance(domain, Domain) and (region.handle, domain.handle, domain.fabric) == (0, 0, 0)


def test_what_tcp_was_called_in_1_17(library):
    old = type(library)(library.path, (1, 17), library.lib)
    assert library_name(PROFILES["tcp"], old) == "net"
    assert library_name(PROFILES["tcp"], library) == ("tcp" if library.version >= (1, 18) else "net")
