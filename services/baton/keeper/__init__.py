"""The keeper: holds the descriptors of arenas on a device beyond the life of their owners (ADR 27).

It computes nothing, knows no ledger and no other process, and imports neither torch nor a driver.
"""
