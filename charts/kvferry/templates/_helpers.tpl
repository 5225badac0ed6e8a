{{/* SPDX-License-Identifier: Apache-2.0

_helpers.tpl: names, labels, sizes, and the daemon's memory.
*/}}

{{- define "kvferry.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 50 | trimSuffix "-" -}}
{{- end -}}

{{- define "kvferry.fullname" -}}
{{- $name := include "kvferry.name" . -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 50 | trimSuffix "-" -}}
{{- else if contains $name .Release.Name -}}
{{- .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 50 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "kvferry.selectorLabels" -}}
app.kubernetes.io/name: {{ include "kvferry.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "kvferry.labels" -}}
{{ include "kvferry.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end -}}

{{/* Pods of the daemon, not those of `helm test`. */}}
{{- define "kvferry.daemonLabels" -}}
{{ include "kvferry.selectorLabels" . }}
app.kubernetes.io/component: daemon
{{- end -}}

{{- define "kvferry.image" -}}
{{- $image := .Values.image -}}
{{- if $image.digest -}}
{{- printf "%s@%s" $image.repository $image.digest -}}
{{- else -}}
{{- printf "%s:%s" $image.repository (default .Chart.AppVersion $image.tag) -}}
{{- end -}}
{{- end -}}

{{/* "512MiB" in bytes. The schema has seen that it is a size. */}}
{{- define "kvferry.bytes" -}}
{{- $units := dict "B" 1 "KiB" 1024 "MiB" 1048576 "GiB" 1073741824 "TiB" 1099511627776 -}}
{{- $unit := default "B" (regexFind "[A-Za-z]+$" .) -}}
{{- mul (regexFind "^[0-9]+" . | int64) (get $units $unit) -}}
{{- end -}}

{{/* "10min" in seconds. */}}
{{- define "kvferry.seconds" -}}
{{- $units := dict "s" 1 "min" 60 "h" 3600 -}}
{{- $unit := default "s" (regexFind "[a-z]+$" .) -}}
{{- mul (regexFind "^[0-9]+" . | int64) (get $units $unit) -}}
{{- end -}}

{{/* An option of the daemon: list of the context, its name ("staging.total") and its default. */}}
{{- define "kvferry.option" -}}
{{- $path := splitList "." (index . 1) -}}
{{- $section := (index . 0).Values.config -}}
{{- if eq (len $path) 2 -}}
{{- $section = default dict (get $section (first $path)) -}}
{{- end -}}
{{- if hasKey $section (last $path) -}}
{{- get $section (last $path) | toString -}}
{{- else -}}
{{- index . 2 -}}
{{- end -}}
{{- end -}}

{{- define "kvferry.arenaBytes" -}}
{{- if .Values.arena.bytes -}}
{{- include "kvferry.bytes" .Values.arena.bytes -}}
{{- else -}}
{{- /* whole pieces of 2 MiB, so that huge pages can hold it */ -}}
{{- mul (div (include "kvferry.bytes" .Values.node.memory | int64) 20971520) 2097152 -}}
{{- end -}}
{{- end -}}

{{- define "kvferry.stagingBytes" -}}
{{- include "kvferry.option" (list . "staging.total" "256MiB") | include "kvferry.bytes" -}}
{{- end -}}

{{- define "kvferry.nvmeBytes" -}}
{{- if .Values.nvme.enabled -}}
{{- include "kvferry.bytes" .Values.nvme.bytes -}}
{{- else -}}
0
{{- end -}}
{{- end -}}

{{/* Tables of the daemon: at least what `kvferryd --check` sums up. An index entry is one for 32 KiB
of arena and of the first 32 GiB of a store, one for 1 MiB of what follows. A GPU whose memory keeps
blocks has a window of 80 MiB; "all" is taken for eight. */}}
{{- define "kvferry.tableBytes" -}}
{{- $arena := include "kvferry.arenaBytes" . | int64 -}}
{{- $nvme := include "kvferry.nvmeBytes" . | int64 -}}
{{- $entries := include "kvferry.option" (list . "index.entries" "0") | float64 | int64 -}}
{{- if eq $entries 0 -}}
{{- $entries = max 65536 (add (div $arena 32768) (min 1048576 (div $nvme 32768)) (div $nvme 1048576)) -}}
{{- end -}}
{{- $clients := include "kvferry.option" (list . "clients.max" "64") | float64 | int64 -}}
{{- $ring := include "kvferry.option" (list . "clients.ring_entries" "4096") | float64 | int64 -}}
{{- $hbm := include "kvferry.option" (list . "gpu.hbm_bytes" "0") | include "kvferry.bytes" | int64 -}}
{{- $gpus := 0 -}}
{{- if gt $hbm 0 -}}
{{- $gpus = eq .Values.gpu.devices "all" | ternary 8 (splitList "," .Values.gpu.devices | len) -}}
{{- end -}}
{{- $peers := 0 -}}
{{- if .Values.peers.enabled -}}
{{- $hints := include "kvferry.option" (list . "peers.entries" "0") | float64 | int64 -}}
{{- /* 28 bytes each, of up to twice as many; what has changed, and threads, take the rest */ -}}
{{- $peers = add (mul 56 (eq $hints 0 | ternary $entries $hints)) 5242880 -}}
{{- end -}}
{{- /* an entry takes 64 bytes, and up to twice as many are made; a drive takes 12, a GPU's memory 16 */ -}}
{{- add $peers (mul $entries 156) (div $arena 170) (mul $clients (add 786432 (mul $ring 128))) (mul $gpus (add 88080384 (div $hbm 240))) -}}
{{- end -}}

{{/* What the memory cgroup has to allow, and what the scheduler has to set aside of ordinary memory. */}}
{{- define "kvferry.memoryLimitBytes" -}}
{{- add (include "kvferry.arenaBytes" . | int64) (include "kvferry.restBytes" . | int64) -}}
{{- end -}}

{{- define "kvferry.restBytes" -}}
{{- add (include "kvferry.stagingBytes" . | int64) (include "kvferry.tableBytes" . | int64) (include "kvferry.bytes" .Values.resources.extraMemory | int64) -}}
{{- end -}}

{{/* Bytes as Kubernetes writes them, rounded up to MiB. */}}
{{- define "kvferry.quantity" -}}
{{- printf "%dMi" (div (add (int64 .) 1048575) 1048576) -}}
{{- end -}}

{{- define "kvferry.graceSeconds" -}}
{{- /* the drain, and then the end of threads and workers */ -}}
{{- add 10 (include "kvferry.option" (list . "drain.timeout" "20s") | include "kvferry.seconds" | int64) -}}
{{- end -}}

{{/* The Service whose name stands for the addresses of all daemons, ready or not. */}}
{{- define "kvferry.peersService" -}}
{{- include "kvferry.fullname" . }}-peers
{{- end -}}

{{- define "kvferry.lastDataPort" -}}
{{- add 7 (int .Values.peers.dataPort) -}}
{{- end -}}

{{/* Where links are asked for, and where their data may go: a port each, since not every network
plugin knows ranges. */}}
{{- define "kvferry.peerPorts" -}}
{{- $first := int .Values.peers.dataPort -}}
- port: {{ int .Values.peers.port }}
  protocol: TCP
{{- range $port := untilStep $first (add 8 $first | int) 1 }}
- port: {{ $port }}
  protocol: TCP
{{- end }}
{{- end -}}

{{/* Both ends of links: UCX has either of them connect to the other. */}}
{{- define "kvferry.mayLink" -}}
- podSelector:
    matchLabels:
      {{- include "kvferry.daemonLabels" . | nindent 6 }}
{{- with .Values.peers.others }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "kvferry.seccompProfile" -}}
{{- if eq .Values.security.seccomp "Localhost" -}}
type: Localhost
localhostProfile: kvferry/io-uring-{{ .Files.Get "files/seccomp-io-uring.json" | sha256sum | trunc 12 }}.json
{{- else -}}
type: RuntimeDefault
{{- end -}}
{{- end -}}

{{/* What all containers have that are not root's. */}}
{{- define "kvferry.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end -}}
