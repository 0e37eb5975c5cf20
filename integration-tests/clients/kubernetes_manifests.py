"""The manifests in deploy/kubernetes: by Kubernetes' schemas, by our programs, and by what they say of each other."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import kubernetes_validate
import yaml
from checks import equal, holds, run

# An old release that is still run, and the newest one that the validator knows.
RELEASES = ("1.30", "1.37")
PROGRAMS = {"coordinator": "coordinator", "prefill": "prefill-node", "decode": "decode-node"}


def folder(reference):
    return Path(reference.root) / "deploy" / "kubernetes"


def kustomization(reference):
    return yaml.safe_load((folder(reference) / "kustomization.yaml").read_text())


def objects(reference):
    """Every object of the files that the kustomization names, with its file."""
    for name in kustomization(reference)["resources"]:
        for document in yaml.safe_load_all((folder(reference) / name).read_text()):
            yield name, document


def of_kind(reference, *kinds):
    return [document for _, document in objects(reference) if document["kind"] in kinds]


def workloads(reference):
    found = of_kind(reference, "Deployment", "StatefulSet")
    equal("workloads", sorted(document["metadata"]["name"] for document in found), sorted(PROGRAMS))
    return found


def container(workload):
    containers = workload["spec"]["template"]["spec"]["containers"]
    equal("containers", len(containers), 1)
    return containers[0]


def config(reference):
    return tomllib.loads((folder(reference) / "baton.toml").read_text())


def pods(workload):
    name, count = workload["metadata"]["name"], workload["spec"]["replicas"]
    return [f"{name}-{number}" for number in range(count)] if workload["kind"] == "StatefulSet" else [name]


def environment(workload, pod):
    """The container's variables, as Kubernetes makes them."""
    made = {}
    for variable in container(workload)["env"]:
        if "valueFrom" in variable:
            equal("field", variable["valueFrom"]["fieldRef"]["fieldPath"], "metadata.name")
            made[variable["name"]] = pod
        else:
            value = variable["value"]
            for name, known in made.items():
                value = value.replace(f"$({name})", known)
            holds(f"{value}: a variable that is not defined before it", "$(" not in value)
            made[variable["name"]] = value
    return made


def case_every_file_is_used(reference):
    used = set(kustomization(reference)["resources"]) | {"kustomization.yaml"}
    equal("files", {path.name for path in folder(reference).glob("*.yaml")}, used)


def case_the_schemas_are_content(reference):
    count = 0
    for name, document in objects(reference):
        for release in RELEASES:
            try:
                kubernetes_validate.validate(document, release, strict=True)
            except kubernetes_validate.ValidationError as error:
                raise AssertionError(f"{name}, Kubernetes {release}: {error.message}") from error
        count += 1
    holds(f"only {count} objects", count >= 12)


def case_the_schemas_find_mistakes(reference):
    workload = workloads(reference)[0]
    container(workload)["readynessProbe"] = {}
    try:
        kubernetes_validate.validate(workload, RELEASES[-1], strict=True)
    except kubernetes_validate.ValidationError:
        return
    raise AssertionError("a misspelt field passed")


def case_every_program_takes_its_settings(reference):
    for workload in workloads(reference):
        command = container(workload)["command"]
        equal("program", command[0], PROGRAMS[workload["metadata"]["name"]])
        equal("arguments", command[1:], ["--config", "/etc/baton/baton.toml"])
        for pod in pods(workload):
            variables = environment(workload, pod)
            check = [Path(reference.programs) / command[0], "--config", folder(reference) / "baton.toml", "--check"]
            surroundings = {k: v for k, v in os.environ.items() if not k.startswith("BATON_")}
            made = subprocess.run(check, env=surroundings | variables, capture_output=True, text=True, check=False)
            equal(f"{pod}: {made.stderr}", made.returncode, 0)
            wrong = surroundings | variables | {"BATON_NODE__NO_SUCH_FIELD": "1"}
            made = subprocess.run(check, env=wrong, capture_output=True, text=True, check=False)
            holds("an unknown variable passed", made.returncode != 0 and "NO_SUCH_FIELD" in made.stderr)


