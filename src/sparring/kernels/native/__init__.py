"""CPU kernels in C++, one small file each, compiled on first use (library.py); the callers keep their torch code.

Kernels are plain C functions over raw pointers. A caller asks for one by name, and where the answer is None it runs the
torch code instead, which computes the same function.

    threads = function("threads", "")
"""

from __future__ import annotations

from sparring.kernels.native.library import function, plain

__all__ = ["function", "plain"]
