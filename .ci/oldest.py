"""Print the oldest versions that pyproject.toml allows of every core dependency but torch, as pip requirements."""

import re
import tomllib
from pathlib import Path

project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
for requirement in project["dependencies"]:
    name, oldest = re.match(r"([\w-]+)>=([\d.]+)", requirement).groups()
    if name != "torch":
        print(f"{name}=={oldest}")
