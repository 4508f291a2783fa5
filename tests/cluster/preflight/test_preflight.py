"""What a machine lacks, and what mends it: on machines that are made up, and on this one."""

from __future__ import annotations

import ast
import dataclasses
import json
import re
import resource
import typing
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from cluster.preflight import handoff
from cluster.preflight.__main__ import main
from cluster.preflight.handoff import Report, check_lanes, check_transports, judge_pair
from cluster.preflight.machine import (
    Check,
    Link,
    Outcome,
    Wanted,
    as_json,
    as_table,
    check_adapters,
    check_driver,
    check_gpu_direct,
    check_memory,
    check_number,
    driver_version,
    failure,
    has_failed,
    huge_pages,
    locked_memory,
    ok,
    rdma_links,
    shared_memory,
    tcp_links,
    torch_cuda,
    warning,
)
from deploy.api.generate import CHART, CRDS
from deploy.api.naming import camel
from deploy.api.serving_cluster import Advanced
from tests.cluster.preflight import made_up

GPUS = Wanted(num_gpus=8)
RDMA = Wanted(num_gpus=8, rdma=True, hugepages=True, ucx_library="system")
NOTHING = Wanted()
IPC_LOCK = 1 << 14
MIB, GIB = 1 << 20, 1 << 30


def outcomes(checks: Sequence[Check]) -> dict[str, Outcome]:
    return {check.name: check.outcome for check in checks}


# --- GPUs -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", [made_up.OPEN_DRIVER, made_up.CLOSED_DRIVER])
def test_the_drivers_version_is_the_kernel_modules(tmp_path: Path, text: str) -> None:
    made_up.driver(tmp_path, text, "550.54.15")
    assert driver_version(tmp_path) == "550.54.15"
    assert driver_version(tmp_path / "elsewhere") is None


def test_a_driver_too_old_for_torchs_cuda_is_reported_with_both_versions() -> None:
    check = check_driver("535.129.03", "13.0", 0, GPUS)
    assert check.outcome is Outcome.FAILURE
    assert check.found == "535.129.03, torch is built for CUDA 13.0, which needs 580 or newer"
    assert "580" in check.fix
    assert "CUDA 12" in check.fix


@pytest.mark.parametrize(
    ("driver", "cuda", "num_seen", "wanted", "outcome"),
    [
        ("525.60.13", "12.8", 0, GPUS, Outcome.OK),  # any 12.x on any driver of 12.x
        ("580.65.06", "12.8", 8, GPUS, Outcome.OK),
        ("535.129.03", "13.0", 8, GPUS, Outcome.OK),  # by the image's newer libcuda
        (None, "12.8", 0, GPUS, Outcome.FAILURE),
        ("550.54.15", None, 0, GPUS, Outcome.FAILURE),
        ("550.54.15", None, 0, NOTHING, Outcome.WARNING),
        (None, "12.8", 0, NOTHING, Outcome.OK),
        (None, None, 0, NOTHING, Outcome.OK),
    ],
)
def test_what_is_missing_fails_only_where_it_is_wanted(
    driver: str | None, cuda: str | None, num_seen: int, wanted: Wanted, outcome: Outcome
) -> None:
    assert check_driver(driver, cuda, num_seen, wanted).outcome is outcome


def test_fewer_gpus_than_ranks_fail() -> None:
    assert check_number(8, GPUS).outcome is Outcome.OK
    few = check_number(3, GPUS)
    assert few.outcome is Outcome.FAILURE
    assert few.found == "torch sees 3 of 8"
    assert "nvidia.com/gpu" in few.fix


# --- memory ---------------------------------------------------------------------------------------


def test_a_limit_on_locked_memory_fails_only_rdma_and_no_capability_lifts_it() -> None:
    limit = 64 << 10
    assert locked_memory(limit, 0, GPUS).outcome is Outcome.OK
    assert locked_memory(limit, IPC_LOCK, RDMA).outcome is Outcome.OK
    assert locked_memory(resource.RLIM_INFINITY, 0, RDMA).outcome is Outcome.OK
    check = locked_memory(limit, ~IPC_LOCK, RDMA)
    assert check.outcome is Outcome.FAILURE
    assert check.found.startswith("at most 64 KiB, without CAP_IPC_LOCK")
    assert "ipcLock: true" in check.fix


