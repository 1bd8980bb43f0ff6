"""The OpenAPI description is complete, and generated requests never cause a 5xx."""

from __future__ import annotations

import shutil
import time
import zlib
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from sparring.serving.http.app import Service
from sparring.serving.http.runs import RunRegistry
from sparring.serving.http.schema import Limits
from sparring.serving.http.store import Store
from support.made_run import MadeRun, make_run
from support.settings import effort

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
        answer = case.call(timeout=120)  # a reload on a busy machine takes seconds
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


SEQUENCES = effort(30, 300)  # seconds of made-up sequences


@pytest.mark.timeout(120 + 2 * SEQUENCES)
def test_made_up_sequences_are_never_a_5xx(tmp_path: Path) -> None:
    """schemathesis follows the links: items are put, asked for, changed and deleted by the ids of earlier answers.

    Integers beyond 64 bits are mixed into bodies.
    """
    schemathesis = pytest.importorskip("schemathesis", reason="schemathesis is not installed: pip install schemathesis")
    from hypothesis import HealthCheck, Phase, settings

    truth, services = make_run(tmp_path / "run", 1), list[Service]()
    outcomes: dict[tuple[str, int], int] = {}

    def renew() -> None:
        """A service without changes: a sequence must not depend on those before it."""
        while services:
            services.pop().close()
        shutil.rmtree(tmp_path / "store", ignore_errors=True)
        registry = RunRegistry([truth.folder], Store(tmp_path / "store" / "items.sqlite"))
        services.append(Service(registry, Limits(seconds=30)))

    async def current(*call: Any) -> None:
        await services[0].gate(*call)

    renew()

    class Sequences(schemathesis.openapi.from_asgi("/openapi.json", current).as_state_machine()):  # type: ignore[misc]
        def setup(self) -> None:
            renew()

        def before_call(self, case: Any) -> None:
            """Most made-up ids are unknown, and every new item needs a place: use ids of the run in most requests."""
            if not isinstance(case.body, dict):
                return
            choice = zlib.crc32(repr(case.body).encode())
            if case.path == "/v1/items" and case.method == "PUT" and choice % 4:
                items = [item for item in case.body.get("items") or () if isinstance(item, dict) and "id" in item]
                like = [truth.item_ids[choice % 60]]
                case.body = {"items": [{"id": item["id"], "title": str(choice), "like": like} for item in items]}
            elif case.path == "/v1/recommend" and choice % 2:
                case.body = {"user": truth.user(choice % 40), "k": case.body.get("k", 10)}
            if choice % 7 == 0:
                case.body = larger(case.body, 2**64 + choice)

        def validate_response(self, response: Any, case: Any, **_: Any) -> None:
            key = f"{case.method} {case.path}", response.status_code
            outcomes[key] = outcomes.get(key, 0) + 1
            assert response.status_code < 500, (case.as_curl_command(), response.text)

    often = settings(
        max_examples=25,
        stateful_step_count=8,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
        derandomize=False,
        database=None,
    )
    deadline = time.monotonic() + SEQUENCES
    try:
        while time.monotonic() < deadline:
            Sequences.run(settings=often)
    finally:
        services.pop().close()
    asked = ("POST /v1/recommend", "GET /v1/item", "PUT /v1/items", "DELETE /v1/items", "POST /v1/similar")
    for operation in asked[: effort(1, 5)]:  # a short run may have no success of the rarer ones
        assert outcomes.get((operation, 200)), outcomes
    print(sum(outcomes.values()), "requests", outcomes)


def larger(value: Any, number: int) -> Any:
    """The value with each id and each number replaced by a large integer."""
    if isinstance(value, dict):
        return {key: part if key in ("k", "title") else larger(part, number) for key, part in value.items()}
    if isinstance(value, list):
        return [larger(part, number) for part in value]
    return number if isinstance(value, (int, str)) and not isinstance(value, bool) else value
