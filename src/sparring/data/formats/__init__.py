"""Data sets in fixed layouts: BEIR's, and those of the extreme-classification repository.

Tables with named columns, in any file format, are opened in sparring.data.opening.
"""

from sparring.data.formats.beir import read_beir
from sparring.data.formats.xc import read_xc

__all__ = ["read_beir", "read_xc"]
