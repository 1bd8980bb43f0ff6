"""Print the oldest versions that pyproject.toml allows, as pip requirements: of every core dependency but torch, and of
the extras given as arguments."""

import re
import sys
import tomllib
from pathlib import Path

project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
extras = [one for extra in sys.argv[1:] for one in project["optional-dependencies"][extra]]
for requirement in [*project["dependencies"], *extras]:
    name, oldest = re.match(r"([\w-]+)>=([\d.]+)", requirement).groups()
    if name != "torch":
        print(f"{name}=={oldest}")
