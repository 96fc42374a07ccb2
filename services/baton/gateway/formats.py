"""Which words an answer is told in: the format of each kind of recipe."""

from __future__ import annotations

from baton.gateway.chat_format import ChatFormat
from baton.gateway.completion_format import CompletionFormat
from baton.gateway.generation import Generation
from baton.gateway.recipe import Recipe
from baton.gateway.response_format import ResponseFormat
from baton.gateway.tokens import ModelText

AnyFormat = ChatFormat | CompletionFormat | ResponseFormat


def format_of(recipe: Recipe, generation: Generation, text: ModelText) -> AnyFormat:
    """Return the format that ``recipe`` asks for."""
    match recipe.kind:
        case "chat":
            return ChatFormat(generation, text, recipe)
        case "completion":
            return CompletionFormat(generation, text, recipe)
        case "response":
            return ResponseFormat(generation, recipe)
