"""schemathesis with the server's own OpenAPI document: nothing but documented answers, whatever is sent."""

import os
import subprocess
import sys

from checks import run

CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance,negative_data_rejection"


def case_examples_of_every_operation(reference):
    command = [os.path.join(os.path.dirname(sys.executable), "schemathesis"), "run", f"{reference.url}/openapi.json"]
    command += ["--max-examples", str(reference.examples), "--checks", CHECKS, "--workers", "2", "--seed", "1"]
    command += ["--request-timeout", "60", "--phases", "examples,coverage,fuzzing", "--no-color"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800)
    if done.returncode:
        raise AssertionError(f"schemathesis ended with {done.returncode}:\n{done.stdout[-20000:]}\n{done.stderr[-4000:]}")
    print(done.stdout[-3000:])


if __name__ == "__main__":
    run(dict(globals()))
