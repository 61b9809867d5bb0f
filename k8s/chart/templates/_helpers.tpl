{{- define "shardloom.labels" -}}
app.kubernetes.io/name: shardloom
app.kubernetes.io/part-of: shardloom
{{- end }}

{{- define "shardloom.meta" -}}
name: {{ .name }}
namespace: {{ .namespace | default .root.Release.Namespace }}
labels:
  {{- include "shardloom.labels" .root | nindent 2 }}
  app.kubernetes.io/component: {{ .component }}
  app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
  app.kubernetes.io/managed-by: {{ .root.Release.Service }}
  helm.sh/chart: shardloom-{{ .root.Chart.Version }}
{{- end }}

{{- define "shardloom.podLabels" -}}
{{ include "shardloom.labels" .root }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{- /* An image of ours: .root, .image (of values). */}}
{{- define "shardloom.image" -}}
{{- $registry := .root.Values.images.registry | required "images.registry: set the registry and folder that your images were pushed to (make images PUSH=1 REPOSITORY=...), as in registry.example/shardloom" -}}
{{- $image := get .root.Values.images .image -}}
{{ $registry }}/{{ $image.name }}{{ if $image.digest }}@{{ $image.digest }}{{ else }}:{{ $image.tag | default .root.Chart.AppVersion }}{{ end }}
{{- end }}

{{- define "shardloom.podBase" -}}
automountServiceAccountToken: false
enableServiceLinks: false
{{- with .root.Values.images.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- end }}

{{- /* What every pod of ours has that is not root's; .user is whom it runs as. */}}
{{- define "shardloom.pod" -}}
{{ include "shardloom.podBase" . }}
securityContext:
  runAsNonRoot: true
  runAsUser: {{ .user | default 1000 }}
  runAsGroup: {{ .user | default 1000 }}
  fsGroup: {{ .user | default 1000 }}
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile:
    type: RuntimeDefault
{{- end }}

{{- /* Annotations of pods that Cluster Autoscaler and Karpenter leave where they are. */}}
{{- define "shardloom.stays" -}}
cluster-autoscaler.kubernetes.io/safe-to-evict: "false"
karpenter.sh/do-not-disrupt: "true"
{{- end }}

{{- /* Machines for a pod. Kueue gives each podset the flavor whose taint it tolerates: its own (queue.yaml). */}}
{{- define "shardloom.placement" -}}
{{- with .of.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- $all := .of.tolerations }}
{{- if and .flavor (eq .root.Values.queue.kind "kueue") }}
{{- $all = append $all (dict "key" "shardloom.io/flavor" "operator" "Equal" "value" .flavor "effect" "NoSchedule") }}
{{- end }}
{{- with $all }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- define "shardloom.container" -}}
# What a pod that ends has said last is in its status.
terminationMessagePolicy: FallbackToLogsOnError
securityContext: {{- include "shardloom.lockedDown" . | nindent 2 }}
{{- end }}

{{- define "shardloom.lockedDown" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end }}

{{- define "shardloom.env" -}}
{{- range $name, $value := . }}
- name: {{ $name }}
  value: {{ $value | quote }}
{{- end }}
{{- end }}

{{- define "shardloom.secretEnv" -}}
- name: {{ .name }}
  valueFrom:
    secretKeyRef:
      name: {{ .secret }}
      key: {{ .key }}
      {{- if .optional }}
      optional: true
      {{- end }}
{{- end }}

{{- /* Another claim where the service has it alone: the access mode of one that is there stays. */}}
{{- define "shardloom.runsClaim" -}}
{{- .Values.storage.runs.existingClaim | default (ternary "shardloom-runs" "shardloom-service-runs" .Values.storage.runs.shared) }}
{{- end }}

{{- define "shardloom.claims" -}}
- name: runs
  persistentVolumeClaim:
    claimName: {{ include "shardloom.runsClaim" . }}
{{- include "shardloom.dataClaim" . }}
{{- end }}

{{- /* Of hosts, whose run storage may be a disk of their own. */}}
{{- define "shardloom.hostVolumes" -}}
{{- with .Values.storage.runs }}
{{- if .shared }}
{{- include "shardloom.claims" $ }}
{{- else }}
- {name: runs, emptyDir: {sizeLimit: {{ .hostGiB | toJson }}Gi}}
{{- include "shardloom.dataClaim" $ }}
{{- end }}
{{- end }}
{{- end }}

{{- define "shardloom.dataClaim" }}
{{- if .Values.storage.data.enabled }}
- name: data
  persistentVolumeClaim:
    claimName: {{ .Values.storage.data.existingClaim | default "shardloom-data" }}
{{- end }}
{{- end }}

