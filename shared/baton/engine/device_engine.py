"""The compute engine on a device: transformers modules, one shape of forward (ADR 27).

Decides how a step runs there: cut into pieces (``device_plan``), one forward of the modules a piece
with attention over gathered blocks (``device_attention``), a wait until the device is done, the
language-model head, then the sampler on the host. The modules stay on the host until the first
``use_threads``: before that the process may be forked, and a device must not have been touched.

Not yet run on a GPU: on ``cpu`` the same code runs without graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from baton.core.pages import Pages
from baton.core.step_times import Rehearsed
from baton.engine.device_attention import NAME, DeviceArena
from baton.engine.device_graphs import Forwards
from baton.engine.device_plan import Cutting, plan_pieces
from baton.engine.info import ModelRefused
from baton.engine.invariance import difference
from baton.engine.load import load_model
from baton.engine.sampler import sample_rows
from baton.ports.device import DeviceMissing
from baton.ports.engine import KVLayout, ModelInfo, Row, Sampled, SharedCores, nothing


class DeviceEngine:
    """See :class:`baton.ports.engine.Engine` for the contract."""

    weight_pages: Pages | None = None

    def __init__(
        self,
        model_dir: Path,
        info: ModelInfo,
        layout: KVLayout,
        *,
        device: str,
        kernels: str,
        cutting: Cutting,
    ) -> None:
        """Map a prepared model's weights on the host.

        Args:
            model_dir: the prepared folder.
            info: what it says of itself.
            layout: of the arenas, in order of tokens.
            device: as torch names it: ``cuda`` or, to test, ``cpu``.
            kernels: the kernel set's name.
            cutting: how steps are cut; a fixed number of rows is held to row invariance.

        Raises:
            ModelRefused: the model cannot run on a device.
            DeviceMissing: this build of torch knows none.
        """
        if device == "cuda" and torch.version.cuda is None:
            raise DeviceMissing(no_cuda())
        model = load_model(model_dir, layout.dtype, attention=NAME)
        self._prepare(model, info, layout, device=device, kernels=kernels, cutting=cutting)

    @classmethod
    def around(
        cls,
        model: Any,
        info: ModelInfo,
        layout: KVLayout,
        *,
        device: str = "cpu",
        kernels: str = "device",
        cutting: Cutting,
    ) -> DeviceEngine:
        """Return an engine around modules that are loaded already, with ``NAME`` as attention."""
        engine = cls.__new__(cls)
        engine._prepare(model, info, layout, device=device, kernels=kernels, cutting=cutting)
        return engine

    def _prepare(
        self,
        model: Any,
        info: ModelInfo,
        layout: KVLayout,
        *,
        device: str,
        kernels: str,
        cutting: Cutting,
    ) -> None:
        if model._can_set_experts_implementation():
            raise ModelRefused(
                f"{info.architecture}: mixtures of experts are not supported on a device"
            )
        assert layout.order == "tokens"
        self.info = info
        self.layout = layout
        self.kernels = kernels
        self._device = torch.device(device)
        self._cutting = cutting
        self._model = model
        self._trunk = _Trunk(model)
        self._forwards: Forwards | None = None
        self.borrows, self.borrowed = True, 0.0

    def claim(self) -> None:
        """Its cores are not lent."""

    def use_threads(self, threads: int, cores: SharedCores | None = None) -> None:
        """See the contract; it cannot borrow. The first time the modules move to the device.

        Raises:
            DeviceMissing: there is none, it has too little memory for the weights, or its rows see
                each other.
        """
        torch.set_num_threads(threads)
        if self._forwards is None:
            self._open()

    def _open(self) -> None:
        if self._device.type == "cuda" and not torch.cuda.is_available():
            raise DeviceMissing(no_cuda())
        try:
            self._model.to(self._device)
        except torch.cuda.OutOfMemoryError as error:
            raise DeviceMissing(
                f"the device's memory does not hold the weights: {error}"
            ) from error
        self._forwards = Forwards(self._trunk, self.layout, self._device)
        if self._cutting.rows and (found := difference(self, self._scratch)):
            raise DeviceMissing(
                f"{found} on {self.device_name}, so recovery would not be exact: set "
                'engine.invariance = "off" to serve anyway'
            )

    def _scratch(self, blocks: int) -> torch.Tensor:
        return torch.zeros(blocks * self.layout.block_bytes, dtype=torch.uint8, device=self._device)

    @property
    def device_name(self) -> str:
        """The device's name, for people."""
        if self._device.type == "cuda":
            return torch.cuda.get_device_name(self._device)
        return str(self._device)

    def attach(self, arena: str, blocks: memoryview | torch.Tensor) -> None:
        """Make ``blocks`` usable as ``arena``, without a copy: memory of the device (uint8), or of
        the host where that is the device."""
        if not isinstance(blocks, torch.Tensor):
            assert self._device.type == "cpu", "host memory is no memory of the device"
            blocks = torch.frombuffer(blocks, dtype=torch.uint8)
        self._opened().attach(arena, DeviceArena(blocks, self.layout))

    def detach(self, arena: str) -> None:
        """Drop every view of ``arena``."""
        self._opened().detach(arena)

    def step(
        self, rows: Sequence[Row], stored: Callable[[], None] = nothing
    ) -> list[Sampled | None]:
        """Compute one packed batch; see the contract."""
        logits, told = self._compute(rows, stored)
        return sample_rows(rows, logits, stored=told)

    def logits(self, rows: Sequence[Row]) -> NDArray[np.float32]:
        """Compute one packed batch without sampling; float32 [rows that sample, vocab]."""
        return self._compute(rows, nothing)[0]

    @torch.inference_mode()
    def _compute(
        self, rows: Sequence[Row], stored: Callable[[], None]
    ) -> tuple[NDArray[np.float32], bool]:
        """Return the logits and whether ``stored`` was called: not if what goes into the head
        cannot be right."""
        forwards = self._opened()
        count = sum(row.sample is not None for row in rows)
        kept = torch.zeros(count, self.info.hidden_size, device=self._device, dtype=self._dtype)
        for piece in plan_pieces(rows, self.layout, self._cutting):
            hidden = forwards.run(piece)
            if piece.sampled:
                places, numbers = torch.tensor(piece.sampled, device=self._device).T
                kept.index_copy_(0, numbers, hidden.index_select(0, places))
        sound = bool(torch.isfinite(kept).all())
        forwards.wait()
        if sound:
            stored()
        return self._head(kept).float().cpu().numpy(), sound

    def _head(self, kept: torch.Tensor) -> torch.Tensor:
        """Return the logits of [n, hidden], in pieces of one shape like everything else."""
        if not len(kept):
            return kept.new_empty(0, self.info.vocab_size)
        size = self._cutting.rows_for(min(len(kept), self._cutting.rows_max))
        found = []
        for at in range(0, len(kept), size):
            part = kept[at : at + size]
            filled = torch.nn.functional.pad(part, (0, 0, 0, size - len(part)))
            found.append(self._trunk.head(filled)[: len(part)])
        return torch.cat(found)

    @property
    def _dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.layout.dtype)
        return dtype

    def _opened(self) -> Forwards:
        assert self._forwards is not None, "use_threads comes before anything on the device"
        return self._forwards

    def warm_up(self) -> Rehearsed:
        """Nothing: it may not touch the device, and opening the device ran both kinds of step."""
        return ()


