"""Values of arguments from their words: each returns the value, or says in one line what is wrong with the word."""

from __future__ import annotations

import argparse
import re

_UNITS = {
    "": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}


def cutoffs(text: str) -> tuple[int, ...]:
    """10,20,50 -> (10, 20, 50)."""
    return tuple(sorted({count(part) for part in text.split(",")}))


def count(text: str) -> int:
    if not re.fullmatch(r"\s*\d+\s*", text) or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def whole(text: str) -> int:
    if not re.fullmatch(r"\s*\d+\s*", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 0")
    return int(text)


def share(text: str) -> float:
    value = number(text)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a share: it must be at least 0 and less than 1")
    return value


def constants(text: str) -> tuple[float, float]:
    """0.55,1.5 -> (0.55, 1.5)."""
    values = [number(part) for part in text.split(",")]
    if len(values) != 2:
        raise argparse.ArgumentTypeError(f"{text!r} is not two numbers such as 0.55,1.5")
    return values[0], values[1]


def number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if value != value:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number")
    return value


def setting(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name.strip():
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form name=value, such as lr=0.01")
    return name.strip().replace("-", "_"), value.strip()


def device(text: str) -> str:
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a device: auto, cpu or cuda")
    return text


def names(text: str) -> tuple[str, ...]:
    values = tuple(part.strip() for part in text.split(",") if part.strip())
    if not values:
        raise argparse.ArgumentTypeError(f"{text!r} names nothing: give names as NAME,NAME,...")
    return values


def ids(text: str) -> list[str]:
    values = [part.strip() for part in text.split(",") if part.strip()]
    if not values:
        raise argparse.ArgumentTypeError(f"{text!r} holds no item ids: give them as ID,ID,...")
    return values


def size(text: str) -> int:
    """500MB -> 500,000,000; also kB, GB, KiB, MiB, GiB, or bytes."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text)
    unit = match[2].lower().removesuffix("ytes").removesuffix("yte") if match else ""
    unit = "" if unit == "b" else unit
    if not match or unit not in _UNITS or float(match[1]) * _UNITS[unit] < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 500MB or 2GiB")
    return int(float(match[1]) * _UNITS[unit])


def target(text: str) -> float:
    """A recall: above 0, at most 1."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a recall: it must be above 0 and at most 1")
    return value
