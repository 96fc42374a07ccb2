"""The keeper's socket: one question a connection, answered at once.

Decides who is answered (processes of this user) and that there is one keeper in a run directory. A
question takes microseconds, so one thread answers one after the other; who connects and says
nothing is let go after a moment.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct
from pathlib import Path

import msgspec

from baton.channel.keeping import SOCKET_NAME, Answer, Question, close_all, receive, send
from baton.keeper.kept import Store
from baton.runtime.logs import FilteringBoundLogger

LOCK_NAME = "keeper.lock"
_PATIENCE_S = 0.5
_WAITING_MAX = 128
#: ``struct ucred``: pid, uid, gid.
_CREDENTIALS = struct.Struct("3i")


class KeeperInUse(OSError):
    """Another keeper serves in this run directory."""


class KeeperServer:
    """Listens from its making on, until :meth:`close`."""

    def __init__(self, run_dir: Path, log: FilteringBoundLogger) -> None:
        """Listen in ``run_dir``.

        Raises:
            KeeperInUse: there is one.
        """
        self._log = log
        self._store = Store()
        self._path = run_dir / SOCKET_NAME
        # The lock says whether the socket's file is a living keeper's or a dead one's.
        self._lock = os.open(run_dir / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            raise KeeperInUse(f"another keeper serves at {self._path}") from None
        with contextlib.suppress(FileNotFoundError):
            self._path.unlink()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.bind(str(self._path))
        self._path.chmod(0o600)
        self._socket.listen(_WAITING_MAX)

    def serve_one(self) -> None:
        """Wait for a question and answer it."""
        link, _ = self._socket.accept()
        with link:
            link.settimeout(_PATIENCE_S)
            raw = link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
            pid, uid, _ = _CREDENTIALS.unpack(raw)
            if uid != os.geteuid():
                self._log.warning("stranger_refused", uid=uid)
                return
            try:
                question, fds = receive(link, Question)
            except (OSError, msgspec.MsgspecError) as error:
                self._log.warning("question_not_understood", pid=pid, error=str(error))
                return
            answer, given = self._answer(question, fds, pid)
            # Who asked may be gone; it asks again.
            with contextlib.suppress(OSError):
                send(link, answer, *given)

    def _answer(self, question: Question, fds: list[int], pid: int) -> tuple[Answer, list[int]]:
        """Return the answer and the descriptor that goes with it; close what is not kept."""
        match question.what:
            case "keep":
                return self._keep(question, fds, pid), []
            case "drop":
                close_all(fds + self._store.drop(question.name))
                self._log.info("dropped", name=question.name, kept=len(self._store))
                return Answer(), []
            case "leave":
                close_all(fds)
                kept = self._store.find(question.file_id)
                if kept is not None:
                    kept.takers.pop(question.incarnation, None)
                return Answer(), []
            case "fetch" | "takers":
                close_all(fds)
                kept = self._store.find(question.file_id)
                if kept is None:
                    return Answer(error=f"nobody's memory is kept as {question.file_id}"), []
                if question.what == "fetch":
                    kept.taken(question.incarnation, pid)
                    return Answer(), [kept.fd]
                takers = {str(each): number for each, number in kept.takers.items()}
                return Answer(takers=takers, complete=kept.complete), []

    def _keep(self, question: Question, fds: list[int], pid: int) -> Answer:
        if len(fds) != 1:
            close_all(fds)
            return Answer(error="a descriptor was to come with this")
        gone = self._store.keep(question.name, question.file_id, fds[0], fresh=question.fresh)
        if gone is None:
            close_all(fds)
            return Answer(error=f"{len(self._store)} arenas are kept already")
        kept = self._store.find(question.file_id)
        assert kept is not None
        kept.taken(question.incarnation, pid)
        if fds[0] not in gone:
            self._log.info("kept", name=question.name, fresh=question.fresh, kept=len(self._store))
        close_all(gone)
        return Answer()

    def close(self) -> None:
        """Stop listening; what is kept goes with the process."""
        self._socket.close()
        with contextlib.suppress(FileNotFoundError):
            self._path.unlink()
        os.close(self._lock)
