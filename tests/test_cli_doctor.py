import importlib.metadata
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from npu_kv_ops import runtime
from npu_kv_ops.cli import checks, device_checks, doctor, main

DEVICE_CHECKS = set(device_checks.DEVICE_CHECKS)


@pytest.fixture
def diagnose(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, dict[str, Any]]]:
    """`npu-kv doctor --json`: exit code and object; checks are by name."""

    def run(*arguments: str, **env: str) -> tuple[int, dict[str, Any]]:
        for name, value in env.items():
            monkeypatch.setenv(name, value)
        code = main(["doctor", "--json", *arguments])
        found = json.loads(capsys.readouterr().out)
        found["checks"] = {check["name"]: check for check in found["checks"]}
        return code, found

    return run


Diagnose = Callable[..., tuple[int, dict[str, Any]]]


def statuses(found: dict[str, Any]) -> dict[str, str]:
    return {name: check["status"] for name, check in found["checks"].items()}


def test_everything_works_on_the_simulator(diagnose: Diagnose, sim: Any, no_cann: None) -> None:
    code, found = diagnose("--runtime", "sim")
    assert code == 0
    assert (found["ok"], found["runtime"], found["simulated"]) == (True, "sim", True)
    assert {name: s for name, s in statuses(found).items() if s != "ok"} == {
        "CANN": "absent",
        "runtime": "warning",
    }
    assert set(found["checks"]) >= DEVICE_CHECKS | {"host copies", "libraries", "torch"}
    assert "SIMULATED" in found["checks"]["runtime"]["detail"]


def test_on_the_host_alone_nothing_essential_is_missing(
    run_script: Callable[..., Any],
) -> None:
    code = "import sys; from npu_kv_ops.cli import main; sys.exit(main(sys.argv[1:]))"
    result = run_script(code, runtime=None, args=["doctor", "--runtime", "host"])
    assert "npu_kv_ops can be used" in result.stdout
    assert "3 blocks copied and compared" in result.stdout
    assert "no NPU is used" in result.stdout


def test_one_failing_check_hides_no_other(diagnose: Diagnose, sim: Any, no_cann: None) -> None:
    code, found = diagnose(
        "--runtime", "sim", NPU_KV_SIM_WITHOUT="aclrtMemcpyBatchAsync,aclrtLaunchHostFunc"
    )
    assert code == 0  # neither is essential
    assert found["ok"]
    unusual = {n: s for n, s in statuses(found).items() if n in DEVICE_CHECKS and s != "ok"}
    assert unusual == {"batch copies": "warning", "host callbacks": "failed"}
    assert "no aclrtMemcpyBatchAsync" in found["checks"]["batch copies"]["detail"]
    assert "no aclrtLaunchHostFunc" in found["checks"]["host callbacks"]["detail"]
    assert all(found["checks"][name]["advice"] for name in unusual)


def test_ids_on_the_npu_say_how_they_work(diagnose: Diagnose, sim: Any, no_cann: None) -> None:
    _, found = diagnose("--runtime", "sim", NPU_KV_SIM_WITHOUT="aclrtLaunchHostFunc,aclrtValueWait")
    check = found["checks"]["ids on the NPU"]
    assert (check["status"], check["essential"]) == ("ok", False)
    assert "callbacks: aclrtLaunchCallback; signals: ACL_EVENT_EXTERNAL" in check["detail"]


def test_ids_on_the_npu_name_what_is_missing(diagnose: Diagnose, sim: Any, no_cann: None) -> None:
    code, found = diagnose(
        "--runtime", "sim", NPU_KV_SIM_WITHOUT="aclrtLaunchHostFunc,aclrtLaunchCallback"
    )
    assert (code, found["ok"]) == (0, True)
    check = found["checks"]["ids on the NPU"]
    assert (check["status"], check["essential"]) == ("failed", False)
    assert "neither aclrtLaunchHostFunc nor aclrtLaunchCallback" in check["detail"]
    assert "it has aclrtValueWait, aclrtValueWrite" in check["detail"]
    assert "pass ids on the CPU" in check["advice"]


def test_ids_on_the_npu_are_really_tried(diagnose: Diagnose, sim: Any, no_cann: None) -> None:
    # Every call of the runtime succeeds, and nothing arrives.
    _, found = diagnose("--runtime", "sim", NPU_KV_SIM_MOVE_PAYLOAD="0")
    check = found["checks"]["ids on the NPU"]
    assert check["status"] == "failed"
    assert check["advice"]


def test_something_essential_missing_is_exit_code_1(
    diagnose: Diagnose, sim: Any, no_cann: None
) -> None:
    code, found = diagnose("--runtime", "sim", NPU_KV_SIM_PINNED_MEMORY_BYTES=str(1 << 20))
    assert code == 1
    assert not found["ok"]
    check = found["checks"]["pinned memory"]
    assert (check["status"], check["essential"]) == ("failed", True)
    assert found["checks"]["copies"]["status"] == "ok"


