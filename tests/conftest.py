"""What every test needs: signals that were ignored where pytest was started (under nohup, or in the
background of a script) would be ignored by the processes that tests start and interrupt.
"""

import signal

for _number, _usual in (
    (signal.SIGINT, signal.default_int_handler),
    (getattr(signal, "SIGHUP", signal.SIGTERM), signal.SIG_DFL),
):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, _usual)
