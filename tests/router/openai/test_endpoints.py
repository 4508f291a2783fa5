"""The other endpoints, and who may call: tokens, tenants, TLS, browsers."""

from __future__ import annotations

import asyncio
import importlib.metadata
import re
import ssl
from pathlib import Path

import pytest

from baton.config.router import AuthConfig
from tests.certificates import Authority
from tests.router.deployment import ALIAS, DECODE, deployment
from tests.router.openai.spoken import CHAT, TURN, Http, Speaks, saying
from tests.router.secured import BLUE, RED, secured


async def test_the_model_is_listed(http: Http) -> None:
    listed = (await http.call("GET", "/v1/models")).json
    assert listed["object"] == "list"
    model, other = listed["data"]
    assert other == {**model, "id": ALIAS}
    assert (model["id"], model["object"], model["max_model_len"]) == ("tiny", "model", 2048)
    assert (await http.call("GET", "/v1/models/tiny")).json == model
    assert (await http.chat("yes", model=ALIAS)).json["model"] == "tiny"
    version = {"version": importlib.metadata.version("baton-serve")}
    assert (await http.call("GET", "/version")).json == version
    other = await http.call("GET", "/v1/models/a/b")
    assert (other.status, other.error["code"]) == (404, "model_not_found")


async def test_prompts_and_chats_are_tokenized(http: Http) -> None:
    text = (await http.post("/tokenize", {"prompt": "abc"})).json
    assert text == {"count": 3, "max_model_len": 2048, "tokens": [97, 98, 99]}
    assert (await http.post("/detokenize", {"tokens": text["tokens"]})).json == {"prompt": "abc"}
    for ids in ([], [97] * 3000):  # however long the context is
        assert (await http.post("/detokenize", {"tokens": ids})).json == {"prompt": "a" * len(ids)}
    beyond = await http.post("/detokenize", {"tokens": [97, 999]})
    assert (beyond.status, beyond.error["param"]) == (400, "tokens[1]")
    messages = [{"role": "user", "content": "a"}, {"role": "tool", "content": "b"}]
    chat = (await http.post("/tokenize", {"model": "tiny", "messages": messages})).json
    assert bytes(chat["tokens"]).decode() == f"<user>a<tool>b{TURN}"
    for body, param in (
        ({}, "prompt"),
        ({"prompt": "a", "messages": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"messages": [{"role": "x", "content": ""}]}, "messages[0].role"),
    ):
        answer = await http.post("/tokenize", body)
        assert (answer.status, answer.error["param"]) == (400, param)


async def test_embeddings_are_not_implemented(http: Http) -> None:
    answer = await http.post("/v1/embeddings", {"input": "x"})
    assert (answer.status, answer.error["code"]) == (501, "not_implemented")
    assert answer.headers["x-should-retry"] == "false"


async def test_the_document_and_the_page_name_every_endpoint(http: Http) -> None:
    document = (await http.call("GET", "/openapi.json")).json
    page = (Path(__file__).parents[3] / "docs" / "openai.md").read_text().partition("## Fields")[0]
    listed = re.findall(r"`(?:GET |POST )?(/[\w./{}]+)`", page.replace("NAME", "{name}"))
    assert sorted(document["paths"]) == sorted(listed)
    body = document["components"]["schemas"]["ChatBody"]
    assert body["required"] == ["messages"]
    assert {"tools", "stream_options", "seed", "top_k"} <= body["properties"].keys()
    assert body["properties"]["session_id"]["description"]


async def test_a_router_is_ready_while_it_serves_and_healthy_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with deployment(http={"port": 0}) as d:
        server = d.servers[0]
        http = Http(server.http_address or "")
        await d.until(lambda: server.http_app.is_ready)
        assert (await http.call("GET", "/ready")).status == 200
        server.http_app.is_ready = False
        assert (await http.call("GET", "/ready")).status == 503
        assert (await http.call("GET", "/health")).status == 200
        models = (await http.call("GET", "/v1/models")).json
        assert models["data"][0]["id"] == "tiny"
        server.http_app.is_ready = True
        await d.worker("d0").stop()
        await d.until(lambda: not server.units.serves)
        assert (await http.call("GET", "/ready")).status == 503
        await d.add_worker("d0", DECODE, incarnation=2)
        await d.until(lambda: server.units.serves)
        assert (await http.call("GET", "/ready")).status == 200