class _Trunk:
    """A model's layers and its head as two functions, so that what is between them (a wait for the
    device, a graph's end) has a place. The head is what the model's own forward does with the last
    hidden state, scales and caps included."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._base = model.base_model
        self._forward = self._base.forward
        self._given: torch.Tensor | None = None
        self._kind: type[Any] | None = None
        self._base.forward = self._dispatch

    def __call__(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return the last hidden state [tokens, hidden] of ids and positions [tokens]."""
        out = self._base(input_ids=ids[None], position_ids=positions[None], use_cache=False)
        self._kind = type(out)
        state: torch.Tensor = out.last_hidden_state
        return state[0]

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits of [n, hidden]."""
        self._given = hidden
        try:
            logits: torch.Tensor = self._model(inputs_embeds=hidden[None], use_cache=False).logits
        finally:
            self._given = None
        return logits[0]

    def _dispatch(self, *args: Any, **named: Any) -> Any:
        if self._given is None:
            return self._forward(*args, **named)
        assert self._kind is not None, "the layers run before the head"
        return self._kind(last_hidden_state=self._given[None])


def no_cuda() -> str:
    """Return why torch finds no CUDA device, in words that help."""
    if torch.version.cuda is None:
        return (
            f"torch {torch.__version__} is built without CUDA: install a CUDA build "
            '(TORCH_SPEC chooses one for `make`), or set engine.device = "cpu"'
        )
    return (
        f"torch {torch.__version__} finds no CUDA device: is the driver there (`nvidia-smi`), and "
        "is CUDA_VISIBLE_DEVICES right?"
    )
