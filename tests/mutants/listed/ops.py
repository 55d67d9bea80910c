"""What is shipped beside the package: the chart, compose, units, the dashboard's metrics."""

from __future__ import annotations

from tests.mutants.mutant import Mutant, mutant

HELPERS = "ops/helm/saf/templates/_helpers.tpl"
SCALING = "ops/helm/saf/templates/scaling.yaml"
HELM = "integration/test_helm.py"

MUTANTS: list[Mutant] = [
    mutant(
        "a container may write to its image",
        HELPERS,
        "readOnlyRootFilesystem: true",
        "readOnlyRootFilesystem: false",
        f"{HELM}::test_no_pod_has_privileges_or_writes_to_its_image_and_secrets_are_only_named",
    ),
    mutant(
        "a password in the configuration becomes part of a ConfigMap",
        HELPERS,
        "{{- if or (regexMatch $url $toml) (regexMatch $setting $toml) -}}",
        "{{- if regexMatch $setting $toml -}}",
        f"{HELM}::test_a_secret_in_the_configuration_is_refused_and_not_repeated",
    ),
    mutant(
        "a forwarder is started by a figure that is absent while nothing waits",
        SCALING,
        'printf "saf_subscription_lag_seconds{',
        'printf "saf_oldest_pending_seconds{',
        f"{HELM}::test_keda_finds_each_figure_at_the_exporter_also_while_nothing_waits",
    ),
    mutant(
        "an upgrade of the chart undoes the number of replicas that KEDA has chosen",
        "ops/helm/saf/templates/forwarder.yaml",
        "{{- if not $values.autoscaling.enabled -}}",
        "{{- if true -}}",
        f"{HELM}::test_what_points_to_something_finds_it",
    ),
    mutant(
        "the forwarder of the compose file logs in as the owner",
        "docker/compose.yaml",
        "APP_DSN: postgresql://saf_forwarder:${FORWARDER_PASSWORD:-forwarder}@app/saf",
        "APP_DSN: postgresql://saf_owner:${APP_PASSWORD:-app}@app/saf",
        "integration/test_docker.py::test_only_migrations_log_in_as_the_owner",
    ),
    mutant(
        "a unit logs in as a role named saf by peer authentication",
        "jobs/saf-forward-loop.service",
        "User=saf_forwarder",
        "User=saf",
        "integration/test_jobs.py::"
        "test_the_services_user_may_be_a_role_by_peer_and_its_comment_grants_it",
    ),
]
