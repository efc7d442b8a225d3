"""Direct loading into a real GPU: bit-equal, host memory bounded by the staging buffers, streams in order, no leak."""

import gc
import json
import sys
import threading
import time

import pytest
import safetensors.torch
import torch
from conftest import pack_module

pytestmark = pytest.mark.gpu

checkpoint = pack_module("kernels.checkpoint")
dtypes = pack_module("kernels.checkpoint.dtypes")
load_bench = pack_module("kernels.measure.load_bench")
pieces = pack_module("kernels.checkpoint.pieces")
quantising = pack_module("kernels.checkpoint.quantize")
scales = pack_module("kernels.checkpoint.scales")
staging = pack_module("kernels.checkpoint.staging")
DEVICE = torch.device("cuda", 0)


class Cancelled(BaseException):
    """ComfyUI's cancel is no Exception."""


def same_bits(a, b) -> bool:
    raw = [tensor.contiguous().reshape(-1).view(torch.uint8).cpu() for tensor in (a, b)]
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*raw)


@pytest.fixture(scope="module")
def every_dtype(tmp_path_factory):
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for place, (name, dtype) in enumerate(dtypes.TORCH_DTYPES.items()):
        top = 2 if dtype == torch.bool else 256
        raw = torch.randint(0, top, (3001 * (place + 1), 16), dtype=torch.uint8, generator=generator)
        matrix = raw.view(dtype)
        tensors |= {name: matrix, f"{name}.0-d": matrix[3, 0].clone(), f"{name}.empty": torch.empty(0, 3, dtype=dtype)}
    path = tmp_path_factory.mktemp("load") / "model.safetensors"
    checkpoint.write(path, tensors)
    return path, tensors


@pytest.fixture(scope="module")
def big(tmp_path_factory):
    """About 1.9 GB: one block of the full-size NVFP4 H3 and its refiner."""
    path = tmp_path_factory.mktemp("load") / "big.safetensors"
    load_bench.write_synthetic(path, {**load_bench.FULL, "blocks": 1}, DEVICE)
    return path


@pytest.mark.parametrize(("threads", "chunk"), [(1, 1 << 16), (3, 100_003), (8, 1 << 20), (16, 8 << 20)])
def test_bit_equal_whatever_the_chunks(every_dtype, threads, chunk):
    path, tensors = every_dtype
    header = checkpoint.read_header(path)
    with pieces.File(str(path)) as source:
        raw = staging.load(source, header, staging.Cuda(DEVICE), None, threads, chunk)
    for name, info in header.tensors.items():
        got = raw[name].view(dtypes.TORCH_DTYPES[info.dtype]).reshape(info.shape)
        assert got.device == DEVICE and same_bits(got, tensors[name]), name


def test_load_is_what_the_library_loads(big):
    loaded, _ = checkpoint.load(big, DEVICE)
    with safetensors.safe_open(str(big), framework="pt", device="cpu") as file:
        assert set(file.keys()) == loaded.keys()
        assert all(same_bits(loaded[name], file.get_tensor(name)) for name in loaded)
    assert len({tensor.untyped_storage().data_ptr() for tensor in loaded.values()}) == len(loaded)


def test_other_streams_may_read_at_once(big):
    """The tensors are complete when load returns, also for a stream that nobody synchronised with it."""
    want = safetensors.torch.load_file(big, device="cpu")
    name = max(want, key=lambda key: want[key].numel())
    for _ in range(5):
        loaded, _ = checkpoint.load(big, DEVICE)
        with torch.cuda.stream(torch.cuda.Stream(DEVICE)):
            assert same_bits(loaded[name], want[name])
        del loaded


def test_memory_in_use_by_queued_work_is_not_written_to(every_dtype):
    """A block freed on the caller's stream, with a kernel on it still queued, is given to the load: it must wait."""
    path, tensors = every_dtype
    size = 3001 * 16
    for _ in range(20):
        torch.cuda.empty_cache()
        stale = [torch.zeros(size * n, dtype=torch.uint8, device=DEVICE) for n in range(1, 20)]
        torch.cuda.synchronize()
        torch.cuda._sleep(20_000_000)
        for block in stale:
            block.fill_(0xAA)  # queued behind the sleep
        del stale, block
        loaded, _ = checkpoint.load(path, DEVICE)
        torch.cuda.synchronize()
        assert all(same_bits(loaded[name], tensor) for name, tensor in tensors.items())


