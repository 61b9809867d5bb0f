"""The file tree that a Dockerfile makes, made by its own steps without a container engine.

Each stage is an overlay over this machine's root, which stands for the Python image that a stage
begins with: same Python version, other Debian. Sources come from the context that `.dockerignore`
lets through, RUN steps run in a chroot with the environment that ENV and ARG give, and what they
write stays in the overlay. All mounts live in a namespace of their own, which ends with the tree.

FROM, ARG, ENV, COPY, RUN with bind, cache and secret mounts, WORKDIR, USER, CMD, HEALTHCHECK,
LABEL, EXPOSE and STOPSIGNAL are known; any other instruction is an error.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self

from docker.utils.build import exclude_paths
from dockerfile_parse import DockerfileParser

_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)(?:(:[+-])([^}]*))?\})")
_MOUNT = re.compile(r"--mount=(\S+)\s+")
# What a step may see of this machine: how packages are downloaded here.
_PASSED = ("PIP_", "SSL_CERT", "REQUESTS_CA", "HTTP_PROXY", "HTTPS_PROXY")
_STEP_TIMEOUT_S = 300
LOCKED_PYTHON = "3.11"


def expand(text: str, values: Mapping[str, str]) -> str:
    """`text` with $NAME, ${NAME}, ${NAME:+WORD} and ${NAME:-WORD} replaced as an engine does."""

    def _value(found: re.Match[str]) -> str:
        value, kind, word = values.get(found[1] or found[2], ""), found[3], found[4]
        if kind == ":+":
            return word if value else ""
        return value or word if kind == ":-" else value

    return _VARIABLE.sub(_value, text)


def instructions_of(dockerfile: Path) -> list[tuple[str, str]]:
    """(instruction, what it says) in order, lines joined, without comments."""
    with dockerfile.open("rb") as file:
        found = DockerfileParser(fileobj=file).structure
    return [
        (each["instruction"], each["value"]) for each in found if each["instruction"] != "COMMENT"
    ]


def context_files(context: Path) -> set[str]:
    """What `.dockerignore` lets through to an engine, as relative paths."""
    lines = (context / ".dockerignore").read_text().splitlines()
    patterns = [line for line in lines if line and not line.startswith("#")]
    return exclude_paths(str(context), patterns)


@dataclass(frozen=True)
class Image:
    """What a stage says of what is run from it."""

    env: Mapping[str, str] = field(default_factory=dict)
    user: str = "0:0"
    workdir: str = "/"
    command: tuple[str, ...] = ()
    healthcheck: tuple[str, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    ports: tuple[str, ...] = ()
    stop_signal: str = "SIGTERM"


class _Namespace:
    """A mount namespace that lives until it is closed."""

    def __init__(self) -> None:
        self._holder = subprocess.Popen(
            ["unshare", "--mount", "--propagation", "private", "sleep", "infinity"]
        )
        ours = Path("/proc/self/ns/mnt").readlink()
        deadline = time.monotonic() + 10
        while Path(f"/proc/{self._holder.pid}/ns/mnt").readlink() == ours:
            assert self._holder.poll() is None, "unshare makes no mount namespace here"
            assert time.monotonic() < deadline, "unshare makes no mount namespace here in time"
            time.sleep(0.01)

    def command(self, command: Sequence[str]) -> list[str]:
        """A command that runs in the namespace."""
        return ["nsenter", "--mount", f"--target={self._holder.pid}", *command]

    def run(self, *command: str) -> None:
        """Run a command in the namespace; raises with what it said."""
        done = subprocess.run(
            self.command(command), capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, f"{shlex.join(command)}: {done.stderr}"

    def close(self) -> None:
        """End it, and all of its mounts."""
        self._holder.kill()
        self._holder.wait()


class DockerfileTree:
    """The tree of one stage of a Dockerfile; `folder` is an empty one to work in."""

    def __init__(
        self, dockerfile: Path, context: Path, folder: Path, args: Mapping[str, str] | None = None
    ) -> None:
        self.image = Image()
        self.steps: list[str] = []
        self._args = dict(args or {})
        self._globals: dict[str, str] = {}
        self._values: dict[str, str] = {}
        self._folder = folder
        self._layers: dict[str, list[Path]] = {}
        self._images: dict[str, Image] = {}
        self._context = folder / "context"
        self._dockerfile = dockerfile
        self._stage = ""
        self._send_context(context)
        (folder / "stages").mkdir(parents=True)
        self._namespace = _Namespace()
        try:
            # Not on the disk of the root that it lies over, which an overlay refuses.
            self._namespace.run("mount", "-t", "tmpfs", "tmpfs", str(folder / "stages"))
        except BaseException:
            self._namespace.close()  # nobody else does before the tree is made
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._namespace.close()

    # ---- the steps

    def build(self) -> None:
        """Make every stage in order; raises `AssertionError` with the output of a failed step."""
        for instruction, said in instructions_of(self._dockerfile):
            self.steps.append(instruction)
            getattr(self, f"_do_{instruction.lower()}")(said)
        self._remount(self.root, "ro")

    @property
    def root(self) -> Path:
        """Where the tree of the current stage is, in the namespace."""
        return self._folder / "stages" / self._stage / "merged"

    def _do_from(self, said: str) -> None:
        base, _, name = expand(said, self._globals).partition(" AS ")
        self._stage = name or "last"
        folder = self._folder / "stages" / self._stage
        upper, work = folder / "upper", folder / "work"
        self._namespace.run("mkdir", "-p", str(upper), str(work), str(self.root))
        lower = self._layers.get(base, [])
        stack = ":".join([*map(str, lower), "/"])
        options = f"lowerdir={stack},upperdir={upper},workdir={work}"
        self._namespace.run("mount", "-t", "overlay", "overlay", "-o", options, str(self.root))
        self._layers[self._stage] = [upper, *lower]
        self.image = self._images.get(base, Image(env={"PATH": self._path()}))
        self._values = {}
        self._furnish(is_first=base not in self._images)
        self._images[self._stage] = self.image

    def _do_arg(self, said: str) -> None:
        name, _, default = said.partition("=")
        known = self._values if self._stage else self._globals
        outer = self._globals if self._stage and "=" not in said else {}
        known[name] = self._args.get(name, outer.get(name, expand(default, known)))

    def _do_env(self, said: str) -> None:
        pairs = dict(each.split("=", 1) for each in shlex.split(expand(said, self._scope())))
        self._set(env={**self.image.env, **pairs})

    def _do_label(self, said: str) -> None:
        pairs = dict(each.split("=", 1) for each in shlex.split(expand(said, self._scope())))
        self._set(labels={**self.image.labels, **pairs})

    def _do_copy(self, said: str) -> None:
        *sources, target = shlex.split(expand(said, self._scope()))
        place = str(self.root) + str(Path(self.image.workdir) / target)
        if sources[0].startswith("--from="):
            stage, source = sources[0].removeprefix("--from="), sources[1].strip("/")
            made = self._folder / "stages" / stage / "merged" / source
            self._namespace.run("mkdir", "-p", str(Path(place).parent))
            self._namespace.run("cp", "-rT", str(made), place)
            return
        for source in sources:
            found = self._context / source
            assert found.exists(), f"COPY {said}: {source} is not in the context"
            if found.is_dir():  # what it holds
                self._namespace.run("cp", "-rT", str(found), place)
            else:
                end = f"{place}/{found.name}" if target.endswith("/") else place
                self._namespace.run("install", "-D", "--mode=0644", str(found), end)

    def _do_run(self, said: str) -> None:
        command = said
        while mount := _MOUNT.match(command):
            self._mount(dict(part.split("=", 1) for part in mount[1].split(",")))
            command = command[mount.end() :]
        done = subprocess.run(
            self.command(["/bin/sh", "-c", command], environment=self._build_environment()),
            capture_output=True,
            text=True,
            timeout=_STEP_TIMEOUT_S,
            check=False,
        )
        assert done.returncode == 0, f"RUN {command}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"

    def _do_workdir(self, said: str) -> None:
        self._set(workdir=expand(said, self._scope()))
        self._namespace.run("mkdir", "-p", str(self.root / self.image.workdir.lstrip("/")))

    def _do_user(self, said: str) -> None:
        self._set(user=said)

    def _do_expose(self, said: str) -> None:
        self._set(ports=tuple(said.split()))

    def _do_stopsignal(self, said: str) -> None:
        self._set(stop_signal=said)

    def _do_cmd(self, said: str) -> None:
        self._set(command=tuple(json.loads(said)))

    def _do_healthcheck(self, said: str) -> None:
        self._set(healthcheck=tuple(json.loads(said.partition("CMD")[2])))

    # ---- what they need

    def command(
        self,
        command: Sequence[str],
        *,
        user: str = "0:0",
        environment: Mapping[str, str] | None = None,
        prefix: Sequence[str] = (),
    ) -> list[str]:
        """A command that runs in the tree, with `environment` and no other variables."""
        given = dict(self.image.env) if environment is None else environment
        clean = ["/usr/bin/env", "-i", "-C", self.image.workdir]
        clean += [f"{name}={value}" for name, value in given.items()]
        chroot = ["chroot", f"--userspec={user}", str(self.root)]
        return self._namespace.command([*prefix, *chroot, *clean, *command])

    def mount_writable(self, path: str, *, user: str = "1000:1000") -> None:
        """An empty volume of that user at a path of the tree, which itself is read-only."""
        owner, _, group = user.partition(":")
        options = f"uid={owner},gid={group},mode=0755"
        self._namespace.run("mount", "-t", "tmpfs", "-o", options, "tmpfs", self._at(path))

    def bind_file(self, source: Path, path: str) -> None:
        """A file or socket of this machine at a path of the tree where one can be made."""
        self._namespace.run("install", "-D", "--mode=0666", "/dev/null", self._at(path))
        self._namespace.run("mount", "--bind", str(source), self._at(path))

    def _at(self, path: str) -> str:
        return str(self.root / path.lstrip("/"))

    def _set(self, **changes: object) -> None:
        self.image = replace(self.image, **changes)  # type: ignore[arg-type]
        self._images[self._stage] = self.image

    def _scope(self) -> dict[str, str]:
        return {**self._values, **self.image.env}

    def _build_environment(self) -> dict[str, str]:
        ours = {key: value for key, value in os.environ.items() if key.startswith(_PASSED)}
        return {"HOME": "/root", **ours, **self._scope()}

    def _send_context(self, context: Path) -> None:
        for name in context_files(context):
            if (context / name).is_file():
                sent = self._context / name
                sent.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(context / name, sent)

    def _furnish(self, *, is_first: bool) -> None:
        """What an engine mounts, and a Python that every user may run."""
        self._namespace.run("mount", "-t", "proc", "proc", self._at("/proc"))
        self._namespace.run("mount", "--rbind", "/dev", self._at("/dev"))
        self._namespace.run("mount", "-t", "tmpfs", "-o", "mode=1777", "tmpfs", self._at("/tmp"))
        if is_first:
            # Python may be below a home that other users may not enter.
            for folder in [*_python_folder().parents][:-1]:
                self._namespace.run("chmod", "a+x", self._at(str(folder)))
            for name in ("passwd", "group"):  # people of this machine are none of the image
                own = f"awk -F: '$3 < 1000 || $3 == 65534' /etc/{name}"
                script = f"{own} >/etc/{name}.own && mv /etc/{name}.own /etc/{name}"
                self._namespace.run("chroot", str(self.root), "/bin/sh", "-c", script)

    def _mount(self, options: Mapping[str, str]) -> None:
        kind, target = options["type"], options["target"]
        assert "from" not in options, "mounts of other stages are not known here"
        if kind == "secret":  # may be absent, and is
            return
        if kind == "cache":
            source = self._folder / "cache"
            source.mkdir(exist_ok=True)
        else:
            source = self._context / options["source"]
        self._namespace.run("mkdir", "-p", self._at(target))
        self._namespace.run("mount", "--bind", str(source), self._at(target))

    def _remount(self, path: Path, options: str) -> None:
        self._namespace.run("mount", "-o", f"remount,{options}", str(path))

    @staticmethod
    def _path() -> str:
        return f"{_python_folder()}:/usr/local/bin:/usr/bin:/usr/sbin:/bin:/sbin"


def _python_folder() -> Path:
    return Path(sys._base_executable).resolve().parent  # type: ignore[attr-defined]


def why_not() -> str | None:
    """Why no tree can be made here; None where it can."""
    if os.geteuid() != 0:
        return "only root may mount an overlay"
    missing = [each for each in ("unshare", "nsenter", "chroot") if shutil.which(each) is None]
    if missing:
        return f"{', '.join(missing)} is not installed"
    absent = [each for each in ("python", "pip") if not (_python_folder() / each).exists()]
    if absent:
        return f"{_python_folder()} has no {', '.join(absent)}"
    if f"{sys.version_info.major}.{sys.version_info.minor}" != LOCKED_PYTHON:
        return f"the locks are for Python {LOCKED_PYTHON}"
    return _why_no_overlay()


def _why_no_overlay() -> str | None:
    """Tries it: root in a container may lack what mounting needs."""
    made = "mkdir l u w m && mount -t overlay o -o lowerdir=l,upperdir=u,workdir=w m"
    script = f"mount -t tmpfs t /mnt && cd /mnt && {made}"
    done = subprocess.run(
        ["unshare", "--mount", "--propagation", "private", "/bin/sh", "-ec", script],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    return None if done.returncode == 0 else f"no overlay can be mounted: {done.stderr.strip()}"
