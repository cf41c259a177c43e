"""The command `python3 -m cuvmm.keeper`: keeps publications after the processes that published them have ended."""

from __future__ import annotations

import argparse
import os
import resource
import signal

from . import Keeper


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python3 -m cuvmm.keeper",
        description="Keeps publications after the processes that published them have ended, until Ctrl-C.",
    )
    parser.add_argument("--socket", metavar="PATH", help="the socket to listen at (default: this user's keeper's)")
    parser.add_argument(
        "--ledger", metavar="DIRECTORY", help="the ledgers of the processes that publish (default: $CUVMM_LEDGER)"
    )
    options = parser.parse_args()
    # A shell or nohup has some ignored. Blocked before there are threads, so that all of them have it so.
    signals = {it for it in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if signal.getsignal(it) != signal.SIG_IGN}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    # Each piece of memory is an open file.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    with Keeper(options.socket, ledger=options.ledger or os.environ.get("CUVMM_LEDGER") or None) as keeper:
        print(f"process {os.getpid()} keeps publications at {keeper.path}, until Ctrl-C", flush=True)
        signal.sigwait(signals)


if __name__ == "__main__":
    main()
