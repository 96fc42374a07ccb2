"""`baton chat`: a conversation in the terminal.

Decides what Ctrl-C means here: it cancels the answer (the connection is closed, the cluster frees
what the request held) and leaves the program; at the prompt it only clears the line.
"""

from __future__ import annotations

import os
import sys

from baton.cli.client import Answer, Delta, GatewayClient, no_cluster
from baton.cli.cluster import Cluster
from baton.cli.terminal import CommandError, ExitCode, is_interactive, say, warn
from baton.runtime.settings import Config

Messages = list[dict[str, str]]


def chat(config: Config, *, system: str | None, max_tokens: int, temperature: float) -> int:
    """Ask and answer until /exit or the end of input."""
    cluster = Cluster(config, os.environ, say)
    found = cluster.running()
    if found is None:
        raise no_cluster(config)
    client = cluster.client(found)
    model = client.models()[0]
    talk = _Conversation(client, model, system, max_tokens, temperature)
    if is_interactive():
        say(f"{model}. Ctrl-C cancels an answer; /reset forgets, /exit ends.")
    failed = False
    while (line := _read_line()) is not None:
        words = line.strip()
        if words in {"/exit", "/quit"}:
            break
        if words == "/reset":
            talk.reset()
            say("(forgotten)")
        elif words:
            failed = not talk.ask(words)
    return ExitCode.FAILED if failed and not is_interactive() else ExitCode.OK


class _Conversation:
    def __init__(
        self,
        client: GatewayClient,
        model: str,
        system: str | None,
        max_tokens: int,
        temperature: float,
    ) -> None:
        self._client = client
        self._model = model
        self._start: Messages = [{"role": "system", "content": system}] if system else []
        self._messages = list(self._start)
        self._max_tokens = max_tokens
        self._temperature = temperature

    def reset(self) -> None:
        """Forget everything but the system message."""
        self._messages = list(self._start)

    def ask(self, question: str) -> bool:
        """Stream one answer; what was said until a cancel stays in the conversation."""
        asked: Messages = [*self._messages, {"role": "user", "content": question}]
        said: list[str] = []
        stream = self._client.stream_chat(
            asked, model=self._model, max_tokens=self._max_tokens, temperature=self._temperature
        )
        try:
            for piece in stream:
                if isinstance(piece, Delta):
                    said.append(piece.text)
                    say(piece.text, end="")
                elif isinstance(piece, Answer):
                    say(f"\n[{piece.summary()}]")
        except KeyboardInterrupt:
            stream.close()
            say("\n[cancelled]")
        except CommandError as error:
            warn(f"\n{error}")
            return False
        self._messages = [*asked, {"role": "assistant", "content": "".join(said)}]
        return True


def _read_line() -> str | None:
    """Return the next question; ``None`` at the end of input."""
    if not is_interactive():
        return sys.stdin.readline() or None
    while True:
        try:
            return input("> ")
        except EOFError:
            say()
            return None
        except KeyboardInterrupt:
            say()
