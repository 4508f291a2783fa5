"""The official `openai` client, unchanged: its errors and the README's example. What it makes of
answers is in `tests/clients`."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest

from baton.config.router import AuthConfig
from tests.router.openai.spoken import saying, spoken

openai = pytest.importorskip("openai")

KEY = "red-token-1"
README = (Path(__file__).resolve().parents[3] / "README.md").read_text()


async def test_the_client_s_errors_are_those_that_it_knows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def work(url: str, key: str = KEY, model: str = "tiny", **fields: Any) -> Any:
        with openai.OpenAI(base_url=url, api_key=key, max_retries=0) as client:
            messages = [{"role": "user", "content": "x"}]
            with pytest.raises(openai.APIStatusError) as error:
                client.chat.completions.create(model=model, messages=messages, **fields)
            return error.value

    (tmp_path / "tokens.yaml").write_text(f"red: {KEY}\n")
    auth = AuthConfig(str(tmp_path / "tokens.yaml"))
    async with spoken(tmp_path, monkeypatch, auth=auth) as (_, http):
        for fields, kind, field, code in (
            ({"top_p": 7}, openai.BadRequestError, "top_p", "invalid_value"),
            ({"model": "gpt-9"}, openai.NotFoundError, "model", "model_not_found"),
            ({"key": "nonsense"}, openai.AuthenticationError, None, "invalid_api_key"),
        ):
            error = await asyncio.to_thread(work, f"http://{http.address}/v1", **fields)
            assert (type(error), error.param, error.code) == (kind, field, code)


async def test_the_readme_s_example_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (code,) = (
        block
        for block in re.findall(r"```python\n(.*?)```", README, re.DOTALL)
        if "OpenAI" in block
    )
    async with spoken(tmp_path, monkeypatch) as (_, http):
        for old, new in (
            ("127.0.0.1:8000", http.address),
            ('"demo"', '"tiny"'),
            ('"Tell me a story."', repr(saying("Once upon a time"))),
        ):
            assert old in code
            code = code.replace(old, new)
        await asyncio.to_thread(exec, compile(code, "README.md", "exec"), {})
    assert capsys.readouterr().out == "Once upon a time"
