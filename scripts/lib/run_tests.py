"""Runs the test parts and adds up their results (called by scripts/test)."""

import argparse
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
CLIENTS = REPO / "integration-tests" / "clients"
# Clients that others have written, each kind in an environment of its own: they pin different versions of the same packages.
ENVIRONMENTS = REPO / ".baton" / "clients"
# Parts that run such clients.
CLIENT_PARTS = {"clients", "dashboard", "deploy", "suites"}
PROGRAMS = ("coordinator", "prefill-node", "decode-node", "node", "model", "fuzz", "load")
RESULT = re.compile(r"^test result: \w+\. (\d+) passed; (\d+) failed; (\d+) ignored;")
# A part that takes longer hangs, in seconds.
PART_LIMIT_S = 3600
# Always the whole workspace with a choice of targets, never a choice of crates: the same features are chosen each time,
# and nothing is compiled twice.
CARGO_TEST = ["cargo", "test", "--release", "--locked", "--no-fail-fast", "--workspace"]


class Failed(Exception):
    """Something that keeps the tests from running."""


def main():
    parts = discover()
    parser = argparse.ArgumentParser(prog="scripts/test", description="Runs the tests.")
    parser.add_argument("--only", metavar="NAME", help=f"one part: {', '.join(parts)}")
    parser.add_argument("--list", action="store_true", help="print the names of the parts and exit")
    arguments = parser.parse_args()
    if arguments.list:
        print("\n".join(parts))
        return 0
    chosen = list(parts)
    if arguments.only is not None:
        name = arguments.only.replace("_", "-")
        if name not in parts:
            parser.error(f"--only {arguments.only}: no such part; the parts are {', '.join(parts)}")
        chosen = [name]
    environment = prepare(chosen)
    return summarise([(name, *run_part(name, parts[name], environment)) for name in chosen])


def discover():
    """Part name -> its cargo commands. Targets are found, so that a new file of integration-tests is a new part."""
    command = ["cargo", "metadata", "--format-version", "1", "--no-deps", "--locked"]
    found = subprocess.run(command, cwd=REPO, stdout=subprocess.PIPE, text=True, check=False)
    if found.returncode:
        raise Failed("cargo metadata failed; see the messages above")
    own, integration = [], []
    for package in json.loads(found.stdout)["packages"]:
        names = [target["name"] for target in package["targets"] if target["kind"] == ["test"]]
        (integration if package["name"] == "integration-tests" else own).extend(names)
    for name in set(own) & set(integration):
        raise Failed(f"two crates have a test called {name}: rename the file of one, or both would run at once")
    targets = [word for name in sorted(set(own)) for word in ("--test", name)]
    parts = {"unit": [[*CARGO_TEST, "--lib", "--bins", *targets], [*CARGO_TEST, "--doc"]]}
    for name in sorted(integration):
        parts[name.replace("_", "-")] = [[*CARGO_TEST, "--test", name]]
    return parts


def prepare(chosen):
    """Builds and fetches what the chosen parts need: the unit tests only the model. Returns their environment."""
    environment = dict(os.environ)
    if not environment.get("BATON_TEST_MODEL"):
        say("fetching the model")
        fetch = subprocess.run([REPO / "scripts/fetch-model"], cwd=REPO, stdout=subprocess.PIPE, text=True, check=False)
        if fetch.returncode:
            raise Failed("the model could not be fetched; give one with BATON_TEST_MODEL=PATH")
        environment["BATON_TEST_MODEL"] = fetch.stdout.splitlines()[-1]
    if chosen == ["unit"]:
        return environment
    if CLIENT_PARTS & set(chosen) and not environment.get("BATON_TEST_CLIENTS"):
        for requirements in sorted((CLIENTS / "environments").glob("*.txt")):
            python_environment(requirements)
        node_environment(CLIENTS / "node")
        environment["BATON_TEST_CLIENTS"] = str(ENVIRONMENTS)
    say("building the programs")
    programs = [word for name in PROGRAMS for word in ("--bin", name)]
    command = ["cargo", "build", "--release", "--locked", "--workspace", *programs]
    if subprocess.run(command, cwd=REPO, check=False).returncode:
        raise Failed("the programs do not build; see the messages above")
    return environment


