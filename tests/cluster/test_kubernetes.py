"""configs/kubernetes as data: what the APIs demand of it, what launch.sh and the config make of it, and whether the roles fit.

There is no Kubernetes here. What is checked are the mistakes that a person makes: names that do not match, mounts of volumes
that are not there, keys that are none, pods without the GPUs that the config wants.
"""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.version import Version
from typer.main import get_command

from segue.cli import app
from segue.cluster.devices import with_devices
from segue.cluster.hosts.layout import lay_out
from segue.cluster.hosts.messages import HostFacts
from segue.config import Config, load_config

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "configs" / "kubernetes"
DOCKERFILE = (FOLDER / "Dockerfile").read_text()
IN_IMAGE = "/opt/segue"
REQUIRED: dict[str, list[str]] = {
    # apiVersion and kind: keys that the API refuses to do without, or that make no sense for us without
    "v1 PersistentVolumeClaim": ["spec.accessModes", "spec.resources.requests.storage"],
    "v1 Service": ["spec.selector", "spec.clusterIP"],
    "batch/v1 Job": ["spec.completions", "spec.parallelism", "spec.template.spec.containers", "spec.template.spec.restartPolicy"],
    "ray.io/v1 RayJob": [
        "spec.entrypoint",
        "spec.rayClusterSpec.rayVersion",
        "spec.rayClusterSpec.headGroupSpec.rayStartParams",
        "spec.rayClusterSpec.headGroupSpec.template.spec.containers",
        "spec.rayClusterSpec.workerGroupSpecs",
    ],
    "monitoring.coreos.com/v1alpha1 ScrapeConfig": ["spec.fileSDConfigs"],
    "monitoring.coreos.com/v1 PodMonitor": ["spec.selector", "spec.podMetricsEndpoints"],
}


def objects(*names: str) -> Iterator[dict[str, Any]]:
    for path in sorted(FOLDER.glob("*.yaml")):
        if not names or path.stem in names:
            yield from yaml.safe_load_all(path.read_text())


def one(kind: str) -> dict[str, Any]:
    [found] = [each for each in objects() if each["kind"] == kind]
    return found


def at(node: Any, dotted: str) -> Any:
    for key in dotted.split("."):
        assert key in node, f"{dotted} lacks {key}"
        node = node[key]
    return node


def pods() -> dict[str, tuple[dict[str, Any], int]]:
    """(template, how many) by name: pods of the Job, and head and groups of the RayJob."""
    job, cluster = one("Job"), one("RayJob")["spec"]["rayClusterSpec"]
    found = {"job": (job["spec"]["template"], job["spec"]["completions"]), "head": (cluster["headGroupSpec"]["template"], 1)}
    return found | {group["groupName"]: (group["template"], group["replicas"]) for group in cluster["workerGroupSpecs"]}


def container(template: dict[str, Any]) -> dict[str, Any]:
    [only] = template["spec"]["containers"]
    return dict(only)


def command(name: str) -> list[str]:
    """The words with which launch.sh is called."""
    if name == "RayJob":
        return shlex.split(one("RayJob")["spec"]["entrypoint"])
    only = container(one("Job")["spec"]["template"])
    return [*only["command"], *only["args"]]


def loaded(words: list[str]) -> tuple[Config, dict[str, str]]:
    """The config that a command names, with its --set, and its flags; everything must be what `segue train` takes."""
    train = get_command(app).commands["train"]  # type: ignore[attr-defined]
    flags = {flag for parameter in train.params for flag in parameter.opts}
    first, config, *rest = words
    assert (first, config.startswith(f"{IN_IMAGE}/configs/")) == (f"{IN_IMAGE}/launch.sh", True)
    given = list(zip(rest[::2], rest[1::2], strict=True))
    assert {flag for flag, _ in given} <= flags
    overrides = [value for flag, value in given if flag == "--set"]
    return load_config(ROOT / Path(config).relative_to(IN_IMAGE), overrides), dict(given)


