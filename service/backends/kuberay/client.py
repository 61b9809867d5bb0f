"""Requests to the API server of Kubernetes, in one namespace; objects are plain dicts.

Whatever an administrator or time mends (no answer, 5xx, 429, 401, missing rights, a used-up quota,
a missing CRD) raises `BackendUnreachable`: nothing is concluded from it, and the request is sent
again later. `KubeRefused` is a clear refusal of the request itself.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import urllib3
import yaml
from kubernetes import client, config
from kubernetes.client.exceptions import ApiException
from kubernetes.watch.watch import iter_resp_lines

from service.backends.kuberay.manifest import Manifest
from service.errors import BackendUnreachable

_MAX_ERROR_CHARS = 500
_LOG_SILENCE_S = 60.0
_MERGE_PATCH = "application/merge-patch+json"
# Of statuses that blame a request, those that tell to send it again.
_NOT_NOW = (408, 425, 429)
# What reading a kubeconfig of another form raises.
_UNREADABLE = (AttributeError, OSError, TypeError, ValueError)


@dataclass(frozen=True)
class Resource:
    """A kind of object in one namespace."""

    prefix: str
    plural: str
    crd: str = ""

    def path(self, namespace: str, name: str | None = None) -> str:
        """The path of the collection, or of one object."""
        parts = [self.prefix, "namespaces", namespace, self.plural, name]
        return "/".join(part for part in parts if part)


RAYJOBS = Resource("/apis/ray.io/v1", "rayjobs", crd="rayjobs.ray.io")
SECRETS = Resource("/api/v1", "secrets")
PODS = Resource("/api/v1", "pods")
EVENTS = Resource("/api/v1", "events")
JOBS = Resource("/apis/batch/v1", "jobs")
CRONJOBS = Resource("/apis/batch/v1", "cronjobs")
_LOGS = Resource("/api/v1", "pods/log")


class KubeRefused(Exception):
    """The API server understood a request and said no; `status` is that of HTTP."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason

    @property
    def is_missing(self) -> bool:
        return self.status == 404

    @property
    def is_conflict(self) -> bool:
        """Whether the object is there already, or has changed."""
        return self.status == 409


