"""Threads that read one file into many buffers: the work list, the reading, and one loop that reports and stops.

The data of a safetensors file are cut at multiples of a chunk; a chunk is one read (``preadv``: one system call fills
the ends and beginnings of all tensors that it touches) and one step of progress. Threads take chunks in file order, so
a disk sees an almost sequential read; the system call runs without Python's lock.
"""

import os
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .header import CheckpointError, Header

POLL_SECONDS = 0.1
"""The caller's progress function is called at least this often, read or no read, so that a cancel is seen."""
MOST_BUFFERS = 512
"""Buffers of one ``preadv``; Linux and macOS take 1024."""


@dataclass(frozen=True)
class Piece:
    """Bytes ``start:stop`` of tensor `name`."""

    name: str
    start: int
    stop: int


@dataclass(frozen=True)
class Chunk:
    """One read: `nbytes` from byte `offset` of the file, to be spread over `pieces` in this order."""

    offset: int
    nbytes: int
    pieces: tuple[Piece, ...]


def plan(header: Header, chunk_bytes: int) -> list[Chunk]:
    """Cut the data of a file into chunks of `chunk_bytes`, in file order. Empty tensors are in none of them.

    `read_header` has shown that the tensors tile the data, so every byte belongs to one piece.
    """
    chunks: list[Chunk] = []
    pieces: list[Piece] = []
    begin = position = 0
    for name, info in sorted(header.tensors.items(), key=lambda item: item[1].begin):
        start = 0
        while start < info.nbytes:
            stop = min(info.nbytes, start + begin + chunk_bytes - position)
            pieces.append(Piece(name, start, stop))
            position += stop - start
            start = stop
            if position - begin == chunk_bytes or len(pieces) == MOST_BUFFERS:
                chunks.append(Chunk(header.data_offset + begin, position - begin, tuple(pieces)))
                pieces, begin = [], position
    if pieces:
        chunks.append(Chunk(header.data_offset + begin, position - begin, tuple(pieces)))
    return chunks


def cores() -> int:
    """CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class File:
    """A file that several threads read at places of their own.

    With ``preadv`` they share one descriptor; elsewhere (Windows) each thread opens its own, because a shared one has
    one position.
    """

    def __init__(self, path: str):
        self.path, self.name = path, os.path.basename(path)
        self._descriptor = None
        self._own = threading.local()
        self._opened: list = []
        self._lock = threading.Lock()
        if hasattr(os, "preadv"):
            self._descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))

    def __enter__(self):
        return self

    def __exit__(self, *exception) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
        for stream in self._opened:
            stream.close()

    def fill(self, offset: int, buffers: Sequence[memoryview]) -> None:
        """Fill writable, flat byte buffers, one after the other, from `offset` on.

        Raises:
            CheckpointError: ``truncated`` where the file ends first; ``unreadable`` where the system refuses.
        """
        left = [buffer for buffer in buffers if len(buffer)]
        try:
            while left:
                count = self._read_some(offset, left)
                if not count:
                    raise CheckpointError(
                        "truncated", self.name, "", f"ended at byte {offset}: the file changed while it was read"
                    )
                offset += count
                while left and count >= len(left[0]):
                    count -= len(left.pop(0))
                if count:
                    left[0] = left[0][count:]
        except OSError as error:
            raise CheckpointError(
                "unreadable", self.name, "", f"cannot be read: {error.strerror or error}; is the disk still there?"
            ) from error

    def _read_some(self, offset: int, buffers: list[memoryview]) -> int:
        if self._descriptor is not None:
            return os.preadv(self._descriptor, buffers, offset)
        stream = getattr(self._own, "stream", None)
        if stream is None:
            stream = self._own.stream = open(self.path, "rb", buffering=0)  # noqa: SIM115 - closed by __exit__
            with self._lock:
                self._opened.append(stream)
        stream.seek(offset)
        return stream.readinto(buffers[0])


def run(
    chunks: Sequence[Chunk],
    worker: Callable[[Chunk], None],
    threads: int,
    progress: Callable[[int, int], None] | None,
) -> None:
    """Give every chunk, in order, to `worker` in one of some threads; report from the calling thread.

    Returns or raises only when all threads have ended, so that nothing is still being written to.

    Args:
        progress: ``progress(done_bytes, total_bytes)``: at 0, after every chunk, and at least every `POLL_SECONDS`
            with an unchanged count. It may raise, to cancel.

    Raises:
        The first exception of a worker, or that of `progress`.
    """
    total = sum(chunk.nbytes for chunk in chunks)
    if progress is not None:
        progress(0, total)
    todo = iter(chunks)
    lock, stop = threading.Lock(), threading.Event()
    finished: queue.SimpleQueue = queue.SimpleQueue()

    def work() -> None:
        while not stop.is_set():
            with lock:
                chunk = next(todo, None)
            if chunk is None:
                return
            try:
                worker(chunk)
            except Exception as error:  # handed to the caller, who raises it
                finished.put(error)
                return
            finished.put(chunk.nbytes)

    workers = [threading.Thread(target=work, name="h3bw-read", daemon=True) for _ in range(min(threads, len(chunks)))]
    done = 0
    try:
        for thread in workers:
            thread.start()
        for _ in chunks:
            while True:
                try:
                    result = finished.get(timeout=POLL_SECONDS)
                    break
                except queue.Empty:
                    if progress is not None:
                        progress(done, total)
            if isinstance(result, Exception):
                raise result
            done += result
            if progress is not None:
                progress(done, total)
    finally:
        stop.set()
        for thread in workers:
            if thread.ident is not None:
                thread.join()
