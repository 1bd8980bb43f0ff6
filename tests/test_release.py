"""A release is ready: one version everywhere, workflows without secrets, images that nobody runs as root."""

from __future__ import annotations

import ast
import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

import sparring
from sparring.cli.main import parser

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def steps(workflow: dict[str, Any]) -> list[dict[str, Any]]:
    return [step for job in workflow["jobs"].values() for step in job["steps"]]


def parses(command: str) -> bool:
    """Whether the command line takes all words of a command."""
    return not parser()[0].parse_known_args(shlex.split(command)[1:])[1]


def test_one_version() -> None:
    """The version stands in `sparring/__init__.py`; the citation and the changelog follow it, with one date."""
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert "version" in PROJECT["project"]["dynamic"]
    assert PROJECT["tool"]["hatch"]["version"]["path"] == "src/sparring/__init__.py"
    assert cited["version"] == sparring.__version__
    assert f"## [{sparring.__version__}] - {cited['date-released']}\n" in (ROOT / "CHANGELOG.md").read_text()
    for page in (ROOT / "README.md", *ROOT.glob("docs/**/*.md")):
        for version in re.findall(r"sparring(?:==|:v|-)(\d+\.\d+\.\d+)", page.read_text()):
            assert version == sparring.__version__, page


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_need_no_secret(path: Path) -> None:
    """A workflow may only read unless a job says more, each job ends, and no secret is named."""
    text = path.read_text()
    workflow = yaml.safe_load(text)
    assert workflow["permissions"] == {"contents": "read"}
    assert all(job["timeout-minutes"] for job in workflow["jobs"].values())
    assert "secrets." not in text
    assert all(("uses" in step) != ("run" in step) for step in steps(workflow))
    for step in steps(workflow):
        if step.get("run", "").startswith("sparring "):
            assert parses(step["run"])


def test_only_the_job_that_publishes_gets_an_identity() -> None:
    """PyPI is asked by the identity of one job, in the environment that its trusted publisher names."""
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text())["jobs"]
    identified = [name for name, job in jobs.items() if "id-token" in job.get("permissions", {})]
    assert identified == ["publish"]
    assert jobs["publish"]["environment"] == "pypi"
    assert jobs["publish"]["needs"] == "build"


def test_the_image() -> None:
    """The last user is a number that is not 0, the default command parses, and its health check asks the same port."""
    text = (ROOT / "Dockerfile").read_text()
    assert int(re.findall(r"^USER (\d+)$", text, re.M)[-1]) > 0
    entry, command = (ast.literal_eval(each) for each in re.findall(r"^(?:ENTRYPOINT|CMD) (\[.*\])$", text, re.M))
    assert parses(shlex.join([*entry, *command]))
    assert f"127.0.0.1:{parser()[1]['serve'].get_default('port')}/readyz" in text
    [extras] = re.findall(r"^ARG EXTRAS=(.*)$", text, re.M)
    assert set(extras.split(",")) <= set(PROJECT["project"]["optional-dependencies"])
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = {word for line in re.findall(r"^COPY (.*)$", text, re.M) for word in line.split()[:-1]}
    assert copied == allowed
    assert all((ROOT / name).exists() for name in allowed)


def test_compose() -> None:
    """Every command of compose.yaml parses, no password is written down, and only this machine reaches the service."""
    services = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]
    commands = [service["command"] for service in services.values() if "command" in service]
    assert len(commands) == 2
    assert all(parses(f"sparring {command}") for command in commands)
    for service in services.values():
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ()))
        for name, value in service.get("environment", {}).items():
            assert value.startswith("${") or not re.search("PASSWORD|TOKEN", name)
