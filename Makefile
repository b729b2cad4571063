# All targets of s3csi; `make` without arguments prints them.
#
# One rule keeps builds short: cargo is always called for the whole workspace and the release profile. With `-p` it would
# select other features for shared dependencies and compile them, and the C code of the engine, a second time.

SHELL := /bin/bash
.DEFAULT_GOAL := help
# Targets run one after the other: each already uses all cores.
.NOTPARALLEL:

CACHE := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/s3csi
export CARGO_TARGET_DIR ?= $(CACHE)/target
export CARGO_BUILD_JOBS ?= $(shell nproc)
export CARGO_TERM_COLOR ?= $(if $(MAKE_TERMOUT),always,auto)
export S3CSI_LOG_DIR ?= $(CACHE)/logs
export S3CSI_TOOLS ?= $(CACHE)/tools/bin

CARGO_FLAGS := --release --locked --workspace
# Expanded lazily: `make setup` must be able to report that Rust is missing.
BINARIES = $(CARGO_TARGET_DIR)/$(shell rustc --print host-tuple)/release
CARGO_TEST := cargo test $(CARGO_FLAGS)
PROGRAMS := s3csi s3csi-mounter mount-s3 s3csi-testbed
ISOLATED := scripts/isolated.sh

# The test programs of each stage. The architecture test fails when a test program is in no list.
UNIT_TESTS := generated mounter mountpoint_pod reference
NODE_TESTS := fixture host node
ENGINE_TESTS := conformance resume
SANITY_TESTS := sanity
SYSTEMD_TESTS := systemd
CONTROLLER_TESTS := controller
CLUSTER_TESTS := cluster
# These tests mostly wait for Pods, all in one cluster.
CLUSTER_TEST_THREADS := 6
# They wait for keys to be renewed, for minutes. `make test` does that with strategy pod only, `make test-cluster` with all.
LONG_IN_CLUSTER := identities_of_workloads_with_strategy_daemon identities_of_workloads_with_strategy_systemd
TAKEOVER_TESTS := takeover
CHART_TESTS := chart
PROVISION_TESTS := provision
POD_TESTS := pod
ARCHITECTURE_TESTS := architecture
tests = $(addprefix --test ,$(1))
# Without a name cargo would run all tests, so an empty list is an error.
isolated_tests = $(if $(1),$(ISOLATED) $(CARGO_TEST) $(call tests,$(1)),@echo '$@: the Makefile lists no test program' >&2; exit 1)

# A quick trial must not overwrite the results of a real run.
BENCHMARKS := $(if $(findstring --quick,$(ARGS)),$(CACHE)/benchmarks-quick.md,docs/benchmarks.md)

KILL_MATRIX := $(CACHE)/kill-matrix

# ARGS="--only TEXT" runs a part and keeps the other results.
COMPATIBILITY := $(CACHE)/compatibility

IMAGE := $(CACHE)/image/s3csi.tar
CLUSTER := $(CACHE)/cluster
NODES ?= 2

# Within `make test` the stage "build" has already run.
BUILT := $(if $(IN_SUITE),,build)

##@ Start here
demo: setup programs ## Tour of the product on this machine, without a cluster (ARGS=--keep leaves it running)
	@$(ISOLATED) $(BINARIES)/s3csi-testbed demo $(ARGS)

test: ## Everything CI runs, with a table of stage times at the end
	@scripts/suite.sh setup format tools kube build test-architecture test-unit test-node test-pod test-systemd test-systemd-257 test-sanity test-engine test-controller test-provision test-chart test-cluster test-takeover test-logs test-leftovers docs lint

##@ Build
setup: ## Install the Debian packages that are missing
	@scripts/setup.sh

tools: ## Build the pinned Go programs that tests use (versitygw, csi-sanity, helm, csi-provisioner, actionlint, an earlier driver)
	@scripts/tools.sh

kube: ## Build the Kubernetes for tests and `make cluster`, once (eight minutes on two cores)
	@scripts/kube.sh

build: ## Compile all programs and tests, statically linked
	cargo build $(CARGO_FLAGS) --all-targets

# The same features as `make build`, which therefore reuses everything that this compiles.
programs: ## Compile the programs only, not the tests
	@echo 'compiling $(PROGRAMS) (several minutes on a fresh machine)'
	cargo build $(CARGO_FLAGS) $(addprefix --bin ,$(PROGRAMS))

docs: ## Build the documentation site strictly; dead links and anchors fail (scripts/docs.sh serve: live preview)
	@scripts/docs.sh

update-generated: $(BUILT) ## Rewrite the generated files (CSI code, CRD, Mountpoint Pods, reference pages)
	UPDATE=1 $(CARGO_TEST) --test generated --test mountpoint_pod --test reference

##@ Test one thing
test-unit: $(BUILT) ## Rules and protocols, without root
	$(CARGO_TEST) --lib --bins $(call tests,$(UNIT_TESTS))

test-architecture: $(BUILT) ## Dependency and layering rules, licences, documents
	$(CARGO_TEST) $(call tests,$(ARCHITECTURE_TESTS))