class KubeApi:
    """The API server that a kubeconfig, or the pod that we run in, names; one namespace of it.

    Every request ends within `timeout_s` seconds.
    """

    def __init__(self, configuration: client.Configuration, namespace: str, timeout_s: float):
        # We send again ourselves, at the next poll; a poll must not take four time-outs.
        configuration.retries = False
        self.address = str(configuration.host)
        self.namespace = namespace
        self._timeout_s = timeout_s
        self._client = client.ApiClient(configuration)

    @classmethod
    def open(cls, kubeconfig: Path | None, namespace: str, timeout_s: float) -> KubeApi:
        """With a kubeconfig, else as the pod that we run in; raises `BackendUnreachable`."""
        configuration = client.Configuration()
        try:
            if kubeconfig:
                config.load_kube_config(str(kubeconfig), client_configuration=configuration)
            else:
                config.load_incluster_config(client_configuration=configuration)
        except (*_UNREADABLE, yaml.YAMLError, config.ConfigException) as error:
            where = kubeconfig or "the service account of this pod"
            raise BackendUnreachable(
                f"no access to Kubernetes by {where} ({error}); set SHARDLOOM_KUBECONFIG or "
                "KUBECONFIG, or mount the token of the service account"
            ) from error
        return cls(configuration, namespace, timeout_s)

    def close(self) -> None:
        self._client.close()

    def get(self, resource: Resource, name: str) -> Manifest:
        return self._json("get", resource, name)

    def list(self, resource: Resource, **query: str) -> Manifest:
        """A list object, with its `items` and `metadata.resourceVersion`."""
        return self._json("list", resource, query=query)

    def create(self, resource: Resource, manifest: Mapping[str, Any]) -> Manifest:
        """Create an object; unknown fields are refused."""
        query = {"fieldValidation": "Strict"}
        return self._json("create", resource, query=query, body=manifest)

    def create_new(self, resource: Resource, manifest: Mapping[str, Any]) -> bool:
        """Create an object unless one has its name; whether it was made."""
        try:
            self.create(resource, manifest)
        except KubeRefused as error:
            # Other conflicts (a quota that two write at once) leave none.
            if error.reason != "AlreadyExists":
                raise
            return False
        return True

    def patch(self, resource: Resource, name: str, change: Mapping[str, Any]) -> Manifest:
        """Merge a change into an object."""
        return self._json("patch", resource, name, body=change)

    def delete(self, resource: Resource, name: str, uid: str) -> None:
        """Delete what an object owns, and then itself; one that is not there is no error.

        As long as it is there, so may be its pods.
        """
        body = {"propagationPolicy": "Foreground", "preconditions": {"uid": uid}}
        try:
            self._json("delete", resource, name, body=body)
        except KubeRefused as error:
            if not error.is_missing:
                raise

    def version(self) -> str:
        """The version of Kubernetes, as in v1.33.1."""
        with self._answer("get", Resource("", "/version"), "/version") as response:
            return str(_object(response.data).get("gitVersion", "of an unknown version"))

    @contextmanager
    def watch(
        self, resource: Resource, version: str, selector: str, duration_s: int
    ) -> Iterator[Iterator[Manifest]]:
        """Events after a resource version, for at most `duration_s` seconds."""
        query = {
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": version,
            "labelSelector": selector,
            "timeoutSeconds": str(duration_s),
        }
        # A server that is cut off says nothing: no event for longer than this is no watch.
        timeout = (self._timeout_s, duration_s + self._timeout_s)
        path = resource.path(self.namespace)
        with self._answer("watch", resource, path, query=query, timeout=timeout) as response:
            yield (json.loads(line) for line in iter_resp_lines(response) if line.strip())

    def log(self, pod: str, since: str = "") -> Iterator[tuple[str, str]]:
        """(Time, line) of the log of a pod's only container until it ends, with `since` from there.

        A line that was told at that time or before is left out, so that a stream which breaks can
        be taken up where it was. A pod that is gone, or was evicted before its container ran, has
        no lines.
        """
        query = {"follow": "true", "timestamps": "true"} | ({"sinceTime": since} if since else {})
        path = PODS.path(self.namespace, f"{pod}/log")
        # It is silent for as long as the container is.
        timeout = (self._timeout_s, _LOG_SILENCE_S)
        told = self._answer("get", _LOGS, path, query=query, timeout=timeout)
        with suppress(KubeRefused), told as response:
            for line in iter_resp_lines(response):
                time_text, _, text = line.partition(" ")
                if time_text > since:
                    yield time_text, text

    # ---- one request

    def _json(
        self,
        verb: str,
        resource: Resource,
        name: str | None = None,
        *,
        query: Mapping[str, str] | None = None,
        body: Mapping[str, Any] | None = None,
    ) -> Manifest:
        path = resource.path(self.namespace, name)
        with self._answer(verb, resource, path, query=query, body=body) as response:
            return _object(response.data)

    @contextmanager
    def _answer(
        self,
        verb: str,
        resource: Resource,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: Mapping[str, Any] | None = None,
        timeout: tuple[float, float] | None = None,
    ) -> Iterator[urllib3.HTTPResponse]:
        content = _MERGE_PATCH if verb == "patch" else "application/json"
        try:
            response = self._client.call_api(
                path,
                _METHODS.get(verb, "GET"),
                query_params=list((query or {}).items()),
                header_params={"Accept": "application/json, */*", "Content-Type": content},
                body=body,
                auth_settings=["BearerToken"],
                _preload_content=False,
                _return_http_data_only=True,
                _request_timeout=timeout or self._timeout_s,
            )
            with closing(response):
                yield response
        except ApiException as error:
            raise self._fault(error, verb, resource) from error
        except (config.ConfigException, urllib3.exceptions.HTTPError, OSError) as error:
            cause = str(error) or type(error).__name__
            raise BackendUnreachable(
                f"no answer from Kubernetes at {self.address} ({cause[:_MAX_ERROR_CHARS]}); is its "
                "API server up, and open to this service?"
            ) from error

    def _fault(self, error: ApiException, verb: str, resource: Resource) -> Exception:
        status, body = int(error.status or 0), _object(error.body)
        message = str(body.get("message") or error.body or error.reason)[:_MAX_ERROR_CHARS]
        known = _explained(status, body, message, verb, resource, self.namespace)
        if known:
            return BackendUnreachable(known)
        # Or it is a proxy's, as a redirect to its sign-in: Kubernetes says what it refuses.
        is_clear = 400 <= status < 500 and body.get("kind") == "Status"
        if not is_clear or status in _NOT_NOW:
            return BackendUnreachable(
                f"Kubernetes at {self.address} cannot {verb} {resource.plural} now "
                f"(HTTP {status}: {message})"
            )
        return KubeRefused(status, str(body.get("reason", "")), message)


# Other verbs only read.
_METHODS = {"create": "POST", "patch": "PATCH", "delete": "DELETE"}


def _explained(
    status: int, body: Manifest, message: str, verb: str, resource: Resource, namespace: str
) -> str | None:
    """What an administrator has to mend, where it is something of theirs; else None."""
    if status == 401:
        return (
            f"Kubernetes does not know our token (HTTP 401: {message}); renew the kubeconfig, if "
            "there is one, and start the service again, which reads it at its start only"
        )
    if status == 403:
        return _forbidden(message, verb, resource, namespace)
    details = body.get("details") or {}
    # About the kind: a 404 about one object gives its name.
    if status == 404 and resource.crd and not details.get("name"):
        return (
            f"Kubernetes does not know {resource.plural}: the CRD {resource.crd} is missing; "
            "install KubeRay v1.7.0"
        )
    if status == 404 and details.get("kind") == "namespaces":
        return f"the namespace {namespace} is missing ({message}); SHARDLOOM_KUBERAY_NAMESPACE"
    return None


def _forbidden(message: str, verb: str, resource: Resource, namespace: str) -> str | None:
    if "exceeded quota" in message:
        return f"the quota of namespace {namespace} is used up, trying again: {message}"
    if "being terminated" in message:
        return f"the namespace {namespace} is being deleted: {message}"
    # Of a webhook, and of a ValidatingAdmissionPolicy.
    if "denied the request" in message or "denied request" in message:
        return None
    how = " to its service account, as the chart does with ownClusters.enabled"
    return (
        f"no right to {verb} {resource.plural} in namespace {namespace}: grant the verb "
        f"'{verb}' on '{resource.plural}'{how if resource.crd else ''} ({message})"
    )


def _object(data: bytes | str | None) -> Manifest:
    try:
        found = json.loads(data or "{}")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
