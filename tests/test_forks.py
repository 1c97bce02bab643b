"""Test that programs in forks run as if they were started by Python or torchrun."""

import json
import signal
import subprocess
import sys
import time

import psutil
import pytest

from tests import forks
from tests.fork_client import POLICY
from tests.subprocesses import REPO, environment, run, torchrun

PROBE = """
import atexit, json, os, sys
atexit.register(lambda: print("left", file=sys.stderr))
if __name__ == "__main__":
    names = ("PYTHONPATH", "OWN", "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    found = [sys.argv, sys.path[:2], os.getcwd(), globals().get("__file__"), sys.stdin.read()]
    found += [os.environ.get(name) for name in names]
    os.write(1, (json.dumps(found) + "\\n").encode())  # at once: there may be two ranks
    sys.exit(3)
"""
#: Program whose rank 1 fails while rank 0 has a minute to go.
MEETING = """
import os, sys, time, torch
torch.distributed.init_process_group("gloo")
rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
os.write(1, f"{{rank}} {{size}}\\n".encode())
torch.distributed.barrier()
if os.environ["RANK"] == "1":
    {how}
time.sleep(60)
"""


def env(**variables):
    return environment(PYTHONPATH=REPO, OWN="x", **variables)


@pytest.mark.parametrize("kind", ["script", "code"])
def test_a_program_has_what_python_gives_it(tmp_path, kind):
    script = tmp_path / "folder" / "probe.py"
    script.parent.mkdir()
    script.write_text(PROBE)
    words = [script, "a b"] if kind == "script" else ["-c", PROBE, "a b"]
    there = subprocess.run(
        [sys.executable, *words],
        cwd=tmp_path,
        env=env(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    here = forks.run(*words, cwd=tmp_path, env=env())
    assert json.loads(here.stdout) == json.loads(there.stdout)
    assert (here.returncode, here.stderr) == (there.returncode, there.stderr) == (3, "left\n")


def test_a_module_runs():
    words = ("-m", "megatron.fake_quant", "table", "mxfp4")
    assert forks.run(*words, env=env()).stdout == run([sys.executable, *words]).stdout


def test_variables_of_one_program_are_not_those_of_the_next():
    code = "import os; print(os.environ.get('MORE'))"
    assert forks.run("-c", code, env=env(MORE="y")).stdout == "y\n"
    assert forks.run("-c", code, env=env()).stdout == "None\n"


def test_ranks_have_what_torchrun_gives_them(tmp_path):
    script = tmp_path / "probe.py"
    script.write_text(PROBE.replace("sys.exit(3)", "").replace("sys.stdin.read()", "None"))
    found = []
    for start in (torchrun, forks.run):
        done = start(script, "a b", ranks=2, env=env())
        assert done.returncode == 0, done.stderr
        found.append(sorted(json.loads(line)[-4:] for line in done.stdout.splitlines()))
    assert found[0] == found[1] == [["0", "0", "2", "2"], ["1", "1", "2", "2"]]


@pytest.mark.parametrize(
    ("how", "said"),
    [("sys.exit(3)", "exit status 3"), ("os.kill(os.getpid(), 9)", "SIGKILL")],
    ids=["status", "signal"],
)
def test_a_rank_that_fails_ends_the_others(tmp_path, how, said):
    script = tmp_path / "script.py"
    script.write_text(MEETING.format(how=how))
    begun = time.monotonic()
    done = forks.run(script, ranks=2, env=env())
    assert done.returncode == 1
    assert time.monotonic() - begun < 30
    assert sorted(done.stdout.splitlines()) == ["0 2", "1 2"]
    assert f"a rank has failed: rank 1 with {said}\n" in done.stderr


def test_a_signal_reaches_the_program_itself():
    program = forks.start("-c", "import signal; signal.pause()", env=env())
    program.send_signal(signal.SIGTERM)
    program.communicate()
    assert program.returncode == -signal.SIGTERM


def test_a_program_that_hangs_is_ended_with_its_children():
    code = "import os, time; print(os.fork(), flush=True); time.sleep(60)"
    program = forks.start("-c", code, env=env())
    with pytest.raises(subprocess.TimeoutExpired) as error:
        program.communicate(timeout=2)
    end = time.monotonic() + 10
    for pid in (*program.pids, max(map(int, error.value.output.split()))):
        while _runs(pid):
            assert time.monotonic() < end


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize("forked", [True, False])
def test_a_shell_script_gets_an_interpreter_that_may_fork(tmp_path, forked):
    code = f"import os, sys  # {POLICY if forked else ''}\n"
    code += "print(sys.argv, os.getcwd(), os.environ.get('OWN'), 'torch' in sys.modules)\n"
    code += "print(sys.stdin.read(), file=sys.stderr)\n"
    python = forks.interpreter("analysis")

    def ask(last: str) -> subprocess.CompletedProcess[str]:
        words = ["bash", "-c", 'exec "$@"', "bash", python, "-c", code + last, "a b"]
        return subprocess.run(
            words, cwd=tmp_path, env=env(), input="asked", capture_output=True, text=True
        )

    done = ask("sys.exit(3)")
    assert (done.returncode, done.stderr) == (3, "asked\n")
    assert done.stdout == f"['-c', 'a b'] {tmp_path} x {forked}\n"
    assert ask("sys.stdout.flush(); os.kill(os.getpid(), 15)").returncode == -signal.SIGTERM


def test_variables_that_imports_read_are_refused():
    with pytest.raises(ValueError, match="OMP_NUM_THREADS is read by imports"):
        forks.start("-c", "", env=env() | {"OMP_NUM_THREADS": "2"})