def test_little_shared_memory_fails_ranks_that_share_it() -> None:
    assert shared_memory(16 * GIB, GPUS) == ok("/dev/shm", "16 GiB")
    docker = shared_memory(64 * MIB, GPUS)
    assert (docker.outcome, docker.found) == (
        Outcome.FAILURE,
        "64 MiB, shared by 8 ranks of NCCL",
    )
    assert "shmSize" in docker.fix
    assert shared_memory(64 * MIB, NOTHING).outcome is Outcome.WARNING
    assert shared_memory(None, NOTHING).outcome is Outcome.FAILURE


def test_huge_pages_that_pods_ask_for_must_be_there(tmp_path: Path) -> None:
    assert huge_pages(tmp_path, RDMA).outcome is Outcome.FAILURE
    assert huge_pages(tmp_path, NOTHING).outcome is Outcome.OK
    made_up.huge_pages(tmp_path, 4096, 1024)
    assert huge_pages(tmp_path, RDMA) == ok("huge pages", "2 MiB: 1024 of 4096 free")


def test_capabilities_are_read_from_this_process(tmp_path: Path) -> None:
    made_up.write(tmp_path, "proc/self/status", f"Name:\tx\nCapEff:\t{IPC_LOCK:016x}\n")
    (tmp_path / "dev/shm").mkdir(parents=True)
    names = outcomes(check_memory(tmp_path, RDMA))
    assert names["locked memory"] is Outcome.OK
    assert names["huge pages"] is Outcome.FAILURE


# --- adapters -------------------------------------------------------------------------------------


def test_infiniband_adapters_that_are_up_are_reported_in_order(tmp_path: Path) -> None:
    for number in range(11):
        made_up.port(tmp_path, f"mlx5_{number}")
    made_up.device(tmp_path)
    checks = check_adapters(tmp_path, {}, RDMA)
    assert not has_failed(checks)
    assert [check.name for check in checks[1:]] == [f"mlx5_{n}:1" for n in range(11)]
    assert checks[1].found == "InfiniBand, ACTIVE, 400 Gb/s"


def test_without_adapters_rdma_fails_and_nothing_else_does(tmp_path: Path) -> None:
    (check,) = check_adapters(tmp_path, {}, RDMA)
    assert check.outcome is Outcome.FAILURE
    assert "rdma/" in check.fix
    assert outcomes(check_adapters(tmp_path, {}, NOTHING)) == {"adapters": Outcome.OK}


def test_the_nodes_adapters_are_not_the_pods_without_their_devices(tmp_path: Path) -> None:
    made_up.port(tmp_path, "mlx5_0")
    check, _ = check_adapters(tmp_path, {}, RDMA)
    assert check.outcome is Outcome.FAILURE
    assert "uverbs" in check.found


@pytest.mark.parametrize(
    ("state", "fix"), [("1: DOWN", "cable"), ("2: INIT", "opensm"), ("3: ARMED", "subnet manager")]
)
def test_a_port_that_is_not_active_is_a_warning_beside_one_that_is(
    tmp_path: Path, state: str, fix: str
) -> None:
    made_up.device(tmp_path)
    made_up.port(tmp_path, "mlx5_0", state=state)
    assert outcomes(check_adapters(tmp_path, {}, RDMA))["mlx5_0:1"] is Outcome.FAILURE
    made_up.port(tmp_path, "mlx5_1")
    found = {check.name: check for check in check_adapters(tmp_path, {}, RDMA)}
    assert found["mlx5_0:1"].outcome is Outcome.WARNING
    assert fix in found["mlx5_0:1"].fix
    assert found["mlx5_1:1"].outcome is Outcome.OK


