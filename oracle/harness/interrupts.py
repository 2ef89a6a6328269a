"""SIGINT ends the process that imports this, without a traceback: the server of ``--jobs`` while it loads.

The server is started with SIGINT blocked (:func:`oracle.harness.server.start`), as its interpreter would print one too.
The processes that are forked from it start with the same disposition; each then sets its own.
"""

import signal

signal.signal(signal.SIGINT, signal.SIG_DFL)
signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
