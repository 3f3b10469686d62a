"""No client reaches an administration endpoint of a replica through the gateway."""

from __future__ import annotations

from urllib.parse import unquote

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_gateway_relay import Stage, stage

from entrypoint.gateway.allowed import is_allowed

__all__ = ["stage"]

ADMIN = (
    "flush_cache",
    "pause_generation",
    "get_server_info",
    "server_info",
    "update_weights_from_disk",
    "start_profile",
)
WAYS = (
    "/{}",
    "/v1/responses/../../{}",
    "/v1/responses/..%2f..%2f{}",
    "/v1/responses/..%2f..%2f{}%3f",
    "//{}",
    "/v1/../{}",
)


@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "DELETE", "OPTIONS", "get", "POST\t"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ADMIN)
def test_administration_is_not_forwarded(method: str, way: str, name: str) -> None:
    path = way.format(name)
    for target in (path, f"{path}?", f"{path}/cancel", f"{path}?/cancel", unquote(path), f"http://r{path}"):
        assert not is_allowed(method.encode(), target.encode())


@pytest.mark.parametrize(
    "line",
    [
        *(
            f"POST /v1/{name}"
            for name in ("chat/completions", "completions", "embeddings", "responses", "score", "rerank")
        ),
        *(
            "POST /generate",
            "GET /v1/models",
            "GET /metrics",
            "GET /v1/responses/resp_0aZ-9",
            "POST /v1/responses/r1/cancel",
        ),
        "GET /v1/responses/r1?stream=false",
    ],
)
def test_what_clients_need_is(line: str) -> None:
    method, _, target = line.partition(" ")
    assert is_allowed(method.encode(), target.encode())


@given(st.text(alphabet="./%2fFeEcC0?#;\\a_-", max_size=40), st.sampled_from(ADMIN))
def test_no_spelling_of_a_response_id_leaves_its_folder(text: str, name: str) -> None:
    target = f"/v1/responses/{text}{name}"
    if is_allowed(b"GET", target.encode()):
        path = unquote(unquote(target.partition("?")[0]))
        assert path.startswith("/v1/responses/") and ".." not in path and "/" not in path.removeprefix("/v1/responses/")


async def test_a_path_that_is_not_on_the_list_is_404_and_never_reaches_an_engine(stage: Stage) -> None:
    for path in (b"/flush_cache?", b"/v1/responses/../../flush_cache", b"/pause_generation?/cancel"):
        answer = await stage.ask(b"POST " + path + b" HTTP/1.1\r\nHost: r\r\nContent-Length: 0\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 404")
    assert not stage.engines[0].seen and not stage.engines[1].seen
