"""Direct reading: bit-equal, within the memory there is, no mapping, cancelled in time, nothing left page-locked."""

import os
import queue
import subprocess
import sys
import threading
import time
import warnings

import pytest
import safetensors.torch
import torch
from comfy_server import PACK_ROOT
from conftest import pack_module

checkpoint = pack_module("kernels.checkpoint")
dtypes = pack_module("kernels.checkpoint.dtypes")
memory = pack_module("kernels.checkpoint.memory")
pieces = pack_module("kernels.checkpoint.pieces")
reader = pack_module("kernels.checkpoint.reader")
staging = pack_module("kernels.checkpoint.staging")
CheckpointError = checkpoint.CheckpointError


class Cancelled(BaseException):
    """ComfyUI's cancel is no Exception."""


def ragged(seed=0) -> dict[str, torch.Tensor]:
    """Every dtype in sizes from nothing to a few chunks, scalars and empty tensors among them."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for place, (name, dtype) in enumerate(dtypes.TORCH_DTYPES.items()):
        top = 2 if dtype == torch.bool else 256
        raw = torch.randint(0, top, (131 * (place + 1), 16), dtype=torch.uint8, generator=generator)
        matrix = raw.view(dtype)
        tensors |= {name: matrix, f"{name}.0-d": matrix[3, 0].clone(), f"{name}.empty": torch.empty(0, 3, dtype=dtype)}
    return tensors


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    a, b = a.cpu(), b.cpu()
    raw = [tensor.reshape(-1).view(torch.uint8) for tensor in (a, b)]
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*raw)


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "model.safetensors"
    checkpoint.write(path, ragged(), {"k": "v"})
    return path


# ---------------------------------------------------------------- the plan


@pytest.mark.parametrize("chunk", [1, 7, 100, 4096, 10**9])
def test_the_plan_covers_every_byte_once_in_file_order(file, chunk):
    header = checkpoint.read_header(file)
    chunks = pieces.plan(header, chunk)
    position, next_byte = header.data_offset, dict.fromkeys(header.tensors, 0)
    for part in chunks:
        assert part.offset == position
        assert 0 < part.nbytes == sum(piece.stop - piece.start for piece in part.pieces) <= chunk
        assert len(part.pieces) <= pieces.MOST_BUFFERS
        for piece in part.pieces:
            assert piece.start == next_byte[piece.name] < piece.stop
            next_byte[piece.name] = piece.stop
        position += part.nbytes
    assert position == header.file_bytes
    assert next_byte == {name: info.nbytes for name, info in header.tensors.items()}


def test_many_small_tensors_stay_within_the_systems_limit_of_buffers(tmp_path):
    path = tmp_path / "model.safetensors"
    tensors = {f"t{i}": torch.full((3,), i % 251, dtype=torch.uint8) for i in range(3000)}
    checkpoint.write(path, tensors)
    assert max(len(chunk.pieces) for chunk in pieces.plan(checkpoint.read_header(path), 1 << 20)) == pieces.MOST_BUFFERS
    loaded, _ = checkpoint.load(path)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())


# ---------------------------------------------------------------- to the CPU


@pytest.mark.parametrize("preadv", [True, False])
@pytest.mark.parametrize("chunk", [13, 4096, 4 << 20])
def test_bit_equal_to_safetensors_whatever_the_chunk(file, chunk, preadv, monkeypatch):
    """Also without preadv, as on Windows: threads with handles of their own."""
    monkeypatch.setattr(reader, "CHUNK_BYTES", chunk)
    if not preadv:
        monkeypatch.delattr(os, "preadv", raising=False)
    loaded, metadata = checkpoint.load(file)
    want = safetensors.torch.load_file(file)
    assert metadata == {"k": "v"} and list(loaded) == list(checkpoint.read_header(file).tensors)
    assert loaded.keys() == want.keys() == ragged().keys()
    assert all(same_bits(loaded[name], want[name]) and loaded[name].is_contiguous() for name in want)


def test_a_read_that_returns_less_than_asked_is_continued(file, monkeypatch):
    real = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: real(fd, [buffers[0][:5]], offset))
    loaded, _ = checkpoint.load(file)
    assert all(same_bits(loaded[name], tensor) for name, tensor in ragged().items())


def test_direct_read_keeps_no_mapping_and_own_storages(tmp_path):
    path = tmp_path / "big.safetensors"
    checkpoint.write(path, {f"t{i}": torch.full((1 << 18,), i, dtype=torch.float32) for i in range(4)})
    tensors, _ = checkpoint.load(path)
    assert len({tensor.untyped_storage().data_ptr() for tensor in tensors.values()}) == 4
    assert all(tensor.untyped_storage().nbytes() == 1 << 20 for tensor in tensors.values())
    if sys.platform == "linux":
        with open("/proc/self/maps") as maps:
            assert "big.safetensors" not in maps.read()
    os.truncate(path, 0)
    assert all(float(tensors[f"t{i}"].sum()) == i * (1 << 18) for i in range(4))


IN_A_PROCESS = """
import importlib.util, sys
folder = sys.argv[1]
spec = importlib.util.spec_from_file_location("k", folder + "/__init__.py", submodule_search_locations=[folder])
sys.modules["k"] = importlib.util.module_from_spec(spec); spec.loader.exec_module(sys.modules["k"])
from k import checkpoint
def peak():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")) * 1024
checkpoint.load(sys.argv[3])  # imports and first calls are no part of it
before = peak()
kept = checkpoint.load(sys.argv[2], progress=lambda done, total: None)
print(peak() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="a process's own peak is read from /proc")
@pytest.mark.parametrize("tensors", [1, 24])
def test_the_peak_is_the_file(tmp_path, file, tensors):
    """At most 1.05 times the file, in a process of its own, because a peak is a high-water mark."""
    path, size = tmp_path / "big.safetensors", 360 << 20
    checkpoint.write(path, {f"t{i}": torch.ones(size // tensors, dtype=torch.uint8) for i in range(tensors)})
    command = [sys.executable, "-c", IN_A_PROCESS, str(PACK_ROOT / "kernels"), str(path), str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert 0.95 < int(done.stdout) / size <= 1.05


# ---------------------------------------------------------------- progress and cancel


def test_progress_is_reported_by_the_calling_thread_and_only_rises(file):
    seen = []
    checkpoint.load(file, progress=lambda done, total: seen.append((done, total, threading.current_thread())))
    assert {thread for _, _, thread in seen} == {threading.current_thread()}
    done = [entry[0] for entry in seen]
    assert done == sorted(done) and done[0] == 0 and done[-1] == seen[0][1]


def test_a_stalled_disk_can_be_cancelled(file, monkeypatch):
    """No chunk arrives, and the progress function is still called: that is where ComfyUI's cancel is noticed."""
    release = threading.Event()
    real = pieces.File.fill

    def stall(self, offset, buffers):
        assert release.wait(60)
        real(self, offset, buffers)

    monkeypatch.setattr(pieces.File, "fill", stall)
    calls = []

    def progress(done, total):
        calls.append(done)
        if len(calls) == 5:
            release.set()
            raise Cancelled

    with pytest.raises(Cancelled):
        checkpoint.load(file, progress=progress)
    assert calls == [0] * 5


def test_a_cancel_ends_the_threads_and_reads_no_further(file, monkeypatch):
    monkeypatch.setattr(reader, "CHUNK_BYTES", 64)
    reads, real = [], pieces.File.fill

    def slow(self, offset, buffers):
        reads.append(offset)
        time.sleep(0.01)
        real(self, offset, buffers)

    monkeypatch.setattr(pieces.File, "fill", slow)

    def progress(done, total):
        if done:
            raise Cancelled

    with pytest.raises(Cancelled):
        checkpoint.load(file, progress=progress)
    total = len(pieces.plan(checkpoint.read_header(file), 64))
    assert len(reads) < total / 4
    assert not [thread for thread in threading.enumerate() if thread.name == "h3bw-read"]


def test_an_error_of_a_thread_is_the_callers(file, monkeypatch):
    def fail(self, offset, buffers):
        raise CheckpointError("truncated", self.name, "", "x")

    monkeypatch.setattr(pieces.File, "fill", fail)
    with pytest.raises(CheckpointError, match="truncated"):
        checkpoint.load(file)


@pytest.mark.parametrize("preadv", [True, False])
def test_an_error_of_the_disk_names_the_file_and_no_folder(file, monkeypatch, preadv):
    def broken(*arguments):
        raise OSError(5, "Input/output error")

    if preadv:
        monkeypatch.setattr(os, "preadv", broken)
    else:
        monkeypatch.delattr(os, "preadv", raising=False)
        monkeypatch.setattr(pieces.File, "_read_some", broken)
    with pytest.raises(CheckpointError, match=r"^model.safetensors: cannot be read: Input/output error") as caught:
        checkpoint.load(file)
    assert caught.value.code == "unreadable" and str(file.parent) not in str(caught.value)


# ---------------------------------------------------------------- the budget


def test_too_little_memory_is_refused_with_both_numbers_before_anything_is_allocated(file, monkeypatch):
    monkeypatch.setattr(memory, "system_available", lambda: 100 << 20)
    monkeypatch.setattr(torch, "empty", None)
    with pytest.raises(CheckpointError) as caught:
        checkpoint.load(file)
    header = checkpoint.read_header(file)
    needed = header.file_bytes - header.data_offset + memory.MARGIN_BYTES
    assert caught.value.code == "memory"
    assert f"({needed} bytes)" in str(caught.value) and f"({100 << 20} bytes)" in str(caught.value)


def test_enough_memory_or_none_known_is_not_refused(file, monkeypatch):
    header = checkpoint.read_header(file)
    for available in (header.file_bytes - header.data_offset + memory.MARGIN_BYTES, None):
        monkeypatch.setattr(memory, "system_available", lambda available=available: available)
        checkpoint.load(file)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/meminfo")
def test_what_linux_calls_available():
    available = memory.system_available()
    with open("/proc/meminfo") as lines:
        total = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemTotal"))
    assert 0 < available <= total


class Properties:
    def __init__(self, integrated):
        self.is_integrated = integrated


@pytest.mark.parametrize(
    ("integrated", "system", "cuda", "refused"),
    [
        (True, 2 << 30, 100 << 30, "the system has 2.00 GiB"),  # unified memory: CUDA's number means nothing
        (True, 100 << 30, 0, None),
        (False, 2 << 30, 100 << 30, None),  # the file does not go through host memory
        (False, 100 << 30, 2 << 30, "has 2.50 GiB"),
        (False, 1 << 20, 100 << 30, "the system has 0.00 GiB"),  # not even the staging buffers
    ],
)
def test_the_budget_of_a_gpu(integrated, system, cuda, refused, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties(integrated))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (cuda, 200 << 30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 3 << 29)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 1 << 30)
    monkeypatch.setattr(memory, "system_available", lambda: system)
    call = ("f", 12 << 30, torch.device("cuda", 0), 64 << 20)
    if refused is None:
        memory.require(*call)
    else:
        with pytest.raises(CheckpointError, match=refused) as caught:
            memory.require(*call)
        assert caught.value.code == "memory"


# ---------------------------------------------------------------- to a GPU, which a thread plays here


class LateDevice:
    """What `staging.Cuda` is, on the CPU, with the one thing that goes wrong there: copies happen late.

    A thread carries them out in order and slowly, so that a buffer filled again too early shows in the bytes.
    """

    def __init__(self, refuses_lock=False, fails_after=None):
        self.refuses_lock, self.fails_after = refuses_lock, fails_after
        self.queue: queue.SimpleQueue = queue.SimpleQueue()
        self.locked: list[int] = []
        self.ever_locked = self.copied = self.finished = 0
        threading.Thread(target=self._work, daemon=True).start()

    def _work(self):
        while (job := self.queue.get()) is not None:
            job()

    def begin_thread(self):
        assert threading.current_thread().name == "h3bw-read"

    def allocate(self, nbytes):
        return torch.zeros(nbytes, dtype=torch.uint8)

    def copy(self, target, source):
        if self.fails_after is not None and self.copied >= self.fails_after:
            raise RuntimeError("CUDA error: out of memory")
        self.copied += 1

        def job():
            time.sleep(0.0005)
            assert self.locked or self.refuses_lock, "the buffer was unlocked before its copy ran"
            target.copy_(source)

        self.queue.put(job)

    def mark(self):
        reached = threading.Event()
        self.queue.put(reached.set)
        return lambda: reached.wait(60)

    def finish(self):
        self.mark()()
        self.finished += 1

    def lock(self, buffer):
        if self.refuses_lock:
            return False
        self.locked.append(buffer.data_ptr())
        self.ever_locked += buffer.numel()
        return True

    def unlock(self, buffer):
        self.locked.remove(buffer.data_ptr())


def stage(path, device, progress=None, **options):
    header = checkpoint.read_header(path)
    with pieces.File(str(path)) as source:
        raw = staging.load(source, header, device, progress, **options)
    return {
        name: raw[name].view(dtypes.TORCH_DTYPES[info.dtype]).reshape(info.shape)
        for name, info in header.tensors.items()
    }


@pytest.mark.parametrize(("threads", "chunk"), [(1, 64), (1, 5000), (3, 512), (4, 4096), (2, 1 << 20)])
def test_staged_bytes_are_right_and_the_buffers_bounded(file, threads, chunk):
    device = LateDevice()
    loaded = stage(file, device, threads=threads, chunk_bytes=chunk)
    assert loaded.keys() == ragged().keys()
    assert all(same_bits(loaded[name], tensor) for name, tensor in ragged().items())
    assert 0 < device.ever_locked <= staging.staging_bytes(threads, chunk)
    assert device.locked == [] and device.finished == 1


def test_a_buffer_is_not_filled_again_before_its_copy(file, monkeypatch):
    """The guard itself: without the wait the late copies carry other bytes."""
    real = LateDevice.mark
    monkeypatch.setattr(LateDevice, "mark", lambda self: lambda: None)
    monkeypatch.setattr(LateDevice, "finish", lambda self: real(self)())
    loaded = stage(file, LateDevice(), threads=1, chunk_bytes=64)
    assert not all(same_bits(loaded[name], tensor) for name, tensor in ragged().items())


@pytest.mark.parametrize("after", [0, 10])
def test_a_cancel_or_an_error_leaves_nothing_locked(file, after):
    def progress(done, total):
        if done > total * after / 100:
            raise Cancelled

    device = LateDevice()
    with pytest.raises(Cancelled):
        stage(file, device, progress, threads=2, chunk_bytes=256)
    assert device.locked == [] and device.finished == 1
    device = LateDevice(fails_after=after)
    with pytest.raises(RuntimeError, match="out of memory"):
        stage(file, device, threads=2, chunk_bytes=256)
    assert device.locked == [] and device.finished == 1


def test_memory_that_cannot_be_locked_is_said_and_used_all_the_same(file):
    with pytest.warns(RuntimeWarning, match="could not be page-locked"):
        loaded = stage(file, LateDevice(refuses_lock=True), threads=2, chunk_bytes=4096)
    assert all(same_bits(loaded[name], tensor) for name, tensor in ragged().items())


def test_load_takes_the_staged_way_to_cuda(file, monkeypatch):
    """The whole of `load` with the fake in place of the GPU: device, budget, dtypes, order."""
    device, asked = LateDevice(), []
    monkeypatch.setattr(staging, "Cuda", lambda wanted: asked.append(wanted) or device)
    monkeypatch.setattr(memory, "require", lambda *arguments: asked.append(arguments))
    loaded, _ = checkpoint.load(file, "cuda:1")
    header = checkpoint.read_header(file)
    staged = staging.staging_bytes(staging.threads_here())
    total = header.file_bytes - header.data_offset
    assert asked == [("model.safetensors", total, torch.device("cuda", 1), staged), torch.device("cuda", 1)]
    assert list(loaded) == list(header.tensors)
    assert all(same_bits(loaded[name], tensor) for name, tensor in ragged().items())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        seen = []
        checkpoint.load(file, "cuda:1", progress=lambda done, total: seen.append(done))
    assert seen[-1] == total and len(seen) >= 100
