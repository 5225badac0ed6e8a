{{/* SPDX-License-Identifier: Apache-2.0

_pod.tpl: parts of the daemon's pod.
*/}}

{{/* Folders of the node belong to root. This gives those of sockets and store to the daemon; the
set-group-ID bit makes each socket the tenant's group's. */}}
{{- define "kvferry.prepare" -}}
- name: prepare
  image: {{ include "kvferry.image" . | quote }}
  imagePullPolicy: {{ .Values.image.pullPolicy }}
  command:
    - /bin/sh
    - -ec
    - |
      own() {
          mkdir -p "$3"
          chown "$1" "$3"
          chmod "$2" "$3"
      }
      {{- range .Values.tenants }}
      own {{ int64 $.Values.security.uid }}:{{ int64 .gid }} 2750 '{{ $.Values.socket.hostPath }}/{{ .name }}'
      {{- end }}
      {{- if .Values.nvme.enabled }}
      own {{ int64 .Values.security.uid }}:{{ int64 .Values.security.gid }} 0700 /var/lib/kvferry
      {{- end }}
  securityContext:
    runAsUser: 0
    runAsGroup: 0
    runAsNonRoot: false
    allowPrivilegeEscalation: false
    readOnlyRootFilesystem: true
    capabilities:
      drop: [ALL]
      add: [CHOWN, DAC_OVERRIDE, FOWNER, FSETID]
  resources:
    {{- include "kvferry.initResources" . | nindent 4 }}
  volumeMounts:
    - name: sockets
      mountPath: {{ .Values.socket.hostPath }}
    {{- if .Values.nvme.enabled }}
    - name: nvme
      mountPath: /var/lib/kvferry
    {{- end }}
{{- end -}}

{{/* Written beside and renamed, so that a runtime never reads half a profile. */}}
{{- define "kvferry.installSeccomp" -}}
{{- $profile := (include "kvferry.seccompProfile" . | fromYaml).localhostProfile -}}
- name: seccomp
  image: {{ include "kvferry.image" . | quote }}
  imagePullPolicy: {{ .Values.image.pullPolicy }}
  command:
    - /bin/sh
    - -ec
    - |
      mkdir -p /seccomp/kvferry
      cp /etc/kvferry/seccomp.json '/seccomp/{{ $profile }}.new'
      mv '/seccomp/{{ $profile }}.new' '/seccomp/{{ $profile }}'
  securityContext:
    runAsUser: 0
    runAsGroup: 0
    runAsNonRoot: false
    {{- include "kvferry.containerSecurity" . | nindent 4 }}
  resources:
    {{- include "kvferry.initResources" . | nindent 4 }}
  volumeMounts:
    - name: config
      mountPath: /etc/kvferry
      readOnly: true
    - name: seccomp
      mountPath: /seccomp
{{- end -}}

{{- define "kvferry.initResources" -}}
requests: {cpu: 10m, memory: 16Mi}
limits: {memory: 64Mi}
{{- end -}}

{{/* Huge pages are not charged to the memory cgroup, but the daemon compares its whole sum with that
limit: the limit holds the arena, the request does not. */}}
{{- define "kvferry.resources" -}}
{{- $all := include "kvferry.memoryLimitBytes" . | include "kvferry.quantity" -}}
requests:
  cpu: {{ .Values.resources.cpuRequest | quote }}
  {{- if .Values.arena.hugepages }}
  memory: {{ include "kvferry.restBytes" . | include "kvferry.quantity" }}
  hugepages-2Mi: {{ include "kvferry.arenaBytes" . | include "kvferry.quantity" }}
  {{- else }}
  memory: {{ $all }}
  {{- end }}
  {{- with .Values.peers.rdma.resource }}
  {{ . }}: "1"
  {{- end }}
limits:
  {{- with .Values.resources.cpuLimit }}
  cpu: {{ . | quote }}
  {{- end }}
  memory: {{ $all }}
  {{- if .Values.arena.hugepages }}
  hugepages-2Mi: {{ include "kvferry.arenaBytes" . | include "kvferry.quantity" }}
  {{- end }}
  {{- with .Values.peers.rdma.resource }}
  {{ . }}: "1"
  {{- end }}
{{- end -}}

{{/* What UCX has to know, and what Kubernetes knows for it. UCX takes any free port for the data of
links unless it is told which, and any port is more than a NetworkPolicy lets through. */}}
{{- define "kvferry.peersEnv" -}}
{{- with .Values.peers -}}
- name: POD_IP
  valueFrom:
    fieldRef:
      fieldPath: status.podIP
- name: UCX_TCP_PORT_RANGE
  value: {{ printf "%d-%s" (int .dataPort) (include "kvferry.lastDataPort" $) | quote }}
- name: UCX_TLS
  value: {{ empty .rdma.resource | ternary "tcp" "rc,tcp" | quote }}
{{- if .rdma.resource }}
- name: UCX_NET_DEVICES
  value: {{ .rdma.devices | quote }}
{{- end }}
{{- end -}}
{{- end -}}

{{- define "kvferry.volumes" -}}
{{- $nvme := .Values.nvme -}}
- name: config
  configMap:
    name: {{ include "kvferry.fullname" . }}
- name: admin
  emptyDir: {sizeLimit: 1Mi}
- name: tmp
  emptyDir: {sizeLimit: 64Mi}
# The folder, never a socket: a path that is gone would come back as a folder in its place.
- name: sockets
  hostPath:
    path: {{ .Values.socket.hostPath }}
    type: DirectoryOrCreate
{{- if $nvme.enabled }}
- name: nvme
  {{- if eq $nvme.volume.type "hostPath" }}
  hostPath:
    path: {{ $nvme.volume.hostPath }}
    type: DirectoryOrCreate
  {{- else if eq $nvme.volume.type "claim" }}
  persistentVolumeClaim:
    claimName: {{ $nvme.volume.claimName }}
  {{- else }}
  ephemeral:
    volumeClaimTemplate:
      spec:
        accessModes: [ReadWriteOnce]
        {{- with $nvme.volume.storageClassName }}
        storageClassName: {{ . }}
        {{- end }}
        resources:
          requests:
            storage: {{ $nvme.volume.size }}
  {{- end }}
{{- end }}
{{- if .Values.calibration.configMap }}
- name: calibration
  configMap:
    name: {{ .Values.calibration.configMap }}
{{- end }}
{{- if .Values.clusterKey.secretName }}
- name: cluster-key
  secret:
    secretName: {{ .Values.clusterKey.secretName }}
    defaultMode: 0440
    items:
      - key: {{ .Values.clusterKey.key }}
        path: key
{{- end }}
{{- with .Values.peers.directory }}
{{- if .passwordSecret }}
- name: directory
  secret:
    secretName: {{ .passwordSecret }}
    defaultMode: 0440
    items:
      - key: {{ .passwordKey }}
        path: password
{{- end }}
{{- end }}
{{- if and (eq .Values.security.seccomp "Localhost") .Values.security.installSeccomp }}
- name: seccomp
  hostPath:
    path: {{ .Values.security.seccompDir }}
    type: DirectoryOrCreate
{{- end }}
{{- if eq .Values.gpu.access "volumeMounts" }}
- name: gpu
  hostPath:
    path: /dev/null
{{- end }}
{{- end -}}