@pytest.mark.parametrize("each", list(objects()), ids=lambda each: each["kind"])
def test_an_object_has_what_its_api_demands(each: dict[str, Any]) -> None:
    for key in REQUIRED[f"{each['apiVersion']} {each['kind']}"]:
        assert at(each, key) not in (None, [], ""), key
    assert re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", at(each, "metadata.name"))


@pytest.mark.parametrize("name", ["job", "head", "gpu", "cpu"])
def test_a_pod_mounts_what_there_is(name: str) -> None:
    template, _ = pods()[name]
    volumes = {volume["name"]: volume for volume in template["spec"]["volumes"]}
    mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in container(template)["volumeMounts"]}
    claim = one("PersistentVolumeClaim")
    assert mounts["/shared"]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    assert mounts["/dev/shm"]["emptyDir"]["medium"] == "Memory"
    uid = re.search(r"^USER (\d+)$", DOCKERFILE, re.MULTILINE)
    assert uid is not None and template["spec"]["securityContext"]["fsGroup"] == int(uid[1]), "else it cannot write the volume"


def test_all_pods_run_one_image() -> None:
    images = {container(template)["image"] for template, _ in pods().values()}
    assert len(images) == 1 and f"-t {images.pop()} ." in DOCKERFILE


@pytest.mark.parametrize("name", ["job", "head", "gpu", "cpu"])
def test_variables_are_ones_that_somebody_reads(name: str) -> None:
    read = set(
        re.findall(r"\b[A-Z][A-Z_]{4,}\b", (ROOT / "launch.sh").read_text() + (ROOT / "segue/cluster/cache.py").read_text())
    )
    read |= {"OMP_NUM_THREADS", "RAY_worker_niceness", "RAY_JOB_STOP_SIGNAL", "RAY_JOB_STOP_WAIT_TIME_S"}
    env = container(pods()[name][0])["env"]
    names = [variable["name"] for variable in env]
    used = re.findall(r"\$\((\w+)\)", str(env))
    assert set(names) <= read | set(used)
    for variable in env:
        assert ("value" in variable) != ("valueFrom" in variable)
        for needed in re.findall(r"\$\((\w+)\)", variable.get("value", "")):
            assert names.index(needed) < names.index(variable["name"]), "Kubernetes expands only what was named before"


@pytest.mark.parametrize("name", ["RayJob", "Job"])
def test_the_command_is_one_that_launch_sh_takes_and_writes_to_the_shared_volume(name: str) -> None:
    config, flags = loaded(command(name))
    assert flags["--run"].startswith("/shared/")
    assert config.cluster.ray == ("auto" if name == "RayJob" else "")
    files = one("ScrapeConfig")["spec"]["fileSDConfigs"][0]["files"]
    assert files == [f"{flags['--run']}/metrics/targets/*.json"], "Prometheus looks where the run writes"


def test_the_words_of_the_entrypoint_survive_two_shells() -> None:
    assert re.fullmatch(r"[\w/.= -]+", one("RayJob")["spec"]["entrypoint"])


@pytest.mark.parametrize(("kind", "names"), [("RayJob", ("head", "gpu", "cpu")), ("Job", ("job",))])
def test_the_roles_fit_on_the_pods(kind: str, names: tuple[str, ...]) -> None:
    hosts: list[HostFacts] = []
    for name in names:
        template, count = pods()[name]
        limits = container(template)["resources"]["limits"]
        gpus, cores = int(limits.get("nvidia.com/gpu", 0)), int(limits["cpu"])
        for _ in range(count):
            hosts.append(HostFacts(len(hosts), name, f"10.0.0.{len(hosts)}", "", "", "", "", "", cores, gpus))
    config = with_devices(loaded(command(kind))[0], sum(host.gpus for host in hosts))
    where = {seat.name: hosts[seat.host].name for seat in lay_out(config, hosts)}
    if kind == "RayJob":
        assert where == {"scheduler-0": "head", "learner-0": "gpu", "rollout-0": "gpu", "rollout-1": "gpu", "envpool-0": "cpu"}
    assert config.rollout.gpus == config.learner.gpus == 1.0, "no GPU is shared, and none is idle"


