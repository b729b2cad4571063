# s3csi: the menu. `make` alone prints it.
#
# One rule keeps builds short: cargo is always called for the whole workspace and the release profile. With `-p` it would
# choose other features for shared dependencies and compile them, and the C code of the engine, a second time.

SHELL := /bin/bash
.DEFAULT_GOAL := help
# Targets are steps, and each step already uses all cores.
.NOTPARALLEL:

CACHE := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/s3csi
export CARGO_TARGET_DIR ?= $(CACHE)/target
export CARGO_BUILD_JOBS ?= $(shell nproc)
export CARGO_TERM_COLOR ?= $(if $(MAKE_TERMOUT),always,auto)
export S3CSI_LOG_DIR ?= $(CACHE)/logs
export S3CSI_TOOLS ?= $(CACHE)/tools/bin

CARGO_FLAGS := --release --locked --workspace
# Asked only when needed: `make setup` must be able to say that Rust is missing.
BINARIES = $(CARGO_TARGET_DIR)/$(shell rustc --print host-tuple)/release
CARGO_TEST := cargo test $(CARGO_FLAGS)
ISOLATED := scripts/isolated.sh

# Which test program belongs to which stage. The architecture test fails when one of them is in no list.
UNIT_TESTS := generated mounter mountpoint_pod
NODE_TESTS := fixture host node
ENGINE_TESTS := conformance resume
SANITY_TESTS := sanity
SYSTEMD_TESTS := systemd
CONTROLLER_TESTS := controller
CLUSTER_TESTS := cluster
# They mostly wait for Pods, all in one cluster.
CLUSTER_TEST_THREADS := 6
CHART_TESTS := chart
PROVISION_TESTS := provision
POD_TESTS := pod
ARCHITECTURE_TESTS := architecture
tests = $(addprefix --test ,$(1))
# Without a name cargo would run everything, so an empty list is an error and not an empty stage.
isolated_tests = $(if $(1),$(ISOLATED) $(CARGO_TEST) $(call tests,$(1)),@echo '$@: no test program is listed in the Makefile' >&2; exit 1)

# A trial must not overwrite the figures of a real run.
BENCHMARKS := $(if $(findstring --quick,$(ARGS)),$(CACHE)/benchmarks-quick.md,docs/benchmarks.md)

IMAGE := $(CACHE)/image/s3csi.tar
CLUSTER := $(CACHE)/cluster
NODES ?= 2

# Inside `make test` the stage "build" has already done this.
BUILT := $(if $(IN_SUITE),,build)

##@ Start here
demo: setup build ## Tour of the product on this machine, no cluster needed (ARGS=--keep leaves it running)
	@$(ISOLATED) $(BINARIES)/s3csi-testbed demo $(ARGS)

test: ## Everything CI runs, with a table of stage times at the end
	@scripts/suite.sh setup format tools kube build test-architecture test-unit test-node test-pod test-systemd test-sanity test-engine test-controller test-provision test-chart test-cluster test-logs test-leftovers lint

##@ Build
setup: ## Install the Debian packages that are missing
	@scripts/setup.sh

tools: ## Build the pinned Go programs that tests run against (versitygw, csi-sanity, helm, csi-provisioner)
	@scripts/tools.sh

kube: ## Build the Kubernetes that tests and `make cluster` run, once (eight minutes on two cores)
	@scripts/kube.sh

build: ## Compile all programs and tests, once, statically linked
	cargo build $(CARGO_FLAGS) --all-targets

update-generated: ## Write the generated files anew (CSI code, the definition of attachments, Mountpoint Pods)
	UPDATE=1 $(CARGO_TEST) --test generated --test mountpoint_pod

##@ Test one thing
test-unit: $(BUILT) ## Rules and protocols; needs no root
	$(CARGO_TEST) --lib --bins $(call tests,$(UNIT_TESTS))

test-architecture: $(BUILT) ## Who may depend on what and call what; licences
	$(CARGO_TEST) $(call tests,$(ARCHITECTURE_TESTS))

test-node: $(BUILT) ## Host and node plugin with real mounts; needs root
	$(call isolated_tests,$(NODE_TESTS))

test-engine: $(BUILT) $(if $(IN_SUITE),,tools) ## Conformance of the engine against two S3 servers; needs root
	$(call isolated_tests,$(ENGINE_TESTS))

test-sanity: $(BUILT) $(if $(IN_SUITE),,tools) ## csi-sanity against the node plugin's socket; needs root
	$(call isolated_tests,$(SANITY_TESTS))

test-systemd: $(BUILT) ## Strategy systemd, each test beside a real systemd of its own; needs root
	$(CARGO_TEST) $(call tests,$(SYSTEMD_TESTS))