async def test_two_tenants_are_told_apart_by_their_keys(speaks: Speaks, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens.yaml"
    tokens.write_text(f"red: {RED}\nblue: {BLUE}\n")
    async with speaks(auth=AuthConfig(str(tokens))) as (d, http):
        messages = [{"role": "user", "content": saying("yes")}]
        body = {"messages": messages, "request_id": "same"}
        red, blue = ({"authorization": f"Bearer {token}"} for token in (RED, BLUE))
        for headers in ({}, {"authorization": "Bearer nonsense"}, {"authorization": RED}):
            answer = await http.post("/v1/chat/completions", body, **headers)
            assert (answer.status, answer.error["code"]) == (401, "invalid_api_key")
            assert answer.headers["www-authenticate"] == "Bearer"
            assert answer.headers["x-request-id"]
            assert "metadata" not in answer.error["message"]
            assert (await http.post("/tokenize", {"prompt": "x"}, **headers)).status == 401
            assert (await http.call("GET", "/v1/models", headers=headers)).status == 401
        for headers in (red, blue):  # one id, and two requests
            assert (await http.post("/v1/chat/completions", body, **headers)).status == 200
        seen = {run.spec.tenant for run in d.worker("d0").finished.values()}
        assert seen == {"red", "blue"}
        as_anthropic = {"messages": messages, "max_tokens": 9}
        for key, status in ((RED, 200), ("nonsense", 401)):
            assert (await http.post("/v1/messages", as_anthropic, x_api_key=key)).status == status
        foreign = await http.post("/v1/chat/completions", body | {"tenant": "blue"}, **red)
        assert (foreign.status, foreign.error["param"]) == (403, "tenant")
        for path in ("/health", "/ready", "/openapi.json"):
            assert (await http.call("GET", path)).status == 200


async def test_browsers_of_listed_origins_alone_may_call(speaks: Speaks) -> None:
    asks = {
        "origin": "https://chat.example",
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type",
    }
    path, allowed = "/v1/chat/completions", "access-control-allow-origin"
    async with speaks() as (_, http):
        assert allowed not in (await http.call("OPTIONS", path, headers=asks)).headers
    origins = ("https://chat.example",)
    async with speaks(http={"origins": origins}) as (_, http):
        answer = await http.call("OPTIONS", path, headers=asks)
        assert (answer.status, answer.headers[allowed]) == (200, origins[0])
        said = await http.post(path, {"messages": []}, origin=origins[0])
        assert (said.status, said.headers[allowed]) == (400, origins[0])
        other = await http.call("OPTIONS", path, headers=asks | {"origin": "https://evil.example"})
        assert allowed not in other.headers


async def test_the_same_certificate_serves_http_and_changes_while_it_runs(
    speaks: Speaks, tmp_path: Path
) -> None:
    authority = Authority(tmp_path)
    settings = {"tls": secured(tmp_path, authority)["tls"]}
    async with speaks(CHAT, **settings) as (_, http):
        http.tls = ssl.create_default_context(cafile=str(authority.ca))
        assert (await http.chat("yes")).status == 200
        other = Authority(tmp_path / "other")
        made = other.issue("router")
        for name, file in (("router.crt", made.certificate), ("router.key", made.key)):
            (tmp_path / name).write_bytes(file.read_bytes())
        trusting = ssl.create_default_context(cafile=str(other.ca))

        async def is_trusted() -> bool:
            try:
                return (await Http(http.address, trusting).call("GET", "/health")).status == 200
            except ssl.SSLError:
                return False

        async with asyncio.timeout(10):
            while not await is_trusted():  # noqa: ASYNC110  files are looked at now and then
                await asyncio.sleep(0.1)
        with pytest.raises(ssl.SSLError):
            await http.call("GET", "/health")


async def test_the_readme_s_example_of_the_openai_client_runs(
    speaks: Speaks, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("openai")
    readme = (Path(__file__).parents[3] / "README.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    (code,) = (block for block in blocks if "OpenAI" in block)
    async with speaks() as (_, http):
        for old, new in (
            ("127.0.0.1:8000", http.address),
            ('"demo"', '"tiny"'),
            ('"Tell me a story."', repr(saying("Once upon a time"))),
        ):
            assert old in code
            code = code.replace(old, new)
        await asyncio.to_thread(exec, compile(code, "README.md", "exec"), {})
    assert capsys.readouterr().out == "Once upon a time"
