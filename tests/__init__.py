"""Every test process imports this first."""

import signal

# A shell that starts something in the background, and nohup, have it ignore signals, and so would
# everything that the tests start and send them to.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