def test_the_ray_job_is_one_kuberay_takes() -> None:
    spec = one("RayJob")["spec"]
    cluster = spec["rayClusterSpec"]
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert f"ray=={cluster['rayVersion']}" in dependencies
    assert cluster["authOptions"] == {"mode": "token"} and Version(cluster["rayVersion"]) >= Version("2.52.0")
    assert cluster["enableInTreeAutoscaling"] is False
    assert spec["shutdownAfterJobFinishes"] or "ttlSecondsAfterFinished" not in spec
    for group in cluster["workerGroupSpecs"]:
        assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())
        assert "restartPolicy" not in group["template"]["spec"], "KubeRay's own default: a lost node of Ray is made anew"


def test_the_pods_of_the_job_find_each_other() -> None:
    service, job = one("Service"), one("Job")
    name, spec = job["metadata"]["name"], job["spec"]
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"].items() <= spec["template"]["metadata"]["labels"].items()
    assert spec["template"]["spec"]["subdomain"] == service["metadata"]["name"]
    env = {variable["name"]: variable for variable in container(spec["template"])["env"]}
    assert env["HEAD_ADDR"]["value"] == f"{name}-0.{service['metadata']['name']}.$(POD_NAMESPACE).svc.cluster.local"
    assert int(env["NUM_NODES"]["value"]) == spec["completions"] == spec["parallelism"]
    assert "job-completion-index" in env["NODE_RANK"]["valueFrom"]["fieldRef"]["fieldPath"]
    assert spec["completionMode"] == "Indexed"


def test_a_mistake_ends_the_job_and_a_lost_host_does_not() -> None:
    spec = one("Job")["spec"]
    assert spec["template"]["spec"]["restartPolicy"] == "Never", "a policy of failures demands it"
    codes = {rule["action"]: rule["onExitCodes"] for rule in spec["podFailurePolicy"]["rules"] if "onExitCodes" in rule}
    assert codes == {"FailJob": {"containerName": container(spec["template"])["name"], "operator": "In", "values": [2]}}
    assert spec["backoffLimit"] > 0


def test_prometheus_finds_rays_metrics() -> None:
    monitor = one("PodMonitor")["spec"]
    [port] = [endpoint["port"] for endpoint in monitor["podMetricsEndpoints"]]
    for name in ("head", "gpu", "cpu"):
        template, _ = pods()[name]
        labels = template["metadata"]["labels"]
        assert monitor["selector"]["matchLabels"].items() <= labels.items()
        [expression] = monitor["selector"]["matchExpressions"]
        assert labels[expression["key"]] in expression["values"]
        assert port in [each["name"] for each in container(template)["ports"]]


def test_the_image_is_what_the_manifests_need() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    base = re.search(r"^FROM python:(\d+\.\d+)-", DOCKERFILE, re.MULTILINE)
    assert base is not None
    low, high = (Version(bound.strip("<>=")) for bound in project["requires-python"].split(","))
    assert low <= Version(base[1]) < high and f"PYTHON=python{base[1]}" in DOCKERFILE
    assert f"WORKDIR {IN_IMAGE}\n" in DOCKERFILE and f"ENV PATH={IN_IMAGE}/.venv/bin:$PATH" in DOCKERFILE
    assert "./launch.sh --install-only" in DOCKERFILE and "ENV SEGUE_DEVICE=gpu" in DOCKERFILE
    ignored = (FOLDER / "Dockerfile.dockerignore").read_text().splitlines()
    assert {".venv", "runs", ".cache"} <= set(ignored)