def test_a_runtime_that_is_not_there(diagnose: Diagnose, no_cann: None) -> None:
    code, found = diagnose("--runtime", "cann")
    assert code == 1
    assert found["runtime"] is None
    check = found["checks"]["runtime"]
    assert check["status"] == "failed"
    assert "no CANN was found" in check["detail"]
    assert check["advice"]


# A stand-in for the process that tries things: one check crashes it, another hangs.
BAD_CHECKS = """
import json, os, signal, sys, time
fd = int(sys.argv[sys.argv.index("--fd") + 1])
names = sys.argv[sys.argv.index("--fd") + 2:]
def send(**record):
    os.write(fd, json.dumps(record).encode() + b"\\n")
def ok(name):
    send(name=name, status="ok", essential=True, detail="", advice="")
print("noise on stdout", flush=True)
send(begin="libraries")
ok("libraries")
for name in names:
    send(begin=name)
    if name == "host copies":
        os.kill(os.getpid(), signal.SIGSEGV)
    if name == "copies":
        time.sleep(100)
    if name == "capture":
        print("last words", file=sys.stderr, flush=True)
        os._exit(3)
    ok(name)
"""


def test_crashes_and_hangs_hide_no_other_check(
    diagnose: Diagnose, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "checks.py"
    script.write_text(BAD_CHECKS)
    monkeypatch.setattr(doctor, "_COMMAND", (sys.executable, str(script)))
    monkeypatch.setattr(doctor, "_SECONDS_PER_CHECK", 2.0)
    code, found = diagnose("--runtime", "sim")
    assert code == 1
    bad = {n: c["detail"] for n, c in found["checks"].items() if c["status"] == "failed"}
    assert bad == {
        "host copies": "crashed with SIGSEGV: noise on stdout",
        "copies": "hung: nothing for 2 s",
        "capture": "ended with exit code 3: last words",
    }
    assert set(found["checks"]) >= DEVICE_CHECKS
    assert found["checks"]["batch copies"]["status"] == "ok"


def test_libraries_that_do_not_load_leave_the_rest_untried(
    diagnose: Diagnose, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "checks.py"
    script.write_text("raise SystemExit('broken install')")
    monkeypatch.setattr(doctor, "_COMMAND", (sys.executable, str(script)))
    code, found = diagnose("--runtime", "sim")
    assert code == 1
    assert "broken install" in found["checks"]["libraries"]["detail"]
    assert {found["checks"][name]["status"] for name in DEVICE_CHECKS} == {"absent"}


@pytest.fixture
def versions(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def pretend(
        torch: str | None, torch_npu: str | None, built: tuple[str | None, str | None]
    ) -> None:
        installed = {"torch": torch, "torch_npu": torch_npu}
        monkeypatch.setattr(checks, "installed_version", installed.get)
        monkeypatch.setattr(runtime, "build_info", lambda: runtime.BuildInfo(*built))
        monkeypatch.setattr(
            importlib.metadata,
            "requires",
            lambda _: [f"torch=={torch_npu}", "torch-stub==1.0"],
        )

    return pretend


@pytest.mark.parametrize(
    ("torch", "built", "status", "words"),
    [
        ("2.13.0+cpu", "2.13.0", "ok", "as npu_kv_ops was built for"),
        ("2.13.1", "2.13.0", "failed", "2.13.1, but npu_kv_ops was built for 2.13.0"),
        ("2.13.0", None, "failed", "the core library of npu_kv_ops is missing"),
        (None, "2.13.0", "failed", "not installed"),
    ],
)
def test_torch_that_does_not_match(
    versions: Callable[..., None], torch: str | None, built: str | None, status: str, words: str
) -> None:
    versions(torch, None, (built, None))
    result = checks.check_torch()
    assert (result.status, result.essential) == (status, True)
    assert words in result.detail
    assert bool(result.advice) == (status != "ok")


@pytest.mark.parametrize(
    ("torch_npu", "built", "decided", "status", "essential", "words"),
    [
        ("2.13.0", "2.13.0", "sim", "ok", True, "as npu_kv_ops was built for"),
        ("2.12.0", "2.12.0", "sim", "failed", True, "2.12.0 is for torch 2.12.0, but torch 2.13.0"),
        ("2.13.0", None, "cann", "failed", True, "npu_kv_ops was built without it"),
        ("2.13.0", None, "host", "failed", False, "npu_kv_ops was built without it"),
        ("2.13.0", "2.13.1", "cann", "failed", True, "but npu_kv_ops was built for 2.13.1"),
        (None, None, "host", "absent", False, "only host memory"),
        (None, None, "sim", "failed", True, "only host memory"),
    ],
)
def test_torch_npu_that_does_not_match(
    versions: Callable[..., None],
    torch_npu: str | None,
    built: str | None,
    decided: runtime.Runtime,
    status: str,
    essential: bool,
    words: str,
) -> None:
    versions("2.13.0+cpu", torch_npu, ("2.13.0", built))
    result = checks.check_torch_npu(decided)
    assert (result.status, result.essential) == (status, essential)
    assert words in result.detail
    assert bool(result.advice) == (status != "ok")
