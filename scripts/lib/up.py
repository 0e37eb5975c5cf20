"""Builds the three programs and runs a cluster on this machine (called by scripts/up)."""

import argparse
import ctypes
import json
import os
import secrets
import shlex
import signal
import socket
import subprocess
import sys
import time
from http.client import HTTPConnection, HTTPException
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
STATE = REPO / ".baton"
LOGS = STATE / "logs"
CERTS = STATE / "certs"
PROGRAMS = ("coordinator", "prefill-node", "decode-node", "model")
HOST = "127.0.0.1"
# Bounds of the waits, in seconds.
READY_S = 180
ANSWER_S = 120
DRAIN_S = 35
STOP_S = 10
# The name inside the default model's file is that of a training run.
DEFAULT_MODEL_NAME = "SmolLM2-135M-Instruct"
# How a model on a hub is named.
HUB = "hf://"
MODEL_HELP = "GGUF file or model directory, or hf://ORG/NAME[/FILE.gguf][@REVISION] (default: scripts/fetch-model)"
PROMPT = "The capital of France is"
ADMIN_PORT = 7700
PR_SET_PDEATHSIG = 1


class Failed(Exception):
    """Something that ends the run; its text is shown as it is."""


class Stopped(Exception):
    """Ctrl-C or SIGTERM."""


def main():
    arguments = parse_arguments()
    processes = []
    signal.signal(signal.SIGTERM, stop_requested)
    signal.signal(signal.SIGINT, stop_requested)
    status = 1
    try:
        port = take_port(arguments.port)
        programs = build()
        model = find_model(arguments.model, programs["model"])
        if arguments.model is None:
            os.environ.setdefault("BATON_MODEL__MODEL_NAME", DEFAULT_MODEL_NAME)
        elif on_hub(arguments.model) and not model.is_file():
            # A directory in the cache is called like its commit.
            name = arguments.model.removeprefix(HUB).split("@")[0]
            os.environ.setdefault("BATON_MODEL__MODEL_NAME", name)
        names = mint_certificates(programs["coordinator"], arguments)
        admin = admin_plane(port)
        start_all(port, programs, model, names, admin, processes)
        wait_until_ready(port, processes)
        ask(port)
        if not arguments.check:
            show_commands(port, programs["coordinator"], admin)
            watch(processes)
        status = 0
    except Stopped:
        # Ctrl-C ends a running cluster as intended, but not a check that did not get to its answer.
        status = 1 if arguments.check else 0
    except Failed as failure:
        print(f"scripts/up: {failure}", file=sys.stderr, flush=True)
    finally:
        clean = stop_all(processes)
    sys.exit(1 if arguments.check and not clean else status)


def parse_arguments():
    parser = argparse.ArgumentParser(prog="scripts/up", description="Builds Baton and runs a cluster on this machine.")
    parser.add_argument("--port", type=bounded(0, 65535), default=8080, help="HTTP port; 0 takes a free one (default 8080)")
    parser.add_argument("--prefill", type=bounded(1, 64), default=1, metavar="N", help="prefill nodes (default 1)")
    parser.add_argument("--decode", type=bounded(1, 64), default=1, metavar="M", help="decode nodes (default 1)")
    parser.add_argument("--model", metavar="PATH", help=MODEL_HELP)
    parser.add_argument("--check", action="store_true", help="start, answer one prompt, stop")
    return parser.parse_args()


def bounded(low, high):
    def parse(text):
        if text.isascii() and text.isdigit() and low <= int(text) <= high:
            return int(text)
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {low} to {high}")

    return parse


def say(text):
    print(text, flush=True)


class Step:
    """Prints what is done, and how long it took."""

    def __init__(self, text):
        self.text = text

    def __enter__(self):
        say(f"{self.text} ...")
        self.start = time.monotonic()
        return self

    def __exit__(self, kind, *_):
        if kind is None:
            say(f"  done in {time.monotonic() - self.start:.1f} s")


def stop_requested(*_):
    raise Stopped