def python_environment(requirements):
    """A virtual environment with the pinned packages of a list, made anew when the list changes."""
    target = ENVIRONMENTS / requirements.stem
    pip = [target / "bin" / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-input"]
    made_of = requirements.read_bytes() + sys.version.encode()
    make_environment(target, made_of, [[sys.executable, "-m", "venv", target], [*pip, "-r", requirements]])


def node_environment(source):
    """Node's packages as the lock file in `source` pins them, made anew when it changes."""
    target = ENVIRONMENTS / "node"
    files = [source / "package.json", source / "package-lock.json"]
    made_of = b"".join(path.read_bytes() for path in files)
    install = ["npm", "ci", "--prefix", target, "--ignore-scripts", "--no-audit", "--no-fund", "--silent"]
    make_environment(target, made_of, [["mkdir", "-p", target], ["cp", *files, target], install])


def make_environment(target, made_of, commands):
    """Runs the commands that make `target`, unless it has been made there of the same bytes before: it knows its own place."""
    stamp = target / "made-of.sha256"
    wanted = hashlib.sha256(made_of + bytes(target)).hexdigest()
    if stamp.exists() and stamp.read_text() == wanted:
        return
    say(f"installing the client packages: {target.name}")
    shutil.rmtree(target, ignore_errors=True)
    for command in commands:
        if subprocess.run(command, cwd=REPO, check=False).returncode:
            raise Failed(f"'{' '.join(map(str, command))}' failed; see the messages above")
    stamp.write_text(wanted)


def run_part(name, commands, environment):
    """Runs a part. Returns passed, failed, ignored and, where the counts do not say it, what went wrong."""
    passed = failed = ignored = 0
    problem = None
    for command in commands:
        say(f"{name}: {' '.join(command)}")
        counts, status, timed_out = run_counted(command, environment)
        passed, failed, ignored = passed + counts[0], failed + counts[1], ignored + counts[2]
        if timed_out:
            problem = f"did not end within {PART_LIMIT_S} s"
        elif status and not counts[1]:
            problem = f"cargo ended with status {status} (see the messages above)"
    if problem is None and passed + failed == 0:
        problem = "no test ran"
    return passed, failed, ignored, problem


def run_counted(command, environment):
    """Runs a command, shows its output and adds up cargo's result lines."""
    counts = [0, 0, 0]
    timed_out = threading.Event()
    child = subprocess.Popen(
        command,
        cwd=REPO,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )

    def end():
        timed_out.set()
        end_group(child)

    limit = threading.Timer(PART_LIMIT_S, end)
    limit.start()
    try:
        for line in child.stdout:
            print(line, end="", flush=True)
            found = RESULT.match(line)
            if found:
                counts = [sum(pair) for pair in zip(counts, map(int, found.groups()))]
        status = child.wait()
    except KeyboardInterrupt:
        end_group(child)
        raise
    finally:
        limit.cancel()
    return counts, status, timed_out.is_set()


def end_group(child):
    """Ends the command and what it started: they are a session of their own."""
    try:
        os.killpg(child.pid, signal.SIGTERM)
        time.sleep(2)
        os.killpg(child.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass  # all gone


def summarise(results):
    say("")
    passed = failed = 0
    for name, part_passed, part_failed, ignored, problem in results:
        # A part that could not be counted is one failure, or the sum would hide it.
        part_failed += problem is not None
        passed, failed = passed + part_passed, failed + part_failed
        notes = [f"{ignored} ignored"] if ignored else []
        notes += [problem] if problem else []
        say(f"{name:<16} {part_passed:>5} passed {part_failed:>5} failed{''.join(f'  ({note})' for note in notes)}")
    say(f"{passed} passed, {failed} failed")
    return 0 if passed and not failed else 1


def say(text):
    print(text, flush=True)


if __name__ == "__main__":
    # A terminated run ends what it started, as an interrupted one does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        sys.exit(main())
    except Failed as failure:
        print(f"scripts/test: {failure}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
