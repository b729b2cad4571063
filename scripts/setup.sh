#!/usr/bin/env bash
# Prepares a Debian machine for building and testing s3csi: installs missing packages and checks the rest.
# Idempotent: when nothing is missing it changes nothing and returns immediately.
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=scripts/narrate.sh
source scripts/narrate.sh
# shellcheck source=scripts/packages.sh
source scripts/packages.sh

readonly PACKAGES=(
  build-essential pkg-config cmake # the AWS Common Runtime is C
  libclang-dev                     # its Rust bindings are generated from headers
  libfuse3-dev                     # brings libfuse3.a, which the engine links statically
  fuse3                            # fusermount3, for mounts by unprivileged users
  util-linux                       # unshare: every mounting test runs in its own mount namespace
  systemd                          # `make test-systemd` starts it in new namespaces
  containerd runc containernetworking-plugins # Pods in the test cluster
  iproute2 iptables                # its network; kubelet needs iptables
  busybox-static                   # the shell in its Pods
  ca-certificates                  # the S3 client refuses to start without any trust store
  git shellcheck                   # `make lint`
  python3 python3-venv             # `make docs`
  rsync sqlite3 zip unzip python3-pip attr vim-tiny xz-utils patch ed # ordinary programs that the engine's tests run
)

ensure_packages "${PACKAGES[@]}"
command -v cargo >/dev/null || fail "cargo is not installed; get Rust 1.95 or later from https://rustup.rs"
[[ -c /dev/fuse ]] || say "warning: /dev/fuse is missing, so mounts will fail; run: modprobe fuse"