def take_port(port):
    """Checks early, before minutes of building, that the port is free."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            raise Failed(f"port {port} on {HOST} cannot be used ({error.strerror}); choose another one with --port") from None
        return probe.getsockname()[1]


def free_udp_port():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.bind((HOST, 0))
        return probe.getsockname()[1]


def build():
    with Step(f"building {', '.join(PROGRAMS)}"):
        # The whole workspace is named, here and in scripts/test, so that the same features are chosen and nothing is
        # compiled twice.
        programs = [word for name in PROGRAMS for word in ("--bin", name)]
        command = ["cargo", "build", "--release", "--locked", "--workspace", *programs]
        run(command, "the build failed; see the messages above")
    metadata = ["cargo", "metadata", "--format-version", "1", "--no-deps", "--locked"]
    found = subprocess.run(metadata, cwd=REPO, stdout=subprocess.PIPE, text=True, check=False)
    if found.returncode != 0:
        raise Failed("cargo metadata failed; see the messages above")
    folder = Path(json.loads(found.stdout)["target_directory"]) / "release"
    return {name: folder / name for name in PROGRAMS}


def run(command, failure):
    if subprocess.run(command, cwd=REPO, check=False).returncode != 0:
        raise Failed(failure)


def on_hub(model):
    return model.startswith(HUB)


def find_model(given, program):
    if given is not None and on_hub(given):
        # Once for all processes, and where its progress can be seen.
        with Step(f"fetching {given}"):
            fetch = subprocess.run([program, "fetch", given], cwd=REPO, stdout=subprocess.PIPE, text=True, check=False)
        if fetch.returncode != 0:
            raise Failed("the model could not be fetched; see the messages above")
        return Path(fetch.stdout.splitlines()[-1])
    if given is not None:
        path = Path(given).resolve()
        if not path.exists():
            raise Failed(f"--model {given}: no such file or directory")
        return path
    with Step("fetching the model"):
        fetch = subprocess.run([REPO / "scripts/fetch-model"], cwd=REPO, stdout=subprocess.PIPE, text=True, check=False)
    if fetch.returncode != 0:
        raise Failed("the model could not be fetched; give one with --model PATH")
    return Path(fetch.stdout.splitlines()[-1])


def mint_certificates(coordinator, arguments):
    """One certificate authority for this checkout, one certificate a process. Returns (role, name) of every process."""
    names = [("coordinator", "coordinator-0")]
    names += [("prefill", f"prefill-{number}") for number in range(arguments.prefill)]
    names += [("decode", f"decode-{number}") for number in range(arguments.decode)]
    with Step("minting certificates"):
        if not (CERTS / "ca.pem").exists():
            certs(coordinator, "init")
        for role, name in names:
            if not (CERTS / f"{name}.pem").exists() or not (CERTS / f"{name}.key").exists():
                certs(coordinator, "issue", "--role", role, "--node", name)
    return names


def certs(coordinator, action, *more):
    command = [coordinator, "certs", action, "--dir", CERTS, *more]
    made = subprocess.run(command, cwd=REPO, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if made.returncode != 0:
        shown = " ".join(str(word) for word in command)
        raise Failed(f"'{shown}' failed:\n{made.stdout.rstrip()}\nremove {CERTS} to start afresh")


class Process:
    """One process of the cluster, in a session of its own so that Ctrl-C reaches only this script."""

    def __init__(self, name, command, environment):
        self.name = name
        self.log = LOGS / f"{name}.log"
        self.reported = False
        libc = ctypes.CDLL(None)

        def end_with_parent():
            libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)

        with open(self.log, "wb") as log:
            self.child = subprocess.Popen(
                command,
                cwd=REPO,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=end_with_parent if sys.platform == "linux" else None,
            )

    def is_running(self):
        return self.child.poll() is None

    def death(self):
        """Why it is gone, with the end of its log."""
        code = self.child.returncode
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"exited with status {code}"
        lines = self.log.read_text(errors="replace").splitlines()[-15:]
        tail = "\n".join(f"    {line}" for line in lines) or "    (the log is empty)"
        return f"{self.name} {how}; the end of {self.log}:\n{tail}"


def admin_plane(http_port):
    """Where operators find the coordinator: address, the token's file, settings. What the environment says stands."""
    listen = os.environ.get("BATON_ADMIN__LISTEN")
    if listen is not None or "BATON_ADMIN__TOKENS" in os.environ:
        return listen, None, None, {}
    try:
        port = take_port(0 if http_port == ADMIN_PORT else ADMIN_PORT)
    except Failed:
        port = take_port(0)
    token = secrets.token_urlsafe(24)
    # One for each cluster that runs from here.
    kept_at = STATE / f"admin-token-{http_port}"
    kept_at.unlink(missing_ok=True)
    with open(os.open(kept_at, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as kept:
        kept.write(token + "\n")
    listen = f"{HOST}:{port}"
    return listen, token, kept_at, {"BATON_ADMIN__LISTEN": listen, "BATON_ADMIN__TOKENS": token}


def start_all(port, programs, model, names, admin, processes):
    LOGS.mkdir(parents=True, exist_ok=True)
    meeting = f"{HOST}:{free_udp_port()}"
    common = {"BATON_MODEL__PATH": str(model), "BATON_CLUSTER__CA_CERT_PATH": str(CERTS / "ca.pem")}
    with Step(f"starting {len(names)} processes"):
        for role, name in names:
            settings = common | {
                "BATON_CLUSTER__CERT_PATH": str(CERTS / f"{name}.pem"),
                "BATON_CLUSTER__KEY_PATH": str(CERTS / f"{name}.key"),
            }
            if role == "coordinator":
                settings["BATON_COORDINATOR__HTTP_HOST"] = HOST
                settings["BATON_COORDINATOR__HTTP_PORT"] = str(port)
                settings["BATON_COORDINATOR__LISTEN"] = meeting
                settings |= admin[3]
                program = programs["coordinator"]
            else:
                settings["BATON_NODE__ID"] = name
                settings["BATON_NODE__LISTEN"] = f"{HOST}:0"
                settings["BATON_NODE__COORDINATORS"] = meeting
                program = programs[f"{role}-node"]
            command = [program, "--config", "config/profiles/local.toml"]
            processes.append(Process(name, command, os.environ | settings))


def fail_if_dead(processes):
    for process in processes:
        if not process.is_running():
            raise Failed(process.death())


def wait_until_ready(port, processes):
    with Step("waiting for the cluster (the nodes load the model)"):
        deadline = time.monotonic() + READY_S
        while time.monotonic() < deadline:
            fail_if_dead(processes)
            try:
                # A decode node alone can serve, too: what is waited for is the cluster that was asked for.
                if call(port, "GET", "/health", timeout=5)[0] == 200 and joined(port) == len(processes) - 1:
                    return
            except (OSError, HTTPException):
                pass  # not listening yet
            time.sleep(0.2)
        raise Failed(f"the nodes did not join within {READY_S} s; the logs are in {LOGS}")


def joined(port):
    """How many nodes the coordinator knows."""
    metrics = call(port, "GET", "/metrics", timeout=5)[1].splitlines()
    totals = [line for line in metrics if line.startswith("baton_node_blocks{") and 'kind="total"' in line]
    return sum(float(line.rsplit(" ", 1)[1]) > 0 for line in totals)


def call(port, method, path, body=None, timeout=ANSWER_S):
    """One HTTP exchange: status and text."""
    connection = HTTPConnection(HOST, port, timeout=timeout)
    try:
        payload = None if body is None else json.dumps(body)
        connection.request(method, path, payload, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        return answer.status, answer.read().decode("utf-8", "replace")
    finally:
        connection.close()


def ask(port):
    """One real prompt, long enough that prefill and decode nodes both take part."""
    body = {"inputs": PROMPT, "parameters": {"max_new_tokens": 24, "details": True}}
    with Step("asking POST /generate"):
        try:
            status, text = call(port, "POST", "/generate", body)
            answer = json.loads(text) if status == 200 else None
            generated, tokens = answer["generated_text"], answer["details"]["generated_tokens"]
        except (OSError, HTTPException, ValueError, KeyError, TypeError) as error:
            raise Failed(f"POST /generate gave no answer ({error!r}); the logs are in {LOGS}") from None
        if not generated or tokens < 2:
            raise Failed(f"POST /generate answered without text: {text}")
    say(f"  prompt: {PROMPT}")
    say(f"  answer: {' '.join(generated.split())}")


def model_name(port):
    try:
        return json.loads(call(port, "GET", "/v1/models")[1])["data"][0]["id"]
    except (OSError, HTTPException, ValueError, KeyError, IndexError, TypeError):
        return "MODEL"


def show_commands(port, coordinator, admin):
    url = f"http://{HOST}:{port}"
    prompt = json.dumps({"inputs": PROMPT, "parameters": {"max_new_tokens": 24}})
    completion = json.dumps({"model": model_name(port), "prompt": PROMPT, "max_tokens": 24, "temperature": 0})
    header = "-H 'Content-Type: application/json'"
    listen, token, kept_at, _ = admin
    say("")
    if token is not None:
        say(f"ready. The dashboard: http://{listen}/dashboard#token={token}")
    elif listen:
        say(f"ready. The dashboard: http://{listen}/dashboard (with one of BATON_ADMIN__TOKENS)")
    else:
        say("ready.")
    say("Try:")
    say(f"  curl {url}/generate {header} -d '{prompt}'")
    say(f"  curl -N {url}/generate_stream {header} -d '{prompt}'")
    say(f"  curl {url}/v1/completions {header} -d '{completion}'")
    if token is not None:
        token_file, program = shlex.quote(str(kept_at)), shlex.quote(str(coordinator))
        say(f'  BATON_ADMIN_TOKEN="$(cat {token_file})" {program} status --admin http://{listen} --watch')
    say(f"logs: {LOGS}. Ctrl-C stops the cluster.")


def watch(processes):
    """Until a signal comes. A node may be lost, the coordinator may not."""
    while True:
        for process in processes:
            if process.is_running() or process.reported:
                continue
            if process is processes[0]:
                raise Failed(process.death())
            process.reported = True
            say(process.death())
            say("the cluster goes on without it")
        time.sleep(0.5)


def stop_all(processes):
    """Asks every process to stop, the coordinator first: its last requests still need the nodes. Ends what does not
    stop in time, by its own id. Returns whether all stopped by themselves with status 0."""
    hurry, start = [], time.monotonic()
    signal.signal(signal.SIGINT, lambda *_: hurry.append(True))
    signal.signal(signal.SIGTERM, lambda *_: hurry.append(True))
    clean = True
    for group, seconds in ((processes[:1], DRAIN_S), (processes[1:], STOP_S)):
        asked = [process for process in group if process.is_running()]
        for process in asked:
            process.child.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + seconds
        while not hurry and time.monotonic() < deadline and any(process.is_running() for process in asked):
            time.sleep(0.05)
        for process in asked:
            if process.is_running():
                say(f"{process.name} did not stop in time and is killed")
                process.child.kill()
                process.child.wait()
                clean = False
            elif process.child.returncode != 0:
                say(process.death())
                clean = False
    if processes:
        say(f"stopped in {time.monotonic() - start:.1f} s")
    return clean


if __name__ == "__main__":
    main()
