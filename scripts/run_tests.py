"""Runs the tests as two pytests at once, and ends with one closing line in pytest's form.

Tests with a server keep one core busy at a time, so the others run beside them at a lower
priority. Both run all files; the marker `server` deals out the tests. What the first prints is seen
as it comes, what the second prints when both are done.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence

PYTEST = [sys.executable, "-m", "pytest", "-q"]
SERVERS = [*PYTEST, "-m", "server and not slow and not gpu"]
# Of two pytests, one keeps the cache that `--last-failed` reads.
OTHERS = [*PYTEST, "-m", "not server and not slow and not gpu", "-p", "no:cacheprovider"]

#: In pytest's order. Others it counts, warnings and deselected tests, say nothing of both runs.
OUTCOMES = ("failed", "passed", "skipped", "xfailed", "xpassed", "error")
COUNT = re.compile(rf"(\d+) ({'|'.join(OUTCOMES)})s?\b")


def counts(output: str) -> Counter[str]:
    """What the closing line of pytest's ``output`` counts; empty if there is none."""
    for line in reversed(output.splitlines()):
        if re.search(r" in \d+(\.\d+)?s\b", line) and (found := COUNT.findall(line)):
            return Counter({outcome: int(n) for n, outcome in found})
    return Counter()


def closing_line(total: Counter[str], seconds: float) -> str:
    """As pytest writes it."""
    parts = []
    for outcome in OUTCOMES:
        if n := total[outcome]:
            parts.append(f"{n} {outcome}{'s' if outcome == 'error' and n > 1 else ''}")
    minutes = f" ({int(seconds) // 3600}:{int(seconds) // 60 % 60:02}:{int(seconds) % 60:02})"
    return f"{', '.join(parts) or 'no tests ran'} in {seconds:.2f}s{minutes}"


def show(stream: subprocess.Popen[bytes]) -> str:
    """Pass on what it prints, as it comes; returns all of it."""
    assert stream.stdout is not None
    seen = b""
    while part := os.read(stream.stdout.fileno(), 1 << 16):  # a dot a test, not a line
        seen += part
        sys.stdout.buffer.write(part)
        sys.stdout.flush()
    return seen.decode(errors="replace")


def run(front: Sequence[str], beside: Sequence[str]) -> int:
    """Run both commands; returns the status to exit with."""
    started = time.monotonic()
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        other = subprocess.Popen(
            beside, stdout=log, stderr=subprocess.STDOUT, preexec_fn=lambda: os.nice(10)
        )
        try:
            first = subprocess.Popen(front, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
            output = show(first)
            statuses = [first.wait(), other.wait()]
        finally:
            if other.poll() is None:
                other.send_signal(signal.SIGTERM)
                other.wait()
        log.seek(0)
        rest = log.read()
    print(f"\n---- the tests without a server ----\n{rest}")
    total = counts(output) + counts(rest)
    print(closing_line(total, time.monotonic() - started), flush=True)
    # A run that ended without counting, killed or broken, is not a success either.
    if not counts(output) or not counts(rest):
        return 1
    return next((status for status in statuses if status), 0)


if __name__ == "__main__":
    sys.exit(run(SERVERS, OTHERS))
