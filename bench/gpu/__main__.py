"""Check the GPUs of this machine and write one JSON file: `make gpu-check [DEVICE=cpu] [JSON=PATH]`.

memory     steps of real models, layers cut to fit: memory beside the memory model, time beside matrix products
publish    weights of a trainer as bfloat16 into the window in /dev/shm, beside a bare copy into pinned memory
parity     loss and gradient of a model, beside those of the CPU in float32
chunked    log-probs by chunks of logits, beside whole logits: memory, time and gradient
packed     rows behind each other, beside padded ones: memory, time and log-probs
tests      tests/gpu

Every section is a process with a time limit, prints one line, and fails alone. This module needs nothing but Python: a
package that a section lacks is named, and nothing is installed. DEVICE=cpu runs the same code on CPUs, with small sizes
and without bars.
"""

import argparse
import json
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
BENCHES = ("memory", "publish", "parity", "chunked", "packed")
NAMES = (*BENCHES, "tests")
LIMIT_S = {"cuda": 460, "cpu": 3600}
"""The time of all sections together."""
SECTION_LIMIT_S = {"memory": 180, "tests": 200}
"""The time of a section on GPUs, where it is not the default."""
DEFAULT_LIMIT_S = 60
MISSING_MODULE = re.compile(r"No module named '([\w.]+)'")
PROBE = """
import json, torch
found = [torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count())]
devices = [{"name": each.name, "memory_gib": round(each.total_memory / 2**30, 1)} for each in found]
print(json.dumps({"torch": torch.__version__, "cuda": torch.version.cuda, "devices": devices}))
"""
"""What a process prints about the CUDA devices: torch, loaded here, would hold memory on one."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="SECTION", help=", ".join(NAMES))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--json", type=Path, default=Path("gpu-check.json"), metavar="PATH")
    arguments = parser.parse_args()
    if unknown := sorted(set(arguments.names) - set(NAMES)):
        parser.error(f"no section is named {unknown[0]!r}; there are {', '.join(NAMES)}")
    machine, missing = probe_devices()
    if missing is not None:
        print(f"the check needs the package {missing}: install it for {sys.executable}")
        return 1
    if arguments.device == "cuda" and not machine["devices"]:
        print("this machine has no CUDA device that torch can use; DEVICE=cpu tries the check itself on CPUs")
        return 1
    deadline = time.monotonic() + LIMIT_S[arguments.device]
    sections = {}
    for name in arguments.names or NAMES:
        sections[name] = run_section(name, device=arguments.device, deadline=deadline)
        print(describe_section(name, sections[name]), flush=True)
    report = {"device": arguments.device, "machine": machine, "sections": sections}
    arguments.json.write_text(json.dumps(report, indent=2) + "\n")
    print(f"written to {arguments.json.resolve()}")
    return 0 if all(section["status"] in ("ok", "not run") for section in sections.values()) else 1


def probe_devices() -> tuple[dict[str, Any], str | None]:
    """Return the machine with its CUDA devices, and the package that is missing for that, if one is."""
    machine = {"cores": os.cpu_count(), "processor": platform.machine(), "python": platform.python_version()}
    done = run_limited([sys.executable, "-c", PROBE], limit_s=LIMIT_S["cpu"])
    if done.returncode:
        return machine, find_missing(done.stderr) or "torch"
    return machine | json.loads(done.stdout.splitlines()[-1]), None


def run_section(name: str, *, device: str, deadline: float) -> dict[str, Any]:
    """Run a section in a separate process; return its status, figures, what was not run, and its time."""
    limit_s = deadline - time.monotonic()
    if limit_s <= 0:
        return {"status": "not run", "reason": f"the other sections took {LIMIT_S[device]} s", "seconds": 0.0}
    if device == "cuda":
        limit_s = min(limit_s, SECTION_LIMIT_S.get(name, DEFAULT_LIMIT_S))
    start = time.monotonic()
    run: Callable[..., dict[str, Any]] = run_tests if name == "tests" else partial(run_bench, name)
    try:
        found = run(device=device, limit_s=limit_s)
    except subprocess.TimeoutExpired:
        found = {"status": "failed", "reason": f"it took more than {limit_s:.0f} s"}
    return found | {"seconds": round(time.monotonic() - start, 1)}


def run_bench(name: str, *, device: str, limit_s: float) -> dict[str, Any]:
    done = run_limited([sys.executable, "-m", "bench.gpu.sections", name, device], limit_s=limit_s)
    if done.returncode:
        return explain_failure(done)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    is_ok = all(figure["ok"] for figure in found["figures"])
    return {"status": "ok" if is_ok else "missed"} | found


def run_tests(*, device: str, limit_s: float) -> dict[str, Any]:
    """Run tests/gpu; those whose packages are missing are listed."""
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory, "report.xml")
        # The folder's own conftest is enough; that of all suites needs more packages.
        options = [*("--confcutdir", "tests/gpu", "-o", "addopts=", "-o", "cache_dir=" + directory), "--junit-xml"]
        command = [sys.executable, "-m", "pytest", "tests/gpu", *options, str(report)]
        done = run_limited(command, limit_s=limit_s, HPCRL_CHECK_DEVICE=device)
        if not report.exists():
            return explain_failure(done)
        return read_report(report)


def read_report(report: Path) -> dict[str, Any]:
    """Count the tests of a JUnit report, and list those that were not run or failed, with the reason."""
    not_run, failures, num_passed = [], [], 0
    for case in ElementTree.parse(report).iter("testcase"):
        name = case.get("name") or case.get("classname")
        skipped, wrong = case.find("skipped"), next((each for each in case if each.tag in ("failure", "error")), None)
        if skipped is not None:
            not_run.append(f"{name}: {skipped.get('message')}")
        elif wrong is None:
            num_passed += 1
        elif missing := find_missing(wrong.text or ""):
            not_run.append(f"{name}: needs the package {missing}")
        else:
            failures.append(f"{name}: {(wrong.get('message') or '').splitlines()[0]}")
    status = "failed" if failures else "ok" if num_passed else "not run"
    return {"status": status, "num_passed": num_passed, "failures": failures, "not_run": not_run}


def explain_failure(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    output = done.stdout + done.stderr
    if missing := find_missing(output):
        return {"status": "not run", "reason": f"needs the package {missing}"}
    last = next((line for line in reversed(output.splitlines()) if line.strip()), "no output")
    return {"status": "failed", "reason": last.strip(), "output": output[-4000:]}


def find_missing(output: str) -> str | None:
    """Find the package that a process lacked, in what it printed."""
    found = MISSING_MODULE.findall(output)
    return found[-1].split(".")[0] if found else None


def run_limited(command: list[str], *, limit_s: float, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run a command; TimeoutExpired once it and the processes that it started are killed."""
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        command, cwd=ROOT, env=os.environ | environ, stdout=pipe, stderr=pipe, text=True, start_new_session=True
    )
    try:
        output, errors = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        raise
    return subprocess.CompletedProcess(command, process.returncode, output, errors)


def describe_section(name: str, section: dict[str, Any]) -> str:
    parts = [f"{figure['name']} {figure['value']:.3g}{show_verdict(figure)}" for figure in section.get("figures", ())]
    if "num_passed" in section:
        parts.append(f"{section['num_passed']} passed")
    parts += [section["reason"]] if "reason" in section else []
    parts += section.get("failures", ())
    parts += [f"not run: {each}" for each in section.get("not_run", ())]
    return f"{name:<8} {section['status']:<8} {section['seconds']:>5.1f} s  {'; '.join(parts)}"


def show_verdict(figure: dict[str, Any]) -> str:
    if figure["bar"] is None:
        return ""
    sign = "<=" if figure["better"] == "lower" else ">="
    return f" ({sign} {figure['bar']:g}: {'ok' if figure['ok'] else 'MISSED'})"


if __name__ == "__main__":
    sys.exit(main())