# The test program, its logs and the checkout are visible in the other root at the same paths.
test-systemd-257: $(BUILT) ## The same beside the systemd of Debian 13, in a root of its packages; needs root
	@scripts/systemd-root.sh
	@mkdir -p $(S3CSI_LOG_DIR)
	SYSTEMD_ROOT=$(CACHE)/systemd-257 SYSTEMD_SHARE="$(CARGO_TARGET_DIR) $(S3CSI_LOG_DIR)" \
	  $(CARGO_TEST) $(call tests,$(SYSTEMD_TESTS))

test-cluster: $(BUILT) $(if $(IN_SUITE),,tools kube) ## The image, and the driver in a real cluster: kubelet, containerd, Pods; needs root
	$(call isolated_tests,$(CLUSTER_TESTS)) -- --test-threads $(CLUSTER_TEST_THREADS)

test-controller: $(BUILT) $(if $(IN_SUITE),,tools kube) ## The controller of strategy pod beside a real API server
	$(CARGO_TEST) $(call tests,$(CONTROLLER_TESTS))

test-provision: $(BUILT) $(if $(IN_SUITE),,tools) ## Volumes on demand against two S3 servers; needs root
	$(call isolated_tests,$(PROVISION_TESTS))

test-pod: $(BUILT) $(if $(IN_SUITE),,tools kube) ## Strategy pod on one node, beside a real API server; needs root
	$(call isolated_tests,$(POD_TESTS))

test-chart: $(BUILT) $(if $(IN_SUITE),,tools kube) ## The Helm chart: every value, the arguments it passes, installing and upgrading it
	$(CARGO_TEST) $(call tests,$(CHART_TESTS))

test-logs: ## No secret value is in any log of the last `make test`
	@scripts/logs.sh

test-leftovers: ## Nothing of the last `make test` still runs, is mounted or lies around
	@scripts/leftovers.sh check

lint: format ## Format, clippy (pedantic), shellcheck
	shellcheck --external-sources .ci/run scripts/*.sh scripts/cluster/*.sh
	cargo clippy $(CARGO_FLAGS) --all-targets -- --deny warnings

format: ## Is every Rust file formatted? (cargo fmt repairs it)
	cargo fmt --all --check

soak: $(BUILT) ## The stress of the engine's successors with a hundred kills; needs root
	S3CSI_SOAK_KILLS=100 $(ISOLATED) $(CARGO_TEST) --test resume stress -- --nocapture

##@ Measure and ship
bench: setup tools kube build ## Publish latency, controller with 5 000 workloads, data path beside s3fs and rclone, pauses of dying engines, to docs/benchmarks.md (ARGS=--quick tries it out)
	@scripts/peers.sh
	@$(ISOLATED) $(BINARIES)/s3csi-testbed bench publish --output $(BENCHMARKS) $(ARGS)
	@$(ISOLATED) $(BINARIES)/s3csi-testbed bench pod --output $(BENCHMARKS) $(ARGS)
	@$(BINARIES)/s3csi-testbed bench controller --output $(BENCHMARKS) $(ARGS)
	@$(ISOLATED) $(BINARIES)/s3csi-testbed bench data --output $(BENCHMARKS) $(ARGS)
	@scripts/with-systemd.sh $(BINARIES)/s3csi-testbed bench systemd --output $(BENCHMARKS) $(ARGS)
	@$(ISOLATED) $(BINARIES)/s3csi-testbed bench resume --output $(BENCHMARKS) $(ARGS)

image: $(BUILT) ## The container image, as an OCI archive (loads into containerd, skopeo, podman)
	@scripts/image.sh $(BINARIES) $(IMAGE) $(IMAGE_NAME)

cluster: IMAGE_NAME := localhost/s3csi:test
cluster: setup tools kube image ## A throw-away cluster on this machine with the driver installed (NODES=2), until `make cluster-down`; needs root
	@scripts/cluster.sh up $(CLUSTER) $(NODES)
	@scripts/cluster.sh load $(CLUSTER) $(IMAGE)
	@scripts/cluster.sh install $(CLUSTER)
	@mkdir -p $(CLUSTER)/s3/buckets/my-bucket
	@echo 'Use it:            $(CLUSTER)/kubectl get pods --all-namespaces'
	@echo 'Your first volume: $(CLUSTER)/kubectl apply -f docs/examples/static-volume.yaml'

cluster-down: ## End that cluster
	@scripts/cluster.sh down $(CLUSTER)

##@ House
clean: ## Remove what was compiled and logged (the tools stay; clean-tools removes them)
	cargo clean
	rm -rf -- $(CACHE)/logs $(CACHE)/image

clean-tools: ## Remove the Go programs, Kubernetes, the benchmark's peers and the other systemd
	rm -rf -- $(CACHE)/tools $(CACHE)/peers $(CACHE)/systemd-257

help: ## This list
	@awk 'BEGIN { FS = ":.*## " } \
	  /^##@ / { printf "\n%s\n", substr($$0, 5) } \
	  /^[a-z0-9-]+:.*## / { printf "  make %-18s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))
	@echo

.PHONY: $(shell awk -F : '/^[a-z0-9-]+:.*\#\# / { print $$1 }' $(firstword $(MAKEFILE_LIST)))
