"""The command `fakecuda [OPTIONS] -- COMMAND`: runs a program on the library of this package.

It has the options of `cuvmm fake`, sets variables, and replaces itself by the program. So signals
and the exit status are the program's own.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys

import fakecuda

_EXAMPLES = """examples:
  fakecuda --report -- python3 my_test.py
  fakecuda --gpus 2 --memory 80GiB --report leaks.txt -- python3 -m pytest tests
  fakecuda --fail cuMemCreate:3 --report --exit-code 1 -- ./my_test
"""


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="fakecuda",
        usage="fakecuda [OPTIONS] -- COMMAND ...",
        description="Runs a program on a CUDA driver without a GPU, and reports what it leaks and"
        " misuses. The driver runs no kernels, and the CUDA runtime library does not work on it.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    option = made.add_argument
    option("--gpus", metavar="N", help="the number of GPUs")
    option("--memory", metavar="SIZE", help="the memory of each GPU: 80GiB")
    option("--gpu", metavar="NAME", help="a GPU that was measured, for name and memory: h200")
    option("--cuda", metavar="VERSION", help="the CUDA version; newer functions are absent")
    option("--latency", metavar="GPU|FILE", help="calls take the time of a measured GPU")
    option("--manner", choices=["measured", "strict", "hostile"], help="the calls accepted")
    option("--late", action="store_true", help="run work when a call waits for it")
    option("--fail", metavar="CALL:N", action="append", help="make a call fail; repeatable")
    option("--report", metavar="FILE", nargs="?", const="-", help="report at the end")
    option("--json", action="store_true", help="report as JSON")
    option("--leaks", choices=["memory", "all", "none"], help="the objects that count as leaks")
    option("--unwritten", action="store_true", help="find reads of bytes never written")
    option("--exit-code", metavar="N", help="the status of a program that has findings")
    option("--config", metavar="FILE", help="a file of settings, in TOML or JSON")
    option("--library-path", action="store_true", help="print the library's path and end")
    option("--include-path", action="store_true", help="print the header's folder and end")
    return made


def settings(options: argparse.Namespace) -> dict[str, str]:
    """Returns the settings that options stand for."""
    found = {
        "devices": options.gpus,
        "capacity": options.memory,
        "gpu": options.gpu,
        "version": options.cuda,
        "latency": options.latency,
        "manner": options.manner,
        "work": "late" if options.late else None,
        "fail": ",".join(options.fail) if options.fail else None,
        "report": options.report,
        "report_format": "json" if options.json else None,
        "leaks": options.leaks,
        "unwritten": "1" if options.unwritten else None,
        "exit_code": options.exit_code,
        "config": options.config,
    }
    return {name: value for name, value in found.items() if value is not None}


def complaint(environment: dict[str, str]) -> str | None:
    """Returns what the library finds wrong with the settings of an environment, if anything."""
    code = "import ctypes, sys; ctypes.CDLL(sys.argv[1]).cuInit(0)"
    words = [sys.executable, "-c", code, fakecuda.library_path()]
    checked = environment | {"FAKECUDA_CHECK": "1"}
    said = subprocess.run(words, env=checked, stderr=subprocess.PIPE, text=True, check=False).stderr
    found = re.search("fakecuda: (.*); cuInit fails", said, re.DOTALL)
    return found and found[1]


def main(words: list[str] | None = None) -> int:
    words = sys.argv[1:] if words is None else words
    at = words.index("--") if "--" in words else len(words)
    made = parser()
    options = made.parse_args(words[:at])
    if options.library_path or options.include_path:
        print(fakecuda.library_path() if options.library_path else fakecuda.include_path())
        return 0
    command = words[at + 1 :]
    if not command:
        made.error("no program is given after --")
    if options.json and options.report is None:
        made.error("--json needs --report")
    if options.report not in (None, "-"):
        options.report = os.path.abspath(options.report)
        if "%p" not in options.report:
            try:
                open(options.report, "w").close()
            except OSError as error:
                made.error(f"cannot write {options.report}: {error.strerror}")
    environment = fakecuda.environment(**settings(options))
    wrong = complaint(environment)
    if wrong is not None:
        made.error(wrong)
    sys.stdout.flush()
    try:
        os.execvpe(command[0], command, environment)
    except OSError as error:
        print(f"fakecuda: cannot run {command[0]}: {error.strerror}", file=sys.stderr)
        return 127 if isinstance(error, FileNotFoundError) else 126


if __name__ == "__main__":
    sys.exit(main())
