"""schemathesis with the server's own OpenAPI document: nothing but documented answers, whatever is sent."""

import os
import re
import subprocess
import sys
import tempfile

from checks import equal, holds, run

CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance,negative_data_rejection"
# Half of the work each. Processes, because hypothesis must not be used from several threads under Python 3.11, whose parser
# then fails now and then ("AST constructor recursion depth mismatch").
HALVES = ("--include-path-regex", "--exclude-path-regex")
PATHS = "^/v1/(chat/)?completions"
LIMIT_S = 1800


def start(reference, half, folder):
    command = [os.path.join(os.path.dirname(sys.executable), "schemathesis"), "run", f"{reference.url}/openapi.json"]
    command += ["--max-examples", str(reference.examples), "--checks", CHECKS, "--workers", "1", "--seed", str(reference.seed)]
    command += ["--request-timeout", "60", "--phases", "examples,coverage,fuzzing", "--no-color", half, PATHS]
    # It keeps what it has found in the folder where it runs.
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def case_examples_of_every_operation(reference):
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other:
        halves = [start(reference, half, folder) for half, folder in zip(HALVES, (one, other))]
        try:
            said = [half.communicate(timeout=LIMIT_S)[0] for half in halves]
        finally:
            for half in halves:
                half.kill()
    tested = 0
    for half, text in zip(halves, said):
        holds(f"schemathesis ended with {half.returncode}:\n{text[-20000:]}", half.returncode == 0)
        tested += int(re.search(r"Tested: (\d+)", text)[1])
        print(text[-2000:])
    equal("operations", tested, reference.operations)


if __name__ == "__main__":
    run(dict(globals()))
