"""Imitate a training command: write index lines and files like the collector, then misbehave.

    python fake_training.py DIR BEHAVIOR [ITERATIONS [PID_FILE]]

The program imports only the standard library, so that it starts quickly.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

HANG = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
NAMES = (
    ("forward", "pre", "input"),
    ("forward", "post", "output"),
    ("backward", "pre", "grad_output"),
)


def collect(folder: Path, iterations: int, *, card: bool = True) -> None:
    """Write three tensors of two layers in every iteration."""
    run_id = f"20250908_095200_{os.getpid():06x}"
    if card:
        token = {"TENSOR_SAVE_LAUNCH": os.environ.get("TENSOR_SAVE_LAUNCH", "")}
        (folder / f"run_{run_id}.json").write_text(json.dumps({"environment": token}))
    counter = 0
    with (folder / f"index_{run_id}_rank00.jsonl").open("a") as index:
        for iteration in range(1, iterations + 1):
            for layer in range(2):
                for operation, phase, name in NAMES:
                    counter += 1
                    file = folder / f"{run_id}_{counter:04d}_{name}.pt"
                    file.write_bytes(b"x" * 1000)
                    record = {
                        "run_id": run_id,
                        "iteration": iteration,
                        "layer_idx": layer,
                        "phase": phase,
                        "operation": operation,
                        "component": "linear",
                        "rank": {"world": 0},
                        "file": file.name,
                        "bytes": 1000,
                    }
                    index.write(json.dumps(record) + "\n")
                    index.flush()
            print(f" iteration {iteration:8d}/{iterations:8d} | lm loss: 1.0E+01 |", flush=True)


def note(pid_file: Path, *pids: int) -> None:
    """Write the IDs of all processes, for the test, and rename the file when it is complete."""
    partial = pid_file.with_suffix(".partial")
    partial.write_text(" ".join(map(str, pids)))
    partial.rename(pid_file)


def main() -> int:
    folder, behaviour = Path(sys.argv[1]), sys.argv[2]
    iterations = int(sys.argv[3]) if len(sys.argv) > 3 else 1
    pid_file = Path(sys.argv[4]) if len(sys.argv) > 4 else folder / "pids"
    print("building the model", flush=True)
    if behaviour == "no tensor":
        return 0
    if behaviour == "statistics":
        (folder / "statistics").mkdir()
        (folder / "statistics" / "operands_rank00.parquet").touch()
        return 0
    if behaviour == "refuse":
        print("[ERROR] unknown flag --frobnicate; see --help", flush=True)
        return 2
    if behaviour == "hang":
        note(pid_file, os.getpid())
        time.sleep(600)
    if behaviour == "pipe":  # instead of its run card
        os.mkfifo(folder / f"run_20250908_095200_{os.getpid():06x}.json")
    collect(folder, iterations, card=behaviour not in ("no card", "pipe"))
    if behaviour == "forge":
        evil = "x\n[ERROR] forged\x1b[2J\u202e"
        (index,) = folder.glob("index_*.jsonl")
        with index.open("a") as lines:
            for event in ("limited", "kept", "let_go"):
                lines.write(json.dumps({"event": event, "why": evil}) + "\n")
        print("a log\x1b[2J\u202e forged\x07", flush=True)
        return 1
    if behaviour == "limited":
        (index,) = folder.glob("index_*.jsonl")
        with index.open("a") as lines:
            why = {"why": "--collect-max-files lets this rank write 6"}
            lines.write(json.dumps({"event": "limited"} | why) + "\n")
            lines.write(json.dumps({"event": "dropped", "tensors": 7, "bytes": 3100} | why) + "\n")
    if behaviour == "ring":  # one ring was written, and the one at the end was not
        (index,) = folder.glob("index_*.jsonl")
        with index.open("a") as lines:
            for event, why in (("kept", "loss nan at iteration 7"), ("let_go", "SIGTERM")):
                lines.write(json.dumps({"event": event, "why": why}) + "\n")
    if behaviour == "slow":  # training continues without collecting
        for iteration in range(10):
            print(f" iteration {iteration}", flush=True)
            time.sleep(0.15)
    if behaviour == "crash":
        raise RuntimeError("the loss is NaN")
    if behaviour == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if behaviour == "stall":
        note(pid_file, os.getpid())
        time.sleep(600)
    if behaviour == "queue":  # writes waiting tensors for two seconds before it ends
        try:
            signal.signal(signal.SIGTERM, signal.default_int_handler)
            note(pid_file, os.getpid())
            time.sleep(600)
        except KeyboardInterrupt:
            for _ in range(20):
                collect(folder, 1)
                time.sleep(0.1)
            return 143
    if behaviour == "stubborn":  # ignores TERM, and so does a grandchild in a session of its own
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        child = subprocess.Popen([sys.executable, "-c", HANG], start_new_session=True)
        note(pid_file, os.getpid(), child.pid)
        time.sleep(600)
    if behaviour == "orphan":  # ends successfully, but leaves a daemon of a daemon behind
        middle = (
            "import subprocess, sys\n"
            f"p = subprocess.Popen([sys.executable, '-c', {HANG!r}], start_new_session=True,"
            " stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)\n"
            "print(p.pid)"
        )
        done = subprocess.run(
            [sys.executable, "-c", middle], capture_output=True, text=True, check=True
        )
        note(pid_file, int(done.stdout))
    return 0


if __name__ == "__main__":
    sys.exit(main())
