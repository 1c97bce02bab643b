"""What every test needs: usual signals, little garbage collection, and the long files first.

Signals that were ignored where pytest was started (under nohup, or in the background of a script)
would be ignored by the processes that tests start and interrupt.
"""

import gc
import signal

#: Each takes a minute or more, so that a worker that began it last would be alone at the end.
LONGEST_FIRST = (
    "tests/test_readme.py",
    "tests/fake_quant/test_triton.py",
    "tests/core/test_non_interference.py",
    "tests/training/test_golden.py",
    "tests/script/test_driver_runs.py",
)

gc.set_threshold(100_000, 20, 100)  # what is imported is a million objects; an eighth of the time

for _number, _usual in (
    (signal.SIGINT, signal.default_int_handler),
    (getattr(signal, "SIGHUP", signal.SIGTERM), signal.SIG_DFL),
):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, _usual)


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: _place(item.nodeid.partition("::")[0]))


def _place(file: str) -> int:
    return LONGEST_FIRST.index(file) if file in LONGEST_FIRST else len(LONGEST_FIRST)
