"""Print the branch coverage of each package, and the lines and branches of each file that no test reached."""

import contextlib
import io
import json
import tempfile
from collections import Counter
from pathlib import Path

from coverage import Coverage

measured = Coverage()
measured.load()
with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
    measured.json_report(outfile=f"{folder}/coverage.json")
    files = json.loads(Path(folder, "coverage.json").read_text())["files"]

packages: dict[str, Counter[str]] = {}
for name, about in files.items():
    parts = Path(name).parts
    package = "/".join(parts[parts.index("sparring") + 1 : -1])
    for group in (package, "all"):
        packages.setdefault(group, Counter()).update({k: v for k, v in about["summary"].items() if isinstance(v, int)})

print("| package | statements | branches | branches covered |\n|---|---|---|---|")
for package in sorted(packages, key=lambda each: (each == "all", each)):
    total = packages[package]
    lines = f"{total['covered_lines'] / total['num_statements']:.1%}"
    branches = f"{total['covered_branches'] / total['num_branches']:.1%}"
    print(f"| {package} | {lines} of {total['num_statements']:,} | {total['num_branches']:,} | {branches} |")
print()
measured.report(show_missing=True, skip_covered=True)