def test_a_link_slower_than_the_others_is_a_warning(tmp_path: Path) -> None:
    made_up.port(tmp_path, "mlx5_0")
    made_up.port(tmp_path, "mlx5_1", rate="100 Gb/sec (4X EDR)")
    slow = check_adapters(tmp_path, {}, NOTHING)[1]
    assert slow.outcome is Outcome.WARNING
    assert slow.found == "InfiniBand, ACTIVE, 100 Gb/s, others 400"


def test_roce_needs_a_routable_address(tmp_path: Path) -> None:
    gids = ((made_up.LINK_LOCAL, "IB/RoCE v1"), (made_up.LINK_LOCAL, "RoCE v2"))
    made_up.roce_port(tmp_path, "mlx5_0", *gids, (made_up.NO_ADDRESS, "RoCE v2"))
    bare = check_adapters(tmp_path, {}, NOTHING)[-1]
    assert (bare.name, bare.outcome) == ("mlx5_0:1 GID", Outcome.FAILURE)
    assert "IP address" in bare.fix
    more = ((made_up.ROUTABLE, "IB/RoCE v1"), (made_up.ROUTABLE, "RoCE v2"))
    made_up.roce_port(tmp_path, "mlx5_0", *gids, *more)
    with_address = check_adapters(tmp_path, {}, NOTHING)[-1]
    assert with_address == ok("mlx5_0:1 GID", f"{made_up.ROUTABLE} (RoCE v2) at index 3")


def test_an_index_that_was_chosen_must_be_one_of_roce_v2(tmp_path: Path) -> None:
    made_up.roce_port(
        tmp_path, "mlx5_0", (made_up.ROUTABLE, "IB/RoCE v1"), (made_up.ROUTABLE, "RoCE v2")
    )
    good = check_adapters(tmp_path, {"UCX_IB_GID_INDEX": "1"}, NOTHING)[-1]
    assert good.outcome is Outcome.OK
    wrong = check_adapters(tmp_path, {"UCX_IB_GID_INDEX": "0"}, NOTHING)[-1]
    assert wrong.outcome is Outcome.FAILURE
    assert wrong.fix.startswith("UCX_IB_GID_INDEX=1 ")


# --- UCX and the handoff --------------------------------------------------------------------------

FAST = Report("1.21.0", ["cma", "posix", "self", "sysv", "tcp"], ["posix", "sysv"], 68 << 20, 9.5)


def test_ucx_must_know_what_the_pool_uses() -> None:
    assert check_transports(FAST, NOTHING).outcome is Outcome.OK
    without_rdma = check_transports(FAST, replace(RDMA, ucx_library="wheel"))
    assert without_rdma.outcome is Outcome.FAILURE
    assert "ucxLibrary: system" in without_rdma.fix
    without_cuda = check_transports(FAST, GPUS)
    assert without_cuda.outcome is Outcome.FAILURE
    assert "CUDA" in without_cuda.fix
    whole = replace(FAST, transports=["cuda_copy", "cuda_ipc", "rc_mlx5", "sysv", "tcp"])
    assert check_transports(whole, RDMA).outcome is Outcome.OK
    alone = replace(FAST, transports=["self", "tcp"])
    assert check_transports(alone, NOTHING).outcome is Outcome.WARNING


def test_a_handoff_over_tcp_is_a_warning_and_so_is_a_slow_one() -> None:
    assert check_lanes(FAST, "cpu") == ok("handoff", "71 MB at 9.5 GB/s over posix, sysv")
    over_tcp = check_lanes(replace(FAST, lanes=["tcp"]), "cpu")
    assert over_tcp.outcome is Outcome.WARNING
    assert "shared memory was not used" in over_tcp.found
    assert check_lanes(replace(FAST, gb_per_s=0.1), "cpu").outcome is Outcome.WARNING
    assert check_lanes(FAST, "cuda").outcome is Outcome.WARNING


