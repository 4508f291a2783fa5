"""Clients that people have, unchanged and in environments of their own, against processes of every
role. Answers are forced where their content matters: the model is a toy."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import pytest
import pytest_asyncio
import torch
import transformers
import yaml

from cluster.worker.rank import free_port
from tests.cluster.fleet_processes import started
from tests.path.whole_path import Shape, routers, until_routed_to

HERE = Path(__file__).resolve().parent
DEMO, MADE = HERE.parents[1] / "models" / "demo", HERE.parents[1] / "build" / "clients"
EXPECTED = {
    **{"streamed": True, "usage": True, "found": "Person(who='Hugo')"},
    **{"called": ["look_up", {"who": "Hugo"}], "ends": ["response.created", "response.completed"]},
}
CLIENTS = {
    **{"openai": {*EXPECTED}, "instructor": {"streamed", "found"}},
    **dict.fromkeys(("langchain", "pydantic_ai"), EXPECTED.keys() - {"ends"}),
    **{"anthropic": EXPECTED.keys() - {"found", "ends"}, "litellm": EXPECTED.keys() - {"found"}},
}
NODE_CLIENTS = {
    **{"openai": EXPECTED.keys() - {"usage"}, "@ai-sdk/openai": EXPECTED.keys() - {"ends"}},
    **{"@openai/agents": {"streamed", "found"}},
    **{"@anthropic-ai/sdk": {"streamed", "usage", "called"}},
}
pytestmark = pytest.mark.asyncio(loop_scope="module")


def needs(kind: str) -> pytest.MarkDecorator:
    missing = not (MADE / kind / ".ready").exists()
    return pytest.mark.skipif(missing, reason=f"`make build/clients/{kind}/.ready` says why")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def address(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[str]:
    port = free_port("127.0.0.1")
    path = tmp_path_factory.mktemp("demo") / "cluster.yaml"
    path.write_text(yaml.safe_dump(Shape("demo").config(DEMO, "never", port)))
    async with started(path) as fleet, routers(fleet.control, [path]) as (grpc_address,):
        await until_routed_to(grpc_address, set(fleet.processes))
        yield f"http://127.0.0.1:{port}"


async def printed(address: str, *command: object, **environment: str) -> str:
    """The last line of a program, whose client finds the address by itself."""
    keys = dict.fromkeys(("OPENAI_API_KEY", "ANTHROPIC_API_KEY"), "none")
    urls = {"OPENAI_BASE_URL": f"{address}/v1", "ANTHROPIC_BASE_URL": address}
    env = {**os.environ, **keys, **urls, "LITELLM_LOCAL_MODEL_COST_MAP": "True", **environment}
    run = partial(subprocess.run, capture_output=True, text=True, env=env, timeout=100)
    done = await asyncio.to_thread(run, [*map(str, command)])
    assert done.returncode == 0, done.stderr
    return done.stdout.rstrip().rpartition("\n")[2]


@needs("light")
@pytest.mark.parametrize("client", [*CLIENTS, "langchain responses", "pydantic_ai responses"])
async def test_a_client_understands_what_it_gets(client: str, address: str) -> None:
    pythons = [MADE / "light" / "bin" / "python", sys.executable]  # that one has openai's newest
    for python in pythons[: 1 + (client == "openai")]:
        seen = json.loads(await printed(address, python, HERE / "asks.py", *client.split()))
        assert seen == {name: EXPECTED[name] for name in CLIENTS[client.split()[0]]}


@needs("node")
@pytest.mark.full
@pytest.mark.parametrize("client", NODE_CLIENTS)
async def test_a_client_on_node_understands_what_it_gets(client: str, address: str) -> None:
    modules = str(MADE / "node" / "node_modules")
    seen = json.loads(await printed(address, "node", HERE / "asks.cjs", client, NODE_PATH=modules))
    assert seen == {name: EXPECTED[name] for name in NODE_CLIENTS[client]}


@needs("more")
@pytest.mark.full
async def test_lm_eval_finds_what_transformers_finds(address: str, tmp_path: Path) -> None:
    row = {"begin": "Hugo is", "end": " a hedgehog. He lives in the forest."}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    task = {
        **{"task": "village", "dataset_path": "json", "test_split": "test"},
        **{"dataset_kwargs": {"data_files": {"test": str(tmp_path / "rows.jsonl")}}},
        **{"output_type": "loglikelihood", "doc_to_text": "{{begin}}", "doc_to_target": "{{end}}"},
        **{"target_delimiter": "", "metric_list": [{"metric": "acc"}]},
    }
    (tmp_path / "village.yaml").write_text(yaml.safe_dump(task))
    await printed(
        *(address, MADE / "more" / "bin" / "lm_eval", "--tasks", "village", "--log_samples"),
        *("--include_path", tmp_path, "--output_path", tmp_path, "--model", "local-completions"),
        *("--model_args", f"model=demo,base_url={address}/v1/completions,tokenizer={DEMO}"),
        **{"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"},
    )
    (samples,) = tmp_path.rglob("samples_*.jsonl")  # noqa: ASYNC240
    tokenizer = transformers.AutoTokenizer.from_pretrained(DEMO)
    model = transformers.AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32)
    encode = partial(tokenizer, add_special_tokens=False, return_tensors="pt")
    ids, begin = (encode(each).input_ids for each in (row["begin"] + row["end"], row["begin"]))
    with torch.inference_mode():
        logprobs = model(ids).logits[0, begin.shape[1] - 1 : -1].log_softmax(-1)
    expected = float(logprobs.gather(1, ids[0, begin.shape[1] :, None]).sum())
    (found, _) = json.loads(samples.read_text())["resps"][0][0]
    assert float(found) == pytest.approx(expected, abs=1e-4)
