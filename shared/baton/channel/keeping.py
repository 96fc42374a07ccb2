"""Asking the keeper: the process that holds the descriptors of arenas on a device (ADR 27).

Decides the messages and how long an answer is waited for. Each question is a connection of its own:
whoever asks seldom keeps no state, and a keeper that was started anew is found at once.

One packet each way (``SOCK_SEQPACKET``), JSON, with at most one descriptor beside it.
"""

from __future__ import annotations

import os
import socket
from array import array
from collections.abc import Iterable
from pathlib import Path
from typing import Literal, TypeVar

import msgspec

from baton.ports.device import NotKept, Takers

SOCKET_NAME = "keeper.sock"
Message = TypeVar("Message", bound=msgspec.Struct)

PACKET_BYTES_MAX = 65_536
#: A keeper answers within microseconds; a starting one is tried again by whoever asked.
ANSWER_S = 2.0


class Question(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """To the keeper."""

    what: Literal["keep", "fetch", "takers", "leave", "drop"]
    """With ``keep`` comes a descriptor."""
    name: str = ""
    """Of the arena's file, to ``keep`` and ``drop``."""
    file_id: str = ""
    incarnation: int = 0
    """Of who keeps or fetches; 0: somebody who only reads."""
    fresh: bool = False
    """Nobody else had that memory before."""


class Answer(msgspec.Struct, frozen=True):
    """From the keeper; to ``fetch`` a descriptor comes with it."""

    error: str = ""
    takers: dict[str, int] = {}
    """Pid by incarnation, as a text: JSON has no other names."""
    complete: bool = False


class KeeperLink:
    """The keeper of this cluster (``baton.ports.device.Keeper``)."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / SOCKET_NAME

    def keep(self, name: str, file_id: str, fd: int, incarnation: int, *, fresh: bool) -> None:
        self._ask(Question("keep", name, file_id, incarnation, fresh), fd)

    def fetch(self, file_id: str, incarnation: int) -> int:
        _, fds = self._ask(Question("fetch", "", file_id, incarnation))
        if len(fds) != 1:
            raise NotKept(f"the keeper sent {len(fds)} descriptors")
        return fds[0]

    def takers(self, file_id: str) -> Takers:
        answer, _ = self._ask(Question("takers", "", file_id))
        pids = {int(incarnation): pid for incarnation, pid in answer.takers.items()}
        return Takers(pids, answer.complete)

    def leave(self, file_id: str, incarnation: int) -> None:
        self._ask(Question("leave", "", file_id, incarnation))

    def drop(self, name: str) -> None:
        self._ask(Question("drop", name))

    def _ask(self, question: Question, *fds: int) -> tuple[Answer, list[int]]:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as link:
            link.settimeout(ANSWER_S)
            try:
                link.connect(str(self._path))
                send(link, question, *fds)
                answer, found = receive(link, Answer)
            except (OSError, msgspec.MsgspecError) as error:
                raise NotKept(f"the keeper at {self._path} does not answer: {error}") from error
        if answer.error:
            close_all(found)
            raise NotKept(answer.error)
        return answer, found


def send(link: socket.socket, message: msgspec.Struct, *fds: int) -> None:
    """Send one message with descriptors."""
    socket.send_fds(link, [msgspec.json.encode(message)], fds)


def receive(link: socket.socket, kind: type[Message]) -> tuple[Message, list[int]]:
    """Return one message and the descriptors that came with it, which ``exec`` closes.

    Raises:
        msgspec.MsgspecError: nothing that this version sends.
        OSError: nobody is there, or not in time.
    """
    # Python's recv_fds leaves its flags out, and a descriptor must not be inherited for a moment.
    space = socket.CMSG_SPACE(array("i").itemsize)
    data, parts, flags, _ = link.recvmsg(PACKET_BYTES_MAX, space, socket.MSG_CMSG_CLOEXEC)
    fds = array("i")
    for level, what, given in parts:
        if (level, what) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(given[: len(given) - len(given) % fds.itemsize])
    try:
        if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
            raise msgspec.DecodeError("cut off")
        message = msgspec.json.decode(data, type=kind)
    except BaseException:
        close_all(fds)
        raise
    return message, list(fds)


def close_all(fds: Iterable[int]) -> None:
    """Close descriptors that nobody wants."""
    for fd in fds:
        os.close(fd)
