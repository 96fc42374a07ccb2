"""Measurements of a real cluster, with their conditions: ``make bench``.

Decides what is measured and what a result must say. It drives a cluster from outside, through the
command line and HTTP, as a user would; it imports no other service.
"""