@pytest.mark.skipif(sys.platform != "linux", reason="the peak is read from /proc")
def test_host_memory_is_bounded_by_the_staging_buffers(big):
    def status(name):
        with open("/proc/self/status") as file:
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith(name))

    checkpoint.load(big, DEVICE)
    gc.collect()
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    before = status("VmRSS")
    kept, _ = checkpoint.load(big, DEVICE)
    grown = status("VmHWM") - before
    del kept
    bound = staging.staging_bytes(staging.threads_here())
    print(f"host memory grew by {grown / 2**20:.0f} MiB, the staging buffers have {bound / 2**20:.0f} MiB")
    assert grown <= bound + (64 << 20)
    assert "big.safetensors" not in open("/proc/self/maps").read()  # noqa: SIM115


class Counting(staging.Cuda):
    """Counts what is page-locked."""

    locked = 0

    def lock(self, buffer):
        done = super().lock(buffer)
        type(self).locked += done
        assert buffer.is_pinned()
        self.buffer = buffer
        return done

    def unlock(self, buffer):
        super().unlock(buffer)
        type(self).locked -= 1
        assert not buffer.is_pinned()


@pytest.mark.parametrize("share", [0.0, 0.3])
def test_a_cancel_is_quick_and_leaves_nothing(big, share, monkeypatch):
    monkeypatch.setattr(staging, "Cuda", Counting)
    monkeypatch.setattr(Counting, "locked", 0)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(DEVICE)
    asked = None

    def progress(done, total):
        nonlocal asked
        if done >= share * total:
            asked = time.perf_counter()
            raise Cancelled

    with pytest.raises(Cancelled):
        checkpoint.load(big, DEVICE, progress=progress)
    print(f"cancelled within {(time.perf_counter() - asked) * 1000:.0f} ms")
    gc.collect()
    assert Counting.locked == 0 and torch.cuda.memory_allocated(DEVICE) == before
    assert not [thread for thread in threading.enumerate() if thread.name == "h3bw-read"]
    loaded, _ = checkpoint.load(big, DEVICE)
    assert Counting.locked == 0 and len(loaded) > 50


def test_too_little_gpu_memory_is_said_first(every_dtype, monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000, 1 << 40))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 0)
    properties = torch.cuda.get_device_properties(DEVICE)
    if getattr(properties, "is_integrated", False):
        pytest.skip("gpu: unified memory is judged by what the system calls available")
    with pytest.raises(checkpoint.CheckpointError, match=r"cuda:0, which has 0.00 GiB \(1000 bytes\) free"):
        checkpoint.load(every_dtype[0], DEVICE)


def test_the_bench_writes_a_valid_record(tmp_path, big):
    """Its gates are measurements, judged by whoever reads the record; here only that they were all made."""
    path = tmp_path / "load.json"
    load_bench.run(DEVICE, big, path, rounds=1, sweep=True)
    record = json.loads(path.read_text("utf-8"))
    assert record["status"] == "finished" and record["kind"] == "load"
    assert pack_module("kernels.measure.validation").validate(record) == []
    results = {gate["name"]: gate["result"] for gate in record["gates"]}
    assert results["tensors that differ from safetensors"] == "passed" and len(results) == 3
    print(load_bench.as_text(record))


@pytest.mark.parametrize("choice", scales.CHOICES)
def test_quantising_on_the_gpu_leaves_the_error_of_the_cpu(tmp_path, choice):
    path = tmp_path / "source.safetensors"
    checkpoint.write(path, *checkpoint.tiny_h3(quantise=False))
    reports = {}
    for device in ("cpu", "cuda"):
        out = tmp_path / f"{device}.safetensors"
        reports[device] = checkpoint.quantize_file(path, out, scale=choice, device=device)
    for ours, theirs in zip(reports["cuda"]["layers"], reports["cpu"]["layers"], strict=True):
        assert ours["relative_error"] == pytest.approx(theirs["relative_error"], rel=1e-4)
    on_gpu, on_cpu = (checkpoint.load(tmp_path / f"{device}.safetensors")[0] for device in ("cuda", "cpu"))
    differing = sum(
        int((on_gpu[name].reshape(-1).view(torch.uint8) != on_cpu[name].reshape(-1).view(torch.uint8)).sum())
        for name in on_cpu
    )
    print(f"{choice}: {differing} bytes differ between the GPU's file and the CPU's")
    assert differing < 1e-3 * sum(tensor.numel() * tensor.element_size() for tensor in on_cpu.values())
