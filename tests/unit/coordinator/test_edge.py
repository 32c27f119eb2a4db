from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.testclient import TestClient

from coordinator import status as overview
from coordinator.edge import RateLimit, address_of, network_of
from protocol import evidence as evidence_file
from protocol.messages import Receipt
from tests.fakes.clock import FakeClock
from tests.fakes.coordinator import World
from tests.unit.coordinator.conftest import MakeWorld


def test_everything_can_be_read_before_anything_happened(make_world: MakeWorld) -> None:
    world = make_world()
    for path in ("/healthz", "/readyz", "/metrics", "/", "/v1/status", "/v1/nodes", "/v1/run", "/v1/epochs", "/v1/log"):
        assert world.http.get(path).status_code == 200, path
    status = world.http.get("/v1/status").json()
    assert (status["version"], status["nodes"], status["reward_mean"]) == (None, [], [])
    assert world.learner.client.admitted(9) == []


def test_unknown_paths_methods_and_parameters_are_problems(world: World) -> None:
    for answer, status, code in (
        (world.http.get("/v1/nothing"), 404, "E_NOT_FOUND"),
        (world.http.delete("/v1/status"), 405, "E_USAGE"),
        (world.http.get("/v1/log?limit=0"), 422, "E_SCHEMA"),
        (world.http.get("/v1/checkpoints/one"), 422, "E_SCHEMA"),
        (world.http.get("/v1/checkpoints/99999999999999999999"), 422, "E_SCHEMA"),
        (world.http.get("/v1/groups/-1"), 422, "E_SCHEMA"),
    ):
        assert (answer.status_code, answer.json()["code"]) == (status, code)
        assert answer.headers["content-type"] == "application/problem+json"


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"", "E_JSON"),
        (b"{}", "E_ENVELOPE"),
        (b"[" * 100_000, "E_JSON"),
        (b'{"payload": "", "payloadType": "", "signatures": []}', "E_JSON"),
        (b"\xff\xfe", "E_JSON"),
        (b"1e400", "E_JSON"),
    ],
)
def test_garbage_is_refused_by_name(world: World, body: bytes, code: str) -> None:
    for path in ("/v1/nodes", "/v1/leases", "/v1/submissions", "/v1/verdicts", "/v1/checkpoints", "/v1/batches"):
        answer = world.http.post(path, content=body)
        assert (answer.status_code, answer.json()["code"]) == (422, code)


def test_a_body_too_large_is_refused_by_its_announcement(world: World) -> None:
    answer = world.http.post("/v1/leases", content=b"x" * (128 * 1024 + 1))
    assert (answer.status_code, answer.json()["code"]) == (413, "E_TOO_LARGE")

    def endless() -> Any:
        for _ in range(10_000):
            yield b"x" * 1024

    answer = world.http.post("/v1/leases", content=endless())
    assert (answer.status_code, answer.json()["code"]) == (413, "E_TOO_LARGE")


def test_request_ids_come_back(world: World) -> None:
    assert world.http.get("/healthz", headers={"x-request-id": "abc-1"}).headers["x-request-id"] == "abc-1"
    assert len(world.http.get("/healthz", headers={"x-request-id": "a\tb" * 99}).headers["x-request-id"]) == 16


def test_too_many_requests_are_told_when_to_come_back(make_world: MakeWorld) -> None:
    world = make_world(config={"rate_per_s": 0.5, "rate_burst": 2})
    assert [world.http.get("/v1/run").status_code for _ in range(3)] == [200, 200, 429]
    answer = world.http.get("/v1/run")
    assert (answer.json()["code"], answer.headers["retry-after"]) == ("E_RATE_LIMITED", "2")
    assert world.http.get("/healthz").status_code == 200
    world.verifier.client.run_manifest()  # our client waits as told, on its clock, and comes through
    assert world.clock.slept[-1] >= 2


