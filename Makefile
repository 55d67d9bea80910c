# Everything that a person or a CI types. Needs Python 3.11 to 3.13, make and git, no root.
# Another Python than the one found: make PYTHON=/path/to/python3.12 …

SHELL := /bin/bash
VENV := .venv
WORKERS ?= 2
PY := $(VENV)/bin/python
PYTEST = $(PY) -m pytest --quiet -n $(WORKERS) --dist worksteal
PYTHON ?= $(shell for python in python3 python3.13 python3.12 python3.11; do \
	"$$python" -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' \
	2>/dev/null && echo "$$python" && break; done)

# the developers' environment, if it exists, or if the demo is told to use a further package
DEMO_NEEDS := $(if $(filter --to% --through% --lake --http --ui,$(DEMO))$(wildcard $(VENV)/.installed),\
	$(VENV)/.installed,$(VENV)/.demo)

.DEFAULT_GOAL := help
.PHONY: help install demo demo-routing demo-dialog test check full changed crash stateful fuzz mutants soak model audit sbom kafka docs pages bench bench-peers airflow wheel clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

install: $(VENV)/.installed ## set up .venv with everything; the other targets do so too

demo: $(DEMO_NEEDS) ## send the flights of 2013, forward them with Spark, prove the result: make demo DEMO="--to redis"
	@$(VENV)/bin/saf demo $(DEMO)

demo-routing: $(DEMO_NEEDS) ## the demo with three stores: each flight goes to the store of its airport
	@$(VENV)/bin/saf demo --routing $(DEMO)

demo-dialog: $(DEMO_NEEDS) ## a shop and a warehouse talk: in parts, refused, too late, 20 MB
	@$(VENV)/bin/saf demo --dialog $(DEMO)

test: $(VENV)/.installed ## show in five to ten minutes that the product works; chosen tests: make test T="tests/unit -k shard"
	$(if $(T),$(PY) -m pytest $(T),SAF_TESTS=test $(PYTEST))

changed: $(VENV)/.installed ## run the tests of files that differ from a revision: make changed SINCE=main~2
	@$(PY) -m tests.changed $(if $(SINCE),--since $(SINCE)) -- -n $(WORKERS)

static: $(VENV)/.installed ## format, lint and types, without a test
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	$(PY) -m bandit --quiet --configfile pyproject.toml --severity-level medium \
	--recursive saf saf_demo migrations jobs airflow/saf_airflow packaging
	$(PY) -m mypy

check: WORKERS := 3
check: static ## the gate, some 35 minutes on two cores: format, lint, types and every promise; warnings are errors
	SAF_TESTS=check $(PYTEST) --durations 25

full: $(VENV)/.installed ## everything, before a release, recorded in tests/full.md; some suites: make full SUITES="model crash"; after a fix: make full FAILED=1
	@$(PY) -m tests.full $(if $(FAILED),--failed) $(SUITES)

audit: $(VENV)/.installed ## known vulnerabilities of the installed packages; needs the network
	@$(PY) -m tests.audit

sbom: $(VENV)/.installed ## build/sbom.cdx.json: the packages of saf and its extras, as CycloneDX
	@$(PY) -m tests.sbom build/sbom.cdx.json

kafka: ## the jars of a Kafka broker, by Maven, once: for its tests, and for make demo DEMO="--to kafka"
	mvn --quiet --batch-mode --file tests/kafka.pom.xml dependency:copy-dependencies \
	-DincludeScope=runtime -DoutputDirectory="$${SAF_CACHE:-$${XDG_CACHE_HOME:-$$HOME/.cache}/saf}/kafka"

docs: $(VENV)/.installed ## the documentation as a site, in build/site; opens from the file system
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs --quiet build

pages: $(VENV)/.installed ## regenerate the reference pages from code, models and catalog, and what senders run
	for page in cli settings python schema metrics guarantees; do $(PY) -m tests.$${page}_page; done
	$(PY) -m tests.recorded_senders

bench: $(VENV)/.installed ## the benchmarks, under 10 minutes; some of them: make bench PARTS="drain brokers"
	$(PY) -m benchmarks.bench $(PARTS)

bench-peers: $(VENV)/.installed ## the same work by other systems; needs the network once
	$(PY) -m benchmarks.peers

crash: $(VENV)/.installed ## rounds of faults, checked: make crash ROUNDS=20 SEED=7, SECONDS=600, TO=redis, nats, kafka, rabbitmq, rabbitmq_stream, delta, iceberg, http, transforms or stream, FROM=redis, nats, kafka, rabbitmq or rabbitmq_stream; SEED=7 SHRINK=12 reduces a finding
	@$(PY) -m tests.crash $(if $(ROUNDS),--rounds $(ROUNDS)) $(if $(SEED),--seed $(SEED)) \
	$(if $(SECONDS),--seconds $(SECONDS)) $(if $(TO),--to $(TO)) \
	$(if $(FROM),--from $(FROM)) $(if $(SHRINK),--shrink --round $(SHRINK))

stateful: $(VENV)/.installed ## search for steps that lose a message: make stateful SECONDS=600 SEED=7
	@$(PY) -m tests.stateful $(if $(SECONDS),--seconds $(SECONDS)) $(if $(SEED),--seed $(SEED)) \
	$(if $(ONLY),--only $(ONLY))

fuzz: $(VENV)/.installed ## feed foreign input to its readers, each for this time: make fuzz SECONDS=600 ONLY=webhook; needs the network once
	@$(PY) packaging/install.py --editable '.[fuzz]'
	@$(PY) -m tests.fuzz $(if $(SECONDS),--seconds $(SECONDS)) $(if $(ONLY),--only $(ONLY))

mutants: $(VENV)/.installed ## plant bugs, which tests must catch; continues an interrupted run: make mutants SECONDS=600, SAMPLE=10 SEED=7, K=cursor, JOBS=2; GENERATED=1500 SEED=7: as many by a machine; SURVIVED=1: those of survived.toml; TESTS="unit contract": caught by these
	@$(PY) -m tests.mutants $(if $(SAMPLE),--sample $(SAMPLE)) $(if $(SEED),--seed $(SEED)) \
	$(if $(K),-k "$(K)") $(if $(SECONDS),--seconds $(SECONDS)) $(if $(JOBS),--jobs $(JOBS)) \
	$(if $(GENERATED),--generated $(GENERATED)) $(if $(SURVIVED),--survived) $(if $(TESTS),--tests "$(TESTS)")

soak: $(VENV)/.installed ## the whole system at 500 messages a second, in pieces: make soak HOURS=8 SECONDS=3600 HINDER=300
	@$(PY) -m tests.soak $(if $(HOURS),--hours $(HOURS)) $(if $(SECONDS),--seconds $(SECONDS)) \
	$(if $(HINDER),--hinder-seconds $(HINDER))

model: $(VENV)/.installed ## all states of the protocol's models; some 6 minutes; needs spin and gcc: make model K=kafka JOBS=2
	@$(PY) -m tests.models $(if $(K),-k "$(K)") $(if $(JOBS),--jobs $(JOBS))

airflow: $(VENV)/.installed build/airflow/.installed ## saf-airflow, tested with a real Airflow; some 10 minutes; needs the network once
	cd airflow && AIRFLOW_HOME=$(CURDIR)/build/airflow/home ../build/airflow/bin/python -m pytest $(T)

# an environment of its own: neither of the two is installed where the other one is
build/airflow/.installed: airflow/pyproject.toml
	$(PYTHON) -m venv build/airflow
	build/airflow/bin/python packaging/install.py --editable './airflow[openlineage]' pytest pytest-timeout
	@touch $@

wheel: ## dist/saf_outbox-….whl; needs no more than the package "build", in build/venv
	@[ -n "$(PYTHON)" ] || { echo "saf needs Python 3.11 to 3.13 with venv" >&2; exit 2; }
	@[ -x build/venv/bin/pyproject-build ] || { $(PYTHON) -m venv build/venv && \
	build/venv/bin/python packaging/install.py build; }
	build/venv/bin/python -m build --wheel --outdir dist .

clean: ## remove the results of make; .saf holds the demo's databases
	rm -rf $(VENV) .saf build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis spark-warehouse
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# One environment, with everything that developers need or only with what the demo needs.
$(VENV)/.installed: pyproject.toml | $(VENV)/bin/python
	@echo "installing into $(VENV) for developers (once; some 700 MB, a few minutes)"
	@$(PY) packaging/install.py --editable '.[dev]'
	@touch $@

# Without bytecode, which Python writes for the modules that it imports. Spark comes as sources: 400 MB
# of jars, which pip puts into a wheel and takes out again; it need not compress them.
$(VENV)/.demo: pyproject.toml | $(VENV)/bin/python
	@echo "installing into $(VENV) for the demo (once; some 500 MB, about a minute)"
	@$(PY) packaging/install.py --no-compile --editable '.[demo]' \
	pyspark --config-settings=--build-option=--compression=stored
	@touch $@

$(VENV)/bin/python:
	@[ -n "$(PYTHON)" ] || { echo "saf needs Python 3.11 to 3.13 with venv; python3 here is \
	$$(python3 --version 2>&1). Install one (Debian: apt install python3 python3-venv), or name it: \
	make PYTHON=/path/to/python3.12" >&2; exit 2; }
	@echo "creating $(VENV)"
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 2; }
