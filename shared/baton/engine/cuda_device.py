"""Memory of a CUDA device as descriptors, through the driver's virtual memory management (ADR 27).

Decides how memory is made (``cuMemCreate``, exported as a POSIX file descriptor), mapped and given
back, and which processes the driver shows on the device (NVML). Not yet run on a GPU.

A mapping lives as long as a tensor looks into it: torch keeps the object that
``__cuda_array_interface__`` was read from.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from baton.engine.device_checksum import DeviceChecksums
from baton.engine.device_engine import no_cuda
from baton.ports.channel import BlockCheck
from baton.ports.device import DeviceFull, DeviceMissing
from baton.ports.engine import KVLayout


class CudaBlocks:
    """See :class:`baton.ports.device.DeviceBlocks`."""

    def __init__(self, mapping: _Mapping, layout: KVLayout, length: int) -> None:
        self._alive = weakref.ref(mapping)
        self._block_bytes = layout.block_bytes
        whole = torch.as_tensor(mapping, device=mapping.device)
        self.memory: torch.Tensor = whole[:length]
        self._checksums: DeviceChecksums | None = DeviceChecksums(self.memory, layout)
        # Not the stream that steps are queued in: who verifies does not wait for a step.
        make: Any = torch.cuda.Stream
        self._stream = make(mapping.device)

    def checksums(self, checks: Sequence[BlockCheck]) -> list[int]:
        assert self._checksums is not None
        with torch.cuda.stream(self._stream):
            return self._checksums.of(checks)

    def copy_out(self, block: int, target: torch.Tensor) -> None:
        at = block * self._block_bytes
        with torch.cuda.stream(self._stream):
            target.copy_(self.memory[at : at + self._block_bytes])
            self._stream.synchronize()

    def close(self) -> bool:
        if self._checksums is not None:
            self._stream.synchronize()
            self._checksums = None
            del self.memory
        return self._alive() is None


class CudaDevice:
    """See :class:`baton.ports.device.Device`: the first CUDA device that this process may use."""

    def __init__(self) -> None:
        """Use the device from now on: the process must not be forked any more.

        Raises:
            DeviceMissing: there is none, or a package that it needs.
        """
        if not torch.cuda.is_available():
            raise DeviceMissing(no_cuda())
        try:
            from cuda.bindings import driver  # type: ignore[import-not-found]
        except ImportError as error:
            raise DeviceMissing(
                f"the package cuda-bindings cannot be imported ({error}): install baton[cuda]"
            ) from error
        self._driver: Any = driver
        self._device = torch.device("cuda", torch.cuda.current_device())
        torch.zeros(1, device=self._device)  # the context is there
        self._uuid = str(torch.cuda.get_device_properties(self._device).uuid)
        self.name = torch.cuda.get_device_name(self._device)

    def free_bytes(self) -> int:
        return torch.cuda.mem_get_info(self._device)[0]

    def make(self, length: int) -> int:
        driver = self._driver
        size = self._rounded(length)
        error, handle = driver.cuMemCreate(size, self._properties(), 0)
        if error == driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
            raise DeviceFull(f"{size} bytes are wanted, {self.free_bytes()} are free")
        self._check(error, "cuMemCreate")
        kind = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        error, fd = driver.cuMemExportToShareableHandle(handle, kind, 0)
        self._check(driver.cuMemRelease(handle)[0], "cuMemRelease")
        self._check(error, "cuMemExportToShareableHandle")
        number = int(fd)
        os.set_inheritable(number, False)
        mapping = self._mapped(number, size)
        torch.as_tensor(mapping, device=self._device).zero_()
        torch.cuda.synchronize(self._device)
        return number

    def map(self, fd: int, layout: KVLayout, blocks_total: int) -> CudaBlocks:
        length = blocks_total * layout.block_bytes
        return CudaBlocks(self._mapped(fd, self._rounded(length)), layout, length)

    def processes(self) -> frozenset[int] | None:
        """Return what NVML shows on the device; ``None`` where there is no NVML."""
        try:
            import pynvml  # type: ignore[import-not-found]
        except ImportError:
            return None
        try:
            pynvml.nvmlInit()
            found = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{self._uuid}")
            listed = list(pynvml.nvmlDeviceGetComputeRunningProcesses(found))
            listed += pynvml.nvmlDeviceGetMPSComputeRunningProcesses(found)
        except pynvml.NVMLError:
            return None
        return frozenset(int(each.pid) for each in listed)

    def _mapped(self, fd: int, size: int) -> _Mapping:
        driver = self._driver
        kind = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        error, handle = driver.cuMemImportFromShareableHandle(fd, kind)
        self._check(error, "cuMemImportFromShareableHandle")
        try:
            error, at = driver.cuMemAddressReserve(size, 0, 0, 0)
            self._check(error, "cuMemAddressReserve")
            self._check(driver.cuMemMap(at, size, 0, handle, 0)[0], "cuMemMap")
        finally:
            # The mapping keeps the memory.
            driver.cuMemRelease(handle)
        mapping = _Mapping(driver, int(at), size, self._device)
        access = driver.CUmemAccessDesc()
        access.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        access.location.id = self._device.index
        access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        self._check(driver.cuMemSetAccess(at, size, [access], 1)[0], "cuMemSetAccess")
        return mapping

    def _properties(self) -> Any:
        driver = self._driver
        found = driver.CUmemAllocationProp()
        found.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        found.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        found.location.id = self._device.index
        found.requestedHandleTypes = (
            driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        )
        return found

    def _rounded(self, length: int) -> int:
        driver = self._driver
        flag = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        error, unit = driver.cuMemGetAllocationGranularity(self._properties(), flag)
        self._check(error, "cuMemGetAllocationGranularity")
        return -(-length // int(unit)) * int(unit)

    def _check(self, error: Any, what: str) -> None:
        if error != self._driver.CUresult.CUDA_SUCCESS:
            raise OSError(f"{what}: {error.name}")


class _Mapping:
    """Device memory in this process's addresses, as torch takes it in; unmapped with its end."""

    def __init__(self, driver: Any, at: int, size: int, device: torch.device) -> None:
        self.device = device
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (at, False),
            "strides": None,
            "version": 3,
        }
        self._finalizer = weakref.finalize(self, _unmap, driver, at, size)
        self._finalizer.atexit = False  # the process's end unmaps


def _unmap(driver: Any, at: int, size: int) -> None:
    driver.cuMemUnmap(at, size)
    driver.cuMemAddressFree(at, size)
