"""Generate `baton/v1` from `proto/`, or with --check fail when what is committed is stale."""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent


def generate(target: Path) -> None:
    sources = sorted(str(p.relative_to(ROOT / "proto")) for p in (ROOT / "proto").rglob("*.proto"))
    outputs = {"python": "", "grpc_python": "", "mypy": "quiet:", "mypy_grpc": "quiet,only_async:"}
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{ROOT / 'proto'}"]
    command += [
        f"--plugin=protoc-gen-{name}={BIN / f'protoc-gen-{name}'}" for name in ("mypy", "mypy_grpc")
    ]
    command += [f"--{name}_out={options}{target}" for name, options in outputs.items()]
    subprocess.run([*command, *sources], check=True)


def generated_files(folder: Path) -> dict[str, bytes]:
    """Name and content of every generated file; grpc_python writes an empty one for no service."""
    found = (p for pattern in ("*_pb2*.py", "*_pb2*.pyi") for p in folder.rglob(pattern))
    return {str(p.relative_to(folder)): p.read_bytes() for p in found}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    if not parser.parse_args().check:
        generate(ROOT)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        generate(Path(folder))
        fresh = generated_files(Path(folder))
    committed = {f"baton/v1/{k}": v for k, v in generated_files(ROOT / "baton" / "v1").items()}
    stale = sorted(k for k in fresh.keys() | committed.keys() if fresh.get(k) != committed.get(k))
    if stale:
        print("stale generated code, run `make proto`:", *stale, sep="\n  ")
    return bool(stale)


if __name__ == "__main__":
    sys.exit(main())
