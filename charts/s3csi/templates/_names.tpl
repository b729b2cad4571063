{{- /* Names, labels and conditions that several templates share. */ -}}

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
Labels that select Pods. Selectors are immutable, so existing ones are kept; see legacySelectors in values.yaml.
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

{{- /* All labels of a Pod: those of the chart, overridden by those that select it. Takes a dict: root, selector. */ -}}
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

{{- /* The name of a cluster-scoped object, distinct for each instance of the driver. Takes a list: root, name. */ -}}
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

{{- /* A size, or nothing if it is 0 or unset. */ -}}
{{- define "s3csi.sizeLimit" -}}
{{- $size := default "" . | toString -}}
{{- if ne $size "0" }}{{ $size }}{{ end -}}
{{- end -}}

{{- /* The namespaces of legacy.secretFallsBackToDriver, separated by commas. Values of an older chart may lack the key. */ -}}
{{- define "s3csi.fallbackNamespaces" -}}
{{- join "," (dig "secretFallsBackToDriver" list (default dict .Values.legacy)) -}}
{{- end -}}

{{- /* "true" on OpenShift, otherwise empty. */ -}}
{{- define "s3csi.isOpenShift" -}}
{{- if kindIs "invalid" .Values.openshift.enabled -}}
{{- if .Capabilities.APIVersions.Has "security.openshift.io/v1" }}true{{ end -}}
{{- else if .Values.openshift.enabled }}true{{ end -}}
{{- end -}}

{{- /* "true" with dynamic provisioning, otherwise empty. Values of an older chart may lack the key. */ -}}
{{- define "s3csi.provisions" -}}
{{- if dig "csiProvisioner" "enabled" false (default dict .Values.sidecars) }}true{{ end -}}
{{- end -}}

{{- /* "true" if the controller is needed, otherwise empty. */ -}}
{{- define "s3csi.hasController" -}}
{{- if or (include "s3csi.servesPods" .) (include "s3csi.provisions" .) }}true{{ end -}}
{{- end -}}

{{- /* "true" if Mountpoint Pods serve new or old mounts, otherwise empty. */ -}}
{{- define "s3csi.servesPods" -}}
{{- if or (eq (toString .Values.strategy) "pod") (has "pod" (include "s3csi.draining" . | fromJsonArray)) }}true{{ end -}}
{{- end -}}

{{- /* How many warm Mountpoint Pods each node has; empty if none. Values of an older chart lack the key. */ -}}
{{- define "s3csi.warmPods" -}}
{{- $number := int (default 0 .Values.mountpointPod.warm) -}}
{{- if and (eq (toString .Values.strategy) "pod") (gt $number 0) }}{{ $number }}{{ end -}}
{{- end -}}

{{- /* "true" if room is reserved for Mountpoint Pods, otherwise empty. Values of an older chart lack the key. */ -}}
{{- define "s3csi.reservesHeadroom" -}}
{{- if and (eq (toString .Values.strategy) "pod") .Values.mountpointPod.reserveHeadroom }}true{{ end -}}
{{- end -}}

{{- /*
Value and policy of a priority class. They are immutable, so an existing class keeps those it has, such as one of the Scality chart.
Takes a list: name, value, policy.
*/ -}}
{{- define "s3csi.priority" -}}
{{- $existing := lookup "scheduling.k8s.io/v1" "PriorityClass" "" (index . 0) -}}
value: {{ dig "value" (index . 1) $existing | int64 }}
preemptionPolicy: {{ dig "preemptionPolicy" (index . 2) $existing }}
{{- end -}}

{{- /* "true" if the cluster has warm Mountpoint Pods or headroom Pods, otherwise empty: the controller ends them. */ -}}
{{- define "s3csi.hasWarmOrHeadroomPods" -}}
{{- range $pod := default list (lookup "v1" "Pod" .Values.mountpointPod.namespace "").items -}}
{{- range $name := list "warm" "headroom-for-pod" -}}
{{- if hasKey (default dict $pod.metadata.labels) (printf "%s/%s" $.Values.driverName $name) }}true{{ end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- /* "true" if the mounter of each node serves new or old mounts, otherwise empty. */ -}}
{{- define "s3csi.servesMounter" -}}
{{- if or (eq (toString .Values.strategy) "daemon") (has "daemon" (include "s3csi.draining" . | fromJsonArray)) }}true{{ end -}}
{{- end -}}