test-node: $(BUILT) ## Host and node plugin with real mounts; needs root
	$(call isolated_tests,$(NODE_TESTS))

test-engine: $(BUILT) $(if $(IN_SUITE),,tools) ## Conformance of the engine against two S3 servers; needs root
	$(call isolated_tests,$(ENGINE_TESTS))

test-sanity: $(BUILT) $(if $(IN_SUITE),,tools) ## csi-sanity against the node plugin's socket; needs root
	$(call isolated_tests,$(SANITY_TESTS))

test-systemd: $(BUILT) ## Strategy systemd, each test with its own real systemd; needs root
	$(CARGO_TEST) $(call tests,$(SYSTEMD_TESTS))

# The test program, its logs and the checkout are visible in the other root directory at the same paths. The workloads of the kill
# matrix are Python programs, which that directory does not have.
test-systemd-257: $(BUILT) ## The same with systemd 257, in a root directory of Debian 13 packages; needs root
	@scripts/systemd-root.sh
	@mkdir -p $(S3CSI_LOG_DIR)
	SYSTEMD_ROOT=$(CACHE)/systemd-257 SYSTEMD_SHARE="$(CARGO_TARGET_DIR) $(S3CSI_LOG_DIR)" \
	  $(CARGO_TEST) $(call tests,$(SYSTEMD_TESTS)) -- --skip kill_matrix

test-cluster: $(BUILT) $(if $(IN_SUITE),,tools kube) ## The image and the driver in a real cluster: kubelet, containerd, Pods; needs root
	$(call isolated_tests,$(CLUSTER_TESTS)) -- --test-threads $(CLUSTER_TEST_THREADS) \
	  $(if $(IN_SUITE),$(addprefix --skip ,$(LONG_IN_CLUSTER)))

# The subset that `make test` runs; without a filter all of it.
TAKEOVER_FILTER := $(if $(IN_SUITE),units_of_version_1_serve_on)

test-takeover: $(BUILT) $(if $(IN_SUITE),,tools kube) ## Upgrades from an earlier driver in a real cluster, with running workloads; needs root
	$(call isolated_tests,$(TAKEOVER_TESTS)) $(TAKEOVER_FILTER) -- --test-threads 2

test-controller: $(BUILT) $(if $(IN_SUITE),,tools kube) ## The controller of strategy pod with a real API server
	$(CARGO_TEST) $(call tests,$(CONTROLLER_TESTS))

test-provision: $(BUILT) $(if $(IN_SUITE),,tools) ## Dynamic provisioning against two S3 servers; needs root
	$(call isolated_tests,$(PROVISION_TESTS))

test-pod: $(BUILT) $(if $(IN_SUITE),,tools kube) ## Strategy pod on one node with a real API server; needs root
	$(call isolated_tests,$(POD_TESTS))

test-chart: $(BUILT) $(if $(IN_SUITE),,tools kube) ## The Helm chart: every value, the arguments it passes, install and upgrade
	$(CARGO_TEST) $(call tests,$(CHART_TESTS))

test-logs: ## Search all logs of the last `make test` for secret values
	@scripts/logs.sh

test-leftovers: ## Check that the last `make test` left no process, mount or directory behind
	@scripts/leftovers.sh check

