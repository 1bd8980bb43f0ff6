"""Answers over HTTP from runs: recommendations, similar items, items added and removed while it runs, newer runs swapped in."""

from __future__ import annotations