def test_the_status_is_made_once_for_all_who_ask_at_the_same_time(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, made = make_world(config={"status_ms": 200}), []
    snapshot = overview.snapshot
    monkeypatch.setattr(overview, "snapshot", lambda *arguments: made.append(1) or snapshot(*arguments))
    assert [world.http.get(path).status_code for path in ("/v1/status", "/metrics", "/v1/status")] == [200] * 3
    assert len(made) == 1
    world.node().join()
    world.clock.advance(0.2)
    assert len(world.http.get("/v1/status").json()["nodes"]) == 1
    assert len(made) == 2


def test_rate_limit_forgets_quiet_addresses() -> None:
    async def nothing(*_: Any) -> None:
        return None

    limit = RateLimit(nothing, FakeClock(), 1.0, 1)
    for i in range(10_001):
        limit.take(str(i))
    assert limit.take("0") == 0.0
    assert limit.take("10000") == 1.0


@pytest.mark.parametrize(
    ("host", "network"),
    [
        ("203.0.113.7", "203.0.113.7"), ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"), ("::1", "::/64"),
        ("2001:db8:1:2::", "2001:db8:1:2::/64"), ("::ffff:203.0.113.7", "203.0.113.7"), ("fe80::1%eth0", "fe80::/64"),
        ("testclient", "testclient"), ("", ""), ("a:b", "a:b"),
    ],
)
def test_an_ipv6_network_counts_as_one_address(host: str, network: str) -> None:
    assert network_of(host) == network
    assert address_of({"client": (host, 1)}) == network


def test_the_addresses_of_a_network_share_a_rate(make_world: MakeWorld) -> None:
    world = make_world(config={"rate_per_s": 0.5, "rate_burst": 2})
    one, two = (TestClient(world.app, client=(f"2001:db8::{i}", 1)) for i in (1, 2))
    assert [client.get("/v1/run").status_code for client in (one, two, one, two)] == [200, 200, 429, 429]


def test_an_unexpected_fault_shows_nothing_of_our_insides(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise RuntimeError("secret path /var/lib/assay")

    monkeypatch.setattr(world.coordinator, "status", broken)
    answer = world.http.get("/v1/status")
    assert (answer.status_code, answer.json()["code"]) == (500, "E_INTERNAL")
    assert "secret" not in answer.text


def test_evidence_holds_all_a_stranger_needs(world: World) -> None:
    [reply] = world.node().join().work(1)
    world.verifier.judge("fail", "E_REPLAY")
    world.clock.advance(1)
    world.publish()  # too late to have been used
    receipt = Receipt.from_payload(reply.receipt.payload)
    data = world.verifier.client.evidence(receipt.receipt_id)
    evidence = evidence_file.decode(data)
    assert evidence.root_public_key == world.keys["root"].public_key
    assert evidence.receipt is not None
    assert evidence.receipt.digest == reply.receipt.digest
    assert [v.payload_type for v in evidence.verdicts] == ["application/vnd.assay.verdict.v1+json"]
    assert [c.digest for c in evidence.checkpoints] == [world.learner.manifests[0].digest]
    assert evidence.bundle.startswith(b"bundle of ")
    assert world.http.get("/v1/evidence/none").status_code == 404


def test_metrics_follow_the_status(world: World) -> None:
    world.node().join().work(1)
    world.verifier.judge()
    text = world.http.get("/metrics").text
    assert 'assay_rollouts_total{outcome="accepted"} 2.0' in text
    assert "assay_tokens_generated_total 10.0" in text


def test_the_page_stands_alone(world: World) -> None:
    answer = world.http.get("/")
    assert "script-src 'sha256-" in answer.headers["content-security-policy"]
    assert "src=" not in answer.text
    assert "http://" not in answer.text.replace("http://www.w3.org/2000/svg", "")
    assert "https://" not in answer.text


def test_openapi_is_the_published_one(world: World, root: Path) -> None:
    """After a wanted change: ``python -m tests.unit.coordinator.write_openapi``."""
    published = json.loads((root / "docs" / "spec" / "openapi.json").read_text(encoding="utf-8"))
    assert world.app.openapi() == published


def test_a_restart_keeps_everything(world: World) -> None:
    node = world.node().join()
    node.work(3)
    world.verifier.judge()
    before = world.http.get("/v1/status").json()
    world.restart()
    assert world.http.get("/v1/status").json() == before
    node.work(1)
    assert world.verifier.pass_all() == 3
    assert isinstance(world.http, httpx.Client)