def test_this_machine_hands_over_in_shared_memory_and_the_command_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "dev/shm").mkdir(parents=True)
    assert main(["--root", str(tmp_path), "--hugepages", "--json"]) == 1
    reported = json.loads(capsys.readouterr().out)
    assert reported["ok"] is False
    found = {check["name"]: check for check in reported["checks"]}
    assert found["huge pages"]["outcome"] == "FAIL"
    assert found["UCX"]["outcome"] == "PASS"
    assert " GB/s over " in found["handoff"]["found"]
    assert "shared memory was not used" not in found["handoff"]["found"]


@pytest.mark.full
def test_a_missing_library_is_reported_on_one_line() -> None:
    (check,) = handoff.check_handoff(Wanted(ucx_library="/no/libucp.so"), "cpu")
    assert check.outcome is Outcome.FAILURE
    assert "cannot load libucp (/no/libucp.so)" in check.found
    assert "Traceback" not in check.found
    assert "ucxLibrary" in check.fix


@pytest.mark.skipif(torch_cuda() is None, reason="this torch knows no CUDA memory")
@pytest.mark.gpu
def test_a_libucx_without_cuda_is_named_as_what_is_missing() -> None:
    (check,) = handoff.check_handoff(Wanted(num_gpus=1, ucx_library="system"), "cuda")
    assert "cannot reach cuda memory" in check.found
    assert "built with CUDA" in check.fix


@pytest.mark.gpu
def test_a_gpus_memory_is_handed_over() -> None:
    for check in handoff.check_handoff(Wanted(num_gpus=1), "cuda"):
        assert check.outcome is not Outcome.FAILURE, check


# --- a pair of nodes ------------------------------------------------------------------------------

CROSSED = Report("1.21.0", ["rc_mlx5", "tcp"], ["rc_mlx5"], 68 << 20, 40.0, "node-b")
INFINIBAND = [Link("mlx5_0:1", 400.0)]


def judged(report: Report, wanted: Wanted, rdma: Sequence[Link] = ()) -> dict[str, Check]:
    found = judge_pair(report, wanted, "node-a", rdma, [Link("eth0", 100.0)])
    return {check.name: check for check in found}


def test_a_pair_by_rdma_is_measured_against_its_link() -> None:
    found = judged(CROSSED, RDMA, INFINIBAND)
    assert found["pair"] == ok("pair", "node-a to node-b")
    assert found["transport"] == ok("transport", "rc_mlx5")
    assert found["bandwidth"] == ok("bandwidth", "71 MB at 40 GB/s, 80% of mlx5_0:1's 400 Gb/s")
    slow = judged(replace(CROSSED, gb_per_s=20.0), RDMA, INFINIBAND)["bandwidth"]
    assert slow.outcome is Outcome.WARNING
    assert "40% of mlx5_0:1's" in slow.found


def test_a_fall_back_to_tcp_is_named_and_fails_who_wants_rdma() -> None:
    by_tcp = replace(CROSSED, lanes=["tcp"], gb_per_s=10.0)
    failed = judged(by_tcp, RDMA, INFINIBAND)
    assert failed["transport"].outcome is Outcome.FAILURE
    assert "fell back to TCP" in failed["transport"].found
    assert failed["bandwidth"].found == "71 MB at 10 GB/s, 80% of eth0's 100 Gb/s"
    unused = judged(by_tcp, GPUS, INFINIBAND)["transport"]
    assert unused.outcome is Outcome.WARNING
    assert "mlx5_0:1 could carry RDMA" in unused.found
    assert judged(by_tcp, GPUS)["transport"].outcome is Outcome.OK


