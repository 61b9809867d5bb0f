"""Objects in a process of their own, so that what they do takes Python's lock from nobody here.

Threads that read batches beside one that launches a GPU's work let that wait for the lock many
times a batch, each time for longer than a launch takes.

    here ── (number, method, arguments), pickled ──────────────────► python -m trainer.data.process
         ◄── an answer or an error, pickled; its tensors end to end ──

Tensors arrive in one piece of memory, page-locked where a GPU copies from it. Both ends know by the
socket when the other is gone. It has no name: nobody but the two can send a pickle.
"""

from __future__ import annotations

import io
import itertools
import logging
import math
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module
from typing import Any

import torch

from trainer.errors import DataError
from trainer.failures import described

_SIZES = struct.Struct("<QQ")  # of a pickle, and of the tensors behind it
_ALIGNMENT = 64  # bytes
_END_S = 5.0
_Place = tuple[int, torch.dtype, torch.Size]  # of a tensor: its first byte, dtype and shape


class ReaderProcess:
    """Makes objects in another process and calls them there, one call at a time.

    It starts at once, and is ready after some seconds. `pin` puts tensors that are answered into
    page-locked memory, for the GPU of the thread that starts it. A `DataError` of a call is raised
    here with its message, but none of its attributes, and any other error as a RuntimeError. Where
    the process has ended that is a RuntimeError, too, or a MemoryError if it was killed.
    """

    def __init__(self, *, pin: bool = False) -> None:
        self._pin = pin
        self._gpu = torch.cuda.current_device() if pin else -1
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env=os.environ | {"PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))},
            )

    def await_start(self) -> None:
        """Return when calls are answered at once."""
        self.make(list)

    def make(self, factory: Callable[..., Any], *arguments: Any) -> int:
        """Number of the object that `factory` makes of `arguments` there; all are pickled."""
        number = next(self._numbers)
        self.call(number, "", factory, *arguments)
        return number

    def call(self, number: int, method: str, *arguments: Any) -> Any:
        """What a method of object `number` returns; its `close` lets the object go."""
        request = pickle.dumps((number, method, arguments))
        # A thread without it that page-locks memory would take memory of GPU 0, too.
        with self._lock, torch.cuda.device(self._gpu):
            try:
                _send(self._socket, request)
                answer, memory = _receive(self._socket, self._pin)
            except OSError as error:
                code: int | str = "not known yet"
                with suppress(subprocess.TimeoutExpired):
                    code = self._process.wait(_END_S)
                # Both may not recur after a restart: `trainer.failures` knows them by this.
                kind: type[Exception] = RuntimeError
                why = "see the end of this worker's log for its error"
                if code == -signal.SIGKILL:
                    kind, why = MemoryError, "was it killed, perhaps for memory?"
                raise kind(
                    f"the process that reads data has ended (exit code {code}, {error}): {why}"
                ) from error
        is_well, value = _Unpickler(answer, memory).load()
        if is_well:
            return value
        kind, message = value
        raised = kind.__new__(kind)
        raised.args = (message,)
        raise raised

    def close(self) -> None:
        """End the process, whatever it does. Harmless when called again."""
        self._socket.close()
        self._process.kill()
        self._process.wait()


class _Pickler(pickle.Pickler):
    """Leaves the bytes of tensors out, and says where they belong: in `tensors`, end to end."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.tensors: list[torch.Tensor] = []
        self.num_bytes = 0

    def persistent_id(self, value: Any) -> _Place | None:
        if not isinstance(value, torch.Tensor):
            return None
        self.tensors.append(value)
        start, self.num_bytes = self.num_bytes, self.num_bytes + _padded(value.nbytes)
        return start, value.dtype, value.shape


class _Unpickler(pickle.Unpickler):  # noqa: TID251 - of the other end of a socket without a name
    """Tensors are parts of `memory`."""

    def __init__(self, data: bytes, memory: torch.Tensor) -> None:
        super().__init__(io.BytesIO(data))
        self._memory = memory

    def persistent_load(self, place: _Place) -> torch.Tensor:
        start, dtype, shape = place
        num_bytes = math.prod(shape) * dtype.itemsize
        return self._memory[start : start + num_bytes].view(dtype).view(shape)


def _padded(num_bytes: int) -> int:
    return num_bytes + -num_bytes % _ALIGNMENT


def _send(to: socket.socket, data: bytes, tensors: Sequence[torch.Tensor] = ()) -> None:
    total = sum(_padded(tensor.nbytes) for tensor in tensors)
    to.sendall(_SIZES.pack(len(data), total) + data)
    for tensor in tensors:
        to.sendall(tensor.contiguous().numpy().data)
        to.sendall(bytes(-tensor.nbytes % _ALIGNMENT))


def _receive(source: socket.socket, pin: bool = False) -> tuple[bytes, torch.Tensor]:
    """(a pickle, the memory of its tensors); raises ConnectionError where the other end is gone."""
    sizes = bytearray(_SIZES.size)
    _fill(source, memoryview(sizes))
    num_bytes, num_tensor_bytes = _SIZES.unpack(sizes)
    data = bytearray(num_bytes)
    memory = torch.empty(num_tensor_bytes, dtype=torch.uint8, pin_memory=pin)
    _fill(source, memoryview(data))
    _fill(source, memory.numpy().data)
    return bytes(data), memory


def _fill(source: socket.socket, place: memoryview) -> None:
    # In one call, which takes the lock once, however many pieces arrive.
    while place:
        received = source.recv_into(place, 0, socket.MSG_WAITALL)
        if not received:
            raise ConnectionResetError("connection closed by peer")
        place = place[received:]


def serve(connection: socket.socket) -> None:
    """Answer calls until the other end is gone."""
    objects: dict[int, Any] = {}
    while True:
        try:
            request = _Unpickler(*_receive(connection))
        except ConnectionError:
            return
        answer: tuple[bool, Any]
        try:
            number, method, arguments = request.load()
            if not method:
                objects[number] = arguments[0](*arguments[1:])
            found = objects.pop(number) if method == "close" else objects[number]
            answer = True, getattr(found, method)(*arguments) if method else None
        except Exception as error:
            logging.getLogger(__name__).debug("a call fails", exc_info=True)
            if isinstance(error, DataError):
                answer = False, (type(error), str(error))
            else:  # which may be made of more than a message
                answer = False, (RuntimeError, described(error))
        file = io.BytesIO()
        pickler = _Pickler(file)
        pickler.dump(answer)
        try:
            _send(connection, file.getvalue(), pickler.tensors)
        except ConnectionError:
            return


def main() -> None:
    """Serve the socket whose file descriptor is the argument."""
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_IGN)  # whoever it serves decides when it ends
    torch.set_num_threads(1)
    import_module("trainer.data.batches")  # takes longer than the rest of the start
    serve(socket.socket(fileno=int(sys.argv[1])))
    os._exit(0)  # threads may wait for storage that is away


if __name__ == "__main__":
    main()