{{- /* "true" if the node plugin itself mounts, otherwise empty: units mount their targets themselves. */ -}}
{{- define "s3csi.pluginMounts" -}}
{{- if or (ne .Values.strategy "systemd") (include "s3csi.draining" . | fromJsonArray) }}true{{ end -}}
{{- end -}}

{{- /* Earlier strategies whose mounts are served until their workloads end, as a JSON list. Looked up once for all templates. */ -}}
{{- define "s3csi.draining" -}}
{{- if kindIs "invalid" .Values.draining -}}
{{- $found := list -}}
{{- if or (include "s3csi.hasAttachments" .) (include "s3csi.hasWarmOrHeadroomPods" .) -}}{{- $found = append $found "pod" -}}{{- end -}}
{{- $since := include "s3csi.mounterDrainsSince" . -}}
{{- if and $since (include "s3csi.hasWorkloadsBefore" (list . $since)) -}}{{- $found = append $found "daemon" -}}{{- end -}}
{{- $_ := set .Values "draining" $found -}}
{{- $_ := set .Values "mounterDrainsSince" $since -}}
{{- end -}}
{{- without .Values.draining (toString .Values.strategy) | toJson -}}
{{- end -}}

{{- /* "true" if the cluster has attachments, of this driver's or an earlier version, otherwise empty. */ -}}
{{- define "s3csi.hasAttachments" -}}
{{- $found := list -}}
{{- range $version := list (printf "%s/v2" .Values.driverName) (printf "%s/v2beta" .Values.driverName) -}}
{{- if $.Capabilities.APIVersions.Has $version -}}
{{- $found = concat $found (default list (lookup $version "MountpointS3PodAttachment" "" "").items) -}}
{{- end -}}
{{- end -}}
{{- if $found }}true{{ end -}}
{{- end -}}

{{- /* When the strategy was changed from daemon to another one; empty if it was not, or if its mounter is gone. */ -}}
{{- define "s3csi.mounterDrainsSince" -}}
{{- $mounter := lookup "apps/v1" "DaemonSet" .Release.Namespace "s3-csi-mounter" -}}
{{- if and $mounter (ne (toString .Values.strategy) "daemon") -}}
{{- dig "metadata" "annotations" (printf "%s/draining-since" .Values.driverName) (dateInZone "2006-01-02T15:04:05Z" now "UTC") $mounter -}}
{{- end -}}
{{- end -}}

{{- /* "true" if Pods with volumes of this driver exist that were created before a time, otherwise empty. Takes a list: root, time. */ -}}
{{- define "s3csi.hasWorkloadsBefore" -}}
{{- $root := index . 0 -}}
{{- $time := index . 1 -}}
{{- $claims := dict -}}
{{- range (lookup "v1" "PersistentVolume" "" "").items -}}
{{- if eq (dig "spec" "csi" "driver" "" .) $root.Values.driverName -}}
{{- $_ := set $claims (printf "%s/%s" (dig "spec" "claimRef" "namespace" "" .) (dig "spec" "claimRef" "name" "" .)) true -}}
{{- end -}}
{{- end -}}
{{- $found := list -}}
{{- range $pod := (lookup "v1" "Pod" "" "").items -}}
{{- if and (le $pod.metadata.creationTimestamp $time) (not (has (dig "status" "phase" "" $pod) (list "Succeeded" "Failed"))) -}}
{{- range $volume := default list $pod.spec.volumes -}}
{{- $claim := dig "persistentVolumeClaim" "claimName" (printf "%s-%s" $pod.metadata.name $volume.name) $volume -}}
{{- if hasKey $claims (printf "%s/%s" $pod.metadata.namespace $claim) -}}{{- $found = append $found $pod.metadata.name -}}{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if $found }}true{{ end -}}
{{- end -}}

