"""What is printed of NGAME, DEXA and their rivals on the extreme-classification sets, in percent; nothing here is computed by us.

Encoder alone: the page of DEXA (KDD 2023), P@1; `NGAME by LEVER` is its reproduction in LEVER (ICLR 2024, table 12). Encoder and
classifiers: Renee (MLSys 2023, table 17) for NGAME, the poster of DEXML (ICLR 2024) for DEXA. What we have not read in print is not here.
"""

from __future__ import annotations

from sparring.experiments.papers.published import Cells, Figure

METRICS = ("P@1", "P@5", "nDCG@5", "PSP@1", "PSP@5")
LEVER = "NGAME by LEVER"

_PAGE = """
    LF-AmazonTitles-1.3M  DEXA 51.92  NGAME 45.82  ANCE 46.44  random 44.64
    LF-Wikipedia-500K     DEXA 79.99  NGAME 77.92  ANCE 63.33  random 62.63
    LF-WikiSeeAlso-320K   DEXA 46.57  NGAME 43.58  ANCE 41.16  random 41.66
"""
_LEVER = """
    LF-AmazonTitles-131K  43.13 20.73 - 38.72 48.81
    LF-AmazonTitles-1.3M  45.83 35.48 - 33.04 36.80
    LF-Wikipedia-500K     81.96 46.23 - - -
"""
_FUSED = """
    LF-AmazonTitles-131K  NGAME 46.01 21.47 48.67 38.81 49.43
    LF-Amazon-131K        NGAME 46.53 22.02 49.58 38.53 50.45
    LF-WikiSeeAlso-320K   NGAME 47.65 23.68 48.99 33.83 41.03
    LF-Wikipedia-500K     NGAME 84.01 49.97 75.97 41.25 57.04
    LF-AmazonTitles-1.3M  NGAME 56.75 44.09 52.41 29.18 35.36
    LF-AmazonTitles-1.3M  DEXA  56.63 43.90 - - -
"""
# The slides: what mining adds to the time of training, and what DEXA gains over NGAME.
OVERHEAD = {"NGAME": 0.01, "ANCE": 2.10}
DEXA_GAIN = 0.025, 0.055


def _rows(block: str) -> list[list[str]]:
    return [line.split() for line in block.splitlines() if line.strip()]


def _named(data: str, method: str, values: list[str]) -> Cells:
    return {
        (data, metric, method): Figure(float(value))
        for metric, value in zip(METRICS, values, strict=False)
        if value != "-"
    }


def _encoder() -> Cells:
    found: Cells = {}
    for data, *words in _rows(_PAGE):
        for name, value in zip(words[::2], words[1::2], strict=True):
            found |= _named(data, "random in-batch" if name == "random" else name, [value])
    for data, *values in _rows(_LEVER):
        found |= _named(data, LEVER, values)
    return found


def _fused() -> Cells:
    found: Cells = {}
    for data, name, *values in _rows(_FUSED):
        found |= _named(data, name, values)
    return found


PRINTED: dict[str, Cells] = {"encoder": _encoder(), "fused": _fused()}
