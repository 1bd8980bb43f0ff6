"""Sparring's negatives inside other libraries' training loops."""