{{- /* Rejects values that contradict each other with one sentence each, instead of Pods that never start. Every template begins
       with it, because Helm renders them in any order. */ -}}
{{- define "s3csi.check" -}}
{{- if not (hasKey .Values "strategy") -}}
{{- fail "the values are those of another chart, without the defaults of this one: use --reset-then-reuse-values in place of --reuse-values" -}}
{{- end -}}
{{- include "s3csi.checkEarlierValues" . -}}
{{- include "s3csi.checkCredentials" . -}}
{{- if and .Values.tls.caCertData (not .Values.tls.caCertConfigMap) -}}
{{- fail "tls.caCertData needs a name for its ConfigMap: set tls.caCertConfigMap" -}}
{{- end -}}
{{- end -}}

{{- /* Values of the Scality chart that mean something else here: one sentence each says what to write instead. */ -}}
{{- define "s3csi.checkEarlierValues" -}}
{{- if contains "mountpoint-s3-csi-driver" .Values.image.repository -}}
{{- fail (printf "image.repository %s is the image of the Scality driver, which does not contain s3csi: set image.repository to the image of s3csi in your registry, and image.tag to its version" .Values.image.repository) -}}
{{- end -}}
{{- if and (regexMatch "^v?[12]\\.[0-9]+\\.[0-9]+$" (toString .Values.image.tag)) (hasPrefix "0." .Chart.AppVersion) -}}
{{- fail (printf "image.tag %v is a version of the Scality driver, and this chart installs s3csi %s: set image.tag to the tag of your s3csi image" .Values.image.tag .Chart.AppVersion) -}}
{{- end -}}
{{- if .Values.experimental -}}
{{- if not (hasKey .Values.experimental "podMounter") -}}
{{- fail "experimental belongs to the chart of AWS's driver: set mountpointPod.reserveHeadroom, mountpointPod.headroomImage and mountpointPod.headroomPodLabels in place of its reserveHeadroomForMountpointPods, headroomPodImage and headroomPodLabels, and remove it with --set experimental=null" -}}
{{- end -}}
{{- fail "experimental.podMounter belongs to version 1 of the Scality chart: set strategy=pod in place of true or strategy=systemd in place of false, and remove it with --set experimental=null" -}}
{{- end -}}
{{- if .Values.awsAccessSecret -}}
{{- fail "awsAccessSecret belongs to the chart of AWS's driver: set s3CredentialSecret.name, s3CredentialSecret.accessKeyId and s3CredentialSecret.secretAccessKey in place of its name, keyId and accessKey, and remove it with --set awsAccessSecret=null" -}}
{{- end -}}
{{- if .Values.node.mountpointInstallPath -}}
{{- fail "node.mountpointInstallPath belongs to version 1 of the Scality chart: set systemd.engineDirectory if you use strategy systemd, and remove it with --set node.mountpointInstallPath=null" -}}
{{- end -}}
{{- end -}}

{{- /* Checks that need the cluster; without access to one (helm template) they find nothing. */ -}}
{{- /* "true" if volumes in the specs of Pods are mounted, otherwise empty. Values of an older chart lack the key. */ -}}
{{- define "s3csi.inlineVolumes" -}}
{{- if dig "enabled" false (default dict .Values.inlineVolumes) }}true{{ end -}}
{{- end -}}

{{- /* Not HTTPS_PROXY and its like: those would also apply to the API server. */ -}}
{{- define "s3csi.proxyEnvironment" -}}
{{- $proxy := default dict .Values.proxy -}}
{{- if or $proxy.httpsProxy $proxy.httpProxy }}
{{- with $proxy.httpsProxy }}
- name: S3_HTTPS_PROXY
  value: {{ . | quote }}
{{- end }}
{{- with $proxy.httpProxy }}
- name: S3_HTTP_PROXY
  value: {{ . | quote }}
{{- end }}
{{- with $proxy.noProxy }}
- name: S3_NO_PROXY
  value: {{ . | quote }}
{{- end }}
{{- end }}
{{- end -}}

