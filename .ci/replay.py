"""Checks the figures of `cuvmm replay --json` against the promises of the project.

Usage: replay.py FIGURES SECONDS TRACE...

`replay.py --first MINUTES TRACE` prints the requests of a trace's first minutes.
"""

import datetime
import json
import sys

LEAST_GAIN = 1.5


def first(minutes, trace):
    """Prints the beginning of a trace."""
    with open(trace, encoding="utf-8") as file:
        header, *requests = file.read().splitlines()
    # Python knows no more than six digits of a second.
    times = [datetime.datetime.fromisoformat(line.split(",")[0][:26]) for line in requests]
    until = times[0] + datetime.timedelta(minutes=float(minutes))
    kept = [line for line, time in zip(requests, times, strict=True) if time < until]
    print("\n".join([header, *kept]))


def main(figures, seconds, *traces):
    with open(figures, encoding="utf-8") as file:
        policies = json.load(file)["policies"]
    # The first line of a trace is its header.
    asked = sum(sum(1 for line in open(trace, "rb") if line.strip()) - 1 for trace in traces)
    wrong = []

    def hold(fact, what):
        if not fact:
            wrong.append(what)

    for name in ("static", "elastic"):
        policy = policies[name]
        done = policy["completed"] + policy["rejected"]
        hold(policy["requests"] == asked, f"{name}: {policy['requests']} requests, not {asked}")
        hold(done == asked, f"{name}: {done} of {asked} requests completed or rejected")
        hold(policy["wrong_stamps"] == 0, f"{name}: {policy['wrong_stamps']} wrong stamps")
        hold(policy["verified_stamps"] > 0, f"{name}: no stamp was verified")
        for model, part in policy["models"].items():
            done = part["completed"] + part["rejected"]
            hold(
                part["requests"] == done,
                f"{name}, {model}: {done} of {part['requests']} requests completed or rejected",
            )
        print(
            f"{name}: {policy['completed']} completed, {policy['rejected']} rejected, "
            f"p99 {policy['ttft_p99_ms']:.0f} ms, {policy['verified_stamps']} stamps"
        )
    gain = policies["static"]["ttft_p99_ms"] / policies["elastic"]["ttft_p99_ms"]
    hold(gain >= LEAST_GAIN, f"elastic's p99 is {gain:.2f} times better, not {LEAST_GAIN}")
    print(f"elastic's p99 is {gain:.2f} times better; {seconds} s")
    for what in wrong:
        print(f"WRONG: {what}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--first"] and len(sys.argv) == 4:
        sys.exit(first(*sys.argv[2:]))
    if len(sys.argv) < 4:
        sys.exit(__doc__)
    sys.exit(main(*sys.argv[1:]))
