"""Work in a child process that shares this one's model, and can be killed."""

import os
import signal
import sys
import traceback


def start(work):
    """Fork a child that runs `work()` and exits with 0, or with 1 if it raises."""
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        work()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def ended(child):
    """Wait for a child: its exit code, or the negative signal that killed it."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def run(work):
    """What a child's `work()` ended with."""
    return ended(start(work))