{{- define "shardloom.mounts" -}}
- name: tmp
  mountPath: /tmp
- name: runs
  mountPath: /var/lib/shardloom/runs
{{- if .Values.storage.data.enabled }}
- name: data
  mountPath: /var/lib/shardloom/data
  readOnly: true
{{- end }}
{{- end }}

{{- /* A token for Kubernetes, for the one container that mounts it. */}}
{{- define "shardloom.kubernetesToken" -}}
name: kubernetes-token
projected:
  defaultMode: 288
  sources:
    - serviceAccountToken:
        path: token
        expirationSeconds: 3600
    - configMap:
        name: kube-root-ca.crt
        items:
          - {key: ca.crt, path: ca.crt}
    - downwardAPI:
        items:
          - path: namespace
            fieldRef:
              fieldPath: metadata.namespace
{{- end }}

{{- define "shardloom.kubernetesTokenMount" -}}
name: kubernetes-token
mountPath: /var/run/secrets/kubernetes.io/serviceaccount
readOnly: true
{{- end }}

{{- /* The worker groups as JSON, each with what ray.hosts says. */}}
{{- define "shardloom.groups" -}}
{{- $groups := list }}
{{- $names := list }}
{{- range .Values.ray.groups }}
{{- $group := mergeOverwrite (deepCopy $.Values.ray.hosts) . }}
{{- if gt (int $group.minHosts) (int $group.maxHosts) }}
{{- fail (printf "ray.groups: %s has minHosts %v, more than its maxHosts %v" .name $group.minHosts $group.maxHosts) }}
{{- end }}
{{- if eq .name "head" }}
{{- fail "ray.groups: head is the name of the head" }}
{{- end }}
{{- if has .name $names }}
{{- fail (printf "ray.groups: two are called %s" .name) }}
{{- end }}
{{- $names = append $names .name }}
{{- $ownGiB := add $group.tmpGiB (ternary 0 $.Values.storage.runs.hostGiB $.Values.storage.runs.shared) }}
{{- if and $group.diskGiB (lt (int $group.diskGiB) (int $ownGiB)) }}
{{- fail (printf "ray.groups: %s has a diskGiB of %v, which does not hold its tmpGiB (and, without shared run storage, storage.runs.hostGiB): %v" .name $group.diskGiB $ownGiB) }}
{{- end }}
{{- $groups = append $groups $group }}
{{- end }}
{{- dict "groups" $groups | toJson }}
{{- end }}

{{- /* Most workers that the groups can hold: a GPU each, or a CPU, of which KubeRay counts a part as one. */}}
{{- define "shardloom.maxWorkers" -}}
{{- $most := 0 }}
{{- range (include "shardloom.groups" . | fromJson).groups }}
{{- $each := ternary .gpus (ceil .cpus) (gt (int .gpus) 0) }}
{{- $most = add $most (mul (int .maxHosts) (int $each)) }}
{{- end }}
{{- $most }}
{{- end }}

{{- /* Resources of a host of a group, as Kubernetes names them. */}}
{{- define "shardloom.hostLimits" -}}
cpu: {{ .cpus | quote }}
memory: {{ .memoryGiB | toJson }}Gi
{{- with .diskGiB }}
ephemeral-storage: {{ . | toJson }}Gi
{{- end }}
{{- with .gpus }}
nvidia.com/gpu: {{ . | quote }}
{{- end }}
{{- if .rdma.resource }}
{{ .rdma.resource }}: {{ .rdma.count | quote }}
{{- end }}
{{- with .resources }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- /* Whom a peer is: a namespace in a list of names. */}}
{{- define "shardloom.namespaces" -}}
- namespaceSelector:
    matchExpressions:
      - key: kubernetes.io/metadata.name
        operator: In
        values: {{ toJson . }}
{{- end }}

{{- /* Where Ray runs: the namespace of the release, and those of isolated projects. As a list of JSON. */}}
{{- define "shardloom.rayNamespaces" -}}
{{- $names := list .Release.Namespace }}
{{- range $project, $each := .Values.ownClusters.projects }}
{{- if has $each.namespace $names }}
{{- fail (printf "ownClusters.projects: %s has the namespace %s, which is another's" $project $each.namespace) }}
{{- end }}
{{- $names = append $names $each.namespace }}
{{- end }}
{{- toJson $names }}
{{- end }}

{{- define "shardloom.rayPods" -}}
matchExpressions:
  - key: app.kubernetes.io/component
    operator: In
    values: [ray-head, ray-worker]
{{- end }}
