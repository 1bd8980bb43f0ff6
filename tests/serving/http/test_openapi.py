"""The OpenAPI description is complete, and generated requests never cause a 5xx."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from sparring.serving.http.app import Service
from sparring.serving.http.runs import RunRegistry
from sparring.serving.http.schema import Limits
from sparring.serving.http.store import Store
from support.made_run import MadeRun, make_run

PATHS = {
    "/healthz": {"get"},
    "/readyz": {"get"},
    "/metrics": {"get"},
    "/v1/info": {"get"},
    "/v1/recommend": {"post"},
    "/v1/similar": {"post"},
    "/v1/items": {"put", "delete"},
    "/v1/items/{id}": {"get"},
    "/v1/item": {"get"},
    "/v1/users/{id}": {"get"},
    "/v1/user": {"get"},
    "/v1/reload": {"post"},
}


def test_every_route_is_described(client: TestClient) -> None:
    """The description has the paths, methods and bodies of the service."""
    description = client.get("/openapi.json").json()
    assert {path: set(methods) for path, methods in description["paths"].items()} == PATHS
    asked = description["components"]["schemas"]["Recommend"]["properties"]
    assert {
        "user",
        "users",
        "history",
        "text",
        "texts",
        "k",
        "exclude_seen",
        "allow",
        "deny",
        "where",
        "fields",
        "run",
    } == set(asked)


def test_an_answer_is_as_described(truth: MadeRun, client: TestClient) -> None:
    """Responses match their described type."""
    from sparring.serving.http.schema import Answers

    for asked, unknown in (({"user": "user-01"}, []), ({"history": [truth.item_ids[0], "no such"]}, ["no such"])):
        answer = client.post("/v1/recommend", json={**asked, "fields": ["price"]})
        parsed = Answers.model_validate_json(answer.content, strict=True)
        assert len(parsed.results[0].items) == 10
        assert parsed.results[0].unknown == unknown
    assert "unknown" in client.get("/openapi.json").json()["components"]["schemas"]["Answer"]["properties"]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("mode", ["POSITIVE", "NEGATIVE"])
def test_made_up_requests_are_never_a_5xx(tmp_path: Path, mode: str) -> None:
    """schemathesis sends valid and invalid requests to every operation, and none gets a 5xx."""
    schemathesis = pytest.importorskip("schemathesis", reason="schemathesis is not installed: pip install schemathesis")
    from hypothesis import HealthCheck, Phase, given, settings
    from schemathesis.generation import GenerationMode

    truth = make_run(tmp_path / "run", 1)
    service = Service(RunRegistry([truth.folder], Store(tmp_path / "items.sqlite")), Limits(seconds=30))
    seen: dict[str, int] = {}

    def ask(case: Any) -> None:
        answer = case.call()
        seen[f"{case.method} {case.path}"] = seen.get(f"{case.method} {case.path}", 0) + 1
        assert answer.status_code < 500, (case.as_curl_command(), answer.text)

    often = settings(max_examples=40, phases=[Phase.explicit, Phase.generate], suppress_health_check=list(HealthCheck))
    try:
        for operation in schemathesis.openapi.from_asgi("/openapi.json", service.gate).get_all_operations():
            if mode == "NEGATIVE" and not (
                operation.ok().body or operation.ok().query or operation.ok().path_parameters
            ):
                continue  # no parameters to get wrong
            cases = operation.ok().as_strategy(generation_mode=GenerationMode[mode])
            often(given(case=cases)(ask))()
        assert len(seen) >= (sum(map(len, PATHS.values())) if mode == "POSITIVE" else 8)
    finally:
        service.close()
