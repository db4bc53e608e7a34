import io

import pytest

from pdserve.bench.transport import wire
from pdserve.bench.transport.cli import main
from pdserve.bench.transport.load import SideSpec
from pdserve.bench.transport.machine import processor_of
from pdserve.bench.transport.plan import LOCAL_NICS, Plan, cpus_of_sides, size_bytes


@pytest.mark.parametrize(
    ("text", "expected"), [("65536", 65536), ("64KiB", 65536), ("64k", 65536), ("1MiB", 1 << 20), (" 2 m ", 2 << 20)]
)
def test_sizes_are_read_as_people_write_them(text, expected):
    assert size_bytes(text) == expected


@pytest.mark.parametrize("text", ["", "0", "-1", "64GB", "large"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(ValueError):
        size_bytes(text)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--only", "paged,singel"], "no section 'singel'; there are: paged, single, operations, latency, post, idle"),
        (["--pages", "64GB"], "'64GB' is no size; write 65536, 64KiB or 1MiB"),
        (["--rounds", "0"], "'0' is no whole number above 0"),
        (["--mib", "1", "--pages", "2MiB"], "blocks of 2097152 bytes do not fit 1 MiB: raise --mib"),
        (["--connect", "host:port"], "'host:port' is no HOST or HOST:PORT"),
    ],
)
def test_wrong_options_are_refused_with_what_is_allowed(arguments, message, capsys):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2 and message in capsys.readouterr().err


def test_the_sides_share_the_cpus_and_have_none_in_common():
    assert cpus_of_sides({0, 1}) == ((0,), (1,))
    assert cpus_of_sides({3}) == ((), ())
    assert cpus_of_sides({1, 2, 5}) == ((1,), (2,))
    assert cpus_of_sides(set(range(16))) == ((0, 1), (2, 3))


def test_several_nics_are_this_hosts_addresses_unless_some_are_named():
    plan = Plan(("tcp", "shm", "ucx", "verbs;ofi_rxm"))
    assert plan.nics_on("tcp") == (LOCAL_NICS, LOCAL_NICS) and plan.nic_on("tcp") == ((), ())
    assert plan.nics_on("shm") == plan.nics_on("ucx") == plan.nics_on("verbs;ofi_rxm") == ((), ())
    named = Plan(("verbs;ofi_rxm",), nics=("rxe0", "rxe1"), their_nics=("mlx5_0", "mlx5_1"))
    assert named.nics_on("verbs;ofi_rxm") == (("rxe0", "rxe1"), ("mlx5_0", "mlx5_1"))
    assert named.nic_on("verbs;ofi_rxm") == (("rxe0",), ("mlx5_0",)) and named.nics_on("shm") == ((), ())
    assert Plan(("tcp",), connect=("other", 7470)).nics_on("tcp") == ((), ())


def test_a_side_learns_its_part_through_json(tmp_path):
    spec = SideSpec("engine/2 NICs", "tcp", True, 1 << 20, 128, LOCAL_NICS, (0, 1))
    path = tmp_path / "line"
    with path.open("wb") as stream:
        wire.write(stream, {"spec": {field: getattr(spec, field) for field in spec.__slots__}, "name": b"\x00\xff"})
    read = wire.read(path.read_bytes())
    assert SideSpec.from_json(read["spec"]) == spec and read["name"] == b"\x00\xff"
    with pytest.raises(EOFError):
        wire.read(b"")
    with pytest.raises(TypeError, match="set cannot be sent"):
        wire.write(io.BytesIO(), {1})


def test_the_processor_is_named_where_the_kernel_does():
    assert processor_of("processor : 0\nmodel name\t: Some CPU @ 3 GHz\n") == "Some CPU @ 3 GHz"
    assert processor_of("processor : 0\nBogoMIPS : 50\n") == ""
