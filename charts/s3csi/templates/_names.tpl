{{- /* Names, labels and small decisions that several templates share. */ -}}

{{- define "s3csi.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" -}}
{{- end -}}

{{- define "s3csi.labels" -}}
app.kubernetes.io/name: {{ include "s3csi.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/component: csi-driver
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- with .Values.customLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- /*
Labels that select Pods. Selectors are immutable, so whatever exists stays as it is; see legacySelectors in values.yaml.
Takes a dict: root, kind, name, app (a fresh install's label), oldApp and oldName (the earlier chart's labels).
*/ -}}
{{- define "s3csi.selector" -}}
{{- $root := .root -}}
{{- $existing := dict -}}
{{- if kindIs "invalid" $root.Values.legacySelectors -}}
{{- $existing = lookup "apps/v1" .kind $root.Release.Namespace .name -}}
{{- end -}}
{{- if $existing -}}
{{ toYaml $existing.spec.selector.matchLabels }}
{{- else if $root.Values.legacySelectors -}}
app: {{ .oldApp }}
app.kubernetes.io/name: {{ default "scality-mountpoint-s3-csi-driver" $root.Values.nameOverride | trunc 63 | trimSuffix "-" }}
app.kubernetes.io/instance: {{ $root.Release.Name }}
{{- else -}}
app: {{ .app }}
app.kubernetes.io/name: {{ include "s3csi.name" $root }}
app.kubernetes.io/instance: {{ $root.Release.Name }}
{{- end -}}
{{- end -}}

{{- define "s3csi.nodeSelectorLabels" -}}
{{- include "s3csi.selector" (dict "root" . "kind" "DaemonSet" "name" "s3-csi-node" "app" "scality-s3-csi-node" "oldApp" "s3-csi-node") -}}
{{- end -}}

{{- define "s3csi.controllerSelectorLabels" -}}
{{- include "s3csi.selector" (dict "root" . "kind" "Deployment" "name" "s3-csi-controller" "app" "s3-csi-controller" "oldApp" "s3-csi-controller") -}}
{{- end -}}

{{- define "s3csi.mounterSelectorLabels" -}}
app: s3-csi-mounter
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- /* All labels of a Pod: those of the chart, and over them those that select it. Takes a dict: root, selector. */ -}}
{{- define "s3csi.podLabels" -}}
{{- toYaml (merge (fromYaml .selector) (fromYaml (include "s3csi.labels" .root))) -}}
{{- end -}}

{{- define "s3csi.image" -}}
{{- printf "%s%s:%s" .Values.image.containerRegistry .Values.image.repository (default .Chart.AppVersion (toString .Values.image.tag)) -}}
{{- end -}}

{{- define "s3csi.pullSecrets" -}}
{{- with .Values.imagePullSecrets }}
imagePullSecrets:
{{- range . }}
- name: {{ . }}
{{- end }}
{{- end }}
{{- end -}}

{{- /* The name of an object that is in no namespace: drivers beside each other must not share it. Takes a list: root, name. */ -}}
{{- define "s3csi.clusterName" -}}
{{- $driver := (index . 0).Values.driverName -}}
{{- index . 1 -}}{{ if ne $driver "s3.csi.scality.com" }}-{{ $driver }}{{ end -}}
{{- end -}}

{{- define "s3csi.kubeletPath" -}}
{{- trimSuffix "/" .Values.node.kubeletPath -}}
{{- end -}}

{{- define "s3csi.mounterDirectory" -}}
{{- default (printf "/run/%s" .Values.driverName) (trimSuffix "/" .Values.mounter.directory) -}}
{{- end -}}

{{- /* "true" on OpenShift, otherwise nothing. */ -}}
{{- define "s3csi.isOpenShift" -}}
{{- if kindIs "invalid" .Values.openshift.enabled -}}
{{- if .Capabilities.APIVersions.Has "security.openshift.io/v1" }}true{{ end -}}
{{- else if .Values.openshift.enabled }}true{{ end -}}
{{- end -}}

{{- /* "true" where volumes are made on demand, otherwise nothing. Values of an older chart may lack the question. */ -}}
{{- define "s3csi.provisions" -}}
{{- if dig "csiProvisioner" "enabled" false (default dict .Values.sidecars) }}true{{ end -}}
{{- end -}}

{{- /* "true" where there is work for the controller, otherwise nothing. */ -}}
{{- define "s3csi.hasController" -}}
{{- if or (eq (toString .Values.strategy) "pod") (include "s3csi.provisions" .) }}true{{ end -}}
{{- end -}}

{{- /* What cannot work together is said here, in one sentence each, and not by a Pod that never starts. Every template begins with it, for Helm
       takes them in any order. */ -}}
{{- define "s3csi.check" -}}
{{- if not (hasKey .Values "strategy") -}}
{{- fail "the values are those of another chart, without the defaults of this one: use --reset-then-reuse-values in place of --reuse-values" -}}
{{- end -}}
{{- if and (eq .Values.strategy "systemd") .Values.tls.caCertConfigMap (not (include "s3csi.provisions" .)) -}}
{{- fail "tls.caCertConfigMap is of no use with strategy systemd, where engines trust whom the node trusts: install the certificate on the nodes" -}}
{{- end -}}
{{- if and .Values.tls.caCertData (not .Values.tls.caCertConfigMap) -}}
{{- fail "tls.caCertData needs a name for its ConfigMap: set tls.caCertConfigMap" -}}
{{- end -}}
{{- end -}}
