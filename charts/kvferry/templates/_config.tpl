{{/* SPDX-License-Identifier: Apache-2.0

_config.tpl: kvferryd.yaml. What the chart decides is laid over what `config` says.
*/}}

{{- define "kvferry.config" -}}
{{- $config := deepCopy .Values.config -}}
{{- $sockets := list -}}
{{- range .Values.tenants -}}
{{- $sockets = append $sockets (dict "path" (printf "%s/%s/kvferryd.sock" $.Values.socket.hostPath .name) "tenant" .name) -}}
{{- end -}}
{{- $_ := set $config "sockets" $sockets -}}
{{- $_ := set $config "mode" .Values.mode -}}
{{- $dram := default dict (get $config "dram") -}}
{{- $_ := set $dram "bytes" (include "kvferry.arenaBytes" . | printf "%sB") -}}
{{- if .Values.arena.hugepages -}}
{{- $_ := set $dram "hugepages" "require" -}}
{{- end -}}
{{- $_ := set $config "dram" $dram -}}
{{- with .Values.nvme -}}
{{- if .enabled -}}
{{- $store := dict "path" "/var/lib/kvferry/nvme.store" "bytes" .bytes "engine" .engine "recompress" .recompress "admission" .admission -}}
{{- if .writeBudget -}}
{{- $_ := set $store "write_budget" .writeBudget -}}
{{- end -}}
{{- $_ := set $config "nvme" (list $store) -}}
{{- end -}}
{{- end -}}
{{- if ne .Values.gpu.access "none" -}}
{{- $gpu := default dict (get $config "gpu") -}}
{{- $_ := set $gpu "devices" .Values.gpu.devices -}}
{{- $_ := set $config "gpu" $gpu -}}
{{- end -}}
{{- if .Values.calibration.configMap -}}
{{- $_ := set $config "calibration" (dict "dir" "/etc/kvferry-calibration") -}}
{{- end -}}
{{- if .Values.clusterKey.secretName -}}
{{- $_ := set $config "cluster_key" "/etc/kvferry-key/key" -}}
{{- end -}}
{{- with .Values.peers -}}
{{- if .enabled -}}
{{- $nodes := .nodes -}}
{{- if not .directory.address -}}
{{- $nodes = prepend $nodes (printf "%s.%s.svc:%d" (include "kvferry.peersService" $) $.Release.Namespace (int .port)) -}}
{{- end -}}
{{- $peers := default dict (get $config "peers") -}}
{{- with $nodes -}}
{{- $_ := set $peers "nodes" (join "," .) -}}
{{- end -}}
{{- with $peers -}}
{{- $_ := set $config "peers" . -}}
{{- end -}}
{{- if .directory.address -}}
{{- $directory := default dict (get $config "directory") -}}
{{- $_ := set $directory "address" .directory.address -}}
{{- with .directory.user -}}
{{- $_ := set $directory "user" . -}}
{{- end -}}
{{- if .directory.passwordSecret -}}
{{- $_ := set $directory "password_file" "/etc/kvferry-directory/password" -}}
{{- end -}}
{{- $_ := set $config "directory" $directory -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $_ := set $config "admin" (dict "socket" "/run/kvferry-admin/admin.sock" "listen" (printf "%s:%d" .Values.metrics.address (int .Values.metrics.port))) -}}
{{- toYaml $config -}}
{{- end -}}
