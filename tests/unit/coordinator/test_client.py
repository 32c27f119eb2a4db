from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.api import E_LEASE_EXPIRED, JoinLink, error_of, problem_of
from protocol.client import CoordinatorClient
from protocol.errors import E_INTERNAL, E_UNREACHABLE, AssayError, LocalFault, PeerFault, Transient
from protocol.identity import Identity
from protocol.messages import LeaseRequest, UploadRequest
from tests.fakes.clock import FakeClock

RUN_ID = "ab" * 16
HEX = st.text("0123456789abcdef", min_size=64, max_size=64)


def client(answer: Callable[[httpx.Request], httpx.Response], clock: FakeClock, **options: Any) -> CoordinatorClient:
    return CoordinatorClient(
        "http://coordinator:8700/", Identity(b"k" * 32), transport=httpx.MockTransport(answer), clock=clock, seed=0,
        **options,
    )


def lease_request(run_id: str = RUN_ID) -> LeaseRequest:
    return LeaseRequest(
        run_id=run_id, node_id="00" * 32, nonce="11" * 16, max_leases=1, newest_version=0, issued_at_ms=1
    )


# -- join links ------------------------------------------------------------------------------------------


@given(
    host=st.sampled_from(["127.0.0.1", "example.org", "::1"]), port=st.integers(1, 65_535), root=HEX, tls=st.booleans()
)
def test_a_join_link_survives_being_written_and_read(host: str, port: int, root: str, tls: bool) -> None:
    link = JoinLink(host, port, root, RUN_ID, "token-_123", tls)
    assert JoinLink.parse(link.format()) == link
    assert JoinLink.parse(f"  {link.format()}\n") == link


def test_the_form_of_a_join_link_is_fixed() -> None:
    link = JoinLink("10.0.0.1", 8700, "1f" * 32, RUN_ID, "secret-token")
    assert link.format() == f"assay://10.0.0.1:8700/?root={'1f' * 32}&run={RUN_ID}&token=secret-token"
    assert link.base_url == "http://10.0.0.1:8700"
    assert JoinLink("::1", 1, "1f" * 32, RUN_ID, "secret-token", tls=True).base_url == "https://[::1]:1"


@pytest.mark.parametrize(
    "text",
    [
        "", "assay:", "https://10.0.0.1:8700/?root=x",
        f"assay://10.0.0.1/?root={'1f' * 32}&run={RUN_ID}&token=secret-to",
        f"assay://h:99999/?root={'1f' * 32}&run={RUN_ID}&token=secret-tok",
        f"assay://h:1/?root=1f&run={RUN_ID}&token=abcdefgh",
        f"assay://h:1/?root={'1f' * 32}&run={RUN_ID}", f"assay://h:1/?root={'1f' * 32}&run={RUN_ID}&token=abc def",
        f"assay://h:1/?root={'1f' * 32}&run={RUN_ID}&token=abcdefgh&token=abcdefgh",
        f"assay://h:1/?root={'1F' * 32}&run={RUN_ID}&token=abcdefgh", f"assay://[h:1/?root={'1f' * 32}",
    ],
)
def test_a_broken_join_link_is_explained(text: str) -> None:
    with pytest.raises(LocalFault) as caught:
        JoinLink.parse(text)
    assert caught.value.code == "E_JOIN_LINK"
    assert caught.value.hint


# -- errors over the wire --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error",
    [
        PeerFault(E_LEASE_EXPIRED, "late", expected="1", got="2", hint="be quick"),
        LocalFault(E_INTERNAL, "broken"), Transient(E_UNREACHABLE, "away"),
    ],
)
def test_errors_come_out_as_they_went_in(error: AssayError) -> None:
    problem = problem_of(error)
    back = error_of(problem, problem["status"])
    assert type(back) is type(error)
    assert (back.code, back.message, back.expected, back.got, back.hint) == (
        error.code, error.message, error.expected, error.got, error.hint
    )


@pytest.mark.parametrize(
    ("body", "status", "fault", "code"),
    [
        (None, 502, Transient, "E_REMOTE"), ("text", 500, LocalFault, "E_REMOTE"), ([], 404, PeerFault, "E_REMOTE"),
        ({"code": "E_OF_THE_FUTURE", "fault": "peer"}, 422, PeerFault, "E_REMOTE"),
        ({}, 429, Transient, "E_RATE_LIMITED"),
        ({"code": 5, "fault": 7}, 503, Transient, "E_REMOTE"),
    ],
)
def test_strange_answers_become_errors_too(body: Any, status: int, fault: type[AssayError], code: str) -> None:
    error = error_of(body, status)
    assert (type(error), error.code, error.status) == (fault, code, status)


# -- the client ------------------------------------------------------------------------------------------


def test_transient_trouble_is_retried_on_the_clock_until_it_ends(clock: FakeClock) -> None:
    answers = iter([
        httpx.Response(503, json={"code": "E_UNREACHABLE", "fault": "transient"}),
        httpx.Response(429, headers={"retry-after": "7"}), httpx.Response(502, text="<html>bad gateway"),
        httpx.Response(200, json={"version": 3}),
    ])
    with client(lambda _: next(answers), clock) as desk:
        assert desk.status() == {"version": 3}
    assert len(clock.slept) == 3
    assert clock.slept[1] == 7.0
    assert 0.05 <= clock.slept[0] <= 0.15


