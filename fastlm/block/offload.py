"""Kept tensors on the host: copied away while their layer runs, and back before its backward asks for them.

A `Parcel` holds what one layer sends in one forward. What it returns to be saved are host tensors, which live as long as autograd
saves them; their memory then serves the next ones. Copies run on a stream of their own, in the order in which they are asked for.
"""

from __future__ import annotations

import logging
import weakref
from collections import deque
from typing import Any, Protocol

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

_PAGE = 4096
# A free buffer serves a tensor that fills at least this share of it.
_MIN_FILL = 0.5
# Smaller tensors are not worth a copy.
MIN_BYTES = 1 << 16


class Copier(Protocol):
    """What copies between a device and the host.

    Attributes:
        pageable_bytes: of buffers that could not be pinned.
    """

    pageable_bytes: int

    def new_buffer(self, n_bytes: int) -> Tensor:
        """Host memory, uint8."""

    def copy(self, target: Tensor, source: Tensor) -> Any:
        """Begin a copy behind what runs on the current stream. Returns what `wait` takes."""

    def wait(self, ticket: Any) -> None:
        """Let the current stream wait for a copy. The host does not."""

    def finish(self) -> None:
        """Let the host wait for all copies: buffers are about to go."""


class CudaCopier:
    """Copies between a CUDA device and pinned host memory, or pageable where it cannot be pinned.

    Attributes:
        pageable_bytes: of buffers that could not be pinned, so far.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self.pageable_bytes = 0

    def new_buffer(self, n_bytes: int) -> Tensor:
        # pinned as it is: torch's own pinned memory comes in powers of two
        raw = torch.empty(n_bytes + _PAGE, dtype=torch.uint8)
        start = -raw.data_ptr() % _PAGE
        buffer = raw[start : start + n_bytes]
        runtime = torch.cuda.cudart()
        if int(runtime.cudaHostRegister(buffer.data_ptr(), n_bytes, 0)) == 0:
            weakref.finalize(buffer, runtime.cudaHostUnregister, buffer.data_ptr())
        else:
            self._forget_error()
            if not self.pageable_bytes:
                logger.warning(
                    "%d bytes of host memory could not be pinned (`ulimit -l` and the container's limit may be why): activations travel "
                    "through pageable memory, slower",
                    n_bytes,
                )
            self.pageable_bytes += n_bytes
        return buffer

    def _forget_error(self) -> None:
        """CUDA tells of a failed call once more, at the next launch: at this one."""
        try:
            torch.zeros(1, device=self._device)
        except RuntimeError as error:
            logger.debug("pinning host memory: %s", error)

    def copy(self, target: Tensor, source: Tensor) -> torch.cuda.Event:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
            return self._stream.record_event()

    def wait(self, ticket: torch.cuda.Event) -> None:
        torch.cuda.current_stream(self._device).wait_event(ticket)

    def finish(self) -> None:
        self._stream.synchronize()


class HostFull(Exception):
    """The budget of host memory is used up."""


class HostBuffers:
    """Host memory that kept tensors use in turn, within a budget.

    Attributes:
        n_bytes: of all buffers, in use or not.
        peak_bytes: the most that they ever were.
    """

    def __init__(self, copier: Copier, limit_bytes: int) -> None:
        self._copier, self.limit_bytes = copier, limit_bytes
        # changed in place alone: finalizers hold it
        self._free: list[Tensor] = []
        self.n_bytes = self.peak_bytes = 0

    def take(self, like: Tensor) -> Tensor:
        """A host tensor of a tensor's shape, dtype and, where these leave no gaps, strides. Its memory comes back when it dies.

        Raises:
            HostFull: beyond the budget.
        """
        n_bytes = like.numel() * like.element_size()
        buffer = self._find(n_bytes)
        flat = buffer[:n_bytes].view(like.dtype)
        host = flat.as_strided(like.shape, _dense_strides(like))
        weakref.finalize(host, self._free.append, buffer)
        return host

    def _find(self, n_bytes: int) -> Tensor:
        fitting = [b for b in self._free if n_bytes <= b.numel() and b.numel() * _MIN_FILL <= n_bytes]
        if fitting:
            buffer = min(fitting, key=Tensor.numel)
            self._free[:] = [b for b in self._free if b is not buffer]
            return buffer
        size = -(-n_bytes // _PAGE) * _PAGE
        if self._free and self.n_bytes + size > self.limit_bytes:
            # what fits nobody gives way
            self._copier.finish()
        while self._free and self.n_bytes + size > self.limit_bytes:
            self.n_bytes -= self._free.pop().numel()
        if self.n_bytes + size > self.limit_bytes:
            raise HostFull(f"{self.n_bytes + size} bytes of host memory are more than the budget of {self.limit_bytes}")
        buffer = self._copier.new_buffer(size)
        self.n_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.n_bytes)
        return buffer

    def clear(self) -> None:
        """Give back what nobody uses."""
        if self._free:
            self._copier.finish()
        while self._free:
            self.n_bytes -= self._free.pop().numel()


def _dense_strides(tensor: Tensor) -> tuple[int, ...]:
    """The tensor's strides if its values fill their memory, else those of a contiguous one."""
    return torch.empty_like(tensor, device="meta").stride()


