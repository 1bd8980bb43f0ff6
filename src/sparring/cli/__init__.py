"""The command line: one file per command; main runs them, and they share parsing, screen and inputs.

Nothing here computes: a command reads its inputs, calls the library and prints. No package imports this one.
"""

from sparring.cli.main import main

__all__ = ["main"]
