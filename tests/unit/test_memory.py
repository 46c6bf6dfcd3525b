"""Where a buffer lies, and which buffers are refused."""

from __future__ import annotations

import array
import ctypes
import mmap
import os

import numpy as np
import pytest

from rdma_kv.errors import ConfigError
from rdma_kv.memory import PAGE_BYTES, HostMemory, locate, locate_all


def bytes_at(address: int, count: int) -> bytes:
    return ctypes.string_at(address, count)


@pytest.mark.parametrize("dtype", ["uint8", "float16", "int64"])
def test_an_array_lies_where_its_bytes_are(dtype: str):
    data = np.arange(24, dtype=dtype).reshape(2, 3, 4)
    address, length = locate("pool", data)
    assert length == data.nbytes
    assert bytes_at(address, length) == data.tobytes()


def test_a_contiguous_part_of_an_array_lies_inside_it():
    data = np.arange(24, dtype=np.int32).reshape(4, 6)
    address, length = locate("pool", data[2:])
    assert (address - locate("pool", data)[0], length) == (48, 48)


@pytest.mark.parametrize(
    "buffer",
    [bytearray(b"0123"), memoryview(bytearray(b"0123")), array.array("b", b"0123")],
    ids=lambda b: type(b).__name__,
)
def test_anything_with_writable_memory_can_be_located(buffer: object):
    address, length = locate("pool", buffer)
    assert bytes_at(address, length) == b"0123"


def test_mapped_memory_can_be_located():
    mapped = mmap.mmap(-1, 4096)
    mapped[:4] = b"0123"
    address, length = locate("pool", mapped)
    assert length == 4096
    assert bytes_at(address, 4) == b"0123"


SQUARE = np.arange(16, dtype=np.int32).reshape(4, 4)


@pytest.mark.parametrize(
    ("buffer", "problem"),
    [
        (SQUARE.T, "not contiguous"),
        (SQUARE[:, :2], "not contiguous"),
        (SQUARE[::2], "not contiguous"),
        (memoryview(SQUARE.T), "not contiguous"),
        (memoryview(bytearray(8))[::2], "not contiguous"),
        (b"0123", "read-only"),
        (np.frombuffer(b"0123", dtype=np.uint8), "read-only"),
        (np.array([None, "text"], dtype=object), "Python objects"),
        ([1, 2, 3], "exposes no memory"),
        ("text", "exposes no memory"),
        (None, "exposes no memory"),
    ],
)
def test_other_buffers_are_refused_by_the_name_of_the_setting(buffer: object, problem: str):
    with pytest.raises(ConfigError, match=problem) as refused:
        locate("pools.kv", buffer)
    assert refused.value.field == "pools.kv"


def test_several_buffers_are_named_by_their_number():
    data = [np.zeros(4, dtype=np.uint8), np.zeros(8, dtype=np.uint8)]
    addresses, lengths = locate_all("pool", data)
    assert addresses.tolist() == [part.ctypes.data for part in data]
    assert lengths.tolist() == [4, 8]
    assert locate_all("pool", data[1])[1].tolist() == [8]
    with pytest.raises(ConfigError) as refused:
        locate_all("pool", (data[0], b"read-only"))
    assert refused.value.field == "pool[1]"


def test_staging_starts_at_a_page_is_zero_and_writable():
    memory = HostMemory(3 * 4096)
    assert memory.address % mmap.PAGESIZE == 0
    assert memory.length_bytes == memory.view.nbytes == 3 * 4096
    assert not memory.view.any()
    memory.view[4096:4100] = (1, 2, 3, 4)
    assert bytes_at(memory.address + 4096, 4) == b"\x01\x02\x03\x04"


# --- torch -------------------------------------------------------------------------------------------------------------


def test_a_cpu_tensor_lies_where_its_bytes_are():
    torch = pytest.importorskip("torch", reason="torch is an extra; without it no tensor can be passed")
    tensor = torch.arange(24, dtype=torch.int16).reshape(2, 3, 4)
    address, length = locate("pool", tensor[1])
    assert length == 24
    assert bytes_at(address, length) == tensor[1].numpy().tobytes()
    assert locate("pool", torch.zeros(4, dtype=torch.bfloat16))[1] == 8


def test_other_tensors_are_refused():
    torch = pytest.importorskip("torch", reason="torch is an extra; without it no tensor can be passed")
    with pytest.raises(ConfigError, match="not contiguous"):
        locate("pool", torch.zeros(4, 4).T)
    with pytest.raises(ConfigError, match="on meta"):
        locate("pool", torch.zeros(4, device="meta"))


def test_retired_pages_are_gone_and_those_beside_them_are_not():
    memory = HostMemory(3 * PAGE_BYTES)
    memory.view[:] = 7
    memory.retire(PAGE_BYTES, PAGE_BYTES)
    assert not memory.view[:PAGE_BYTES].tobytes().strip(b"\7")
    assert not memory.view[2 * PAGE_BYTES :].tobytes().strip(b"\7")
    with open("/proc/self/maps") as maps:
        spans = [line.split()[:2] for line in maps]
    first = memory.address + PAGE_BYTES
    assert any(span == f"{first:x}-{first + PAGE_BYTES:x}" and rights.startswith("---") for span, rights in spans)
    reading, writing = os.pipe()
    with pytest.raises(OSError, match="Bad address"):
        os.write(writing, memoryview(memory._map)[PAGE_BYTES : PAGE_BYTES + 1])
    os.close(reading)
    os.close(writing)


@pytest.mark.parametrize(
    ("offset", "length"), [(0, 1), (1, PAGE_BYTES), (0, 0), (-PAGE_BYTES, PAGE_BYTES), (PAGE_BYTES, 2 * PAGE_BYTES)]
)
def test_only_whole_pages_of_its_own_are_retired(offset: int, length: int):
    memory = HostMemory(2 * PAGE_BYTES)
    with pytest.raises(ConfigError):
        memory.retire(offset, length)
    memory.view[:] = 1
