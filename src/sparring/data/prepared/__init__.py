"""Prepared data: interactions larger than memory, sorted and split once into memory-mapped columns.

An engine only numbers ids and fills buckets; the rest is the same for every engine. `sparring.data.prepare` is the
entry.
"""