def case_every_pod_has_its_certificate(reference):
    generated = {secret["name"]: secret["files"] for secret in kustomization(reference)["secretGenerator"]}
    for workload in workloads(reference):
        volumes = {volume["name"]: volume for volume in workload["spec"]["template"]["spec"]["volumes"]}
        mounts = {mount["name"]: mount["mountPath"] for mount in container(workload)["volumeMounts"]}
        equal("mounts", set(mounts), set(volumes))
        files = {name.split("=")[0].rsplit("/")[-1] for name in generated[volumes["certificates"]["secret"]["secretName"]]}
        wanted = {config(reference)["cluster"]["ca_cert_path"]}
        for pod in pods(workload):
            variables = environment(workload, pod)
            wanted |= {variables["BATON_CLUSTER__CERT_PATH"], variables["BATON_CLUSTER__KEY_PATH"]}
        equal("certificates", {f"{mounts['certificates']}/{name}" for name in files}, wanted)
        model = config(reference)["model"]["path"]
        holds(f"{model} is not mounted", model.startswith(mounts["model"] + "/"))


def case_addresses_lead_to_open_ports(reference):
    services = {document["metadata"]["name"]: document["spec"] for document in of_kind(reference, "Service")}
    labels = {w["metadata"]["name"]: w["spec"]["template"]["metadata"]["labels"] for w in workloads(reference)}
    ports = {w["metadata"]["name"]: container(w)["ports"] for w in workloads(reference)}
    for name, service in services.items():
        backing = [of for of, has in labels.items() if service["selector"].items() <= has.items()]
        equal(f"workloads behind {name}", len(backing), 1)
        for port in service["ports"]:
            fits = [p for p in ports[backing[0]] if p["name"] == port["targetPort"]]
            equal(f"{name} {port['name']}", [p.get("protocol", "TCP") for p in fits], [port.get("protocol", "TCP")])
    settings = config(reference)
    opened = {name: {port["name"]: port["containerPort"] for port in all_} for name, all_ in ports.items()}
    equal("HTTP", opened["coordinator"]["http"], settings["coordinator"]["http_port"])
    equal("control", f"0.0.0.0:{opened['coordinator']['control']}", settings["coordinator"]["listen"])
    host, port = settings["discovery"]["dns_names"][0].split(":")
    service, namespace, _ = host.split(".")
    equal("namespace", namespace, kustomization(reference)["namespace"])
    equal("discovery", (services[service]["clusterIP"], services[service]["ports"][0]["port"]), ("None", int(port)))
    for role in ("prefill", "decode"):
        equal("node", f"0.0.0.0:{opened[role]['node']}", settings["node"]["listen"])
        equal("metrics", f"0.0.0.0:{opened[role]['metrics']}", settings["node"]["metrics_listen"])
        workload = next(w for w in workloads(reference) if w["metadata"]["name"] == role)
        equal("name of the pods", workload["spec"]["serviceName"], role)
        for pod in pods(workload):
            advertised = environment(workload, pod)["BATON_NODE__ADVERTISE"]
            equal("advertised", advertised, f"{pod}.{role}.{namespace}.svc:{opened[role]['node']}")


def case_a_pod_has_time_to_drain(reference):
    settings = config(reference)
    for workload in workloads(reference):
        section = "coordinator" if workload["metadata"]["name"] == "coordinator" else "node"
        pause = int(container(workload)["lifecycle"]["preStop"]["exec"]["command"][1])
        drain = settings[section]["drain_timeout_ms"] / 1000
        grace = workload["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
        holds(f"{section}: {pause} + {drain} s in {grace} s", pause + drain + 5 <= grace)


def case_nothing_runs_as_root_or_loses_its_budget(reference):
    budgets = {b["metadata"]["name"]: b["spec"] for b in of_kind(reference, "PodDisruptionBudget")}
    for workload in workloads(reference):
        template = workload["spec"]["template"]
        holds("root", template["spec"]["securityContext"]["runAsNonRoot"])
        security = container(workload)["securityContext"]
        holds("writable", security["readOnlyRootFilesystem"] and not security["allowPrivilegeEscalation"])
        budget = budgets[workload["metadata"]["name"]]
        equal("budget", budget["selector"], workload["spec"]["selector"])
        holds("budget", budget["maxUnavailable"] < workload["spec"]["replicas"])


def case_kustomize_builds_it(reference):
    """Where kubectl is there: with the folder of certificates that the test has made."""
    if not reference.kubectl:
        print("SKIPPED: no kubectl here, so the kustomization is not built.", file=sys.stderr)
        return
    build = [reference.kubectl, "kustomize", reference.built]
    made = subprocess.run(build, capture_output=True, text=True, check=False)
    equal(made.stderr, made.returncode, 0)
    count = 0
    for document in yaml.safe_load_all(made.stdout):
        kubernetes_validate.validate(document, RELEASES[-1], strict=True)
        holds("no authority's key", "ca.key" not in document.get("data", {}))
        count += 1
    equal("objects", count, sum(1 for _ in objects(reference)) + 4)


if __name__ == "__main__":
    run(dict(globals()))