lint: format $(if $(IN_SUITE),,tools) ## Format, clippy (pedantic), shellcheck, actionlint
	shellcheck --external-sources .ci/run scripts/*.sh scripts/cluster/*.sh
	$(S3CSI_TOOLS)/actionlint
	cargo clippy $(CARGO_FLAGS) --all-targets -- --deny warnings

format: ## Check the format of all Rust files (cargo fmt repairs it)
	cargo fmt --all --check

# Names of property tests of parsers that read what a tenant, a Mountpoint Pod or a store wrote.
PARSER_PROPERTIES := never_panic never_half_understood as_it_is_written as_it_was_read forge_an_entry one_prefix different_prefixes \
  different_options_never_share positional rendering_is_stable blocked_option_survives add_a_line_to_the_profile fits_and_is_harmless \
  as_they_are_written as_they_were_written makes_the_parser_panic survives_the_kernels_escapes panic_or_shows_a_token corrupted_table

# Rows whose names begin so, such as ROWS='daemon/S3 server;pod/'; without it all. Their results replace those that the page has.
kill-matrix: $(BUILT) ## End each part of the driver under each workload (ROWS=…: some of them); writes docs/reliability-matrix.md; needs root
	rm -rf -- $(KILL_MATRIX)
	mkdir -p $(KILL_MATRIX)
	export S3CSI_KILL_MATRIX=$(KILL_MATRIX) S3CSI_KILL_MATRIX_ROWS="$(ROWS)" status=0; \
	  $(ISOLATED) $(CARGO_TEST) --no-fail-fast --test node --test pod kill_matrix -- --nocapture || status=1; \
	  $(CARGO_TEST) --test systemd kill_matrix -- --nocapture || status=1; \
	  $(BINARIES)/s3csi-testbed kill-matrix $(KILL_MATRIX) docs/reliability-matrix.md && exit $$status

compatibility: setup tools $(BUILT) ## Ordinary and larger programs, fio, stress-ng and pjdfstest, beside s3fs and rclone; writes docs/compatibility-programs.md; needs root (ARGS="--only TEXT": a part)
	@scripts/peers.sh
	@scripts/compatibility.sh
	@scripts/tools.sh pjdfstest
	@mkdir -p $(COMPATIBILITY)
	$(ISOLATED) $(BINARIES)/s3csi-testbed compatibility $(ARGS) $(COMPATIBILITY)/results.json docs/compatibility-programs.md

soak: $(BUILT) ## The kill matrix, the engine failover stress test with a hundred kills, a thousand publishes, a store that stalls for ten minutes, fsx for an hour, and a million cases of each parser's property tests; needs root
	S3CSI_SOAK_KILLS=100 $(ISOLATED) $(CARGO_TEST) --test resume stress -- --nocapture
	S3CSI_SOAK_MOVES=100 $(ISOLATED) $(CARGO_TEST) --test pod moves_leak
	S3CSI_SOAK_PUBLISHES=1000 $(ISOLATED) $(CARGO_TEST) --test node descriptors_and_memory_are_flat
	$(MAKE) --no-print-directory IN_SUITE=yes kill-matrix
	S3CSI_SOAK_STALL_SECONDS=600 $(ISOLATED) $(CARGO_TEST) --test cluster stalls -- --nocapture
	S3CSI_SOAK_TOKENS=yes $(ISOLATED) $(CARGO_TEST) --test cluster -- --test-threads 3 identity::
	S3CSI_FSX_SECONDS=3600 $(ISOLATED) $(CARGO_TEST) --test conformance fsx -- --nocapture
	S3CSI_FSX_SECONDS=1800 $(ISOLATED) $(CARGO_TEST) --test resume fsx -- --nocapture
	PROPTEST_CASES=$(or $(CASES),1000000) $(CARGO_TEST) --lib --bins -- $(PARSER_PROPERTIES)

##@ Measure and ship
bench: setup tools kube build ## Publish latency, controller scale, AWS's driver beside ours, data path against s3fs and rclone, failover; writes docs/benchmarks.md (ARGS=--quick: trial)
	@scripts/peers.sh
	@$(ISOLATED) $(BINARIES)/s3csi-bench publish --output $(BENCHMARKS) $(ARGS)
	@$(ISOLATED) $(BINARIES)/s3csi-bench pod --output $(BENCHMARKS) $(ARGS)
	@$(BINARIES)/s3csi-bench controller --output $(BENCHMARKS) $(ARGS)
	@$(ISOLATED) $(BINARIES)/s3csi-bench start --output $(BENCHMARKS) $(ARGS)
	@$(ISOLATED) $(BINARIES)/s3csi-bench drivers --strategy systemd --output $(BENCHMARKS) $(ARGS)
	@$(ISOLATED) $(BINARIES)/s3csi-bench drivers --strategy pod --output $(BENCHMARKS) $(ARGS)
	@$(ISOLATED) $(BINARIES)/s3csi-bench data --output $(BENCHMARKS) $(ARGS)
	@scripts/with-systemd.sh $(BINARIES)/s3csi-bench systemd --output $(BENCHMARKS) $(ARGS)
	@$(ISOLATED) $(BINARIES)/s3csi-bench resume --output $(BENCHMARKS) $(ARGS)

image: $(BUILT) ## Write the container image as an OCI archive (for containerd, skopeo, podman)
	@scripts/image.sh $(BINARIES) $(IMAGE) $(IMAGE_NAME)

cluster: IMAGE_NAME := localhost/s3csi:test
cluster: setup tools kube image ## Boot a disposable cluster on this machine with the driver installed (NODES=2); needs root
	@scripts/cluster.sh up $(CLUSTER) $(NODES)
	@scripts/cluster.sh load $(CLUSTER) $(IMAGE)
	@scripts/cluster.sh install $(CLUSTER)
	@mkdir -p $(CLUSTER)/s3/buckets/my-bucket
	@echo 'Use it:            $(CLUSTER)/kubectl get pods --all-namespaces'
	@echo 'Your first volume: $(CLUSTER)/kubectl apply -f docs/examples/static-volume.yaml'

cluster-down: ## Remove that cluster
	@scripts/cluster.sh down $(CLUSTER)

##@ Housekeeping
clean: ## Remove build output, logs and the site (clean-tools removes the tools)
	cargo clean
	rm -rf -- $(CACHE)/logs $(CACHE)/image $(CACHE)/site

clean-tools: ## Remove the Go programs, Kubernetes, benchmark peers, documentation tools and systemd 257
	rm -rf -- $(CACHE)/tools $(CACHE)/peers $(CACHE)/systemd-257 $(CACHE)/docs-*

help: ## Print this list
	@awk 'BEGIN { FS = ":.*## " } \
	  /^##@ / { printf "\n%s\n", substr($$0, 5) } \
	  /^[a-z0-9-]+:.*## / { printf "  make %-18s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))
	@echo

.PHONY: $(shell awk -F : '/^[a-z0-9-]+:.*\#\# / { print $$1 }' $(firstword $(MAKEFILE_LIST)))
