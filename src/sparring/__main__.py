"""python -m sparring"""

from __future__ import annotations

import sys

from sparring.cli import main

if __name__ == "__main__":
    sys.exit(main())
