"""What each process of ours does to itself when it begins."""

import ctypes
import gc
import resource
import signal


def allow_descriptors() -> int:
    """Let this process, and those that it starts, open as many descriptors as the system's hard limit says."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def keep_what_is_loaded() -> None:
    """Model and modules are no garbage: collections between two ticks, or two packets, need not look at them.

    All that a media worker has imported took one 45 ms (2026-12-01), in which it sends nothing.
    """
    gc.collect()
    gc.freeze()


def leave_ending_to_the_parent() -> None:
    """Ignore signals meant for the whole service, as the server ends the calls first; but do not outlive it.

    The kernel kills us when the parent dies: a belt beside the lifeline, which an engine that hangs does not watch.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    PR_SET_PDEATHSIG = 1
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
