#!/usr/bin/env bash
# Installs the programs that only `make compatibility` runs: Debian packages, and Python packages in <cache>/s3csi/compatibility/python.
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=scripts/narrate.sh
source scripts/narrate.sh
# shellcheck source=scripts/packages.sh
source scripts/packages.sh

readonly ROOT=${XDG_CACHE_HOME:-$HOME/.cache}/s3csi/compatibility
readonly PYTHON_PACKAGES=(numpy==2.2.6 h5py==3.13.0 pyarrow==20.0.0)
readonly PACKAGES=(nano logrotate fio stress-ng postgresql)

ensure_python_packages() {
  local installed=$ROOT/python/installed
  if [[ -e $installed && $(<"$installed") == "${PYTHON_PACKAGES[*]}" ]]; then
    return
  fi
  rm -rf "$ROOT/python"
  mkdir -p "$ROOT"
  python3 -m venv "$ROOT/python" || fail "python3 cannot create a virtual environment; run: apt-get install python3-venv"
  narrated "fetching ${PYTHON_PACKAGES[*]}" \
    "$ROOT/python/bin/pip" install --quiet --disable-pip-version-check "${PYTHON_PACKAGES[@]}"
  echo "${PYTHON_PACKAGES[*]}" >"$installed"
}

ensure_packages "${PACKAGES[@]}"
# Other distributors' packages of Node.js contain npm.
command -v npm >/dev/null || ensure_packages nodejs npm
ensure_python_packages
