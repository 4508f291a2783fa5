"""`baton deploy` prints a ServingCluster that means what the cluster file says."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import yaml

from baton.config.cluster import load_config
from baton.errors import ConfigError
from cli.main import main
from deploy.api.checked import read_spec
from deploy.api.serving_cluster import ServingClusterSpec
from deploy.api.write import serving_cluster
from deploy.controller.manifests.routers import router_settings

FILE = """
model: Qwen/Qwen3-0.6B
model_revision: v2
tokenizer: Qwen/Qwen3-8B
served_model_name: [mine, other]
engine:
  max_num_seqs: 32
  fake: {vocab_size: 9}
router: {port: 9999, admission: {max_queue: 7}, traces: {endpoint: "http://c:1"}}
pools:
  prefill: {role: prefill, tensor_parallel: 2}
  decode: {role: decode, replicas: 3, max_replicas: 5, engine: {block_size: 32}}
"""


def test_a_cluster_file_is_printed_as_the_resource_that_means_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(FILE)
    assert main(["deploy", "-f", str(path), "--name", "chat", "-n", "models"]) == 0
    made = yaml.safe_load(capsys.readouterr().out)
    assert made["metadata"] == {"name": "chat", "namespace": "models"}
    spec, config = read_spec(ServingClusterSpec, made), load_config(path)
    assert spec.model.name == config.model
    assert spec.model.revision == config.model_revision == "v2"
    assert spec.tokenizer == config.tokenizer == "Qwen/Qwen3-8B"
    assert (spec.served_model_name, *spec.served_model_aliases) == config.model_names
    assert spec.engine_config == dataclasses.replace(config.engine, device="cuda")
    assert spec.advanced.router.admission.max_queue == 7
    assert router_settings(spec).traces.endpoint == spec.router.trace_endpoint == "http://c:1"
    assert spec.advanced.router.port == 7100, "where one machine listens is no setting of pods"
    assert spec.pools["prefill"].parallelism.tensor == 2
    assert spec.pools["decode"].initial_replicas == 3
    assert spec.pools["decode"].max_replicas == 5
    assert spec.pools["decode"].engine == {"blockSize": 32}


def test_what_is_at_its_default_is_left_out_but_a_device_that_nobody_named(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text("model: org/name\n")
    spec = serving_cluster(load_config(path), "chat", None)["spec"]
    assert spec == {
        "model": {"name": "org/name"},
        "pools": {"prefill": {"role": "prefill"}, "decode": {"role": "decode"}},
        "engine": {"device": "cuda"},
    }


def test_a_folder_of_this_machine_is_refused_with_where_to_put_it(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    for field, others in (("model", ""), ("tokenizer", "model: org/name\n")):
        path.write_text(f"{others}{field}: {tmp_path}\n")
        with pytest.raises(ConfigError, match="PersistentVolumeClaim") as caught:
            serving_cluster(load_config(path), "chat", None)
        assert caught.value.field == field


def test_certificates_and_tokens_are_named_as_secrets_with_how_to_make_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(
        "model: org/name\nrouter:\n  auth: {tokens: tokens}\n"
        "  tls: {certificate_file: a.crt, key_file: a.key, client_ca_file: ca.crt}\n"
    )
    (tmp_path / "tokens").mkdir()
    assert main(["deploy", "-f", str(path), "--name", "chat", "-n", "models"]) == 0
    said = capsys.readouterr().out
    spec = read_spec(ServingClusterSpec, yaml.safe_load(said))
    assert spec.router.tls is not None
    assert spec.router.auth is not None
    assert spec.router.tls.require_client_certificate
    create = "# first: kubectl create secret generic"
    tls, tokens = [line for line in said.splitlines() if line.startswith(create)]
    assert f" {spec.router.tls.secret_name} --from-file=tls.crt={tmp_path}/a.crt " in tls
    assert (
        f" {spec.router.auth.token_secret_name} --from-file={tmp_path}/tokens -n models" in tokens
    )
