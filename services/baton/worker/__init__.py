"""The process that computes: a prefill or a decode machine, and the other one when it is told so.

Decides nothing: it knows both services, which do not know each other, so that one guard, with one
engine loaded, can start either (``docs/adr/0024-roles.md``).
"""