class Parcel:
    """What one layer sends to the host in one forward.

    Attributes:
        before: of the layer before it in the same forward.
    """

    def __init__(self, store: HostStore, before: Parcel | None) -> None:
        self._store, self.before = store, before
        # by name: the host tensor, the device it comes from, what autograd does not watch meanwhile
        self._sent: dict[str, tuple[weakref.ref[Tensor], torch.device]] = {}
        self._arrived: dict[str, tuple[Tensor, Any]] = {}

    def send(self, name: str, tensor: Tensor) -> Tensor:
        """Begin to copy a tensor to the host. Returns what is to be saved in its place: itself where there is no room."""
        if tensor.numel() * tensor.element_size() < MIN_BYTES:
            return tensor
        host = self._store.send(tensor)
        if host is None:
            return tensor
        self._sent[name] = weakref.ref(host), tensor.device
        return host

    def settle(self) -> None:
        """Wait for what is on its way to the host, and let go of it."""
        self._store.settle(0)

    def fetch(self, saved: dict[str, Tensor]) -> dict[str, Tensor]:
        """The tensors as they were sent, on their device; those of the layers before begin to travel."""
        self.settle()
        self._begin()
        parcel, ahead = self.before, self._store.ahead
        while parcel is not None and ahead > 0:
            parcel._begin()
            parcel, ahead = parcel.before, ahead - 1
        found = dict(saved)
        for name, (tensor, ticket) in self._arrived.items():
            self._store.copier.wait(ticket)
            found[name] = tensor
        self._arrived = {}
        return found

    def _begin(self) -> None:
        if self._arrived:
            return
        for name, (reference, device) in self._sent.items():
            host = reference()
            if host is not None:
                # allocated on the stream that will use it, where it is free from now on
                tensor = torch.empty_strided(host.shape, host.stride(), dtype=host.dtype, device=device)
                self._arrived[name] = tensor, self._store.copier.copy(tensor, host)


class HostStore:
    """Sends kept tensors of one device to the host and back.

    Attributes:
        ahead: layers whose tensors are under way at a time, beside the one that runs.
        sent_bytes: that went to the host so far.
        refused: tensors that stayed on the device because the budget was used up.
    """

    def __init__(self, copier: Copier, limit_bytes: int, ahead: int = 2) -> None:
        self.copier, self.ahead = copier, ahead
        self.buffers = HostBuffers(copier, limit_bytes)
        self.sent_bytes = self.refused = 0
        # by layer: tensors that are being copied, which must stay until they are
        self._under_way: deque[list[tuple[Tensor, int, Any]]] = deque()

    def open(self, before: Parcel | None) -> Parcel:
        """A parcel for a layer that begins its forward, behind that of the layer before it."""
        self.settle(self.ahead - 1)
        self._under_way.append([])
        return Parcel(self, before)

    def settle(self, n_layers: int) -> None:
        """Wait for the copies of all but the newest layers, and let go of what they copied.

        Raises:
            RuntimeError: if somebody wrote to a tensor that its backward needs as it was.
        """
        while len(self._under_way) > n_layers:
            for tensor, version, ticket in self._under_way.popleft():
                self.copier.wait(ticket)
                if tensor._version != version:
                    raise RuntimeError(
                        "one of the variables needed for gradient computation has been modified by an inplace operation: a kept "
                        f"tensor {list(tensor.shape)} is at version {tensor._version}; expected version {version} instead"
                    )

    def send(self, tensor: Tensor) -> Tensor | None:
        try:
            host = self.buffers.take(tensor)
        except HostFull as full:
            if not self.refused:
                logger.warning("%s: what does not fit stays on the device", full)
            self.refused += 1
            return None
        source = tensor.detach()
        if not self._under_way:
            # a layer that is run again begins anew
            self._under_way.append([])
        self._under_way[-1].append((source, source._version, self.copier.copy(host, source)))
        self.sent_bytes += tensor.numel() * tensor.element_size()
        return host
