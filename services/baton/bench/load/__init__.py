"""The load generator and reporter behind `baton bench`, for any OpenAI-compatible server.

Decides what is asked and when, what of an answer counts, which conditions belong to a result, and
how results are shown and compared. It knows a server by its address alone; what Baton says of
itself beyond that (its metrics) is added where it is there.
"""
