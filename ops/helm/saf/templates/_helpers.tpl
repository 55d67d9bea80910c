{{/* Name of a component's objects: (dict "root" $ "component" "ui") */}}
{{- define "saf.name" -}}
{{ printf "%s-%s" .root.Release.Name .component | trunc 52 | trimSuffix "-" }}
{{- end }}

{{- define "saf.selector" -}}
app.kubernetes.io/name: saf
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{- define "saf.labels" -}}
{{ include "saf.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version }}
{{- end }}

{{- define "saf.image" -}}
image: {{ printf "%s:%s" .root.Values.image.repository (.root.Values.image.tag | default .root.Chart.AppVersion) }}
imagePullPolicy: {{ .root.Values.image.pullPolicy }}
{{- end }}

{{/* Of each pod: nobody in particular, and no token of the API server */}}
{{- define "saf.pod" -}}
automountServiceAccountToken: false
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  seccompProfile: {type: RuntimeDefault}
{{- with .root.Values.imagePullSecrets }}
imagePullSecrets: {{ toJson . }}
{{- end }}
{{- with .root.Values.nodeSelector }}
nodeSelector: {{ toJson . }}
{{- end }}
{{- with .root.Values.tolerations }}
tolerations: {{ toJson . }}
{{- end }}
{{- end }}

{{/* Of each container: it can write to /tmp only, where Spark keeps its files */}}
{{- define "saf.container" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: ["ALL"]}
resources: {{ toJson .values.resources }}
{{- end }}

{{/* The container of a component, and its files; .arguments are those of the command saf */}}
{{- define "saf.run" -}}
containers:
  - name: {{ .component }}
    {{- include "saf.image" . | nindent 4 }}
    args: {{ toJson .arguments }}
    env:
      - {name: SAF_CONFIG, value: /etc/saf/saf.toml}
      - {name: HOME, value: /tmp}
    envFrom:
      - secretRef: {name: {{ .values.secret }}}
    {{- with .port }}
    ports:
      - {name: http, containerPort: {{ . }}}
    readinessProbe:
      tcpSocket: {port: http}
    {{- end }}
    {{- include "saf.container" . | nindent 4 }}
    volumeMounts:
      - {name: config, mountPath: /etc/saf, readOnly: true}
      - {name: tmp, mountPath: /tmp}
volumes:
  - name: config
    configMap:
      name: {{ include "saf.name" (dict "root" .root "component" "config") }}
      items:
        - {key: {{ .component }}.toml, path: saf.toml}
  - {name: tmp, emptyDir: {}}
{{- end }}

{{/* A Deployment of a component; without .replicas, KEDA decides about their number */}}
{{- define "saf.deployment" -}}
apiVersion: apps/v1
kind: Deployment
metadata:
  name: {{ include "saf.name" . }}
  labels: {{- include "saf.labels" . | nindent 4 }}
spec:
  {{- if hasKey . "replicas" }}
  replicas: {{ .replicas }}
  {{- end }}
  selector:
    matchLabels: {{- include "saf.selector" . | nindent 6 }}
  template:
    metadata:
      labels: {{- include "saf.labels" . | nindent 8 }}
      annotations:
        # a process reads its configuration once, when it starts
        checksum/config: {{ include "saf.toml" . | sha256sum }}
    spec:
      {{- include "saf.pod" . | nindent 6 }}
      # SIGTERM finishes the chunk or the requests in hand
      terminationGracePeriodSeconds: 60
      {{- include "saf.run" . | nindent 6 }}
{{- end }}

{{- define "saf.service" -}}
apiVersion: v1
kind: Service
metadata:
  name: {{ include "saf.name" . }}
  labels: {{- include "saf.labels" . | nindent 4 }}
spec:
  selector: {{- include "saf.selector" . | nindent 4 }}
  ports:
    - {name: http, port: {{ .port }}, targetPort: http}
{{- end }}

{{/* The saf.toml of a component */}}
{{- define "saf.toml" -}}
{{- $toml := printf "%s\n%s" (trim .root.Values.config) .values.config | trim -}}
{{- $url := "://[^/@\\s\"]*:[^$@/\\s\"][^@/\\s\"]*@" -}}
{{- $setting := "(?i)\\b(password|token|operate_token|secret|client_secret|bearer)\\s*=\\s*[\"']?[^$\\s\"']" -}}
{{- if or (regexMatch $url $toml) (regexMatch $setting $toml) -}}
{{- fail (printf "config of %s has a secret in it: write ${NAME} instead, a key of the Secret %s" .component .values.secret) -}}
{{- end -}}
{{ $toml }}
{{- end }}

{{/* URL at which KEDA asks the exporter */}}
{{- define "saf.figures" -}}
{{- if not .Values.exporter.enabled -}}
{{- fail "autoscaling needs figures: set exporter.enabled, or autoscaling.prometheus" -}}
{{- end -}}
http://{{ include "saf.name" (dict "root" . "component" "exporter") }}.{{ .Release.Namespace }}:{{ .Values.exporter.port }}/metrics
{{- end }}

{{/* A ScaledObject of a component; .triggers is its YAML */}}
{{- define "saf.scaled" -}}
apiVersion: keda.sh/v1alpha1
kind: ScaledObject
metadata:
  name: {{ include "saf.name" . }}
  labels: {{- include "saf.labels" . | nindent 4 }}
spec:
  scaleTargetRef:
    name: {{ include "saf.name" . }}
  minReplicaCount: {{ .values.autoscaling.minReplicas }}
  maxReplicaCount: {{ .values.autoscaling.maxReplicas }}
  # while the figures are missing, one replica works
  fallback: {failureThreshold: 3, replicas: 1}
  triggers:
{{- .triggers | nindent 4 }}
{{- end }}
