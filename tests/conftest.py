"""What holds for every test: Ctrl-C means what it means in a terminal, also where the suite was started in the background."""

import contextlib
import signal

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    with contextlib.suppress(ValueError):  # not the main thread
        signal.signal(signal.SIGINT, signal.default_int_handler)
