{{- /* Where the driver's own credentials come from. Values of an older chart lack the key. */ -}}
{{- define "s3csi.credentials" -}}
{{- toJson (default dict .Values.credentials) -}}
{{- end -}}

{{- /* The identity of workloads themselves. Values of an older chart lack the key. */ -}}
{{- define "s3csi.podIdentity" -}}
{{- toJson (default dict .Values.podIdentity) -}}
{{- end -}}

{{- /* Whether a security token service is asked whose certificate a private CA may have signed. */ -}}
{{- define "s3csi.trustsSts" -}}
{{- $source := dig "source" "secret" (include "s3csi.credentials" . | fromJson) -}}
{{- $podIdentity := include "s3csi.podIdentity" . | fromJson -}}
{{- if and .Values.tls.caCertConfigMap (or (eq $source "webIdentity") (dig "enabled" false $podIdentity)) -}}
true
{{- end -}}
{{- end -}}

{{- define "s3csi.podIdentityEnvironment" -}}
{{- $podIdentity := include "s3csi.podIdentity" . | fromJson -}}
{{- if dig "enabled" false $podIdentity }}
- name: POD_IDENTITY
  value: "on"
- name: POD_IDENTITY_AUDIENCE
  value: {{ $podIdentity.audience | quote }}
- name: POD_IDENTITY_SERVICE_ACCOUNT_ROLES
  value: {{ ternary "on" "off" $podIdentity.serviceAccountRoles | quote }}
{{- with $podIdentity.stsEndpointUrl }}
- name: POD_IDENTITY_STS_ENDPOINT_URL
  value: {{ . | quote }}
{{- end }}
{{- with $podIdentity.roleArn }}
- name: POD_IDENTITY_ROLE_ARN
  value: {{ . | quote }}
{{- end }}
{{- with $podIdentity.agent.url }}
- name: POD_IDENTITY_AGENT_URL
  value: {{ . | quote }}
- name: POD_IDENTITY_AGENT_AUDIENCE
  value: {{ $podIdentity.agent.audience | quote }}
{{- end }}
{{- end }}
{{- end -}}

{{- /* Kubelet sends a token of each workload's service account for each of these audiences. */ -}}
{{- define "s3csi.tokenRequests" -}}
{{- $podIdentity := include "s3csi.podIdentity" . | fromJson -}}
{{- if dig "enabled" false $podIdentity }}
{{- $audiences := list $podIdentity.audience }}
{{- if $podIdentity.agent.url }}
{{- $audiences = append $audiences $podIdentity.agent.audience | uniq }}
{{- end }}
tokenRequests:
{{- range $audiences }}
- audience: {{ . | quote }}
  expirationSeconds: {{ int64 $podIdentity.expirationSeconds }}
{{- end }}
{{- if semverCompare ">=1.35-0" .Capabilities.KubeVersion.Version }}
# Not among the attributes, which programs print.
serviceAccountTokenInSecrets: true
{{- end }}
{{- end }}
{{- end -}}

{{- define "s3csi.checkCredentials" -}}
{{- $credentials := include "s3csi.credentials" . | fromJson -}}
{{- if and (eq (dig "source" "secret" $credentials) "webIdentity") (not (dig "webIdentity" "roleArn" "" $credentials)) -}}
{{- fail "credentials.source webIdentity needs the ARN of a role: set credentials.webIdentity.roleArn" -}}
{{- end -}}
{{- if and (eq (dig "source" "secret" $credentials) "profile") (not (dig "profile" "secretName" "" $credentials)) -}}
{{- fail "credentials.source profile needs AWS's shared files: set credentials.profile.secretName to a Secret with the key credentials" -}}
{{- end -}}
{{- end -}}

{{- define "s3csi.credentialsEnvironment" -}}
{{- $credentials := include "s3csi.credentials" . | fromJson -}}
{{- $source := dig "source" "secret" $credentials -}}
- name: CREDENTIALS_SOURCE
  value: {{ kebabcase $source }}
{{- if has $source (list "secret" "profile") }}
- name: CREDENTIALS_DIRECTORY
  value: /etc/s3csi/credentials
{{- end }}
{{- if eq $source "profile" }}
- name: AWS_PROFILE
  value: {{ $credentials.profile.name | quote }}
{{- else if eq $source "instanceProfile" }}
- name: AWS_EC2_METADATA_SERVICE_ENDPOINT
  value: {{ $credentials.instanceProfile.metadataUrl | quote }}
{{- else if eq $source "webIdentity" }}
- name: AWS_ROLE_ARN
  value: {{ $credentials.webIdentity.roleArn | quote }}
- name: AWS_WEB_IDENTITY_TOKEN_FILE
  value: /etc/s3csi/credentials/token
{{- with $credentials.webIdentity.stsEndpointUrl }}
- name: AWS_ENDPOINT_URL_STS
  value: {{ . | quote }}
{{- end }}
{{- else if eq $source "container" }}
- name: AWS_CONTAINER_CREDENTIALS_FULL_URI
  value: {{ $credentials.container.url | quote }}
- name: AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE
  value: /etc/s3csi/credentials/token
{{- end }}
{{- if include "s3csi.trustsSts" . }}
- name: STS_CA_BUNDLE
  value: /etc/s3csi/certificates/ca-bundle.crt
{{- end }}
{{- end -}}

{{- define "s3csi.credentialsMounts" -}}
{{- $credentials := include "s3csi.credentials" . | fromJson -}}
{{- $source := dig "source" "secret" $credentials -}}
{{- if ne $source "instanceProfile" }}
- name: credentials
  mountPath: /etc/s3csi/credentials
  readOnly: true
{{- end }}
{{- if include "s3csi.trustsSts" . }}
- name: sts-certificates
  mountPath: /etc/s3csi/certificates
  readOnly: true
{{- end }}
{{- end -}}

{{- /* Files and not environment, so that changes need no restart. */ -}}
{{- define "s3csi.credentialsVolumes" -}}
{{- $credentials := include "s3csi.credentials" . | fromJson -}}
{{- $source := dig "source" "secret" $credentials -}}
{{- if eq $source "secret" }}
- name: credentials
  secret:
    secretName: {{ .Values.s3CredentialSecret.name }}
    # Volumes may bring their own keys; optional also covers the session token.
    optional: true
    items:
    - key: {{ .Values.s3CredentialSecret.accessKeyId }}
      path: access_key_id
    - key: {{ .Values.s3CredentialSecret.secretAccessKey }}
      path: secret_access_key
    - key: {{ .Values.s3CredentialSecret.sessionToken }}
      path: session_token
{{- else if eq $source "profile" }}
- name: credentials
  secret:
    secretName: {{ $credentials.profile.secretName }}
{{- else if has $source (list "webIdentity" "container") }}
- name: credentials
  projected:
    sources:
    - serviceAccountToken:
        path: token
        audience: {{ get (get $credentials $source) "audience" | quote }}
        expirationSeconds: 3600
{{- end }}
{{- if include "s3csi.trustsSts" . }}
- name: sts-certificates
  configMap:
    name: {{ .Values.tls.caCertConfigMap }}
{{- end }}
{{- end -}}
