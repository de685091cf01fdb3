"""Runs the testbed and records it: python validation/testbed/run.py emulated|train [--mbps 100,1000] [--out DIR]

As root, on Linux with iproute2 and the extra `kernels`. For every rate: the network is built, its link is measured by
`simkit measure links` among 2, 3 and 4 ranks, then the cases run. What is recorded: profiles/ (what the predictions may
know), tables/ (the rows those were fitted on) and results/ (the runs). Without root, the recorded ones are scored by
`python validation/testbed/score.py`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import cases
import net
import predict

DEVICE = "testbed-host"
TRAIN_RANKS = 4
CASE_S = 90.0
"""The longest a case may take, so that a rank that hangs ends the run."""


def environment() -> dict[str, str]:
    """For the ranks: one thread each, gloo on the device of the namespace."""
    return os.environ | {
        "GLOO_SOCKET_IFNAME": "eth0",
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
    }


def measure_link(mbps: int, out: Path, *, quick: bool) -> None:
    """`simkit measure links` between the namespaces, into the folder of recorded profiles."""
    for ranks in cases.RANKS:
        command = [sys.executable, "-m", "simkit.cli", "measure", "links", "--out", str(out), "--name", DEVICE]
        command += ["--threads", "1", "--ranks", str(ranks), "--link", predict.link(mbps), "--rate", f"{mbps}Mb/s"]
        command += ["--launch", net.launch(realtime=True), "--address", net.address(), *(["--quick"] if quick else [])]
        subprocess.run(command, check=True, timeout=900, env=environment())


def ranks_run(
    script: str, ranks: int, arguments: list[str], *, timeout_s: float, realtime: bool = False
) -> list[dict[str, Any]]:
    """Runs one process a host and answers with the JSON lines of rank 0. Raises RuntimeError when a rank fails."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = probe.getsockname()[1]
    processes = []
    try:
        for rank in range(ranks):
            command = shlex.split(net.launch(realtime=realtime).format(rank=rank))
            command += [sys.executable, str(predict.HERE / script), str(rank), str(ranks)]
            command += [f"tcp://{net.address()}:{port}", *arguments]
            processes.append(
                subprocess.Popen(
                    command,
                    stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
                    stderr=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
                    text=True,
                    env=environment(),
                    start_new_session=True,
                )
            )
        output, errors = processes[0].communicate(timeout=timeout_s)
        if processes[0].returncode != 0:
            raise RuntimeError(f"rank 0 of {script} failed: {errors[-2000:]}")
        return [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    finally:
        end = time.monotonic() + 5.0
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.1, end - time.monotonic()))
            if process.poll() is None:
                process.kill()
                process.wait()


def run_emulated(mbps: int, iterations: int) -> dict[str, Any]:
    """Every emulated case at one rate."""
    runs = []
    for ranks in cases.RANKS:
        chosen = cases.cases(ranks)
        with tempfile.NamedTemporaryFile("w", suffix=".json", delete=False, encoding="utf-8") as file:
            json.dump(chosen, file)
        answers = ranks_run(
            "emulate.py", ranks, [file.name, str(iterations)], timeout_s=CASE_S * len(chosen), realtime=True
        )
        os.unlink(file.name)
        by_name = {case["name"]: case for case in chosen}
        runs += [{"ranks": ranks, "case": by_name[a.pop("name")], **a} for a in answers]
    return {"mbps": mbps, "date": datetime.now(UTC).date().isoformat(), "runs": runs}


def measure_host(out: Path) -> None:
    """`simkit measure operators` of one core while the other ranks' worth of processes does the same, for they share
    caches and memory; then the profile of a rank, which has its share of the cores."""
    command = [sys.executable, "-m", "simkit.cli", "measure", "operators", "--name", DEVICE, "--threads", "1"]
    with tempfile.TemporaryDirectory() as scratch:
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        others = [
            subprocess.Popen([*command, "--out", f"{scratch}/{i}"], env=environment(), **quiet)
            for i in range(TRAIN_RANKS - 1)
        ]
        try:
            subprocess.run([*command, "--out", str(out)], check=True, timeout=900, env=environment())
        finally:
            for process in others:
                process.kill()
                process.wait()
    predict.write_rank(out, ranks=TRAIN_RANKS, cores=cores())


def cores() -> int:
    """Cores that the ranks share."""
    return len(os.sched_getaffinity(0))


def run_train(mbps: int, pairs: int, models: list[str]) -> dict[str, Any]:
    """Every training case at one rate, four ranks."""
    runs = []
    for model in models:
        chosen = cases.train_cases(model)
        with tempfile.NamedTemporaryFile("w", suffix=".json", delete=False, encoding="utf-8") as file:
            json.dump(chosen, file)
        arguments = [file.name, str(pairs)]
        answers = ranks_run("train.py", TRAIN_RANKS, arguments, timeout_s=CASE_S * len(chosen))
        os.unlink(file.name)
        by_name = {case["name"]: case for case in chosen}
        runs += [{"ranks": TRAIN_RANKS, "cores": cores(), "case": by_name[a.pop("name")], **a} for a in answers]
    return {"mbps": mbps, "date": datetime.now(UTC).date().isoformat(), "runs": runs}


def merged(path: Path, record: dict[str, Any]) -> dict[str, Any]:
    """The record with the runs of an earlier one that were quieter: which of two is kept depends on the twin alone."""
    if not path.exists():
        return record
    earlier = {r["case"]["name"]: r for r in json.loads(path.read_text(encoding="utf-8"))["runs"]}
    runs = []
    for run in record["runs"]:
        before = earlier.pop(run["case"]["name"], None)
        runs.append(before if before and predict.quiet_pairs(before) >= predict.quiet_pairs(run) else run)
    return record | {"runs": [*runs, *earlier.values()]}


def write(path: Path, record: dict[str, Any]) -> None:
    """One run a line, so that a difference can be read."""
    head = {k: v for k, v in record.items() if k != "runs"}
    lines = ",\n".join("  " + json.dumps(run) for run in record["runs"])
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'{json.dumps(head)[:-1]}, "runs": [\n{lines}\n]}}\n', encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("emulated", "train"))
    parser.add_argument("--mbps", default="", help="rates, comma separated (default: all)")
    parser.add_argument("--iterations", type=int, default=10)
    parser.add_argument("--out", default=str(predict.HERE), help="folder with profiles/ and results/")
    parser.add_argument("--quick", action="store_true", help="measure the link on fewer sizes")
    parser.add_argument("--model", default="", help="train: models whose name holds this text")
    parser.add_argument("--links", choices=("measure", "keep"), default="measure", help="keep: as recorded")
    args = parser.parse_args()
    # A request to end takes the network down too.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    out = Path(args.out)
    usual = cases.RATES_MBPS if args.what == "emulated" else cases.TRAIN_RATES_MBPS
    if args.what == "train":
        measure_host(out / "profiles")  # what is in its tables already is not measured again
    for mbps in [int(m) for m in args.mbps.split(",") if m] or usual:
        path = out / "results" / f"{args.what}-{mbps}mbps.json"
        with net.network(max(cases.RANKS), mbps):
            if args.links == "measure":
                measure_link(mbps, out / "profiles", quick=args.quick)
            if args.what == "emulated":
                record = run_emulated(mbps, args.iterations)
            else:
                chosen = [m for m in cases.TRAINED if args.model in m]
                record = merged(path, run_train(mbps, args.iterations, chosen))
        write(path, record)
    return 0


if __name__ == "__main__":
    sys.exit(main())
