"""What the client scripts share: the reference they compare with, checks, and a runner for their cases."""

import json
import sys
import traceback


class Reference:
    """What the server answered to a plain POST, and how to reach it; written by the test that runs the script."""

    def __init__(self, path):
        with open(path, encoding="utf-8") as file:
            self.__dict__.update(json.load(file))


def equal(what, found, wanted):
    if found != wanted:
        raise AssertionError(f"{what}: {found!r} instead of {wanted!r}")


def holds(what, condition):
    if not condition:
        raise AssertionError(what)


def raises(kind, call, *words):
    """Checks that the call raises exactly this kind of error with these words in its message, and returns the error."""
    try:
        result = call()
    except Exception as error:
        if type(error) is not kind:
            raise AssertionError(f"{type(error).__name__} instead of {kind.__name__}: {error}") from error
        for word in words:
            holds(f"{word!r} is not in {error}", word in str(error))
        return error
    raise AssertionError(f"no {kind.__name__}, but {result!r}")


def run(cases):
    """Runs the functions called case_* with the reference named on the command line. Exits 1 if one fails."""
    reference = Reference(sys.argv[1])
    failed = 0
    names = [name for name in cases if name.startswith("case_")]
    for name in names:
        try:
            cases[name](reference)
            print(f"{name}: ok", flush=True)
        except Exception:
            failed += 1
            print(f"{name}: FAILED\n{traceback.format_exc()}", flush=True)
    print(f"{len(names) - failed} passed, {failed} failed")
    sys.exit(1 if failed or not names else 0)
