"""What peers tell each other, as bytes: read back alike, or refused with a reason."""

from __future__ import annotations

import json
import pickle
from contextlib import suppress
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transport.descriptors import (
    DESCRIPTOR_VERSION,
    Device,
    LinkAddress,
    RegionDescriptor,
    check_descriptor,
    check_target,
)
from transport.errors import DescriptorMismatch

_words = st.integers(0, 2**64 - 1)
_names = st.lists(st.binary(max_size=40), min_size=1, max_size=5).map(tuple)
_addresses = st.builds(
    lambda incarnation, names, doorbell: LinkAddress(
        DESCRIPTOR_VERSION, "tcp", incarnation, names, tuple(range(len(names))), doorbell
    ),
    _words, _names, st.binary(max_size=20),
)  # fmt: skip
_descriptors = st.builds(
    RegionDescriptor,
    st.just(DESCRIPTOR_VERSION), st.text(max_size=12), _words, _words, _words, _names,
    st.builds(Device, st.sampled_from(["host", "cuda"]), st.integers(0, 15)),
)  # fmt: skip
ADDRESS = LinkAddress(DESCRIPTOR_VERSION, "tcp", 7, (b"a", b"\0\xff"), (0, 1), b"bell")
DESCRIPTOR = RegionDescriptor(DESCRIPTOR_VERSION, "tcp", 7, 4096, 1 << 40, (b"12345678", b"k"), Device("cuda", 3))


@given(_addresses)
def test_an_address_comes_back_alike(address):
    assert LinkAddress.from_bytes(address.to_bytes()) == address == pickle.loads(pickle.dumps(address))


@given(_descriptors)
def test_a_descriptor_comes_back_alike(descriptor):
    back = RegionDescriptor.from_bytes(descriptor.to_bytes())
    assert back == descriptor == pickle.loads(pickle.dumps(descriptor))
    assert back.device == descriptor.device and isinstance(back.keys, tuple)


@pytest.mark.parametrize("given", [ADDRESS, DESCRIPTOR])
def test_another_version_is_refused_by_naming_both(given):
    foreign = replace(given, version=99).to_bytes()
    with pytest.raises(DescriptorMismatch, match=f"version 99, this side speaks {DESCRIPTOR_VERSION}"):
        type(given).from_bytes(foreign)


def test_the_version_is_looked_at_before_what_another_version_may_have_changed():
    data = json.dumps({"kind": "address", "version": 99, "endpoint": "elsewhere"}).encode()
    with pytest.raises(DescriptorMismatch, match="version 99"):
        LinkAddress.from_bytes(data)


def test_one_is_not_taken_for_the_other():
    with pytest.raises(DescriptorMismatch, match="another thing than this address: 'descriptor'"):
        LinkAddress.from_bytes(DESCRIPTOR.to_bytes())
    with pytest.raises(DescriptorMismatch, match="another thing than this descriptor: 'address'"):
        RegionDescriptor.from_bytes(ADDRESS.to_bytes())


@given(st.data())
def test_damaged_bytes_are_refused_or_read_never_anything_else(data):
    given = data.draw(st.sampled_from([ADDRESS, DESCRIPTOR]))
    whole = given.to_bytes()
    at = data.draw(st.integers(0, len(whole) - 1))
    cut = whole[:at] + data.draw(st.binary(max_size=3)) + whole[at + data.draw(st.integers(0, 9)) :]
    with suppress(DescriptorMismatch):
        assert isinstance(type(given).from_bytes(cut), type(given))


@pytest.mark.parametrize("given", [ADDRESS, DESCRIPTOR])
def test_fields_of_other_types_or_missing_are_refused(given):
    fields = json.loads(given.to_bytes())
    for name in fields.keys() - {"kind", "version"}:
        for value in (None, True, -1, 1 << 64, 1.5, [], [[]], {}, ["gg"]):
            with pytest.raises(DescriptorMismatch, match="damaged"):
                type(given).from_bytes(json.dumps({**fields, name: value}).encode())
        with pytest.raises(DescriptorMismatch, match=f"damaged: KeyError.'{name}'"):
            type(given).from_bytes(json.dumps({k: v for k, v in fields.items() if k != name}).encode())


def test_as_many_rails_as_names():
    with pytest.raises(DescriptorMismatch, match="2 names, but 1 rails"):
        LinkAddress.from_bytes(replace(ADDRESS, rails=(0,)).to_bytes())


@pytest.mark.parametrize("data", [b"", b"\x80\x04.", b"[]", b"null", b"7", b'{"kind":3}', b"\xe9", b"[" * 100_000])
def test_what_is_no_document_is_refused(data):
    for kind in (LinkAddress, RegionDescriptor):
        with pytest.raises(DescriptorMismatch):
            kind.from_bytes(data)


def test_provider_and_version_are_checked_where_it_is_used():
    check_descriptor(ADDRESS, "tcp")
    check_descriptor(DESCRIPTOR, "tcp")
    with pytest.raises(DescriptorMismatch, match="address is for provider 'tcp', this side uses 'shm'"):
        check_descriptor(ADDRESS, "shm")
    with pytest.raises(DescriptorMismatch, match="descriptor has version 1, this side speaks"):
        check_descriptor(replace(DESCRIPTOR, version=1), "tcp")


def test_a_target_is_one_of_the_links_peer():
    check_target(DESCRIPTOR, ADDRESS)
    with pytest.raises(DescriptorMismatch, match="another peer"):
        check_target(replace(DESCRIPTOR, incarnation=8), ADDRESS)
    with pytest.raises(DescriptorMismatch, match="1 keys, but the link's peer has 2 NICs"):
        check_target(replace(DESCRIPTOR, keys=(b"k",)), ADDRESS)
