"""The recipes: files that schemas and linters accept, and whose commands and settings raysim knows."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from fnmatch import fnmatch
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import typer
from jsonschema import Draft202012Validator
from ruamel.yaml import YAML

from raysim.cli import app
from raysim.config import load_config
from raysim.sweep.settings import load_sweep

REPOSITORY = Path(__file__).parents[2]
CLUSTER = REPOSITORY / "cluster"
IMAGE_FOLDER = "/home/ray/raysim/"
DOCKERFILE = (CLUSTER / "Dockerfile").read_text(encoding="utf-8")
README = (CLUSTER / "README.md").read_text(encoding="utf-8")

# Fields of KubeRay's ray.io/v1 (ray-operator/apis/ray/v1/{rayjob,raycluster}_types.go) and of Kubernetes' core/v1
# (API reference, PodTemplateSpec), as far as the recipes use them; anything else is a typing error or has to be looked up.
AMOUNTS = {"cpu": str, "memory": str, "nvidia.com/gpu": str}
CONTAINER = {
    "name": str,
    "image": str,
    "resources": {"requests": AMOUNTS, "limits": AMOUNTS},
    "env": [{"name": str, "value": str}],
    "ports": [{"containerPort": int, "name": str}],
    "volumeMounts": [{"name": str, "mountPath": str, "readOnly": bool}],
}
VOLUME = {
    "name": str,
    "emptyDir": {"medium": str, "sizeLimit": str},
    "persistentVolumeClaim": {"claimName": str, "readOnly": bool},
}
USER = {"runAsUser": int, "runAsGroup": int, "fsGroup": int, "runAsNonRoot": bool}
POD = {"spec": {"securityContext": USER, "containers": [CONTAINER], "volumes": [VOLUME]}}
WORKERS = {
    "groupName": str,
    "labels": {...: str},
    "replicas": int,
    "minReplicas": int,
    "maxReplicas": int,
    "rayStartParams": {...: str},
    "template": POD,
}
RAY_CLUSTER = {
    "rayVersion": str,
    "authOptions": {"mode": str},
    "headGroupSpec": {"rayStartParams": {...: str}, "template": POD},
    "workerGroupSpecs": [WORKERS],
}
RAY_JOB = {
    "entrypoint": str,
    "submissionMode": str,
    "backoffLimit": int,
    "shutdownAfterJobFinishes": bool,
    "ttlSecondsAfterFinished": int,
    "activeDeadlineSeconds": int,
    "rayClusterSpec": RAY_CLUSTER,
}
CLAIM = {"accessModes": [str], "resources": {"requests": {"storage": str}}}
KINDS = {
    "RayCluster": ("ray.io/v1", RAY_CLUSTER),
    "RayJob": ("ray.io/v1", RAY_JOB),
    "PersistentVolumeClaim": ("v1", CLAIM),
}


def read(path: Path) -> list[dict[str, Any]]:
    return list(YAML(typ="safe", pure=True).load_all(path.read_text(encoding="utf-8")))


def misfits(value: Any, shape: Any, place: str = "spec") -> Iterator[str]:
    """What in a value is not of a shape: `{key: shape}`, `{...: shape}` for any keys, `[shape]`, or a type."""
    if isinstance(shape, dict):
        for key, below in value.items():
            if key not in shape and ... not in shape:
                yield f"{place}.{key}: unknown"
            else:
                yield from misfits(below, shape.get(key, shape.get(...)), f"{place}.{key}")
    elif isinstance(shape, list):
        for i, below in enumerate(value):
            yield from misfits(below, shape[0], f"{place}[{i}]")
    elif type(value) is not shape:
        yield f"{place}: {value!r} is no {shape.__name__}"


def test_a_wrong_field_or_type_is_a_misfit() -> None:
    shape = {"a": [{"b": int}], "c": {...: str}}
    assert list(misfits({"a": [{"b": 1}], "c": {"x": "y"}}, shape)) == []
    wrong = {"a": [{"b": True, "d": 1}], "c": {"x": 2}, "e": 0}
    assert [text.partition(":")[0] for text in misfits(wrong, shape)] == [
        *("spec.a[0].b", "spec.a[0].d", "spec.c.x", "spec.e"),
    ]


@pytest.mark.parametrize("path", sorted((CLUSTER / "kuberay").glob("*.yaml")), ids=lambda path: path.name)
def test_kubernetes_knows_every_field(path: Path) -> None:
    for document in read(path):
        api, shape = KINDS[document["kind"]]
        assert document["apiVersion"] == api
        assert list(misfits(document["spec"], shape)) == []
        assert re.fullmatch("[a-z0-9]([a-z0-9-]{0,45}[a-z0-9])?", document["metadata"]["name"])


def ray_clusters() -> list[dict[str, Any]]:
    (job,), (cluster,) = (read(CLUSTER / "kuberay" / f"{name}.yaml") for name in ("rayjob", "raycluster"))
    return [job["spec"]["rayClusterSpec"], cluster["spec"]]


def test_every_pod_has_shared_memory_results_and_a_user() -> None:
    claims = {claim["metadata"]["name"] for claim in read(CLUSTER / "kuberay" / "storage.yaml")}
    for cluster in ray_clusters():
        head, workers = cluster["headGroupSpec"], cluster["workerGroupSpecs"]
        assert head["rayStartParams"]["num-cpus"] == "0"
        assert cluster["authOptions"] == {"mode": "token"}
        assert {"raysim-role": "scorer"} in [group["labels"] for group in workers]
        for group in (head, *workers):
            pod = group["template"]["spec"]
            assert pod["securityContext"]["runAsNonRoot"] is True
            volumes = {volume["name"]: volume for volume in pod["volumes"]}
            (container,) = pod["containers"]
            mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in container["volumeMounts"]}
            assert mounts["/dev/shm"]["emptyDir"]["medium"] == "Memory"
            # The driver alone reads data and writes results, on the head.
            mounted = {v["persistentVolumeClaim"]["claimName"] for k, v in mounts.items() if k != "/dev/shm"}
            assert mounted == (claims if group is head else set())
            # Ray takes 30 % of the pod's memory for the store, which lies in that volume.
            size, memory = (
                int(text.removesuffix("Gi"))
                for text in (mounts["/dev/shm"]["emptyDir"]["sizeLimit"], container["resources"]["limits"]["memory"])
            )
            assert size >= 0.3 * memory
        environment = {entry["name"]: entry["value"] for entry in head["template"]["spec"]["containers"][0]["env"]}
        mounted = [mount["mountPath"] for mount in head["template"]["spec"]["containers"][0]["volumeMounts"]]
        for name in ("RAYSIM_OUTPUT_DIR", "RAYSIM_DATA_ROOT"):
            assert any(environment[name].startswith(path) for path in mounted)
    assert ray_clusters()[0] == ray_clusters()[1], "a run of its own and a cluster that stays have the same nodes"


def test_the_launcher_takes_its_file() -> None:
    import ray

    schema = json.loads((Path(ray.__file__).parent / "autoscaler" / "ray-schema.json").read_text())
    (cluster,) = read(CLUSTER / "ray-up.yaml")
    assert [error.message for error in Draft202012Validator(schema).iter_errors(cluster)] == []
    types = cluster["available_node_types"]
    assert types[cluster["head_node_type"]]["resources"] == {"CPU": 0}
    assert types["scorer"]["labels"] == {"raysim-role": "scorer"}
    assert cluster["max_workers"] == sum(kind.get("max_workers", 0) for kind in types.values())
    assert {"--shm-size=16g", "nofile=65536:65536"} < set(cluster["docker"]["run_options"])
    starts = cluster["head_start_ray_commands"] + cluster["worker_start_ray_commands"]
    assert all("RAY_AUTH_MODE=token" in start for start in starts if "ray start" in start)


@pytest.mark.parametrize("script", ["local.sh", "slurm.sbatch"])
def test_scripts_have_no_shellcheck_findings(script: str) -> None:
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed")
    found = subprocess.run(["shellcheck", CLUSTER / script], capture_output=True, text=True)
    assert found.returncode == 0, found.stdout


def test_the_dockerfile_has_no_hadolint_findings() -> None:
    if shutil.which("hadolint") is None:
        pytest.skip("hadolint is not installed")
    found = subprocess.run(["hadolint", "--no-color", CLUSTER / "Dockerfile"], capture_output=True, text=True)
    assert found.returncode == 0, found.stdout


def test_the_image_has_the_versions_that_raysim_asks_for() -> None:
    from packaging.requirements import Requirement

    arguments = dict(re.findall(r'^ARG (\w+)="?([^"\n]*)', DOCKERFILE, re.MULTILINE))
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    wanted = {Requirement(text).name: Requirement(text).specifier for text in project["dependencies"]}
    ray, python, _ = arguments["RAY"].split("-")
    assert ray in wanted["ray"]
    assert python == "py311"
    assert arguments["TORCH"] in wanted["torch"]
    assert arguments["TORCHVISION"] in wanted["torchvision"]
    assert {cluster["rayVersion"] for cluster in ray_clusters()} == {ray}
    assert re.findall(r"^USER (.*)", DOCKERFILE, re.MULTILINE)[-1] == "1000"
    assert version("ray").split(".")[0] == ray.split(".")[0]


def test_the_image_gets_what_it_copies() -> None:
    """Each source exists, and the ignore file, where everything is out but what follows a `!`, lets it through."""
    kept = [line[1:] for line in (CLUSTER / "Dockerfile.dockerignore").read_text().splitlines() if line[:1] == "!"]
    sources = [word for line in re.findall(r"^COPY (.*)", DOCKERFILE, re.MULTILINE) for word in line.split()[:-1]]
    assert sources
    for source in sources:
        assert (REPOSITORY / source).exists()
        assert any(fnmatch(source, pattern) for pattern in kept)


def commands() -> list[str]:
    """Every `raysim` command in a shell block of the README, and those of the recipes."""
    blocks = "\n".join(re.findall(r"```bash\n(.*?)```", README, re.DOTALL)).replace("\\\n", " ")
    inline = re.findall(r"`(raysim [^`]*)`", README)
    lines = [line.partition(" #")[0] for line in blocks.splitlines()]
    found = [line[line.index("raysim ") :] for line in lines if re.search(r"(^| -- +)raysim ", line)]
    entrypoint = read(CLUSTER / "kuberay" / "rayjob.yaml")[0]["spec"]["entrypoint"]
    inside = re.search(r'raysim "\$@" (.*) \|\|', (CLUSTER / "slurm.sbatch").read_text(encoding="utf-8"))
    assert inside is not None
    given = [f"raysim run configs/fashion_mnist_300.yaml {inside[1]}", entrypoint]
    return sorted({" ".join(command.split()) for command in (*found, *inline, *given) if command.count(" ") > 1})


@pytest.mark.parametrize("command", commands())
def test_raysim_knows_the_command(command: str) -> None:
    """Its options exist, its file does, and the settings on it are accepted."""
    _, name, *arguments = shlex.split(command)
    group: Any = typer.main.get_command(app)
    assert name in group.commands, f"raysim {name}"
    context = group.commands[name].make_context(name, list(arguments))
    file = str(context.params.get("file") or "").removeprefix(IMAGE_FOLDER)
    if file.startswith("configs/"):
        load: Any = load_sweep if name == "sweep" else load_config
        load(REPOSITORY / file, context.params["overrides"] or [])
