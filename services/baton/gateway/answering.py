"""HTTP's way to tell an answer: as a stream of events or whole, and the paths that resume one."""

from __future__ import annotations

from baton.core.outcomes import Reason
from baton.gateway import sse
from baton.gateway.asgi import Request, watched
from baton.gateway.errors import resumed_elsewhere
from baton.gateway.generation import ClientLeft
from baton.gateway.recipe import Recipe
from baton.gateway.serving import Serving
from baton.gateway.telling import Telling, begin, resume, wanted_by_headers


async def answer(serving: Serving, request: Request, recipe: Recipe) -> None:
    """Submit ``recipe`` and tell what comes of it."""
    wanted = wanted_by_headers(request, recipe, serving.limits)
    telling = await begin(serving, recipe, wanted, request.owner, request.traceparent)
    if telling.recipe.wish.stream:
        await sse.stream(request, telling, serving.limits)
    else:
        await _whole(request, telling)


async def _whole(request: Request, telling: Telling) -> None:
    """Collect everything, then answer once; a client that leaves cancels, unless it may return."""
    generation, form = telling.generation, telling.form
    try:
        async with watched(request, generation.stream):
            while not generation.done:
                for part in await generation.parts(60.0):
                    form.collect(part)
            await request.respond(200, form.whole(), headers=telling.headers())
    except ClientLeft as left:
        if left.reason is Reason.SUPERSEDED:
            raise resumed_elsewhere() from None


async def events(serving: Serving, request: Request, token: str) -> None:
    """GET: the events after ``Last-Event-ID``, and all that follow."""
    last = request.headers.get(b"last-event-id", b"").decode("latin-1").strip()
    telling = await resume(serving, token, request.owner, last, stream_only=True)
    await sse.stream(request, telling, serving.limits)


async def cancel(serving: Serving, request: Request, token: str) -> None:
    """DELETE: nobody wants the rest."""
    telling = await resume(serving, token, request.owner, "")
    telling.generation.stream.leave(Reason.CLIENT_CANCELLED)
    await request.start(204, [])
    await request.write(b"", more=False)