def test_a_call_ends_at_its_deadline(clock: FakeClock) -> None:
    def refuse(_: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused")

    with client(refuse, clock, deadline_s=20) as desk, pytest.raises(Transient) as caught:
        desk.status()
    assert caught.value.code == "E_UNREACHABLE"
    assert "gave up after 20 s" in caught.value.__notes__[0]
    assert sum(clock.slept) <= 20
    assert len(clock.slept) > 5


def test_faults_are_not_retried(clock: FakeClock) -> None:
    calls = []

    def answer(request: httpx.Request) -> httpx.Response:
        calls.append(request)
        return httpx.Response(410, json=problem_of(PeerFault(E_LEASE_EXPIRED, "late")))

    with client(answer, clock) as desk, pytest.raises(PeerFault) as caught:
        desk.lease(lease_request())
    assert (caught.value.code, caught.value.status, len(calls)) == (E_LEASE_EXPIRED, 410, 1)


def test_fetched_bytes_are_checked_and_tried_again(clock: FakeClock) -> None:
    wanted = hashlib.sha256(b"right").hexdigest()
    answers = iter([b"wrong", b"right"])
    with client(lambda _: httpx.Response(200, content=next(answers)), clock) as desk:
        assert desk.fetch(wanted) == b"right"
    with client(lambda _: httpx.Response(200, content=b"wrong"), clock) as desk, pytest.raises(Transient) as caught:
        desk.fetch(wanted)
    assert caught.value.code == "E_OBJECT_HASH"
    with client(lambda _: httpx.Response(200, content=b"right"), clock) as desk, pytest.raises(LocalFault) as too_large:
        desk.fetch(wanted, max_bytes=4)
    assert too_large.value.code == "E_TOO_LARGE"


def test_redirects_to_the_store_are_followed(clock: FakeClock) -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.host == "coordinator":
            return httpx.Response(307, headers={"location": "http://store:9000/bucket/object?signature=1"})
        return httpx.Response(200, content=b"from the store")

    with client(answer, clock) as desk:
        assert desk.fetch(hashlib.sha256(b"from the store").hexdigest()) == b"from the store"


@pytest.mark.parametrize("location", ["http://a..b/", "http://[", "ftp://x/"])
def test_a_redirect_to_no_address_is_no_answer(location: str, clock: FakeClock) -> None:
    redirect = httpx.Response(302, headers={"location": location})
    with client(lambda _: redirect, clock) as desk, pytest.raises(Transient) as caught:
        desk.get_object("/v1/run")
    assert caught.value.code == E_UNREACHABLE


def test_an_upload_goes_where_it_is_told(clock: FakeClock) -> None:
    seen = []

    def answer(request: httpx.Request) -> httpx.Response:
        if request.method == "POST":
            reply = {"url": "http://store:9000/x", "headers": {"x-amz-checksum": "c"}, "exists": False}
            return httpx.Response(200, json=reply)
        seen.append((str(request.url), request.headers["x-amz-checksum"], request.read()))
        return httpx.Response(200)

    request = UploadRequest(
        run_id=RUN_ID, node_id="00" * 32, object_sha256=hashlib.sha256(b"data").hexdigest(), object_bytes=4,
        issued_at_ms=1,
    )
    with client(answer, clock) as desk:
        desk.upload(request, b"data")
        with pytest.raises(LocalFault) as caught:
            desk.upload(request, b"dada")
    assert seen == [("http://store:9000/x", "c", b"data")]
    assert caught.value.code == "E_OBJECT_HASH"


@pytest.mark.parametrize("body", [b"not json", b"[]", b'{"leases": 5}', b"[" * 100_000, b"\xff"])
def test_answers_that_make_no_sense_are_the_coordinators_fault(body: bytes, clock: FakeClock) -> None:
    with client(lambda _: httpx.Response(200, content=body), clock) as desk, pytest.raises(PeerFault) as caught:
        desk.lease(lease_request())
    assert caught.value.code == "E_SCHEMA"


@pytest.mark.parametrize(
    "url",
    [
        "foo", "", "ftp://x", "http://", "127.0.0.1:8700", "http://[::1", "http://x:port", "http://127.0.0.1:x",
        "http://a..b/", "http://\udcff", "http://xn--/", f"http://{'a' * 64}", f"http://{'a.' * 40_000}b",
        "http://h\n:80", "http://[v1.x]/",
    ],
)
def test_what_is_no_address_of_a_coordinator_is_refused(url: str) -> None:
    with pytest.raises(LocalFault, match="E_CONFIG"):
        CoordinatorClient(url, None)


def test_nothing_leaves_without_a_key_or_for_another_run(clock: FakeClock) -> None:
    def never(_: httpx.Request) -> httpx.Response:
        raise AssertionError("sent")

    with client(never, clock, run_id="cd" * 16) as desk, pytest.raises(LocalFault) as caught:
        desk.lease(lease_request())
    assert caught.value.code == "E_WRONG_RUN"
    reader = CoordinatorClient("http://x", None, transport=httpx.MockTransport(never), clock=clock)
    with reader, pytest.raises(LocalFault) as caught:
        reader.lease(lease_request())
    assert caught.value.code == "E_KEY_FILE"
