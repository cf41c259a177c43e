"""What code has at hand that a test runs in a process of its own."""

from textwrap import dedent  # noqa: F401

MIB = 1 << 20


def refused(kind, call, *texts):
    """Checks that a call raises an exception of a kind, whose text has these parts."""
    try:
        call()
    except kind as error:
        for text in texts:
            assert text in str(error), (text, str(error))
    else:
        raise AssertionError(f"not refused: {texts}")