{{- define "s3csi.checkCluster" -}}
{{- $driver := .Values.driverName -}}
{{- if kindIs "invalid" (dig "csiProvisioner" "enabled" nil (default dict .Values.sidecars)) -}}
{{- $used := list -}}
{{- range (lookup "storage.k8s.io/v1" "StorageClass" "" "").items -}}
{{- if eq .provisioner $driver -}}{{- $used = append $used (printf "StorageClass %s" .metadata.name) -}}{{- end -}}
{{- end -}}
{{- range (lookup "v1" "PersistentVolume" "" "").items -}}
{{- if eq (dig "annotations" "pv.kubernetes.io/provisioned-by" "" .metadata) $driver -}}{{- $used = append $used (printf "PersistentVolume %s" .metadata.name) -}}{{- end -}}
{{- end -}}
{{- if $used -}}
{{- fail (printf "this driver provisions volumes in this cluster (%s), but dynamic provisioning is not configured: set sidecars.csiProvisioner.enabled=true and sidecars.csiProvisioner.image.repository, or sidecars.csiProvisioner.enabled=false to turn it off" (join ", " (slice $used 0 (min 3 (len $used) | int)))) -}}
{{- end -}}
{{- end -}}
{{- $csidriver := lookup "storage.k8s.io/v1" "CSIDriver" "" $driver -}}
{{- if $csidriver -}}
{{- $modes := default (list "Persistent") $csidriver.spec.volumeLifecycleModes -}}
{{- if ne (has "Ephemeral" $modes) (not (empty (include "s3csi.inlineVolumes" .))) -}}
{{- fail (printf "inlineVolumes.enabled was changed, and Kubernetes does not let the CSIDriver object change accordingly: delete it first (kubectl delete csidriver %s) and run this command again; mounted volumes are not affected" $driver) -}}
{{- end -}}
{{- end -}}
{{- $accounts := list (list "node" .Values.node.serviceAccount) -}}
{{- if include "s3csi.hasController" . -}}{{- $accounts = append $accounts (list "controller" .Values.controller.serviceAccount) -}}{{- end -}}
{{- range $accounts -}}
{{- $account := index . 1 -}}
{{- if and (not $account.create) (lookup "v1" "Namespace" "" "kube-system") (not (lookup "v1" "ServiceAccount" $.Release.Namespace $account.name)) -}}
{{- fail (printf "%s.serviceAccount.create is false, but service account %s/%s does not exist: create it and its roles, or set %s.serviceAccount.create=true" (index . 0) $.Release.Namespace $account.name (index . 0)) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- /* "true" if an object in the cluster belongs to this release, otherwise empty. Takes a list: root, object. */ -}}
{{- define "s3csi.isOwned" -}}
{{- $root := index . 0 -}}
{{- $annotations := dig "metadata" "annotations" dict (index . 1) -}}
{{- if and (eq (dig "meta.helm.sh/release-name" "" $annotations) $root.Release.Name) (eq (dig "meta.helm.sh/release-namespace" "" $annotations) $root.Release.Namespace) }}true{{ end -}}
{{- end -}}

{{- /* "true" while this release replaces the Scality chart, otherwise empty. */ -}}
{{- define "s3csi.takesOver" -}}
{{- $node := lookup "apps/v1" "DaemonSet" .Release.Namespace "s3-csi-node" -}}
{{- if regexMatch "^(scality|aws)-mountpoint-s3-csi-driver-" (dig "metadata" "labels" "helm.sh/chart" "" $node) }}true{{ end -}}
{{- end -}}

{{/* Arguments of every mounter, as a YAML list. */}}
{{- define "s3csi.supervisorArguments" -}}
- --standby={{ ternary "on" "off" .Values.supervisor.standby }}
- --longest-outage={{ .Values.supervisor.longestOutage }}
- --frozen-after={{ .Values.supervisor.frozenAfter }}
- --stuck-after={{ .Values.supervisor.stuckAfter }}
- --drain-time={{ .Values.supervisor.drainTime }}
{{- end }}

{{/* A duration such as 1m30s in whole seconds. */}}
{{- define "s3csi.seconds" -}}
{{- $begin := toDate "2006" "2000" -}}
{{- sub ($begin | mustDateModify . | unixEpoch | int64) ($begin | unixEpoch | int64) -}}
{{- end }}
