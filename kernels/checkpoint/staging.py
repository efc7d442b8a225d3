"""Reading a file into a GPU: threads fill page-locked buffers, and a stream of its own copies them across meanwhile.

A copy from ordinary memory goes through a small buffer of the driver, one at a time, and waits for the CPU; a copy from
page-locked memory is a transfer by the GPU itself, which runs while the next chunks are read. Each thread owns
`BUFFERS_PER_THREAD` buffers and uses them in turn; before it fills one again it waits for the event behind the buffer's
last copy. Host memory: ``threads * BUFFERS_PER_THREAD * chunk``, whatever the file's size, unlocked at the end.
"""

import contextlib
import mmap
import threading
import warnings
from collections.abc import Callable

import torch

from . import pieces
from .header import Header

BUFFERS_PER_THREAD = 2
CHUNK_BYTES = 8 << 20
MOST_THREADS = 12
"""One core copies 5 to 10 GB/s out of the page cache; PCIe 5 takes 50."""
PORTABLE = 1  # cudaHostRegisterPortable: locked for every GPU, whichever is current


def threads_here() -> int:
    return max(1, min(MOST_THREADS, pieces.cores()))


def staging_bytes(threads: int, chunk_bytes: int = CHUNK_BYTES) -> int:
    """Host memory that `load` takes."""
    return threads * BUFFERS_PER_THREAD * chunk_bytes


class Cuda:
    """The operations on a CUDA device that `load` needs. A test puts something else in its place.

    Tensors are allocated on the caller's current stream, as any other tensor is; the copies run on a stream of their
    own, which first waits for that one (the memory may have been freed a moment ago, with work on it still queued).
    """

    def __init__(self, device: torch.device):
        index = torch.cuda.current_device() if device.index is None else device.index
        self.device = torch.device("cuda", index)
        self.caller = torch.cuda.current_stream(self.device)
        self.copies = torch.cuda.Stream(self.device)

    def allocate(self, nbytes: int) -> torch.Tensor:
        """An uninitialised uint8 vector on the device, safe to be written by `copy`."""
        with torch.cuda.stream(self.caller):
            out = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        self.copies.wait_stream(self.caller)
        return out

    def begin_thread(self) -> None:
        """Make the copies' stream the calling thread's own; a reading thread does it once, and ends with the load."""
        torch.cuda.set_stream(self.copies)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Queue a copy, after `begin_thread`; `source` must stay as it is until the next `mark` is reached."""
        target.copy_(source, non_blocking=True)

    def mark(self) -> Callable[[], None]:
        """A function that waits until everything queued so far is done."""
        event = torch.cuda.Event()
        event.record(self.copies)
        return event.synchronize

    def finish(self) -> None:
        """Wait for every copy; afterwards any stream may read the tensors."""
        self.copies.synchronize()

    def lock(self, buffer: torch.Tensor) -> bool:
        """Page-lock host memory; False where the system refuses (copies from it are then right, but slow)."""
        refused = int(torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), buffer.numel(), PORTABLE))
        if refused:
            # CUDA keeps the error for whoever asks next, which would be an innocent kernel launch.
            with contextlib.suppress(RuntimeError):
                torch.zeros(1, device=self.device).add_(1)
        return not refused

    def unlock(self, buffer: torch.Tensor) -> None:
        torch.cuda.cudart().cudaHostUnregister(buffer.data_ptr())


def load(
    file: pieces.File,
    header: Header,
    device,
    progress: Callable[[int, int], None] | None,
    threads: int | None = None,
    chunk_bytes: int = CHUNK_BYTES,
) -> dict[str, torch.Tensor]:
    """Read every tensor's bytes into memory of `device`.

    Args:
        device: a `Cuda`, or what has its methods.
        threads, chunk_bytes: how many read at once, and how much; see `staging_bytes`.

    Returns:
        A uint8 vector by name, complete for every stream.

    Raises:
        What `pieces.run` raises. The copies in flight are waited for and the buffers unlocked first.
    """
    threads = threads_here() if threads is None else threads
    chunks = pieces.plan(header, chunk_bytes)
    threads = max(1, min(threads, len(chunks)))
    # A tensor is allocated when the first chunk that touches it arrives: cudaMalloc then overlaps with reading.
    tensors: dict[str, torch.Tensor] = {}
    for name, info in header.tensors.items():
        if not info.nbytes:
            tensors[name] = device.allocate(0)
    allocating = threading.Lock()
    with _Buffers(device, threads, chunk_bytes) as buffers:

        def transfer(chunk: pieces.Chunk) -> None:
            slot = buffers.take()
            file.fill(chunk.offset, [slot.view[: chunk.nbytes]])
            at = 0
            for piece in chunk.pieces:
                if piece.name not in tensors:
                    with allocating:
                        if piece.name not in tensors:
                            tensors[piece.name] = device.allocate(header.tensors[piece.name].nbytes)
                size = piece.stop - piece.start
                device.copy(tensors[piece.name][piece.start : piece.stop], slot.tensor[at : at + size])
                at += size
            slot.wait = device.mark()

        pieces.run(chunks, transfer, threads, progress)
    return tensors


class _Slot:
    """One buffer, and how to wait until its last copy has left it."""

    def __init__(self, tensor: torch.Tensor):
        self.tensor, self.view = tensor, memoryview(tensor.numpy())
        self.wait: Callable[[], None] | None = None


class _Buffers:
    """Page-locked buffers, `BUFFERS_PER_THREAD` for each thread that asks."""

    def __init__(self, device, threads: int, chunk_bytes: int):
        self._device, self._chunk = device, chunk_bytes
        # A map of no file: whole pages of our own, so that locking them locks nothing else.
        size = staging_bytes(threads, chunk_bytes)
        self._memory = torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8)
        self._next = 0
        self._own, self._lock = threading.local(), threading.Lock()
        self._locked = False

    def __enter__(self):
        self._locked = self._device.lock(self._memory)
        if not self._locked:
            warnings.warn(
                f"{self._memory.numel()} bytes could not be page-locked; the load goes through ordinary memory, slower",
                RuntimeWarning,
                stacklevel=4,
            )
        return self

    def __exit__(self, *exception) -> None:
        # Also after an error or a cancel: what is queued still reads from the buffers and writes to the tensors.
        try:
            self._device.finish()
        finally:
            if self._locked:
                self._device.unlock(self._memory)

    def take(self) -> _Slot:
        """The calling thread's next buffer, free to be filled."""
        slots = getattr(self._own, "slots", None)
        if slots is None:
            self._device.begin_thread()
            with self._lock:
                first, self._next = self._next, self._next + BUFFERS_PER_THREAD
            slots = self._own.slots = [
                _Slot(self._memory[at * self._chunk : (at + 1) * self._chunk])
                for at in range(first, first + BUFFERS_PER_THREAD)
            ]
        slot = slots.pop(0)
        slots.append(slot)
        if slot.wait is not None:
            slot.wait()
        return slot