def test_links_are_those_that_are_up_that_ucx_may_use_and_that_have_hardware(
    tmp_path: Path,
) -> None:
    made_up.port(tmp_path, "mlx5_0")
    made_up.port(tmp_path, "mlx5_1", state="1: DOWN")
    assert rdma_links(tmp_path, {}) == INFINIBAND
    assert not rdma_links(tmp_path, {"UCX_NET_DEVICES": "eth0"})
    for name, state in (("eth0", "up"), ("eth1", "down"), ("veth0", "up")):
        made_up.write(tmp_path, f"sys/class/net/{name}/operstate", state)
        made_up.write(tmp_path, f"sys/class/net/{name}/speed", "100000")
    for name in ("eth0", "eth1"):
        made_up.write(tmp_path, f"sys/class/net/{name}/device/vendor", "0x15b3")
    assert tcp_links(tmp_path, {"UCX_NET_DEVICES": "mlx5_0:1,eth0"}) == [Link("eth0", 100.0)]


def test_an_adapter_reads_a_gpus_memory_by_peermem_or_dmabuf(tmp_path: Path) -> None:
    assert check_gpu_direct(tmp_path, False).outcome is Outcome.WARNING
    assert "dmabuf" in check_gpu_direct(tmp_path, True).found
    made_up.write(tmp_path, "sys/module/nvidia_peermem/refcnt", "0")
    assert check_gpu_direct(tmp_path, False) == ok("GPUDirect", "nvidia_peermem is loaded")


# --- fixes ----------------------------------------------------------------------------------------

_FIELD = re.compile(r"((?:spec|cluster)\.[A-Za-z.]*[A-Za-z])(?:: (\w+))?")


def fields_named() -> set[tuple[str, str]]:
    """Fields, each with the value that a fix gives it or "", in all text of the package."""
    found: set[tuple[str, str]] = set()
    for path in Path(handoff.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found |= set(_FIELD.findall(node.value))
    return {each for each in found if not each[0].startswith("cluster.preflight")}


def test_each_field_that_a_fix_names_is_one_that_the_resource_or_the_chart_takes() -> None:
    named = fields_named()
    assert ("spec.advanced.transfer.ucxLibrary", "system") in named
    values = json.loads((CHART / "values.schema.json").read_text())
    crd = yaml.safe_load((CRDS / "servingclusters.baton.dev.yaml").read_text())
    resource = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    for field, text in sorted(named):
        first, *rest = field.split(".")
        of_chart = first == "cluster"
        schema: Any = (
            values["properties"]["cluster"] if of_chart else resource["properties"]["spec"]
        )
        if rest[:1] == ["advanced"]:
            section = typing.get_type_hints(Advanced)[rest[1]]
            assert rest[2] in {camel(each.name) for each in dataclasses.fields(section)}, field
            continue
        for name in rest:
            while "$ref" in schema:
                schema = values["definitions"][schema["$ref"].rpartition("/")[2]]
            known = schema.get("properties", {})
            assert name in known or schema.get("additionalProperties"), field
            schema = known.get(name) or schema["additionalProperties"]
        if text and schema is not True:
            while "$ref" in schema:
                schema = values["definitions"][schema["$ref"].rpartition("/")[2]]
            jsonschema.validate(yaml.safe_load(text), schema)


# --- telling --------------------------------------------------------------------------------------

CHECKS = [
    ok("driver", "550.54.15, torch is built for CUDA 12.8"),
    failure("locked memory", "at most 64 KiB", "ipcLock: true"),
    warning("UCX", "no shared memory", "UCX_TLS"),
]


def test_columns_align_and_what_mends_stands_below_what_is_wrong() -> None:
    assert as_table(CHECKS).splitlines() == [
        "driver         PASS  550.54.15, torch is built for CUDA 12.8",
        "locked memory  FAIL  at most 64 KiB",
        "               fix   ipcLock: true",
        "UCX            WARN  no shared memory",
        "               fix   UCX_TLS",
    ]


def test_a_warning_alone_is_no_failure() -> None:
    assert has_failed(CHECKS)
    assert not has_failed([CHECKS[0], CHECKS[2]])
    assert json.loads(as_json([CHECKS[2]]))["ok"] is True


def test_what_a_library_said_is_cut_to_a_line() -> None:
    check = failure("handoff", "a\n  b\n" + "c" * 500, "see the log")
    assert "\n" not in check.found
    assert len(check.found) == 160
